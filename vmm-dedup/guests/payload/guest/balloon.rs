//! A driver for the virtio balloon: gives pages to the host, and takes them back. Source: VIRTIO 1.2, section 5.5.

use core::ptr::addr_of_mut;

use crate::machine::relax;
use crate::pci::{Device, common};

const BALLOON: u32 = 5;
const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
/// Of the first 32 features: free page reporting.
const REPORTING: u32 = 1 << 5;
/// Of the second 32: VIRTIO_F_VERSION_1.
const VERSION_1: u32 = 1;
const WRITABLE: u16 = 2;

/// Entries of a queue; one is in use at a time.
const SIZE: usize = 16;
const QUEUES: usize = 6;
/// Page numbers in one request.
const BATCH: usize = 256;
const INFLATE: usize = 0;
const DEFLATE: usize = 1;

#[repr(C, align(4096))]
struct Queue {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
    more_descriptors: [u64; 2 * (SIZE - 1)],
    available_flags: u16,
    available_index: u16,
    available: [u16; SIZE],
    used_flags: u32,
    used: [u64; SIZE],
    batch: [u32; BATCH],
}

static mut MEMORY: [Queue; QUEUES] = [const {
    Queue {
        address: 0,
        len: 0,
        flags: 0,
        next: 0,
        more_descriptors: [0; 2 * (SIZE - 1)],
        available_flags: 0,
        available_index: 0,
        available: [0; SIZE],
        used_flags: 0,
        used: [0; SIZE],
        batch: [0; BATCH],
    }
}; QUEUES];

/// The balloon, set up.
pub struct Balloon {
    device: Device,
    queues: usize,
    notify: [u32; QUEUES],
    /// Requests so far, by queue.
    requests: [u16; QUEUES],
    /// Whether free pages can be reported; the last queue is for that.
    pub reporting: bool,
}

impl Balloon {
    /// Sets the device up, if there is one.
    pub fn find() -> Option<Balloon> {
        let device = Device::find(BALLOON)?;
        device.set(common::DEVICE_STATUS, 0);
        device.set(common::DEVICE_STATUS, ACKNOWLEDGE | DRIVER);
        device.set(common::DEVICE_FEATURE_SELECT, 0);
        let features = device.get(common::DEVICE_FEATURE) & REPORTING;
        for (select, bits) in [features, VERSION_1].into_iter().enumerate() {
            device.set(common::DRIVER_FEATURE_SELECT, select as u32);
            device.set(common::DRIVER_FEATURE, bits);
        }
        device.set(common::DEVICE_STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        let queues = (device.get(common::NUM_QUEUES) as usize).min(QUEUES);
        let mut notify = [0; QUEUES];
        for (queue, offset) in notify[..queues].iter_mut().enumerate() {
            device.set(common::QUEUE_SELECT, queue as u32);
            device.set(common::QUEUE_SIZE, SIZE as u32);
            *offset = device.get(common::QUEUE_NOTIFY_OFF);
            // SAFETY: only the addresses are taken; the device has them from here on.
            let areas = unsafe {
                let queue = addr_of_mut!(MEMORY[queue]);
                queue.write_bytes(0, 1);
                [
                    addr_of_mut!((*queue).address) as u64,
                    addr_of_mut!((*queue).available_flags) as u64,
                    addr_of_mut!((*queue).used_flags) as u64,
                ]
            };
            for (field, address) in common::QUEUE_AREAS.into_iter().zip(areas) {
                device.set((field, 4), address as u32);
                device.set((field + 4, 4), (address >> 32) as u32);
            }
            device.set(common::QUEUE_ENABLE, 1);
        }
        device.set(
            common::DEVICE_STATUS,
            ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK,
        );
        Some(Balloon {
            device,
            queues,
            notify,
            requests: [0; QUEUES],
            reporting: features != 0,
        })
    }

    /// Gives pages, by address, to the host.
    pub fn inflate(&mut self, pages: impl Iterator<Item = u64>) {
        self.send_numbers(INFLATE, pages);
    }

    /// Takes them back.
    pub fn deflate(&mut self, pages: impl Iterator<Item = u64>) {
        self.send_numbers(DEFLATE, pages);
    }

    /// Tells the host that a range is free for now.
    pub fn report(&mut self, start: u64, bytes: u32) {
        self.send(self.queues - 1, start, bytes, WRITABLE);
    }

    fn send_numbers(&mut self, queue: usize, pages: impl Iterator<Item = u64>) {
        // SAFETY: the device reads the batch only between send() and its return.
        let batch = unsafe { addr_of_mut!(MEMORY[queue].batch) };
        let mut count = 0;
        let mut pages = pages.peekable();
        while let Some(page) = pages.next() {
            // SAFETY: count is below BATCH.
            unsafe { (*batch)[count] = (page / 4096) as u32 };
            count += 1;
            if count == BATCH || pages.peek().is_none() {
                self.send(queue, batch as u64, (count * 4) as u32, 0);
                count = 0;
            }
        }
    }

    /// Hands one buffer to the device and waits until it is done with it.
    fn send(&mut self, queue: usize, address: u64, len: u32, flags: u16) {
        let number = self.requests[queue];
        self.requests[queue] = number.wrapping_add(1);
        // SAFETY: the one descriptor is free, since the last request is done; volatile accesses in this order are all
        // that the device needs on x86.
        unsafe {
            let memory = addr_of_mut!(MEMORY[queue]);
            addr_of_mut!((*memory).address).write_volatile(address);
            addr_of_mut!((*memory).len).write_volatile(len);
            addr_of_mut!((*memory).flags).write_volatile(flags);
            addr_of_mut!((*memory).available[number as usize % SIZE]).write_volatile(0);
            addr_of_mut!((*memory).available_index).write_volatile(self.requests[queue]);
            self.device.notify(queue as u32, self.notify[queue]);
            // The upper half of the used ring's first word is its index.
            while (addr_of_mut!((*memory).used_flags).read_volatile() >> 16) as u16 == number {
                relax();
            }
        }
    }
}
