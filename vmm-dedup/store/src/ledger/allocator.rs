//! Which slots hold pages, and when a slot may be written again.
//!
//! # Why a free slot is not simply free
//! When a slot leaves limbo, no process maps it or can find it ([`crate::ledger::lifetime`]). The kernel may still read
//! its page on behalf of a process that has unmapped it or has ended: a direct write from guest memory and a
//! `MSG_ZEROCOPY` send hold a reference to the page until the disk or the network is done with it. Nothing that a process
//! may ask the kernel tells of such references. If the store rewrites the page meanwhile, another VM's page goes to the
//! disk.
//!
//! How long can that take? There is no bound: an iSCSI session waits 120 s for its target, an NVMe controller 600 s,
//! TCP retransmits for 15 minutes, a multipath device with `queue_if_no_path` and a blocked RBD image wait for ever.
//!
//! # What needs no bound
//! A *retired* segment is never written again: when none of its slots is used, the store drops the file, and a reference
//! keeps its page as it is for as long as it takes. A segment that gets the same number is another file. So the slots of
//! a segment that empties come back at once, however long the I/O lasts. (Punching a hole into the file would do the
//! same for a single slot. The seal that keeps everybody from writing the file, `F_SEAL_FUTURE_WRITE`, forbids it, also
//! to the store.)
//!
//! # Why that is not enough
//! Slots that live long keep their segments, and what is free there stays resident. Slots in memory divided by slots in
//! use, after 50 rounds in each of which 8 VMs replace a quarter of their 131,072 slots (`tests/churn.rs` plays it; a
//! segment is a quarter of that):
//!
//! | a slot is written again after | rounds of 10 s | 60 s | 600 s | 3600 s |
//! | --- | --- | --- | --- | --- |
//! | 30 s | 2.0 | 1.25 | 1.25 | 1.25 |
//! | 300 s | 8.75 | 2.5 | 1.25 | 1.25 |
//! | 300 s, and 10 % spare (the default) | 8.75 | 2.5 | 1.5 | 1.5 |
//! | never | 9.75 | 9.75 | 9.75 | 9.75 |
//! | never, half of the slots stay for ever | 6.0 and growing | 6.0 and growing | 6.0 and growing | 6.0 and growing |
//!
//! A store that only retires segments holds more than sharing saves, and grows for as long as some slots stay.
//!
//! # The rule
//! A slot that was in the index is not written again in the same file, unless both are true:
//!
//! 1. **It has cooled for the quarantine** ([`Reuse::quarantine`], 300 s by default) since it left limbo. With
//!    [`Reuse::NEVER`] no time is long enough: only retiring brings slots back, and the operator pays with memory.
//! 2. **The memory is wanted**: more slots cool than [`Reuse::spare_percent`] of those in use, or the store has little
//!    room left. Otherwise new pages go to slots that were never written, for as long as that costs no more than this
//!    share. So in a calm store a slot cools for hours: the less is replaced, the longer.
//!
//! So the store holds at most what it uses, what was freed within a quarantine or the spare share (whichever is more),
//! and one segment that is being filled. It grows no further, however long it runs: `tests` has the rule and the bound
//! as a property.
//!
//! It remains a guess that no I/O lasts longer than the quarantine *and* that its slot is wanted then. To do without a
//! guess and without growth, services would have to move pages out of sparse segments, so that these can be retired.
//! They cannot do so yet.
//!
//! New pages go to the segments with most used slots, so that the others can empty.

use crate::ledger::segment_slots::SegmentSlots;
pub(crate) use crate::ledger::segment_slots::{HUGE_PAGE_SLOTS, Second};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use vmm_dedup_protocol::{MAX_SLOTS, SLOTS_PER_SEGMENT, Slot};

/// Consecutive slots of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: Slot,
    pub(crate) len: u32,
}

impl Run {
    /// Slots of a segment, from a place in it on.
    fn new(segment: u32, start: u32, len: u32) -> Self {
        let first = Slot::try_new(segment * SLOTS_PER_SEGMENT + start).expect("segments lie below MAX_SLOTS");
        Self { first, len }
    }

    pub(crate) fn slots(self) -> impl Iterator<Item = Slot> {
        (0..self.len).filter_map(move |n| self.first.checked_add_in_segment(n))
    }
}

/// When slots may be written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reuse {
    /// Seconds that a slot cools; 0 for tests: it may be written again at once.
    pub(crate) quarantine: u32,
    /// Cooling slots that are kept in any case, in percent of the slots in use.
    pub(crate) spare_percent: u32,
}

impl Reuse {
    /// A quarantine that does not end.
    pub(crate) const NEVER: u32 = u32::MAX;
}

impl Default for Reuse {
    fn default() -> Self {
        Self {
            quarantine: 300,
            spare_percent: 10,
        }
    }
}

/// Counts of slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Slots that hold a page, or are about to.
    pub(crate) used: u64,
    /// Slots that are not to be rewritten yet.
    pub(crate) cooling: u64,
    /// Free slots that held a page once, and so have memory.
    pub(crate) reusable: u64,
    /// Slots that were rewritten in their file, ever.
    pub(crate) reused_total: u64,
    /// Segments that emptied, ever.
    pub(crate) segments_retired_total: u64,
    /// Seconds that the slot had cooled which was freed last.
    pub(crate) cooled_seconds: u64,
}

/// All slots of a store. It decides, the caller makes and drops the files.
#[derive(Debug)]
pub(crate) struct Allocator {
    segments: Vec<Option<SegmentSlots>>,
    max_slots: u32,
    reuse: Reuse,
    counts: Counts,
}

impl Allocator {
    /// For at most `max_slots` pages.
    pub(crate) fn new(max_slots: u32, reuse: Reuse) -> Self {
        Self {
            segments: Vec::new(),
            max_slots: max_slots.min(MAX_SLOTS),
            reuse,
            counts: Counts::default(),
        }
    }

    pub(crate) fn max_slots(&self) -> u32 {
        self.max_slots
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether no slot is free, and none can be had by another segment.
    pub(crate) fn is_full(&self) -> bool {
        self.counts.used + self.counts.cooling >= self.max_slots.into()
    }

    /// The number for another segment, `None` if the store is as large as it may be.
    pub(crate) fn next_segment(&self) -> Option<u32> {
        let gap = self.segments.iter().position(Option::is_none);
        let number = u32::try_from(gap.unwrap_or(self.segments.len())).ok()?;
        (number < self.max_slots.div_ceil(SLOTS_PER_SEGMENT)).then_some(number)
    }

    /// The file of [`Self::next_segment`] has been made.
    pub(crate) fn add_segment(&mut self, number: u32) {
        let at = number as usize;
        if self.segments.len() <= at {
            self.segments.resize_with(at + 1, || None);
        }
        self.segments[at] = Some(SegmentSlots::new(self.usable(number)));
    }

    /// How many slots of a segment may be used.
    pub(crate) fn usable(&self, number: u32) -> u32 {
        (self.max_slots - number * SLOTS_PER_SEGMENT).min(SLOTS_PER_SEGMENT)
    }

    /// Takes up to `n` consecutive slots: as many as lie together in the segments that there are. `None` if none is free.
    pub(crate) fn allocate_run(&mut self, n: u32) -> Option<Run> {
        loop {
            // How long runs are is known as a bound only, which gets exact when a segment is searched in vain.
            let with_room = self.existing().filter(|(_, segment)| segment.free() > 0);
            let (number, hoped) = with_room
                .map(|(number, segment)| (number, segment.longest().min(n), segment.used()))
                .max_by_key(|(number, hoped, used)| (*hoped, *used, Reverse(*number)))
                .map(|(number, hoped, _)| (number, hoped))?;
            let (start, len) = self.segment_mut(number).find_run(hoped);
            if len == hoped {
                let reused = self.segment_mut(number).take(start, len);
                self.note_taken(len, reused);
                return Some(Run::new(number, start, len));
            }
        }
    }

    /// Takes the slots of a huge page, which lie as those of one; never fewer. `None` if there is no such place.
    pub(crate) fn allocate_huge_page(&mut self) -> Option<Run> {
        let places = self.existing().filter(|(_, s)| s.free() >= HUGE_PAGE_SLOTS);
        let places = places.filter_map(|(n, s)| Some((n, s.find_huge_page()?, s.used())));
        let (number, start, _) = places.max_by_key(|(number, _, used)| (*used, Reverse(*number)))?;
        let reused = self.segment_mut(number).take_huge_page(start);
        self.note_taken(HUGE_PAGE_SLOTS, reused);
        Some(Run::new(number, start, HUGE_PAGE_SLOTS))
    }

    /// Free slots of the segments that there are.
    pub(crate) fn free_slots(&self) -> u64 {
        self.existing()
            .map(|(_, segment)| u64::from(segment.free()))
            .sum()
    }

    fn note_taken(&mut self, n: u32, reused: u32) {
        self.counts.used += u64::from(n);
        self.counts.reusable -= u64::from(reused);
        self.counts.reused_total += u64::from(reused);
    }

    /// Gives back a slot that was never in the index: it is free at once. Returns the number of its segment if that was
    /// the last one in use there: the segment is retired, and the caller drops the file.
    pub(crate) fn free(&mut self, slot: Slot) -> Option<u32> {
        self.counts.used -= 1;
        let segment = self.segment_mut(slot.segment());
        let reusable = segment.reusable();
        segment.give_back(slot.number() % SLOTS_PER_SEGMENT);
        let reusable = segment.reusable() - reusable;
        self.counts.reusable += u64::from(reusable);
        self.retire_if_empty(slot.segment())
    }

    /// Gives back a slot that nobody maps any more. It cools, and is free once it is thawed. Returns the number of its
    /// segment as [`Self::free`] does.
    pub(crate) fn cool(&mut self, slot: Slot, now: Second) -> Option<u32> {
        // Begun seconds count as none. A quarantine that does not end is at the end of time, which never comes.
        let until = match self.reuse.quarantine {
            0 => now,
            quarantine => now.saturating_add(quarantine).saturating_add(1),
        };
        let without_quarantine = self.reuse.quarantine == 0;
        let segment = self.segment_mut(slot.segment());
        segment.cool(slot.number() % SLOTS_PER_SEGMENT, until);
        self.counts.used -= 1;
        self.counts.cooling += 1;
        if without_quarantine {
            self.thaw_one(slot.segment());
        }
        self.retire_if_empty(slot.segment())
    }

    /// Frees slots that have cooled for long enough, those that were given back first, until no more cool than is wanted.
    pub(crate) fn thaw(&mut self, now: Second) {
        let excess = self.counts.cooling.saturating_sub(self.wanted_cooling());
        if excess == 0 {
            return;
        }
        let first = |number, segment: &SegmentSlots| Some(Reverse((segment.cools_until()?, number)));
        let all = self
            .existing()
            .filter_map(|(number, segment)| first(number, segment));
        let mut next: BinaryHeap<Reverse<(Second, u32)>> = all.collect();
        for _ in 0..excess {
            let Some(Reverse((until, number))) = next.pop() else {
                return;
            };
            if until > now || until == Second::MAX {
                return;
            }
            let since = until.saturating_sub(self.reuse.quarantine + 1);
            self.counts.cooled_seconds = now.saturating_sub(since).into();
            self.thaw_one(number);
            next.extend(first(number, self.segment(number)));
        }
    }

    /// Cooling slots that are kept although their quarantine has ended: a share of what is used, unless the store gets
    /// full by it.
    fn wanted_cooling(&self) -> u64 {
        let used = self.counts.used;
        let room = u64::from(self.max_slots).saturating_sub(used);
        (used * u64::from(self.reuse.spare_percent) / 100).min(room * 3 / 4)
    }

    fn thaw_one(&mut self, number: u32) {
        self.segment_mut(number).thaw_one();
        self.counts.cooling -= 1;
        self.counts.reusable += 1;
    }

    fn retire_if_empty(&mut self, number: u32) -> Option<u32> {
        let segment = self.segment(number);
        if segment.used() > 0 {
            return None;
        }
        let (cooling, reusable) = (segment.cooling(), segment.reusable());
        self.counts.cooling -= u64::from(cooling);
        self.counts.reusable -= u64::from(reusable);
        self.counts.segments_retired_total += 1;
        self.segments[number as usize] = None;
        while let Some(None) = self.segments.last() {
            self.segments.pop();
        }
        Some(number)
    }

    /// The slots of the huge page that ends with one, if they were taken as one and its memory is not one yet.
    pub(crate) fn small_huge_page(&self, last: Slot) -> Option<Run> {
        let segment = self.segments.get(last.segment() as usize)?.as_ref()?;
        let start = segment.small_huge_page(last.number() % SLOTS_PER_SEGMENT)?;
        Some(Run::new(last.segment(), start, HUGE_PAGE_SLOTS))
    }

    /// The memory of a huge page is one now.
    pub(crate) fn note_collapsed(&mut self, run: &Run) {
        let start = run.first.number() % SLOTS_PER_SEGMENT;
        self.segment_mut(run.first.segment()).note_collapsed(start);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.existing().map(|(_, segment)| segment.bytes()).sum()
    }

    fn existing(&self) -> impl Iterator<Item = (u32, &SegmentSlots)> {
        (0u32..)
            .zip(&self.segments)
            .filter_map(|(at, segment)| Some((at, segment.as_ref()?)))
    }

    fn segment(&self, number: u32) -> &SegmentSlots {
        self.segments[number as usize]
            .as_ref()
            .expect("slots lie in existing segments")
    }

    fn segment_mut(&mut self, number: u32) -> &mut SegmentSlots {
        self.segments[number as usize]
            .as_mut()
            .expect("slots lie in existing segments")
    }
}

#[cfg(test)]
mod tests;
