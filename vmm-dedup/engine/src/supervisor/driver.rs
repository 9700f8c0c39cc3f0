//! The supervisor's thread: carries out what the [`Lifecycle`] says.

use crate::compare::Engines;
use crate::config::Setup;
use crate::error::Error;
use crate::memory::layout::HostRange;
use crate::memory::ranges::complement;
use crate::refusal;
use crate::scan::control::Ending;
use crate::service::DedupService;
use crate::store::refusal::Refused;
use crate::supervisor::lifecycle::{Effect, Event, Lifecycle, Outcome, Span};
use crate::supervisor::mailbox::Ticket;
use crate::supervisor::nested;
use crate::supervisor::shared::{Configure, Keep, Letter, Letters, Shared, Status};
use crate::supervisor::watched::Watched;
use crate::sync::lock;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::refusal::Refusal;
use vmm_dedup_protocol::stats::ServiceStats;

/// How often the supervisor looks whether its service lives, where it has nothing else to do.
const LOOK_FOR_DEATH: Duration = Duration::from_secs(10);

/// Until a thread is tried again that listens to the guest's agent, and could not be started: as long as its socket waits.
const HEAR_AGAIN: Duration = Duration::from_secs(10);

/// See the [module](self).
pub(crate) struct Driver {
    shared: Arc<Shared>,
    engines: Engines,
    lifecycle: Lifecycle,
    setup: Setup,
    service: Option<DedupService>,
    /// Tells the store why there is no service, with what it tells: the reason, and pages of how many.
    refused: Option<(Refused, Refusal, u64)>,
    keeps: Vec<(Vec<Range<usize>>, Keep)>,
    /// Pins of which nobody tells the end.
    watched: Watched,
    /// Of a service that has ended by the letter at hand.
    account: Option<ServiceStats>,
    /// What failed first of what the letter at hand asked for.
    failed: Option<Error>,
    /// Whoever waits is told what fails: no need to warn of it.
    told: bool,
    /// Why no VM can be deduplicated here.
    hindrance: Option<Refusal>,
    /// When it is tried again to listen to the guest's agent.
    hears: Option<Instant>,
    /// The store could not be told why there is no service.
    untold: bool,
}

impl Driver {
    /// `settle`: how long to wait for more memory before a service starts; `vouch`: whether pins are visible; `hindrance`: why no
    /// VM can be deduplicated here.
    pub(crate) fn new(
        shared: Arc<Shared>,
        engines: Engines,
        settle: Duration,
        vouch: bool,
        hindrance: Option<Refusal>,
    ) -> Self {
        Self {
            told: false,
            hindrance,
            shared,
            engines,
            lifecycle: Lifecycle::new(settle, vouch),
            setup: Setup::default(),
            service: None,
            refused: None,
            keeps: Vec::new(),
            watched: Watched::default(),
            account: None,
            failed: None,
            hears: None,
            untold: false,
        }
    }

    /// Works until the supervisor ends.
    pub(crate) fn run(&mut self) {
        let shared = self.shared.clone();
        loop {
            let looks = self.service.as_ref().map(|_| Instant::now() + LOOK_FOR_DEATH);
            let due = [
                self.lifecycle.next_due(),
                self.watched.next_due(),
                looks,
                self.hears,
            ];
            match shared.letters.next(due.into_iter().flatten().min()) {
                Some((ticket, Letter::End)) => {
                    self.end();
                    return shared.letters.answer(ticket, (Ok(()), None));
                }
                Some((ticket, letter)) => self.take(letter, &shared.letters, ticket),
                None => {}
            }
            self.look_for_ends();
            self.heed_death();
            self.hear_agent(Instant::now());
            // One thing, which may wait for a store: then letters come first.
            if let Some(effect) = self.lifecycle.next(Instant::now(), true) {
                self.work(&effect);
                self.work_off(false);
            }
            self.failed = None;
            self.tell_status();
        }
    }

    /// Does what a letter asks for, and answers it.
    fn take(&mut self, letter: Letter, letters: &Letters, ticket: Ticket) {
        // What is due by itself is not what the letter asks for, but where it says so.
        let hurry = matches!(letter, Letter::Event(Event::Hurry));
        let ends = matches!(letter, Letter::Event(Event::Detach { .. }));
        let handled = match letter {
            Letter::Attach(fallback, configure) => self.attach(*fallback, configure),
            Letter::Replace(number, checked) => self.replace(number, *checked),
            Letter::EndOf(number) => {
                if self.shared.number() == Some(number) {
                    self.end_vm();
                }
                Ok(())
            }
            Letter::Add(spans, keep) => self.add(spans, keep),
            Letter::Event(event) => self.lifecycle.handle(event, Instant::now()),
            Letter::PinWhile(still) => {
                self.watched.add(still, Instant::now());
                self.lifecycle.handle(Event::Pin, Instant::now())
            }
            Letter::Nested => self.expect_nested_guests(),
            Letter::Work(work) => {
                work(self.service.as_ref());
                Ok(())
            }
            Letter::End => Ok(()),
        };
        self.told = hurry;
        self.work_off(hurry);
        self.told = false;
        self.heed_death();
        if ends {
            self.keeps.clear();
        }
        let done = handled.and(self.failed.take().map_or(Ok(()), Err));
        self.tell_status();
        letters.answer(ticket, (done, self.account.take()));
    }

    /// Pins that nobody sees any more have ended.
    fn look_for_ends(&mut self) {
        for _ in 0..self.watched.end(Instant::now()) {
            // It always fits.
            let _ = self.lifecycle.handle(Event::LetGo, Instant::now());
            self.work_off(false);
        }
    }

    /// A service whose scanning thread has died does nothing any more, and the VM is refused. What is shared stays so, and is right.
    fn heed_death(&mut self) {
        if self.service.as_ref().is_some_and(DedupService::has_died) {
            let _ = self.stop(Ending::StayShared);
            self.lifecycle.service_died(refusal::service_died());
            self.work_off(false);
        }
    }

    /// Carries out what is to be done, and with `due` also what is due by itself.
    fn work_off(&mut self, due: bool) {
        // What fails meanwhile is due again only later, however long the others take.
        let now = Instant::now();
        while let Some(effect) = self.lifecycle.next(now, due) {
            self.work(&effect);
        }
    }

    /// Carries out an effect, and tells how it went.
    fn work(&mut self, effect: &Effect) {
        let done = self.carry_out(effect).map_err(|error| match error {
            // A service's. To whoever asks the supervisor it means that there is none.
            Error::Stopped => Error::Refused(refusal::service_died()),
            error => error,
        });
        let outcome = match &done {
            Ok(()) => Outcome::Done,
            Err(error) if error.may_pass() => Outcome::Passes(error.into()),
            Err(error) => Outcome::Fails(error.into()),
        };
        self.lifecycle.done(effect, outcome, Instant::now());
        // An announcement comes by itself: whoever refuses a VM has refused it.
        if let (Err(error), false) = (done, matches!(effect, Effect::Announce(..))) {
            self.failed.get_or_insert(error);
        }
    }

    /// Listens to the guest's agent, if that is due.
    fn hear_agent(&mut self, now: Instant) {
        if self.hears.take_if(|due| *due <= now).is_none() {
            return;
        }
        let (Some(agent), Some(service)) = (&self.setup.agent, &mut self.service) else {
            return;
        };
        if let Err(error) = service.listen_to_agent(agent.clone()) {
            log::warn!("the guest's agent is not heard, which is tried again: {error}");
            self.hears = Some(now + HEAR_AGAIN);
        }
    }

    /// A VM begins. If its settings are wrong it is refused by those to fall back on, and if nothing can be deduplicated here at all.
    fn attach(&mut self, fallback: Setup, configure: Configure) -> Result<(), Error> {
        if self.lifecycle.is_attached() {
            return Err(Error::Attached);
        }
        let checked = match self.hindrance.clone() {
            Some(hindrance) => Err(hindrance),
            None => configure().and_then(|setup| match setup.check(&self.engines) {
                Ok(()) => Ok(setup),
                Err(mistake) => Err(Refusal::from(&mistake)),
            }),
        };
        let (setup, wrong) = match checked {
            Ok(setup) => (setup, None),
            Err(refusal) => (fallback, Some(refusal)),
        };
        self.setup = setup;
        self.shared.set_number(None);
        self.lifecycle.handle(Event::Attach, Instant::now())?;
        let Some(refusal) = wrong else {
            return Ok(());
        };
        self.work_off(false);
        self.lifecycle.handle(Event::Refuse(refusal), Instant::now())
    }

    fn replace(&mut self, number: u64, checked: Result<Setup, Error>) -> Result<(), Error> {
        self.end_vm();
        let setup = checked?;
        self.attach(setup.clone(), Box::new(|| Ok(setup)))?;
        self.shared.set_number(Some(number));
        Ok(())
    }

    /// The VM ends, if there is one, whatever fails of that.
    fn end_vm(&mut self) {
        let _ = self
            .lifecycle
            .handle(Event::Detach { unmerge: false }, Instant::now());
        self.work_off(false);
        (self.failed, self.account) = (None, None);
        self.shared.set_number(None);
        self.keeps.clear();
    }

    fn add(&mut self, spans: Vec<Span>, keep: Option<Keep>) -> Result<(), Error> {
        let ranges = spans.iter().map(|span| span.range.clone()).collect();
        for span in spans {
            self.lifecycle.handle(Event::Add(span), Instant::now())?;
        }
        // Without a VM there is nothing to keep memory for.
        self.keeps.extend(keep.map(|keep| (ranges, keep)));
        Ok(())
    }

    /// The guest may run guests: KVM has pages of it pinned then, which no open file shows, or uses them without a trace.
    fn expect_nested_guests(&mut self) -> Result<(), Error> {
        // Of a VM: what one guest may do says nothing of the next.
        if !self.lifecycle.is_attached() {
            return Err(Error::Detached);
        }
        let event = match nested::here() {
            nested::Nesting::Off => return Ok(()),
            nested::Nesting::Pins => Event::HidePins,
            nested::Nesting::Unseen => Event::Refuse(refusal::nested()),
        };
        self.lifecycle.handle(event, Instant::now())
    }

    fn carry_out(&mut self, effect: &Effect) -> Result<(), Error> {
        match effect {
            Effect::Start(span) => return self.start(span),
            Effect::Stop { unmerge: true } => return self.stop(Ending::Unmerge),
            Effect::Stop { unmerge: false } => return self.stop(Ending::MemoryGoes),
            Effect::Say(refusal) if self.told => {
                log::info!("VM {} is not deduplicated: {refusal}", self.setup.config.name);
            }
            Effect::Say(refusal) => {
                log::warn!("VM {} is not deduplicated: {refusal}", self.setup.config.name)
            }
            Effect::Announce(refusal, pages) => return self.announce(refusal, *pages),
            Effect::Withdraw => self.refused = None,
            Effect::Forget(range) => {
                // It outlives the service, and must not know memory that is gone: at its addresses there may be other memory
                // soon.
                self.shared.discarder.forget(range.start, range.len());
                self.let_go(range);
            }
            _ => {}
        }
        let Some(service) = &self.service else {
            return Ok(());
        };
        match effect {
            Effect::Publish => {
                self.shared.discarder.adopt(&service.discarder());
                *lock(&self.shared.account) = Some(service.account());
            }
            Effect::Vouch => service.vouch_for_pins(),
            Effect::Add(span) => {
                // SAFETY: as where the service is started.
                #[allow(unsafe_code)]
                unsafe { service.add_range(host_range(span)?) }?;
                tell_taken(span);
            }
            Effect::Release(span) => {
                // Of the whole VM or of nothing: what failed is out of merging all the same.
                service.release_range(host_range(span)?).inspect_err(|error| {
                    log::warn!("guest memory at {:x?} is not given back: {error}", span.range);
                })?;
            }
            Effect::Resume(span) => {
                service.resume_range(host_range(span)?)?;
                tell_taken(span);
            }
            Effect::Remove(range) => service
                .remove_range(HostRange::try_new(range.start, range.len())?)
                .inspect_err(|error| log::warn!("guest memory at {range:x?} goes while {error}"))?,
            Effect::Pause => service.pause(),
            Effect::Unpause => service.resume(),
            Effect::HidePins => service.pins_may_be_hidden()?,
            Effect::DirectIo => service.direct_io_opened()?,
            _ => {}
        }
        Ok(())
    }

    fn start(&mut self, span: &Span) -> Result<(), Error> {
        // The store would take whoever is announced and joins for two VMs.
        let announced = self.refused.take().map(|(_, refusal, pages)| (refusal, pages));
        let started = self.start_service(span);
        if let (Err(_), Some((refusal, pages))) = (&started, announced) {
            self.work(&Effect::Announce(refusal, pages));
        }
        started
    }

    #[allow(unsafe_code)] // memory that the VMM owns
    fn start_service(&mut self, span: &Span) -> Result<(), Error> {
        // SAFETY: guest memory, which stays mapped until `Remove` or `Forget` is done, by what keeps it alive or as whoever
        // added it has promised, and which only the guest and raw addresses reach.
        let service = unsafe {
            DedupService::start_paused(
                &[host_range(span)?],
                &self.setup.store,
                self.setup.config.clone(),
                self.engines.clone(),
            )
        }?;
        self.service = Some(service);
        let now = Instant::now();
        self.hears = Some(now);
        self.hear_agent(now);
        tell_taken(span);
        Ok(())
    }

    /// Ends the service, whatever is left of it.
    fn stop(&mut self, ending: Ending) -> Result<(), Error> {
        let Some(service) = self.service.take() else {
            return Ok(());
        };
        let ended = service.end_as(ending);
        *lock(&self.shared.account) = None;
        let stats = ended.inspect_err(|error| log::error!("{error}"))?;
        self.account = Some(stats);
        Ok(())
    }

    fn announce(&mut self, refusal: &Refusal, pages: u64) -> Result<(), Error> {
        if self.setup.store == Path::new("") {
            return Ok(());
        }
        // Who could not be told may still be told something else later.
        self.refused = None;
        let announced = Refused::announce(&self.setup.store, &self.setup.config.name, pages, refusal);
        let before = std::mem::replace(&mut self.untold, announced.is_err());
        let told = announced.inspect_err(|error| {
            if !before {
                log::warn!("the store is not told, which is tried again: {error}");
            }
        })?;
        self.refused = Some((told, refusal.clone(), pages));
        Ok(())
    }

    /// Nobody needs what keeps only memory alive that is gone.
    fn let_go(&mut self, gone: &Range<usize>) {
        for (ranges, _) in &mut self.keeps {
            let left = |range: &Range<usize>| complement(range, std::slice::from_ref(gone));
            *ranges = ranges.iter().flat_map(left).collect();
        }
        self.keeps.retain(|(ranges, _)| !ranges.is_empty());
    }

    /// The supervisor ends, not the VM: what is shared stays shared, and the discarder knows it.
    fn end(&mut self) {
        let _ = self.stop(Ending::StayShared);
        self.refused = None;
        self.keeps.clear();
    }

    fn tell_status(&self) {
        let lifecycle = &self.lifecycle;
        let status = match lifecycle.reason() {
            _ if !lifecycle.is_attached() => Status::Detached,
            Some(reason) if lifecycle.is_retired() => Status::Refused(reason),
            _ if lifecycle.serves() => Status::Serving,
            Some(reason) => Status::Waiting(reason),
            None => Status::Starting,
        };
        *lock(&self.shared.status) = status;
    }
}

fn host_range(span: &Span) -> Result<HostRange, Error> {
    let range = HostRange::try_new(span.range.start, span.range.len())?;
    Ok(match span.guest_address {
        Some(address) => range.at_guest_address(address),
        None => range,
    })
}

fn tell_taken(span: &Span) {
    log::info!("guest memory at {:x?} is deduplicated", span.range);
}
