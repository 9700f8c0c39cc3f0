//! What the device is plugged into.

use crate::memory::Memory;

/// What the device is plugged into.
pub trait Board {
    /// The memory that it reaches.
    fn memory(&self) -> &dyn Memory;

    /// Raises an interrupt.
    fn interrupt(&self, vector: u16);
}
