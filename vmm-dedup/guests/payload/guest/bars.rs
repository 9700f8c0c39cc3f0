//! A PCI device on bus 0 that is driven through its BARs and interrupts by MSI-X.

use crate::machine::{DEVICE_VECTOR, read_port, write_port};

const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;

const COMMAND: u32 = 0x04;
const COMMAND_MEMORY_AND_MASTER: u32 = 6;
const STATUS_CAPABILITIES: u32 = 1 << 20;
const BAR0: u32 = 0x10;
const CAPABILITIES: u32 = 0x34;
const MSIX: u32 = 0x11;
const MSIX_ENABLE: u32 = 1 << 31;
/// Where a message goes: the local APIC with the number 0.
const MESSAGE_ADDRESS: u32 = 0xfee0_0000;

/// A device on bus 0.
#[derive(Clone, Copy)]
pub struct Device {
    number: u32,
}

impl Device {
    /// The first device with this vendor (low half) and device number (high half).
    pub fn find(id: u32) -> Option<Device> {
        (0..32)
            .map(|number| Device { number })
            .find(|device| device.read(0) == id)
    }

    /// Reads 32 bits of the configuration space.
    pub fn read(self, offset: u32) -> u32 {
        write_port(ADDRESS, 1 << 31 | self.number << 11 | offset);
        read_port(DATA)
    }

    fn write(self, offset: u32, value: u32) {
        write_port(ADDRESS, 1 << 31 | self.number << 11 | offset);
        write_port(DATA, value);
    }

    /// The address of a 32-bit memory BAR.
    pub fn bar(self, bar: u32) -> u32 {
        self.read(BAR0 + bar * 4) & !0xf
    }

    /// Lets the device answer at its BARs and reach memory.
    pub fn enable(self) {
        let command = self.read(COMMAND) & 0xffff;
        self.write(COMMAND, command | COMMAND_MEMORY_AND_MASTER);
    }

    /// Sends the messages of an MSI-X vector to [`DEVICE_VECTOR`]. Returns whether the device has MSI-X.
    pub fn use_msix(self, vector: u32) -> bool {
        let Some(at) = self.capability(MSIX) else {
            return false;
        };
        let table = self.read(at + 4);
        let entry = self.bar(table & 7) + (table & !7) + vector * 16;
        for (register, value) in [(0, MESSAGE_ADDRESS), (4, 0), (8, DEVICE_VECTOR), (12, 0)] {
            write32(entry + register, value);
        }
        self.write(at, self.read(at) | MSIX_ENABLE);
        true
    }

    fn capability(self, id: u32) -> Option<u32> {
        if self.read(COMMAND) & STATUS_CAPABILITIES == 0 {
            return None;
        }
        let mut at = self.read(CAPABILITIES) & 0xfc;
        // More than there is room for would be a circle.
        for _ in 0..48 {
            match self.read(at) {
                _ if at == 0 => return None,
                header if header & 0xff == id => return Some(at),
                header => at = header >> 8 & 0xfc,
            }
        }
        None
    }
}

/// Reads a register in memory space, below 4 GiB.
pub fn read32(address: u32) -> u32 {
    // SAFETY: boot.s maps everything below 4 GiB; the address is in a BAR, where nothing of this program lies.
    unsafe { (address as usize as *const u32).read_volatile() }
}

/// Writes one.
pub fn write32(address: u32, value: u32) {
    // SAFETY: as above.
    unsafe { (address as usize as *mut u32).write_volatile(value) }
}

/// Reads 64 bits of a device's memory.
pub fn read64(address: u32) -> u64 {
    // SAFETY: as above.
    unsafe { (address as usize as *const u64).read_volatile() }
}

/// Writes 64 bits.
pub fn write64(address: u32, value: u64) {
    // SAFETY: as above.
    unsafe { (address as usize as *mut u64).write_volatile(value) }
}
