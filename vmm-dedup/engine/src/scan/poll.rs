//! Yielding and polling: what the scanning thread does between two pieces of work.

use crate::error::Error;
use crate::scan::pass::Pass;
use crate::store::connection::Store;
use crate::sys::late_log;

impl Pass {
    /// Between two pieces of work: sleeps if the CPU budget is used up, and notices the wish to stop or pause.
    pub(super) fn yield_and_poll(&mut self) -> Result<(), Error> {
        late_log::tell();
        let engines =
            self.twins.finder.search().helper_cpu_ns() + self.merging.verify_engine().helper_cpu_ns();
        let rebuilds = self.space.packer.as_ref().map_or(0, |packer| packer.cpu_ns());
        let helpers = self.space.breaker.stats().0.cpu_ns + engines + self.heard.cpu_ns() + rebuilds;
        self.pace.set(self.control.cpu_percent(), helpers);
        if self.pace.answers_are_due() || self.has_questions() {
            self.answer_now()?;
        }
        let mut debt = self.pace.debt_between();
        if debt.is_some() {
            self.fill_stats();
            self.control.publish(&self.account.stats);
        }
        while let Some(time) = debt.filter(|_| !self.control.interrupted()) {
            self.control.sleep(time, self.session.store().map(Store::socket));
            self.answer_now()?;
            self.pace.set(self.control.cpu_percent(), helpers);
            debt = self.pace.debt();
        }
        if self.control.interrupted() {
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
        if self.pace.report_is_due() {
            self.report();
            self.try_answer_questions();
        }
    }

    /// Publishes the account, and sends it to the store.
    pub(super) fn report(&mut self) {
        self.fill_stats();
        self.control.publish(&self.account.stats);
        self.pace.note_report();
        if let Err(error) = self.session.report(&self.account.stats) {
            self.lose_store(&error);
        }
        self.account.lap(|cpu| &mut cpu.store);
    }
}
