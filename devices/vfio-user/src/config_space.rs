//! A PCI configuration space: what a guest finds a device by.

const COMMAND: usize = 0x04;
/// Memory space, bus master, interrupt disable.
const COMMAND_MASK: u16 = 0x0406;
const COMMAND_BUS_MASTER: u8 = 4;
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u16 = 0x10;
const CACHE_LINE: usize = 0x0c;
const BARS: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const MSIX_ID: u8 = 0x11;
/// Enable and function mask.
const MSIX_CONTROL_MASK: u16 = 0xc000;
/// In a BAR: its address has 64 bits, and reads of it have no effect.
const BAR_64_PREFETCHABLE: u32 = 0xc;

/// Who a device says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The vendor's number; also that of the subsystem.
    pub vendor: u16,
    /// The device's; also that of the subsystem.
    pub device: u16,
    /// The revision.
    pub revision: u8,
    /// Base class, subclass.
    pub class: [u8; 2],
}

/// The capability of MSI-X, whose table and pending bits are in BAR 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiX {
    /// Vectors, 1 to 2048.
    pub vectors: u16,
    /// Where the table begins.
    pub table: u32,
    /// Where the pending bits do.
    pub pending: u32,
}

/// A configuration space, and which of its bits software may change.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: Vec<u8>,
    writable: Vec<u8>,
    /// Where the last capability's link stands.
    link: usize,
}

impl ConfigSpace {
    /// One of so many bytes: 256, or 4096 for PCI Express.
    #[must_use]
    pub fn new(len: usize, identity: Identity) -> Self {
        let mut config = Self {
            bytes: vec![0; len],
            writable: vec![0; len],
            link: CAPABILITIES,
        };
        config.set(0x00, &identity.vendor.to_le_bytes());
        config.set(0x02, &identity.device.to_le_bytes());
        let [base, sub] = identity.class;
        config.set(0x08, &[identity.revision, 0, sub, base]);
        config.set(0x2c, &identity.vendor.to_le_bytes());
        config.set(0x2e, &identity.device.to_le_bytes());
        config.allow(COMMAND, &COMMAND_MASK.to_le_bytes());
        config.allow(CACHE_LINE, &[0xff]);
        config.allow(INTERRUPT_LINE, &[0xff]);
        config
    }

    /// Its bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // it never is
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Adds a BAR of 32 bits for memory of so many bytes, a power of two.
    pub fn add_bar(&mut self, number: usize, bytes: usize) {
        self.allow(BARS + 4 * number, &bar_mask(bytes).to_le_bytes());
    }

    /// Adds a BAR of 64 bits, which takes two numbers, for memory that can be prefetched.
    pub fn add_long_bar(&mut self, number: usize, bytes: usize) {
        self.set(BARS + 4 * number, &BAR_64_PREFETCHABLE.to_le_bytes());
        self.add_bar(number, bytes);
        self.allow(BARS + 4 * number + 4, &[0xff; 4]);
    }

    /// Adds a capability in the first 256 bytes: its number, where it stands, and what follows its link.
    ///
    /// # Panics
    /// If it does not fit: a mistake in the program.
    pub fn add_capability(&mut self, id: u8, at: usize, body: &[u8]) {
        let place = u8::try_from(at).expect("capabilities stand in the first 256 bytes");
        self.set(self.link, &[place]);
        self.set(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        self.set(at, &[id, 0]);
        self.set(at + 2, body);
        self.link = at + 1;
    }

    /// Adds the capability of MSI-X.
    pub fn add_msix(&mut self, at: usize, msix: MsiX) {
        let mut body = (msix.vectors - 1).to_le_bytes().to_vec();
        // Both in BAR 0, whose number is in the low bits.
        body.extend(msix.table.to_le_bytes());
        body.extend(msix.pending.to_le_bytes());
        self.add_capability(MSIX_ID, at, &body);
        self.allow(at + 2, &MSIX_CONTROL_MASK.to_le_bytes());
    }

    /// Sets bytes.
    pub fn set(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Says which bits software may change.
    pub fn allow(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    /// Reads; what is beyond the space reads as zeros.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let from = usize::try_from(offset).ok().and_then(|at| self.bytes.get(at..));
        let from = from.unwrap_or(&[]);
        let len = from.len().min(data.len());
        data[..len].copy_from_slice(&from[..len]);
        data[len..].fill(0);
    }

    /// Writes those bits that may be changed.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let len = self.bytes.len();
        let at = usize::try_from(offset).unwrap_or(len).min(len);
        let masks = &self.writable[at..];
        for ((byte, mask), new) in self.bytes[at..].iter_mut().zip(masks).zip(data) {
            *byte = *byte & !mask | new & mask;
        }
    }

    /// The byte at an offset in the space.
    #[must_use]
    pub fn byte(&self, at: usize) -> u8 {
        self.bytes[at]
    }

    /// Whether the device may access memory.
    #[must_use]
    pub fn is_bus_master(&self) -> bool {
        self.bytes[COMMAND] & COMMAND_BUS_MASTER != 0
    }
}

/// The address bits of a memory BAR.
#[allow(clippy::cast_possible_truncation)] // BARs are far smaller than 4 GiB
fn bar_mask(bytes: usize) -> u32 {
    debug_assert!(bytes.is_power_of_two());
    !(bytes as u32 - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity {
        vendor: 0x1af4,
        device: 0x10f5,
        revision: 1,
        class: [0x12, 0],
    };

    fn space() -> ConfigSpace {
        let mut config = ConfigSpace::new(256, IDENTITY);
        config.add_bar(0, 0x4000);
        config.add_long_bar(2, 0x2_0000);
        config.add_capability(0x10, 0x80, &[2, 0]);
        let (vectors, table, pending) = (5, 0x2000, 0x3000);
        config.add_msix(
            0x40,
            MsiX {
                vectors,
                table,
                pending,
            },
        );
        config
    }

    fn read32(config: &ConfigSpace, at: u64) -> u32 {
        let mut bytes = [0; 4];
        config.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn bars_tell_their_size() {
        let mut config = space();
        for (bar, sized) in [
            (0x10, !0x3fff),
            (0x14, 0),
            (0x18, !0x1_ffff | 0xc),
            (0x1c, u32::MAX),
        ] {
            config.write(bar, &[0xff; 4]);
            assert_eq!(read32(&config, bar), sized, "BAR at {bar:#x}");
        }
    }

    #[test]
    fn capabilities_are_a_chain() {
        let config = space();
        assert_eq!(read32(&config, 0x04) >> 16 & 0x10, 0x10);
        let first = u64::from(read32(&config, 0x34) & 0xff);
        assert_eq!((first, read32(&config, first)), (0x80, 0x0002_4010));
        assert_eq!(read32(&config, 0x40), 0x0004_0011); // five vectors; the last capability
        assert_eq!([read32(&config, 0x44), read32(&config, 0x48)], [0x2000, 0x3000]);
    }

    #[test]
    fn identity_cannot_be_written_and_nothing_is_beyond_the_end() {
        let mut config = space();
        config.write(0, &[0xff; 1000]);
        config.write(u64::MAX, &[0xff; 4]);
        assert_eq!(read32(&config, 0), 0x10f5_1af4);
        assert!(config.is_bus_master());
        let mut bytes = [7; 300];
        config.read(250, &mut bytes);
        assert_eq!(bytes[6..], [0; 294]);
        config.read(u64::MAX, &mut bytes);
        assert_eq!(bytes, [0; 300]);
    }
}
