//! The memory of the store: sealed memfds ([`crate::memory::segment`]), sparse until written, and an allocator of runs.
//!
//! The store keeps the only writable mapping. Services get a descriptor that was opened read-only; the seal refuses
//! writable mappings and `write` also to whoever reopens it through /proc. The seal forbids the store, too, to punch
//! holes, so a slot that was written stays resident until its whole segment is empty and goes. Hence the allocator
//! fills the fullest segments first, so that others can empty.
//!
//! **Quarantine.** A slot that nobody maps may still be read by a device, on behalf of a process that has ended or
//! unmapped it: read-only pins (a direct write of a guest's page, `MSG_ZEROCOPY`) outlive mappings, and no account
//! tells of them. So a slot that was given back *cools* before its bytes are rewritten. It counts as free, but it is
//! not allocated. A segment whose slots are all free or cooling goes at once: what was pinned stays as it is, since
//! the file is never written again.

use crate::memory::segment::{HUGE_PAGE_SLOTS, Segment, WORDS};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use vmm_dedup_protocol::key::{Key, PAGE_WORDS, PageHash, Salt, line_words};
use vmm_dedup_protocol::mapping::Mapping;
use vmm_dedup_protocol::{MAX_SLOTS, PAGE_SIZE, SLOTS_PER_SEGMENT, Slot};

/// A second descriptor of the same file that cannot be written through.
pub(crate) fn read_only(file: &OwnedFd) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    Ok(rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Consecutive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: Slot,
    pub(crate) len: u32,
}

impl Run {
    pub(crate) fn slots(self) -> impl Iterator<Item = Slot> {
        (0..self.len).filter_map(move |n| self.first.checked_add_in_segment(n))
    }
}

/// Slots of a segment.
fn run(segment: u32, start: u32, len: u32) -> Run {
    let first = Slot::try_new(segment * SLOTS_PER_SEGMENT + start).expect("segments lie below MAX_SLOTS");
    Run { first, len }
}

/// All segments of a store.
#[derive(Debug)]
pub(crate) struct Segments {
    segments: Vec<Option<Segment>>,
    max_slots: u32,
    quarantine_seconds: u32,
    /// When the seconds of [`Segment::cooling`] began.
    started: Instant,
    cooling: u64,
}

impl Segments {
    /// For at most `max_slots` pages, each of which is rewritten no sooner than this long after it was given back.
    pub(crate) fn new(max_slots: u32, quarantine_seconds: u32) -> Self {
        Self {
            segments: Vec::new(),
            max_slots: max_slots.min(MAX_SLOTS),
            quarantine_seconds,
            started: Instant::now(),
            cooling: 0,
        }
    }

    pub(crate) fn max_slots(&self) -> u32 {
        self.max_slots
    }

    /// Takes up to `n` consecutive slots, `None` if the store is full. The second value is a segment's number if
    /// one had to be made for it: services must be given it before they can use the slots.
    pub(crate) fn allocate_run(&mut self, n: u32) -> io::Result<Option<(Run, Option<u32>)>> {
        let mut best: Option<(u32, u32, u32)> = None;
        for number in self.fullest_first() {
            let segment = self.segment_mut(number);
            let known = best.map_or(0, |(_, _, len)| len);
            if segment.longest <= known {
                continue;
            }
            let (start, len) = segment.find_run(n);
            if len > known {
                best = Some((number, start, len));
            }
            if len >= n {
                break;
            }
        }
        let (number, start, len, new) = match best {
            Some((number, start, len)) => (number, start, len, None),
            None => {
                let Some(number) = self.add_segment()? else {
                    return Ok(None);
                };
                (number, 0, n.min(self.segment_mut(number).usable), Some(number))
            }
        };
        self.segment_mut(number).take(start, len);
        Ok(Some((run(number, start, len), new)))
    }

    /// As [`Self::allocate_run`], for the slots of a huge page, which lie as those of one; never fewer. No segment is made
    /// while there is room for its pages elsewhere.
    pub(crate) fn allocate_huge_page(&mut self) -> io::Result<Option<(Run, Option<u32>)>> {
        let order = self.fullest_first();
        let free: u64 = self.existing().map(|(_, segment)| u64::from(segment.free)).sum();
        let mut places = order.into_iter().map(|n| (n, self.segment(n).find_huge_page()));
        let (number, start, new) = match places.find(|(_, place)| place.is_some()) {
            Some((number, place)) => (number, place, None),
            None if free >= u64::from(HUGE_PAGE_SLOTS) => return Ok(None),
            None => {
                let Some(number) = self.add_segment()? else {
                    return Ok(None);
                };
                (number, self.segment(number).find_huge_page(), Some(number))
            }
        };
        let Some(start) = start else {
            self.retire_if_empty(number);
            return Ok(None);
        };
        self.segment_mut(number).take_huge_page(start);
        Ok(Some((run(number, start, HUGE_PAGE_SLOTS), new)))
    }

    /// Segments with free slots.
    fn fullest_first(&self) -> Vec<u32> {
        let with_room = self.existing().filter(|(_, s)| s.free > 0);
        let mut order: Vec<(u32, u32)> = with_room.map(|(at, s)| (s.free, at)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, number)| number).collect()
    }

    fn add_segment(&mut self) -> io::Result<Option<u32>> {
        let at = self
            .segments
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.segments.len());
        let Some(number) = u32::try_from(at)
            .ok()
            .filter(|n| *n < self.max_slots.div_ceil(SLOTS_PER_SEGMENT))
        else {
            return Ok(None);
        };
        let usable = (self.max_slots - number * SLOTS_PER_SEGMENT).min(SLOTS_PER_SEGMENT);
        let segment = Some(Segment::new(usable)?);
        match self.segments.get_mut(at) {
            Some(place) => *place = segment,
            None => self.segments.push(segment),
        }
        Ok(Some(number))
    }

    /// Gives back a slot that nobody was ever given. Returns its segment's number if that was the last one in use
    /// there: the segment is gone.
    pub(crate) fn free(&mut self, slot: Slot) -> Option<u32> {
        self.segment_mut(slot.segment())
            .give_back(slot.number() % SLOTS_PER_SEGMENT);
        self.retire_if_empty(slot.segment())
    }

    /// Gives back a slot that nobody maps any more: it is free at the end of the quarantine. Returns its segment's
    /// number if that was the last one in use there: the segment is gone.
    pub(crate) fn cool(&mut self, slot: Slot, now: Instant) -> Option<u32> {
        if self.quarantine_seconds == 0 {
            return self.free(slot);
        }
        // Begun seconds count as none.
        let until = self
            .second(now)
            .saturating_add(self.quarantine_seconds)
            .saturating_add(1);
        let segment = self.segment_mut(slot.segment());
        segment
            .cooling
            .push_back((until, slot.number() % SLOTS_PER_SEGMENT));
        self.cooling += 1;
        self.retire_if_empty(slot.segment())
    }

    /// Frees the slots whose quarantine has ended.
    pub(crate) fn thaw(&mut self, now: Instant) {
        if self.cooling == 0 {
            return;
        }
        let second = self.second(now);
        for segment in self.segments.iter_mut().flatten() {
            while let Some((until, at)) = segment.cooling.front().copied()
                && until <= second
            {
                segment.cooling.pop_front();
                segment.give_back(at);
                self.cooling -= 1;
            }
            if segment.cooling.is_empty() {
                segment.cooling.shrink_to_fit();
            }
        }
    }

    /// Slots that count as free and are not to be rewritten yet.
    pub(crate) fn cooling(&self) -> u64 {
        self.cooling
    }

    fn second(&self, now: Instant) -> u32 {
        u32::try_from(now.saturating_duration_since(self.started).as_secs()).unwrap_or(u32::MAX)
    }

    fn retire_if_empty(&mut self, number: u32) -> Option<u32> {
        let segment = self.segment(number);
        if !segment.is_empty() {
            return None;
        }
        self.cooling -= segment.cooling.len() as u64;
        self.segments[number as usize] = None;
        while let Some(None) = self.segments.last() {
            self.segments.pop();
        }
        Some(number)
    }

    /// Allocates the memory of a run that is about to be written. Best effort: what is missing comes with the writes.
    pub(crate) fn populate(&self, run: &Run) {
        let start = run.first.offset() / PAGE_SIZE;
        let _ = self
            .segment(run.first.segment())
            .map
            .populate(start, run.len as usize);
    }

    /// The slots of the huge page that ends with one, if they were taken as one and its memory is not one yet.
    pub(crate) fn small_huge_page(&self, last: Slot) -> Option<Run> {
        let start = self
            .segments
            .get(last.segment() as usize)?
            .as_ref()?
            .small_huge_page(last.number() % SLOTS_PER_SEGMENT)?;
        Some(run(last.segment(), start, HUGE_PAGE_SLOTS))
    }

    /// Makes the memory of a huge page's slots one.
    pub(crate) fn collapse(&mut self, run: &Run) -> io::Result<()> {
        let start = run.first.number() % SLOTS_PER_SEGMENT;
        self.segment_mut(run.first.segment()).collapse(start)
    }

    /// Copies page `from` of another mapping into an allocated slot.
    pub(crate) fn fill(&mut self, slot: Slot, source: &Mapping, from: usize) {
        let map = &self.segment(slot.segment()).map;
        map.copy_page_from(slot.offset() / PAGE_SIZE, source, from);
    }

    /// Copies the page of one allocated slot into another.
    pub(crate) fn copy(&mut self, slot: Slot, source: Slot) {
        let (from, to) = (self.segment(source.segment()), self.segment(slot.segment()));
        let (from_page, to_page) = (source.offset() / PAGE_SIZE, slot.offset() / PAGE_SIZE);
        to.map.copy_page_from(to_page, &from.map, from_page);
    }

    /// Whether two slots hold the same bytes.
    pub(crate) fn equal(&self, a: Slot, b: Slot) -> bool {
        let words = |slot| self.words(slot).iter().map(|word| word.load(Ordering::Relaxed));
        words(a).eq(words(b))
    }

    /// The order of two slots' pages, by their bytes.
    pub(crate) fn compare(&self, a: Slot, b: Slot) -> std::cmp::Ordering {
        let bytes = |slot| {
            let words = self.words(slot).iter();
            words.map(|word| u64::from_be_bytes(word.load(Ordering::Relaxed).to_ne_bytes()))
        };
        bytes(a).cmp(bytes(b))
    }

    /// The key of the four lines of a slot's page.
    pub(crate) fn line_key(&self, slot: Slot, salt: Salt) -> Key {
        let words = self.words(slot);
        Key::of_lines(&line_words(|at| words[at].load(Ordering::Relaxed)), salt)
    }

    /// The hash of a slot's page.
    pub(crate) fn hash(&self, slot: Slot, salt: Salt) -> PageHash {
        let mut page = [0; PAGE_WORDS];
        let map = &self.segment(slot.segment()).map;
        map.read_page(slot.offset() / PAGE_SIZE, &mut page);
        PageHash::of(&page, salt)
    }

    fn words(&self, slot: Slot) -> &[AtomicU64] {
        &self.segment(slot.segment()).map.words()[slot.offset() / 8..][..PAGE_WORDS]
    }

    /// Numbers and read-only descriptors of the segments there are.
    pub(crate) fn files(&self) -> impl Iterator<Item = (u32, Arc<OwnedFd>)> + '_ {
        self.existing()
            .map(|(number, segment)| (number, segment.file.clone()))
    }

    /// The read-only descriptor of one segment.
    pub(crate) fn file(&self, number: u32) -> Arc<OwnedFd> {
        self.segment(number).file.clone()
    }

    /// What the segments' pages cost, in use or not.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let blocks = |segment: &Segment| rustix::fs::fstat(&segment.file).map_or(0, |stat| stat.st_blocks);
        let blocks: i64 = self.existing().map(|(_, segment)| blocks(segment)).sum();
        u64::try_from(blocks).unwrap_or(0) * 512
    }

    pub(crate) fn bytes(&self) -> usize {
        let queues: usize = self.existing().map(|(_, s)| s.cooling.capacity() * 8).sum();
        self.existing().count() * (size_of::<Segment>() + WORDS * 8) + queues
    }

    fn existing(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0u32..)
            .zip(&self.segments)
            .filter_map(|(at, segment)| Some((at, segment.as_ref()?)))
    }

    fn segment(&self, number: u32) -> &Segment {
        self.segments[number as usize]
            .as_ref()
            .expect("slots in use have a segment")
    }

    fn segment_mut(&mut self, number: u32) -> &mut Segment {
        self.segments[number as usize]
            .as_mut()
            .expect("slots in use have a segment")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn run(segments: &mut Segments, n: u32) -> Option<(u32, u32)> {
        segments
            .allocate_run(n)
            .unwrap()
            .map(|(run, _)| (run.first.number(), run.len))
    }

    fn free(segments: &mut Segments, numbers: impl IntoIterator<Item = u32>) {
        numbers
            .into_iter()
            .for_each(|n| _ = segments.free(Slot::try_new(n).unwrap()));
    }

    #[test]
    fn runs_are_consecutive_and_fill_holes_first() {
        let mut segments = Segments::new(MAX_SLOTS, 0);
        assert_eq!(run(&mut segments, 100), Some((0, 100)));
        assert_eq!(run(&mut segments, 500), Some((100, 500)));
        free(&mut segments, 10..74);
        assert_eq!(run(&mut segments, 64), Some((10, 64)));
        free(&mut segments, 10..73);
        assert_eq!(run(&mut segments, 64), Some((600, 64)));
    }

    #[test]
    fn a_full_store_says_so_and_falls_back_to_shorter_runs_before() {
        let mut segments = Segments::new(10, 0);
        assert_eq!(run(&mut segments, 7), Some((0, 7)));
        assert_eq!(run(&mut segments, 7), Some((7, 3)));
        assert_eq!(run(&mut segments, 1), None);
        free(&mut segments, [4]);
        assert_eq!(run(&mut segments, 7), Some((4, 1)));
    }

    #[test]
    fn huge_pages_lie_as_such_and_are_never_cut() {
        let huge = |segments: &mut Segments| {
            let run = segments.allocate_huge_page().unwrap();
            run.map(|(run, _)| (run.first.number(), run.len))
        };
        let mut segments = Segments::new(3 * HUGE_PAGE_SLOTS + 511, 0);
        assert_eq!(run(&mut segments, 1), Some((0, 1)));
        assert_eq!(huge(&mut segments), Some((512, 512)));
        assert_eq!(run(&mut segments, 100), Some((1, 100)));
        assert_eq!(huge(&mut segments), Some((1024, 512)));
        assert_eq!(huge(&mut segments), None, "511 slots are left behind, 411 before");
        assert_eq!(segments.files().count(), 1);
        free(&mut segments, 512..1024);
        assert_eq!(huge(&mut segments), Some((512, 512)));
        let mut segments = Segments::new(511, 0);
        assert_eq!(huge(&mut segments), None);
        assert_eq!(segments.files().count(), 0, "no segment is made for nothing");
    }

    #[test]
    fn a_huge_page_keeps_its_content_when_it_becomes_one() {
        let mut segments = Segments::new(MAX_SLOTS, 0);
        assert!(segments.allocate_run(3).unwrap().is_some());
        let (run, _) = segments.allocate_huge_page().unwrap().unwrap();
        let slots = (0..run.len).map(|n| run.first.checked_add_in_segment(n).unwrap());
        for slot in slots.clone() {
            let words = segments.words(slot);
            words
                .iter()
                .for_each(|word| word.store(u64::from(slot.number()), Ordering::Relaxed));
        }
        // Without a huge page to be had it stays as it is.
        let collapsed = segments.collapse(&run);
        for slot in slots {
            let same = |word: &AtomicU64| word.load(Ordering::Relaxed) == u64::from(slot.number());
            assert!(segments.words(slot).iter().all(same), "{collapsed:?}");
        }
    }

    #[test]
    fn an_empty_segment_goes_and_its_number_returns() {
        let mut segments = Segments::new(MAX_SLOTS, 0);
        let (first, new) = segments.allocate_run(SLOTS_PER_SEGMENT).unwrap().unwrap();
        assert_eq!((first.len, new), (SLOTS_PER_SEGMENT, Some(0)));
        let (second, new) = segments.allocate_run(1).unwrap().unwrap();
        assert_eq!((second.first.segment(), new), (1, Some(1)));
        free(&mut segments, 1..SLOTS_PER_SEGMENT);
        assert_eq!(segments.free(first.first), Some(0));
        assert_eq!(segments.files().map(|(n, _)| n).collect::<Vec<_>>(), [1]);
        assert_eq!(run(&mut segments, 2), Some((second.first.number() + 1, 2)));
        let (_, new) = segments.allocate_run(SLOTS_PER_SEGMENT - 3).unwrap().unwrap();
        assert_eq!(new, None);
        let (_, new) = segments.allocate_run(1).unwrap().unwrap();
        assert_eq!(new, Some(0));
    }

    #[test]
    fn a_slot_is_not_given_again_before_the_quarantine_ends() {
        use std::time::Duration;
        let mut segments = Segments::new(3, 30);
        assert_eq!(run(&mut segments, 3), Some((0, 3)));
        let start = Instant::now();
        let slot = |n| Slot::try_new(n).unwrap();
        assert_eq!(segments.cool(slot(1), start), None);
        assert_eq!((run(&mut segments, 1), segments.cooling()), (None, 1));
        segments.thaw(start + Duration::from_secs(29));
        assert_eq!(run(&mut segments, 1), None);
        segments.thaw(start + Duration::from_secs(32));
        assert_eq!((run(&mut segments, 1), segments.cooling()), (Some((1, 1)), 0));
        // An empty segment goes at once: its number comes back with another file.
        let before = segments.file(0);
        assert_eq!(segments.cool(slot(0), start), None);
        assert_eq!(segments.free(slot(2)), None);
        assert_eq!(segments.cool(slot(1), start), Some(0));
        assert_eq!(segments.cooling(), 0);
        assert_eq!(run(&mut segments, 1), Some((0, 1)));
        let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
        assert_ne!(inode(&before), inode(&segments.file(0)));
    }

    #[test]
    fn written_slots_count_until_their_segment_goes() {
        let mut segments = Segments::new(MAX_SLOTS, 0);
        let (_file, source) = vmm_dedup_protocol::mapping::staging_memfd(PAGE_SIZE).unwrap();
        source.write_page(0, &[7; PAGE_WORDS]);
        run(&mut segments, 2);
        let slot = |n| Slot::try_new(n).unwrap();
        segments.fill(slot(0), &source, 0);
        assert!(!segments.equal(slot(0), slot(1)));
        segments.fill(slot(1), &source, 0);
        segments.fill(slot(1), &source, 0);
        assert!(segments.equal(slot(0), slot(1)));
        // Exactly two, unless this host gives shared memory huge pages.
        let resident = segments.resident_bytes();
        assert!(resident == 2 * PAGE_SIZE as u64 || resident == 2 << 20);
        free(&mut segments, [0]);
        assert_eq!(segments.resident_bytes(), resident);
        free(&mut segments, [1]);
        assert_eq!(segments.resident_bytes(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_slot_is_given_twice(steps in proptest::collection::vec((1u32..200, any::<u16>()), 0..60)) {
            let (mut segments, mut taken) = (Segments::new(5000, 0), BTreeSet::new());
            for (n, back) in steps {
                if let Some((first, len)) = run(&mut segments, n) {
                    prop_assert!(len <= n && first + len <= 5000);
                    for slot in first..first + len {
                        prop_assert!(taken.insert(slot));
                    }
                } else {
                    prop_assert_eq!(taken.len(), 5000);
                }
                let gone: Vec<u32> =
                    taken.iter().copied().filter(|s| (s / 7 + u32::from(back)) % 3 == 0).collect();
                gone.iter().for_each(|s| _ = taken.remove(s));
                free(&mut segments, gone);
            }
        }
    }

    #[test]
    fn descriptors_for_services_cannot_be_written() {
        let mut segments = Segments::new(MAX_SLOTS, 0);
        run(&mut segments, 1);
        let file = segments.file(0);
        assert!(Mapping::read_write(&file, PAGE_SIZE).is_err());
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        if let Ok(again) = std::fs::OpenOptions::new().read(true).write(true).open(path) {
            assert!(Mapping::read_write(&again, PAGE_SIZE).is_err());
            assert!(rustix::io::pwrite(&again, &[1], 0).is_err());
            assert!(rustix::fs::ftruncate(&again, 0).is_err());
            let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            assert!(rustix::fs::fallocate(&again, punch, 0, 4096).is_err());
        }
        assert!(Mapping::read_only(&file, vmm_dedup_protocol::SEGMENT_BYTES).is_ok());
    }
}
