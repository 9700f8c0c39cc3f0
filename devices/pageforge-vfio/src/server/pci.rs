//! The PCI configuration space: what a guest finds the device by.

use crate::registers::{MSIX_PENDING, MSIX_TABLE, REGISTERS_BYTES};
use crate::window::WINDOW_BYTES;

/// Vendor: Red Hat's, of whose numbers 10f0 to 10ff are for experiments (QEMU, docs/specs/pci-ids).
pub const VENDOR: u16 = 0x1af4;
/// Device.
pub const DEVICE: u16 = 0x10f5;
/// Bytes of the configuration space.
pub(super) const CONFIG_BYTES: usize = 256;

/// A processing accelerator.
const CLASS: u8 = 0x12;
const REVISION: u8 = 1;

const COMMAND: usize = 0x04;
/// Memory space, bus master, interrupt disable.
const COMMAND_MASK: u16 = 0x0406;
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u16 = 0x10;
const CACHE_LINE: usize = 0x0c;
const BAR0: usize = 0x10;
const BAR2: usize = 0x18;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const MSIX: usize = 0x40;
const MSIX_ID: u8 = 0x11;
/// Enable and function mask.
const MSIX_CONTROL_MASK: u16 = 0xc000;

/// The configuration space, and which of its bits software may change.
#[derive(Debug)]
pub(super) struct Config {
    bytes: [u8; CONFIG_BYTES],
    writable: [u8; CONFIG_BYTES],
}

impl Config {
    /// That of a device with so many interrupt vectors (1 to 2048).
    pub(super) fn new(vectors: u16) -> Self {
        let mut config = Self {
            bytes: [0; CONFIG_BYTES],
            writable: [0; CONFIG_BYTES],
        };
        config.set(0x00, &VENDOR.to_le_bytes());
        config.set(0x02, &DEVICE.to_le_bytes());
        config.set(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        config.set(0x08, &[REVISION, 0, 0, CLASS]);
        config.set(0x2c, &VENDOR.to_le_bytes());
        config.set(0x2e, &DEVICE.to_le_bytes());
        config.set(CAPABILITIES, &[low_byte(MSIX)]);
        config.set(MSIX, &[MSIX_ID, 0]);
        config.set(MSIX + 2, &(vectors - 1).to_le_bytes());
        // Both in BAR 0, whose number is in the low bits.
        config.set(MSIX + 4, &MSIX_TABLE.to_le_bytes());
        config.set(MSIX + 8, &MSIX_PENDING.to_le_bytes());
        config.allow(COMMAND, &COMMAND_MASK.to_le_bytes());
        config.allow(CACHE_LINE, &[0xff]);
        config.allow(INTERRUPT_LINE, &[0xff]);
        config.allow(BAR0, &bar_mask(REGISTERS_BYTES).to_le_bytes());
        config.allow(BAR2, &bar_mask(WINDOW_BYTES).to_le_bytes());
        config.allow(MSIX + 2, &MSIX_CONTROL_MASK.to_le_bytes());
        config
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn allow(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    /// Reads; what is beyond the space reads as zeros.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let from = usize::try_from(offset).ok().and_then(|at| self.bytes.get(at..));
        let from = from.unwrap_or(&[]);
        let len = from.len().min(data.len());
        data[..len].copy_from_slice(&from[..len]);
        data[len..].fill(0);
    }

    /// Writes those bits that may be changed.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        let at = usize::try_from(offset).unwrap_or(CONFIG_BYTES).min(CONFIG_BYTES);
        let masks = &self.writable[at..];
        for ((byte, mask), new) in self.bytes[at..].iter_mut().zip(masks).zip(data) {
            *byte = *byte & !mask | new & mask;
        }
    }
}

/// The address bits of a 32-bit memory BAR.
#[allow(clippy::cast_possible_truncation)] // BARs are far smaller than 4 GiB
fn bar_mask(bytes: usize) -> u32 {
    debug_assert!(bytes.is_power_of_two());
    !(bytes as u32 - 1)
}

#[allow(clippy::cast_possible_truncation)] // offsets in the first 256 bytes
fn low_byte(offset: usize) -> u8 {
    offset as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read32(config: &Config, at: u64) -> u32 {
        let mut bytes = [0; 4];
        config.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn bars_tell_their_size() {
        let mut config = Config::new(5);
        for (bar, bytes) in [
            (0x10, REGISTERS_BYTES),
            (0x18, WINDOW_BYTES),
            (0x14, 0),
            (0x1c, 0),
        ] {
            config.write(bar, &[0xff; 4]);
            let size = (!read32(&config, bar)).wrapping_add(1) as usize;
            assert_eq!(size, bytes, "BAR at {bar:#x}");
        }
    }

    #[test]
    fn the_msix_capability_is_found() {
        let config = Config::new(5);
        assert_eq!(read32(&config, 0x04) >> 16 & 0x10, 0x10);
        let at = u64::from(read32(&config, 0x34) & 0xff);
        assert_eq!(read32(&config, at), 0x0004_0011); // five vectors; the last capability
        assert_eq!(
            [read32(&config, at + 4), read32(&config, at + 8)],
            [0x2000, 0x3000]
        );
    }

    #[test]
    fn identity_cannot_be_written_and_nothing_is_beyond_the_end() {
        let mut config = Config::new(5);
        config.write(0, &[0xff; 1000]);
        config.write(u64::MAX, &[0xff; 4]);
        assert_eq!(read32(&config, 0), 0x10f5_1af4);
        let mut bytes = [7; 300];
        config.read(250, &mut bytes);
        assert_eq!(bytes[6..], [0; 294]);
        config.read(u64::MAX, &mut bytes);
        assert_eq!(bytes, [0; 300]);
    }
}
