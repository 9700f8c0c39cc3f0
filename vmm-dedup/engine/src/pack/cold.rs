//! Which pages are cold: not written for some time, not used as far as anything tells, and not back early lately.
//!
//! All memory is looked at, chunk by chunk; the next *sweep* begins when the one before has ended and the time has passed for which a
//! page must stand still. A page that was a candidate at one sweep, and has been one since, is cold at the next.

use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::track::access::Probes;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What came back sooner than after so many times of standing still came back early.
const EARLY: u32 = 40;
/// The first pause of a page that came back early, in times of standing still. Each early return doubles it.
const PAUSE: u32 = 4;
/// Most doublings.
const MOST_DOUBLINGS: u8 = 8;

/// A page that came back early.
#[derive(Clone, Copy, Debug)]
struct Restless {
    until: Instant,
    doublings: u8,
}

#[derive(Debug)]
pub(super) struct Cold {
    /// For how long a page must stand still.
    idle: Duration,
    /// When the next sweep begins; `None`: in the middle of one.
    next: Option<Instant>,
    /// The chunk that is next in this sweep.
    at: usize,
    restless: BTreeMap<Page, Restless>,
}

impl Cold {
    pub(super) fn new(idle: Duration) -> Self {
        Self {
            idle,
            next: None,
            at: 0,
            restless: BTreeMap::new(),
        }
    }

    /// The next chunk to look at now, if there is one.
    pub(super) fn next(&mut self, map: &mut PageMap) -> Option<usize> {
        map.watch_for_cold();
        let now = Instant::now();
        if self.next.is_some_and(|next| next > now) {
            return None;
        }
        self.next = None;
        while self.at < map.chunks().len() {
            let at = self.at;
            self.at += 1;
            let chunk = map.chunk(at);
            if !chunk.lent && !chunk.huge {
                return Some(at);
            }
        }
        self.at = 0;
        self.next = Some(now + self.idle);
        let forgotten = self.idle * EARLY;
        self.restless
            .retain(|_, restless| restless.until + forgotten > now);
        None
    }

    /// Cold pages of a chunk.
    pub(super) fn look(&mut self, map: &mut PageMap, probes: Probes, at: usize) -> Vec<Page> {
        let now = Instant::now();
        // Any use that a sample has found lately is of one of its pages.
        let used = map.chunk(at).thp.frequency.value() > 0;
        let mut cold = Vec::new();
        for page in map.chunk_at(at).pages.clone() {
            let still = map.stood_still(page);
            let restless = self
                .restless
                .get(&page)
                .is_some_and(|restless| restless.until > now);
            if still && !used && !restless && !probes.include(map, at, page) {
                cold.push(page);
            }
        }
        cold
    }

    /// A page is back since somebody touched it, after so many seconds; whether that was early.
    pub(super) fn note_touched(&mut self, page: Page, after: u32) -> bool {
        if Duration::from_secs(after.into()) > self.idle * EARLY {
            self.restless.remove(&page);
            return false;
        }
        let before = self.restless.get(&page);
        let doublings = before.map_or(0, |restless| (restless.doublings + 1).min(MOST_DOUBLINGS));
        let until = Instant::now() + self.idle * PAUSE * (1 << doublings);
        self.restless.insert(page, Restless { until, doublings });
        true
    }

    pub(super) fn bytes(&self) -> usize {
        self.restless.len() * 2 * (size_of::<Page>() + size_of::<Restless>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::Memory;
    use crate::sys::page_size::HUGE_SIZE;
    use std::sync::Arc;
    use vmm_dedup_protocol::key::Key;

    const IDLE: Duration = Duration::from_secs(15);

    fn map() -> PageMap {
        let range = 10 * HUGE_SIZE..12 * HUGE_SIZE;
        let memory = Memory::made_up(std::slice::from_ref(&range));
        let mut map = PageMap::new(Arc::new(memory), 1000, 0);
        map.watch_for_cold();
        map
    }

    fn look(cold: &mut Cold, map: &mut PageMap) -> Vec<Page> {
        cold.look(map, Probes::default(), 0)
    }

    #[test]
    fn what_was_no_candidate_all_the_time_is_not_cold() {
        let (mut map, mut cold) = (map(), Cold::new(IDLE));
        let key = |n| Key::try_new(n).unwrap();
        (3..6).for_each(|page| map.sight(page, key(7), 1));
        assert!(look(&mut cold, &mut map).is_empty());
        // Written, and a candidate with the same key again.
        assert!(map.note_written(4, true));
        map.sight(4, key(7), 1);
        assert!(map.note_written(5, true));
        assert_eq!(look(&mut cold, &mut map), [3]);
        assert_eq!(look(&mut cold, &mut map), [3, 4]);
    }

    #[test]
    fn what_comes_back_early_waits_twice_as_long_each_time() {
        let mut cold = Cold::new(IDLE);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            assert!(cold.note_touched(7, 599));
            let pause = cold.restless[&7].until - Instant::now();
            pauses.push((pause.as_secs_f64() / IDLE.as_secs_f64()).round());
        }
        assert_eq!(pauses[..4], [4.0, 8.0, 16.0, 32.0]);
        assert_eq!(pauses[8..], [1024.0; 4]);
        assert!(!cold.note_touched(7, 601) && cold.restless.is_empty());
    }

    #[test]
    fn pages_that_came_back_early_are_not_cold_until_their_pause_is_over() {
        let (mut map, mut cold) = (map(), Cold::new(IDLE));
        (3..6).for_each(|page| map.sight(page, Key::try_new(7).unwrap(), 1));
        look(&mut cold, &mut map);
        cold.note_touched(4, 1);
        assert_eq!(look(&mut cold, &mut map), [3, 5]);
        cold.restless.get_mut(&4).unwrap().until = Instant::now();
        assert_eq!(look(&mut cold, &mut map), [3, 4, 5]);
    }

    #[test]
    fn a_sweep_has_each_chunk_once_and_leaves_out_what_is_huge_or_lent() {
        let (mut map, mut cold) = (map(), Cold::new(IDLE));
        map.lend(0);
        assert_eq!((cold.next(&mut map), cold.next(&mut map)), (Some(1), None));
        assert_eq!(cold.next(&mut map), None, "not before its time");
        cold.next = Some(Instant::now());
        map.take_back(0);
        map.found_huge(1);
        assert_eq!((cold.next(&mut map), cold.next(&mut map)), (Some(0), None));
    }
}
