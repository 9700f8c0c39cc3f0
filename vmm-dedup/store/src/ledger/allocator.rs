//! Which slots hold pages, and which segments are emptied so that their memory returns.
//!
//! # A slot is written once
//! The kernel may read a slot's page on behalf of a process that has unmapped it or has ended: a direct write from guest
//! memory and a `MSG_ZEROCOPY` send hold a reference to the page until the disk or the network is done with it. Nothing
//! that a process may ask the kernel tells of such references, and there is no bound for how long they last: an iSCSI
//! session waits 120 s for its target, TCP retransmits for 15 minutes, a multipath device with `queue_if_no_path` waits for
//! ever. If the store rewrote the page meanwhile, another VM's page would go to the disk.
//!
//! So a slot that was in the index is never written again in its file. When nobody references it any more it is *dead*, and
//! its memory returns with the file: when no slot of a segment is live, the store drops it, and whoever still reads a page
//! of it keeps that page by his reference. A segment that gets the same number later is another file. (Punching a hole into
//! the file would do the same for a single slot. The seal that keeps everybody from writing the file,
//! `F_SEAL_FUTURE_WRITE`, forbids it, also to the store.)
//!
//! # Segments are emptied
//! Pages that live long keep their segments, and what died around them stays resident. So the store *evacuates* segments:
//! it copies their live pages to others, services map those in their place, and the segment is left with dead slots only.
//!
//! - **When.** Segments are emptied while more slots are dead than a seventh of those in use, and [`SLACK`]: what is resident
//!   stays within 1.15 times what is in use, and 8 MiB. Pages are not moved for less. Whoever churns lets segments go by
//!   themselves meanwhile: to begin at an eighth and 4 MiB, and to end at a tenth and 2 MiB, took up to 1.9 times as many moves.
//!   Segments that are being emptied do not count: they go as soon as the services have followed, and one
//!   that does not follow must not make the store move more and more.
//! - **Which.** The segment with the smallest share of live slots: what is moved is least for what is gained.
//! - **Where to.** Pages that outlived a segment go to segments of *survivors*: most of them will outlive the next one,
//!   too, and would have to be moved again and again with short-lived neighbours.
//!
//! Slots in memory for each in use, at most, and slots moved for each that was replaced, in the second half of 50 rounds in
//! each of which 8 VMs replace a quarter of what does not stay for ever (`tests/churn.rs` plays it):
//!
//! | what is replaced | resident / in use | moved / replaced |
//! | --- | --- | --- |
//! | extents of 64 slots | 1.156 | 1.24 |
//! | extents of 64 slots, and half of all slots stay | 1.156 | 0.74 |
//! | single slots | 1.160 | 1.25 |
//! | single slots, and half of all slots stay | 1.170 | 0.74 |
//!
//! New pages go to the segments with most used slots, so that the others can empty by themselves.

use crate::ledger::dice::Dice;
pub(crate) use crate::ledger::segment_slots::HUGE_PAGE_SLOTS;
use crate::ledger::segment_slots::SegmentSlots;
use std::cmp::Reverse;
use std::ops::Range;
use vmm_dedup_protocol::{MAX_SLOTS, SLOTS_PER_SEGMENT, Slot};

/// Dead slots that are no reason to move anything: 7 MiB.
const SLACK: u64 = 1792;
/// One dead slot for so many in use is none either, beyond [`SLACK`].
const IN_USE_PER_DEAD: u64 = 7;
/// One dead slot for so many in use is worth moving for, when the store is full.
const IN_USE_PER_DEAD_FULL: u64 = 32;
/// Slots in a row that are not in use and whose places are kept when the pages around them move: as many pages that are not
/// shared may lie in one mapping of a service.
const KEPT_HOLE: u32 = 3;
/// Slots in use, in a row on one side of the hole, for each slot whose place is kept although its page is dead. Who maps a long
/// run and has written a page of it keeps one mapping then. Where pages die here and there a hole is of use to nobody, and
/// holes would take as much memory as the dead slots that moving was to free.
const LIVE_BESIDE_DEAD: u32 = 16;
const HUGE: u32 = HUGE_PAGE_SLOTS;
/// Places among which each slot is chosen that is taken at random: ten bits.
const CHOICE: u64 = 1024;
/// Segments that there can be.
const MAX_SEGMENTS: u32 = MAX_SLOTS / SLOTS_PER_SEGMENT;

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

/// What slots are wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Pages that are new to the store.
    New,
    /// Pages that outlived their segment.
    Survivors,
}

/// A part of a segment that is being emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// From a slot in use to a slot in use, with few others between.
    pub(crate) run: Run,
    /// All of it is in use, and was taken as a huge page.
    pub(crate) huge_page: bool,
}

/// Counts of slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Slots that hold a page, or are about to.
    pub(crate) used: u64,
    /// Slots that held one.
    pub(crate) dead: u64,
}

impl Tally {
    fn of(segment: &SegmentSlots) -> Self {
        Self {
            used: segment.used().into(),
            dead: segment.dead().into(),
        }
    }

    /// Slots that have memory.
    pub(crate) fn resident(self) -> u64 {
        self.used + self.dead
    }
}

/// Counts of slots and segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Of segments that stay.
    pub(crate) staying: Tally,
    /// Of segments that are being emptied.
    pub(crate) leaving: Tally,
    /// Segments that are being emptied.
    pub(crate) segments_leaving: u64,
    /// Segments that were begun to be emptied, ever.
    pub(crate) evacuations_total: u64,
    /// Segments without a live slot that went, ever.
    pub(crate) segments_retired_total: u64,
}

/// What a segment's number stands for.
#[derive(Debug)]
enum SegmentEntry {
    Vacant,
    Segment(SegmentSlots),
    /// A segment that went. The number must not be given to another one yet.
    Retired,
}

/// All slots of a store. It decides, the caller makes and drops the files.
#[derive(Debug)]
pub(crate) struct Allocator {
    places: Vec<SegmentEntry>,
    max_slots: u32,
    counts: Counts,
    /// If slots are taken at random.
    dice: Option<Dice>,
}

impl Allocator {
    /// For at most `max_slots` pages; `at_random`: each from one of the first [`CHOICE`] places that are free.
    pub(crate) fn new(max_slots: u32, at_random: bool) -> Self {
        Self {
            places: Vec::new(),
            max_slots: max_slots.min(MAX_SLOTS),
            counts: Counts::default(),
            dice: at_random.then(Dice::default),
        }
    }

    pub(crate) fn max_slots(&self) -> u32 {
        self.max_slots
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Slots that new pages may still get.
    pub(crate) fn room(&self) -> u32 {
        let resident = u32::try_from(self.counts.staying.resident()).unwrap_or(u32::MAX);
        self.max_slots.saturating_sub(resident)
    }

    /// Whether no new page gets a slot.
    pub(crate) fn is_full(&self) -> bool {
        self.room() == 0
    }

    /// The number for another segment, `None` if the store is as large as it may be.
    pub(crate) fn next_segment(&self, purpose: Purpose) -> Option<u32> {
        if purpose == Purpose::New && self.is_full() {
            return None;
        }
        let gap = self
            .places
            .iter()
            .position(|place| matches!(place, SegmentEntry::Vacant));
        let number = u32::try_from(gap.unwrap_or(self.places.len())).ok()?;
        (number < MAX_SEGMENTS).then_some(number)
    }

    /// The file of [`Self::next_segment`] has been made.
    pub(crate) fn add_segment(&mut self, number: u32, purpose: Purpose) {
        let at = number as usize;
        if self.places.len() <= at {
            self.places.resize_with(at + 1, || SegmentEntry::Vacant);
        }
        self.places[at] = SegmentEntry::Segment(SegmentSlots::new(purpose == Purpose::Survivors));
    }

    /// Takes up to `n` consecutive slots, and not fewer than `least` if so many are wanted: as many as lie together in the
    /// segments that there are.
    pub(crate) fn allocate_run(&mut self, n: u32, purpose: Purpose, least: u32) -> Option<Run> {
        let n = match purpose {
            Purpose::New => n.min(self.room()),
            Purpose::Survivors => n,
        };
        if self.dice.is_some() {
            return self.allocate_at_random(n, purpose);
        }
        loop {
            // How long runs are is known as a bound only, which gets exact when a segment is searched in vain.
            let with_room = self.open(purpose).filter(|(_, segment)| segment.free() > 0);
            let (number, hoped) = with_room
                .map(|(number, segment)| (number, segment.longest().min(n), segment.used()))
                .max_by_key(|(number, hoped, used)| (*hoped, *used, Reverse(*number)))
                .map(|(number, hoped, _)| (number, hoped))
                .filter(|(_, hoped)| *hoped >= n.min(least).max(1))?;
            let (start, len) = self.segment_mut(number).find_run(hoped);
            if len == hoped {
                self.segment_mut(number).take(start, len);
                self.counts.staying.used += u64::from(len);
                return Some(Run::new(number, start, len));
            }
        }
    }

    /// Whether slots are taken at random, and there are too few to choose from: another segment costs nothing until it is written.
    pub(crate) fn lacks_choice(&self, purpose: Purpose) -> bool {
        self.dice.is_some() && self.free_slots(purpose) < CHOICE
    }

    /// Takes one slot of the first [`CHOICE`] that are free. So what is taken lies near to each other, whatever came to be taken first.
    fn allocate_at_random(&mut self, n: u32, purpose: Purpose) -> Option<Run> {
        let choice = self.free_slots(purpose).min(CHOICE);
        let mut at = match (n, choice, &mut self.dice) {
            (0, ..) | (_, 0, _) | (_, _, None) => return None,
            (_, choice, Some(dice)) => dice.below(choice),
        };
        let (number, start) = self.open(purpose).find_map(|(number, segment)| {
            let free = u64::from(segment.free());
            let found = (at < free).then(|| segment.nth_free(at)).flatten();
            at = at.saturating_sub(free);
            found.map(|start| (number, start))
        })?;
        self.segment_mut(number).take(start, 1);
        self.counts.staying.used += 1;
        Some(Run::new(number, start, 1))
    }

    /// Takes the slots of a huge page, which lie as those of one; never fewer. `None` if there is no such place.
    pub(crate) fn allocate_huge_page(&mut self, purpose: Purpose) -> Option<Run> {
        if !self.has_room_for_huge_page(purpose) {
            return None;
        }
        let places = self.open(purpose).filter(|(_, s)| s.free() >= HUGE);
        let places = places.filter_map(|(n, s)| Some((n, s.find_huge_page()?, s.used())));
        let (number, start, _) = places.max_by_key(|(number, _, used)| (*used, Reverse(*number)))?;
        self.segment_mut(number).take_huge_page(start);
        self.counts.staying.used += u64::from(HUGE);
        Some(Run::new(number, start, HUGE))
    }

    /// Slots of segments that take pages, in which there is none yet.
    pub(crate) fn free_slots(&self, purpose: Purpose) -> u64 {
        self.open(purpose)
            .map(|(_, segment)| u64::from(segment.free()))
            .sum()
    }

    /// Whether the store may get so much larger.
    pub(crate) fn has_room_for_huge_page(&self, purpose: Purpose) -> bool {
        purpose == Purpose::Survivors || self.room() >= HUGE
    }

    /// Gives back a slot that was never in the index. Returns the number of its segment if that was the last one in use
    /// there, and none is free: the segment is retired, and the caller drops the file.
    pub(crate) fn give_back(&mut self, slot: Slot) -> Option<u32> {
        self.update(slot.segment(), |segment| segment.give_back(place(slot)));
        self.retire_if_empty(slot.segment())
    }

    /// Nobody references a slot any more. Returns the number of its segment as [`Self::give_back`] does.
    pub(crate) fn bury(&mut self, slot: Slot) -> Option<u32> {
        if !self.is_segment(slot.segment()) {
            return None;
        }
        self.update(slot.segment(), |segment| segment.bury(place(slot)));
        self.retire_if_empty(slot.segment())
    }

    /// A slot is referenced after all, by who had found it before it died. Its segment may be retired already: then
    /// nothing changes, but that somebody maps what went.
    pub(crate) fn revive(&mut self, slot: Slot) {
        if self.is_segment(slot.segment()) {
            self.update(slot.segment(), |segment| segment.revive(place(slot)));
        }
    }

    /// Nobody knows a retired segment any more: its number may be given to another one.
    pub(crate) fn release(&mut self, number: u32) {
        debug_assert!(matches!(self.places[number as usize], SegmentEntry::Retired));
        self.places[number as usize] = SegmentEntry::Vacant;
        while let Some(SegmentEntry::Vacant) = self.places.last() {
            self.places.pop();
        }
    }

    /// A segment that takes pages is retired by [`Self::retire_idle`] only: with few pages in the store, the next one would
    /// take another file.
    fn retire_if_empty(&mut self, number: u32) -> Option<u32> {
        let segment = self.segment(number);
        let takes_pages = !segment.leaving && segment.free() > 0;
        (!takes_pages && segment.used() == 0).then(|| self.retire(number))
    }

    /// Retires a segment without a slot in use that could take pages: its number. To be called until there is none, now and
    /// then.
    pub(crate) fn retire_idle(&mut self) -> Option<u32> {
        let idle = self.existing().find(|(_, segment)| segment.used() == 0);
        let number = idle.map(|(number, _)| number)?;
        Some(self.retire(number))
    }

    fn retire(&mut self, number: u32) -> u32 {
        let segment = self.segment(number);
        let dead = u64::from(segment.dead());
        let leaving = segment.leaving;
        self.tally_mut(leaving).dead -= dead;
        self.counts.segments_leaving -= u64::from(leaving);
        self.counts.segments_retired_total += 1;
        self.places[number as usize] = SegmentEntry::Retired;
        number
    }

    /// The numbers of the segments that are being emptied.
    pub(crate) fn leaving(&self) -> impl Iterator<Item = u32> {
        let is_leaving =
            |place: &SegmentEntry| matches!(place, SegmentEntry::Segment(segment) if segment.leaving);
        (0..)
            .zip(&self.places)
            .filter(move |(_, place)| is_leaving(place))
            .map(|(number, _)| number)
    }

    /// Whether a slot lies in a segment that is being emptied.
    pub(crate) fn is_leaving(&self, slot: Slot) -> bool {
        self.is_segment(slot.segment()) && self.segment(slot.segment()).leaving
    }

    /// The slots of the huge page that ends with one, if they were taken as one and its memory is not one yet.
    pub(crate) fn small_huge_page(&self, last: Slot) -> Option<Run> {
        let SegmentEntry::Segment(segment) = self.places.get(last.segment() as usize)? else {
            return None;
        };
        let start = segment.small_huge_page(place(last))?;
        Some(Run::new(last.segment(), start, HUGE))
    }

    /// The memory of a huge page is one now.
    pub(crate) fn note_collapsed(&mut self, run: &Run) {
        self.segment_mut(run.first.segment())
            .note_collapsed(place(run.first));
    }

    pub(crate) fn bytes(&self) -> usize {
        self.existing().count() * SegmentSlots::bytes()
    }

    fn update(&mut self, number: u32, change: impl FnOnce(&mut SegmentSlots)) {
        let segment = self.segment_mut(number);
        let before = Tally::of(segment);
        change(segment);
        let (after, leaving) = (Tally::of(segment), segment.leaving);
        let tally = self.tally_mut(leaving);
        tally.used = tally.used + after.used - before.used;
        tally.dead = tally.dead + after.dead - before.dead;
    }

    fn tally_mut(&mut self, leaving: bool) -> &mut Tally {
        if leaving {
            &mut self.counts.leaving
        } else {
            &mut self.counts.staying
        }
    }

    fn existing(&self) -> impl Iterator<Item = (u32, &SegmentSlots)> {
        let places = (0u32..).zip(&self.places);
        places.filter_map(|(number, place)| match place {
            SegmentEntry::Segment(segment) => Some((number, segment)),
            _ => None,
        })
    }

    /// Segments that take pages.
    fn open(&self, purpose: Purpose) -> impl Iterator<Item = (u32, &SegmentSlots)> {
        let survivors = purpose == Purpose::Survivors;
        let all = self.existing();
        all.filter(move |(_, segment)| !segment.leaving && segment.survivors == survivors)
    }

    fn is_segment(&self, number: u32) -> bool {
        matches!(self.places.get(number as usize), Some(SegmentEntry::Segment(_)))
    }

    fn segment(&self, number: u32) -> &SegmentSlots {
        match &self.places[number as usize] {
            SegmentEntry::Segment(segment) => segment,
            _ => unreachable!("slots in use lie in segments"),
        }
    }

    fn segment_mut(&mut self, number: u32) -> &mut SegmentSlots {
        match &mut self.places[number as usize] {
            SegmentEntry::Segment(segment) => segment,
            _ => unreachable!("slots in use lie in segments"),
        }
    }
}

/// Evacuation.
impl Allocator {
    /// The next segment to be emptied, if more is dead than should be. No slot of it is taken from now on.
    pub(crate) fn begin_evacuation(&mut self) -> Option<u32> {
        let Tally { used, dead } = self.counts.staying;
        let full = self.is_full() && dead > used / IN_USE_PER_DEAD_FULL;
        if !full && dead <= used / IN_USE_PER_DEAD + SLACK {
            return None;
        }
        let with_dead = self.existing().filter(|(_, s)| !s.leaving && s.dead() > 0);
        // The share of live slots, in parts of 2^16.
        let live_share = |s: &SegmentSlots| (u64::from(s.used()) << 16) / Tally::of(s).resident();
        let (number, segment) = with_dead.min_by_key(|(number, s)| (live_share(s), *number))?;
        let moved = Tally::of(segment);
        self.segment_mut(number).leaving = true;
        self.counts.staying.used -= moved.used;
        self.counts.staying.dead -= moved.dead;
        self.counts.leaving.used += moved.used;
        self.counts.leaving.dead += moved.dead;
        self.counts.segments_leaving += 1;
        self.counts.evacuations_total += 1;
        Some(number)
    }

    /// The first part of a segment with slots in use, from a place in it on: at most `most` slots, unless it is a huge
    /// page. Few slots in a row that are not in use are part of it, so that pages which move keep their distances.
    pub(crate) fn next_piece(&self, number: u32, from: u32, most: u32) -> Option<Piece> {
        if !self.is_segment(number) {
            return None;
        }
        let segment = self.segment(number);
        let start = (from..SLOTS_PER_SEGMENT).find(|at| segment.is_used(*at))?;
        if segment.begins_whole_huge_page(start) {
            let run = Run::new(number, start, HUGE);
            return Some(Piece { run, huge_page: true });
        }
        // The last slots in a row that are in use.
        let (mut first, mut end) = (start, start + 1);
        for at in start + 1..SLOTS_PER_SEGMENT.min(start.saturating_add(most)) {
            if segment.begins_whole_huge_page(at) || at - end > KEPT_HOLE {
                break;
            }
            if !segment.is_used(at) {
                continue;
            }
            if at > end {
                if !keeps_hole(segment, first..end, at) {
                    break;
                }
                first = at;
            }
            end = at + 1;
        }
        let run = Run::new(number, start, end - start);
        Some(Piece {
            run,
            huge_page: false,
        })
    }

    /// Whether a slot holds a page.
    pub(crate) fn is_used(&self, slot: Slot) -> bool {
        self.is_segment(slot.segment()) && self.segment(slot.segment()).is_used(place(slot))
    }
}

fn place(slot: Slot) -> u32 {
    slot.number() % SLOTS_PER_SEGMENT
}

/// Whether the slots between some in a row that are in use and the next one in use, `next`, keep their places.
fn keeps_hole(segment: &SegmentSlots, before: Range<u32>, next: u32) -> bool {
    let wanted = (next - before.end) * LIVE_BESIDE_DEAD;
    let is_used = |at: u32| at < SLOTS_PER_SEGMENT && segment.is_used(at);
    (before.end..next).all(|at| !segment.is_dead(at))
        || before.end - before.start >= wanted
        || (next..next + wanted).all(is_used)
}

#[cfg(test)]
mod tests;
