//! Publications that services were asked for. A service that is asked for a page and does not publish it must not keep
//! the page from being asked of the next service that has it.

use crate::ledger::epochs::MemberId;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::key::Key;

/// After this long, a page that a service was asked for and did not publish is asked of the next that has it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Most keys of which it is remembered who has not published them. Of others the same service may be asked again at once.
const MOST_DECLINED: usize = 1 << 16;

/// Most keys of each kind that [`PendingPublications::expire`] returns: what many do not publish is not in the news all at once.
const MOST_EXPIRED: usize = 4096;

/// Keys whose pages services were asked to publish.
#[derive(Debug, Default)]
pub(crate) struct PendingPublications {
    asked: HashMap<Key, (MemberId, Instant)>,
    /// What each service was asked for in the last reply.
    of: HashMap<MemberId, Vec<Key>>,
    /// Who did not publish a key lately, since when, and whether he would have been asked again since.
    declined: HashMap<Key, (MemberId, Instant, bool)>,
}

impl PendingPublications {
    /// Whether some service was asked for the page, and may still publish it.
    pub(crate) fn is_pending(&self, key: Key, now: Instant) -> bool {
        let asked = self.asked.get(&key);
        asked.is_some_and(|(_, at)| now.saturating_duration_since(*at) < PATIENCE)
    }

    /// Whether a service may be asked for a page: nobody else is, and it was not asked in vain a moment ago. In that case
    /// [`Self::expire`] returns the key later.
    pub(crate) fn may_ask(&mut self, key: Key, of: MemberId, now: Instant) -> bool {
        if self.is_pending(key, now) {
            return false;
        }
        match self.declined.get_mut(&key) {
            Some((by, at, left)) if *by == of && now.saturating_duration_since(*at) < PATIENCE => {
                *left = true;
                false
            }
            _ => true,
        }
    }

    /// A service is asked for a page.
    pub(crate) fn ask(&mut self, key: Key, of: MemberId, now: Instant) {
        self.asked.insert(key, (of, now));
        self.of.entry(of).or_default().push(key);
    }

    /// A service has published a page, or tried to. Returns whether it was asked.
    pub(crate) fn answered(&mut self, key: Key, by: MemberId) -> bool {
        let asked = self.asked.get(&key).is_some_and(|(of, _)| *of == by);
        if asked {
            self.asked.remove(&key);
        }
        asked
    }

    /// What this service was asked for, and has not published, may be asked of others at once. Returns it.
    pub(crate) fn forget(&mut self, service: MemberId, now: Instant) -> Vec<Key> {
        let keys = self.unanswered(service);
        self.decline(keys.iter().map(|key| (*key, service)), now);
        keys
    }

    /// A service has gone, and its number may become another one's. Returns what it was asked for.
    pub(crate) fn leave(&mut self, service: MemberId) -> Vec<Key> {
        self.declined.retain(|_, (by, ..)| *by != service);
        self.unanswered(service)
    }

    fn unanswered(&mut self, service: MemberId) -> Vec<Key> {
        let mut keys = self.of.remove(&service).unwrap_or_default();
        keys.retain(|key| self.answered(*key, service));
        keys
    }

    /// As [`Self::forget`] for what was asked too long ago, of whomever. To be called once a second.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Key> {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= PATIENCE;
        let declined = self
            .declined
            .extract_if(|_, (_, at, _)| is_old(*at))
            .take(MOST_EXPIRED);
        let left = declined.filter_map(|(key, (.., left))| left.then_some(key));
        let mut keys: Vec<Key> = left.collect();
        let late = self.asked.extract_if(|_, (_, at)| is_old(*at)).take(MOST_EXPIRED);
        let late: Vec<(Key, MemberId)> = late.map(|(key, (of, _))| (key, of)).collect();
        self.decline(late.iter().copied(), now);
        keys.extend(late.into_iter().map(|(key, _)| key));
        keys
    }

    fn decline(&mut self, keys: impl Iterator<Item = (Key, MemberId)>, now: Instant) {
        for (key, by) in keys {
            if self.declined.len() < MOST_DECLINED {
                self.declined.insert(key, (by, now, false));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(1);
    const B: MemberId = MemberId(2);

    fn key(n: u64) -> Key {
        Key::try_new(n).unwrap()
    }

    #[test]
    fn a_page_is_asked_of_another_after_some_time() {
        let (mut pending, now) = (PendingPublications::default(), Instant::now());
        pending.ask(key(1), A, now);
        assert!(pending.is_pending(key(1), now));
        assert!(!pending.is_pending(key(1), now + PATIENCE));
        pending.ask(key(1), B, now + PATIENCE);
        assert_eq!(pending.forget(A, now), [], "it is asked of B now");
        assert!(pending.is_pending(key(1), now + PATIENCE));
    }

    #[test]
    fn who_answers_or_goes_is_waited_for_no_longer() {
        let (mut pending, now) = (PendingPublications::default(), Instant::now());
        pending.ask(key(1), A, now);
        pending.ask(key(2), A, now);
        pending.answered(key(1), B);
        assert!(pending.is_pending(key(1), now));
        pending.answered(key(1), A);
        assert!(!pending.is_pending(key(1), now) && pending.is_pending(key(2), now));
        assert_eq!(pending.forget(A, now), [key(2)]);
        assert!(!pending.is_pending(key(2), now) && pending.of.is_empty());
        assert!(pending.may_ask(key(2), B, now) && !pending.may_ask(key(2), A, now));
        assert!(pending.may_ask(key(2), A, now + PATIENCE));
        assert_eq!(
            pending.expire(now + PATIENCE),
            [key(2)],
            "A would have been asked"
        );
    }

    #[test]
    fn who_says_nothing_is_waited_for_no_longer_than_that() {
        let (mut pending, now) = (PendingPublications::default(), Instant::now());
        pending.ask(key(1), A, now);
        assert_eq!(pending.expire(now + PATIENCE / 2), []);
        assert_eq!(pending.expire(now + PATIENCE), [key(1)]);
        assert_eq!(pending.forget(A, now + PATIENCE), [], "it was told of already");
        assert_eq!(pending.expire(now + 2 * PATIENCE), []);
        assert!(pending.declined.is_empty());
    }
}
