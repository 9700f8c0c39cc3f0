//! Which slots of one segment are used, cooling or free.

use std::collections::VecDeque;
use vmm_dedup_protocol::{HUGE_PAGES, SLOTS_PER_SEGMENT};

const WORDS: usize = SLOTS_PER_SEGMENT as usize / 64;

/// Slots of a huge page, whose places in a segment are multiples of that.
#[allow(clippy::cast_possible_truncation)] // 512
pub(crate) const HUGE_PAGE_SLOTS: u32 = HUGE_PAGES as u32;
const _: () = assert!(SLOTS_PER_SEGMENT / HUGE_PAGE_SLOTS == u64::BITS);

/// A moment: whole seconds since the store started.
pub(crate) type Second = u32;

/// A bit for each slot.
type Bits = Box<[u64; WORDS]>;

fn bit(at: u32) -> (usize, u64) {
    (at as usize / 64, 1 << (at % 64))
}

/// The slots of one segment, named by their places in it.
#[derive(Debug)]
pub(super) struct SegmentSlots {
    /// Slots that cannot be taken: used, cooling, or beyond the store's size.
    taken: Bits,
    /// Slots that were in the index since the segment was made: processes and devices could read them.
    was_readable: Bits,
    /// Slots that may ever be used: fewer than all in the last segment of a store whose size is no multiple.
    usable: u32,
    free: u32,
    /// No run of free slots is longer than this.
    longest: u32,
    /// No slot before this word is free.
    first_free: usize,
    /// Free slots that were readable.
    reusable: u32,
    /// Slots that are not to be rewritten yet, in the order in which they were given back: until when, and their place.
    cooling: VecDeque<(Second, u32)>,
    /// Huge pages all of whose slots were taken at once, and none given back since: a bit each.
    whole: u64,
    /// Those of them that are huge pages in memory.
    collapsed: u64,
}

impl SegmentSlots {
    pub(super) fn new(usable: u32) -> Self {
        let mut taken = Box::new([0; WORDS]);
        for at in usable..SLOTS_PER_SEGMENT {
            let (word, mask) = bit(at);
            taken[word] |= mask;
        }
        Self {
            taken,
            was_readable: Box::new([0; WORDS]),
            usable,
            free: usable,
            longest: usable,
            first_free: 0,
            reusable: 0,
            cooling: VecDeque::new(),
            whole: 0,
            collapsed: 0,
        }
    }

    pub(super) fn free(&self) -> u32 {
        self.free
    }

    pub(super) fn longest(&self) -> u32 {
        self.longest
    }

    pub(super) fn reusable(&self) -> u32 {
        self.reusable
    }

    pub(super) fn cooling(&self) -> u32 {
        u32::try_from(self.cooling.len()).expect("no more than there are slots")
    }

    /// Slots that hold a page, or are about to.
    pub(super) fn used(&self) -> u32 {
        self.usable - self.free - self.cooling()
    }

    /// The first run of `n` free slots, or else the longest there is: `(start, length)`.
    pub(super) fn find_run(&mut self, n: u32) -> (u32, u32) {
        while self.taken.get(self.first_free) == Some(&u64::MAX) {
            self.first_free += 1;
        }
        let words = self.taken.iter().zip((0u32..).step_by(64)).skip(self.first_free);
        let (mut best, mut start, mut len) = ((0, 0), 0, 0);
        for (word, base) in words {
            let mut at = 0;
            while at < 64 {
                let rest = word >> at;
                let free = rest.trailing_zeros().min(64 - at);
                if free == 0 {
                    at += rest.trailing_ones();
                    len = 0;
                    continue;
                }
                if len == 0 {
                    start = base + at;
                }
                len += free;
                at += free;
                if len > best.1 {
                    best = (start, len.min(n));
                }
                if best.1 >= n {
                    return best;
                }
            }
        }
        self.longest = best.1;
        best
    }

    /// The first place of a huge page of which all slots are free.
    pub(super) fn find_huge_page(&self) -> Option<u32> {
        let places = self.taken.chunks_exact(HUGE_PAGES / 64);
        let place = places
            .zip(0u32..)
            .find(|(taken, _)| taken.iter().all(|word| *word == 0));
        place.map(|(_, n)| n * HUGE_PAGE_SLOTS)
    }

    /// Takes free slots. Returns how many of them were readable.
    pub(super) fn take(&mut self, start: u32, n: u32) -> u32 {
        let mut reused = 0;
        for at in start..start + n {
            let (word, mask) = bit(at);
            debug_assert!(self.taken[word] & mask == 0);
            self.taken[word] |= mask;
            reused += u32::from(self.was_readable[word] & mask != 0);
        }
        self.free -= n;
        self.reusable -= reused;
        reused
    }

    /// As [`Self::take`], the slots of a huge page.
    pub(super) fn take_huge_page(&mut self, start: u32) -> u32 {
        self.whole |= 1 << (start / HUGE_PAGE_SLOTS);
        self.take(start, HUGE_PAGE_SLOTS)
    }

    /// Gives back a slot that nobody but the store has ever known of.
    pub(super) fn give_back(&mut self, at: u32) {
        let (word, mask) = bit(at);
        self.reusable += u32::from(self.was_readable[word] & mask != 0);
        self.break_huge_page(at);
        self.release(at);
    }

    /// Gives back a slot that was readable: it is not free before it is thawed.
    pub(super) fn cool(&mut self, at: u32, until: Second) {
        let (word, mask) = bit(at);
        assert!(
            self.taken[word] & mask != 0,
            "slot {at} of a segment is freed twice"
        );
        self.was_readable[word] |= mask;
        self.break_huge_page(at);
        self.cooling.push_back((until, at));
    }

    /// Until when the slot has to cool that was given back first.
    pub(super) fn cools_until(&self) -> Option<Second> {
        self.cooling.front().map(|(until, _)| *until)
    }

    /// Frees the slot that was given back first.
    pub(super) fn thaw_one(&mut self) {
        if let Some((_, at)) = self.cooling.pop_front() {
            self.reusable += 1;
            self.release(at);
        }
        if self.cooling.is_empty() {
            self.cooling.shrink_to_fit();
        }
    }

    fn release(&mut self, at: u32) {
        let (word, mask) = bit(at);
        assert!(
            self.taken[word] & mask != 0,
            "slot {at} of a segment is freed twice"
        );
        self.taken[word] &= !mask;
        self.first_free = self.first_free.min(word);
        self.free += 1;
        // It may have joined two runs.
        self.longest = self.free.min(2 * self.longest + 1);
    }

    fn break_huge_page(&mut self, at: u32) {
        let huge_page = 1 << (at / HUGE_PAGE_SLOTS);
        self.whole &= !huge_page;
        self.collapsed &= !huge_page;
    }

    /// The huge page that ends with a slot, if its slots are one's and its memory is not one yet.
    pub(super) fn small_huge_page(&self, last: u32) -> Option<u32> {
        let small = self.whole & !self.collapsed;
        let ends = last % HUGE_PAGE_SLOTS == HUGE_PAGE_SLOTS - 1;
        (ends && small >> (last / HUGE_PAGE_SLOTS) & 1 == 1).then(|| last + 1 - HUGE_PAGE_SLOTS)
    }

    /// The memory of a huge page is one now.
    pub(super) fn note_collapsed(&mut self, start: u32) {
        self.collapsed |= 1 << (start / HUGE_PAGE_SLOTS);
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + 2 * WORDS * 8 + self.cooling.capacity() * size_of::<(Second, u32)>()
    }
}
