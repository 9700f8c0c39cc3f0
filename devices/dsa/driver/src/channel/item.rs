//! What is submitted, and why it may have no result.

use vmm_dedup_dsa_abi::{Descriptor, DeviceAddress};

/// Why a descriptor has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ItemError {
    /// The device cannot read there.
    Fault(DeviceAddress),
    /// The device does not do it.
    Refused(u8),
    /// Nobody wants it any more.
    Abandoned,
}

/// A descriptor to be submitted, with a number of the caller's.
pub(crate) type Item = (Descriptor, u64);
