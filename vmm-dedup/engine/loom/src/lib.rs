//! The thread of `vmm-dedup`'s supervisor (its loop, mailbox, state machine and watched pins), compiled from the very same sources, on
//! loom's locks.
//!
//! loom runs a model, a few threads that each make a few steps, in all orders. `cargo test -p vmm-dedup-loom` runs the models
//! (`tests`), in seconds; CI does so with all other tests.
//!
//! What is not real here are the driver's hands: the service is a page that is touched while a region is active, whatever is asked of it
//! works, and time passes when a model says so: by itself, or while memory is given back.

#[path = "../../src/supervisor/driver.rs"]
#[allow(dead_code, unreachable_pub)]
mod driver;
#[path = "../../src/supervisor/letter.rs"]
#[allow(dead_code)]
mod letter;
#[path = "../../src/supervisor/lifecycle.rs"]
#[allow(dead_code, unreachable_pub)] // what models do not look at; what the engine exports
mod lifecycle;
#[path = "../../src/supervisor/mailbox.rs"]
#[allow(dead_code)]
mod mailbox;
#[path = "../../src/supervisor/theirs.rs"]
#[allow(dead_code)]
mod theirs;
#[path = "../../src/supervisor/watched.rs"]
#[allow(dead_code)]
mod watched;

#[path = "../../src/memory/ranges.rs"]
#[allow(dead_code)]
mod ranges;

/// Where the sources look for each other.
mod supervisor {
    pub(crate) use crate::{letter, lifecycle, mailbox, theirs, watched};
}

/// Where the sources look for each other.
mod memory {
    pub(crate) use crate::ranges;
}

/// The models' time.
mod clock {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    thread_local! {
        // loom runs all threads of a model in one of ours.
        static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    pub(crate) fn now() -> Instant {
        NOW.get().unwrap_or_else(|| {
            let now = Instant::now();
            NOW.set(Some(now));
            now
        })
    }

    pub(crate) fn pass(time: Duration) {
        NOW.set(Some(now() + time));
    }
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

    /// No deadline comes that has not come.
    pub(crate) fn wait_until<'a, T>(
        condition: &Condvar,
        guard: MutexGuard<'a, T>,
        deadline: Instant,
    ) -> (MutexGuard<'a, T>, bool) {
        if deadline <= crate::clock::now() {
            return (guard, true);
        }
        (wait(condition, guard), false)
    }
}

/// What of the engine's errors the sources need.
mod error {
    use vmm_dedup_protocol::refusal::{Reason, Refusal};

    #[derive(Debug)]
    #[allow(dead_code)] // nothing fails here
    pub(crate) enum Error {
        Stopped,
        Refused(Refusal),
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

    impl Error {
        pub(crate) fn may_pass(&self) -> bool {
            false
        }
    }

    impl From<&Error> for Refusal {
        fn from(_: &Error) -> Self {
            Refusal::new(Reason::Other, "", "")
        }
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

    pub(crate) fn service_died() -> Refusal {
        Refusal::new(Reason::Other, "", "")
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

use driver::{Driver, Hands};
use error::Error;
use letter::{Answer, Letter};
use lifecycle::{Effect, Event, Lease, Lifecycle, Span};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use std::ops::Range;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::refusal::{Reason, Refusal};

/// The memory of the models' VM: one page.
pub const MEMORY: Range<usize> = 0..4096;

/// A page whose accesses loom checks: two that are not ordered are an error.
#[derive(Debug, Default)]
struct Page(UnsafeCell<u64>);

// SAFETY: loom reports every access that is not ordered with a write.
#[allow(unsafe_code)]
unsafe impl Sync for Page {}

/// Some time passes, after which it is looked again for what nobody tells.
#[derive(Debug)]
struct Tick;

/// A device whose end nobody tells: whether it is there can be seen.
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

    /// One that comes when memory was pinned for it.
    pub fn to_come() -> Self {
        let open = Arc::new(AtomicBool::new(false));
        Self { open }
    }

    /// It comes.
    pub fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    /// It goes, and uses no memory any more.
    pub fn close(&self) {
        self.open.store(false, Ordering::Release);
    }
}

/// A supervisor as the VMM's threads see it.
#[derive(Clone, Debug)]
pub struct Vmm {
    letters: Arc<mailbox::Mailbox<Letter<Tick>, Answer<()>>>,
    page: Arc<Page>,
    /// What giving memory back takes.
    copying: Duration,
}

impl Vmm {
    /// One that nobody answers yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self::that_gives_back_in(Duration::ZERO)
    }

    /// The same, and it takes so long to give memory back.
    pub fn that_gives_back_in(copying: Duration) -> Self {
        Self {
            letters: Arc::new(mailbox::Mailbox::new()),
            page: Arc::default(),
            copying,
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

    /// The same, and nobody will tell when it is over; whether somebody answered.
    pub fn lend_until_free(&self) -> bool {
        self.ask(Event::Lend(MEMORY, Lease::UntilFree)).is_some()
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

    /// Some time passes.
    pub fn wait(&self) {
        self.letters.post(Letter::Ask(Tick));
    }

    /// The supervisor ends when it has read what came before.
    pub fn end(&self) {
        self.letters.post(Letter::End);
    }

    /// Whether it went well, if somebody answered.
    fn ask(&self, event: Event) -> Option<bool> {
        self.letters
            .ask(Letter::Event(event))
            .map(|(done, _)| done.is_ok())
    }

    fn post(&self, event: Event) {
        self.letters.post(match event {
            Event::Add(span) => Letter::Add(vec![span], None),
            event => Letter::Event(event),
        });
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

    /// The supervisor's thread, until it ends: whatever is active is used whenever all that was to be done is done.
    pub fn serve(&self) {
        let hands = Service {
            vmm: self.clone(),
            works: false,
        };
        Driver::of(hands, Lifecycle::new(Duration::ZERO, true)).run(&self.letters);
    }
}

/// What effects make of a service.
#[derive(Debug)]
struct Service {
    vmm: Vmm,
    /// It has memory: it is registered and shared, also while merging rests.
    works: bool,
}

impl Hands for Service {
    type Ask = Tick;
    type Account = ();

    fn now(&self) -> Instant {
        clock::now()
    }

    fn take(_: &mut Driver<Self>, Tick: Tick) -> Result<(), Error> {
        clock::pass(lifecycle::RETRY);
        Ok(())
    }

    fn carry_out(driver: &mut Driver<Self>, effect: &Effect) -> Result<(), Error> {
        let service = &mut driver.hands;
        match effect {
            Effect::Start(_) | Effect::Add(_) | Effect::Resume(_) => service.works = true,
            Effect::Release(_) => {
                clock::pass(service.vmm.copying);
                service.works = false;
            }
            Effect::Remove(_) => service.works = false,
            Effect::Stop { .. } => service.works = false,
            _ => {}
        }
        Ok(())
    }

    fn next_due(&self) -> Option<Instant> {
        None
    }

    fn do_what_is_due(&mut self) {}

    fn bury(&mut self) -> bool {
        false
    }

    fn take_account(&mut self) -> Option<()> {
        None
    }

    fn settled(&self, _: &Lifecycle) {
        if self.works {
            self.vmm.use_memory();
        }
    }

    fn end(&mut self) {
        self.works = false;
    }
}
