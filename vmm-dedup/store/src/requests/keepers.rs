//! Who is cut off, since it keeps what others need. It may come again.
//!
//! A service that was stopped, or that means harm, reads and tells nothing, and so keeps
//!
//! - *files that went*, those in its socket among them. Before that keeps the store from growing, it is given no more.
//! - *slots in limbo*, since it may have found them. The store has some 60 bytes for each, and its segment's number is not given to
//!   another. The more there are, the shorter it is waited for.
//!
//! Once it is cut off nothing waits for it any more ([`lifetime`](mod@crate::ledger::lifetime)).

use crate::ledger::epochs::{Epoch, MemberId};
use crate::memory::pool::Pool;
use crate::requests::peers::Peers;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A service is waited for so many times as long as it may take for an answer: a minute. Where more than [`MUCH_IN_LIMBO`] wait
/// it is down to one time: ten seconds.
const PATIENCE: u32 = 6;

/// Slots in limbo that are too many: one part in so many of those that the store may have; so many in any case.
const MUCH_IN_LIMBO: u32 = 16;
const LEAST_MUCH_IN_LIMBO: u32 = 1 << 16;

/// Looks from one second to the next.
#[derive(Debug)]
pub(crate) struct Keepers {
    answer_seconds: u32,
    /// The epochs at the last looks, the newest first. (Looks are counted, not seconds: a store that was stopped has given nobody time.)
    epochs: VecDeque<Epoch>,
}

impl Keepers {
    pub(crate) fn new(answer_seconds: u32) -> Self {
        Self {
            answer_seconds,
            epochs: VecDeque::new(),
        }
    }

    /// Cuts off who keeps too much for too long. To be called once a second.
    pub(crate) fn cut_off(&mut self, peers: &Peers, pool: &Pool, now: Instant) {
        if pool.segments().much_is_held() {
            let silence = Duration::from_secs(u64::from(PATIENCE) * u64::from(self.answer_seconds));
            peers.cut_off(|id, heard| {
                now.saturating_duration_since(heard) >= silence && pool.segments().waits_for(id)
            });
        }
        let longest = (PATIENCE * self.answer_seconds) as usize;
        self.epochs.push_front(pool.epochs().current());
        self.epochs.truncate(longest + 1);
        let patience = patience(
            pool.lifetime().slots().limbo(),
            pool.max_slots(),
            self.answer_seconds,
        );
        let due = patience.and_then(|looks| self.epochs.get(looks as usize).copied());
        if let Some(due) = due {
            let is_behind = |id: MemberId| pool.epochs().acknowledged(id).is_some_and(|epoch| epoch < due);
            peers.cut_off(|id, _| is_behind(id));
        }
    }
}

/// For how many looks a service is waited for that has not acknowledged what left the index before; `None`: for ever.
#[allow(clippy::cast_possible_truncation)] // at most PATIENCE times as many
fn patience(limbo: u64, max_slots: u32, answer_seconds: u32) -> Option<u32> {
    let much = u64::from(LEAST_MUCH_IN_LIMBO.max(max_slots / MUCH_IN_LIMBO));
    let most = u64::from(PATIENCE) * u64::from(answer_seconds);
    let least = u64::from(answer_seconds);
    (limbo > much).then(|| (most * much / limbo).max(least) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_is_in_limbo_the_shorter_it_is_waited_for() {
        assert_eq!(patience(65_536, 1 << 14, 10), None);
        assert_eq!(patience(65_537, 1 << 14, 10), Some(59));
        assert_eq!(patience(131_072, 1 << 14, 10), Some(30));
        assert_eq!(patience(1 << 26, 1 << 14, 10), Some(10));
        // In a store of 64 GiB a 16th is more.
        assert_eq!(patience(1 << 20, 1 << 24, 10), None);
        assert_eq!(patience(1 << 21, 1 << 24, 10), Some(30));
    }
}
