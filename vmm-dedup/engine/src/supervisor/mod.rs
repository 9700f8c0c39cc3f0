//! What a VMM holds.
//!
//! A [`Supervisor`] is made early, before the VMM restricts its threads, and is told what happens to guest memory. It owns what
//! every VMM would otherwise have to get right by itself:
//!
//! - *connecting and trying again*: a store that comes late, memory that another userfaultfd owns for a while;
//! - *announcing* why a VM, or a part of its memory, is not deduplicated;
//! - *the order at start*: the service starts paused, those who free memory learn of it, and only then it may merge, whatever an
//!   operator has asked for meanwhile;
//! - *the discarder*, which exists before there is a service;
//! - *threads*: the supervisor's own starts all others, so they have its seccomp filter (or none), whoever calls;
//! - *giving back* before a device pins memory, and what is left if that fails.
//!
//! ```text
//!   the VMM's threads                    dedup-supervisor                        the service's threads
//!   attach, add_region ----post----> mailbox --> Lifecycle --effect--> Driver --> DedupService
//!   remove, lend, pin, refuse --ask-->  |   <------outcome------'
//!        <------------answer-----------'
//!   discarder.discard() -------------------------------------------------------> Discarder
//! ```
//!
//! [`lifecycle`] is the state machine, [`driver`] has done what it says by [`engine`], [`mailbox`], [`letter`] and [`shared`] are what
//! threads share, [`served`] is what the VMM sees of a service, [`pins`] end with what holds them and [`watched`] ones when nobody sees
//! them any more, [`theirs`] runs the VMM's own code, [`nested`] knows KVM's ways with guests that run guests.
//!
//! # Events in any order
//!
//! Every call works in every state. What does not fit is an error and changes nothing, or has no effect:
//!
//! | call | before `attach` | while it starts, or waits | while it serves | when the VM is refused |
//! | --- | --- | --- | --- | --- |
//! | `attach` | begins | `Attached` | `Attached` | `Attached` |
//! | `attach_with` | begins, or is refused for its settings | nothing | nothing | nothing |
//! | [`process::attach`](crate::process::attach) | begins | that VM ends, the next begins | stopped without unmerging, the next begins | that VM ends, the next begins |
//! | `add_*` | `Detached`, if anybody asks (`start`) | noted, what is new of it | added, what is new of it | noted |
//! | `remove_range` | nothing | forgotten | forgotten | forgotten by the discarder |
//! | `nested_guests`, where KVM leaves no trace | `Detached` | as `refuse` | as `refuse` | once |
//! | `nested_guests`, where KVM pins | `Detached` | nothing is vouched for, until `detach` | the same | nothing |
//! | `lend` | `Detached` | tried later; `NotAdded`; `Lent` | released; `NotAdded`; `Lent` | nothing; `Refused` |
//! | `take_back` | nothing | tried at once | resumed | nothing |
//! | `pin`, `unpin` | counted | counted; nothing starts meanwhile | counted; all released, resumed | counted |
//! | `pin_while` | as `pin`; its end is looked for every second | as `pin` | as `pin` | as `pin` |
//! | `refuse` | `Detached` | announced | stopped, announced | once |
//! | `leave_alone` | `Detached` | refused by range, announced; `NotAdded` | released, refused by range; `NotAdded` | nothing; `Refused` |
//! | `note` | nothing | logged, announced | logged | logged |
//! | `direct_io_opened` | nothing | nothing: the start looks | looked at | nothing |
//! | `start` | `Detached` | tried at once | fine | `Refused` |
//! | `with_service` | done without a service | done without a service | done with it | done without a service |
//! | `set`, `pass` | `Detached` | `Detached` | done | `Detached` |
//! | `pause`, `resume` | remembered | remembered | done | nothing |
//! | `detach` | ends a pause, else nothing | ends | stopped | ends |
//!
//! Ranges need not be those that were added. `add_*` of memory that is known in part adds what is not known yet, and leaves the rest as
//! it stands. The others concern every region that has a byte in common with the range; an empty range has none, and changes nothing.
//! `lend` and `leave_alone` of memory of which nothing was added are an error, `NotAdded`: nobody would remember them when it comes.
//! When the VM is refused they are `Refused` for memory that could not be given back: nobody tries that again, and its pages may map the
//! store until it goes.
//! So `take_back` of a part of a region takes back all of it, and a region that is lent until it is taken back cannot be lent again
//! before: `Lent`. A loan that failed counts as well, until it is taken back; whoever asks again has it tried again.
//!
//! The store is told one reason, and [`Status`] has the same: of a VM that is refused as a whole that one, while memory is pinned the
//! pin, else what was found last. (What may pass is not announced, unless it is the one of `refuse`.) The log has each reason once.
//!
//! A call that has to wait for the thread waits for what it does now: a try at a store that hangs (5 s until whoever announces
//! the VM there lets go, 5 s to be let in, 5 s for an answer), giving back what another call asked for, or the work of `with_service`.
//! Where the host lacks memory for pages that are packed, it gives up on them after some seconds: what is packed comes back later. A VM
//! that is refused, or that ended with an error, has a thread for that until it is done; memory that goes does not get it back, and
//! whoever has that memory still meets memory errors there. Only dropping the supervisor waits for all of it. Pins are the devices', not the VM's: `detach` leaves them, and the next VM begins pinned.
//!
//! A service whose scanning thread dies, which only a bug explains, leaves what is shared as it is, and the VM is refused: at the next
//! call, or within 10 seconds.
//!
//! What a VMM gives to be done in the supervisor's thread may panic. The panic hook tells that, and dedup goes on: a closure of `pin_while`
//! is not asked again, and its pin lasts; of `attach_with` the VM is refused; of `with_service` there is no result; memory that panics
//! where it is dropped is gone.
//!
//! A VM's memory maps a store's pages still when it has ended without unmerging, or when the kernel had copied some of them, which
//! may be pinned. The next VM may have that memory, but it is refused by that reason ([`refusal::left_over`]), and what is freed of it reads
//! as the store's content and not as zeros, since the discarder knows it no more: give it new memory (MAP_FIXED over the old one does,
//! after `detach`).

mod driver;
mod engine;
mod letter;
mod lifecycle;
mod mailbox;
mod nested;
mod pins;
mod served;
mod shared;
mod theirs;
mod watched;

pub use lifecycle::Lease;
pub use pins::Pinned;
pub use served::Served;
pub use shared::Status;

use crate::compare::Engines;
use crate::config::Setup;
use crate::error::Error;
use crate::memory::layout::HostRange;
use crate::refusal;
use crate::seccomp::Part;
use crate::service::{DedupService, Pending};
use crate::supervisor::driver::Driver;
use crate::supervisor::engine::Engine;
use crate::supervisor::lifecycle::{Event, Lifecycle, Span};
use crate::supervisor::shared::{Answer, Ask, Letter, Shared};
use crate::supervisor::theirs::Keep;
use crate::sync::{Mutex, lock};
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::sched;
use crate::sys::thread;
pub use crate::sys::thread::Each;
use crate::unmerge::discard::Discarder;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_dedup_protocol::control::Settings;
use vmm_dedup_protocol::refusal::Refusal;
use vmm_dedup_protocol::stats::ServiceStats;

/// What a supervisor knows of its VMM. Fields may be added in any version: a literal ends in `..Options::default()` or
/// `..Options::filtered()`.
pub struct Options {
    /// What there is for [`Config::search`](crate::Config::search) and [`Config::verify`](crate::Config::verify).
    pub engines: Engines,
    /// See [`DedupService::vouch_for_pins`].
    pub vouch_for_pins: bool,
    /// How long to wait after memory was added until a service starts, for more to come.
    pub settle: Duration,
    /// What the supervisor's thread does first.
    pub first: Option<Box<dyn FnOnce() + Send>>,
    /// What every thread of the engine does first, the supervisor's and those of services, e.g. apply a seccomp filter. Threads
    /// also have what restricts the supervisor's.
    pub each: Option<Each>,
    /// Whether the supervisor's thread may be filtered, by the thread that makes it or by [`Self::each`]: the VMM knows that the
    /// filter has what is needed. If not, VMs are refused then.
    pub may_be_filtered: bool,
}

#[cfg(feature = "seccomp")]
impl Options {
    /// Every thread of the engine is filtered, by what [`seccomp`](crate::seccomp) knows of it.
    ///
    /// # Panics
    /// A thread does where the kernel has no such filters.
    #[must_use]
    pub fn filtered() -> Self {
        let restrict = |part| crate::seccomp::restrict_this_thread(part).expect("a filter made of constants");
        Self {
            each: Some(Arc::new(restrict)),
            may_be_filtered: true,
            ..Self::default()
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            engines: Engines::new(),
            vouch_for_pins: false,
            settle: Duration::ZERO,
            first: None,
            each: None,
            may_be_filtered: false,
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("engines", &self.engines)
            .field("vouch_for_pins", &self.vouch_for_pins)
            .field("settle", &self.settle)
            .field("may_be_filtered", &self.may_be_filtered)
            .finish_non_exhaustive()
    }
}

/// Deduplicates a VM after the other: see the [module](self). Every call may come from any thread but the supervisor's own, and
/// needs no system calls but futex (and what the allocator needs). In the supervisor's own thread (where work of
/// [`Self::with_service`] and [`Self::attach_with`] runs, and memory that was kept alive is dropped) a call that would have to wait
/// does nothing, and is [`Error::Stopped`]. So is every call in a child by fork, which has no such thread: a VMM that goes on in one (a
/// daemon) makes its supervisor there.
///
/// Dropping it ends the service without unmerging: what is shared stays shared, and the kernel copies on write.
#[derive(Debug)]
pub struct Supervisor {
    shared: Arc<Shared>,
    engines: Engines,
    thread: Option<JoinHandle<()>>,
}

impl Supervisor {
    /// Starts the supervisor's thread, which blocks all signals and sleeps until there is a VM.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub fn spawn(options: Options) -> Result<Self, Error> {
        let (shared, engines) = (Arc::new(Shared::new()), options.engines.clone());
        let theirs = shared.clone();
        let spawn = || {
            std::thread::Builder::new()
                .name(Part::Supervisor.name().into())
                .spawn(move || run(&theirs, options))
        };
        // A new thread has its parent's mask, and must not take a single signal of the VMM's.
        let thread = sched::with_signals_blocked(spawn).map_err(Error::Thread)?;
        Ok(Self {
            shared,
            engines,
            thread: Some(thread),
        })
    }

    /// One whose first VM is served when this returns, of the memory that `add` tells it of: for a VMM that does not want to run
    /// without dedup, and is not restricted yet.
    ///
    /// # Errors
    /// Those of [`Self::spawn`], [`Self::attach`] and [`Self::start`], and what `add` returns. What was merged by then is anonymous memory
    /// again, unless there is not enough memory for that, which the log says.
    pub fn serving(
        options: Options,
        setup: Setup,
        add: impl FnOnce(&Self) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let supervisor = Self::spawn(options)?;
        supervisor.attach(setup)?;
        let served = add(&supervisor).and_then(|()| supervisor.start());
        if let Err(error) = served {
            // A part of the memory may have been served.
            let _ = supervisor.detach(true);
            return Err(error);
        }
        Ok(supervisor)
    }

    /// What frees guest memory in the place of madvise(MADV_DONTNEED): the same for all VMs, before, while and after they are
    /// deduplicated.
    #[must_use]
    pub fn discarder(&self) -> Discarder {
        self.shared.discarder.clone()
    }

    /// A VM begins. It is deduplicated as soon as it has memory and there is a store. Where nothing can be deduplicated, since the
    /// supervisor's thread is filtered, it is refused as a VM may be later ([`Status::Refused`]).
    ///
    /// # Errors
    /// There is no VM then: those of [`Setup::check`]; [`Error::Attached`]; [`Error::Stopped`].
    pub fn attach(&self, setup: Setup) -> Result<(), Error> {
        setup.check(&self.engines)?;
        let fallback = Box::new(setup.clone());
        self.ask(Letter::Ask(Ask::Attach(fallback, Box::new(|| Ok(setup)))))
            .0
    }

    /// A VM begins under a number, and one that there is ends first, whether the settings are right or not.
    pub(crate) fn replace(&self, number: u64, setup: Setup) -> Result<(), Error> {
        let checked = setup.check(&self.engines).map(|()| setup);
        self.ask(Letter::Ask(Ask::Replace(number, Box::new(checked)))).0
    }

    /// The VM of that number ends, if no other has begun. In the supervisor's own thread it ends behind what that does now.
    pub(crate) fn end_of(&self, number: u64) {
        let letter = Letter::Ask(Ask::EndOf(number));
        if self.is_own_thread() {
            return self.post(letter);
        }
        // Where the supervisor has died its last VM may be another one, which goes on: what that frees must read as zeros.
        if self.ask(letter).0.is_err() && self.is_here() && self.shared.number() == Some(number) {
            self.shared.discarder.forget(0, usize::MAX);
        }
    }

    /// The same where settings are read (and checked) in the supervisor's thread, and this one does not wait for it. If they are wrong
    /// the VM is refused, by the name and at the store of `fallback`; also if that panics.
    pub fn attach_with(
        &self,
        fallback: Setup,
        configure: impl FnOnce() -> Result<Setup, Refusal> + Send + 'static,
    ) {
        self.post(Letter::Ask(Ask::Attach(Box::new(fallback), Box::new(configure))));
    }

    /// The VM has all of this memory, which is kept alive until [`Self::detach`]. Nobody waits for the service; see
    /// [`Self::start`].
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::NoMemory`].
    pub fn add_memory<M>(&self, memory: Arc<M>) -> Result<(), Error>
    where
        M: GuestMemoryBackend + Send + Sync + 'static,
    {
        let ranges = HostRange::of_guest_memory(&*memory)?;
        self.add(&ranges, Some(Keep::new(memory)));
        Ok(())
    }

    /// The VM got a region more (hotplug), which is kept alive until [`Self::remove_range`] or [`Self::detach`].
    ///
    /// # Errors
    /// [`Error::Unaligned`].
    pub fn add_region<R>(&self, region: Arc<R>) -> Result<(), Error>
    where
        R: GuestMemoryRegion + Send + Sync + 'static,
    {
        let range = HostRange::of_guest_region(&*region)?;
        self.add(&[range], Some(Keep::new(region)));
        Ok(())
    }

    /// The VM has memory at plain addresses.
    ///
    /// # Safety
    /// It must be guest memory that stays mapped until [`Self::remove_range`] or [`Self::detach`] has returned, or the
    /// supervisor was dropped, and that Rust code only accesses through raw pointers or volatile views: its pages vanish and
    /// come back at any time.
    #[allow(unsafe_code)]
    pub unsafe fn add_range(&self, range: HostRange) {
        self.add(&[range], None);
    }

    fn add(&self, ranges: &[HostRange], keep: Option<Keep>) {
        let spans = ranges.iter().map(|range| Span {
            range: range.addresses(),
            guest_address: range.guest_address(),
        });
        self.post(Letter::Add(spans.collect(), keep));
    }

    /// Tries at once what is due, and says how that went: for a VMM that does not want to run without dedup. It went well if a
    /// service runs, though a part of the memory may be refused.
    ///
    /// # Errors
    /// Those of [`DedupService::start`]; [`Error::Refused`].
    pub fn start(&self) -> Result<(), Error> {
        match (self.tell(Event::Hurry), self.status()) {
            (Err(Error::Stopped), _) => Err(Error::Stopped),
            (_, Status::Serving) => Ok(()),
            (Err(error), _) => Err(error),
            (Ok(()), Status::Waiting(refusal) | Status::Refused(refusal)) => Err(Error::Refused(refusal)),
            (Ok(()), Status::Starting) => Err(Error::NoMemory),
            (Ok(()), Status::Detached) => Err(Error::Detached),
        }
    }

    /// Memory is about to be unmapped or replaced: when this returns nothing of ours touches it any more. The range may be any
    /// part of the VM's memory, or more; pages that it touches go whole. An empty one is nothing.
    ///
    /// # Errors
    /// [`Error::Refused`]: the service had died. It does not touch the memory either. [`Error::Stopped`]: the supervisor's thread has.
    /// (In the supervisor's own thread: nothing was done, and the memory must stay.)
    pub fn remove_range(&self, range: Range<usize>) -> Result<(), Error> {
        if range.is_empty() {
            return Ok(());
        }
        let end = range.end.checked_next_multiple_of(PAGE_SIZE);
        let end = end.unwrap_or(usize::MAX / PAGE_SIZE * PAGE_SIZE);
        let range = range.start / PAGE_SIZE * PAGE_SIZE..end;
        let removed = self.tell(Event::Remove(range.clone()));
        // Where nobody does it any more, at least nothing is freed there as if it was still the engine's.
        if removed.is_err() && !self.is_own_thread() && self.is_here() {
            self.shared.discarder.forget(range.start, range.len());
        }
        removed
    }

    /// Somebody else is about to use a userfaultfd on memory (postcopy, on-demand restore): all regions that the range touches go
    /// back to anonymous memory and are left alone, until [`Self::take_back`] or, with [`Lease::UntilFree`], until nobody else
    /// has a userfaultfd on them. Loans of one region do not nest: two that need a userfaultfd on parts of it share one loan.
    ///
    /// # Errors
    /// [`Error::Lent`]: a region that the range touches is lent until it is taken back. [`Error::NotAdded`], [`Error::Detached`]: nothing
    /// that the range touches was added yet; add it first. Nothing has changed.
    /// [`Error::NotUnmerged`]: some pages map the store still. They are read-only to everybody but by copy-on-write. The loan counts
    /// all the same, until [`Self::take_back`]; the next call tries it again.
    /// [`Error::Register`], likewise; [`Error::Stopped`]. [`Error::Refused`]: the VM is refused, and some of its memory in the range could
    /// not be given back (or its service died): pages may map the store until that memory goes, and are read-only to everybody but by
    /// copy-on-write.
    pub fn lend(&self, range: Range<usize>, lease: Lease) -> Result<(), Error> {
        self.tell(Event::Lend(range, lease))
    }

    /// What was lent may be worked on again. It is tried again by itself if another userfaultfd is there all the same.
    pub fn take_back(&self, range: Range<usize>) {
        self.post(Letter::Event(Event::TakeBack(range)));
    }

    /// A device is about to pin guest memory, or to use it without a trace (VFIO, vDPA, vhost-scsi): when this returns
    /// everything is anonymous memory again and stays so, until as many calls of [`Self::unpin`] follow. To be called before
    /// the first mapping for DMA, also before there is a VM. [`Self::detach`] ends no pin: nothing of a next VM is merged either
    /// before the last [`Self::unpin`].
    ///
    /// # Errors
    /// [`Error::NotUnmerged`]: some pages map the store still, for want of memory; the next call tries it again. It counts all the
    /// same: nothing is merged any more, and a pin for writing makes such pages private by itself. [`Error::Refused`]: the service had
    /// died; the same holds. A VMM that wants to be told of failures rather refuses the device, and calls [`Self::unpin`]. Where
    /// [`Self::refuse`] has failed there is no service any more that could try it again, and this does not repeat that error.
    /// [`Error::Stopped`].
    pub fn pin(&self) -> Result<(), Error> {
        self.tell(Event::Pin)
    }

    /// A device has let go of guest memory, before or after [`Self::detach`]: once for each call of [`Self::pin`], also for one
    /// that failed, but not for [`Error::Stopped`]. (Without a [`Self::pin`]: nothing.)
    pub fn unpin(&self) {
        self.post(Letter::Event(Event::Unpin));
    }

    /// A pin that ends by itself, when what it returns is dropped: for a device that holds it. As with [`Self::pin`] it is to be had
    /// before the first mapping for DMA.
    ///
    /// # Errors
    /// Those of [`Self::pin`], and nothing is pinned then: the device must not have the memory. Where the supervisor's thread has died and
    /// its service has ended, nothing is merged any more: what is returned pins nothing, and the device may have the memory
    /// as behind [`Error::Stopped`] of [`Self::pin`]. So no VM fails to boot for it.
    pub fn pinned(&self) -> Result<Pinned, Error> {
        match self.pin() {
            Ok(()) => Ok(Pinned(self.shared.clone())),
            Err(Error::Stopped) if self.is_here() && self.shared.rests() => Ok(Pinned(self.shared.clone())),
            // It did not count: to end it would end another one.
            Err(Error::Stopped) => Err(Error::Stopped),
            Err(error) => {
                self.unpin();
                Err(error)
            }
        }
    }

    /// A pin of which nobody will tell the end: as [`Self::pin`], until `still` says that there is none any more. It is asked every
    /// second, in the supervisor's thread.
    ///
    /// `still` may be wrong, if the kernel knows the pins: it refuses to move a page that is pinned (VFIO, iommufd, vDPA). So all
    /// that the engine needs to know in advance is not believed from then on: what [`Options::vouch_for_pins`] says holds no longer,
    /// for this VM and all that follow. For what uses memory without a trace (vhost-scsi) it must not be wrong. If it panics the pin never
    /// ends.
    ///
    /// # Errors
    /// Those of [`Self::pin`]. It counts all the same, until `still` says no.
    pub fn pin_while(&self, still: impl FnMut() -> bool + Send + 'static) -> Result<(), Error> {
        self.ask(Letter::PinWhile(Box::new(still))).0
    }

    /// Memory is not to be deduplicated any more, for this reason: all regions that the range touches go back to anonymous memory,
    /// e.g. before mprotect, or mlock. (Memory that is protected when it is added is refused by itself, and what was protected before it was
    /// added need not be told.)
    ///
    /// # Errors
    /// [`Error::NotUnmerged`], [`Error::Register`], [`Error::NotAdded`], [`Error::Detached`], [`Error::Stopped`], [`Error::Refused`], as for
    /// [`Self::lend`].
    pub fn leave_alone(&self, range: Range<usize>, refusal: Refusal) -> Result<(), Error> {
        self.tell(Event::LeaveAlone(range, refusal))
    }

    /// The VM is not to be deduplicated any more, for this reason ([`refusal`](mod@refusal) has texts): everything goes back to
    /// anonymous memory, and the store is told. Before [`Self::attach`] this is an error, and nothing is remembered.
    ///
    /// # Errors
    /// As for [`Self::pin`]; [`Error::Detached`].
    pub fn refuse(&self, refusal: Refusal) -> Result<(), Error> {
        self.tell(Event::Refuse(refusal))
    }

    /// Says something of the VM in the log, and to the store as long as there is no service and nothing refuses or pins the whole VM.
    pub fn note(&self, refusal: Refusal) {
        self.post(Letter::Event(Event::Note(refusal)));
    }

    /// The guest may run guests of its own (VMX, SVM): to be told behind [`Self::attach`], before the VM's memory is added and before
    /// a vCPU runs. Where KVM uses their memory without a trace (before Linux 6.13) the VM is refused. Where it pins that, what
    /// [`Options::vouch_for_pins`] says does not hold for this VM, but does again for the next one.
    ///
    /// # Errors
    /// As for [`Self::refuse`]; [`Error::Detached`] before [`Self::attach`] whatever KVM does, and nothing is remembered.
    pub fn nested_guests(&self) -> Result<(), Error> {
        self.ask(Letter::Ask(Ask::Nested)).0
    }

    /// See [`DedupService::direct_io_opened`].
    ///
    /// # Errors
    /// Those of [`DedupService::direct_io_opened`].
    pub fn direct_io_opened(&self) -> Result<(), Error> {
        self.tell(Event::DirectIo)
    }

    /// Merging rests until [`Self::resume`]: when this returns the service does nothing but serve breaks, and give back what
    /// [`Self::set`] is asked to bring back.
    pub fn pause(&self) {
        let _ = self.tell(Event::Pause);
    }

    /// Goes on after [`Self::pause`].
    pub fn resume(&self) {
        self.post(Letter::Event(Event::Resume));
    }

    /// The VM ends: no vCPU runs any more, and its memory is about to go. With `unmerge` everything goes back to anonymous memory
    /// first; without it the store counts this VM's references no more, although its memory is still mapped. When this returns
    /// nothing of ours touches or keeps the memory, and all loans have ended. Without a VM this ends a
    /// [pause](Self::pause) that was told before, and does nothing else. Returns the account of the service, if there was one. Without
    /// `unmerge`, and where the kernel had copied pages, the memory cannot be a next VM's: see the [module](self).
    ///
    /// # Errors
    /// [`Error::NotUnmerged`]; [`Error::Refused`] if the service had died; [`Error::Stopped`]. The service has ended all the same.
    pub fn detach(&self, unmerge: bool) -> Result<Option<ServiceStats>, Error> {
        let (done, stats) = self.ask(Letter::Event(Event::Detach { unmerge }));
        // As in `remove_range`: other memory may come to the same addresses.
        if matches!(done, Err(Error::Stopped)) && !self.is_own_thread() && self.is_here() {
            self.shared.discarder.forget(0, usize::MAX);
        }
        done.map(|()| stats)
    }

    /// How the VM stands.
    #[must_use]
    pub fn status(&self) -> Status {
        if !self.is_here() {
            return Status::Detached;
        }
        lock(&self.shared.status).clone()
    }

    /// The service's account as of its last pass; `None` without a service.
    #[must_use]
    pub fn stats(&self) -> Option<ServiceStats> {
        if !self.is_here() {
            return None;
        }
        lock(&self.shared.account).as_ref().map(|control| control.stats())
    }

    /// Tells that a read from a file has just filled these addresses ([`DedupService::note_read`]). Without a service it does nothing.
    pub fn note_read(&self, addresses: Range<usize>) {
        self.shared.note_read(addresses);
    }

    /// Changes settings of the service there is ([`DedupService::set`]).
    ///
    /// # Errors
    /// Those of [`DedupService::set`]; [`Error::Detached`] without a service, also if that ends meanwhile.
    pub fn set(&self, settings: Settings) -> Result<(), Error> {
        self.have_done(move |service| service.begin_to_set(settings))?
    }

    /// Runs one pass now and waits for its end ([`DedupService::pass`]). Other calls do not wait for it: those that change what memory
    /// there is, or pause, end it early.
    ///
    /// # Errors
    /// Those of [`DedupService::pass`]; [`Error::Detached`] without a service, also if that ends meanwhile.
    pub fn pass(&self) -> Result<ServiceStats, Error> {
        self.have_done(|service| Ok(service.begin_pass()))
    }

    /// Has the service begin with something, and waits for it in this thread.
    fn have_done<T: Send + 'static>(
        &self,
        begin: impl FnOnce(&DedupService) -> Result<Pending<T>, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let begun = self.have_work_done(|service| service.map_or(Err(Error::Detached), begin));
        // It is the service that has stopped then.
        let done = begun.unwrap_or(Err(Error::Stopped))?.wait();
        done.map_err(|_| Error::Detached)
    }

    /// Does something in the supervisor's thread, which is not filtered as the calling one may be, and waits for it; `None` if
    /// that thread has ended, or if it panics.
    pub fn with_service<T: Send + 'static>(
        &self,
        work: impl FnOnce(Option<Served<'_>>) -> T + Send + 'static,
    ) -> Option<T> {
        self.have_work_done(|service| work(service.map(Served)))
    }

    fn have_work_done<T: Send + 'static>(
        &self,
        work: impl FnOnce(Option<&DedupService>) -> T + Send + 'static,
    ) -> Option<T> {
        let place = Arc::new(Mutex::new(None));
        let theirs = place.clone();
        self.ask(Letter::Ask(Ask::Work(Box::new(move |service| {
            *lock(&theirs) = Some(work(service));
        }))))
        .0
        .ok()?;
        lock(&place).take()
    }
}

/// How letters get to the supervisor's thread, and the one without.
impl Supervisor {
    /// One without a thread, as if that had died: every call works, and nothing is deduplicated.
    pub(crate) fn dead() -> Self {
        let shared = Arc::new(Shared::new());
        shared.letters.close();
        shared.rest();
        Self {
            shared,
            engines: Engines::new(),
            thread: None,
        }
    }

    fn tell(&self, event: Event) -> Result<(), Error> {
        self.ask(Letter::Event(event)).0
    }

    fn ask(&self, letter: Letter) -> Answer {
        // It cannot answer itself, nor a child of its process.
        let answers = !self.is_own_thread() && self.is_here();
        let asks = answers.then_some(&self.shared.letters);
        let answer = asks.and_then(|letters| letters.ask(letter));
        answer.unwrap_or((Err(Error::Stopped), None))
    }

    fn is_own_thread(&self) -> bool {
        let own = self.thread.as_ref().map(|thread| thread.thread().id());
        own == Some(std::thread::current().id())
    }

    /// No child by fork: nobody reads letters there, and its locks may be held for ever.
    fn is_here(&self) -> bool {
        self.shared.discarder.is_here()
    }

    fn post(&self, letter: Letter) {
        self.shared.post(letter);
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if self.is_own_thread() {
            // It ends behind what it does now.
            return self.post(Letter::End);
        }
        let _ = self.ask(Letter::End);
        if let Some(thread) = self.thread.take().filter(|_| self.is_here()) {
            let _ = thread.join();
        }
    }
}

/// The supervisor's thread.
fn run(shared: &Arc<Shared>, options: Options) {
    let mut driver = None;
    let ended = catch_unwind(AssertUnwindSafe(|| {
        thread::enter(Part::Supervisor, options.each);
        if let Some(first) = options.first {
            first();
        }
        let filtered = !options.may_be_filtered && sched::is_filtered();
        let hands = Engine::new(shared.clone(), options.engines, filtered.then(refusal::sandboxed));
        let lifecycle = Lifecycle::new(options.settle, options.vouch_for_pins);
        driver.insert(Driver::of(hands, lifecycle)).run(&shared.letters);
    }));
    // Nobody who calls waits while packed pages come back, for which the host may lack memory.
    let lay_down = || driver.iter_mut().for_each(|driver| driver.hands.lay_down());
    let stopped = catch_unwind(AssertUnwindSafe(lay_down)).is_ok();
    // Only a bug leads here. What is merged stays merged, and stays right; nothing is touched any more.
    if ended.is_err() {
        // It may be the VMM's logger that panics.
        let _ =
            theirs::run(|| log::error!("dedup has ended in this process ({stopped}): please report this"));
    }
    if stopped {
        shared.rest();
    }
    // The discarder goes on knowing what is shared: the VM may live on, and what it frees must read as zeros.
    *lock(&shared.account) = None;
    *lock(&shared.status) = Status::Detached;
    // What the VMM has sent and nobody has read may panic where it is dropped.
    let _ = theirs::run(|| shared.letters.close());
    // Memory that goes meanwhile the discarder forgets, and with it what is packed of it; the rest comes back.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(driver)));
}

#[cfg(test)]
mod tests;
