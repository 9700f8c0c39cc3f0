//! Passing on what observers ask of VMs, and the VMs' answers. Only root and the store's own user may ask: others who may connect
//! share memory, and neither steer other VMs nor hear of single pages of theirs.

use crate::ledger::epochs::MemberId;
use crate::requests::peers::{Peers, Phase};
use crate::requests::questions::{Asker, NotAsked, QuestionKind, Questions};
use crate::requests::rights::Rights;
use crate::requests::violation::Violation;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::control::{Explain, Explained, NotDone, Set, Switch};
use vmm_dedup_protocol::message::{Kind, encode};
use vmm_dedup_protocol::name::Name;
use vmm_dedup_protocol::refusal;
use zerocopy::IntoBytes;

/// How many times longer a VM may take to bring its memory back.
const UNMERGE_FACTOR: u32 = 60;

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

    fn kind(&self) -> QuestionKind {
        match self {
            Self::Set(_) => QuestionKind::Set,
            Self::Explain(_) => QuestionKind::Explain,
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
        match self {
            Self::Set(set) => encode(Kind::Set, &[&Set { serial, ..set }.body()]),
            Self::Explain(explain) => encode(Kind::Explain, &[Explain { serial, ..explain }.as_bytes()]),
        }
    }
}

/// A VM's answer.
#[derive(Debug)]
pub(crate) enum Answer<'a> {
    Done(u64),
    Explained(&'a Explained),
    NotDone(&'a NotDone),
}

impl Answer<'_> {
    fn serial(&self) -> u64 {
        match self {
            Self::Done(serial) => *serial,
            Self::Explained(explained) => explained.serial,
            Self::NotDone(not_done) => not_done.serial,
        }
    }

    /// The kinds of questions that it answers.
    fn kinds(&self) -> &'static [QuestionKind] {
        match self {
            Self::Done(_) => &[QuestionKind::Set],
            Self::Explained(_) => &[QuestionKind::Explain],
            Self::NotDone(_) => &[QuestionKind::Set, QuestionKind::Explain],
        }
    }

    /// The record for the observer.
    fn record(&self, serial: u64) -> Vec<u8> {
        match *self {
            Self::Done(_) => encode(Kind::Done, &[&serial.to_ne_bytes()]),
            Self::Explained(explained) => {
                let answer = Explained {
                    serial,
                    ..explained.clone()
                };
                encode(Kind::Explained, &[&answer.body()])
            }
            Self::NotDone(not_done) => {
                let answer = NotDone {
                    serial,
                    ..not_done.clone()
                };
                encode(Kind::NotDone, &[&answer.body()])
            }
        }
    }
}

/// The questions that wait, and how long they may.
#[derive(Debug)]
pub(crate) struct Relay {
    questions: Questions,
    patience: Duration,
}

impl Relay {
    /// VMs may take this long to answer.
    pub(crate) fn new(patience: Duration) -> Self {
        Self {
            questions: Questions::default(),
            patience,
        }
    }

    /// An observer asks something of a VM. Returns the answer, if the VM need not be asked.
    pub(crate) fn ask(
        &mut self,
        peers: &Peers,
        rights: &Rights,
        observer: MemberId,
        question: Question,
    ) -> Result<Option<Vec<u8>>, Violation> {
        if !matches!(peers.phase(observer), Some(Phase::Observer)) {
            return Err(Violation::Unexpected("question (observers ask)"));
        }
        let serial = question.serial();
        let not_done = |text: String| Ok(Some(not_done(serial, text)));
        let user = peers.user(observer).unwrap_or(u32::MAX);
        if let Err(text) = rights.may_operate(user) {
            return not_done(text);
        }
        let vm = match peers.find(&question.name().text()) {
            Ok(vm) => vm,
            Err(text) => return not_done(text),
        };
        if let Some(Phase::Refused(refused)) = peers.phase(vm) {
            return match question {
                Question::Set(_) => not_done(format!("this VM is refused: {}", refused.refusal)),
                Question::Explain(_) => {
                    let answer = refusal::Refused {
                        serial,
                        pages: refused.pages,
                        name: Name::new(&refused.name),
                        refusal: refused.refusal.clone(),
                    };
                    Ok(Some(encode(Kind::Refused, &[&answer.body()])))
                }
            };
        }
        let Some(outbox) = peers.outbox(vm) else {
            return not_done("this VM has just gone".into());
        };
        let deadline = Instant::now() + question.patience(self.patience);
        let asker = Asker { observer, serial };
        match self.questions.ask(asker, vm, question.kind(), deadline) {
            Ok(serial) => {
                outbox.push(question.record(serial), Vec::new());
                Ok(None)
            }
            Err(NotAsked::Second) => Err(Violation::Unexpected("question before the last one's answer")),
            Err(NotAsked::Busy(n)) => {
                not_done(format!("this VM has {n} questions to answer: ask again later"))
            }
        }
    }

    /// A VM answers: who asked is told, under the serial number that he chose.
    pub(crate) fn answer(
        &mut self,
        peers: &Peers,
        vm: MemberId,
        answer: &Answer<'_>,
    ) -> Result<(), Violation> {
        let asked = self.questions.answered(vm, answer.serial(), answer.kinds());
        let asker = asked.map_err(|()| Violation::Unexpected("answer to what was not asked"))?;
        if let Some(asker) = asker {
            tell(peers, asker, answer.record(asker.serial));
        }
        Ok(())
    }

    /// Tells those whose time is over.
    pub(crate) fn expire(&mut self, peers: &Peers, now: Instant) {
        for (asker, kind) in self.questions.expire(now) {
            // What was sent cannot be taken back.
            let text = match kind {
                QuestionKind::Set => {
                    "the VM did not answer in time: its dedup thread is busy or hangs, and makes the change when it goes on"
                }
                QuestionKind::Explain => "the VM did not answer in time: its dedup thread is busy or hangs",
            };
            tell(peers, asker, not_done(asker.serial, text.into()));
        }
    }

    /// A connection has gone: what it asked is not waited for, and who asked it is told.
    pub(crate) fn forget(&mut self, peers: &Peers, gone: MemberId) {
        let text = "the VM went before it answered";
        for asker in self.questions.forget(gone) {
            tell(peers, asker, not_done(asker.serial, text.into()));
        }
    }
}

fn not_done(serial: u64, text: String) -> Vec<u8> {
    encode(Kind::NotDone, &[&NotDone { serial, text }.body()])
}

fn tell(peers: &Peers, asker: Asker, record: Vec<u8>) {
    if let Some(outbox) = peers.outbox(asker.observer) {
        outbox.push(record, Vec::new());
    }
}
