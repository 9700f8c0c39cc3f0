//! The memory of the store: sealed memfds ([`crate::memory::segment`]), sparse until written.
//!
//! The store keeps the only writable mapping. Services get a descriptor that was opened read-only; the seal refuses
//! writable mappings and `write` also to whoever reopens it through /proc. The seal forbids the store, too, to punch
//! holes, so a slot that was written stays resident until its whole segment is empty and goes.
//!
//! Which slots are taken, and which segments are emptied, is decided by the [`Allocator`]; the files follow it here.

use crate::ledger::allocator::{Allocator, HUGE_PAGE_SLOTS, Purpose, Run};
use crate::ledger::epochs::MemberId;
use crate::memory::held::Held;
use crate::memory::segment::SegmentFile;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vmm_dedup_protocol::forward;
use vmm_dedup_protocol::key::{Key, PAGE_WORDS, PageHash, Salt, line_words};
use vmm_dedup_protocol::{HUGE_PAGES, PAGE_SIZE, SEGMENT_BYTES, SLOTS_PER_SEGMENT, Slot};

/// What segments that went and segments that are being emptied may cost on top of all else, since somebody keeps them: one part in so
/// many of that; four segments in any case.
const HELD_PART: u64 = 8;
const LEAST_HELD: u64 = 4 * SEGMENT_BYTES as u64;

/// All segments of a store.
#[derive(Debug)]
pub(crate) struct Segments {
    allocator: Allocator,
    files: Vec<Option<SegmentFile>>,
    /// Segments that went, and who may still tell of them and has not said that he knows them no more: their numbers are not given to
    /// others.
    retired: BTreeMap<u32, BTreeSet<MemberId>>,
    /// Their memory.
    held: Held,
    max_bytes: u64,
    /// What may come on top of that.
    max_held: u64,
    /// A segment was refused for that, and not since found to be possible.
    is_held_up: bool,
}

impl Segments {
    /// For at most `max_slots` pages; `at_random`: slots come from places that nobody can foresee.
    pub(crate) fn new(max_slots: u32, at_random: bool) -> Self {
        let max_bytes = u64::from(max_slots) * PAGE_SIZE as u64;
        Self {
            allocator: Allocator::new(max_slots, at_random),
            files: Vec::new(),
            retired: BTreeMap::new(),
            held: Held::default(),
            max_bytes,
            is_held_up: false,
            max_held: LEAST_HELD.max(max_bytes / HELD_PART),
        }
    }

    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    pub(super) fn allocator_mut(&mut self) -> &mut Allocator {
        &mut self.allocator
    }

    /// Takes up to `n` consecutive slots, `None` if the store is full. Fewer than `least`, if so many are wanted, only
    /// when no segment can be made. The second value is a segment's number if one had to be made for it: services
    /// must be given it before they can use the slots.
    pub(crate) fn allocate_run(
        &mut self,
        n: u32,
        purpose: Purpose,
        least: u32,
    ) -> io::Result<Option<(Run, Option<u32>)>> {
        if !self.allocator.lacks_choice(purpose)
            && let Some(run) = self.allocator.allocate_run(n, purpose, least)
        {
            return Ok(Some((run, None)));
        }
        let made = match self.allocator.next_segment(purpose) {
            Some(number) => self.add_segment(number, purpose).map(|()| Some(number)),
            None => Ok(None),
        };
        let run = self.allocator.allocate_run(n, purpose, 1);
        match (run, made) {
            (Some(run), made) => Ok(Some((run, made.unwrap_or(None)))),
            (None, made) => made.map(|_| None),
        }
    }

    /// As [`Self::allocate_run`], for the slots of a huge page, which lie as those of one; never fewer. No segment is made
    /// while there is room for its pages elsewhere.
    pub(crate) fn allocate_huge_page(&mut self, purpose: Purpose) -> io::Result<Option<(Run, Option<u32>)>> {
        if let Some(run) = self.allocator.allocate_huge_page(purpose) {
            return Ok(Some((run, None)));
        }
        let scattered = self.allocator.free_slots(purpose) >= u64::from(HUGE_PAGE_SLOTS);
        let next = self.allocator.next_segment(purpose).filter(|_| !scattered);
        let Some(number) = next.filter(|_| self.allocator.has_room_for_huge_page(purpose)) else {
            return Ok(None);
        };
        self.add_segment(number, purpose)?;
        let run = self.allocator.allocate_huge_page(purpose);
        Ok(run.map(|run| (run, Some(number))))
    }

    fn add_segment(&mut self, number: u32, purpose: Purpose) -> io::Result<()> {
        self.check_held()?;
        let (at, file) = (number as usize, SegmentFile::new()?);
        if self.files.len() <= at {
            self.files.resize_with(at + 1, || None);
        }
        self.files[at] = Some(file);
        self.allocator.add_segment(number, purpose);
        Ok(())
    }

    /// Refuses a segment more while processes keep so much of segments that went that all together would be more than there may be.
    /// Nothing can be taken from them, so the store stays as large as it is.
    fn check_held(&mut self) -> io::Result<()> {
        self.held.look();
        let (files, gone) = self.held.sum();
        let there = (self.count() + 1) * SEGMENT_BYTES as u64;
        self.is_held_up = there + gone > self.max_bytes + self.max_held;
        if !self.is_held_up {
            return Ok(());
        }
        let emptied = self.allocator.counts().segments_leaving;
        Err(io::Error::other(format!(
            "processes keep {} MiB in {files} files that went, and pages in {emptied} that are being emptied: end who does not let go, or \
             raise --max-mib",
            gone >> 20
        )))
    }

    /// Whether a segment was refused for what processes keep, and would not be any more. To be called once a second.
    pub(crate) fn is_let_go(&mut self) -> bool {
        self.is_held_up && self.check_held().is_ok()
    }

    /// Gives back a slot that was never in the index. Returns its segment's number if that was the last one in use
    /// there: the segment is to be retired.
    pub(crate) fn give_back(&mut self, slot: Slot) -> Option<u32> {
        self.allocator.give_back(slot)
    }

    /// Nobody references a slot any more. Returns its segment's number as [`Self::give_back`] does.
    pub(crate) fn bury(&mut self, slot: Slot) -> Option<u32> {
        self.allocator.bury(slot)
    }

    /// A segment that is to be retired, since no slot of it is in use: its number.
    pub(crate) fn retire_idle(&mut self) -> Option<u32> {
        self.allocator.retire_idle()
    }

    /// The file of a segment goes. These members know it, and may map it, and those that are `waiting` can tell of it. It is never
    /// written again: what somebody still reads of it stays as it is.
    pub(crate) fn retire(&mut self, number: u32, known_to: BTreeSet<MemberId>, waiting: BTreeSet<MemberId>) {
        if let Some(file) = self.files[number as usize].take() {
            self.held.let_go(number, file, known_to);
            self.retired.insert(number, waiting);
        }
    }

    /// Whether the file of a slot's segment is there.
    pub(crate) fn has_file(&self, slot: Slot) -> bool {
        matches!(self.files.get(slot.segment() as usize), Some(Some(_)))
    }

    /// A member knows a retired segment no more. Whether it did before.
    pub(crate) fn forget(&mut self, number: u32, id: MemberId) -> bool {
        let waiting = self.retired.get_mut(&number);
        let knew = waiting.is_some_and(|waiting| waiting.remove(&id));
        if knew {
            self.held.said(id, number);
        }
        knew
    }

    /// A member can tell of nothing any more, whatever its process maps.
    pub(crate) fn lose(&mut self, id: MemberId) {
        self.retired
            .values_mut()
            .for_each(|waiting| _ = waiting.remove(&id));
    }

    /// A member has gone: its process maps nothing any more.
    pub(crate) fn ended(&mut self, id: MemberId) {
        self.lose(id);
        self.held.ended(id);
    }

    /// Gives the numbers of retired segments to others from now on, of those that nobody knows and `is_free` agrees to.
    pub(crate) fn release(&mut self, is_free: impl Fn(u32) -> bool) {
        let allocator = &mut self.allocator;
        self.retired.retain(|number, waiting| {
            let released = waiting.is_empty() && is_free(*number);
            if released {
                allocator.release(*number);
            }
            !released
        });
    }

    /// Files that went and that somebody keeps, and what their memory costs, as of the last [`Self::look_at_held`].
    pub(crate) fn held(&self) -> (u64, u64) {
        self.held.sum()
    }

    /// Whether what is held is half of what may be, or more.
    pub(crate) fn much_is_held(&self) -> bool {
        self.held.sum().1 >= self.max_held / 2
    }

    /// Whether a member knows a segment that went.
    pub(crate) fn waits_for(&self, id: MemberId) -> bool {
        self.known_to(id).next().is_some()
    }

    /// Segments that went, and who may still tell of each and has not said that he knows it no more.
    pub(crate) fn retired(&self) -> impl Iterator<Item = (u32, &BTreeSet<MemberId>)> {
        self.retired.iter().map(|(number, waiting)| (*number, waiting))
    }

    /// Segments that went and whose numbers were not given to others.
    pub(crate) fn gone(&self) -> impl Iterator<Item = u32> {
        self.retired.keys().copied()
    }

    /// Segments that went and that a member knows.
    pub(crate) fn known_to(&self, id: MemberId) -> impl Iterator<Item = u32> {
        let known = self
            .retired
            .iter()
            .filter(move |(_, waiting)| waiting.contains(&id));
        known.map(|(number, _)| *number)
    }

    /// Whether the store does not grow, as of the last look, since processes keep files.
    pub(crate) fn is_held_up(&self) -> bool {
        self.is_held_up
    }

    /// How many segments may be kept of those that went or were emptied.
    pub(crate) fn may_be_held(&self) -> usize {
        usize::try_from(self.max_held / SEGMENT_BYTES as u64).unwrap_or(usize::MAX)
    }

    /// Asks the kernel which files that went somebody keeps. To be called once a second.
    pub(crate) fn look_at_held(&mut self) {
        self.held.look();
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
        self.allocator.small_huge_page(last)
    }

    /// Makes the memory of a huge page's slots one; its content stays.
    pub(crate) fn collapse(&mut self, run: &Run) -> io::Result<()> {
        let start = (run.first.number() % SLOTS_PER_SEGMENT) as usize;
        self.segment(run.first.segment())
            .map
            .collapse(start, HUGE_PAGES)?;
        self.allocator.note_collapsed(run);
        Ok(())
    }

    /// Reads page `from` of a service's file into an allocated slot. A page that the service has not written is zeros, and gets no memory
    /// by being read: who maps the file would have it allocated, on his own account.
    ///
    /// # Errors
    /// Those of the kernel: a page that cannot be swapped in.
    pub(crate) fn fill(&mut self, slot: Slot, source: &OwnedFd, from: usize) -> io::Result<()> {
        let map = &self.segment(slot.segment()).map;
        map.read_page_from(slot.offset() / PAGE_SIZE, source, from)
    }

    /// Copies the page of one allocated slot into another.
    pub(crate) fn copy(&mut self, slot: Slot, source: Slot) {
        let (from, to) = (self.segment(source.segment()), self.segment(slot.segment()));
        let (from_page, to_page) = (source.offset() / PAGE_SIZE, slot.offset() / PAGE_SIZE);
        to.map.copy_page_from(to_page, &from.map, from_page);
    }

    /// Tells whoever maps a slot where its page has moved.
    pub(crate) fn forward(&self, slot: Slot, to: Slot) {
        forward::write(&self.segment(slot.segment()).map, slot, to);
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
        let files = (0u32..).zip(&self.files);
        files.filter_map(|(number, segment)| Some((number, segment.as_ref()?.file.clone())))
    }

    /// The read-only descriptor of one segment.
    pub(crate) fn file(&self, number: u32) -> Arc<OwnedFd> {
        self.segment(number).file.clone()
    }

    /// What the segments' pages cost, in use or not, and those of segments that went, as long as somebody keeps them.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let there: u64 = self.files.iter().flatten().map(SegmentFile::resident_bytes).sum();
        there + self.held.sum().1
    }

    /// Segments that there are.
    pub(crate) fn count(&self) -> u64 {
        self.files.iter().flatten().count() as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.allocator.bytes() + self.files.capacity() * size_of::<Option<SegmentFile>>()
    }

    fn segment(&self, number: u32) -> &SegmentFile {
        self.files[number as usize]
            .as_ref()
            .expect("slots in use have a segment")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use vmm_dedup_protocol::MAX_SLOTS;
    use vmm_dedup_protocol::mapping::Mapping;

    fn run(segments: &mut Segments, n: u32) -> Option<(u32, u32)> {
        segments
            .allocate_run(n, Purpose::New, 1)
            .unwrap()
            .map(|(run, _)| (run.first.number(), run.len))
    }

    /// Gives slots back; a segment that goes is known by nobody.
    fn give_back(segments: &mut Segments, numbers: impl IntoIterator<Item = u32>) {
        for n in numbers {
            assert_eq!(segments.give_back(Slot::try_new(n).unwrap()), None);
        }
        while let Some(number) = segments.retire_idle() {
            segments.retire(number, BTreeSet::new(), BTreeSet::new());
            segments.release(|_| true);
        }
    }

    #[test]
    fn a_huge_page_keeps_its_content_when_it_becomes_one() {
        let mut segments = Segments::new(MAX_SLOTS, false);
        assert!(segments.allocate_run(3, Purpose::New, 1).unwrap().is_some());
        let (run, _) = segments.allocate_huge_page(Purpose::New).unwrap().unwrap();
        for slot in run.slots() {
            let words = segments.words(slot);
            words
                .iter()
                .for_each(|word| word.store(u64::from(slot.number()), Ordering::Relaxed));
        }
        // Without a huge page to be had it stays as it is.
        let collapsed = segments.collapse(&run);
        for slot in run.slots() {
            let same = |word: &AtomicU64| word.load(Ordering::Relaxed) == u64::from(slot.number());
            assert!(segments.words(slot).iter().all(same), "{collapsed:?}");
        }
    }

    #[test]
    fn a_number_comes_back_with_another_file() {
        let mut segments = Segments::new(MAX_SLOTS, false);
        run(&mut segments, 2);
        let before = segments.file(0);
        let (reader, lost) = (MemberId(1), MemberId(2));
        assert_eq!(segments.bury(Slot::try_new(0).unwrap()), None);
        assert_eq!(segments.give_back(Slot::try_new(1).unwrap()), None);
        assert_eq!(segments.retire_idle(), Some(0));
        segments.retire(0, [reader, lost].into(), [reader, lost].into());
        segments.lose(lost);
        segments.release(|_| true);
        assert_eq!(segments.held().0, 1);
        assert_eq!(
            (run(&mut segments, 1), segments.count()),
            (Some((SLOTS_PER_SEGMENT, 1)), 1),
            "who maps it may still name its slots"
        );
        assert!(segments.forget(0, reader) && !segments.forget(0, reader));
        segments.release(|_| false);
        run(&mut segments, SLOTS_PER_SEGMENT - 1);
        assert_eq!(run(&mut segments, 9), Some((2 * SLOTS_PER_SEGMENT, 9)));
        segments.release(|_| true);
        run(&mut segments, SLOTS_PER_SEGMENT - 9);
        assert_eq!(run(&mut segments, 9), Some((0, 9)));
        let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
        assert_ne!(inode(&before), inode(&segments.file(0)));
    }

    #[test]
    fn no_segment_is_made_for_a_huge_page_that_does_not_fit() {
        let mut segments = Segments::new(HUGE_PAGE_SLOTS - 1, false);
        assert_eq!(segments.allocate_huge_page(Purpose::New).unwrap(), None);
        assert_eq!(segments.count(), 0);
        let mut segments = Segments::new(3 * HUGE_PAGE_SLOTS, false);
        let huge_page = segments.allocate_huge_page(Purpose::New).unwrap();
        assert_eq!(
            huge_page.map(|(run, new)| (run.first.number(), new)),
            Some((0, Some(0)))
        );
    }

    #[test]
    fn written_slots_count_until_their_segment_goes() {
        let mut segments = Segments::new(MAX_SLOTS, false);
        let (source, map) = vmm_dedup_protocol::mapping::staging_memfd(PAGE_SIZE).unwrap();
        map.write_page(0, &[7; PAGE_WORDS]);
        run(&mut segments, 2);
        let slot = |n| Slot::try_new(n).unwrap();
        segments.fill(slot(0), &source, 0).unwrap();
        assert!(!segments.equal(slot(0), slot(1)));
        segments.fill(slot(1), &source, 0).unwrap();
        segments.fill(slot(1), &source, 0).unwrap();
        assert!(segments.equal(slot(0), slot(1)));
        // Exactly two, unless this host gives shared memory larger folios: of 64 KiB, or huge pages.
        let resident = segments.resident_bytes();
        assert!(
            [2 * PAGE_SIZE as u64, 64 << 10, 2 << 20].contains(&resident),
            "{resident}"
        );
        give_back(&mut segments, [0]);
        assert_eq!(segments.resident_bytes(), resident);
        give_back(&mut segments, [1]);
        assert_eq!(segments.resident_bytes(), 0);
    }

    #[test]
    fn reading_what_a_service_has_not_written_takes_no_memory() {
        let mut segments = Segments::new(MAX_SLOTS, false);
        let (source, _map) = vmm_dedup_protocol::mapping::staging_memfd(4 * PAGE_SIZE).unwrap();
        run(&mut segments, 1);
        let slot = Slot::try_new(0).unwrap();
        segments.fill(slot, &source, 3).unwrap();
        assert_eq!(rustix::fs::fstat(&source).unwrap().st_blocks, 0);
        let refused = segments.fill(slot, &source, 4).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn descriptors_for_services_cannot_be_written() {
        let mut segments = Segments::new(MAX_SLOTS, false);
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
        assert!(Mapping::read_only(&file, vmm_dedup_protocol::SEGMENT_FILE_BYTES).is_ok());
    }
}
