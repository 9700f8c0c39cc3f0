//! Every call in every state, one behind the other, is what the table of the [supervisor](crate::supervisor) says: an error that
//! changes nothing, nothing, or these effects and no others. An oracle says what becomes of memory.

use super::*;

/// MiB that a VM may have: each is a region.
const UNITS: usize = 3;

/// What happens next.
#[derive(Clone, Debug)]
enum Step {
    Tell(Event),
    /// The store is there, or away: every try to give memory to the service goes well, or fails for now.
    Store(bool),
    /// Memory can be given back, or cannot.
    GivesBack(bool),
}

/// A column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Detached,
    Waits,
    Serves,
    Refused,
}

/// What an event may do by itself; `Err` where it does not fit.
fn documented(event: &Event, oracle: &Oracle) -> Result<&'static [&'static str], &'static str> {
    use Column::{Detached, Refused, Serves, Waits};
    let known = |range| UNITS_KNOWN.iter().any(|unit| oracle.has(range, *unit));
    Ok(match (event, oracle.column) {
        (Event::Lend(..) | Event::LeaveAlone(..), Detached) => return Err("Detached"),
        (Event::Lend(range, _) | Event::LeaveAlone(range, _), Waits | Serves) if !known(range) => {
            return Err("NotAdded");
        }
        (Event::Lend(range, _) | Event::LeaveAlone(range, _), Refused) if oracle.is_stuck(range) => {
            return Err("Refused");
        }
        (Event::Lend(range, _), _) if oracle.is_lent(range) => return Err("Lent"),
        (Event::Attach, Detached) => &["Say", "Announce"],
        (Event::Attach, _) => return Err("Attached"),
        (Event::Add(_) | Event::Refuse(_) | Event::Note(_) | Event::HidePins, Detached) => {
            return Err("Detached");
        }
        (Event::Add(_) | Event::Hurry | Event::TakeBack(_), _) => &[],
        (Event::Remove(_), Serves) => &["Remove", "Forget"],
        (Event::Remove(_), _) => &["Forget"],
        (Event::Detach { .. }, Serves) => &["Stop", "Forget"],
        (Event::Detach { .. }, Waits | Refused) => &["Forget", "Withdraw"],
        (Event::Note(_), Serves | Refused) => &["Say"],
        (Event::Note(_), Waits) => &["Say", "Announce"],
        (_, Detached | Refused) => &[],
        (Event::Lend(..), Waits) => &["Say"],
        (Event::Lend(..) | Event::LeaveAlone(..), Serves) => &["Release", "Say"],
        (Event::LeaveAlone(..) | Event::Refuse(_) | Event::Pin, Waits) => &["Say", "Announce"],
        (Event::Refuse(_), Serves) => &["Stop", "Say", "Announce"],
        (Event::Pin, Serves) => &["Release", "Pause", "Say"],
        (Event::Unpin | Event::LetGo, Waits) => &["Withdraw", "Announce"],
        (Event::Unpin, Serves) => &["Unpause"],
        (Event::LetGo, Serves) => &["HidePins", "Unpause"],
        (Event::Pause, Serves) => &["Pause"],
        (Event::Resume, Serves) => &["Unpause"],
        (Event::HidePins, Serves) => &["HidePins"],
        (Event::DirectIo, Serves) => &["DirectIo"],
        (Event::Pause | Event::Resume | Event::HidePins | Event::DirectIo, Waits) => &[],
    })
}

/// What becomes of a MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Absent,
    /// It is given to the service when nothing is in the way; `true`: and when it was taken back.
    Out(bool),
    Served,
    Left,
}

/// Those of memory that there is.
const UNITS_KNOWN: [Unit; 4] = [Unit::Out(false), Unit::Out(true), Unit::Served, Unit::Left];

/// What documentation says of the whole.
#[derive(Clone, Debug)]
struct Oracle {
    column: Column,
    units: [Unit; UNITS],
    /// What could not be given back when it was to be.
    stuck: [bool; UNITS],
    pins: usize,
    paused: bool,
    /// What pins memory shows in open files: whichever VM there is, and this one.
    shows: [bool; 2],
    store: bool,
    /// Whether a service gives memory back that it is to give back.
    gives_back: bool,
    /// Why the VM is refused as a whole.
    refused: Option<Refusal>,
    /// What else was said of it and does not pass by itself, last what was found last.
    said: Vec<Refusal>,
}

impl Oracle {
    /// What the store is to be told.
    fn told(&self) -> Option<Refusal> {
        match self.column {
            Column::Detached | Column::Serves => None,
            Column::Refused => self.refused.clone(),
            Column::Waits if self.pins > 0 => Some(refusal::pinned()),
            Column::Waits => self.said.last().cloned(),
        }
    }

    /// Whether a unit of a range is so.
    fn has(&self, range: &Range<usize>, unit: Unit) -> bool {
        let within = |at: usize| range.start < (at + 1) * MIB && at * MIB < range.end;
        (0..UNITS).any(|at| within(at) && self.units[at] == unit)
    }

    /// Whether part of a range is lent until it is taken back, and that went well.
    fn is_lent(&self, range: &Range<usize>) -> bool {
        let within = |at: usize| range.start < (at + 1) * MIB && at * MIB < range.end;
        (0..UNITS).any(|at| within(at) && self.units[at] == Unit::Out(true) && !self.stuck[at])
    }

    /// Whether part of a range could not be given back.
    fn is_stuck(&self, range: &Range<usize>) -> bool {
        let within = |at: usize| range.start < (at + 1) * MIB && at * MIB < range.end;
        (0..UNITS).any(|at| within(at) && self.stuck[at])
    }

    /// The service is to give a range back, and what it could not give back before.
    fn give_back(&mut self, range: &Range<usize>) {
        let within = |at: usize| range.start < (at + 1) * MIB && at * MIB < range.end;
        for at in (0..UNITS).filter(|at| self.column == Column::Serves && within(*at)) {
            if self.units[at] == Unit::Served || self.stuck[at] {
                self.stuck[at] = !self.gives_back;
            }
        }
    }

    /// What an event says, if it fits: it must be in the log, unless it was before.
    fn says(&self, event: &Event) -> Option<Refusal> {
        let known = |range| UNITS_KNOWN.iter().any(|unit| self.has(range, *unit));
        match (event, self.column) {
            (Event::Note(refusal), _) => Some(refusal.clone()),
            (_, Column::Detached | Column::Refused) => None,
            (Event::Refuse(refusal), _) => Some(refusal.clone()),
            (Event::LeaveAlone(range, refusal), _) if known(range) => Some(refusal.clone()),
            _ => None,
        }
    }

    fn change(&mut self, range: &Range<usize>, change: impl Fn(Unit) -> Unit) {
        let within = |at: usize| range.start < (at + 1) * MIB && at * MIB < range.end;
        let units = self.units.iter_mut().enumerate();
        units
            .filter(|(at, unit)| within(*at) && **unit != Unit::Absent)
            .for_each(|(_, unit)| *unit = change(*unit));
    }

    fn tell(&mut self, event: &Event) {
        let all = 0..UNITS * MIB;
        let left = |_| Unit::Left;
        if let Some(refusal) = self.says(event).filter(|said| !refusal::passes(said)) {
            self.said.retain(|said| *said != refusal);
            self.said.push(refusal);
        }
        match event {
            Event::Attach => self.column = Column::Waits,
            Event::Add(span) => {
                let unit = &mut self.units[span.range.start / MIB];
                let new = match self.column {
                    Column::Refused => Unit::Left,
                    _ => Unit::Out(false),
                };
                *unit = if *unit == Unit::Absent { new } else { *unit };
            }
            Event::Remove(range) => self.change(range, |_| Unit::Absent),
            Event::Lend(range, lease) => {
                self.give_back(range);
                let kept = *lease == Lease::UntilTakenBack;
                self.change(range, |unit| match unit {
                    Unit::Left => Unit::Left,
                    _ => Unit::Out(kept),
                });
            }
            Event::TakeBack(range) => self.change(range, |unit| match unit {
                Unit::Out(_) => Unit::Out(false),
                unit => unit,
            }),
            Event::LeaveAlone(range, _) => {
                self.give_back(range);
                self.change(range, left);
            }
            Event::Refuse(_) if self.column == Column::Refused => {}
            Event::Refuse(refusal) => {
                self.give_back(&all);
                (self.column, self.refused) = (Column::Refused, Some(refusal.clone()));
                self.change(&all, left);
            }
            Event::Pin => {
                self.pins += 1;
                self.give_back(&all);
                self.change(&all, |unit| match unit {
                    Unit::Served => Unit::Out(false),
                    unit => unit,
                });
            }
            Event::Unpin => self.pins = self.pins.saturating_sub(1),
            Event::LetGo => (self.pins, self.shows) = (self.pins.saturating_sub(1), [false; 2]),
            Event::HidePins => self.shows[1] = false,
            Event::Pause => self.paused = true,
            Event::Resume => self.paused = false,
            Event::Detach { .. } => {
                (self.column, self.paused) = (Column::Detached, false);
                self.units = [Unit::Absent; UNITS];
                (self.refused, self.said) = (None, Vec::new());
                self.shows[1] = self.shows[0];
            }
            Event::Hurry | Event::Note(_) | Event::DirectIo => {}
        }
        self.forget_stuck(|unit| unit == Unit::Absent);
    }

    fn forget_stuck(&mut self, of: impl Fn(Unit) -> bool) {
        for (stuck, unit) in self.stuck.iter_mut().zip(self.units) {
            *stuck &= !of(unit);
        }
    }

    /// Some time later.
    fn settle(&mut self) {
        if self.store && self.pins == 0 && self.units.contains(&Unit::Out(false)) {
            self.column = Column::Serves;
            self.change(&(0..UNITS * MIB), |unit| match unit {
                Unit::Out(false) => Unit::Served,
                unit => unit,
            });
            self.forget_stuck(|unit| unit == Unit::Served);
        }
    }
}

/// A machine, and what is expected of it.
struct Both {
    world: World,
    oracle: Oracle,
    done: Vec<Step>,
}

impl Both {
    fn new() -> Self {
        Self {
            world: World::new(),
            oracle: Oracle {
                column: Column::Detached,
                units: [Unit::Absent; UNITS],
                stuck: [false; UNITS],
                pins: 0,
                paused: false,
                shows: [true; 2],
                store: true,
                gives_back: true,
                refused: None,
                said: Vec::new(),
            },
            done: Vec::new(),
        }
    }

    fn play<'a>(mut self, steps: impl IntoIterator<Item = &'a Step>) {
        for step in steps {
            self.done.push(step.clone());
            match step {
                Step::Tell(event) => self.tell(event),
                Step::Store(up) => {
                    self.oracle.store = *up;
                    self.world.tries = if *up { Outcome::Done } else { for_now() };
                }
                Step::GivesBack(yes) => {
                    self.oracle.gives_back = *yes;
                    self.world.releases = if *yes { Outcome::Done } else { for_good() };
                }
            }
            self.compare();
            // Longer than anything waits that is tried by itself.
            self.world.wait(2 * RETRY_LATER);
            self.oracle.settle();
            self.compare();
        }
    }

    /// What an event does before it is answered.
    fn tell(&mut self, event: &Event) {
        let documented = documented(event, &self.oracle);
        let before = format!("{:?}", self.world.machine);
        let handled = self.world.machine.handle(event.clone(), self.world.now);
        let error = handled.err().map(|error| format!("{error:?}"));
        let error = error.as_ref().and_then(|error| error.split(['(', ' ']).next());
        assert_eq!(error, documented.err(), "{:?}", self.done);
        let Ok(may) = documented else {
            let after = format!("{:?}", self.world.machine);
            assert_eq!(before, after, "an error changes something: {:?}", self.done);
            return;
        };
        let says = self.oracle.says(event).filter(|said| !refusal::passes(said));
        let new = says.filter(|says| !self.oracle.said.contains(says));
        self.oracle.tell(event);
        let mut said = Vec::new();
        while let Some(effect) = self.world.machine.next(self.world.now, false) {
            let name = format!("{effect:?}");
            let name = name.split(|c: char| !c.is_alphanumeric()).next().unwrap_or("");
            assert!(may.contains(&name), "{effect:?}, not {may:?}: {:?}", self.done);
            self.world.carry_out(&effect);
            said.extend(match effect {
                Effect::Say(refusal) => Some(refusal),
                _ => None,
            });
        }
        // A pin and a loan are logged once as well, until they end.
        said.retain(|said| !refusal::passes(said) && *said != refusal::pinned());
        assert_eq!(said, Vec::from_iter(new), "{:?}", self.done);
    }

    fn compare(&self) {
        let (machine, oracle) = (&self.world.machine, &self.oracle);
        let column = match (machine.is_attached(), machine.is_retired(), machine.serves()) {
            (false, ..) => Column::Detached,
            (_, true, _) => Column::Refused,
            (.., true) => Column::Serves,
            _ => Column::Waits,
        };
        let unit = |at: usize| {
            let region = machine.regions.iter().find(|r| r.span.range == span(at).range);
            region.map_or(Unit::Absent, |region| match region.place {
                RegionState::Wanted | RegionState::Lent => Unit::Out(region.due.is_none()),
                RegionState::Active => Unit::Served,
                RegionState::Refused => Unit::Left,
            })
        };
        let stuck = |at: usize| {
            let region = machine.regions.iter().find(|r| r.span.range == span(at).range);
            region.is_some_and(|region| region.half_released)
        };
        let found = Oracle {
            column,
            units: std::array::from_fn(unit),
            stuck: std::array::from_fn(stuck),
            pins: machine.pins,
            paused: machine.paused,
            shows: oracle.shows,
            store: oracle.store,
            gives_back: oracle.gives_back,
            refused: machine.reason().filter(|_| machine.is_retired()),
            said: oracle.said.clone(),
        };
        assert_eq!(format!("{found:?}"), format!("{oracle:?}"), "{:?}", self.done);
        assert_eq!(self.world.told, oracle.told(), "{:?}", self.done);
        if machine.serves() {
            assert_eq!(self.world.vouched, oracle.shows[1], "{:?}", self.done);
        }
        if oracle.column == Column::Waits && oracle.pins > 0 {
            assert_eq!(machine.reason(), Some(refusal::pinned()), "{:?}", self.done);
        }
    }
}

fn all_steps() -> Vec<Step> {
    let first = 0..MIB;
    let all = 0..UNITS * MIB;
    let events = [
        Event::Attach,
        Event::Add(span(0)),
        Event::Add(span(1)),
        Event::Hurry,
        Event::Remove(first.clone()),
        Event::Remove(all.clone()),
        Event::Lend(first.clone(), Lease::UntilTakenBack),
        Event::Lend(first.clone(), Lease::UntilFree),
        Event::Lend(all.clone(), Lease::UntilTakenBack),
        Event::TakeBack(first.clone()),
        Event::TakeBack(all),
        Event::LeaveAlone(first, refusal::protected()),
        Event::Note(refusal::unknown_memory(4096)),
        Event::Note(refusal::confidential()),
        Event::Refuse(refusal::confidential()),
        Event::Refuse(refusal::protected()),
        Event::Refuse(refusal::foreign_userfaultfd()),
        Event::Pin,
        Event::Unpin,
        Event::LetGo,
        Event::Pause,
        Event::Resume,
        Event::HidePins,
        Event::DirectIo,
        Event::Detach { unmerge: true },
        Event::Detach { unmerge: false },
    ];
    let mut steps: Vec<Step> = events.into_iter().map(Step::Tell).collect();
    for yes in [false, true] {
        steps.extend([Step::Store(yes), Step::GivesBack(yes)]);
    }
    steps
}

/// What leads to each state that a VM may be in.
fn states() -> Vec<Vec<Step>> {
    let serves = [Event::Attach, Event::Add(span(0)), Event::Add(span(2))];
    let told = |events: &[Event]| events.iter().cloned().map(Step::Tell).collect::<Vec<_>>();
    let with = |events: &[Event]| told(&[&serves[..], events].concat());
    let away = [vec![Step::Store(false)], told(&serves)].concat();
    let lend = |lease| Event::Lend(0..UNITS * MIB, lease);
    vec![
        vec![],
        told(&[Event::Pin]),
        told(&[Event::Pause]),
        told(&serves[..1]),
        away.clone(),
        [away.clone(), told(&[Event::Pin])].concat(),
        [away, told(&[lend(Lease::UntilTakenBack)])].concat(),
        with(&[]),
        with(&[Event::Pin]),
        with(&[Event::Pin, Event::Pin, Event::Pause]),
        with(&[Event::Pause]),
        with(&[lend(Lease::UntilTakenBack)]),
        with(&[lend(Lease::UntilFree)]),
        [
            vec![Step::GivesBack(false)],
            with(&[lend(Lease::UntilTakenBack), Event::Pin]),
        ]
        .concat(),
        with(&[Event::LeaveAlone(0..MIB, refusal::protected())]),
        [with(&[]), vec![Step::Store(false)], told(&[Event::Add(span(1))])].concat(),
        with(&[Event::Refuse(refusal::confidential())]),
        with(&[Event::Pin, Event::Refuse(refusal::confidential())]),
        with(&[Event::Pin, Event::Detach { unmerge: true }]),
    ]
}

#[test]
fn each_pair_of_events_in_each_state_is_as_documented() {
    let steps = all_steps();
    for state in states() {
        for first in &steps {
            for second in &steps {
                Both::new().play(state.iter().chain([first, second]));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_events_is_as_documented(steps in prop::collection::vec(prop::sample::select(all_steps()), 1..60)) {
        Both::new().play(&steps);
    }
}
