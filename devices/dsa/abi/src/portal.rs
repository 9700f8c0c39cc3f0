//! Portals: pages of BAR 2 to which descriptors are written (Linux, drivers/dma/idxd/idxd.h).
//!
//! A descriptor is written by one instruction of 64 bytes: to a dedicated queue by MOVDIR64B, which tells nothing; to a
//! shared one by ENQCMD, which tells whether the queue has taken it. All 64 places of a page mean the same: software goes
//! round them, so that writes do not wait for each other.

/// Bytes of the portals of one work queue.
pub const QUEUE_STRIDE: u64 = 0x4000;

/// Bytes of one portal.
pub const PORTAL_BYTES: usize = 0x1000;

/// Bytes of one place.
pub const PLACE: usize = 0x40;

/// The portals of a queue, in their order in BAR 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A shared queue takes descriptors up to its size.
    Unlimited = 0,
    /// A shared queue takes descriptors up to its threshold, and leaves the rest for those with the other portal.
    Limited = 1,
    /// As the first, for descriptors with interrupts of the other table.
    UnlimitedIms = 2,
    /// As the second, for descriptors with interrupts of the other table.
    LimitedIms = 3,
}

/// Where a queue's portal begins in BAR 2.
#[must_use]
pub const fn offset(queue: u8, kind: Kind) -> u64 {
    queue as u64 * QUEUE_STRIDE + kind as u64 * PORTAL_BYTES as u64
}

/// The queue and the portal that an offset in BAR 2 belongs to.
#[must_use]
pub fn at(offset: u64) -> Option<(u8, Kind)> {
    let queue = u8::try_from(offset / QUEUE_STRIDE).ok()?;
    let kind = match offset % QUEUE_STRIDE / PORTAL_BYTES as u64 {
        0 => Kind::Unlimited,
        1 => Kind::Limited,
        2 => Kind::UnlimitedIms,
        _ => Kind::LimitedIms,
    };
    Some((queue, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_name_queues_and_portals() {
        assert_eq!(offset(1, Kind::Limited), 0x5000);
        assert_eq!(at(0x5fc0), Some((1, Kind::Limited)));
        assert_eq!(at(0x1_c000), Some((7, Kind::Unlimited)));
        assert_eq!(at(256 * QUEUE_STRIDE), None);
    }
}
