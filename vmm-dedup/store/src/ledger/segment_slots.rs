//! Which slots of one segment hold pages, which are dead, and which were never written.

use vmm_dedup_protocol::{HUGE_PAGES, SLOTS_PER_SEGMENT};

const WORDS: usize = SLOTS_PER_SEGMENT as usize / 64;

/// Slots of a huge page, whose places in a segment are multiples of that.
#[allow(clippy::cast_possible_truncation)] // 512
pub(crate) const HUGE_PAGE_SLOTS: u32 = HUGE_PAGES as u32;
const _: () = assert!(SLOTS_PER_SEGMENT / HUGE_PAGE_SLOTS <= u64::BITS);

/// A bit for each slot.
type Bits = Box<[u64; WORDS]>;

fn bit(at: u32) -> (usize, u64) {
    (at as usize / 64, 1 << (at % 64))
}

/// The slots of one segment, named by their places in it.
#[derive(Debug)]
pub(super) struct SegmentSlots {
    /// Slots that cannot be taken: live or dead.
    taken: Bits,
    /// Slots that nobody references any more. They stay as they are until the segment goes, or somebody references them
    /// after all.
    dead: Bits,
    free: u32,
    dead_count: u32,
    /// No run of free slots is longer than this.
    longest: u32,
    /// No slot before this word is free.
    first_free: usize,
    /// Huge pages all of whose slots were taken at once, and none given back since: a bit each.
    whole: u64,
    /// Those of them that are huge pages in memory.
    collapsed: u64,
    /// Its pages were moved here from others, since they outlived those.
    pub(super) survivors: bool,
    /// Its pages move to other segments, and none come.
    pub(super) leaving: bool,
}

impl SegmentSlots {
    pub(super) fn new(survivors: bool) -> Self {
        Self {
            taken: Box::new([0; WORDS]),
            dead: Box::new([0; WORDS]),
            free: SLOTS_PER_SEGMENT,
            dead_count: 0,
            longest: SLOTS_PER_SEGMENT,
            first_free: 0,
            whole: 0,
            collapsed: 0,
            survivors,
            leaving: false,
        }
    }

    /// Slots that were never in the index.
    pub(super) fn free(&self) -> u32 {
        self.free
    }

    pub(super) fn longest(&self) -> u32 {
        self.longest
    }

    pub(super) fn dead(&self) -> u32 {
        self.dead_count
    }

    /// Slots that hold a page, or are about to.
    pub(super) fn used(&self) -> u32 {
        SLOTS_PER_SEGMENT - self.free - self.dead_count
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

    /// The place of a free slot, counted among those that are free.
    pub(super) fn nth_free(&self, n: u64) -> Option<u32> {
        let mut left = u32::try_from(n).ok()?;
        for (word, base) in self.taken.iter().zip((0u32..).step_by(64)) {
            let free = word.count_zeros();
            if left >= free {
                left -= free;
                continue;
            }
            let mut at = (0..64).filter(|at| word >> at & 1 == 0);
            return at.nth(left as usize).map(|at: u32| base + at);
        }
        None
    }

    /// The first place of a huge page of which all slots are free.
    pub(super) fn find_huge_page(&self) -> Option<u32> {
        let places = self.taken.chunks_exact(HUGE_PAGES / 64);
        let place = places
            .zip(0u32..)
            .find(|(taken, _)| taken.iter().all(|word| *word == 0));
        place.map(|(_, n)| n * HUGE_PAGE_SLOTS)
    }

    /// Takes free slots.
    pub(super) fn take(&mut self, start: u32, n: u32) {
        for at in start..start + n {
            let (word, mask) = bit(at);
            debug_assert!(self.taken[word] & mask == 0);
            self.taken[word] |= mask;
        }
        self.free -= n;
    }

    /// As [`Self::take`], the slots of a huge page.
    pub(super) fn take_huge_page(&mut self, start: u32) {
        self.whole |= 1 << (start / HUGE_PAGE_SLOTS);
        self.take(start, HUGE_PAGE_SLOTS);
    }

    /// Gives back a slot that nobody but the store has ever known of.
    pub(super) fn give_back(&mut self, at: u32) {
        let (word, mask) = bit(at);
        assert!(
            self.taken[word] & !self.dead[word] & mask != 0,
            "slot {at} of a segment is freed twice"
        );
        self.break_huge_page(at);
        self.taken[word] &= !mask;
        self.first_free = self.first_free.min(word);
        self.free += 1;
        // It may have joined two runs.
        self.longest = self.free.min(2 * self.longest + 1);
    }

    /// Nobody references a slot any more.
    pub(super) fn bury(&mut self, at: u32) {
        let (word, mask) = bit(at);
        assert!(
            self.taken[word] & !self.dead[word] & mask != 0,
            "slot {at} of a segment is freed twice"
        );
        self.dead[word] |= mask;
        self.dead_count += 1;
        self.break_huge_page(at);
    }

    /// Somebody references a dead slot after all.
    pub(super) fn revive(&mut self, at: u32) {
        let (word, mask) = bit(at);
        assert!(self.dead[word] & mask != 0, "slot {at} of a segment is not dead");
        self.dead[word] &= !mask;
        self.dead_count -= 1;
    }

    /// Whether a slot holds a page.
    pub(super) fn is_used(&self, at: u32) -> bool {
        let (word, mask) = bit(at);
        self.taken[word] & !self.dead[word] & mask != 0
    }

    /// Whether a slot held a page.
    pub(super) fn is_dead(&self, at: u32) -> bool {
        let (word, mask) = bit(at);
        self.dead[word] & mask != 0
    }

    fn break_huge_page(&mut self, at: u32) {
        let huge_page = 1 << (at / HUGE_PAGE_SLOTS);
        self.whole &= !huge_page;
        self.collapsed &= !huge_page;
    }

    /// Whether a slot is the first of a huge page, all of which is in use.
    pub(super) fn begins_whole_huge_page(&self, at: u32) -> bool {
        at.is_multiple_of(HUGE_PAGE_SLOTS) && self.whole >> (at / HUGE_PAGE_SLOTS) & 1 == 1
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

    pub(super) fn bytes() -> usize {
        size_of::<Self>() + 2 * WORDS * 8
    }
}
