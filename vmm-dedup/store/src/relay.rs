//! Passing on what observers ask of VMs, and the VMs' answers.

use crate::epochs::MemberId;
use crate::error::Violation;
use crate::questions::{Asker, Kind, Refused};
use crate::state::{Phase, State};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::control::{Explain, Explained, NotDone, Set, Switch};
use vmm_dedup_protocol::message::{self, encode};
use vmm_dedup_protocol::name::Name;
use vmm_dedup_protocol::refusal;

/// How many times longer a VM may take to bring its memory back.
const UNMERGE_FACTOR: u32 = 60;

/// Names listed for somebody who asked for a VM that is not there.
const LISTED: usize = 8;

/// A question, as it came.
#[derive(Debug)]
pub(crate) enum Question {
    Set(Set),
    Explain(Explain),
}

impl Question {
    fn serial(&self) -> u64 {
        match self {
            Self::Set(set) => set.serial,
            Self::Explain(explain) => explain.serial,
        }
    }

    fn name(&self) -> Name {
        match self {
            Self::Set(set) => set.name,
            Self::Explain(explain) => explain.name,
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Set(_) => Kind::Set,
            Self::Explain(_) => Kind::Explain,
        }
    }

    fn patience(&self, usual: Duration) -> Duration {
        match self {
            Self::Set(set) if set.settings.switch == Some(Switch::OffUnmerge) => usual * UNMERGE_FACTOR,
            _ => usual,
        }
    }

    /// The record for the VM.
    fn record(self, serial: u64) -> Vec<u8> {
        use zerocopy::IntoBytes;
        match self {
            Self::Set(set) => encode(message::Kind::Set, &[&Set { serial, ..set }.body()]),
            Self::Explain(explain) => encode(
                message::Kind::Explain,
                &[Explain { serial, ..explain }.as_bytes()],
            ),
        }
    }
}

impl State {
    /// An observer asks something of a VM. Returns the answer, if the VM need not be asked.
    pub(crate) fn ask(&mut self, id: MemberId, question: Question) -> Result<Option<Vec<u8>>, Violation> {
        if !matches!(self.connections[&id].phase, Phase::Observer) {
            return Err(Violation::Unexpected("question (observers ask)"));
        }
        let serial = question.serial();
        let not_done = |text: String| {
            let body = NotDone { serial, text }.body();
            Ok(Some(encode(message::Kind::NotDone, &[&body])))
        };
        let vm = match self.find(&question.name().text()) {
            Ok(vm) => vm,
            Err(text) => return not_done(text),
        };
        let connection = &self.connections[&vm];
        if let Phase::Refused(refused) = &connection.phase {
            return match question {
                Question::Set(_) => not_done(format!("this VM is refused: {}", refused.refusal)),
                Question::Explain(_) => {
                    let answer = refusal::Refused {
                        serial,
                        pages: refused.pages,
                        name: Name::new(&refused.name),
                        refusal: refused.refusal.clone(),
                    };
                    Ok(Some(encode(message::Kind::Refused, &[&answer.body()])))
                }
            };
        }
        let Some(outbox) = connection.outbox.clone() else {
            return not_done("this VM has just gone".into());
        };
        let usual = Duration::from_secs(self.config.answer_seconds.into());
        let deadline = Instant::now() + question.patience(usual);
        let asker = Asker { observer: id, serial };
        match self.questions.ask(asker, vm, question.kind(), deadline) {
            Ok(serial) => {
                outbox.push(question.record(serial), Vec::new());
                Ok(None)
            }
            Err(Refused::Second) => Err(Violation::Unexpected("question before the last one's answer")),
            Err(Refused::Busy(n)) => {
                not_done(format!("this VM has {n} questions to answer: ask again later"))
            }
        }
    }

    /// The VM that somebody means: by the name that the store shows, by the one it announced, or by that and its
    /// process number.
    fn find(&self, wanted: &str) -> Result<MemberId, String> {
        let vms = || self.vms().filter(|vm| vm.is_called(wanted));
        let mut found = vms();
        match (found.next(), found.next()) {
            (Some(vm), None) => Ok(vm.id),
            (None, _) => Err(format!(
                "no VM is called {wanted}: {}",
                listed(self.vms().map(|vm| vm.name.to_owned()))
            )),
            (Some(_), Some(_)) => Err(format!(
                "{} VMs are called {wanted}: say which, {}",
                vms().count(),
                listed(vms().map(|vm| format!("{}.{}", vm.announced, vm.pid)))
            )),
        }
    }

    /// A VM answers. `answer` makes the record for whoever asked, from the serial number that he chose.
    pub(crate) fn answer(
        &mut self,
        id: MemberId,
        serial: u64,
        kinds: &[Kind],
        answer: impl FnOnce(u64) -> Vec<u8>,
    ) -> Result<(), Violation> {
        let asked = self.questions.answered(id, serial, kinds);
        let asker = asked.map_err(|()| Violation::Unexpected("answer to what was not asked"))?;
        if let Some(asker) = asker {
            self.tell(asker, answer(asker.serial));
        }
        Ok(())
    }

    pub(crate) fn answer_done(&mut self, id: MemberId, serial: u64) -> Result<(), Violation> {
        self.answer(id, serial, &[Kind::Set], |serial| {
            encode(message::Kind::Done, &[&serial.to_ne_bytes()])
        })
    }

    pub(crate) fn answer_explained(&mut self, id: MemberId, explained: &Explained) -> Result<(), Violation> {
        self.answer(id, explained.serial, &[Kind::Explain], |serial| {
            let answer = Explained {
                serial,
                ..explained.clone()
            };
            encode(message::Kind::Explained, &[&answer.body()])
        })
    }

    pub(crate) fn answer_not_done(&mut self, id: MemberId, not_done: &NotDone) -> Result<(), Violation> {
        let kinds = [Kind::Set, Kind::Explain];
        self.answer(id, not_done.serial, &kinds, |serial| {
            let answer = NotDone {
                serial,
                ..not_done.clone()
            };
            encode(message::Kind::NotDone, &[&answer.body()])
        })
    }

    /// Tells those whose time is over.
    pub(crate) fn expire_questions(&mut self, now: Instant) {
        let late = self.questions.expire(now);
        let text = "the VM did not answer in time: its dedup thread is busy or hangs";
        late.into_iter().for_each(|asker| self.refuse(asker, text));
    }

    /// A connection has gone.
    pub(crate) fn forget_questions(&mut self, id: MemberId) {
        let lost = self.questions.forget(id);
        let text = "the VM went before it answered";
        lost.into_iter().for_each(|asker| self.refuse(asker, text));
    }

    fn refuse(&self, asker: Asker, text: &str) {
        let body = NotDone {
            serial: asker.serial,
            text: text.into(),
        };
        self.tell(asker, encode(message::Kind::NotDone, &[&body.body()]));
    }

    fn tell(&self, asker: Asker, record: Vec<u8>) {
        let connection = self.connections.get(&asker.observer);
        if let Some(outbox) = connection.and_then(|c| c.outbox.as_ref()) {
            outbox.push(record, Vec::new());
        }
    }
}

/// Some names for a message.
fn listed(mut names: impl Iterator<Item = String>) -> String {
    let mut first: Vec<String> = names.by_ref().take(LISTED).collect();
    if first.is_empty() {
        return "no VM is connected".into();
    }
    if names.next().is_some() {
        first.push("...".into());
    }
    format!("there are {}", first.join(", "))
}
