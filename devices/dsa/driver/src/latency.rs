//! How long batches take, as they were seen to: what waiting, batch sizes and the choice between device and CPU go by.

use std::time::Duration;

/// Powers of two from 1 to 1,024.
const STEPS: usize = 11;
/// What is assumed before anything was seen, ns: a round trip, and a page.
const FIRST: [u64; 2] = [2_000, 250];
/// How much one more measurement counts: an eighth.
const WEIGHT: u64 = 8;

/// A step, and its time in ns.
type Seen = (usize, u64);

/// Times of one operation on pages, by the size of its batch.
#[derive(Clone, Debug)]
pub(crate) struct Latencies {
    /// Ns of batches of 2 to the power of the place.
    seen: [Option<u64>; STEPS],
    /// What follows of it: the time that a member adds, and that which a batch takes however small it is.
    per_member: u64,
    round_trip: u64,
}

impl Latencies {
    pub(crate) fn new() -> Self {
        let [round_trip, per_member] = FIRST;
        Self {
            seen: [None; STEPS],
            per_member,
            round_trip,
        }
    }

    /// Notes that a batch of so many took so long.
    pub(crate) fn note(&mut self, members: usize, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let place = step(members);
        // As if it had been a full one of its step, so that those between do not spoil the table.
        let full = 1u64 << place;
        let per = self.per_member;
        let scaled = took.saturating_add((full - (members as u64).min(full)) * per);
        let seen = &mut self.seen[place];
        *seen = Some(seen.map_or(scaled, |before| {
            // One that was held up, by the host for instance, says little of the device.
            let scaled = scaled.min(before * 4);
            before - before / WEIGHT + scaled / WEIGHT
        }));
        let (first, last) = self.ends();
        // Between the smallest and the largest batch seen.
        self.per_member = match (first, last) {
            (Some((a, short)), Some((b, long))) if b > a => {
                (long.saturating_sub(short) / ((1u64 << b) - (1 << a))).max(1)
            }
            _ => FIRST[1],
        };
        self.round_trip = first.map_or(FIRST[0], |(place, ns)| {
            ns.saturating_sub((1u64 << place) * self.per_member)
        });
    }

    /// How long a batch of so many is likely to take.
    pub(crate) fn expect(&self, members: usize) -> Duration {
        let place = step(members);
        let per = self.per_member;
        let full = 1u64 << place;
        let ns = match self.seen[place] {
            Some(ns) => ns.saturating_sub((full - (members as u64).min(full)) * per),
            None => self.round_trip.saturating_add(members as u64 * per),
        };
        Duration::from_nanos(ns)
    }

    /// How much longer a batch of so many takes the device that has others to do before it.
    pub(crate) fn transfers(&self, members: usize) -> Duration {
        Duration::from_nanos(members as u64 * self.per_member)
    }

    /// The smallest and the largest step that was seen, and their times.
    fn ends(&self) -> (Option<Seen>, Option<Seen>) {
        let mut seen = self
            .seen
            .iter()
            .enumerate()
            .filter_map(|(at, ns)| Some((at, (*ns)?)));
        let first = seen.next();
        (first, seen.next_back().or(first))
    }

    /// The size of batches for so many pages, of which a queue takes `rooms` more: large enough that the round trip is a
    /// small part of each and that all pages fit in, small enough that several are on their way at once.
    pub(crate) fn batch(&self, pages: usize, rooms: usize, most: usize) -> usize {
        /// How many times the round trip a batch is to take.
        const WORTH: u64 = 8;
        let worth = usize::try_from(WORTH * self.round_trip / self.per_member.max(1)).unwrap_or(most);
        let at_once = worth.max(pages.div_ceil(rooms.max(1))).clamp(1, most);
        // Two at least, if the queue takes two, while one of them is worth its round trip.
        if pages > at_once || rooms < 2 {
            at_once
        } else {
            pages.div_ceil(2).max(at_once.min(pages).div_ceil(2))
        }
        .clamp(1, most)
    }
}

/// The step that a size falls into.
fn step(members: usize) -> usize {
    let place = members.max(1).next_power_of_two().trailing_zeros();
    (place as usize).min(STEPS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that takes 1,000 ns, and 250 ns for each page.
    fn seen() -> Latencies {
        let mut latencies = Latencies::new();
        for _ in 0..50 {
            for members in [1, 5, 64, 700, 1024] {
                latencies.note(members, Duration::from_nanos(1000 + 250 * members as u64));
            }
        }
        latencies
    }

    #[test]
    fn what_was_not_seen_is_between_what_was() {
        let latencies = seen();
        for members in [1usize, 2, 16, 100, 512, 1024] {
            let (is, should) = (
                latencies.expect(members),
                Duration::from_nanos(1000 + 250 * members as u64),
            );
            let off = is.abs_diff(should);
            assert!(off * 10 < should, "{members}: {is:?}, not {should:?}");
        }
    }

    #[test]
    fn one_that_was_held_up_says_little() {
        let mut latencies = seen();
        let before = latencies.expect(64);
        latencies.note(64, Duration::from_secs(1));
        assert!(latencies.expect(64) < before * 3 / 2);
    }

    #[test]
    fn batches_are_worth_their_round_trip_and_several() {
        let latencies = seen();
        let many = latencies.batch(500, 16, 1024);
        assert!((16..=64).contains(&many), "{many}");
        assert_eq!(latencies.batch(1, 16, 1024), 1);
        assert_eq!(latencies.batch(10_000, 16, 8), 8);
        assert!(latencies.batch(20, 16, 1024) <= 20);
    }

    #[test]
    fn batches_are_so_large_that_all_pages_fit_into_the_queue() {
        let latencies = seen();
        assert_eq!(latencies.batch(10_000, 16, 1024), 625);
        assert_eq!(latencies.batch(10_000, 2, 1024), 1024);
    }
}
