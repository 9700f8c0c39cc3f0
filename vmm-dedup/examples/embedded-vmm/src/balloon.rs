//! A virtio balloon on PCI, with free page reporting: of VIRTIO 1.2 (4.1, 5.5) what a driver needs that reaches all registers
//! through configuration space (VIRTIO_PCI_CAP_PCI_CFG) and polls, as the payload guest's does.

use crate::vm::Failure;
use std::ops::Range;
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_dedup::Discarder;

/// The only device of bus 0, and what tells that there is none.
const SLOT: u32 = 0;
const NOBODY: u32 = u32::MAX;
/// Virtio's vendor, and its balloon.
const ID: u32 = (0x1040 + 5) << 16 | 0x1af4;
const CLASS: u32 = 0xff00_0001;
/// In the register of the command: there are capabilities.
const CAPABILITIES: u32 = 1 << 20;

/// Capabilities, each at a multiple of 4: the common registers, the bells, the window through which all are reached.
const COMMON: u8 = 0x40;
const NOTIFY: u8 = 0x50;
const WINDOW: u8 = 0x64;
const DATA: u8 = WINDOW + 16;
/// In the BAR that is reached through the window only: where bells begin, and bytes from one to the next.
const BELLS: u32 = 0x1000;
const BELL: u32 = 4;

/// Features: free page reporting, of the first 32; VIRTIO_F_VERSION_1, of the second.
const FEATURES: [u32; 2] = [1 << 5, 1];
const QUEUES: u32 = 3;
const MAX_SIZE: u16 = 256;
const INFLATE: usize = 0;
const REPORT: usize = 2;
const PAGE: u64 = 4096;

/// All that a driver has set.
#[derive(Clone, Copy)]
pub(crate) struct Registers {
    /// Which register of which device is at the data port.
    address: u32,
    command: u32,
    /// BAR, offset and length.
    window: [u32; 3],
    features: u32,
    status: u32,
    queue: u32,
    queues: [QueueState; QUEUES as usize],
}

impl Registers {
    pub(crate) fn new() -> Self {
        let queue = QueueState {
            max_size: MAX_SIZE,
            size: MAX_SIZE,
            ..QueueState::default()
        };
        Self {
            address: 0,
            command: 0,
            window: [0; 3],
            features: 0,
            status: 0,
            queue: 0,
            queues: [queue; QUEUES as usize],
        }
    }
}

pub(crate) struct Balloon {
    pub(crate) registers: Registers,
    pub(crate) memory: GuestMemoryMmap<()>,
    pub(crate) discarder: Discarder,
}

impl Balloon {
    /// The guest chooses a register of configuration space.
    pub(crate) fn choose(&mut self, address: u32) {
        self.registers.address = address;
    }

    /// Which of this device's registers is chosen.
    fn register(&self) -> Option<u8> {
        let [register, slot, bus, _] = self.registers.address.to_le_bytes();
        (bus == 0 && u32::from(slot >> 3) == SLOT).then_some(register)
    }

    /// The guest reads it.
    pub(crate) fn read(&self) -> u32 {
        let capability = |kind: u32, len: u32, next: u8| kind << 24 | len << 16 | u32::from(next) << 8 | 9;
        match self.register() {
            None => NOBODY,
            Some(0x00) => ID,
            Some(0x04) => self.registers.command | CAPABILITIES,
            Some(0x08) => CLASS,
            Some(0x34) => COMMON.into(),
            Some(COMMON) => capability(1, 16, NOTIFY),
            Some(NOTIFY) => capability(2, 20, WINDOW),
            Some(0x58) => BELLS,
            Some(0x60) => BELL,
            Some(WINDOW) => capability(5, 20, 0),
            Some(DATA) => self.common(),
            Some(_) => 0,
        }
    }

    /// The guest writes it.
    pub(crate) fn write(&mut self, value: u32) {
        match self.register() {
            Some(0x04) => self.registers.command = value & 0xffff,
            Some(register @ 0x68..=0x70) => self.registers.window[usize::from(register - 0x68) / 4] = value,
            Some(DATA) => self.set_common(value),
            _ => {}
        }
    }

    fn queue(&mut self) -> Option<&mut QueueState> {
        self.registers.queues.get_mut(self.registers.queue as usize)
    }

    /// The common register at which the window stands.
    fn common(&self) -> u32 {
        let registers = &self.registers;
        let queue = registers.queues.get(registers.queue as usize).copied();
        match (registers.window[1], queue) {
            (4, _) => FEATURES.get(registers.features as usize).copied().unwrap_or(0),
            (18, _) => QUEUES,
            (20, _) => registers.status,
            (22, _) => registers.queue,
            (24, Some(queue)) => queue.size.into(),
            (28, Some(queue)) => queue.ready.into(),
            (30, _) => registers.queue,
            _ => 0,
        }
    }

    fn set_common(&mut self, value: u32) {
        let low = |address: &mut u64| *address = *address >> 32 << 32 | u64::from(value);
        let high = |address: &mut u64| *address = *address & 0xffff_ffff | u64::from(value) << 32;
        let offset = self.registers.window[1];
        match (offset, self.queue()) {
            (0, _) => self.registers.features = value,
            // Whatever the driver had set is gone, but for where it looks.
            (20, _) if value == 0 => {
                self.registers = Registers {
                    address: self.registers.address,
                    command: self.registers.command,
                    window: self.registers.window,
                    ..Registers::new()
                }
            }
            (20, _) => self.registers.status = value,
            (22, _) => self.registers.queue = value,
            (24, Some(queue)) => queue.size = u16::try_from(value).unwrap_or(0),
            (28, Some(queue)) => queue.ready = value == 1,
            (32, Some(queue)) => low(&mut queue.desc_table),
            (36, Some(queue)) => high(&mut queue.desc_table),
            (40, Some(queue)) => low(&mut queue.avail_ring),
            (44, Some(queue)) => high(&mut queue.avail_ring),
            (48, Some(queue)) => low(&mut queue.used_ring),
            (52, Some(queue)) => high(&mut queue.used_ring),
            (BELLS.., _) => {
                let nth = (offset - BELLS) / BELL;
                if let Err(failure) = self.serve(nth as usize) {
                    log::warn!("the balloon's queue {nth}: {failure}");
                }
            }
            _ => {}
        }
    }

    /// Takes what a queue has for the device. Its memory is the guest's, and says what the guest likes.
    fn serve(&mut self, nth: usize) -> Result<(), Failure> {
        let state = self
            .registers
            .queues
            .get_mut(nth)
            .ok_or("there is no such queue")?;
        let mut queue = Queue::try_from(*state)?;
        let mut served = Ok(());
        while let Some(mut chain) = queue.pop_descriptor_chain(&self.memory) {
            let head = chain.head_index();
            let freed = chain.try_for_each(|buffer| match nth {
                INFLATE => self.inflate(buffer.addr(), buffer.len()),
                REPORT => self.free(buffer.addr().raw_value(), buffer.len().into()),
                // What is deflated is the guest's again: it has but to use it.
                _ => Ok(()),
            });
            // A buffer that could not be used goes back as well: the driver waits for it, and it is not taken again.
            let used = queue.add_used(&self.memory, head, 0).map_err(Failure::from);
            served = served.and(freed).and(used);
        }
        self.registers.queues[nth] = queue.state();
        served
    }

    /// The guest gives pages to the host, of which there is a list: page numbers of 32 bits.
    fn inflate(&self, list: GuestAddress, bytes: u32) -> Result<(), Failure> {
        // Pages side by side are freed at once.
        let mut run: Range<u64> = 0..0;
        for nth in 0..u64::from(bytes / 4) {
            let place = list.checked_add(nth * 4).ok_or("the list has no end")?;
            let page = u64::from(u32::from_le(self.memory.read_obj(place)?)) * PAGE;
            if page != run.end {
                self.free(run.start, run.end - run.start)?;
                run.start = page;
            }
            run.end = page + PAGE;
        }
        self.free(run.start, run.end - run.start)
    }

    /// The guest does not need a range any more, and reads zeros there if it uses it all the same.
    #[allow(unsafe_code)] // frees guest memory
    fn free(&self, start: u64, len: u64) -> Result<(), Failure> {
        let len = usize::try_from(len)?;
        let slice = self.memory.get_slice(GuestAddress(start), len)?;
        // 8. In the place of madvise(MADV_DONTNEED), from any thread.
        // SAFETY: memory of the guest's, all of it, which the guest gave up.
        Ok(unsafe {
            self.discarder
                .discard(slice.ptr_guard_mut().as_ptr() as usize, len)
        }?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtio_queue::desc::{RawDescriptor, split::Descriptor};
    use virtio_queue::mock::MockSplitQueue;
    use vmm_dedup::{Options, Supervisor};

    #[test]
    fn a_range_that_is_no_memory_is_told_once_and_the_next_one_is_freed() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).expect("memory");
        let supervisor = Supervisor::spawn(Options::default()).expect("a supervisor");
        let (beyond, page) = (1 << 30, 8 * PAGE);
        memory.write_obj(7_u64, GuestAddress(page)).expect("a page");
        let driver = MockSplitQueue::new(&memory, 16);
        let range = |address| RawDescriptor::from(Descriptor::new(address, 4096, 0, 0));
        driver
            .add_desc_chains(&[range(beyond), range(page)], 0)
            .expect("two chains");
        let mut registers = Registers::new();
        registers.queues[REPORT] = driver.create_queue::<Queue>().expect("a queue").state();
        let mut balloon = Balloon {
            registers,
            memory: memory.clone(),
            discarder: supervisor.discarder(),
        };

        let told = balloon.serve(REPORT);
        let again = balloon.serve(REPORT);

        assert!(told.is_err());
        assert!(again.is_ok(), "{again:?}");
        assert_eq!(memory.read_obj::<u64>(GuestAddress(page)).expect("a word"), 0);
        assert_eq!(driver.used().idx().load(), 2);
    }
}
