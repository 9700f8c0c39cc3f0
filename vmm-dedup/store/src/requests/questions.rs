//! Questions of observers that VMs have not answered yet. No I/O: `relay` sends what is decided here.
//!
//! An observer has one question at a time. A VM has at most [`MAX_UNANSWERED`], those whose observers have gone or ran
//! out of patience included: what waits in its socket is bounded, so that nobody can get a slow VM cut off by asking.

use crate::ledger::epochs::MemberId;
use std::collections::HashMap;
use std::time::Instant;

/// Most questions that wait for one VM.
const MAX_UNANSWERED: usize = 8;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuestionKind {
    Set,
    Explain,
}

/// Who asked, and under which serial number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asker {
    pub(crate) observer: MemberId,
    pub(crate) serial: u64,
}

#[derive(Debug)]
struct Pending {
    /// `None`: nobody waits for the answer any more.
    from: Option<Asker>,
    to: MemberId,
    kind: QuestionKind,
    deadline: Instant,
}

/// All that are pending, by the serial number that the VM was given.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    last: u64,
    pending: HashMap<u64, Pending>,
}

/// Why a question cannot be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotAsked {
    /// The observer's last one is not answered yet.
    Second,
    /// The VM has not answered so many.
    Busy(usize),
}

impl Questions {
    /// Notes a question; returns the serial number to give it.
    pub(crate) fn ask(
        &mut self,
        from: Asker,
        to: MemberId,
        kind: QuestionKind,
        deadline: Instant,
    ) -> Result<u64, NotAsked> {
        let mut waiting = self.pending.values().filter_map(|p| p.from);
        if waiting.any(|asker| asker.observer == from.observer) {
            return Err(NotAsked::Second);
        }
        let unanswered = self.pending.values().filter(|p| p.to == to).count();
        if unanswered >= MAX_UNANSWERED {
            return Err(NotAsked::Busy(unanswered));
        }
        self.last += 1;
        let pending = Pending {
            from: Some(from),
            to,
            kind,
            deadline,
        };
        self.pending.insert(self.last, pending);
        Ok(self.last)
    }

    /// A VM answers. `Err` if it was not asked that; `Ok(None)` if nobody waits any more.
    pub(crate) fn answered(
        &mut self,
        by: MemberId,
        serial: u64,
        kinds: &[QuestionKind],
    ) -> Result<Option<Asker>, ()> {
        match self.pending.get(&serial) {
            Some(pending) if pending.to == by && kinds.contains(&pending.kind) => {
                Ok(self.pending.remove(&serial).and_then(|p| p.from))
            }
            _ => Err(()),
        }
    }

    /// Askers whose time is over. Their VMs' answers are still taken, later.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<(Asker, QuestionKind)> {
        let late = self.pending.values_mut().filter(|p| p.deadline <= now);
        late.filter_map(|p| Some((p.from.take()?, p.kind))).collect()
    }

    /// A connection has gone. Returns those who waited for an answer of it.
    pub(crate) fn forget(&mut self, gone: MemberId) -> Vec<Asker> {
        for pending in self.pending.values_mut() {
            if pending.from.is_some_and(|asker| asker.observer == gone) {
                pending.from = None;
            }
        }
        let lost = self.pending.extract_if(|_, p| p.to == gone);
        lost.filter_map(|(_, p)| p.from).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const VM: MemberId = MemberId(1);

    fn asker(n: u16) -> Asker {
        Asker {
            observer: MemberId(n),
            serial: n.into(),
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(1)
    }

    #[test]
    fn answers_find_who_asked() {
        let mut questions = Questions::default();
        let a = questions.ask(asker(2), VM, QuestionKind::Set, soon()).unwrap();
        let b = questions
            .ask(asker(3), VM, QuestionKind::Explain, soon())
            .unwrap();
        assert_eq!(
            questions.ask(asker(2), VM, QuestionKind::Set, soon()),
            Err(NotAsked::Second)
        );
        assert_eq!(questions.answered(VM, b, &[QuestionKind::Set]), Err(()));
        assert_eq!(
            questions.answered(MemberId(9), b, &[QuestionKind::Explain]),
            Err(())
        );
        assert_eq!(
            questions.answered(VM, b, &[QuestionKind::Explain]),
            Ok(Some(asker(3)))
        );
        assert_eq!(questions.answered(VM, b, &[QuestionKind::Explain]), Err(()));
        assert_eq!(
            questions.answered(VM, a, &[QuestionKind::Set]),
            Ok(Some(asker(2)))
        );
    }

    #[test]
    fn impatience_does_not_lift_the_bound() {
        let mut questions = Questions::default();
        let first = questions.ask(asker(2), VM, QuestionKind::Set, soon()).unwrap();
        for n in 3..10 {
            questions.ask(asker(n), VM, QuestionKind::Set, soon()).unwrap();
        }
        assert_eq!(questions.expire(Instant::now()), []);
        assert_eq!(questions.expire(soon()).len(), 8);
        assert_eq!(questions.expire(soon()), []);
        assert_eq!(
            questions.ask(asker(2), VM, QuestionKind::Set, soon()),
            Err(NotAsked::Busy(8))
        );
        assert_eq!(questions.answered(VM, first, &[QuestionKind::Set]), Ok(None));
        questions.ask(asker(2), VM, QuestionKind::Set, soon()).unwrap();
    }

    #[test]
    fn whoever_goes_is_forgotten_and_who_waits_for_it_is_told() {
        let mut questions = Questions::default();
        questions.ask(asker(2), VM, QuestionKind::Set, soon()).unwrap();
        let other = questions
            .ask(asker(3), MemberId(8), QuestionKind::Set, soon())
            .unwrap();
        assert_eq!(questions.forget(MemberId(3)), []);
        assert_eq!(
            questions.answered(MemberId(8), other, &[QuestionKind::Set]),
            Ok(None)
        );
        assert_eq!(questions.forget(VM), [asker(2)]);
        assert!(questions.pending.is_empty());
    }
}
