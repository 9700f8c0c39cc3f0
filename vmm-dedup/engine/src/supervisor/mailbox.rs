//! What the VMM's threads ask of the supervisor's thread.
//!
//! Whoever asks may be a thread whose system calls are filtered (vCPU, virtio devices): nothing but futex is needed. Nobody
//! waits for ever: whoever asks is answered, or learns that the mailbox is closed.

use crate::sync::{Condvar, Mutex, MutexGuard, wait, wait_until};
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

/// Of one who asked. (What is only posted has none: nobody waits for its answer.)
pub(crate) type Ticket = Option<u64>;

/// Letters in the order in which they came, and answers by ticket.
#[derive(Debug)]
struct Inner<L, A> {
    letters: VecDeque<(Ticket, L)>,
    answers: BTreeMap<u64, A>,
    next: u64,
    closed: bool,
}

/// Letters `L` go to one thread, answers `A` come back.
#[derive(Debug)]
pub(crate) struct Mailbox<L, A> {
    inner: Mutex<Inner<L, A>>,
    posted: Condvar,
    answered: Condvar,
}

impl<L, A> Mailbox<L, A> {
    pub(crate) fn new() -> Self {
        Self {
            inner: Mutex::new(Inner {
                letters: VecDeque::new(),
                answers: BTreeMap::new(),
                next: 0,
                closed: false,
            }),
            posted: Condvar::new(),
            answered: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<L, A>> {
        crate::sync::lock(&self.inner)
    }

    /// Posts a letter; whether somebody will read it.
    pub(crate) fn post(&self, letter: L) -> bool {
        let mut inner = self.lock();
        if !inner.closed {
            inner.letters.push_back((None, letter));
            self.posted.notify_all();
        }
        !inner.closed
    }

    /// Posts a letter and waits for the answer; `None`: nobody will answer. There is no limit of time: to go on while what is
    /// asked for is half done would be worse than waiting.
    pub(crate) fn ask(&self, letter: L) -> Option<A> {
        let mut inner = self.lock();
        if inner.closed {
            return None;
        }
        let ticket = inner.next;
        inner.next += 1;
        inner.letters.push_back((Some(ticket), letter));
        self.posted.notify_all();
        loop {
            if let Some(answer) = inner.answers.remove(&ticket) {
                return Some(answer);
            }
            if inner.closed {
                return None;
            }
            inner = wait(&self.answered, inner);
        }
    }

    /// The next letter; `None` when the deadline has come.
    pub(crate) fn next(&self, deadline: Option<Instant>) -> Option<(Ticket, L)> {
        let mut inner = self.lock();
        loop {
            if let Some(letter) = inner.letters.pop_front() {
                return Some(letter);
            }
            match deadline {
                None => inner = wait(&self.posted, inner),
                Some(deadline) => {
                    let over;
                    (inner, over) = wait_until(&self.posted, inner, deadline);
                    if over && inner.letters.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    /// Answers a letter.
    pub(crate) fn answer(&self, ticket: Ticket, answer: A) {
        if let Some(ticket) = ticket {
            self.lock().answers.insert(ticket, answer);
            self.answered.notify_all();
        }
    }

    /// Nothing is answered any more: whoever waits, or asks later, learns it.
    pub(crate) fn close(&self) {
        let mut inner = self.lock();
        inner.closed = true;
        let letters = std::mem::take(&mut inner.letters);
        drop(inner);
        self.answered.notify_all();
        // What they hold may be guest memory: it goes without the lock.
        drop(letters);
    }
}
