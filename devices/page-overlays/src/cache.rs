//! Caches (table 2): their lines with their bytes, by LRU or DRRIP (the paper's reference 28).

use crate::account::CacheCounters;
use crate::address::LineAddress;
use crate::config::{CacheConfig, Policy};
use crate::sizes::{LINE_BYTES, LineBytes, index, number};

/// A line on its way in or out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) address: LineAddress,
    pub(crate) bytes: LineBytes,
    pub(crate) dirty: bool,
    /// When its bytes are there.
    pub(crate) ready: u64,
    /// A prefetch brought it, and nobody has asked for it since.
    pub(crate) prefetched: bool,
}

/// What is known of a line besides its address and bytes.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    dirty: bool,
    prefetched: bool,
    ready: u64,
    /// LRU: when it was used. DRRIP: its re-reference prediction, 0 to 3.
    rank: u64,
}

/// No line has this address: line addresses are multiples of 64.
const NOTHING: u64 = u64::MAX;
/// DRRIP: a line that is not expected soon.
const DISTANT: u64 = 3;
/// DRRIP: of 32 sets one always inserts as SRRIP does, and one as BRRIP does.
const DUEL: usize = 32;
/// DRRIP: one line in so many is expected sooner under BRRIP.
const BIMODAL: u64 = 32;
/// DRRIP: the selector has ten bits.
const MOST_SELECTOR: u64 = 1023;

/// A cache.
#[derive(Debug)]
pub(crate) struct Cache {
    ways: usize,
    sets: usize,
    policy: Policy,
    addresses: Vec<u64>,
    states: Vec<State>,
    bytes: Vec<LineBytes>,
    clock: u64,
    /// DRRIP: misses in sets of SRRIP less those in sets of BRRIP, from the middle.
    selector: u64,
    pub(crate) counters: CacheCounters,
}

impl Cache {
    pub(crate) fn new(config: CacheConfig) -> Self {
        let lines = config.bytes / LINE_BYTES;
        Self {
            ways: config.ways,
            sets: lines / config.ways,
            policy: config.policy,
            addresses: vec![NOTHING; lines],
            states: vec![State::default(); lines],
            bytes: vec![[0; LINE_BYTES]; lines],
            clock: 0,
            selector: MOST_SELECTOR / 2,
            counters: CacheCounters::default(),
        }
    }

    fn set(&self, address: LineAddress) -> usize {
        index(address.get() / number(LINE_BYTES)) & (self.sets - 1)
    }

    /// Where a line is.
    fn find(&self, address: LineAddress) -> Option<usize> {
        let first = self.set(address) * self.ways;
        let ways = &self.addresses[first..first + self.ways];
        ways.iter()
            .position(|other| *other == address.get())
            .map(|way| first + way)
    }

    /// Looks a line up for use: counts, and keeps it longer.
    pub(crate) fn look_up(&mut self, address: LineAddress) -> Option<Line> {
        let Some(at) = self.find(address) else {
            self.counters.misses += 1;
            return None;
        };
        self.counters.hits += 1;
        self.clock += 1;
        self.states[at].rank = match self.policy {
            Policy::Lru => self.clock,
            Policy::Drrip => 0,
        };
        let line = self.line(at);
        self.states[at].prefetched = false;
        Some(line)
    }

    /// The line, without using it.
    pub(crate) fn peek(&self, address: LineAddress) -> Option<Line> {
        self.find(address).map(|at| self.line(at))
    }

    fn line(&self, at: usize) -> Line {
        let state = self.states[at];
        Line {
            address: LineAddress::from_raw(self.addresses[at]),
            bytes: self.bytes[at],
            dirty: state.dirty,
            ready: state.ready,
            prefetched: state.prefetched,
        }
    }

    /// Changes bytes of a line; it is dirty then. `false`: the line is not here.
    pub(crate) fn change(&mut self, address: LineAddress, at: usize, bytes: &[u8]) -> bool {
        let Some(place) = self.find(address) else {
            return false;
        };
        self.bytes[place][at..at + bytes.len()].copy_from_slice(bytes);
        self.states[place].dirty = true;
        true
    }

    /// A line's bytes are below as well: it is not dirty any more.
    pub(crate) fn clean(&mut self, address: LineAddress) {
        if let Some(at) = self.find(address) {
            self.states[at].dirty = false;
        }
    }

    /// Puts a line in, or its bytes in the place of those that are there; returns a dirty line that had to go.
    pub(crate) fn insert(&mut self, line: &Line) -> Option<Line> {
        if let Some(at) = self.find(line.address) {
            self.bytes[at] = line.bytes;
            let state = &mut self.states[at];
            state.dirty |= line.dirty;
            state.ready = state.ready.max(line.ready);
            return None;
        }
        let set = self.set(line.address);
        let at = self.victim(set);
        let gone = (self.addresses[at] != NOTHING && self.states[at].dirty).then(|| self.line(at));
        self.counters.write_backs += u64::from(gone.is_some());
        self.clock += 1;
        let rank = match self.policy {
            Policy::Lru => self.clock,
            Policy::Drrip => self.first_prediction(set),
        };
        self.addresses[at] = line.address.get();
        self.bytes[at] = line.bytes;
        self.states[at] = State {
            dirty: line.dirty,
            prefetched: line.prefetched,
            ready: line.ready,
            rank,
        };
        gone
    }

    /// The place in a set that is taken next.
    fn victim(&mut self, set: usize) -> usize {
        let places = set * self.ways..(set + 1) * self.ways;
        if let Some(free) = places.clone().find(|at| self.addresses[*at] == NOTHING) {
            return free;
        }
        match self.policy {
            Policy::Lru => places
                .min_by_key(|at| self.states[*at].rank)
                .unwrap_or(set * self.ways),
            Policy::Drrip => {
                let oldest = places
                    .clone()
                    .map(|at| self.states[at].rank)
                    .max()
                    .unwrap_or(DISTANT);
                for state in &mut self.states[places.clone()] {
                    state.rank += DISTANT - oldest;
                }
                let distant = places.clone().find(|at| self.states[*at].rank == DISTANT);
                distant.unwrap_or(places.start)
            }
        }
    }

    /// DRRIP: how soon a new line of a set is expected. A new line is a miss, and counts in the duel.
    fn first_prediction(&mut self, set: usize) -> u64 {
        let bimodal = match set % DUEL {
            0 => {
                self.selector = (self.selector + 1).min(MOST_SELECTOR);
                false
            }
            1 => {
                self.selector = self.selector.saturating_sub(1);
                true
            }
            _ => self.selector > MOST_SELECTOR / 2,
        };
        let distant = bimodal && !self.clock.is_multiple_of(BIMODAL);
        if distant { DISTANT } else { DISTANT - 1 }
    }

    /// Takes a line out.
    pub(crate) fn remove(&mut self, address: LineAddress) -> Option<Line> {
        let at = self.find(address)?;
        let line = self.line(at);
        self.addresses[at] = NOTHING;
        Some(line)
    }

    /// Takes all dirty lines out, in order of their places; the others stay.
    pub(crate) fn take_dirty(&mut self) -> Vec<Line> {
        let dirty = |at: &usize| self.addresses[*at] != NOTHING && self.states[*at].dirty;
        let places: Vec<usize> = (0..self.addresses.len()).filter(dirty).collect();
        let lines = places.iter().map(|at| self.line(*at)).collect();
        for at in places {
            self.addresses[at] = NOTHING;
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, OnWrite};

    fn line(frame: u64, dirty: bool) -> Line {
        Line {
            address: LineAddress::physical(frame, 0),
            bytes: [u8::try_from(frame % 256).unwrap(); LINE_BYTES],
            dirty,
            ready: 0,
            prefetched: false,
        }
    }

    #[test]
    fn lru_evicts_what_was_used_longest_ago() {
        // 256 sets of 4 ways: pages 4 apart share the set of their first lines.
        let mut cache = Cache::new(Config::table_2(OnWrite::Copy).l1);
        for frame in [0, 4, 8, 12] {
            assert!(cache.insert(&line(frame, true)).is_none());
        }
        assert!(cache.look_up(line(0, true).address).is_some());
        let gone = cache.insert(&line(16, false)).unwrap();
        assert_eq!(gone.address, line(4, true).address);
        assert_eq!(gone.bytes, [4; LINE_BYTES]);
    }

    #[test]
    fn drrip_keeps_what_is_used_again_while_others_stream_by() {
        let mut cache = Cache::new(Config::table_2(OnWrite::Copy).l3);
        let address = |number: u64| LineAddress::physical(number * 32, 5); // 2,048 sets: 32 pages apart
        let of = |number| Line {
            address: address(number),
            ..line(0, false)
        };
        cache.insert(&of(0));
        for other in 1..200 {
            assert!(cache.look_up(address(0)).is_some(), "gone after {other}");
            cache.insert(&of(other));
        }
    }

    #[test]
    fn a_changed_line_is_dirty_until_it_is_cleaned() {
        let mut cache = Cache::new(Config::table_2(OnWrite::Copy).l1);
        cache.insert(&line(1, false));
        assert!(cache.change(line(1, false).address, 3, &[9]));
        assert_eq!(cache.peek(line(1, false).address).unwrap().bytes[3], 9);
        cache.clean(line(1, false).address);
        assert!(cache.take_dirty().is_empty());
    }
}
