//! Publications that services were asked for. A service that is asked for a page and does not publish it must not keep
//! the page from being asked of the next service that has it.

use crate::ledger::epochs::MemberId;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::key::Key;

/// After this long, a page that a service was asked for and did not publish is asked of the next that has it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Keys whose pages services were asked to publish.
#[derive(Debug, Default)]
pub(crate) struct PendingPublications {
    asked: HashMap<Key, (MemberId, Instant)>,
    /// What each service was asked for in the last reply.
    of: HashMap<MemberId, Vec<Key>>,
}

impl PendingPublications {
    /// Whether some service was asked for the page, and may still publish it.
    pub(crate) fn is_pending(&self, key: Key, now: Instant) -> bool {
        let asked = self.asked.get(&key);
        asked.is_some_and(|(_, at)| now.saturating_duration_since(*at) < PATIENCE)
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
    pub(crate) fn forget(&mut self, service: MemberId) -> Vec<Key> {
        let mut keys = self.of.remove(&service).unwrap_or_default();
        keys.retain(|key| self.answered(*key, service));
        keys
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
        assert_eq!(pending.forget(A), [], "it is asked of B now");
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
        assert_eq!(pending.forget(A), [key(2)]);
        assert!(!pending.is_pending(key(2), now) && pending.of.is_empty());
    }
}
