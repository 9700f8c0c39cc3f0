//! The mailbox and the state machine of `vmm-dedup`'s supervisor, compiled from the very same sources, on loom's locks.
//!
//! loom runs a model, a few threads that each make a few steps, in all orders. `cargo test -p vmm-dedup-loom` runs the models
//! (`tests`), in seconds; CI does so with all other tests.
//!
//! What is not real here: the service is a page that is touched while a region is active, and nothing takes time.

#[path = "../../src/supervisor/lifecycle.rs"]
#[allow(dead_code, unreachable_pub)] // what models do not look at; what the engine exports
mod lifecycle;
#[path = "../../src/supervisor/mailbox.rs"]
#[allow(dead_code)]
mod mailbox;

/// loom's locks in the place of the standard library's.
mod sync {
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    use std::time::Instant;

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().expect("no model panics with a lock")
    }

    pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        condition.wait(guard).expect("no model panics with a lock")
    }

    /// No deadline ever comes.
    pub(crate) fn wait_until<'a, T>(
        condition: &Condvar,
        guard: MutexGuard<'a, T>,
        _: Instant,
    ) -> (MutexGuard<'a, T>, bool) {
        (wait(condition, guard), false)
    }
}

/// What of the engine's errors the state machine needs.
mod error {
    #[derive(Debug)]
    pub(crate) enum Error {
        Attached,
        Detached,
        #[allow(dead_code)] // nobody prints it
        Lent(usize),
    }
}

/// What of the engine's texts the state machine needs.
mod refusal {
    use vmm_dedup_protocol::refusal::{Reason, Refusal};

    pub(crate) fn passes(refusal: &Refusal) -> bool {
        refusal.reason == Reason::Store
    }

    pub(crate) fn pinned() -> Refusal {
        Refusal::new(Reason::Vfio, "", "")
    }

    pub(crate) fn foreign_userfaultfd() -> Refusal {
        Refusal::new(Reason::ForeignUserfaultfd, "", "")
    }

    // What the state machine's own tests name, which are compiled with all targets and not run here.

    #[cfg(test)]
    pub(crate) fn confidential() -> Refusal {
        Refusal::new(Reason::Confidential, "", "")
    }

    #[cfg(test)]
    pub(crate) fn protected() -> Refusal {
        Refusal::new(Reason::Other, "", "")
    }

    #[cfg(test)]
    pub(crate) fn nested() -> Refusal {
        protected()
    }

    #[cfg(test)]
    pub(crate) fn unknown_memory(_: usize) -> Refusal {
        protected()
    }
}

use lifecycle::{Effect, Event, Lease, Lifecycle, Outcome, Span};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use std::ops::Range;
use std::time::{Duration, Instant};

/// The memory of the models' VM: one page.
pub const MEMORY: Range<usize> = 0..4096;

/// A page whose accesses loom checks: two that are not ordered are an error.
#[derive(Debug, Default)]
struct Page(UnsafeCell<u64>);

// SAFETY: loom reports every access that is not ordered with a write.
#[allow(unsafe_code)]
unsafe impl Sync for Page {}

/// A supervisor as the VMM's threads see it.
#[derive(Clone, Debug)]
pub struct Vmm {
    letters: Arc<mailbox::Mailbox<Event, bool>>,
    page: Arc<Page>,
}

impl Vmm {
    /// One that nobody answers yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self {
            letters: Arc::new(mailbox::Mailbox::new()),
            page: Arc::default(),
        }
    }

    /// A VM begins, and has memory.
    pub fn attach(&self) {
        self.letters.post(Event::Attach { enabled: true });
        self.add();
    }

    /// It has (more) memory.
    pub fn add(&self) {
        self.letters.post(Event::Add(Span {
            range: MEMORY,
            guest_address: None,
        }));
    }

    /// A device is about to pin memory; whether somebody answered.
    pub fn pin(&self) -> bool {
        self.letters.ask(Event::Pin).is_some()
    }

    /// It has let go.
    pub fn unpin(&self) {
        self.letters.post(Event::Unpin);
    }

    /// Somebody is about to use a userfaultfd; whether somebody answered.
    pub fn lend(&self) -> bool {
        let event = Event::Lend(MEMORY, Lease::UntilTakenBack);
        self.letters.ask(event).is_some()
    }

    /// It is over.
    pub fn take_back(&self) {
        self.letters.post(Event::TakeBack(MEMORY));
    }

    /// Memory goes; whether somebody answered.
    pub fn remove(&self) -> bool {
        self.letters.ask(Event::Remove(MEMORY)).is_some()
    }

    /// The VM ends; whether somebody answered.
    pub fn detach(&self) -> bool {
        self.letters.ask(Event::Detach { unmerge: false }).is_some()
    }

    /// The supervisor's thread has died, or ends.
    pub fn close(&self) {
        self.letters.close();
    }

    /// Uses the memory as a device does, or whoever has it next.
    #[allow(unsafe_code)]
    pub fn use_memory(&self) {
        // SAFETY: loom has checked that nobody else uses the cell now; the pointer does not leave the closure.
        self.page.0.with_mut(|page| unsafe { *page += 1 });
    }

    /// The supervisor's thread, for so many letters: whatever is active is worked on behind each.
    pub fn serve(&self, letters: usize) {
        let now = Instant::now();
        let mut machine = Lifecycle::new(Duration::ZERO, true);
        let (mut works, mut on) = (false, false);
        for _ in 0..letters {
            let Some((ticket, event)) = self.letters.next(None) else {
                return;
            };
            let handled = machine.handle(event, now).is_ok();
            for due in [false, true] {
                while let Some(effect) = machine.next(now, due) {
                    match effect {
                        Effect::Start(_) => works = true,
                        Effect::SwitchOn => on = true,
                        Effect::Add(_) | Effect::Resume(_) => works = true,
                        Effect::Release(_) | Effect::Remove(_) => works = false,
                        Effect::Stop { .. } => (works, on) = (false, false),
                        _ => {}
                    }
                    machine.done(&effect, Outcome::Done, now);
                }
                if !due {
                    self.letters.answer(ticket, handled);
                }
            }
            if works && on {
                self.use_memory();
            }
        }
    }
}
