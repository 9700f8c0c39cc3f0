//! Yielding and polling: what the scanning thread does between two pieces of work.

use crate::error::Error;
use crate::scan::pace::REPORT_PERIOD;
use crate::scan::pass::Pass;
use crate::store::connection::Store;
use crate::sys::{late_log, proc};

impl Pass {
    /// Between two pieces of work: sleeps if the CPU budget is used up, tells the store how far the work has come, and notices the wish
    /// to stop or pause.
    pub(super) fn yield_and_poll(&mut self) -> Result<(), Error> {
        late_log::tell();
        let helpers = self.helpers_cpu_ns();
        self.pace.set(self.control.cpu_percent(), helpers);
        if self.pace.answers_are_due() || self.has_questions() {
            self.answer_now()?;
        }
        let mut debt = self.pace.debt_between();
        if self.pace.report_is_due() {
            self.report_on_the_way()?;
        } else if debt.is_some() {
            self.fill_stats();
            self.control.publish(&self.account.stats);
        }
        while let Some(time) = debt.filter(|_| !self.control.interrupted()) {
            let time = time.min(REPORT_PERIOD);
            self.control.sleep(time, self.session.store().map(Store::socket));
            self.answer_now()?;
            if self.pace.report_is_due() {
                self.report_on_the_way()?;
            }
            self.pace.set(self.control.cpu_percent(), helpers);
            debt = self.pace.debt();
        }
        if self.control.interrupted() {
            Err(Error::Stopped)
        } else {
            Ok(())
        }
    }

    /// The CPU time of all helpers, which counts against the budget.
    fn helpers_cpu_ns(&mut self) -> u64 {
        let engines =
            self.twins.finder.search().helper_cpu_ns() + self.merging.verify_engine().helper_cpu_ns();
        let rebuilds = self.space.packer.as_ref().map_or(0, |packer| packer.cpu_ns());
        self.space.breaker.stats().0.cpu_ns + engines + self.heard.cpu_ns() + rebuilds
    }

    /// Between two steps of work for which merging rests, and which somebody waits for: sleeps if the CPU budget is used up.
    ///
    /// # Errors
    /// [`Error::Stopped`]: another call waits that comes first.
    pub(super) fn keep_budget_in_standby(&mut self) -> Result<(), Error> {
        let helpers = self.helpers_cpu_ns();
        self.pace.set(self.control.cpu_percent(), helpers);
        let mut debt = self.pace.debt_between();
        while let Some(time) = debt.filter(|_| !self.control.is_waited_for()) {
            let store = self.session.store().map(Store::socket);
            self.control.sleep_in_standby(time.min(REPORT_PERIOD), store);
            self.pace.note_answers();
            self.try_answer_questions();
            self.show_progress();
            self.pace.set(self.control.cpu_percent(), helpers);
            debt = self.pace.debt();
        }
        if self.control.is_waited_for() {
            Err(Error::Stopped)
        } else {
            Ok(())
        }
    }

    fn answer_now(&mut self) -> Result<(), Error> {
        self.pace.note_answers();
        self.answer_questions()
    }

    /// To be called between the steps of making memory private, which can take long.
    pub(super) fn show_progress(&mut self) {
        if self.pace.report_is_due()
            && let Err(error) = self.report_on_the_way()
        {
            self.lose_store(&error);
        }
        if self.pace.answers_are_due() {
            self.pace.note_answers();
            self.try_answer_questions();
        }
    }

    /// Publishes the account, and sends it to the store; the CPU time until then was for that.
    pub(super) fn report(&mut self) {
        if let Err(error) = self.send_account() {
            self.lose_store(&error);
        }
        self.account.lap(|cpu| &mut cpu.store);
    }

    /// The same within a pass: what the CPU time until then was for is booked by whoever knows.
    fn report_on_the_way(&mut self) -> Result<(), Error> {
        let since = proc::thread_cpu_ns();
        let sent = self.send_account();
        self.account.lap_within(since, |cpu| &mut cpu.store);
        sent
    }

    fn send_account(&mut self) -> Result<(), Error> {
        self.fill_stats();
        self.control.publish(&self.account.stats);
        self.pace.note_report();
        self.session.report(&self.account.stats)
    }

    /// Looks for a store if there is none. A new one is told at once what was done before it: that does not count as done there.
    pub(super) fn find_store(&mut self) {
        if self.session.find_store(&mut self.map) {
            self.report();
        }
    }
}
