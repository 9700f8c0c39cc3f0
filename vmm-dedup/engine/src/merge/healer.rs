//! Admitted > merged, for pages that the kernel copied: anonymous memory in mappings of the store, which cannot be taken.
//!
//! Two ways tell that a copy is not pinned. The first that can is taken; where none can, copies stay private for a while.
//!
//! # Nobody pins
//!
//! 1. *Ask the kernel's count* of pinned pages ([`pin_count`](mod@crate::sys::pin_count)): none of the host is. Any earlier answer
//!    will do.
//! 2. *Freeze* ([`Frozen`](crate::window::Frozen)): nobody writes the pages from here on, and nobody pins them for writing. Then
//!    take the lock of the process's mappings for a moment. Who writes this process's memory by ptrace or /proc/PID/mem has
//!    no pin, but holds that lock from finding the page until he has written it: so he is done.
//! 3. *Ask again*, a few times. If nothing was pinned or let go from one answer to the next, the frozen pages are not pinned by
//!    anybody whose pins the kernel counts: not by another process that writes this one's memory (a debugger, by process_vm_writev).
//! 4. *Look at the open files* ([`Pinners`]). Whoever in this process had pages pinned before they were frozen has done so through
//!    a file that was open then. It still is, or its I/O goes on although it was closed, which
//!    [`direct_io`](mod@crate::sys::direct_io) cannot see either.
//! 5. *Compare*, with the CPU, at the guest's own address: nobody changes the page, and a slot does not change.
//! 6. *Map and thaw*: see [`Frozen`](crate::window::Frozen).
//!
//! Where pages of the host are pinned all the time the count tells nothing. Then, if the operator accepts it
//! (`heal_without_fork`), the steps are the same without 1 and 3, and with a grace: a debugger has pages pinned while it copies into
//! them, which is microseconds, so after the pages are frozen whoever had begun is given [`GRACE`] to end. If somebody waits for
//! a page meanwhile, all are thawed at once, and are tried another time. (With managed breaks the fault thread knows first who
//! waits, and he may wait for the grace.) What remains: a debugger that is held up for longer than the grace between pinning a
//! page and writing it loses that write.
//!
//! # Fork
//!
//! A [`Child`] that only exists shares what is not pinned, and nothing else. So the pages are frozen, and then the page tables
//! tell which of them are shared with the child: those were not pinned when it was forked, and have not been written or
//! pinned since; and now that they are frozen nobody can. These are compared and mapped as above. No grace is needed: a
//! debugger's pin counts as any other. The child is ended before the store is told of anything. What no fork tells of (plain
//! references, as the kernel's TLS takes them), the open files do, before the fork and after the freezing.
//!
//! A fork holds the lock of the process's mappings for a time that goes with their number, and with the private memory that the
//! child gets. vCPUs that fault wait for it. So it is made only if the time that it will take is within `heal_stall_us`
//! ([`ForkCost`]). Guest memory is kept from children, but for the pages at hand.
//!
//! # What writers may wait
//!
//! From the freezing to the thawing no more than `heal_stall_us` (or [`COUNTING`] if that is 0): whatever is asked ends by then, and
//! what was not replaced by then stays. If somebody waits, it ends within some tens of pages.

use crate::account::ns;
use crate::compare::Retry;
use crate::config::Config;
use crate::error::Error;
use crate::lookup::copies::Prospect;
use crate::lookup::request::MergeRequest;
use crate::memory::layout::Memory;
use crate::memory::page_map::PageMap;
use crate::merge::context::Tools;
use crate::merge::fork_cost::ForkCost;
use crate::merge::in_place::{self, Limit, Proof, Room, addresses, stretches};
use crate::merge::run::Outcome;
use crate::sys::fork::Child;
use crate::sys::late_log;
use crate::sys::pin_count::{Counts, PinCount};
use crate::sys::pinners::{Pinner, Pinners, Told};
use crate::sys::sched::Urgent;
use crate::sys::vma;
use crate::unmerge::cow::FrozenRuns;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long the kernel may take to count, if there are to be no forks.
const COUNTING: Duration = Duration::from_millis(5);
/// Tries to find two counts that are the same.
const TRIES: usize = 4;
/// How long who writes this process's memory from outside may take for that.
const GRACE: Duration = Duration::from_millis(5);
/// From one question whether somebody waits to the next, meanwhile.
const GRACE_STEP: Duration = Duration::from_micros(100);
/// Most pages that are healed at once, and most stretches of them: what a writer may have to wait for goes with these. One
/// that waits has the whole batch given up, so batches get smaller when that happens, and grow again when it does not.
const MOST_PAGES: usize = 2048;
const MOST_STRETCHES: usize = 64;

/// Fewest stretches, while writers wait for every larger batch.
const LEAST_STRETCHES: usize = 4;
/// Batches that are healed with one child.
const BATCHES_PER_CHILD: usize = 8;

#[cfg(feature = "blind-heals")]
static BLIND: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Whether copies are merged that may be pinned, in all of this process. Guests lose what devices write then: it is for the
/// test that shows so.
#[cfg(feature = "blind-heals")]
pub fn heal_blindly(blind: bool) {
    BLIND.store(blind, std::sync::atomic::Ordering::Relaxed);
}

/// Merges copies.
#[derive(Debug)]
pub(crate) struct Healer {
    pinners: Pinners,
    count: PinCount,
    /// The VMM vouches that nobody pins unseen.
    visible: bool,
    /// The operator accepts that nobody in this process pins.
    accepts_files: bool,
    /// The pass in which the way was chosen, if it still holds.
    chosen: Option<u64>,
    /// How long a fork may take, nanoseconds.
    stall_ns: u64,
    fork_cost: ForkCost,
    /// The last count that said that no page is pinned.
    counted: Option<Counts>,
    /// What was found while pages were frozen, and not before.
    surprise: Option<Pinner>,
    /// Most stretches of a batch now.
    stretches: usize,
    /// Of forks.
    forks: Trouble,
    /// Of forks that told nothing, since of a file nothing could be told for a moment.
    moments: Trouble,
    /// Of page tables.
    tables: Trouble,
    way: Way,
    /// Why nothing could be healed when it was last tried.
    refused: Option<String>,
}

/// What failed, and when it is tried again.
#[derive(Debug, Default)]
struct Trouble {
    retry: Retry,
    why: String,
}

impl Trouble {
    /// It may be over a moment later.
    fn brief() -> Self {
        Self {
            retry: Retry::brief(),
            why: String::new(),
        }
    }

    /// It failed in this pass.
    fn note(&mut self, pass: u64, why: String) {
        let pause = self.retry.fail(pass);
        // Whoever heals holds the lock of discards, which a thread that logs may wait for.
        late_log::say(format!(
            "pages that the kernel copied stay private for {pause} passes: {why}"
        ));
        self.why = format!("{why}; it is tried again after {pause} passes");
    }
}

/// How it is known that a copy is not pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// No page of the host is pinned.
    Count,
    /// No open file can have pages pinned.
    Files,
    /// A child tells.
    Fork,
}

impl Way {
    fn told(self) -> Told {
        match self {
            Self::Count => Told::Count,
            Self::Files => Told::Nothing,
            Self::Fork => Told::Fork,
        }
    }
}

/// The result for a batch of requests.
#[derive(Debug)]
pub(crate) struct Healed {
    /// One for each request.
    pub(crate) outcomes: Vec<Outcome>,
    /// How long a writer may have waited, nanoseconds; `None` if nobody had to.
    pub(crate) stall_ns: Option<u64>,
}

impl Healed {
    /// Nothing was done.
    pub(crate) fn none(requests: &[MergeRequest], outcome: Outcome) -> Self {
        Self {
            outcomes: vec![outcome; requests.len()],
            stall_ns: None,
        }
    }

    /// Nothing told of any page whether it is pinned.
    fn is_untold(&self) -> bool {
        let mut outcomes = self.outcomes.iter();
        outcomes.all(|outcome| *outcome == Outcome::Untold)
    }
}

impl Healer {
    /// # Errors
    /// [`Error::Proc`].
    pub(crate) fn new(config: &Config) -> Result<Self, Error> {
        Ok(Self {
            pinners: Pinners::new()?,
            count: PinCount::open(),
            visible: false,
            accepts_files: config.breaks.heal_without_fork(),
            chosen: None,
            stall_ns: config.breaks.heal_stall_us() * 1000,
            fork_cost: ForkCost::default(),
            counted: None,
            surprise: None,
            stretches: MOST_STRETCHES,
            forks: Trouble::default(),
            moments: Trouble::brief(),
            tables: Trouble::default(),
            way: Way::Fork,
            refused: None,
        })
    }

    /// Starts the threads that it asks.
    pub(crate) fn start(&mut self) {
        self.count.start();
        self.pinners.start();
    }

    /// Whether the VMM vouches from now on that nobody pins unseen.
    pub(crate) fn set_visible(&mut self, visible: bool) {
        if self.visible != visible {
            self.visible = visible;
            self.chosen = None;
        }
    }

    /// Why copies stay private, as of the last try.
    pub(crate) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Chooses the way; whether there is any, for all that can be told before pages are frozen.
    pub(crate) fn can_heal(&mut self, map: &PageMap, pass: u64) -> bool {
        if !self.tables.retry.is_due(pass) {
            self.refused = Some(self.tables.why.clone());
            return false;
        }
        // Each fork may be too slow, as the last one may have turned out to be, and knows the files that are open when it is made.
        if self.chosen == Some(pass) && self.way != Way::Fork {
            return true;
        }
        self.chosen = None;
        let why = match self.find_way_without_fork() {
            Ok(way) => return self.choose(way, pass),
            Err(why) => why,
        };
        match self.find_way_by_fork(map, pass) {
            Ok(way) => self.choose(way, pass),
            Err(why_no_fork) => {
                self.refused = Some(format!("{why}; {why_no_fork}"));
                false
            }
        }
    }

    fn find_way_by_fork(&mut self, map: &PageMap, pass: u64) -> Result<Way, String> {
        if self.stall_ns > 0
            && let Some(why) = Child::refused()
        {
            return Err(format!("no fork tells: {why}"));
        }
        let predicted = self.fork_cost.predict(map, pass);
        if predicted > self.stall_ns {
            let us = predicted / 1000;
            return Err(format!("a fork would take {us} us, more than heal_stall_us"));
        }
        let troubles = [&self.forks, &self.moments];
        if let Some(trouble) = troubles.into_iter().find(|trouble| !trouble.retry.is_due(pass)) {
            return Err(trouble.why.clone());
        }
        let told = self.pinners.look(Told::Fork, self.patience());
        told.map_err(|pinner| format!("no fork tells: {pinner}"))?;
        Ok(Way::Fork)
    }

    fn choose(&mut self, way: Way, pass: u64) -> bool {
        (self.way, self.chosen, self.refused) = (way, Some(pass), None);
        true
    }

    fn find_way_without_fork(&mut self) -> Result<Way, String> {
        if !self.visible {
            return Err("the VMM does not vouch that pins are visible".to_owned());
        }
        let pinned = |pinner: Pinner| format!("pages may be pinned: {pinner}");
        self.pinners.look(Told::Count, self.patience()).map_err(pinned)?;
        match self.count.nothing_pinned_lately(self.patience()) {
            Ok(counts) => {
                self.counted = Some(counts);
                return Ok(Way::Count);
            }
            Err(why) if !self.accepts_files => return Err(format!("pages may be pinned: {why}")),
            Err(_) => {}
        }
        self.pinners
            .look(Told::Nothing, self.patience())
            .map_err(pinned)?;
        Ok(Way::Files)
    }

    /// Whether two readings of the kernel's count, of which the second comes after pages were frozen, tell that none was pinned
    /// when they were. The first may be any before that, since the counts only grow.
    fn nothing_was_pinned(&mut self, frozen: Instant) -> bool {
        for _ in 0..TRIES {
            let left = self.patience().saturating_sub(frozen.elapsed());
            if left.is_zero() {
                return false;
            }
            let now = self.count.nothing_pinned(left).ok();
            if now.is_some() && std::mem::replace(&mut self.counted, now) == now {
                return true;
            }
        }
        false
    }

    /// How long the kernel may take to count while pages are frozen.
    fn patience(&self) -> Duration {
        match self.stall_ns {
            0 => COUNTING,
            stall_ns => Duration::from_nanos(stall_ns),
        }
    }

    /// Whether each call of [`Self::heal`] is a fork.
    pub(crate) fn forks_tell(&self) -> bool {
        self.way == Way::Fork
    }

    /// As [`Self::can_heal`]: which copies can be merged.
    pub(crate) fn prospect(&mut self, map: &PageMap, pass: u64) -> Prospect {
        match (self.can_heal(map, pass), self.way) {
            (false, _) => Prospect::None,
            (true, Way::Fork) => Prospect::UnlessPinned,
            (true, Way::Count | Way::Files) => Prospect::All,
        }
    }

    /// How many of the requests, which are in page order, make one batch.
    pub(crate) fn batch_len(&self, memory: &Memory, requests: &[MergeRequest]) -> usize {
        let batches = match self.way {
            Way::Count | Way::Files => 1,
            Way::Fork => BATCHES_PER_CHILD,
        };
        self.limit().times(batches).fits(memory, requests)
    }

    /// What is frozen together.
    fn limit(&self) -> Limit {
        Limit {
            // With fewer stretches the stretches get shorter as well: one may be a whole range that is being written.
            pages: MOST_PAGES * self.stretches.pow(2) / MOST_STRETCHES.pow(2),
            stretches: self.stretches,
        }
    }

    /// A batch was healed, or given up since somebody waited.
    fn adapt(&mut self, outcomes: &[Outcome]) {
        if outcomes.contains(&Outcome::Contended) {
            self.stretches = (self.stretches / 2).max(LEAST_STRETCHES);
        } else {
            self.stretches = (self.stretches + self.stretches / 4).min(MOST_STRETCHES);
        }
    }

    /// Merges copies, no more than [`Self::batch_len`] says.
    pub(crate) fn heal(
        &mut self,
        map: &PageMap,
        tools: &mut Tools<'_>,
        pass: u64,
        requests: &[MergeRequest],
    ) -> Healed {
        let memory = map.memory().clone();
        // What the last batch found out holds for this one, too.
        if !self.can_heal(map, pass) {
            return Healed::none(requests, Outcome::Untold);
        }
        in_place::touch(&memory, tools.store, requests);
        if self.way != Way::Fork {
            return self.heal_batches(&memory, tools, pass, requests, None);
        }
        let (child, fork_ns) = match self.fork(&memory, requests) {
            Ok(forked) => forked,
            Err(error) => {
                self.forks.note(pass, format!("cannot fork: {error}"));
                self.chosen = None;
                return Healed::none(requests, Outcome::Untold);
            }
        };
        let mut healed = self.heal_batches(&memory, tools, pass, requests, Some(&child));
        healed.stall_ns = healed.stall_ns.max(Some(fork_ns));
        if child.has_ended() {
            // What it shared no more looked as if it were pinned.
            let pinned = healed
                .outcomes
                .iter_mut()
                .filter(|outcome| **outcome == Outcome::Pinned);
            pinned.for_each(|outcome| *outcome = Outcome::Untold);
            self.forks
                .note(pass, "the child that tells of pins was killed".to_owned());
        } else if self.chosen.is_some() {
            (self.forks, self.moments) = (Trouble::default(), Trouble::brief());
        }
        healed
    }

    /// Merges one batch after the other, until nothing tells of pins any more.
    fn heal_batches(
        &mut self,
        memory: &Memory,
        tools: &mut Tools<'_>,
        pass: u64,
        requests: &[MergeRequest],
        child: Option<&Child>,
    ) -> Healed {
        let mut healed = Healed::none(&[], Outcome::Untold);
        while healed.outcomes.len() < requests.len() && self.chosen.is_some() {
            let rest = &requests[healed.outcomes.len()..];
            let batch = &rest[..self.limit().fits(memory, rest)];
            let more = self.heal_batch(memory, tools, pass, batch, child);
            healed.outcomes.extend(more.outcomes);
            healed.stall_ns = healed.stall_ns.max(more.stall_ns);
        }
        healed.outcomes.resize(requests.len(), Outcome::Untold);
        healed
    }

    /// Merges what is frozen together.
    fn heal_batch(
        &mut self,
        memory: &Memory,
        tools: &mut Tools<'_>,
        pass: u64,
        requests: &[MergeRequest],
        child: Option<&Child>,
    ) -> Healed {
        let (healed, failure) = self.heal_frozen(memory, tools, requests, child);
        if self.way == Way::Count && healed.is_untold() {
            self.chosen = None;
        }
        match self.surprise.take() {
            // A fork for each file that is opened, or ring that is in use, would hold up the VM in vain.
            Some(why) if self.way == Way::Fork => self.moments.note(pass, why.to_string()),
            Some(why) => self.refused = Some(format!("pages may be pinned: {why}")),
            None => {}
        }
        self.adapt(&healed.outcomes);
        match failure {
            Some(error) => {
                self.tables
                    .note(pass, format!("the page tables cannot be read: {error}"));
                self.chosen = None;
            }
            None => self.tables = Trouble::default(),
        }
        healed
    }

    /// Forks a child that has the pages at hand, and no others of the guest; and how long that took.
    fn fork(&mut self, memory: &Memory, requests: &[MergeRequest]) -> std::io::Result<(Child, u64)> {
        memory.keep_from_children();
        let at_hand: Vec<Range<usize>> = stretches(memory, requests)
            .map(|stretch| addresses(memory, stretch))
            .collect();
        at_hand
            .iter()
            .for_each(|stretch| vma::advise_again(stretch, libc::MADV_DOFORK));
        let (clock, urgent) = (Instant::now(), Urgent::begin());
        let child = Child::fork();
        let took = ns(clock.elapsed());
        drop(urgent);
        at_hand
            .iter()
            .for_each(|stretch| vma::advise_again(stretch, libc::MADV_DONTFORK));
        let child = child?;
        self.fork_cost.learn(took);
        Ok((child, took))
    }

    /// Freezes copies, and merges those that are not pinned and equal their slots. Also returns what kept it from telling which
    /// are pinned: nothing is logged while pages are frozen.
    fn heal_frozen(
        &mut self,
        memory: &Memory,
        tools: &mut Tools<'_>,
        requests: &[MergeRequest],
        child: Option<&Child>,
    ) -> (Healed, Option<std::io::Error>) {
        let (store, space) = (tools.store, &mut *tools.space);
        let Ok(mut room) = Room::prepare(memory, store, &space.uffd, requests) else {
            return (Healed::none(requests, Outcome::NoVma), None);
        };
        let breaker = space.breaker.clone();
        let verifier = tools.verify.begin_window(store);
        let _urgent = Urgent::begin();
        let mut clock = Instant::now();
        let runs = stretches(memory, requests).map(|stretch| addresses(memory, stretch));
        let Ok(frozen) = breaker.freeze(runs) else {
            return (Healed::none(requests, Outcome::NotTaken), None);
        };
        vma::wait_for_lock_holders();
        let (outcomes, failure) = match self.prove(&frozen, child, &mut clock) {
            Ok(proof) => {
                let until = clock + self.patience();
                let with = (requests, &mut room);
                in_place::replace(memory, (store, verifier), space, frozen, with, &proof, until)
            }
            Err(outcome) => {
                drop(frozen);
                (vec![outcome; requests.len()], None)
            }
        };
        let stall_ns = Some(ns(clock.elapsed()));
        (Healed { outcomes, stall_ns }, failure)
    }

    /// How it is known that frozen pages are not pinned, or what becomes of them if it is not. `clock`: since when somebody may
    /// wait for them.
    fn prove<'c>(
        &mut self,
        frozen: &FrozenRuns<'_>,
        child: Option<&'c Child>,
        clock: &mut Instant,
    ) -> Result<Proof<'c>, Outcome> {
        #[cfg(feature = "blind-heals")]
        if BLIND.load(std::sync::atomic::Ordering::Relaxed) {
            return Ok(Proof::Blind);
        }
        let somebody_waits = |time| frozen.breaker().somebody_waits(time);
        match self.way {
            Way::Count => {
                if !self.nothing_was_pinned(*clock) {
                    return Err(Outcome::Untold);
                }
            }
            Way::Files => {
                let begun = Instant::now();
                while begun.elapsed() < GRACE {
                    *clock = Instant::now();
                    if somebody_waits(GRACE_STEP) {
                        return Err(Outcome::Contended);
                    }
                }
            }
            Way::Fork => {}
        }
        match self.pinners.look_again(self.way.told(), *clock + self.patience()) {
            Ok(nobody) => Ok(match child {
                Some(child) => Proof::Child(child, nobody),
                None => Proof::NobodyPins(nobody),
            }),
            // Who waits within a system call may be what kept it from telling; and before pages were frozen there was time.
            Err(why) if why == Pinner::TooSlow || somebody_waits(Duration::ZERO) => Err(Outcome::Contended),
            Err(why) => {
                self.chosen = None;
                self.surprise = Some(why);
                Err(Outcome::NotTaken)
            }
        }
    }
}
