//! Yielding and polling: what the scanning thread does between two pieces of work.

use crate::error::Error;
use crate::scan::cpu_budget::Pacer;
use crate::scan::pass::Pass;
use crate::store::connection::Store;
use crate::sys::late_log;
use std::time::{Duration, Instant};

/// Least time between two looks for questions while there is work.
const ANSWER_PERIOD: Duration = Duration::from_millis(10);
/// Time between two reports while memory is made private again.
const REPORT_PERIOD: Duration = Duration::from_millis(250);
/// Debt of CPU time that is not worth sleeping for.
const SMALL_DEBT: Duration = Duration::from_millis(1);

/// When it polled last.
#[derive(Debug)]
pub(crate) struct Pace {
    pacer: Pacer,
    answered: Instant,
    reported: Instant,
}

impl Pace {
    /// For the calling thread, and a CPU budget in percent of a core.
    pub(super) fn new(cpu_percent: u32) -> Self {
        Self {
            pacer: Pacer::new(cpu_percent),
            answered: Instant::now(),
            reported: Instant::now(),
        }
    }
}

impl Pass {
    /// Between two pieces of work: sleeps if the CPU budget is used up, and notices the wish to stop or pause.
    pub(super) fn yield_and_poll(&mut self) -> Result<(), Error> {
        late_log::tell();
        let engines = self.finder.search().helper_cpu_ns() + self.planner.verify_engine().helper_cpu_ns();
        let helpers = self.space.breaker.stats().0.cpu_ns + engines;
        self.pace.pacer.charge_others(helpers);
        self.pace.pacer.set_percent(self.control.cpu_percent());
        if self.pace.answered.elapsed() >= ANSWER_PERIOD || self.has_questions() {
            self.answer_now()?;
        }
        let mut debt = self.pace.pacer.debt();
        if debt > SMALL_DEBT {
            self.fill_stats();
            self.control.publish(&self.account.stats);
        }
        while debt > SMALL_DEBT && !self.control.interrupted() {
            self.control.sleep(debt, self.session.store().map(Store::socket));
            self.answer_now()?;
            self.pace.pacer.set_percent(self.control.cpu_percent());
            debt = self.pace.pacer.debt();
        }
        if self.control.interrupted() {
            Err(Error::Stopped)
        } else {
            Ok(())
        }
    }

    fn answer_now(&mut self) -> Result<(), Error> {
        self.pace.answered = Instant::now();
        self.answer()
    }

    /// To be called between the steps of making memory private, which can take long.
    pub(super) fn show_progress(&mut self) {
        if self.pace.reported.elapsed() >= REPORT_PERIOD {
            self.report();
            self.try_answer();
        }
    }

    /// Publishes the account, and sends it to the store.
    pub(super) fn report(&mut self) {
        self.fill_stats();
        self.control.publish(&self.account.stats);
        self.pace.reported = Instant::now();
        if let Err(error) = self.session.report(&self.account.stats) {
            self.lose_store(&error);
        }
        self.account.lap(|cpu| &mut cpu.store);
    }
}
