//! Scanning threads that die under the filters, and who cleans up behind them.

use crate::guest::{Guest, PAGES, PATIENCE, range, twins};
use crate::vmm::recorded;
use std::sync::mpsc;
use vmm_dedup::seccomp::Part;
use vmm_dedup::{Breaks, Call, Config, DedupService, Injection, Times};
use vmm_dedup_integration_tests::dying::kill_scanner;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::seccomp::{Recorder, Seen};

/// Some registrations do not end, so that protection is ended instead.
fn lack() -> Injection {
    Injection::begin(Call::Unregister, libc::ENOMEM, Times::Every(2))
}

/// Writes that cut what is shared in pieces, each of which is protected by itself.
fn cut(pages: &Pages) {
    (0..PAGES / 2).step_by(8).for_each(|page| pages.store(page, 0, 1));
}

impl Guest {
    /// The scanning thread dies, and with it all that it would have ended itself: once what writers wait for, once what is packed.
    pub(crate) fn dies(&mut self) {
        let pages = twins();
        self.attach(Config {
            breaks: Breaks::managed(64, 0),
            ..Config::default()
        });
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.shares();
        cut(&pages);
        self.wait("a break", |s| s.breaks_managed_total > 0);
        kill_scanner(|| pages.store(0, 0, 2));
        let lack = lack();
        assert!(self.supervisor.pinned().is_err(), "the service has died");
        assert!(lack.failed() > 0, "nothing has failed");
        drop(lack);
        self.supervisor.detach(true).expect("there is nothing to end");
        let packed = self.packed();
        kill_scanner(|| packed.store(0, 0, 2));
        assert!(self.supervisor.pinned().is_err(), "the service has died");
        assert!((0..PAGES).all(|page| packed.load(page, 7) == page as u64 + 1));
        self.supervisor.detach(true).expect("there is nothing to end");
    }

    /// The same where a VMM has started the service itself.
    pub(crate) fn dies_without_a_supervisor(&mut self, filtered: bool) -> Vec<Seen> {
        let (store, pages) = (self.store.socket(), twins());
        let all = range(&pages, 0, PAGES);
        let (tell_sharing, sharing) = mpsc::channel();
        let (tell_dead, dead) = mpsc::channel();
        let killer = std::thread::spawn(move || {
            sharing.recv_timeout(PATIENCE).expect("it shares");
            cut(&pages);
            kill_scanner(|| pages.store(0, 0, 2));
            tell_dead.send(()).expect("somebody waits");
        });
        let seen = recorded(Recorder::new(), Part::Start, filtered, move || {
            let config = Config {
                name: "alone".into(),
                breaks: Breaks::managed(64, 0),
                cpu_percent: 100,
                pass_period_ms: 10,
                ..Config::default()
            };
            // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
            let service = unsafe { DedupService::start_on_ranges(&[all], &store, config) };
            let service = service.expect("it starts");
            while service.pass().expect("a pass").pages_mapped <= PAGES as u64 / 4 {}
            tell_sharing.send(()).expect("somebody waits");
            dead.recv().expect("it dies");
            let lack = lack();
            assert!(service.stop(true).is_err(), "the service has died");
            assert!(lack.failed() > 0, "nothing has failed");
        });
        killer.join().expect("it has died");
        seen
    }
}
