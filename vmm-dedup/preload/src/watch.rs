//! What the hooks tell the manager, and what they wait for.

use crate::mappings::Mappings;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmm_dedup::Discarder;

/// What a thread of the VMM waits for before its call goes through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// The memory is about to be unmapped or replaced.
    Remove(Range<usize>),
    /// The memory is about to be moved elsewhere.
    Move(Range<usize>),
    /// The VMM is about to use a userfaultfd on the memory.
    Lend(Range<usize>),
    /// Memory is about to be pinned for a device.
    Passthrough,
    /// Memory becomes private to the guest.
    Confidential,
    /// The memory is about to be protected.
    Protect(Range<usize>),
    /// A guest is about to be told that it can run guests of its own.
    Nested,
    /// A file was opened for direct I/O.
    DirectIo,
    /// Memory on which the VMM has a userfaultfd was renewed, and is to be registered again.
    RegisterAgain(Vec<Lent>),
}

/// Memory that the VMM has registered with a userfaultfd of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lent {
    pub(crate) range: Range<usize>,
    pub(crate) uffd: RawFd,
    pub(crate) mode: u64,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) mappings: Mappings,
    /// Bytes of guest memory that no known mapping holds.
    pub(crate) unknown: usize,
    /// Rises with everything that the manager has to look at.
    generation: u64,
    request: Option<Request>,
    /// Of the request there is, or of the last one.
    ticket: u64,
    done: u64,
    /// Nobody answers requests (any more).
    deaf: bool,
    pub(crate) discarder: Option<Discarder>,
    /// The latest registrations come last.
    pub(crate) lent: Vec<Lent>,
}

/// Shared by all threads of the process.
#[derive(Debug)]
pub(crate) struct Watch {
    inner: Mutex<Inner>,
    /// For the manager.
    changed: Condvar,
    /// For the VMM's threads.
    answered: Condvar,
}

/// The one there is.
pub(crate) static WATCH: Watch = Watch {
    inner: Mutex::new(Inner {
        mappings: Mappings::new(),
        unknown: 0,
        generation: 0,
        request: None,
        ticket: 0,
        done: 0,
        deaf: false,
        discarder: None,
        lent: Vec::new(),
    }),
    changed: Condvar::new(),
    answered: Condvar::new(),
};

/// What the manager has to do.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) request: Option<Request>,
    /// The mappings and the unknown bytes, if they have changed.
    pub(crate) news: Option<(Mappings, usize)>,
}

impl Watch {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What frees guest memory, once there is a service.
    pub(crate) fn discarder(&self) -> Option<Discarder> {
        self.lock().discarder.clone()
    }

    /// Lets the manager look at the mappings.
    pub(crate) fn tell(&self, mut inner: MutexGuard<'_, Inner>) {
        inner.generation += 1;
        drop(inner);
        self.changed.notify_all();
    }

    /// Waits until the manager has done what is asked for. There is no time limit: going on while the engine still
    /// works on the memory would be worse than waiting. The engine looks for such requests between any two steps; the
    /// longest is a question to a store that hangs (5 s).
    pub(crate) fn ask(&self, request: Request) {
        let _ = self.ask_if_heard(request);
    }

    /// As [`Self::ask`]; false if the manager has ended, so that nobody does it.
    pub(crate) fn ask_if_heard(&self, request: Request) -> bool {
        let mut inner = self.lock();
        while inner.request.is_some() && !inner.deaf {
            inner = self.answered.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        if inner.deaf {
            return false;
        }
        inner.request = Some(request);
        inner.ticket += 1;
        let ticket = inner.ticket;
        self.changed.notify_all();
        while inner.done < ticket && !inner.deaf {
            inner = self.answered.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.done >= ticket
    }

    /// The manager waits for work, but no longer than until `deadline`.
    pub(crate) fn wait(&self, seen: &mut u64, deadline: Option<Instant>) -> Work {
        let mut inner = self.lock();
        loop {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if inner.request.is_some() || inner.generation != *seen || left == Some(Duration::ZERO) {
                break;
            }
            inner = match left {
                None => self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    let waited = self.changed.wait_timeout(inner, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        let new = std::mem::replace(seen, inner.generation) != inner.generation;
        Work {
            request: inner.request.clone(),
            news: new.then_some((inner.mappings, inner.unknown)),
        }
    }

    /// The manager has done what was asked for.
    pub(crate) fn answer(&self) {
        let mut inner = self.lock();
        inner.request = None;
        inner.done = inner.ticket;
        drop(inner);
        self.answered.notify_all();
    }

    /// The manager ends: nobody waits for it any more.
    pub(crate) fn go_deaf(&self) {
        self.lock().deaf = true;
        self.answered.notify_all();
    }
}
