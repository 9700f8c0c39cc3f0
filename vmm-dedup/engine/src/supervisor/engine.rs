//! What of the engine the supervisor's thread works with: the service, the discarder, the announcement of why there is none.

use crate::compare::Engines;
use crate::config::Setup;
use crate::error::Error;
use crate::memory::layout::HostRange;
use crate::refusal;
use crate::scan::control::Ending;
use crate::service::DedupService;
use crate::store::refusal::Refused;
use crate::supervisor::driver::{Driver, Hands};
use crate::supervisor::lifecycle::{Effect, Event, Lifecycle, Span};
use crate::supervisor::nested;
use crate::supervisor::shared::{Ask, Configure, Shared, Status};
use crate::supervisor::theirs;
use crate::sync::lock;
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
pub(crate) struct Engine {
    shared: Arc<Shared>,
    engines: Engines,
    setup: Setup,
    service: Option<DedupService>,
    /// Services that have ended, of which something packed is not back yet, for want of memory.
    rebuilding: Vec<DedupService>,
    /// Tells the store why there is no service, with what it tells: the reason, and pages of how many.
    refused: Option<(Refused, Refusal, u64)>,
    /// Of a service that has ended by the letter at hand.
    account: Option<ServiceStats>,
    /// Why no VM can be deduplicated here.
    hindrance: Option<Refusal>,
    /// When it is tried again to listen to the guest's agent.
    hears: Option<Instant>,
    /// The store could not be told why there is no service.
    untold: bool,
}

impl Engine {
    /// `hindrance`: why no VM can be deduplicated here.
    pub(crate) fn new(shared: Arc<Shared>, engines: Engines, hindrance: Option<Refusal>) -> Self {
        Self {
            shared,
            engines,
            setup: Setup::default(),
            service: None,
            rebuilding: Vec::new(),
            refused: None,
            account: None,
            hindrance,
            hears: None,
            untold: false,
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
        let Some(mut service) = self.service.take() else {
            return Ok(());
        };
        let ended = service.end_as(ending);
        if service.is_rebuilding() {
            self.rebuilding.push(service);
        }
        *lock(&self.shared.account) = None;
        let stats = ended.inspect_err(|error| log::error!("{error}"))?;
        self.account = Some(stats);
        Ok(())
    }

    /// This thread has died, not the VM: the service ends, and what is packed comes back later.
    pub(super) fn lay_down(&mut self) {
        let _ = self.stop(Ending::StayShared);
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
}

impl Hands for Engine {
    type Ask = Ask;
    type Account = ServiceStats;

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn take(driver: &mut Driver<Self>, ask: Ask) -> Result<(), Error> {
        match ask {
            Ask::Attach(fallback, configure) => driver.attach(*fallback, configure),
            Ask::Replace(number, checked) => driver.replace(number, *checked),
            Ask::EndOf(number) => {
                if driver.hands.shared.number() == Some(number) {
                    driver.end_vm();
                }
                Ok(())
            }
            Ask::Nested => driver.expect_nested_guests(),
            #[cfg(test)]
            Ask::Die => panic!("a bug"),
            Ask::Work(work) => {
                let service = driver.hands.service.as_ref();
                // Whoever asked finds no answer if it panics.
                let _ = theirs::run(|| work(service));
                Ok(())
            }
        }
    }

    fn carry_out(driver: &mut Driver<Self>, effect: &Effect) -> Result<(), Error> {
        if let Effect::Start(span) = effect {
            return driver.start(span);
        }
        let (hands, told) = (&mut driver.hands, driver.told);
        match effect {
            Effect::Stop { unmerge: true } => return hands.stop(Ending::Unmerge),
            Effect::Stop { unmerge: false } => return hands.stop(Ending::MemoryGoes),
            Effect::Say(refusal) if told => {
                log::info!("VM {} is not deduplicated: {refusal}", hands.setup.config.name);
            }
            Effect::Say(refusal) => {
                log::warn!("VM {} is not deduplicated: {refusal}", hands.setup.config.name)
            }
            Effect::Announce(refusal, pages) => return hands.announce(refusal, *pages),
            Effect::Withdraw => hands.refused = None,
            Effect::Forget(range) => {
                hands.rebuilding.iter().for_each(|service| service.let_go(range));
                // It outlives the service, and must not know memory that is gone: at its addresses there may be other memory
                // soon.
                hands.shared.discarder.forget(range.start, range.len());
            }
            _ => {}
        }
        let Some(service) = &hands.service else {
            return Ok(());
        };
        match effect {
            Effect::Publish => {
                hands.shared.discarder.adopt(&service.discarder());
                *lock(&hands.shared.account) = Some(service.account());
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

    fn next_due(&self) -> Option<Instant> {
        let looks = self.service.as_ref().map(|_| self.now() + LOOK_FOR_DEATH);
        looks.into_iter().chain(self.hears).min()
    }

    fn do_what_is_due(&mut self) {
        self.rebuilding.retain(DedupService::is_rebuilding);
        self.hear_agent(self.now());
    }

    /// One that is started meanwhile is new, and one that ends needs nobody to let it go on.
    fn hold(&mut self, held: bool) {
        if let Some(service) = &self.service {
            service.hold(held);
        }
    }

    fn bury(&mut self) -> bool {
        let died = self.service.as_ref().is_some_and(DedupService::has_died);
        if died {
            let _ = self.stop(Ending::StayShared);
        }
        died
    }

    fn take_account(&mut self) -> Option<ServiceStats> {
        self.account.take()
    }

    fn settled(&self, lifecycle: &Lifecycle) {
        let status = match lifecycle.reason() {
            _ if !lifecycle.is_attached() => Status::Detached,
            Some(reason) if lifecycle.is_retired() => Status::Refused(reason),
            _ if lifecycle.serves() => Status::Serving,
            Some(reason) => Status::Waiting(reason),
            None => Status::Starting,
        };
        if status == Status::Detached {
            // What stands for the last VM ends nothing that is told for the next one, such as a pause.
            self.shared.set_number(None);
        }
        *lock(&self.shared.status) = status;
    }

    fn end(&mut self) {
        let _ = self.stop(Ending::StayShared);
        // Nobody would tell their threads any more that memory goes: until all is back it must not.
        self.rebuilding.clear();
        self.refused = None;
    }
}

impl Driver<Engine> {
    /// A VM begins. If its settings are wrong it is refused by those to fall back on, and if nothing can be deduplicated here at all.
    fn attach(&mut self, fallback: Setup, configure: Configure) -> Result<(), Error> {
        if self.lifecycle.is_attached() {
            return Err(Error::Attached);
        }
        let checked = match self.hands.hindrance.clone() {
            Some(hindrance) => Err(hindrance),
            None => theirs::run(configure)
                .unwrap_or_else(|| Err(refusal::unread()))
                .and_then(|setup| match setup.check(&self.hands.engines) {
                    Ok(()) => Ok(setup),
                    Err(mistake) => Err(Refusal::from(&mistake)),
                }),
        };
        let (setup, wrong) = match checked {
            Ok(setup) => (setup, None),
            Err(refusal) => (fallback, Some(refusal)),
        };
        self.hands.setup = setup;
        self.hands.shared.set_number(None);
        self.handle(Event::Attach)?;
        let Some(refusal) = wrong else {
            return Ok(());
        };
        self.work_off(false);
        self.handle(Event::Refuse(refusal))
    }

    fn replace(&mut self, number: u64, checked: Result<Setup, Error>) -> Result<(), Error> {
        self.end_vm();
        let setup = checked?;
        self.attach(setup.clone(), Box::new(|| Ok(setup)))?;
        self.hands.shared.set_number(Some(number));
        Ok(())
    }

    /// The VM ends, if there is one, whatever fails of that.
    fn end_vm(&mut self) {
        let _ = self.handle(Event::Detach { unmerge: false });
        self.work_off(false);
        (self.failed, self.hands.account) = (None, None);
        self.hands.shared.set_number(None);
        self.keeps.clear();
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
        self.handle(event)
    }

    fn start(&mut self, span: &Span) -> Result<(), Error> {
        // The store would take whoever is announced and joins for two VMs.
        let announced = self
            .hands
            .refused
            .take()
            .map(|(_, refusal, pages)| (refusal, pages));
        let started = self.hands.start_service(span);
        if let (Err(_), Some((refusal, pages))) = (&started, announced) {
            self.work(&Effect::Announce(refusal, pages));
        }
        started
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
