//! What a frame holds, by the kernel's flags. Kernel documentation: admin-guide/mm/pagemap.

use vmm_dedup_agent_wire::block::Frames;
use vmm_dedup_agent_wire::frame::BLOCK;
use vmm_dedup_agent_wire::said::{Kind, Said};

const UPTODATE: u64 = 1 << 3;
const DIRTY: u64 = 1 << 4;
const LRU: u64 = 1 << 5;
const SLAB: u64 = 1 << 7;
const WRITEBACK: u64 = 1 << 8;
const BUDDY: u64 = 1 << 10;
const MMAP: u64 = 1 << 11;
const ANON: u64 = 1 << 12;
const SWAPBACKED: u64 = 1 << 14;
const COMPOUND_TAIL: u64 = 1 << 16;
const HUGE: u64 = 1 << 17;
const HWPOISON: u64 = 1 << 19;
const NOPAGE: u64 = 1 << 20;
const THP: u64 = 1 << 22;
const OFFLINE: u64 = 1 << 23;
/// The page of zeros that read faults map.
pub const ZERO_PAGE: u64 = 1 << 24;
const PGTABLE: u64 = 1 << 26;

/// What a frame holds. Of a tail, the flags are its head's.
fn kind(flags: u64) -> Kind {
    let has = |bits: u64| flags & bits != 0;
    if has(NOPAGE | HWPOISON) {
        Kind::Unknown
    } else if has(BUDDY | OFFLINE) {
        // A page in a balloon is offline: the guest does not want its content either.
        Kind::Free
    } else if has(SLAB | PGTABLE | ZERO_PAGE) {
        Kind::Kernel
    } else if has(ANON) {
        Kind::Anonymous
    } else if !has(LRU | MMAP | UPTODATE) {
        Kind::Kernel
    } else if has(DIRTY | WRITEBACK | SWAPBACKED) || !has(UPTODATE) {
        // Memory of tmpfs is backed by swap, if by anything. What is not up to date is just being read.
        Kind::FileDirty
    } else {
        Kind::FileClean
    }
}

/// Says what the frames of a block are, by their flags and how often they are mapped. Temperatures are left unknown.
///
/// # Panics
/// If there are not as many words as a block has frames.
#[must_use]
pub fn classify(flags: &[u64], counts: &[u64]) -> Frames {
    assert!(flags.len() == BLOCK && counts.len() == BLOCK, "one block");
    let mut head = 0;
    std::array::from_fn(|at| {
        // Older kernels give tails the flags of a page of no use. A huge page begins where a block does, or within.
        let flags = match flags[at] & COMPOUND_TAIL != 0 && head != 0 {
            true => head,
            false => flags[at],
        };
        if flags & COMPOUND_TAIL == 0 {
            head = flags;
        }
        Said::new(kind(flags))
            .with_huge(flags & (HUGE | THP) != 0)
            .with_several(counts[at] > 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(flags: u64) -> Kind {
        classify(&[flags; BLOCK], &[0; BLOCK])[0].kind()
    }

    #[test]
    fn kinds_follow_from_flags() {
        for (flags, expected) in [
            (BUDDY, Kind::Free),
            (OFFLINE, Kind::Free),
            (NOPAGE, Kind::Unknown),
            (HWPOISON | LRU, Kind::Unknown),
            (SLAB, Kind::Kernel),
            (PGTABLE | MMAP, Kind::Kernel),
            (ZERO_PAGE, Kind::Kernel),
            (0, Kind::Kernel),
            (LRU | UPTODATE | MMAP, Kind::FileClean),
            (LRU | UPTODATE, Kind::FileClean),
            (LRU | UPTODATE | DIRTY, Kind::FileDirty),
            (LRU | UPTODATE | WRITEBACK, Kind::FileDirty),
            (LRU, Kind::FileDirty),
            (LRU | UPTODATE | SWAPBACKED, Kind::FileDirty),
            (LRU | UPTODATE | SWAPBACKED | ANON | MMAP | DIRTY, Kind::Anonymous),
        ] {
            assert_eq!(one(flags), expected, "{flags:#x}");
        }
    }

    #[test]
    fn tails_are_what_their_head_is() {
        let mut flags = [LRU | UPTODATE; BLOCK];
        flags[4] = ANON | LRU | THP | SWAPBACKED;
        flags[5..8].fill(COMPOUND_TAIL);
        let mut counts = [1; BLOCK];
        counts[9] = 2;
        let frames = classify(&flags, &counts);
        let huge = Said::new(Kind::Anonymous).with_huge(true);
        assert_eq!(frames[4..8], [huge; 4]);
        assert_eq!(frames[8], Said::new(Kind::FileClean));
        assert_eq!(frames[9], Said::new(Kind::FileClean).with_several(true));
    }
}
