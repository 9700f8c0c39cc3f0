//! The PCI configuration space (PCI Express Base Specification; offsets and bits as in Linux, uapi/linux/pci_regs.h).

use vmm_dedup_dsa_abi::portal;
use vmm_dedup_dsa_abi::registers::{REGISTERS_BYTES, VENDOR};
use vmm_dedup_dsa_model::Shape;
use vmm_dedup_vfio_user::{ConfigSpace, Identity, MsiX};

/// Bytes of the configuration space.
pub(crate) const CONFIG_BYTES: usize = 4096;

/// A system peripheral of no other kind, as the device says of itself.
const CLASS: [u8; 2] = [0x08, 0x80];

/// The table of MSI-X in BAR 0, behind all that the model has there.
pub(crate) const MSIX_TABLE: u32 = 0x8000;
/// Its pending bits.
const MSIX_PENDING: u32 = 0xc000;

const EXPRESS: usize = 0x40;
const EXPRESS_ID: u8 = 0x10;
/// Version 2, an endpoint that is integrated in the root complex.
const EXPRESS_KIND: u16 = 0x92;
/// Errors by role, function level reset.
const DEVICE_CAPABILITIES: u32 = 1 << 15 | 1 << 28;
const DEVICE_CONTROL: usize = EXPRESS + 0x08;
/// In the control's high byte.
const FUNCTION_RESET: u8 = 0x80;
/// Prefixes from end to end, which PASIDs travel in.
const DEVICE_CAPABILITIES_2: u32 = 1 << 20 | 1 << 21 | 1 << 22;
const MSIX: usize = 0x80;

const ATS: usize = 0x100;
const ATS_ID: u16 = 0x0f;
/// Addresses are those of pages.
const ATS_CAPABILITIES: u16 = 1 << 5;
const PASID: usize = 0x110;
const PASID_ID: u16 = 0x1b;
/// 20 bits, and a privileged mode.
const PASID_CAPABILITIES: u16 = 20 << 8 | 1 << 2;
const PASID_CONTROL: usize = PASID + 6;
const PRI: usize = 0x120;
const PRI_ID: u16 = 0x13;
/// Stopped; responses have PASIDs.
const PRI_STATUS: u16 = 1 << 8 | 1 << 15;
/// Requests that may be outstanding.
const PRI_REQUESTS: u32 = 512;

/// The configuration space.
#[derive(Debug)]
pub(crate) struct Config(ConfigSpace);

impl Config {
    /// That of a device of this shape.
    pub(crate) fn new(shape: &Shape) -> Self {
        let identity = Identity {
            vendor: VENDOR,
            device: shape.device,
            revision: 0,
            class: CLASS,
        };
        let mut config = ConfigSpace::new(CONFIG_BYTES, identity);
        config.add_long_bar(0, usize::try_from(REGISTERS_BYTES).unwrap_or(0));
        config.add_long_bar(2, portal_bytes(shape));
        config.add_capability(EXPRESS_ID, EXPRESS, &express());
        config.allow(DEVICE_CONTROL, &[0xff, 0x7f]);
        config.allow(EXPRESS + 0x28, &[0xff, 0x07]);
        let msix = MsiX {
            vectors: shape.vectors(),
            table: MSIX_TABLE,
            pending: MSIX_PENDING,
        };
        config.add_msix(MSIX, msix);
        extended(&mut config, ATS, ATS_ID, PASID);
        config.set(ATS + 4, &ATS_CAPABILITIES.to_le_bytes());
        config.allow(ATS + 6, &[0x1f, 0x80]);
        extended(&mut config, PASID, PASID_ID, PRI);
        config.set(PASID + 4, &PASID_CAPABILITIES.to_le_bytes());
        config.allow(PASID_CONTROL, &[0x07]);
        extended(&mut config, PRI, PRI_ID, 0);
        config.set(PRI + 6, &PRI_STATUS.to_le_bytes());
        config.set(PRI + 8, &PRI_REQUESTS.to_le_bytes());
        config.allow(PRI + 4, &[0x01]);
        config.allow(PRI + 12, &[0xff; 4]);
        Self(config)
    }

    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        self.0.read(offset, data);
    }

    /// Writes. Returns whether a function level reset was asked for.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        self.0.write(offset, data);
        let high = (DEVICE_CONTROL as u64 + 1).checked_sub(offset);
        let written = high.and_then(|at| data.get(usize::try_from(at).ok()?));
        written.is_some_and(|byte| byte & FUNCTION_RESET != 0)
    }

    /// Whether the device may access memory, and use PASIDs.
    pub(crate) fn bus(&self) -> (bool, bool) {
        (self.0.is_bus_master(), self.0.byte(PASID_CONTROL) & 1 != 0)
    }
}

/// Bytes of BAR 2: the portals of all queues.
pub(crate) fn portal_bytes(shape: &Shape) -> usize {
    let bytes = u64::from(shape.queues.queues()) * portal::QUEUE_STRIDE;
    usize::try_from(bytes).unwrap_or(0).next_power_of_two()
}

/// The capability of PCI Express, behind its link.
fn express() -> Vec<u8> {
    let mut body = vec![0; 0x3a];
    let mut set = |at: usize, bytes: &[u8]| body[at - 2..at - 2 + bytes.len()].copy_from_slice(bytes);
    set(0x02, &EXPRESS_KIND.to_le_bytes());
    set(0x04, &DEVICE_CAPABILITIES.to_le_bytes());
    set(0x24, &DEVICE_CAPABILITIES_2.to_le_bytes());
    body
}

/// An extended capability's header: number, version 1, where the next one stands.
fn extended(config: &mut ConfigSpace, at: usize, id: u16, next: usize) {
    let next = u32::try_from(next).unwrap_or(0);
    config.set(at, &(u32::from(id) | 1 << 16 | next << 20).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(config: &Config, at: usize) -> u32 {
        let mut bytes = [0; 4];
        config.read(at as u64, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn a_driver_finds_what_it_looks_for() {
        let config = Config::new(&Shape::sapphire_rapids());
        assert_eq!(word(&config, 0), 0x0b25_8086);
        assert_eq!(word(&config, EXPRESS) & 0xffff, 0x8010);
        assert_eq!(word(&config, MSIX), 0x0008_0011, "nine vectors");
        let mut found = Vec::new();
        let mut at = 0x100;
        while at != 0 {
            let header = word(&config, at);
            found.push(header & 0xffff);
            at = (header >> 20) as usize;
        }
        assert_eq!(found, [ATS_ID, PASID_ID, PRI_ID].map(u32::from));
    }

    #[test]
    fn what_is_enabled_is_known_and_a_reset_is_heard() {
        let mut config = Config::new(&Shape::sapphire_rapids());
        assert_eq!(config.bus(), (false, false));
        assert!(!config.write(0x04, &[0x06, 0x00]));
        assert!(!config.write(PASID_CONTROL as u64, &[0x01, 0x00]));
        assert_eq!(config.bus(), (true, true));
        assert!(config.write(DEVICE_CONTROL as u64, &[0x10, 0x80]));
        assert!(config.write(DEVICE_CONTROL as u64 + 1, &[0x80]));
        assert_eq!(word(&config, DEVICE_CONTROL) & 0x8000, 0);
    }
}
