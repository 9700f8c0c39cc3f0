//! Who is cut off, since it keeps what others need. It may come again.
//!
//! A service that was stopped, or that means harm, reads and tells nothing, and so keeps
//!
//! - *files*: those that went, also if they are still in its socket, and those whose pages have moved and which it references. Before
//!   they keep the store from growing, a silent service is given no more. Once they do, and several users have VMs here, time is
//!   counted for each user whose services keep more than an equal part: after some seconds they are cut off, and the user joins with
//!   no VM for a while. (Who merely took turns in keeping files would have the others wait most of the time.) What a service has kept
//!   for less than the time for an answer does not count. It looks every few seconds where it maps what went: else whoever has pages come
//!   and go fast enough, and keeps nothing, would have the others cut off.
//! - *slots in limbo*, since it may have found them. The store has some 60 bytes for each, and its segment's number is not given to
//!   another. The more there are, the shorter it is waited for.
//!
//! Once it is cut off nothing waits for it any more ([`lifetime`](mod@crate::ledger::lifetime)).

use crate::ledger::epochs::{Epoch, MemberId};
use crate::memory::pool::Pool;
use crate::requests::peers::Peers;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// A service is waited for so many times as long as it may take for an answer: a minute. Where more than [`MUCH_IN_LIMBO`] wait
/// it is down to one time: ten seconds.
const PATIENCE: u32 = 6;

/// Slots in limbo that are too many: one part in so many of those that the store may have; so many in any case.
const MUCH_IN_LIMBO: u32 = 16;
const LEAST_MUCH_IN_LIMBO: u32 = 1 << 16;

/// A user's services may keep the store from growing for one part in so many of the time for an answer: five seconds. So much is
/// forgotten in [`PATIENCE`] times the time for an answer: a minute.
const KEEPING: u32 = 2;

/// For how long a user has kept the store from growing, of late.
#[derive(Debug, Default)]
struct Late {
    /// Looks, each [`PATIENCE`] times [`KEEPING`]: one is forgotten with each look at which he keeps little.
    looks: u32,
    /// For so many looks more he may not join.
    barred: u32,
}

/// A member that knows more segments that went a minute ago has not heard, or does not say, that it is to let go of them: there are 16,384
/// numbers, and the store notes who knows each.
const MANY_SEGMENTS: usize = 1 << 10;

/// Looks from one second to the next.
#[derive(Debug)]
pub(crate) struct Keepers {
    answer_seconds: u32,
    /// The epochs at the last looks, the newest first. (Looks are counted, not seconds: a store that was stopped has given nobody time.)
    epochs: VecDeque<Epoch>,
    users: BTreeMap<u32, Late>,
    /// Segments that are being emptied, or went, by their numbers.
    gone: BTreeMap<u32, Gone>,
}

/// A segment that members may keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gone {
    /// It went; or else it is being emptied.
    went: bool,
    /// For so many looks.
    looks: u32,
}

impl Keepers {
    pub(crate) fn new(answer_seconds: u32) -> Self {
        Self {
            answer_seconds,
            epochs: VecDeque::new(),
            users: BTreeMap::new(),
            gone: BTreeMap::new(),
        }
    }

    /// For how many seconds a user may not join, if he may not.
    pub(crate) fn barred(&self, user: u32) -> Option<u32> {
        self.users
            .get(&user)
            .map(|late| late.barred)
            .filter(|seconds| *seconds > 0)
    }

    /// Cuts off who keeps too much for too long. To be called once a second.
    pub(crate) fn cut_off(&mut self, peers: &Peers, pool: &Pool, now: Instant) {
        if pool.segments().much_is_held() {
            let silence = Duration::from_secs(self.longest().into());
            peers.cut_off(|id, heard| {
                now.saturating_duration_since(heard) >= silence && pool.segments().waits_for(id)
            });
        }
        self.gone = note_gone(&self.gone, pool.gone());
        self.cut_off_users(peers, pool);
        self.cut_off_for_numbers(peers, pool);
        let longest = self.longest() as usize;
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

    /// For how many looks who is silent is waited for at most.
    fn longest(&self) -> u32 {
        PATIENCE * self.answer_seconds
    }

    /// Cuts off who knows too many segments that went a while ago.
    fn cut_off_for_numbers(&self, peers: &Peers, pool: &Pool) {
        let is_long_gone = |gone: &Gone| gone.went && gone.looks >= self.longest();
        if self.gone.values().filter(|gone| is_long_gone(gone)).count() > MANY_SEGMENTS {
            let retired = pool.segments().retired();
            let retired = retired.filter(|(number, _)| self.gone.get(number).is_some_and(is_long_gone));
            let many = who_knows_many(retired.map(|(_, waiting)| waiting));
            peers.cut_off(|id, _| many.contains(&id));
        }
    }

    /// Cuts off the services of users who have kept the store from growing for too long.
    fn cut_off_users(&mut self, peers: &Peers, pool: &Pool) {
        let kept = pool.segments().is_held_up().then(|| kept_by_users(peers, pool));
        let kept = kept.filter(|users| users.len() > 1).unwrap_or_default();
        let part = pool.segments().may_be_held() / kept.len().max(1);
        let is_late = |segments: &BTreeSet<u32>| {
            let gone = segments.iter().filter_map(|segment| self.gone.get(segment));
            gone.filter(|gone| gone.looks >= self.answer_seconds).count() > part
        };
        let late = kept.iter().filter(|(_, segments)| is_late(segments));
        let late: BTreeSet<u32> = late.map(|(user, _)| *user).collect();
        late.iter()
            .for_each(|user| _ = self.users.entry(*user).or_default());
        let (credit, longest) = (PATIENCE * KEEPING, self.longest());
        let most = self.answer_seconds.div_ceil(KEEPING) * credit;
        for (user, of) in &mut self.users {
            of.barred = of.barred.saturating_sub(1);
            of.looks = match late.contains(user) {
                true => of.looks + credit,
                false => of.looks.saturating_sub(1),
            };
            if of.looks < most {
                continue;
            }
            *of = Late {
                looks: 0,
                barred: longest,
            };
            log::warn!(
                "user {user}'s VMs keep {} segments that went or were emptied, and with them the store from growing for others: they are cut \
                 off, and may join again in {longest} s (raise --max-mib?)",
                kept.get(user).map_or(0, BTreeSet::len)
            );
            peers.cut_off(|id, _| peers.user(id) == Some(*user) && pool.kept_by(id).next().is_some());
        }
        self.users.retain(|_, of| of.looks > 0 || of.barred > 0);
    }
}

/// The segments, gone or being emptied, that are kept by the services of each user who has some here.
fn kept_by_users(peers: &Peers, pool: &Pool) -> BTreeMap<u32, BTreeSet<u32>> {
    let mut users = BTreeMap::<u32, BTreeSet<u32>>::new();
    for (id, _, _) in peers.services() {
        if let Some(user) = peers.user(id) {
            users.entry(user).or_default().extend(pool.kept_by(id));
        }
    }
    users
}

/// Who knows too many segments that went, by who knows each.
fn who_knows_many<'a>(segments: impl Iterator<Item = &'a BTreeSet<MemberId>>) -> BTreeSet<MemberId> {
    let mut counts = BTreeMap::<MemberId, usize>::new();
    segments
        .flatten()
        .for_each(|id| *counts.entry(*id).or_default() += 1);
    counts.retain(|_, count| *count > MANY_SEGMENTS);
    counts.into_keys().collect()
}

/// Segments that are being emptied or went by now, and for how many looks they have been that, by what was so before.
fn note_gone(before: &BTreeMap<u32, Gone>, now: impl Iterator<Item = (u32, bool)>) -> BTreeMap<u32, Gone> {
    let looks = |segment: u32, went: bool| {
        let before = before.get(&segment).filter(|before| before.went == went);
        before.map_or(0, |before| before.looks + 1)
    };
    let gone = |(segment, went)| {
        let looks = looks(segment, went);
        (segment, Gone { went, looks })
    };
    now.map(gone).collect()
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
    fn looks_count_from_when_a_segment_went() {
        let once = note_gone(&BTreeMap::new(), [(1, true), (2, true), (4, false)].into_iter());
        let twice = note_gone(&once, [(2, true), (3, true), (4, false)].into_iter());
        let gone = |all: &[(u32, (bool, u32))]| -> BTreeMap<u32, Gone> {
            let each = all.iter().copied();
            each.map(|(segment, (went, looks))| (segment, Gone { went, looks }))
                .collect()
        };
        let looks = gone(&[(2, (true, 1)), (3, (true, 0)), (4, (false, 1))]);
        assert_eq!(twice, looks);
        let again = note_gone(&twice, [(3, true), (4, true)].into_iter());
        assert_eq!(again, gone(&[(3, (true, 1)), (4, (true, 0))]));
        // Its number was another segment's meanwhile.
        let at_last = note_gone(&again, [(2, true)].into_iter());
        assert_eq!(at_last, gone(&[(2, (true, 0))]));
    }

    #[test]
    fn who_says_nothing_of_many_segments_is_known() {
        let [a, b, c] = [1, 2, 3].map(MemberId);
        let waiting = |number: usize| match number {
            0..MANY_SEGMENTS => BTreeSet::from([a, b]),
            MANY_SEGMENTS => BTreeSet::from([b]),
            _ => BTreeSet::from([c]),
        };
        let all: Vec<_> = (0..MANY_SEGMENTS + 100).map(waiting).collect();
        assert_eq!(who_knows_many(all.iter()), BTreeSet::from([b]));
    }

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
