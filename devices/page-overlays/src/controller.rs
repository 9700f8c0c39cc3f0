//! The memory controller: everything below the caches (sections 4.3 and 4.4).
//!
//! A physical line goes straight to DRAM. Of an overlay line the OMT cache tells the slot. The first write of a line gives
//! it a slot, and a larger segment to its overlay if there is none left: all that only when a dirty line leaves the caches.
//! What an entry of the OMT cache knows better than memory is written when the entry goes.

use crate::account::{MemoryInUse, OmtCounters};
use crate::address::{LineAddress, Page};
use crate::config::{Config, OmtConfig};
use crate::dram::Dram;
use crate::lru::LruTable;
use crate::memory::MainMemory;
use crate::obits::OBitVector;
use crate::omt::{Entry, Omt};
use crate::segment::{Metadata, SegmentSize};
use crate::sizes::{LINE_BYTES, LINES, LineBytes, number};
use crate::store::Store;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// An entry of the OMT cache.
#[derive(Clone, Copy, Debug)]
struct Cached {
    entry: Entry,
    metadata: Option<Metadata>,
    entry_changed: bool,
    metadata_changed: bool,
    /// When the walk that brought it ends.
    walked: u64,
    /// When the segment's metadata is there as well.
    ready: u64,
}

/// What became of a request to prefetch a line.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Prefetch {
    /// There is no such line in memory.
    None,
    /// The OMT is walked until then: ask again.
    Later(u64),
    /// The line, and when it is there.
    Line(LineBytes, u64),
}

/// The controller, with all of memory.
#[derive(Debug)]
pub(crate) struct Controller {
    config: OmtConfig,
    pub(crate) memory: MainMemory,
    pub(crate) dram: Dram,
    pub(crate) store: Store,
    omt: Omt,
    cache: LruTable<Cached>,
    /// When each of the walkers is free.
    walkers: Vec<u64>,
    /// Writes whose place is known only when a walk ends: time and address in main memory.
    later: BinaryHeap<Reverse<(u64, u64)>>,
    pub(crate) counters: OmtCounters,
}

impl Controller {
    pub(crate) fn new(config: &Config) -> Self {
        let mut memory = MainMemory::new();
        Self {
            config: config.omt,
            store: Store::new(config.os.store_pages, &mut memory),
            memory,
            dram: Dram::new(config.dram),
            omt: Omt::default(),
            cache: LruTable::new(config.omt.entries, config.omt.entries),
            walkers: vec![0; config.omt.walks],
            later: BinaryHeap::new(),
            counters: OmtCounters::default(),
        }
    }

    /// Starts the writes whose time has come.
    fn catch_up(&mut self, now: u64) {
        while let Some(Reverse((at, address))) =
            self.later.peek().copied().filter(|Reverse((at, _))| *at <= now)
        {
            self.later.pop();
            self.dram.write(address, at);
        }
    }

    /// Writes a line of main memory: its bytes now, its transfer at `at`.
    fn write_at(&mut self, address: u64, bytes: &LineBytes, at: u64, now: u64) {
        self.memory.write(address, bytes);
        if at <= now {
            self.dram.write(address, now);
        } else {
            self.later.push(Reverse((at, address)));
        }
    }

    /// Brings a page's entry into the OMT cache; returns when it is there.
    fn entry(&mut self, page: Page, now: u64) -> u64 {
        if let Some(cached) = self.cache.get(page.number()) {
            self.counters.hits += 1;
            return cached.ready.max(now);
        }
        self.counters.misses += 1;
        let walker = self.walkers.iter_mut().min().expect("there is a walker");
        let walked = now.max(*walker) + self.config.miss_cycles;
        *walker = walked;
        let entry = self.omt.get(page);
        let (metadata, ready) = match entry.segment {
            Some(segment) if segment.size.has_metadata() => {
                self.counters.metadata_reads += 1;
                let metadata = Metadata::decode(&self.memory.read(segment.address));
                (Some(metadata), self.dram.read(segment.address, walked))
            }
            _ => (None, walked),
        };
        let new = Cached {
            entry,
            metadata,
            entry_changed: false,
            metadata_changed: false,
            walked,
            ready,
        };
        if let Some((key, old)) = self.cache.insert(page.number(), new) {
            self.put_back(Page::from_number(key), &old, now);
        }
        ready
    }

    /// Writes what an entry of the OMT cache knows better than memory.
    fn put_back(&mut self, page: Page, old: &Cached, now: u64) {
        if let (true, Some(metadata), Some(segment)) = (old.metadata_changed, old.metadata, old.entry.segment)
        {
            self.counters.metadata_writes += 1;
            self.write_at(segment.address, &metadata.encode(), now, now);
        }
        if old.entry_changed {
            self.counters.entry_writes += 1;
            self.omt.set(page, old.entry);
            // Entries of 16 bytes lie beside each other: the address stands for a line of a leaf.
            self.dram
                .write(OMT_REGION + page.number() / 4 * number(LINE_BYTES), now);
        }
    }

    fn cached(&mut self, page: Page) -> &mut Cached {
        self.cache
            .peek(page.number())
            .expect("the entry was just brought in")
    }

    /// Where a page's line is in main memory, if its overlay has it there.
    fn place_of(&mut self, page: Page, line: usize) -> Option<u64> {
        let cached = self.cached(page);
        let segment = cached.entry.segment.filter(|_| cached.entry.obits.has(line))?;
        match &cached.metadata {
            Some(metadata) => metadata.slot(line).map(|slot| segment.at(usize::from(slot))),
            None => Some(segment.at(line)),
        }
    }

    /// Reads a line that no cache has; returns it and when it is there.
    pub(crate) fn read(&mut self, address: LineAddress, now: u64) -> (LineBytes, u64) {
        self.catch_up(now);
        let (place, now) = match address.in_overlay() {
            None => (Some(address.get()), now),
            Some((page, line)) => {
                let ready = self.entry(page, now);
                (self.place_of(page, line), ready)
            }
        };
        let place = place.expect("an overlay line that no cache has is in the store");
        (self.memory.read(place), self.dram.read(place, now))
    }

    /// Reads a line ahead.
    pub(crate) fn prefetch(&mut self, address: LineAddress, now: u64) -> Prefetch {
        self.catch_up(now);
        let place = match address.in_overlay() {
            None => Some(address.get()).filter(|place| self.memory.has(*place)),
            Some((page, line)) => {
                let ready = self.entry(page, now);
                if ready > now {
                    return Prefetch::Later(ready);
                }
                self.place_of(page, line)
            }
        };
        match place {
            None => Prefetch::None,
            Some(place) => Prefetch::Line(self.memory.read(place), self.dram.read(place, now)),
        }
    }

    /// Takes a dirty line that left the caches.
    pub(crate) fn write_back(&mut self, address: LineAddress, bytes: &LineBytes, now: u64) {
        self.catch_up(now);
        let Some((page, line)) = address.in_overlay() else {
            self.write_at(address.get(), bytes, now, now);
            return;
        };
        let ready = self.entry(page, now);
        if self.place_of(page, line).is_none() {
            self.store.counters.lines_placed += 1;
        }
        loop {
            match self.place(page, line) {
                Some(place) => return self.write_at(place, bytes, ready, now),
                None => self.grow(page, ready),
            }
        }
    }

    /// A place in the overlay's segment for a line; `None` if the segment is full, or there is none.
    fn place(&mut self, page: Page, line: usize) -> Option<u64> {
        let cached = self.cached(page);
        debug_assert!(
            cached.entry.obits.has(line),
            "a line that the overlay does not have is written back"
        );
        let segment = cached.entry.segment?;
        let Some(metadata) = &mut cached.metadata else {
            return Some(segment.at(line));
        };
        let known = metadata.slot(line).is_some();
        let slot = metadata.place(line)?;
        cached.metadata_changed |= !known;
        Some(segment.at(usize::from(slot)))
    }

    /// Moves an overlay to a segment of the next size, or gives it its first one.
    fn grow(&mut self, page: Page, now: u64) {
        let old = *self.cached(page);
        let size = match old.entry.segment {
            None => SegmentSize::B256,
            Some(segment) => segment
                .size
                .larger()
                .expect("a segment of 4 KiB has a place for each line"),
        };
        let new = self.store.take(size, &mut self.memory);
        let mut metadata = size.has_metadata().then(|| Metadata::new(size));
        if let (Some(from), Some(slots)) = (old.entry.segment, &old.metadata) {
            self.store.counters.migrations += 1;
            for line in 0..LINES {
                let Some(slot) = slots.slot(line) else { continue };
                let place = match &mut metadata {
                    Some(metadata) => usize::from(metadata.place(line).expect("the larger segment has room")),
                    None => line,
                };
                let bytes = self.memory.read(from.at(usize::from(slot)));
                let read = self.dram.read(from.at(usize::from(slot)), now);
                self.write_at(new.at(place), &bytes, read, now);
                self.store.counters.lines_migrated += 1;
            }
            self.store.release(from);
        }
        let cached = self.cached(page);
        cached.entry.segment = Some(new);
        cached.metadata = metadata;
        cached.entry_changed = true;
        cached.metadata_changed = size.has_metadata();
    }

    /// An overlaying read-exclusive message (section 4.3.3): the line is in the overlay from now on.
    pub(crate) fn overlaying(&mut self, page: Page, line: usize, now: u64) {
        self.catch_up(now);
        self.entry(page, now);
        let cached = self.cached(page);
        cached.entry.obits.insert(line);
        cached.entry_changed = true;
    }

    /// The `OBitVector` for a TLB, and when it is there. It does not wait for the segment's metadata.
    pub(crate) fn obits(&mut self, page: Page, now: u64) -> (OBitVector, u64) {
        self.catch_up(now);
        self.entry(page, now);
        let cached = self.cached(page);
        (cached.entry.obits, cached.walked.max(now))
    }

    /// The `OBitVector` as the controller knows it, without asking for it.
    pub(crate) fn known_obits(&mut self, page: Page) -> OBitVector {
        match self.cache.peek(page.number()) {
            Some(cached) => cached.entry.obits,
            None => self.omt.get(page).obits,
        }
    }

    /// An overlay has become a page, or is discarded: its entry is empty and its segment free (section 4.3.4).
    pub(crate) fn clear(&mut self, page: Page, now: u64) {
        self.entry(page, now);
        let cached = self.cached(page);
        let segment = cached.entry.segment.take();
        cached.entry = Entry::default();
        cached.metadata = None;
        (cached.entry_changed, cached.metadata_changed) = (true, false);
        if let Some(segment) = segment {
            self.store.release(segment);
        }
    }

    /// Memory that overlays take.
    pub(crate) fn overlay_memory(&mut self) -> MemoryInUse {
        let mut entries: BTreeMap<Page, Entry> = self.omt.entries().collect();
        for key in self.cache.keys() {
            let page = Page::from_number(key);
            let entry = self.cached(page).entry;
            entries.insert(page, entry);
        }
        let lines: u64 = entries.values().map(|entry| u64::from(entry.obits.count())).sum();
        MemoryInUse {
            pages: 0,
            overlay_lines: lines * number(LINE_BYTES),
            segments: self.store.bytes_in_use(),
            store: self.store.pages() * number(crate::sizes::PAGE_BYTES),
            omt: self.omt.bytes(),
        }
    }

    /// Writes all that the OMT cache knows better than memory; returns when memory has all of it.
    pub(crate) fn flush(&mut self, now: u64) -> u64 {
        for key in self.cache.keys() {
            let page = Page::from_number(key);
            let old = *self.cached(page);
            self.put_back(page, &old, now);
            let cached = self.cached(page);
            (cached.entry_changed, cached.metadata_changed) = (false, false);
        }
        let writes = self.later.iter().map(|Reverse((at, _))| *at);
        let now = writes.chain(self.walkers.iter().copied()).fold(now, u64::max);
        self.catch_up(now);
        self.dram.finish(now)
    }
}

/// Where the table's lines are for DRAM's timing: far from the memory that the model hands out.
const OMT_REGION: u64 = 1 << 40;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Pid;
    use crate::config::OnWrite;

    fn page(number: u64) -> Page {
        Page::of(Pid::try_new(3).unwrap(), number * 4096).unwrap()
    }

    fn bytes(line: usize) -> LineBytes {
        [u8::try_from(line).unwrap() + 1; LINE_BYTES]
    }

    #[test]
    fn an_overlay_grows_through_all_sizes_and_keeps_its_lines() {
        let mut controller = Controller::new(&Config::table_2(OnWrite::Overlay));
        let mut sizes = Vec::new();
        for (count, line) in (0..LINES).rev().enumerate() {
            controller.overlaying(page(7), line, 0);
            controller.write_back(LineAddress::overlay(page(7), line), &bytes(line), 0);
            sizes.push(controller.cached(page(7)).entry.segment.unwrap().size.bytes());
            for written in line..LINES {
                let (read, _) = controller.read(LineAddress::overlay(page(7), written), 0);
                assert_eq!(read, bytes(written), "after {count} more lines");
            }
        }
        let expected = [256; 3]
            .into_iter()
            .chain([512; 4])
            .chain([1024; 8])
            .chain([2048; 16])
            .chain([4096; 33]);
        assert!(sizes.into_iter().eq(expected));
        assert_eq!(controller.store.counters.migrations, 4);
        assert_eq!(controller.store.counters.lines_migrated, 3 + 7 + 15 + 31);
        assert_eq!(controller.store.bytes_in_use(), 4096);
    }

    #[test]
    fn entries_that_left_the_omt_cache_are_found_again_in_memory() {
        let mut controller = Controller::new(&Config::table_2(OnWrite::Overlay));
        for number in 0..200 {
            controller.overlaying(page(number), 5, 0);
            controller.write_back(LineAddress::overlay(page(number), 5), &bytes(5), 0);
        }
        assert_eq!(controller.counters.entry_writes, 136);
        assert_eq!(controller.counters.metadata_writes, 136);
        for number in 0..200 {
            let (read, at) = controller.read(LineAddress::overlay(page(number), 5), 1_000_000);
            assert_eq!(read, bytes(5));
            assert!(at >= 1_001_000);
        }
    }

    #[test]
    fn a_cleared_overlay_gives_its_memory_back() {
        let mut controller = Controller::new(&Config::table_2(OnWrite::Overlay));
        controller.overlaying(page(1), 0, 0);
        controller.write_back(LineAddress::overlay(page(1), 0), &bytes(0), 0);
        assert_eq!(controller.overlay_memory().segments, 256);
        controller.clear(page(1), 0);
        controller.flush(0);
        let memory = controller.overlay_memory();
        assert_eq!((memory.segments, memory.overlay_lines, memory.omt), (0, 0, 0));
    }

    #[test]
    fn what_no_overlay_has_is_not_prefetched() {
        let mut controller = Controller::new(&Config::table_2(OnWrite::Overlay));
        let Prefetch::Later(at) = controller.prefetch(LineAddress::overlay(page(1), 0), 0) else {
            panic!("the entry is in no cache");
        };
        assert!(matches!(
            controller.prefetch(LineAddress::overlay(page(1), 0), at),
            Prefetch::None
        ));
    }
}
