//! What is said of a VM: each thing once in the log, and one of them to the store.

use std::time::Instant;
use vmm_dedup_protocol::refusal::Refusal;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Told {
    /// In the log, last what was found last.
    said: Vec<Refusal>,
    /// To the store.
    announced: Option<Refusal>,
    /// When it is told again what could not be told.
    again: Option<Instant>,
}

impl Told {
    /// Something holds of the VM; whether that is new.
    pub(super) fn say(&mut self, refusal: Refusal) -> bool {
        let known = self.said.len();
        self.said.retain(|said| *said != refusal);
        let is_new = self.said.len() == known;
        self.said.push(refusal);
        is_new
    }

    /// Some of it holds no more.
    pub(super) fn forget(&mut self, ended: impl Fn(&Refusal) -> bool) {
        self.said.retain(|said| !ended(said));
    }

    /// What was found last of what counts.
    pub(super) fn last(&self, counts: impl Fn(&Refusal) -> bool) -> Option<&Refusal> {
        self.said.iter().rfind(|said| counts(said))
    }

    /// A service has joined the store in the place of what was announced.
    pub(super) fn joined(&mut self) {
        (self.announced, self.again) = (None, None);
    }

    /// The store is to know this reason, or none; whether it has to be told.
    pub(super) fn announce(&mut self, reason: Option<&Refusal>) -> bool {
        if reason == self.announced.as_ref() {
            return false;
        }
        (self.announced, self.again) = (reason.cloned(), None);
        true
    }

    /// What was announced last could not be, which may pass.
    pub(super) fn not_announced(&mut self, again: Instant) {
        self.again = Some(again);
    }

    /// It is time to announce it once more: the reason.
    pub(super) fn announce_again(&mut self, now: Instant) -> Option<Refusal> {
        self.again.take_if(|again| *again <= now)?;
        self.announced.clone()
    }

    /// When that will be.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.again
    }
}
