//! The mailbox, the state machine and the watched pins of `vmm-dedup`'s supervisor, compiled from the very same sources, on loom's locks.
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
#[path = "../../src/supervisor/watched.rs"]
#[allow(dead_code)]
mod watched;

/// Where the sources look for each other.
mod supervisor {
    pub(crate) use crate::lifecycle;
}

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
        #[allow(dead_code)] // nobody prints it
        NotAdded {
            start: usize,
            end: usize,
        },
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
use loom::sync::atomic::{AtomicBool, Ordering};
use std::ops::Range;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::refusal::{Reason, Refusal};
use watched::{Still, Watched};

/// The memory of the models' VM: one page.
pub const MEMORY: Range<usize> = 0..4096;

/// A page whose accesses loom checks: two that are not ordered are an error.
#[derive(Debug, Default)]
struct Page(UnsafeCell<u64>);

// SAFETY: loom reports every access that is not ordered with a write.
#[allow(unsafe_code)]
unsafe impl Sync for Page {}

/// What a thread of the VMM sends.
enum Letter {
    Event(Event),
    PinWhile(Still),
}

impl std::fmt::Debug for Letter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Event(_) => "Event",
            Self::PinWhile(_) => "PinWhile",
        })
    }
}

/// A device whose end nobody tells: whether it has gone can be seen.
#[derive(Clone, Debug)]
pub struct Device {
    open: Arc<AtomicBool>,
}

impl Device {
    /// One that is there.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let open = Arc::new(AtomicBool::new(true));
        Self { open }
    }

    /// It goes, and uses no memory any more.
    pub fn close(&self) {
        self.open.store(false, Ordering::Release);
    }
}

/// A supervisor as the VMM's threads see it.
#[derive(Clone, Debug)]
pub struct Vmm {
    letters: Arc<mailbox::Mailbox<Letter, bool>>,
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
        self.post(Event::Attach);
        self.add();
    }

    /// It has (more) memory.
    pub fn add(&self) {
        self.post(Event::Add(Span {
            range: MEMORY,
            guest_address: None,
        }));
    }

    /// A device is about to pin memory; whether somebody answered.
    pub fn pin(&self) -> bool {
        self.ask(Event::Pin).is_some()
    }

    /// It has let go.
    pub fn unpin(&self) {
        self.post(Event::Unpin);
    }

    /// A device is about to pin memory, and nobody will tell that it lets go; whether somebody answered.
    pub fn pin_while(&self, device: &Device) -> bool {
        let open = device.open.clone();
        let still = move || open.load(Ordering::Acquire);
        self.letters.ask(Letter::PinWhile(Box::new(still))).is_some()
    }

    /// Somebody is about to use a userfaultfd; whether somebody answered.
    pub fn lend(&self) -> bool {
        self.ask(Event::Lend(MEMORY, Lease::UntilTakenBack)).is_some()
    }

    /// It is over.
    pub fn take_back(&self) {
        self.post(Event::TakeBack(MEMORY));
    }

    /// Memory goes; whether somebody answered.
    pub fn remove(&self) -> bool {
        self.ask(Event::Remove(MEMORY)).is_some()
    }

    /// The VM is not to be deduplicated any more; whether there was one.
    pub fn refuse(&self) -> bool {
        self.ask(Event::Refuse(Refusal::new(Reason::Confidential, "", ""))) == Some(true)
    }

    /// The VM ends; whether somebody answered.
    pub fn detach(&self) -> bool {
        self.ask(Event::Detach { unmerge: false }).is_some()
    }

    fn ask(&self, event: Event) -> Option<bool> {
        self.letters.ask(Letter::Event(event))
    }

    fn post(&self, event: Event) {
        self.letters.post(Letter::Event(event));
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

    /// The supervisor's thread, for so many letters, each a second behind the one before: whatever is active is worked on behind each.
    pub fn serve(&self, letters: usize) {
        let mut now = Instant::now();
        let mut machine = Lifecycle::new(Duration::ZERO, true);
        let (mut service, mut watched) = (Service::default(), Watched::default());
        for _ in 0..letters {
            let Some((ticket, letter)) = self.letters.next(None) else {
                return;
            };
            now += lifecycle::RETRY;
            let event = match letter {
                Letter::Event(event) => event,
                Letter::PinWhile(still) => {
                    watched.add(still, now);
                    Event::Pin
                }
            };
            let handled = machine.handle(event, now).is_ok();
            service.work_off(&mut machine, now, false);
            self.letters.answer(ticket, handled);
            for _ in 0..watched.end(now) {
                let _ = machine.handle(Event::LetGo, now);
                service.work_off(&mut machine, now, false);
            }
            service.work_off(&mut machine, now, true);
            if service.works && service.on {
                self.use_memory();
            }
        }
    }
}

/// What effects make of a service.
#[derive(Debug, Default)]
struct Service {
    /// It has memory.
    works: bool,
    on: bool,
}

impl Service {
    fn work_off(&mut self, machine: &mut Lifecycle, now: Instant, due: bool) {
        while let Some(effect) = machine.next(now, due) {
            match effect {
                Effect::Start(_) | Effect::Add(_) | Effect::Resume(_) => self.works = true,
                Effect::Release(_) | Effect::Remove(_) => self.works = false,
                Effect::Unpause => self.on = true,
                Effect::Pause => self.on = false,
                Effect::Stop { .. } => *self = Self::default(),
                _ => {}
            }
            machine.done(&effect, Outcome::Done, now);
        }
    }
}
