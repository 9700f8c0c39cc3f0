//! One segment: its memory, and which of its slots are in use.

use crate::memory::segments::read_only;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmm_dedup_protocol::mapping::{Mapping, sealed_memfd};
use vmm_dedup_protocol::{HUGE_PAGES, SEGMENT_BYTES, SLOTS_PER_SEGMENT};

pub(crate) const WORDS: usize = SLOTS_PER_SEGMENT as usize / 64;

/// Slots of a huge page, whose places in a segment are multiples of that.
#[allow(clippy::cast_possible_truncation)] // 512
pub(crate) const HUGE_PAGE_SLOTS: u32 = HUGE_PAGES as u32;
const _: () = assert!(SLOTS_PER_SEGMENT / HUGE_PAGE_SLOTS == u64::BITS);

#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) map: Mapping,
    pub(crate) file: Arc<OwnedFd>,
    used: Box<[u64; WORDS]>,
    /// Slots that may ever be used: fewer than all in the last segment of a store whose size is no multiple.
    pub(crate) usable: u32,
    pub(crate) free: u32,
    /// No run of free slots is longer than this.
    pub(crate) longest: u32,
    /// Huge pages all of whose slots were taken at once, and none given back since: a bit each.
    whole: u64,
    /// Those of them that are huge pages in memory.
    collapsed: u64,
    /// Slots that were given back and are not to be rewritten yet: until which second, and their place.
    pub(crate) cooling: VecDeque<(u32, u32)>,
}

fn bit(at: u32) -> (usize, u64) {
    (at as usize / 64, 1 << (at % 64))
}

impl Segment {
    pub(crate) fn new(usable: u32) -> io::Result<Self> {
        let (file, map) = sealed_memfd("vmm-dedup-segment", SEGMENT_BYTES)?;
        map.advise_huge();
        let mut used = Box::new([0; WORDS]);
        for at in usable..SLOTS_PER_SEGMENT {
            let (word, mask) = bit(at);
            used[word] |= mask;
        }
        Ok(Self {
            file: Arc::new(read_only(&file)?),
            map,
            used,
            usable,
            free: usable,
            longest: usable,
            whole: 0,
            collapsed: 0,
            cooling: VecDeque::new(),
        })
    }

    /// The first run of `n` free slots, or else the longest there is: `(start, length)`.
    pub(crate) fn find_run(&mut self, n: u32) -> (u32, u32) {
        let (mut best, mut start, mut at) = ((0, 0), 0, 0);
        while at < SLOTS_PER_SEGMENT {
            let (word, mask) = bit(at);
            let bits = self.used[word];
            if mask == 1 && bits == u64::MAX {
                at += 64;
                start = at;
                continue;
            }
            if mask == 1 && bits == 0 && at + 64 - start < n {
                at += 64;
            } else if bits & mask == 0 {
                at += 1;
            } else {
                at += 1;
                start = at;
                continue;
            }
            if at - start > best.1 {
                best = (start, at - start);
                if best.1 >= n {
                    return (start, n);
                }
            }
        }
        self.longest = best.1;
        best
    }

    /// The first place of a huge page of which all slots are free.
    pub(crate) fn find_huge_page(&self) -> Option<u32> {
        let places = self.used.chunks_exact(HUGE_PAGES / 64);
        let place = places
            .zip(0u32..)
            .find(|(used, _)| used.iter().all(|word| *word == 0));
        place.map(|(_, n)| n * HUGE_PAGE_SLOTS)
    }

    pub(crate) fn take_huge_page(&mut self, start: u32) {
        self.take(start, HUGE_PAGE_SLOTS);
        self.whole |= 1 << (start / HUGE_PAGE_SLOTS);
    }

    /// The huge page that ends with a slot, if its slots are one's and its memory is not one yet.
    pub(crate) fn small_huge_page(&self, last: u32) -> Option<u32> {
        let small = self.whole & !self.collapsed;
        let ends = last % HUGE_PAGE_SLOTS == HUGE_PAGE_SLOTS - 1;
        (ends && small >> (last / HUGE_PAGE_SLOTS) & 1 == 1).then(|| last + 1 - HUGE_PAGE_SLOTS)
    }

    /// Gathers the memory of a huge page in one; its content stays.
    pub(crate) fn collapse(&mut self, start: u32) -> io::Result<()> {
        self.map.collapse(start as usize, HUGE_PAGES)?;
        self.collapsed |= 1 << (start / HUGE_PAGE_SLOTS);
        Ok(())
    }

    pub(crate) fn take(&mut self, start: u32, n: u32) {
        for at in start..start + n {
            let (word, mask) = bit(at);
            debug_assert!(self.used[word] & mask == 0);
            self.used[word] |= mask;
        }
        self.free -= n;
    }

    pub(crate) fn give_back(&mut self, at: u32) {
        let (word, mask) = bit(at);
        assert!(
            self.used[word] & mask != 0,
            "slot {at} of a segment is freed twice"
        );
        self.used[word] &= !mask;
        let huge_page = 1 << (at / HUGE_PAGE_SLOTS);
        self.whole &= !huge_page;
        self.collapsed &= !huge_page;
        self.free += 1;
        self.longest = self.free;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free as usize + self.cooling.len() >= self.usable as usize
    }
}
