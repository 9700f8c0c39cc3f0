//! The caches of all cores, and the prefetchers, above the memory controller (table 2).
//!
//! Each core has an L1 and an L2; the L3 is shared. No level includes another (section 5). A line's newest bytes are in the
//! highest level of the core that wrote it last; a core that wants a line asks the others first, and one that writes a line
//! takes it away from them.

use crate::account::{CacheCounters, PrefetchCounters};
use crate::address::LineAddress;
use crate::cache::{Cache, Line};
use crate::config::{CacheConfig, Config};
use crate::controller::{Controller, Prefetch};
use crate::prefetch::Prefetcher;
use crate::sizes::{LINE_BYTES, LINES, LineBytes};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

#[derive(Debug)]
struct Private {
    l1: Cache,
    l2: Cache,
    prefetcher: Prefetcher,
}

/// All caches, with what is below them.
#[derive(Debug)]
pub(crate) struct Hierarchy {
    levels: [CacheConfig; 3],
    private: Vec<Private>,
    l3: Cache,
    pub(crate) controller: Controller,
    /// Prefetches that wait for the OMT.
    later: BinaryHeap<Reverse<(u64, LineAddress)>>,
    wanted: Vec<LineAddress>,
    pub(crate) prefetches: PrefetchCounters,
}

impl Hierarchy {
    pub(crate) fn new(config: &Config) -> Self {
        let private = |_| Private {
            l1: Cache::new(config.l1),
            l2: Cache::new(config.l2),
            prefetcher: Prefetcher::new(config.prefetch),
        };
        Self {
            levels: [config.l1, config.l2, config.l3],
            private: (0..config.cores).map(private).collect(),
            l3: Cache::new(config.l3),
            controller: Controller::new(config),
            later: BinaryHeap::new(),
            wanted: Vec::new(),
            prefetches: PrefetchCounters::default(),
        }
    }

    /// Cycles after which a request of a core is at the L3, and so at the other cores and the memory controller.
    pub(crate) fn message_cycles(&self) -> u64 {
        self.levels.iter().map(|level| level.tag_cycles).sum()
    }

    /// Reads a line; returns it, and when it is there.
    pub(crate) fn read(&mut self, core: usize, address: LineAddress, now: u64) -> (LineBytes, u64) {
        let line = self.fetch(core, address, now);
        (line.bytes, line.ready)
    }

    /// Writes bytes at `at` of a line; returns when the line is there.
    pub(crate) fn write(
        &mut self,
        core: usize,
        address: LineAddress,
        at: usize,
        bytes: &[u8],
        now: u64,
    ) -> u64 {
        let line = self.fetch(core, address, now);
        for (_, other) in self
            .private
            .iter_mut()
            .enumerate()
            .filter(|(other, _)| *other != core)
        {
            other.l1.remove(address);
            other.l2.remove(address);
        }
        let there = self.private[core].l1.change(address, at, bytes);
        debug_assert!(there, "the line was just fetched");
        line.ready
    }

    /// An overlaying write's first step: a line of a page becomes a line of the overlay, dirty, by another tag or (where the
    /// page's line is dirty itself) as a copy. Returns when it is there.
    pub(crate) fn retag(&mut self, core: usize, from: LineAddress, to: LineAddress, now: u64) -> u64 {
        let line = self.fetch(core, from, now);
        if !line.dirty {
            self.private[core].l1.remove(from);
        }
        self.create(core, to, line.bytes, line.ready);
        line.ready
    }

    /// Puts a new, dirty line into the L1.
    pub(crate) fn create(&mut self, core: usize, address: LineAddress, bytes: LineBytes, ready: u64) {
        let line = Line {
            address,
            bytes,
            dirty: true,
            ready,
            prefetched: false,
        };
        self.put_l1(core, &line, ready);
    }

    /// Brings a line into the L1.
    fn fetch(&mut self, core: usize, address: LineAddress, now: u64) -> Line {
        self.catch_up(now);
        let [l1, l2, l3] = self.levels;
        if let Some(line) = self.private[core].l1.look_up(address) {
            let ready = line.ready.max(now + l1.hit_cycles);
            return Line { ready, ..line };
        }
        self.ask_others(core, address, now);
        let at_l2 = now + l1.tag_cycles;
        if let Some(line) = self.private[core].l2.look_up(address) {
            let line = Line {
                dirty: false,
                ready: line.ready.max(at_l2 + l2.hit_cycles),
                ..line
            };
            self.put_l1(core, &line, now);
            return line;
        }
        let at_l3 = at_l2 + l2.tag_cycles;
        let mut wanted = std::mem::take(&mut self.wanted);
        self.private[core].prefetcher.miss(address, &mut wanted);
        let line = match self.l3.look_up(address) {
            Some(line) => {
                self.prefetches.used += u64::from(line.prefetched);
                Line {
                    dirty: false,
                    prefetched: false,
                    ready: line.ready.max(at_l3 + l3.hit_cycles),
                    ..line
                }
            }
            None => self.fetch_from_memory(address, at_l3 + l3.tag_cycles),
        };
        self.put_l2(core, &line, now);
        self.put_l1(core, &line, now);
        for address in wanted.drain(..) {
            self.prefetch(address, at_l3);
        }
        self.wanted = wanted;
        line
    }

    fn fetch_from_memory(&mut self, address: LineAddress, now: u64) -> Line {
        let (bytes, ready) = self.controller.read(address, now);
        let line = Line {
            address,
            bytes,
            dirty: false,
            ready,
            prefetched: false,
        };
        self.put_l3(&line, now);
        line
    }

    /// Lets other cores give up what they have written of a line, to the L3.
    fn ask_others(&mut self, core: usize, address: LineAddress, now: u64) {
        for other in (0..self.private.len()).filter(|other| *other != core) {
            let Private { l1, l2, .. } = &mut self.private[other];
            let newest = [l1.peek(address), l2.peek(address)]
                .into_iter()
                .flatten()
                .find(|line| line.dirty);
            let Some(line) = newest else { continue };
            l1.clean(address);
            // An older copy in its L2 gets the new bytes: the L1's may be dropped from now on.
            if l2.change(address, 0, &line.bytes) {
                l2.clean(address);
            }
            self.put_l3(&line, now);
        }
    }

    fn put_l1(&mut self, core: usize, line: &Line, now: u64) {
        if let Some(gone) = self.private[core].l1.insert(line) {
            self.put_l2(core, &gone, now);
        }
    }

    fn put_l2(&mut self, core: usize, line: &Line, now: u64) {
        if let Some(gone) = self.private[core].l2.insert(line) {
            self.put_l3(&gone, now);
        }
    }

    fn put_l3(&mut self, line: &Line, now: u64) {
        if let Some(gone) = self.l3.insert(line) {
            self.controller.write_back(gone.address, &gone.bytes, now);
        }
    }

    /// Fetches a line into the L3 ahead of its use.
    pub(crate) fn prefetch(&mut self, address: LineAddress, now: u64) {
        if let Some(at) = self.try_prefetch(address, now) {
            self.later.push(Reverse((at, address)));
        }
    }

    /// Fetches a line ahead, or tells when to try again because the OMT is walked until then.
    fn try_prefetch(&mut self, address: LineAddress, now: u64) -> Option<u64> {
        if self.l3.peek(address).is_some() {
            return None;
        }
        match self.controller.prefetch(address, now) {
            Prefetch::None => self.prefetches.dropped += 1,
            Prefetch::Later(at) => return Some(at),
            Prefetch::Line(bytes, ready) => {
                self.prefetches.fetched += 1;
                let line = Line {
                    address,
                    bytes,
                    dirty: false,
                    ready,
                    prefetched: true,
                };
                self.put_l3(&line, now);
            }
        }
        None
    }

    /// Starts the prefetches whose time has come.
    fn catch_up(&mut self, now: u64) {
        while let Some(Reverse((at, address))) =
            self.later.peek().copied().filter(|Reverse((at, _))| *at <= now)
        {
            self.later.pop();
            // The entry of the OMT has left its cache again: prefetches that would wait twice are given up.
            if self.try_prefetch(address, at).is_some() {
                self.prefetches.dropped += 1;
            }
        }
    }

    /// Takes a line out of all caches, whatever it holds: nobody will read it again.
    pub(crate) fn drop_line(&mut self, address: LineAddress) {
        for Private { l1, l2, .. } in &mut self.private {
            l1.remove(address);
            l2.remove(address);
        }
        self.l3.remove(address);
    }

    /// Takes a page of main memory out of all caches, whatever they hold.
    pub(crate) fn drop_frame(&mut self, frame: u64) {
        for line in 0..LINES {
            self.drop_line(LineAddress::physical(frame, line));
        }
    }

    /// Writes all that caches know better than memory; returns when memory has all of it.
    pub(crate) fn flush(&mut self, now: u64) -> u64 {
        for core in 0..self.private.len() {
            for line in self.private[core].l1.take_dirty() {
                self.put_l2(core, &line, now);
            }
            for line in self.private[core].l2.take_dirty() {
                self.put_l3(&line, now);
            }
        }
        for line in self.l3.take_dirty() {
            self.controller.write_back(line.address, &line.bytes, now);
        }
        self.controller.flush(now)
    }

    /// The counters of L1, L2 and L3.
    pub(crate) fn counters(&self) -> [CacheCounters; 3] {
        let sum = |of: fn(&Private) -> CacheCounters| {
            self.private
                .iter()
                .map(of)
                .fold(CacheCounters::default(), |sum, one| CacheCounters {
                    hits: sum.hits + one.hits,
                    misses: sum.misses + one.misses,
                    write_backs: sum.write_backs + one.write_backs,
                })
        };
        [
            sum(|core| core.l1.counters),
            sum(|core| core.l2.counters),
            self.l3.counters,
        ]
    }
}

const _: () = assert!(LINE_BYTES == 64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OnWrite;

    fn hierarchy(cores: usize) -> Hierarchy {
        let mut config = Config::table_2(OnWrite::Overlay);
        config.cores = cores;
        let mut hierarchy = Hierarchy::new(&config);
        for _ in 0..4096 {
            hierarchy.controller.memory.allocate();
        }
        hierarchy
    }

    /// A page behind those that the Overlay Memory Store has.
    fn line(page: u64) -> LineAddress {
        LineAddress::physical(100 + page, 0)
    }

    #[test]
    fn hits_take_what_table_2_says() {
        let mut caches = hierarchy(1);
        let (_, memory) = caches.read(0, line(0), 0);
        // Three tag lookups, then a closed row: 18 clocks.
        assert_eq!(memory, 13 + 90);
        assert_eq!(caches.read(0, line(0), 1000).1, 1002);
        caches.private[0].l1.remove(line(0));
        assert_eq!(caches.read(0, line(0), 2000).1, 2009);
        caches.private[0].l1.remove(line(0));
        caches.private[0].l2.remove(line(0));
        assert_eq!(caches.read(0, line(0), 3000).1, 3037);
    }

    #[test]
    fn a_core_reads_what_another_wrote_through_evictions_of_copies() {
        let mut caches = hierarchy(2);
        caches.read(0, line(0), 0);
        caches.write(0, line(0), 1, &[7], 0);
        assert_eq!(caches.read(1, line(0), 10).0[1], 7);
        // The first core's copy in its L1 goes; the one in its L2 has the new bytes.
        caches.private[0].l1.remove(line(0));
        assert_eq!(caches.read(0, line(0), 20).0[1], 7);
        caches.write(1, line(0), 1, &[8], 30);
        assert_eq!(caches.read(0, line(0), 40).0[1], 8);
    }

    #[test]
    fn a_clean_line_changes_its_tag_and_a_dirty_one_is_copied() {
        let pid = crate::address::Pid::try_new(1).unwrap();
        let page = crate::address::Page::of(pid, 0).unwrap();
        let to = LineAddress::overlay(page, 0);
        let mut caches = hierarchy(1);
        caches.read(0, line(1), 0);
        caches.retag(0, line(1), to, 0);
        assert!(caches.private[0].l1.peek(line(1)).is_none());
        caches.write(0, line(2), 0, &[5], 0);
        caches.retag(0, line(2), LineAddress::overlay(page, 1), 0);
        assert_eq!(caches.private[0].l1.peek(line(2)).unwrap().bytes[0], 5);
    }

    #[test]
    fn a_stream_is_in_the_l3_before_it_is_asked_for() {
        let mut caches = hierarchy(1);
        let mut now = 0;
        for number in 0..64 {
            now = caches.read(0, LineAddress::physical(100, number), now).1 + 100;
        }
        assert_eq!(caches.counters()[2].misses, 3);
        assert_eq!(caches.prefetches.used, 61);
    }
}
