//! How the VMM's threads talk to the scanning thread.

use crate::config::{Breaks, Config};
use crate::error::Error;
use crate::hints::reads::Reads;
use crate::memory::layout::HostRange;
use crate::store::connection::Explained;
use crate::sys::bell::Bell;
use crate::unmerge::cow::Breaker;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::control::{Settings, Switch};
use vmm_dedup_protocol::stats::ServiceStats;

/// Time between two signs of life while nothing is merged.
const REST_PERIOD: Duration = Duration::from_secs(1);

/// What may happen to guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It is new.
    Add,
    /// It is about to be unmapped or replaced.
    Remove,
    /// It goes back to anonymous memory, and is left alone.
    Release,
    /// It may be worked on again.
    Resume,
}

/// What the scanning thread is asked to do next.
#[derive(Debug)]
pub(crate) enum Command {
    /// One pass, now; then tell.
    Pass(Sender<ServiceStats>),
    /// Bring everything back to anonymous memory; then tell, whoever asked.
    Unmerge(Option<Sender<Result<(), Error>>>),
    /// A change of guest memory; then tell.
    Change(Change, HostRange, Sender<Result<(), Error>>),
    /// A file was opened for direct I/O: look whether that may meet merging; then tell.
    DirectIo(Sender<Result<(), Error>>),
    /// From now on pages may be pinned without any file that shows it; then tell.
    HiddenPins(Sender<Result<(), Error>>),
    /// Tell: nothing is scanned and merged any more, if the VMM wants peace.
    Rest(Sender<()>),
    /// End.
    Stop(Ending),
}

/// What becomes of what is shared when a service ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It goes back to anonymous memory first.
    Unmerge,
    /// It stays shared for as long as the guest does not write it.
    StayShared,
    /// The memory is about to go, and with it all that maps slots: the store may count on it at once. (What is still read of it until
    /// then stays right: a slot is not written again in a file that somebody maps.)
    MemoryGoes,
}

impl Command {
    /// Whether others come first, who may be about to.
    fn takes_long(&self) -> bool {
        matches!(self, Command::Pass(_) | Command::Unmerge(_))
    }

    /// Whether what takes long ends early for it, or lets it come first.
    fn is_urgent(&self) -> bool {
        matches!(
            self,
            Command::Change(..) | Command::DirectIo(_) | Command::HiddenPins(_) | Command::Rest(_)
        )
    }
}

/// Why the scanning thread goes on.
#[derive(Debug)]
pub(crate) enum Event {
    Command(Command),
    /// Something to answer, from the store or a thread of the VMM, or changed settings to show.
    Question,
    /// It is time for the next pass, or to start or stop standing by.
    Due,
}

/// Guest physical addresses to explain (`None`: all), and where to.
type Question = (Option<Range<u64>>, Sender<Explained>);

#[derive(Debug, Default)]
struct Inner {
    /// Nobody answers any more.
    closed: bool,
    commands: Vec<Command>,
    questions: Vec<Question>,
    stats: ServiceStats,
}

/// Shared between the service's handle and its threads.
#[derive(Debug)]
pub(crate) struct Control {
    inner: Mutex<Inner>,
    bell: Bell,
    /// By the VMM, for as long as it wants peace.
    pause: AtomicBool,
    /// By an operator.
    off: AtomicBool,
    stop: AtomicBool,
    /// Shared with the thread that listens to the guest's agent.
    cpu_percent: Arc<AtomicU32>,
    pass_period_ms: AtomicU64,
    stop_target_us: AtomicU64,
    /// Settings have been changed since they were last shown.
    changed: AtomicBool,
    /// The VMM vouches that nobody pins guest memory unseen.
    pins_are_visible: AtomicBool,
    /// An urgent command waits, and with it a thread of the VMM.
    urgent: AtomicBool,
    /// More commands are about to come, and nothing else is begun until they have.
    held: AtomicBool,
    reads: Reads,
}

impl Control {
    /// What the VMM has read into guest memory.
    pub(crate) fn reads(&self) -> &Reads {
        &self.reads
    }
}

impl Control {
    pub(crate) fn new(config: &Config) -> Result<Self, Error> {
        Ok(Self {
            inner: Mutex::default(),
            bell: Bell::new().map_err(Error::Eventfd)?,
            pause: AtomicBool::new(false),
            off: AtomicBool::new(!config.enabled),
            stop: AtomicBool::new(false),
            urgent: AtomicBool::new(false),
            held: AtomicBool::new(false),
            reads: Reads::new(),
            cpu_percent: Arc::new(AtomicU32::new(config.cpu_percent)),
            pass_period_ms: AtomicU64::new(config.pass_period_ms),
            stop_target_us: AtomicU64::new(config.stop_target_us),
            changed: AtomicBool::new(false),
            pins_are_visible: AtomicBool::new(false),
        })
    }

    pub(crate) fn order(&self, command: Command) {
        if matches!(command, Command::Stop(_)) {
            self.stop.store(true, Ordering::Release);
        }
        let mut inner = self.lock();
        if !inner.closed {
            if command.is_urgent() {
                self.urgent.store(true, Ordering::Release);
            }
            inner.commands.push(command);
        }
        self.bell.ring();
    }

    pub(crate) fn ask(&self, addresses: Option<Range<u64>>, tell: Sender<Explained>) {
        let mut inner = self.lock();
        if !inner.closed {
            inner.questions.push((addresses, tell));
        }
        self.bell.ring();
    }

    /// Whether nobody answers any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Nothing is answered any more: whoever waits, or asks later, learns it.
    pub(crate) fn close(&self) {
        let mut inner = self.lock();
        inner.closed = true;
        inner.commands.clear();
        inner.questions.clear();
    }

    pub(crate) fn take_questions(&self) -> Vec<Question> {
        std::mem::take(&mut self.lock().questions)
    }

    /// Changes settings, all or none. Bringing memory back is left to whoever calls.
    pub(crate) fn apply(&self, settings: &Settings, breaker: &Breaker) -> Result<(), Error> {
        let reserve = settings.reserve_pages.map(|pages| pages as usize);
        if let (Some(pages), false) = (reserve, breaker.managed()) {
            return Err(Error::Config {
                field: "reserve_pages",
                value: pages.to_string(),
                rule: "only managed breaks have a reserve",
            });
        }
        // What a service may start with it may be changed to.
        let wanted = Config {
            cpu_percent: settings.cpu_percent.unwrap_or(self.cpu_percent()),
            pass_period_ms: settings.pass_period_ms.map_or(self.pass_period_ms(), u64::from),
            stop_target_us: settings.stop_target_us.map_or(self.stop_target_us(), u64::from),
            breaks: reserve.map_or(Breaks::KERNEL, |pages| Breaks::managed(pages, 0)),
            ..Config::default()
        };
        wanted.validate()?;
        if let Some(pages) = reserve {
            breaker.set_reserve_pages(pages);
        }
        if let Some(percent) = settings.cpu_percent {
            self.cpu_percent.store(percent, Ordering::Release);
        }
        if let Some(ms) = settings.pass_period_ms {
            self.pass_period_ms.store(ms.into(), Ordering::Release);
        }
        if let Some(us) = settings.stop_target_us {
            self.stop_target_us.store(us.into(), Ordering::Release);
        }
        if let Some(switch) = settings.switch {
            self.off.store(switch != Switch::On, Ordering::Release);
        }
        self.show_changes();
        Ok(())
    }

    /// Settings have been changed: has them shown.
    pub(crate) fn show_changes(&self) {
        self.changed.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Whether settings are to be shown that have been changed.
    pub(crate) fn take_changed(&self) -> bool {
        self.changed.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn set_paused(&self, paused: bool) {
        self.pause.store(paused, Ordering::Release);
        self.bell.ring();
    }

    /// More commands are about to come (`true`), or have come. Until then [`Self::next`] has nothing but these: each of them would
    /// wait otherwise for what was begun in front of it, such as a try at a store that hangs.
    pub(crate) fn hold(&self, held: bool) {
        if self.held.swap(held, Ordering::AcqRel) && !held {
            self.bell.ring();
        }
    }

    pub(crate) fn vouch_for_pins(&self, visible: bool) {
        self.pins_are_visible.store(visible, Ordering::Release);
    }

    /// Whether the VMM vouches that nobody pins guest memory unseen.
    pub(crate) fn pins_are_visible(&self) -> bool {
        self.pins_are_visible.load(Ordering::Acquire)
    }

    /// Whether nothing is to be scanned and merged for now.
    pub(crate) fn stands_by(&self) -> bool {
        self.pause.load(Ordering::Acquire) || self.is_off()
    }

    pub(crate) fn is_off(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }

    pub(crate) fn cpu_percent(&self) -> u32 {
        self.cpu_percent.load(Ordering::Acquire)
    }

    /// The CPU budget, in percent of a core, as it is at any time.
    pub(crate) fn cpu_budget(&self) -> Arc<AtomicU32> {
        self.cpu_percent.clone()
    }

    /// Time from the start of one pass to that of the next, milliseconds.
    pub(crate) fn pass_period_ms(&self) -> u64 {
        self.pass_period_ms.load(Ordering::Acquire)
    }

    pub(crate) fn stop_target_us(&self) -> u64 {
        self.stop_target_us.load(Ordering::Acquire)
    }

    /// Whether a pass should end early.
    pub(crate) fn interrupted(&self) -> bool {
        self.is_waited_for() || self.stands_by()
    }

    /// Whether a thread of the VMM waits that comes first, merging or not.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.stop.load(Ordering::Acquire) || self.urgent.load(Ordering::Acquire)
    }

    pub(crate) fn publish(&self, stats: &ServiceStats) {
        self.lock().stats = *stats;
    }

    pub(crate) fn stats(&self) -> ServiceStats {
        self.lock().stats
    }

    /// Sleeps, but no longer than until there is something to do or to answer.
    pub(crate) fn sleep(&self, time: Duration, store: Option<BorrowedFd<'_>>) {
        if !self.interrupted() {
            self.bell.wait(time, store);
        }
    }

    /// The same while nothing is to be scanned and merged.
    pub(crate) fn sleep_in_standby(&self, time: Duration, store: Option<BorrowedFd<'_>>) {
        if !self.is_waited_for() {
            self.bell.wait(time, store);
        }
    }

    /// Waits for what comes next, at the latest the next pass, or sign of life if the thread stands by now (`standing_by`). `began`: when the
    /// last one did.
    pub(crate) fn next(
        &self,
        began: Option<Instant>,
        standing_by: bool,
        store: Option<BorrowedFd<'_>>,
    ) -> Event {
        loop {
            {
                let mut inner = self.lock();
                let held = self.held.load(Ordering::Acquire);
                let next = inner
                    .commands
                    .iter()
                    .position(|command| !(held && command.takes_long()));
                if let Some(next) = next {
                    let command = inner.commands.remove(next);
                    self.urgent
                        .store(inner.commands.iter().any(Command::is_urgent), Ordering::Release);
                    return Event::Command(command);
                }
                if held {
                    drop(inner);
                    self.bell.wait(REST_PERIOD, None);
                    continue;
                }
                if !inner.questions.is_empty() || self.changed.load(Ordering::Acquire) {
                    return Event::Question;
                }
            }
            let period = match standing_by {
                true => REST_PERIOD,
                false => Duration::from_millis(self.pass_period_ms()),
            };
            let left = began.map_or(Duration::ZERO, |began| period.saturating_sub(began.elapsed()));
            if left.is_zero() || standing_by != self.stands_by() {
                return Event::Due;
            }
            if self.bell.wait(left, store) {
                return Event::Question;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    /// Long enough for a thread that waits for nothing.
    const AT_ONCE: Duration = Duration::from_millis(100);

    #[test]
    fn while_more_commands_are_to_come_nothing_else_is_begun() {
        let control = Control::new(&Config::default()).unwrap();
        let (asks, _answers) = mpsc::channel();
        let (rests, _rested) = mpsc::channel();
        control.hold(true);
        // A pass is due as well: there was none. And one is asked for.
        let (wants, _has) = mpsc::channel();
        control.order(Command::Pass(wants));
        control.ask(None, asks);
        thread::scope(|scope| {
            let next = scope.spawn(|| control.next(None, false, None));
            thread::sleep(AT_ONCE);
            assert!(!next.is_finished());
            control.order(Command::Rest(rests));
            let command = next.join().unwrap();
            assert!(matches!(command, Event::Command(Command::Rest(_))), "{command:?}");
            let next = scope.spawn(|| control.next(None, false, None));
            thread::sleep(AT_ONCE);
            assert!(!next.is_finished());
            control.hold(false);
            let pass = next.join().unwrap();
            assert!(matches!(pass, Event::Command(Command::Pass(_))), "{pass:?}");
            let question = control.next(None, false, None);
            assert!(matches!(question, Event::Question), "{question:?}");
        });
    }
}
