use super::*;
use proptest::prelude::*;

mod orders;

const MIB: usize = 1 << 20;

fn span(at: usize) -> Span {
    Span {
        range: at * MIB..(at + 1) * MIB,
        guest_address: Some((at * MIB) as u64),
    }
}

fn for_now() -> Outcome {
    Outcome::Passes(Refusal::new(Reason::Store, "no store", ""))
}

fn for_good() -> Outcome {
    Outcome::Fails(Refusal::new(Reason::SharedMemory, "shared", ""))
}

/// A machine, and a world in which effects have an outcome.
struct World {
    machine: Lifecycle,
    now: Instant,
    /// Of each try to give memory to the service.
    tries: Outcome,
    /// Of each release.
    releases: Outcome,
    /// Of each announcement.
    announces: Outcome,
    /// What a try takes that fails for now.
    patience: Duration,
    /// What giving a region back takes.
    copying: Duration,
    /// What the store is told.
    told: Option<Refusal>,
    /// What pins memory shows, as far as the service knows.
    vouched: bool,
}

impl World {
    fn new() -> Self {
        Self {
            machine: Lifecycle::new(Duration::ZERO, true),
            now: Instant::now(),
            tries: Outcome::Done,
            releases: Outcome::Done,
            announces: Outcome::Done,
            patience: Duration::ZERO,
            copying: Duration::ZERO,
            told: None,
            vouched: false,
        }
    }

    /// One that serves a region.
    fn serving() -> Self {
        let mut world = Self::new();
        world.tell(Event::Attach);
        world.tell(Event::Add(span(0)));
        world
    }

    /// Effects of an event, and of what is due behind it.
    fn tell(&mut self, event: Event) -> Vec<Effect> {
        self.machine.handle(event, self.now).unwrap();
        self.work()
    }

    fn work(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        while let Some(effect) = self.machine.next(self.now, true) {
            self.carry_out(&effect);
            effects.push(effect);
            assert!(effects.len() < 100, "no end: {effects:?}");
        }
        effects
    }

    fn carry_out(&mut self, effect: &Effect) {
        let outcome = match effect {
            Effect::Start(_) | Effect::Add(_) | Effect::Resume(_) => self.tries.clone(),
            Effect::Release(_) | Effect::Stop { unmerge: true } => self.releases.clone(),
            Effect::Announce(..) => self.announces.clone(),
            _ => Outcome::Done,
        };
        match effect {
            Effect::Announce(..) if outcome != Outcome::Done => self.told = None,
            Effect::Announce(refusal, _) => self.told = Some(refusal.clone()),
            Effect::Withdraw => self.told = None,
            Effect::Start(_) if outcome == Outcome::Done => (self.told, self.vouched) = (None, false),
            Effect::Vouch => self.vouched = true,
            Effect::HidePins => self.vouched = false,
            _ => {}
        }
        if matches!(outcome, Outcome::Passes(_)) {
            self.now += self.patience;
        }
        if matches!(effect, Effect::Release(_)) {
            self.now += self.copying;
        }
        self.machine.done(effect, outcome, self.now);
    }

    fn wait(&mut self, time: Duration) -> Vec<Effect> {
        self.now += time;
        self.work()
    }

    fn places(&self) -> Vec<RegionState> {
        self.machine.regions.iter().map(|region| region.place).collect()
    }
}

#[test]
fn every_pair_has_at_most_one_transition_and_every_place_an_end() {
    for (at, (from, happens, ..)) in TRANSITIONS.iter().enumerate() {
        let same = TRANSITIONS.iter().filter(|t| (t.0, t.1) == (*from, *happens));
        assert_eq!(same.count(), 1, "{at}: {from:?} {happens:?}");
    }
    for place in [RegionState::Wanted, RegionState::Active, RegionState::Lent] {
        assert_eq!(step(place, Happens::Refuse).0, RegionState::Refused);
    }
    use Happens::{Done, Due, Ends, Fails, Lend, Passes, Refuse};
    for happens in [Due, Done, Passes, Fails, Lend, Refuse, Ends] {
        assert_eq!(
            step(RegionState::Refused, happens),
            (RegionState::Refused, Act::Nothing)
        );
    }
}

#[test]
fn memory_leaves_active_only_by_a_release_or_the_services_end() {
    for (from, happens, to, act) in TRANSITIONS {
        if from == RegionState::Active && to != RegionState::Active {
            assert!(act == Act::Release || happens == Happens::Ends, "{happens:?}");
        }
    }
}

#[test]
fn a_service_starts_paused_is_published_and_only_then_goes_on() {
    let mut world = World::new();
    assert_eq!(world.tell(Event::Attach), []);
    assert_eq!(
        world.tell(Event::Add(span(0))),
        [
            Effect::Start(span(0)),
            Effect::Publish,
            Effect::Vouch,
            Effect::Unpause
        ]
    );
    assert_eq!(world.tell(Event::Add(span(1))), [Effect::Add(span(1))]);
    assert_eq!(world.places(), [RegionState::Active, RegionState::Active]);
}

#[test]
fn a_vm_that_was_paused_before_it_is_served_stays_so() {
    let mut world = World::new();
    world.tell(Event::Attach);
    world.tell(Event::Pause);
    world.tell(Event::HidePins);
    let effects = world.tell(Event::Add(span(0)));
    assert_eq!(effects, [Effect::Start(span(0)), Effect::Publish]);
    assert_eq!(world.tell(Event::Resume), [Effect::Unpause]);
}

#[test]
fn a_store_that_is_late_is_tried_again_and_said_once() {
    let mut world = World::new();
    world.tries = for_now();
    world.tell(Event::Attach);
    let effects = world.tell(Event::Add(span(0)));
    assert!(
        matches!(&effects[..], [Effect::Start(_), Effect::Say(_)]),
        "{effects:?}"
    );
    assert_eq!(world.wait(RETRY / 2), []);
    assert_eq!(world.wait(RETRY / 2), [Effect::Start(span(0))]);
    assert_eq!(world.tell(Event::Hurry), [Effect::Start(span(0))]);
    world.tries = Outcome::Done;
    assert_eq!(world.wait(RETRY).len(), 4);
    assert_eq!(world.machine.next_due(), None);
}

#[test]
fn one_try_at_a_store_that_hangs_speaks_for_all_regions() {
    let mut world = World::new();
    (world.tries, world.patience) = (for_now(), Duration::from_secs(5));
    world.tell(Event::Attach);
    for at in 0..3 {
        let now = world.now;
        world.machine.handle(Event::Add(span(at)), now).unwrap();
    }
    let tries = |effects: Vec<Effect>| {
        let start = |effect: &&Effect| matches!(effect, Effect::Start(_));
        effects.iter().filter(start).count()
    };
    assert_eq!(tries(world.work()), 1);
    assert_eq!(tries(world.wait(RETRY)), 1);
    assert_eq!(tries(world.tell(Event::Hurry)), 1);
}

#[test]
fn a_pin_and_a_loan_after_a_failed_release_try_that_again() {
    let mut world = World::serving();
    world.releases = for_good();
    let release = Effect::Release(span(0));
    assert_eq!(world.tell(Event::Pin)[0], release);
    assert_eq!(world.tell(Event::Pin), std::slice::from_ref(&release));
    let lend = Event::Lend(0..MIB, Lease::UntilFree);
    assert_eq!(world.tell(lend.clone())[0], release);
    world.releases = Outcome::Done;
    assert_eq!(world.tell(Event::Pin), [release]);
    assert_eq!(world.tell(Event::Pin), []);
    assert_eq!(world.tell(lend), []);
}

#[test]
fn nothing_hurries_a_loan() {
    let mut world = World::serving();
    world.tell(Event::Add(span(1)));
    world.tell(Event::Lend(0..MIB, Lease::UntilFree));
    assert_eq!(world.tell(Event::Hurry), []);
    assert_eq!(world.wait(LENT / 2), []);
    assert_eq!(world.wait(LENT / 2), [Effect::Resume(span(0))]);

    // Before there is a service as well.
    let mut world = World::new();
    world.tell(Event::Attach);
    world.tries = for_now();
    world.tell(Event::Add(span(0)));
    world.tell(Event::Lend(0..MIB, Lease::UntilFree));
    world.tries = Outcome::Done;
    assert_eq!(world.tell(Event::Hurry), []);
    assert_eq!(world.wait(LENT)[0], Effect::Start(span(0)));
}

#[test]
fn whoever_borrows_has_its_time_behind_all_that_is_given_back() {
    let mut world = World::serving();
    world.tell(Event::Add(span(1)));
    world.copying = LENT;
    let lent = world.tell(Event::Lend(0..2 * MIB, Lease::UntilFree));
    assert_eq!(lent[..2], [Effect::Release(span(0)), Effect::Release(span(1))]);
    assert_eq!(lent.len(), 3, "it is tried before it is lent: {lent:?}");
    assert_eq!(world.wait(LENT - Duration::from_millis(1)), []);
    let tried = world.wait(Duration::from_millis(1));
    assert_eq!(tried, [Effect::Resume(span(0)), Effect::Resume(span(1))]);
    // Another loan takes nothing from this one, and gives it nothing.
    world.copying = Duration::from_secs(1);
    world.tell(Event::Lend(0..MIB, Lease::UntilFree));
    let before = world.machine.next_due();
    world.tell(Event::Lend(MIB..2 * MIB, Lease::UntilFree));
    assert_eq!(world.machine.next_due(), before);
}

#[test]
fn what_a_refused_vm_could_not_give_back_is_nobodys() {
    let asks = || {
        [
            Event::Lend(0..MIB, Lease::UntilTakenBack),
            Event::LeaveAlone(0..MIB, refusal::protected()),
        ]
    };
    let refused = |mut world: World| {
        for ask in asks() {
            let answer = world.machine.handle(ask, world.now);
            assert!(matches!(answer, Err(Error::Refused(_))), "{answer:?}");
        }
        // What the service never had is nobody's either way.
        world.tell(Event::Add(span(1)));
        world.tell(Event::Lend(MIB..2 * MIB, Lease::UntilTakenBack));
        // It goes, and other memory comes there.
        world.tell(Event::Remove(0..MIB));
        world.tell(Event::Add(span(0)));
        asks().into_iter().for_each(|ask| drop(world.tell(ask)));
    };
    // Giving back failed.
    let mut world = World::serving();
    world.releases = for_good();
    world.tell(Event::Refuse(refusal::confidential()));
    refused(world);
    // It had failed before the service died.
    let mut world = World::serving();
    world.releases = for_good();
    world.tell(Event::Pin);
    world.machine.service_died(refusal::confidential());
    world.work();
    refused(world);
    // The service died.
    let mut world = World::serving();
    world.machine.service_died(refusal::confidential());
    world.work();
    refused(world);
    // It went well at last.
    let mut world = World::serving();
    world.releases = for_good();
    world.tell(Event::Pin);
    world.releases = Outcome::Done;
    world.tell(Event::Refuse(refusal::confidential()));
    asks().into_iter().for_each(|ask| drop(world.tell(ask)));
}

#[test]
fn memory_that_cannot_be_shared_is_refused_by_range() {
    let mut world = World::new();
    world.tries = for_good();
    world.tell(Event::Attach);
    let effects = world.tell(Event::Add(span(0)));
    assert!(
        matches!(
            &effects[..],
            [Effect::Start(_), Effect::Say(_), Effect::Announce(_, 256)]
        ),
        "{effects:?}"
    );
    world.tries = Outcome::Done;
    assert_eq!(world.tell(Event::Add(span(1)))[0], Effect::Start(span(1)));
    assert_eq!(world.places(), [RegionState::Refused, RegionState::Active]);
}

#[test]
fn a_pin_releases_all_and_nothing_comes_back_before_the_last_unpin() {
    let mut world = World::serving();
    world.tell(Event::Add(span(1)));
    let effects = world.tell(Event::Pin);
    assert_eq!(
        effects[..3],
        [Effect::Release(span(0)), Effect::Release(span(1)), Effect::Pause]
    );
    assert_eq!(world.tell(Event::Pin), []);
    assert_eq!(world.tell(Event::Add(span(2))), []);
    assert_eq!(world.tell(Event::Pause), [Effect::Pause][..0]);
    assert_eq!(world.tell(Event::Resume), []);
    assert_eq!(world.tell(Event::Unpin), []);
    assert_eq!(world.wait(10 * RETRY), []);
    assert_eq!(
        world.tell(Event::Unpin),
        [
            Effect::Unpause,
            Effect::Resume(span(0)),
            Effect::Resume(span(1)),
            Effect::Add(span(2))
        ]
    );
    assert_eq!(world.tell(Event::Unpin), []);
}

#[test]
fn a_pin_before_a_service_is_announced_until_it_goes() {
    let mut world = World::new();
    world.tell(Event::Pin);
    let effects = world.tell(Event::Attach);
    assert!(
        matches!(&effects[..], [Effect::Say(_), Effect::Announce(..)]),
        "{effects:?}"
    );
    assert_eq!(world.tell(Event::Add(span(0))), []);
    let effects = world.tell(Event::Unpin);
    assert_eq!(effects[..2], [Effect::Withdraw, Effect::Start(span(0))]);
}

#[test]
fn a_shortage_is_announced_and_tried_again_later() {
    let mut world = World::new();
    world.tries = Outcome::Passes(Refusal::new(Reason::TooFewMappings, "few", ""));
    world.tell(Event::Attach);
    let effects = world.tell(Event::Add(span(0)));
    assert!(
        matches!(effects.last(), Some(Effect::Announce(..))),
        "{effects:?}"
    );
    assert_eq!(world.wait(RETRY_LATER - RETRY), []);
    assert_eq!(world.wait(RETRY), [Effect::Start(span(0))], "it is said once");
    world.tries = Outcome::Done;
    assert_eq!(world.wait(RETRY_LATER)[0], Effect::Start(span(0)));
    assert_eq!(world.places(), [RegionState::Active]);
}

#[test]
fn what_was_refused_before_a_pin_is_announced_again_behind_it() {
    let mut world = World::new();
    world.tries = for_good();
    world.tell(Event::Attach);
    let announced = world.tell(Event::Add(span(0))).pop();
    let pinned = world.tell(Event::Pin).pop();
    assert!(
        matches!(&pinned, Some(Effect::Announce(..))) && pinned != announced,
        "{pinned:?}"
    );
    assert_eq!(world.tell(Event::Unpin).pop(), announced);
}

#[test]
fn lent_memory_comes_back_when_it_is_taken_back() {
    let mut world = World::serving();
    let all = 0..10 * MIB;
    let effects = world.tell(Event::Lend(all.clone(), Lease::UntilTakenBack));
    assert_eq!(effects[0], Effect::Release(span(0)));
    assert_eq!(world.wait(Duration::from_secs(1000)), []);
    // The other userfaultfd is there still.
    world.tries = for_now();
    assert_eq!(
        world.tell(Event::TakeBack(all.clone()))[0],
        Effect::Resume(span(0))
    );
    world.tries = Outcome::Done;
    assert_eq!(world.wait(RETRY), [Effect::Resume(span(0))]);
    world.tell(Event::Lend(all, Lease::UntilFree));
    assert_eq!(world.wait(LENT), [Effect::Resume(span(0))]);
}

#[test]
fn loans_of_one_region_do_not_nest() {
    let mut world = World::serving();
    let lend = |range| Event::Lend(range, Lease::UntilTakenBack);
    world.tell(lend(0..4096));
    let now = world.now;
    for range in [0..4096, 4096..8192] {
        let again = world.machine.handle(lend(range), now);
        assert!(matches!(again, Err(Error::Lent(0))), "{again:?}");
    }
    // Nor is another region lent with it.
    world.tell(Event::Add(span(1)));
    assert!(world.machine.handle(lend(0..2 * MIB), now).is_err());
    assert_eq!(world.places(), [RegionState::Lent, RegionState::Active]);
    world.tell(Event::TakeBack(0..4096));
    world.tell(lend(4096..8192));
    // What nobody will take back may be lent otherwise.
    world.tell(Event::TakeBack(0..MIB));
    world.tell(Event::Lend(0..MIB, Lease::UntilFree));
    world.tell(lend(0..MIB));
}

#[test]
fn a_loan_that_failed_is_tried_again_by_whoever_asks_again() {
    let mut world = World::serving();
    let (lend, release) = (
        Event::Lend(0..MIB, Lease::UntilTakenBack),
        Effect::Release(span(0)),
    );
    world.releases = for_good();
    assert_eq!(world.tell(lend.clone())[0], release);
    world.releases = Outcome::Done;
    assert_eq!(world.tell(lend.clone()), [release]);
    let nested = world.machine.handle(lend, world.now);
    assert!(matches!(nested, Err(Error::Lent(0))), "{nested:?}");
    assert_eq!(world.tell(Event::TakeBack(0..MIB)), [Effect::Resume(span(0))]);
}

#[test]
fn a_vm_whose_service_has_died_is_refused_until_the_next_one() {
    let mut world = World::serving();
    let died = Refusal::new(Reason::Other, "the service has died", "");
    world.machine.service_died(died.clone());
    let (say, announce) = (Effect::Say(died.clone()), Effect::Announce(died.clone(), 256));
    assert_eq!(world.work(), [say, announce]);
    assert!(world.machine.is_retired() && !world.machine.serves());
    assert_eq!(world.machine.reason(), Some(died));
    assert_eq!(world.tell(Event::Pin), []);
    assert_eq!(world.tell(Event::Unpin), []);
    world.tell(Event::Detach { unmerge: true });
    world.tell(Event::Attach);
    assert_eq!(world.tell(Event::Add(span(0)))[0], Effect::Start(span(0)));
}

#[test]
fn lent_memory_is_not_given_back_by_an_unpin() {
    let mut world = World::serving();
    world.tell(Event::Pin);
    world.tell(Event::Lend(0..MIB, Lease::UntilTakenBack));
    assert_eq!(world.tell(Event::Unpin), [Effect::Unpause]);
    assert_eq!(world.tell(Event::TakeBack(0..MIB)), [Effect::Resume(span(0))]);
}

#[test]
fn a_refused_vm_gives_everything_back_and_never_starts_again() {
    let mut world = World::serving();
    let refusal = refusal::confidential();
    assert_eq!(
        world.tell(Event::Refuse(refusal.clone())),
        [
            Effect::Stop { unmerge: true },
            Effect::Say(refusal.clone()),
            Effect::Announce(refusal.clone(), 256)
        ]
    );
    assert_eq!(world.tell(Event::Add(span(1))), []);
    assert_eq!(world.tell(Event::Refuse(refusal)), []);
    assert_eq!(world.tell(Event::Hurry), []);
    assert_eq!(world.wait(10 * RETRY), []);
    assert_eq!(world.places(), [RegionState::Refused, RegionState::Refused]);
}

#[test]
fn what_could_not_be_announced_is_announced_later() {
    let mut world = World::serving();
    let thread = Outcome::Passes(Refusal::new(Reason::Other, "no thread", ""));
    world.announces = thread;
    let announce = || Effect::Announce(refusal::confidential(), 256);
    let effects = world.tell(Event::Refuse(refusal::confidential()));
    assert_eq!(effects.last(), Some(&announce()));
    assert_eq!(world.machine.next_due(), Some(world.now + RETRY));
    assert_eq!(world.wait(RETRY / 2), []);
    assert_eq!(world.wait(RETRY), [announce()]);
    world.announces = Outcome::Done;
    assert_eq!(world.wait(RETRY), [announce()]);
    assert_eq!(world.told, Some(refusal::confidential()));
    assert_eq!(world.wait(10 * RETRY), []);
    // What ends meanwhile is not announced any more.
    world.tell(Event::Detach { unmerge: true });
    world.tell(Event::Attach);
    world.announces = for_good();
    world.tell(Event::Note(refusal::confidential()));
    world.tell(Event::Detach { unmerge: true });
    assert_eq!(world.machine.next_due(), None);
    assert_eq!(world.wait(10 * RETRY), []);
}

#[test]
fn a_vm_that_waits_for_ever_for_more_memory_starts_when_it_is_told_to() {
    let mut world = World::new();
    world.machine = Lifecycle::new(Duration::MAX, true);
    world.tell(Event::Attach);
    world.tell(Event::Add(span(0)));
    assert_eq!(world.wait(1000 * RETRY_LATER), []);
    assert_eq!(world.tell(Event::Hurry)[0], Effect::Start(span(0)));
}

#[test]
fn a_guest_address_behind_the_last_one_is_none() {
    let mut world = World::new();
    world.tell(Event::Attach);
    let last = Span {
        range: 0..MIB,
        guest_address: Some(u64::MAX - 4095),
    };
    world.tell(Event::Add(last));
    world.tell(Event::Remove(0..MIB / 2));
    assert_eq!(world.machine.regions[0].span.range, MIB / 2..MIB);
    assert_eq!(world.machine.regions[0].span.guest_address, None);
}

#[test]
fn a_reason_that_was_said_before_refuses_a_vm_all_the_same() {
    let mut world = World::serving();
    world.tell(Event::LeaveAlone(0..MIB, refusal::protected()));
    world.tell(Event::Note(refusal::unknown_memory(4096)));
    assert_eq!(world.told, None, "there is a service");
    world.tell(Event::Refuse(refusal::protected()));
    assert_eq!(world.told, Some(refusal::protected()));
    // What is said of it besides is logged.
    let note = refusal::nested();
    assert_eq!(world.tell(Event::Note(note.clone())), [Effect::Say(note)]);
    assert_eq!(world.machine.reason(), Some(refusal::protected()));
}

#[test]
fn removed_memory_is_forgotten_by_all_and_its_rest_stays() {
    let mut world = World::serving();
    let gone = MIB / 4..MIB / 2;
    assert_eq!(
        world.tell(Event::Remove(gone.clone())),
        [Effect::Remove(gone.clone()), Effect::Forget(gone)]
    );
    let left: Vec<Range<usize>> = world
        .machine
        .regions
        .iter()
        .map(|r| r.span.range.clone())
        .collect();
    assert_eq!(left, [0..MIB / 4, MIB / 2..MIB]);
    assert_eq!(world.machine.regions[1].span.guest_address, Some(MIB as u64 / 2));
}

#[test]
fn of_memory_that_is_known_in_part_the_rest_is_added() {
    let part = |range: Range<usize>| Span {
        guest_address: Some(range.start as u64),
        range,
    };
    let mut world = World::serving();
    world.tell(Event::Add(span(2)));
    // In front, between and behind; nothing of it twice.
    let all = part(0..4 * MIB);
    assert_eq!(
        world.tell(Event::Add(all.clone())),
        [Effect::Add(span(1)), Effect::Add(span(3))]
    );
    assert_eq!(world.tell(Event::Add(all)), []);
    assert_eq!(world.tell(Event::Add(part(MIB / 2..MIB))), []);
    // What is refused stays refused, whatever is added around it.
    world.tell(Event::LeaveAlone(0..MIB, refusal::protected()));
    assert_eq!(world.tell(Event::Add(part(0..MIB))), []);
    assert_eq!(
        world.tell(Event::Add(part(3 * MIB..5 * MIB))),
        [Effect::Add(span(4))]
    );
}

#[test]
fn an_empty_range_is_nothing() {
    let middle = MIB / 2;
    #[allow(clippy::reversed_empty_ranges)] // what a caller may give all the same
    for empty in [0..0, middle..middle, MIB..MIB, middle..0] {
        let mut world = World::serving();
        for event in [
            Event::Lend(empty.clone(), Lease::UntilTakenBack),
            Event::TakeBack(empty.clone()),
            Event::Remove(empty.clone()),
            Event::LeaveAlone(empty.clone(), refusal::protected()),
        ] {
            assert_eq!(world.tell(event), [], "{empty:?}");
        }
        assert_eq!(world.places(), [RegionState::Active]);
    }
}

#[test]
fn detaching_ends_everything_and_the_next_vm_begins_anew() {
    let mut world = World::serving();
    world.tell(Event::Pause);
    assert_eq!(
        world.tell(Event::Detach { unmerge: false }),
        [Effect::Stop { unmerge: false }, Effect::Forget(span(0).range)]
    );
    assert_eq!(world.tell(Event::Detach { unmerge: true }), []);
    world.tell(Event::Attach);
    let effects = world.tell(Event::Add(span(0)));
    assert_eq!(effects[0], Effect::Start(span(0)));
    assert!(effects.contains(&Effect::Unpause), "{effects:?}");
}

#[test]
fn a_device_keeps_its_pin_when_the_vm_ends() {
    let mut world = World::serving();
    world.tell(Event::Pin);
    world.tell(Event::Detach { unmerge: false });
    world.tell(Event::Attach);
    assert_eq!(world.tell(Event::Add(span(0))), []);
    let effects = world.tell(Event::Unpin);
    assert_eq!(effects[..2], [Effect::Withdraw, Effect::Start(span(0))]);
}

#[test]
fn a_pin_that_nobody_sees_any_more_ends_and_nothing_is_vouched_for_again() {
    let mut world = World::serving();
    world.tell(Event::Pin);
    assert_eq!(
        world.tell(Event::LetGo),
        [Effect::HidePins, Effect::Unpause, Effect::Resume(span(0))]
    );
    world.tell(Event::Detach { unmerge: true });
    world.tell(Event::Attach);
    assert_eq!(
        world.tell(Event::Add(span(0))),
        [Effect::Start(span(0)), Effect::Publish, Effect::Unpause]
    );
}

#[test]
fn guests_of_a_guest_hide_the_pins_of_that_vm_only() {
    let mut world = World::serving();
    assert_eq!(world.tell(Event::HidePins), [Effect::HidePins]);
    world.tell(Event::Detach { unmerge: true });
    world.tell(Event::Attach);
    assert!(world.tell(Event::Add(span(0))).contains(&Effect::Vouch));
}

#[test]
fn detaching_without_a_vm_ends_a_pause_and_changes_nothing_else() {
    let mut world = World::new();
    for event in [Event::Pin, Event::Pause, Event::Detach { unmerge: true }] {
        assert_eq!(world.tell(event), []);
    }
    world.tell(Event::Attach);
    assert_eq!(world.tell(Event::Add(span(0))), [], "it is pinned");
    let started = world.tell(Event::Unpin);
    assert!(started.contains(&Effect::Unpause), "{started:?}");
}

#[test]
fn what_does_not_fit_is_an_error_and_changes_nothing() {
    let mut world = World::new();
    let now = world.now;
    let detached = |event| matches!(event, Err(Error::Detached));
    assert!(detached(world.machine.handle(Event::Add(span(0)), now)));
    assert!(detached(
        world.machine.handle(Event::Refuse(refusal::nested()), now)
    ));
    assert!(detached(world.machine.handle(Event::HidePins, now)));
    world.tell(Event::Attach);
    let again = world.machine.handle(Event::Attach, now);
    assert!(matches!(again, Err(Error::Attached)));
    world.tell(Event::Add(span(0)));
    assert_eq!(world.tell(Event::Add(span(0))), []);
    assert_eq!(world.work(), []);
}

fn any_event() -> impl Strategy<Value = Event> {
    let range = (0..4usize, 1..3usize).prop_map(|(at, len)| at * MIB..(at + len) * MIB);
    prop_oneof![
        Just(Event::Attach),
        (0..8usize, 1..4usize).prop_map(|(at, len)| Event::Add(Span {
            range: at * MIB / 2..(at + len) * MIB / 2,
            guest_address: None,
        })),
        Just(Event::Hurry),
        range.clone().prop_map(Event::Remove),
        (range.clone(), any::<bool>()).prop_map(|(range, forever)| {
            let lease = if forever {
                Lease::UntilTakenBack
            } else {
                Lease::UntilFree
            };
            Event::Lend(range, lease)
        }),
        range.clone().prop_map(Event::TakeBack),
        range.prop_map(|range| Event::LeaveAlone(range, refusal::protected())),
        Just(Event::Note(refusal::unknown_memory(4096))),
        Just(Event::Refuse(refusal::confidential())),
        Just(Event::Pin),
        Just(Event::Unpin),
        Just(Event::LetGo),
        Just(Event::Pause),
        Just(Event::Resume),
        Just(Event::HidePins),
        Just(Event::DirectIo),
        any::<bool>().prop_map(|unmerge| Event::Detach { unmerge }),
    ]
}

fn any_outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        4 => Just(Outcome::Done),
        2 => Just(for_now()),
        1 => Just(for_good()),
    ]
}

/// What a service would know, by the effects alone.
#[derive(Default)]
struct Model {
    running: bool,
    published: bool,
    /// It may merge.
    on: bool,
    /// What it works on.
    active: Vec<Range<usize>>,
    pins: usize,
    /// By the VMM.
    paused: bool,
}

impl Model {
    fn see(&mut self, effect: &Effect, done: bool) {
        let overlaps = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        match effect {
            Effect::Start(span) => {
                assert!(!self.running, "two services");
                if done {
                    *self = Self {
                        running: true,
                        active: vec![span.range.clone()],
                        pins: self.pins,
                        paused: self.paused,
                        ..Self::default()
                    };
                }
            }
            Effect::Add(span) | Effect::Resume(span) => {
                assert!(self.running, "a service that is not there gets memory");
                assert!(!self.active.iter().any(|r| overlaps(r, &span.range)), "twice");
                if done {
                    self.active.push(span.range.clone());
                }
            }
            Effect::Release(span) => self.active.retain(|range| *range != span.range),
            Effect::Remove(gone) => {
                let parts = self.active.iter().flat_map(|range| {
                    let before = range.start..range.end.min(gone.start);
                    let behind = range.start.max(gone.end)..range.end;
                    [before, behind].into_iter().filter(|part| part.start < part.end)
                });
                self.active = parts.collect();
            }
            Effect::Publish => self.published = self.running,
            Effect::Unpause => {
                assert!(self.published, "it merges before those who free memory know it");
                self.on = true;
            }
            Effect::Pause => {
                assert!(self.running);
                self.on = false;
            }
            Effect::Stop { .. } => {
                assert!(self.running, "a service ends twice");
                *self = Self {
                    pins: self.pins,
                    paused: self.paused,
                    ..Self::default()
                };
            }
            Effect::Vouch | Effect::HidePins | Effect::DirectIo => {
                assert!(self.running);
            }
            Effect::Announce(..) => assert!(!self.running, "announced as refused while it is served"),
            Effect::Forget(_) | Effect::Say(_) | Effect::Withdraw => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever comes in whatever order, and however it goes: nothing is given to two services, nothing merges before it is
    /// published, or while it is paused, and when a pin, a loan, a removal or a refusal is answered no memory that it concerns is worked on.
    #[test]
    fn no_order_of_events_breaks_the_rules(
        events in prop::collection::vec((any_event(), 0..3u64, prop::collection::vec(any_outcome(), 12)), 1..40)
    ) {
        let mut machine = Lifecycle::new(Duration::from_millis(20), true);
        let (mut model, mut now) = (Model::default(), Instant::now());
        for (event, seconds, outcomes) in events {
            now += Duration::from_secs(seconds);
            let mut outcomes = outcomes.into_iter();
            let handled = machine.handle(event.clone(), now).is_ok();
            if handled {
                match event {
                    Event::Pin => model.pins += 1,
                    Event::Unpin | Event::LetGo => model.pins = model.pins.saturating_sub(1),
                    Event::Pause => model.paused = true,
                    Event::Resume | Event::Detach { .. } => model.paused = false,
                    _ => {}
                }
            }
            for due in [false, true] {
                while let Some(effect) = machine.next(now, due) {
                    let Some(outcome) = outcomes.next() else { return Ok(()) };
                    if matches!(outcome, Outcome::Passes(_)) {
                        now += Duration::from_secs(5);
                    }
                    model.see(&effect, outcome == Outcome::Done);
                    machine.done(&effect, outcome, now);
                }
                prop_assert_eq!(machine.serves(), model.running);
                prop_assert_eq!(model.on, model.running && model.pins == 0 && !model.paused);
                let concerned = match &event {
                    // Tries take time, in which such a loan may end.
                    Event::Lend(_, Lease::UntilFree) if due => 0..0,
                    Event::Lend(..) if !handled => 0..0,
                    Event::Remove(range) | Event::Lend(range, _) | Event::LeaveAlone(range, _) => range.clone(),
                    Event::Refuse(_) if handled => 0..usize::MAX,
                    Event::Detach { .. } => 0..usize::MAX,
                    _ if model.pins > 0 => 0..usize::MAX,
                    _ => 0..0,
                };
                prop_assert!(
                    !model.active.iter().any(|r| r.start < concerned.end && concerned.start < r.end),
                    "{:?} is answered while {:?} is worked on", event, model.active
                );
            }
        }
    }
}
