//! What becomes of a VM's memory: a state machine that does nothing by itself.
//!
//! [`Lifecycle::handle`] takes what the VMM tells, [`Lifecycle::next`] says what is to be done about it, one effect at a
//! time, and [`Lifecycle::done`] takes how that went. So every order of events and outcomes can be tested without a guest,
//! a store or a thread. [`TRANSITIONS`] has all changes of a region's place.
//!
//! # Why no order of events loses a page
//!
//! - Events are handled one after the other, each to its end, so none sees half of another.
//! - What must not meet merging (a pin, a foreign userfaultfd, an unmapping) is answered when the effects of its event are
//!   done: every active region that it concerns was released, or the service was stopped, by then.
//! - A region is given to the service only while nobody pins memory, and not before it was taken back.
//! - Where a pin was taken to have ended and has not, the kernel refuses to move the pages that it holds. What the kernel has copied
//!   cannot be asked, so from then on nothing but the kernel tells that it is not pinned ([`Event::LetGo`]).
//! - What fails on the way out (pages that could not be made private) leaves the region out of merging all the same: its
//!   pages stay shared, which is right for whoever reads or writes them by the mapping, and a pin for writing makes them
//!   private by itself.

#[path = "lifecycle/event.rs"]
mod event;
#[path = "lifecycle/told.rs"]
mod told;

pub use event::Lease;
pub(crate) use event::{Effect, Event, Outcome, Span};

use crate::error::Error;
use crate::refusal;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};
use told::Told;
use vmm_dedup_protocol::refusal::{Reason, Refusal};

/// Until what may pass by itself is tried again.
pub(crate) const RETRY: Duration = Duration::from_secs(1);
/// The same of what passes less often: the VM is announced as refused meanwhile.
const RETRY_LATER: Duration = Duration::from_secs(60);
/// The longest that is waited for more memory, which is for ever.
const LONGEST: Duration = Duration::from_secs(1 << 32);
/// How long memory is left alone at least that was lent for no one knows how long.
const LENT: Duration = Duration::from_secs(5);

/// Where a region stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RegionState {
    /// The service is to have it.
    Wanted,
    /// The service works on it.
    Active,
    /// The service knows it and leaves it alone.
    Lent,
    /// It is not deduplicated.
    Refused,
}

/// What happens to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Happens {
    /// It is time to give it to the service.
    Due,
    /// That worked.
    Done,
    /// It did not, for now.
    Passes,
    /// It never will.
    Fails,
    /// Somebody else needs it: a userfaultfd of the VMM's, a device.
    Lend,
    /// It is not to be deduplicated any more.
    Refuse,
    /// The service has ended.
    Ends,
}

/// What is to be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Nothing,
    /// Give it to the service, or start one on it.
    Take,
    /// Let the service release it.
    Release,
    /// Let the service resume it.
    Resume,
}

/// All that changes a region. Whatever is not here changes nothing.
const TRANSITIONS: [(RegionState, Happens, RegionState, Act); 15] = {
    use Act::{Nothing, Release, Resume, Take};
    use Happens::{Done, Due, Ends, Fails, Lend, Passes, Refuse};
    use RegionState::{Active, Lent, Refused, Wanted};
    [
        (Wanted, Due, Wanted, Take),
        (Wanted, Done, Active, Nothing),
        (Wanted, Passes, Wanted, Nothing),
        (Wanted, Fails, Refused, Nothing),
        (Wanted, Lend, Wanted, Nothing),
        (Wanted, Refuse, Refused, Nothing),
        (Active, Lend, Lent, Release),
        (Active, Refuse, Refused, Release),
        (Active, Ends, Refused, Nothing),
        (Lent, Due, Lent, Resume),
        (Lent, Done, Active, Nothing),
        (Lent, Passes, Lent, Nothing),
        (Lent, Fails, Refused, Nothing),
        (Lent, Refuse, Refused, Nothing),
        (Lent, Ends, Refused, Nothing),
    ]
};

fn step(place: RegionState, happens: Happens) -> (RegionState, Act) {
    let found = TRANSITIONS
        .iter()
        .find(|(from, what, ..)| (*from, *what) == (place, happens));
    found.map_or((place, Act::Nothing), |(_, _, to, act)| (*to, *act))
}

#[derive(Clone, Debug)]
struct Region {
    span: Span,
    place: RegionState,
    /// When it is to be tried; `None`: when it was taken back.
    due: Option<Instant>,
    /// Somebody has it, and nobody has said that it may be tried at once.
    on_loan: bool,
    /// It could not be given back: pages of it may map the store still.
    half_released: bool,
}

impl Region {
    /// Something happens to it; what the service has to do about that.
    fn meet(&mut self, happens: Happens, service: bool) -> Option<Effect> {
        let (place, act) = step(self.place, happens);
        self.place = place;
        let span = self.span.clone();
        match act {
            Act::Nothing => None,
            Act::Take if service => Some(Effect::Add(span)),
            Act::Take => Some(Effect::Start(span)),
            Act::Release => Some(Effect::Release(span)),
            Act::Resume => Some(Effect::Resume(span)),
        }
    }
}

/// Of all memory; at least 1.
fn pages_of(regions: &[Region]) -> u64 {
    let pages = regions.iter().map(|r| r.span.range.len() / 4096);
    pages.sum::<usize>().max(1) as u64
}

/// Whether there is a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// None.
    Detached,
    /// One to deduplicate.
    Attached,
    /// One that is not to be deduplicated any more, for this reason, whatever is said of it besides.
    Retired(Refusal),
}

impl Phase {
    /// What is said of memory is kept with it: of memory that is not there yet it would be forgotten, and that be worked on when it
    /// comes.
    fn check_known(&self, regions: &[Region], range: &Range<usize>) -> Result<(), Error> {
        let known = range.is_empty() || regions.iter().any(|r| r.span.overlaps(range));
        let (start, end) = (range.start, range.end);
        match self {
            _ if known => Ok(()),
            Self::Detached => Err(Error::Detached),
            Self::Attached => Err(Error::NotAdded { start, end }),
            // It is left alone whatever comes.
            Self::Retired(_) => Ok(()),
        }
    }

    /// Of a VM that is refused there is no service any more that could try again to give memory back.
    fn check_given_back(&self, regions: &[Region], range: &Range<usize>) -> Result<(), Error> {
        let stuck = || regions.iter().any(|r| r.half_released && r.span.overlaps(range));
        match self {
            Self::Retired(refusal) if stuck() => Err(Error::Refused(refusal.clone())),
            _ => Ok(()),
        }
    }
}

/// A region is lent once: whoever takes it back takes back all of it. (What was lent for no one knows how long nobody takes back.)
fn check_loan(regions: &[Region], range: &Range<usize>) -> Result<(), Error> {
    // A loan that failed is tried again by whoever asks again.
    let kept =
        |r: &&Region| r.on_loan && r.due.is_none() && r.place != RegionState::Refused && !r.half_released;
    let mut concerned = regions.iter().filter(|r| r.span.overlaps(range));
    match concerned.find(kept) {
        Some(lent) => Err(Error::Lent(lent.span.range.start)),
        None => Ok(()),
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Lifecycle {
    phase: Phase,
    /// How long to wait for more memory before the service starts.
    settle: Duration,
    service: bool,
    regions: Vec<Region>,
    pins: usize,
    paused: bool,
    /// Whether whatever pins memory shows in open files: for any VM, and for this one.
    vouch: (bool, bool),
    /// What was said of this VM.
    told: Told,
    /// What the event at hand lends for no one knows how long.
    lends: Range<usize>,
    effects: VecDeque<Effect>,
}

impl Lifecycle {
    pub(crate) fn new(settle: Duration, vouch: bool) -> Self {
        Self {
            phase: Phase::Detached,
            settle: settle.min(LONGEST),
            service: false,
            regions: Vec::new(),
            pins: 0,
            paused: false,
            vouch: (vouch, vouch),
            told: Told::default(),
            lends: 0..0,
            effects: VecDeque::new(),
        }
    }

    /// Takes what the VMM tells. The effects of one event are done before the next one is handled.
    ///
    /// # Errors
    /// The event does not fit: [`Error::Attached`], [`Error::Detached`], [`Error::NotAdded`], [`Error::Lent`], [`Error::Refused`].
    /// Nothing changes then.
    pub(crate) fn handle(&mut self, event: Event, now: Instant) -> Result<(), Error> {
        debug_assert!(self.effects.is_empty());
        match (&self.phase, &event) {
            (Phase::Detached, Event::Attach) => {}
            (_, Event::Attach) => return Err(Error::Attached),
            (Phase::Detached, Event::Add(_) | Event::Refuse(_) | Event::Note(_) | Event::HidePins) => {
                return Err(Error::Detached);
            }
            (_, Event::LeaveAlone(range, _)) => {
                self.phase.check_known(&self.regions, range)?;
                self.phase.check_given_back(&self.regions, range)?;
            }
            (_, Event::Lend(range, _)) => {
                self.phase.check_known(&self.regions, range)?;
                self.phase.check_given_back(&self.regions, range)?;
                check_loan(&self.regions, range)?;
            }
            _ => {}
        }
        self.lends = 0..0;
        match event {
            Event::Attach => {
                self.phase = Phase::Attached;
                if self.pins > 0 {
                    self.say(refusal::pinned());
                }
            }
            Event::Add(span) => self.add(span, now),
            Event::Hurry => {
                let free = self.due_regions().filter(|region| !region.on_loan);
                free.for_each(|region| region.due = Some(now));
            }
            Event::Remove(range) => self.remove(&range),
            Event::Lend(range, lease) => self.lend(&range, lease, now),
            Event::TakeBack(range) => {
                let back = self.regions.iter_mut().filter(|r| r.span.overlaps(&range));
                back.for_each(|region| (region.due, region.on_loan) = (Some(now), false));
            }
            Event::LeaveAlone(range, refusal) => {
                self.release_again(|region| region.span.overlaps(&range));
                self.all_meet(Happens::Refuse, |region| region.span.overlaps(&range));
                // A VM that is refused as a whole keeps its reason, and of an empty range there is nothing to be said.
                if self.phase == Phase::Attached && !range.is_empty() {
                    self.say(refusal);
                }
            }
            Event::Note(refusal) => self.say(refusal),
            Event::Refuse(refusal) if self.phase == Phase::Attached => self.retire(refusal),
            Event::Refuse(_) => {}
            Event::Pin => self.pin(now),
            Event::Unpin => self.unpin(),
            Event::LetGo => {
                self.vouch = (false, false);
                self.if_served(Effect::HidePins);
                self.unpin();
            }
            Event::Pause => self.set_paused(true),
            Event::Resume => self.set_paused(false),
            Event::HidePins => {
                self.vouch.1 = false;
                self.if_served(Effect::HidePins);
            }
            Event::DirectIo => self.if_served(Effect::DirectIo),
            Event::Detach { unmerge } => self.detach(unmerge),
        }
        self.announce();
        Ok(())
    }

    /// What is to be done next: what the last event needs, and with `due` also what is due by itself.
    pub(crate) fn next(&mut self, now: Instant, due: bool) -> Option<Effect> {
        if let Some(effect) = self.effects.pop_front() {
            return Some(effect);
        }
        if !due {
            return None;
        }
        if let Some(refusal) = self.told.announce_again(now) {
            return Some(Effect::Announce(refusal, pages_of(&self.regions)));
        }
        if !self.may_try() {
            return None;
        }
        let service = self.service;
        let is_due = |region: &&mut Region| region.due.is_some_and(|due| due <= now);
        self.due_regions()
            .find(is_due)
            .and_then(|region| region.meet(Happens::Due, service))
    }

    /// When there is something to do without an event.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let waits = |region: &&Region| matches!(region.place, RegionState::Wanted | RegionState::Lent);
        let due = self.regions.iter().filter(waits).filter_map(|region| region.due);
        let due = due.min().filter(|_| self.may_try());
        due.into_iter().chain(self.told.next_due()).min()
    }

    /// An effect was carried out.
    pub(crate) fn done(&mut self, effect: &Effect, outcome: Outcome, now: Instant) {
        match effect {
            Effect::Start(span) | Effect::Add(span) | Effect::Resume(span) => {
                if matches!(effect, Effect::Start(_)) && outcome == Outcome::Done {
                    self.started();
                }
                self.tried(span, outcome, now);
            }
            // It is out of merging all the same.
            Effect::Release(span) => {
                for region in self.regions.iter_mut().filter(|r| r.span == *span) {
                    region.half_released = outcome != Outcome::Done;
                }
                self.loans_begin(now);
            }
            // All was given back. Otherwise what the service had may map the store still.
            Effect::Stop { unmerge: true } if outcome == Outcome::Done => {
                self.regions
                    .iter_mut()
                    .for_each(|region| region.half_released = false);
            }
            Effect::Announce(..) if outcome != Outcome::Done => self.told.not_announced(now + RETRY),
            // Whoever asked for another one learns what failed.
            _ => {}
        }
        self.announce();
    }

    /// Whether a service runs.
    pub(crate) fn serves(&self) -> bool {
        self.service
    }

    /// The service has ended by itself, so nothing is given back any more.
    pub(crate) fn service_died(&mut self, refusal: Refusal) {
        self.service = false;
        self.service_ends();
        self.retire(refusal);
        self.announce();
    }

    /// Why there is no service, as far as is known: what refuses the VM as a whole goes before a pin, and that before what was
    /// found last.
    pub(crate) fn reason(&self) -> Option<Refusal> {
        self.last_reason(|_| true)
    }

    fn last_reason(&self, counts: impl Fn(&Refusal) -> bool) -> Option<Refusal> {
        match &self.phase {
            Phase::Detached => None,
            Phase::Retired(refusal) => Some(refusal.clone()),
            Phase::Attached if self.pins > 0 => Some(refusal::pinned()),
            Phase::Attached => self.told.last(counts).cloned(),
        }
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.phase != Phase::Detached
    }

    pub(crate) fn is_retired(&self) -> bool {
        matches!(self.phase, Phase::Retired(_))
    }

    fn may_try(&self) -> bool {
        self.phase == Phase::Attached && self.pins == 0
    }

    /// Regions that the service is to have, sooner or later.
    fn due_regions(&mut self) -> impl Iterator<Item = &mut Region> {
        let waits = |region: &&mut Region| matches!(region.place, RegionState::Wanted | RegionState::Lent);
        self.regions
            .iter_mut()
            .filter(waits)
            .filter(|region| region.due.is_some())
    }

    fn if_served(&mut self, effect: Effect) {
        if self.service {
            self.effects.push_back(effect);
        }
    }

    fn all_meet(&mut self, happens: Happens, concerns: impl Fn(&Region) -> bool) {
        let service = self.service;
        for region in self.regions.iter_mut().filter(|region| concerns(region)) {
            self.effects.extend(region.meet(happens, service));
        }
    }

    /// What could not be given back is tried again, so that whoever asks again learns how it stands.
    fn release_again(&mut self, concerns: impl Fn(&Region) -> bool) {
        if self.service {
            let half = self.regions.iter().filter(|r| r.half_released && concerns(r));
            let again = half.map(|region| Effect::Release(region.span.clone()));
            self.effects.extend(again);
        }
    }
}

/// What each event does to memory.
impl Lifecycle {
    fn add(&mut self, span: Span, now: Instant) {
        // Until the service has it, more may be known of where the guest sees it.
        let same = |r: &&mut Region| r.span.range == span.range && r.place == RegionState::Wanted;
        if let Some(region) = self.regions.iter_mut().find(same) {
            region.span = span;
            return;
        }
        let place = match &self.phase {
            Phase::Retired(_) => RegionState::Refused,
            _ => RegionState::Wanted,
        };
        // What is known already stays as it is, whatever becomes of it; the service has no page twice.
        let mut parts = vec![span];
        for region in &self.regions {
            let new = |part: Span| part.without(&region.span.range);
            parts = parts.into_iter().flat_map(new).collect();
        }
        self.regions.extend(parts.into_iter().map(|span| Region {
            span,
            place,
            due: Some(now + self.settle),
            on_loan: false,
            half_released: false,
        }));
    }

    fn remove(&mut self, gone: &Range<usize>) {
        if gone.is_empty() {
            return;
        }
        self.if_served(Effect::Remove(gone.clone()));
        self.effects.push_back(Effect::Forget(gone.clone()));
        let regions = std::mem::take(&mut self.regions);
        let left = |region: Region| {
            let parts = region.span.without(gone);
            parts.map(move |span| Region {
                span,
                ..region.clone()
            })
        };
        self.regions = regions.into_iter().flat_map(left).collect();
    }

    fn lend(&mut self, range: &Range<usize>, lease: Lease, now: Instant) {
        self.release_again(|region| region.span.overlaps(range));
        self.all_meet(Happens::Lend, |region| region.span.overlaps(range));
        let concerned = |r: &&mut Region| r.span.overlaps(range) && r.place != RegionState::Refused;
        let mut lent = false;
        for region in self.regions.iter_mut().filter(concerned) {
            region.due = (lease == Lease::UntilFree).then_some(now);
            region.on_loan = true;
            lent = true;
        }
        if lent {
            self.say(refusal::foreign_userfaultfd());
        }
        if lease == Lease::UntilFree {
            self.lends = range.clone();
            self.loans_begin(now);
        }
    }

    /// Whoever borrows may begin when all that it borrows was given back, however long that took: its time runs from then on.
    fn loans_begin(&mut self, now: Instant) {
        let begins = |r: &&mut Region| r.on_loan && r.due.is_some() && r.span.overlaps(&self.lends);
        for region in self.regions.iter_mut().filter(begins) {
            region.due = Some(now + LENT);
        }
    }

    fn pin(&mut self, now: Instant) {
        self.pins += 1;
        self.release_again(|_| true);
        if self.pins > 1 || self.phase != Phase::Attached {
            return;
        }
        for region in self.regions.iter_mut().filter(|r| r.place == RegionState::Active) {
            region.due = Some(now);
        }
        self.all_meet(Happens::Lend, |region| region.place == RegionState::Active);
        self.if_served(Effect::Pause);
        self.say(refusal::pinned());
    }

    fn unpin(&mut self) {
        if self.pins != 1 || self.phase != Phase::Attached {
            self.pins = self.pins.saturating_sub(1);
            return;
        }
        self.pins = 0;
        self.told.forget(|said| *said == refusal::pinned());
        if !self.paused {
            self.if_served(Effect::Unpause);
        }
    }

    fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
        if self.pins == 0 {
            self.if_served(if paused { Effect::Pause } else { Effect::Unpause });
        }
    }

    /// Everything goes back to anonymous memory. The discarder stays, for as long as the memory does: pages that the kernel
    /// copied still lie in mappings of the store.
    fn retire(&mut self, refusal: Refusal) {
        if self.service {
            self.effects.push_back(Effect::Stop { unmerge: true });
            // By then there is no service.
            self.service = false;
            self.service_ends();
        }
        self.say(refusal.clone());
        self.phase = Phase::Retired(refusal);
        self.all_meet(Happens::Ends, |_| true);
        self.all_meet(Happens::Refuse, |_| true);
    }

    /// The service ends. What it works on may map the store for as long as nobody says that it was given back.
    fn service_ends(&mut self) {
        let active = |r: &&mut Region| r.place == RegionState::Active;
        for region in self.regions.iter_mut().filter(active) {
            region.half_released = true;
        }
    }

    /// The VM ends, but not the devices' pins, each of which ends by its own unpin: memory that nobody has unpinned is not given
    /// to a service, whichever VM it is of.
    fn detach(&mut self, unmerge: bool) {
        if self.phase == Phase::Detached {
            // Whichever VM was paused, it is not the next one.
            self.paused = false;
            return;
        }
        self.if_served(Effect::Stop { unmerge });
        for region in std::mem::take(&mut self.regions) {
            self.effects.push_back(Effect::Forget(region.span.range));
        }
        (self.phase, self.paused) = (Phase::Detached, false);
        self.vouch.1 = self.vouch.0;
        self.service = false;
        self.told.forget(|_| true);
    }

    /// A service runs, paused. Nothing is merged before whoever frees memory knows of it, whatever an operator asks for meanwhile.
    fn started(&mut self) {
        self.service = true;
        self.told.joined();
        self.effects.push_back(Effect::Publish);
        if self.vouch.1 {
            self.effects.push_back(Effect::Vouch);
        }
        if !self.paused {
            self.effects.push_back(Effect::Unpause);
        }
    }

    fn tried(&mut self, span: &Span, outcome: Outcome, now: Instant) {
        let happens = match outcome {
            Outcome::Done => Happens::Done,
            Outcome::Passes(_) => Happens::Passes,
            Outcome::Fails(_) => Happens::Fails,
        };
        let pause = match &outcome {
            Outcome::Passes(refusal) if !refusal::passes(refusal) => RETRY_LATER,
            _ => RETRY,
        };
        for region in self.regions.iter_mut().filter(|r| r.span == *span) {
            let _ = region.meet(happens, self.service);
            region.due = Some(now + pause);
            if outcome == Outcome::Done {
                (region.on_loan, region.half_released) = (false, false);
            }
        }
        // Without a store no other region fares better: one try, which may take seconds, speaks for all of them.
        if matches!(&outcome, Outcome::Passes(refusal) if refusal.reason == Reason::Store) {
            for region in self.due_regions().filter(|r| r.place == RegionState::Wanted) {
                region.due = region.due.max(Some(now + RETRY));
            }
        }
        match outcome {
            Outcome::Done => self.told.forget(refusal::passes),
            Outcome::Passes(refusal) | Outcome::Fails(refusal) => self.say(refusal),
        }
    }

    /// Something holds of this VM: if that is new, the log says it.
    fn say(&mut self, refusal: Refusal) {
        if self.phase == Phase::Detached {
            return;
        }
        if self.told.say(refusal.clone()) {
            self.effects.push_back(Effect::Say(refusal));
        }
    }

    /// The store is told why there is no service, as soon as that is another reason. What may pass is not announced, since the VM is
    /// about to join under the same name, unless it is what refuses the VM as a whole.
    fn announce(&mut self) {
        let reason = self.last_reason(|said| !refusal::passes(said));
        if self.service || !self.told.announce(reason.as_ref()) {
            return;
        }
        let pages = pages_of(&self.regions);
        let effect = reason.map_or(Effect::Withdraw, |reason| Effect::Announce(reason, pages));
        self.effects.push_back(effect);
    }
}

#[cfg(test)]
#[path = "lifecycle/tests.rs"] // from wherever this file is included
mod tests;
