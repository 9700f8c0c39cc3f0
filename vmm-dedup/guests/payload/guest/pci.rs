//! A virtio device on PCI bus 0, all of it through configuration space: the window of VIRTIO_PCI_CAP_PCI_CFG reaches
//! every register without a mapping of the device's memory. Source: Virtual I/O Device (VIRTIO) 1.2, section 4.1.

use crate::machine::{read_port, write_port};

const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const VENDOR: u32 = 0x1af4;
const MODERN: u32 = 0x1040;
const CAPABILITIES: u8 = 0x34;
const VENDOR_CAPABILITY: u32 = 9;
/// Memory decoding and bus mastering.
const COMMAND: (u8, u32) = (4, 6);

/// Kinds of register blocks (cfg_type).
const COMMON: usize = 1;
const NOTIFY: usize = 2;
const WINDOW: usize = 5;

/// Where a block of registers lies.
#[derive(Clone, Copy)]
struct Block {
    bar: u32,
    offset: u32,
}

/// A device that was found.
pub struct Device {
    slot: u32,
    blocks: [Block; 6],
    multiplier: u32,
    window: u8,
}

/// Fields of the common block: offset and bytes.
pub mod common {
    #![allow(missing_docs)]
    pub const DEVICE_FEATURE_SELECT: (u32, u32) = (0, 4);
    pub const DEVICE_FEATURE: (u32, u32) = (4, 4);
    pub const DRIVER_FEATURE_SELECT: (u32, u32) = (8, 4);
    pub const DRIVER_FEATURE: (u32, u32) = (12, 4);
    pub const NUM_QUEUES: (u32, u32) = (18, 2);
    pub const DEVICE_STATUS: (u32, u32) = (20, 1);
    pub const QUEUE_SELECT: (u32, u32) = (22, 2);
    pub const QUEUE_SIZE: (u32, u32) = (24, 2);
    pub const QUEUE_ENABLE: (u32, u32) = (28, 2);
    pub const QUEUE_NOTIFY_OFF: (u32, u32) = (30, 2);
    /// Descriptors, driver and device areas; each has two halves.
    pub const QUEUE_AREAS: [u32; 3] = [32, 40, 48];
}

impl Device {
    /// Looks for a device of a virtio type.
    pub fn find(kind: u32) -> Option<Device> {
        let wanted = (MODERN + kind) << 16 | VENDOR;
        let slot = (0..32).find(|slot| read(*slot, 0) == wanted)?;
        let mut device = Device {
            slot,
            blocks: [Block { bar: 0, offset: 0 }; 6],
            multiplier: 0,
            window: 0,
        };
        let mut at = read(slot, CAPABILITIES) as u8;
        while at != 0 {
            let head = read(slot, at);
            let kind = (head >> 24) as usize;
            if head & 0xff == VENDOR_CAPABILITY && kind < device.blocks.len() {
                device.blocks[kind] = Block {
                    bar: read(slot, at + 4) & 0xff,
                    offset: read(slot, at + 8),
                };
                match kind {
                    NOTIFY => device.multiplier = read(slot, at + 16),
                    WINDOW => device.window = at,
                    _ => {}
                }
            }
            at = (head >> 8) as u8;
        }
        let (command, bits) = COMMAND;
        write(slot, command, read(slot, command) | bits);
        (device.window != 0).then_some(device)
    }

    /// Writes a field of the common block.
    pub fn set(&self, (offset, bytes): (u32, u32), value: u32) {
        self.aim(COMMON, offset, bytes);
        write(self.slot, self.window + 16, value);
    }

    /// Reads a field of the common block.
    pub fn get(&self, (offset, bytes): (u32, u32)) -> u32 {
        self.aim(COMMON, offset, bytes);
        let mask = u32::MAX >> (32 - 8 * bytes);
        read(self.slot, self.window + 16) & mask
    }

    /// Tells the device that a queue has something for it.
    pub fn notify(&self, queue: u32, offset: u32) {
        self.aim(NOTIFY, offset * self.multiplier, 2);
        write(self.slot, self.window + 16, queue);
    }

    fn aim(&self, block: usize, offset: u32, bytes: u32) {
        let block = self.blocks[block];
        write(self.slot, self.window + 4, block.bar);
        write(self.slot, self.window + 8, block.offset + offset);
        write(self.slot, self.window + 12, bytes);
    }
}

fn select(slot: u32, register: u8) {
    write_port(ADDRESS, 1 << 31 | slot << 11 | u32::from(register & 0xfc));
}

fn read(slot: u32, register: u8) -> u32 {
    select(slot, register);
    read_port(DATA)
}

fn write(slot: u32, register: u8, value: u32) {
    select(slot, register);
    write_port(DATA, value);
}
