//! When the scanning thread sleeps, answers and reports, while there is work.

use crate::sys::cpu_budget::Pacer;
use std::time::{Duration, Instant};

/// Least time between two looks for questions while there is work.
const ANSWER_PERIOD: Duration = Duration::from_millis(10);
/// Least time between two reports while there is work: what the store counts itself is of now, and so is not to stand beside what
/// services said long ago.
pub(super) const REPORT_PERIOD: Duration = Duration::from_secs(1);
/// Debt of CPU time that is not worth sleeping for.
const SMALL_DEBT: Duration = Duration::from_millis(1);
/// Least time between two looks at the CPU time that was used: reading the clock costs more than many a small piece of work.
const LOOK_PERIOD: Duration = Duration::from_micros(500);

/// The CPU budget, and when it answered and reported last.
#[derive(Debug)]
pub(crate) struct Pace {
    pacer: Pacer,
    answered: Instant,
    reported: Instant,
    /// When the CPU time that was used was looked at last.
    looked: Instant,
}

impl Pace {
    /// For the calling thread, and a CPU budget in percent of a core.
    pub(super) fn new(cpu_percent: u32) -> Self {
        Self {
            pacer: Pacer::new(cpu_percent.into()),
            answered: Instant::now(),
            reported: Instant::now(),
            looked: Instant::now(),
        }
    }

    /// Another CPU budget, and the CPU time of all helpers, which counts against it.
    pub(super) fn set(&mut self, cpu_percent: u32, helpers_ns: u64) {
        self.pacer.charge_others(helpers_ns);
        self.pacer.set_percent(cpu_percent.into());
    }

    /// How long to sleep between two pieces of work, if it is worth it, and unless that was asked just before.
    pub(super) fn debt_between(&mut self) -> Option<Duration> {
        if self.looked.elapsed() < LOOK_PERIOD {
            return None;
        }
        self.debt()
    }

    /// How long to sleep now, if it is worth it.
    pub(super) fn debt(&mut self) -> Option<Duration> {
        self.looked = Instant::now();
        Some(self.pacer.debt()).filter(|debt| *debt > SMALL_DEBT)
    }

    /// Whether it is time to look for questions.
    pub(super) fn answers_are_due(&self) -> bool {
        self.answered.elapsed() >= ANSWER_PERIOD
    }

    /// Questions are answered now.
    pub(super) fn note_answers(&mut self) {
        self.answered = Instant::now();
    }

    /// Whether it is time to tell how far the work has come.
    pub(super) fn report_is_due(&self) -> bool {
        self.reported.elapsed() >= REPORT_PERIOD
    }

    /// The account is sent now.
    pub(super) fn note_report(&mut self) {
        self.reported = Instant::now();
    }
}
