//! Why the device's input is refused.

use crate::sizes::{LINES_PER_SECTION, OTHER_PAGES};

/// Why the device's input is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No such entry.
    #[error("Scan Table entry {0} does not exist: indices are below {OTHER_PAGES}")]
    Index(usize),
    /// No such line.
    #[error("line {0} is not in a 1 KiB section: offsets are below {LINES_PER_SECTION}")]
    Offset(u8),
    /// A physical page number that no address has.
    #[error("page number {0:#x} is beyond 52 bits of physical address")]
    Ppn(u64),
}
