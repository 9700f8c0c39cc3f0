//! The PCI configuration space.

use crate::window::WINDOW_BYTES;
use vmm_dedup_pageforge_registers::{MSIX_PENDING, MSIX_TABLE, REGISTERS_BYTES};
use vmm_dedup_vfio_user::{ConfigSpace, Identity, MsiX};

/// Vendor: Red Hat's, of whose numbers 10f0 to 10ff are for experiments (QEMU, docs/specs/pci-ids).
pub const VENDOR: u16 = 0x1af4;
/// Device.
pub const DEVICE: u16 = 0x10f5;
/// Bytes of the configuration space.
pub(super) const CONFIG_BYTES: usize = 256;

/// A processing accelerator.
const CLASS: [u8; 2] = [0x12, 0];
const REVISION: u8 = 1;
const MSIX: usize = 0x40;

/// The configuration space of a device with so many interrupt vectors.
pub(super) fn config_space(vectors: u16) -> ConfigSpace {
    let identity = Identity {
        vendor: VENDOR,
        device: DEVICE,
        revision: REVISION,
        class: CLASS,
    };
    let mut config = ConfigSpace::new(CONFIG_BYTES, identity);
    config.add_bar(0, REGISTERS_BYTES);
    config.add_bar(2, WINDOW_BYTES);
    let (table, pending) = (MSIX_TABLE, MSIX_PENDING);
    config.add_msix(
        MSIX,
        MsiX {
            vectors,
            table,
            pending,
        },
    );
    config
}
