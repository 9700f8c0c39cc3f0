//! What the supervisor's thread and the VMM's share.

use crate::config::Setup;
use crate::error::Error;
use crate::scan::control::Control;
use crate::service::DedupService;
use crate::supervisor::letter;
use crate::supervisor::mailbox::Mailbox;
use crate::sync::Mutex;
use crate::unmerge::discard::Discarder;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vmm_dedup_protocol::refusal::Refusal;
use vmm_dedup_protocol::stats::ServiceStats;

/// How a VM stands.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// There is none.
    Detached,
    /// It has no service yet.
    Starting,
    /// It has none, and this is why; it is tried again if that may pass.
    Waiting(Refusal),
    /// It has one. (Parts of its memory may be refused.)
    Serving,
    /// It is not deduplicated any more.
    Refused(Refusal),
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) letters: Letters,
    pub(crate) discarder: Discarder,
    pub(crate) account: Mutex<Option<Arc<Control>>>,
    pub(crate) status: Mutex<Status>,
    /// Of the VM, if it has one; else 0. It stays when the supervisor's thread has died: that VM goes on.
    number: AtomicU64,
    /// The supervisor's thread has ended, and so has its service: nothing is merged any more.
    rests: AtomicBool,
}

impl Shared {
    pub(crate) fn new() -> Self {
        Self {
            letters: Mailbox::new(),
            discarder: Discarder::default(),
            account: Mutex::new(None),
            status: Mutex::new(Status::Detached),
            number: AtomicU64::new(0),
            rests: AtomicBool::new(false),
        }
    }

    pub(crate) fn rest(&self) {
        self.rests.store(true, Ordering::Release);
    }

    pub(crate) fn rests(&self) -> bool {
        self.rests.load(Ordering::Acquire)
    }

    pub(crate) fn number(&self) -> Option<u64> {
        Some(self.number.load(Ordering::Acquire)).filter(|number| *number != 0)
    }

    /// Posts a letter. A thread that has ended has said why, and merges nothing any more.
    pub(crate) fn post(&self, letter: Letter) {
        if self.discarder.is_here() {
            let _ = self.letters.post(letter);
        }
    }

    /// A read from a file has just filled these addresses. Whoever holds the account is not waited for.
    pub(crate) fn note_read(&self, addresses: Range<usize>) {
        if self.discarder.is_here()
            && let Ok(account) = self.account.try_lock()
            && let Some(control) = &*account
        {
            control.reads().note(addresses);
        }
    }

    /// Only the supervisor's thread sets it.
    pub(crate) fn set_number(&self, number: Option<u64>) {
        self.number.store(number.unwrap_or(0), Ordering::Release);
    }
}

/// Makes the setup of a VM, in the supervisor's thread.
pub(crate) type Configure = Box<dyn FnOnce() -> Result<Setup, Refusal> + Send>;
/// Something to be done in the supervisor's thread.
pub(crate) type Work = Box<dyn FnOnce(Option<&DedupService>) + Send>;
/// What a thread of the VMM asks of the engine.
pub(crate) enum Ask {
    /// A VM begins; what to fall back on where its setup is wrong.
    Attach(Box<Setup>, Configure),
    /// A VM begins under a number, and one that there is ends first.
    Replace(u64, Box<Result<Setup, Error>>),
    /// The VM of that number ends, if it has not ended.
    EndOf(u64),
    /// The guest can run guests of its own.
    Nested,
    /// Work for this thread.
    Work(Work),
    /// This thread has a bug.
    #[cfg(test)]
    Die,
}

impl fmt::Debug for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attach(..) => "Attach",
            Self::Replace(..) => "Replace",
            Self::EndOf(_) => "EndOf",
            Self::Nested => "Nested",
            Self::Work(_) => "Work",
            #[cfg(test)]
            Self::Die => "Die",
        })
    }
}

pub(crate) type Letter = letter::Letter<Ask>;
pub(crate) type Answer = letter::Answer<ServiceStats>;
pub(crate) type Letters = Mailbox<Letter, Answer>;
