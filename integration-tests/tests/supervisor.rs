//! A supervisor is told things in any order: nothing hangs, and no write is lost. (The state machine alone, and a supervisor without
//! guest memory, have tests in the engine.)
#![allow(unsafe_code)] // guest memory

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::refusal::left_over;
use vmm_dedup::{Breaks, Config, Error, HostRange, Options, ServiceStats, Setup, Status, Supervisor};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::{alone, need_userfaultfd};
use vmm_dedup_protocol::observer::Observer;
use vmm_dedup_protocol::refusal::Reason;

const PAGES: usize = 1024;
const PATIENCE: Duration = Duration::from_secs(60);
/// A question to a store that hangs takes 5 s; twice that is no hang.
const ANSWERED: Duration = Duration::from_secs(10);

struct Guest {
    supervisor: Supervisor,
    pages: Pages,
}

impl Guest {
    fn new() -> Self {
        let options = Options {
            vouch_for_pins: true,
            ..Options::default()
        };
        let guest = Self {
            supervisor: Supervisor::spawn(options).expect("it starts"),
            pages: Pages::map(PAGES),
        };
        guest.renew();
        guest
    }

    /// Fresh memory with the same content.
    fn renew(&self) {
        self.pages.renew();
        (0..PAGES).for_each(|page| self.pages.fill(page, twin(page)));
    }

    fn sharing(store: &StoreThread) -> Self {
        let guest = Self::new();
        guest.attach(store).expect("it fits");
        guest.add();
        guest.wait("sharing", |s| s.pages_mapped > PAGES as u64 / 4);
        guest
    }

    fn attach(&self, store: &StoreThread) -> Result<(), Error> {
        let config = Config {
            cpu_percent: 100,
            pass_period_ms: 10,
            breaks: Breaks::Kernel {
                heal_stall_us: 5000,
                heal_without_fork: true,
            },
            ..Config::default()
        };
        let store = store.socket();
        let agent = None;
        self.supervisor.attach(Setup { store, agent, config })
    }

    fn add(&self) {
        let range = HostRange::try_new(self.pages.address(0), PAGES * 4096).expect("aligned");
        // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
        unsafe { self.supervisor.add_range(range) };
    }

    fn wait(&self, what: &str, done: impl Fn(&ServiceStats) -> bool) {
        let start = Instant::now();
        while !self.supervisor.stats().is_some_and(|stats| done(&stats)) {
            let (status, stats) = (self.supervisor.status(), self.supervisor.stats());
            assert!(
                start.elapsed() < PATIENCE,
                "{what} does not happen: {status:?} {stats:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn check(&self) {
        assert!((0..PAGES).all(|page| self.pages.holds(page, twin(page))));
    }
}

/// Each page has a twin.
fn twin(page: usize) -> u64 {
    (page % (PAGES / 2)) as u64 + 1
}

#[test]
fn attaching_twice_changes_nothing() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::sharing(&store);
    let again = guest.attach(&store);
    assert!(matches!(again, Err(Error::Attached)), "{again:?}");
    guest.add();
    assert_eq!(guest.supervisor.status(), Status::Serving);
    guest.wait("sharing", |s| {
        s.pages == PAGES as u64 && s.pages_mapped > PAGES as u64 / 4
    });
    guest.supervisor.detach(true).expect("it ends");
    guest.check();
}

#[test]
fn a_vm_may_end_at_any_time_while_it_starts() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::new();
    let mut merged = 0;
    for round in 0..40u64 {
        // What a VM has left shared is no next one's memory.
        guest.renew();
        guest.attach(&store).expect("it fits");
        guest.add();
        // From before the store is asked until pages are merged.
        std::thread::sleep(Duration::from_millis(4 * round));
        if round >= 36 {
            guest.wait("merging", |stats| stats.merges_total > 0);
        }
        merged += usize::from(
            guest
                .supervisor
                .stats()
                .is_some_and(|stats| stats.merges_total > 0),
        );
        guest.supervisor.detach(round % 2 == 0).expect("it ends");
        assert_eq!(guest.supervisor.status(), Status::Detached);
        guest.check();
    }
    eprintln!("{merged} of 40 ended after pages were merged");
}

#[test]
fn pins_come_and_go_while_copies_are_healed_and_no_write_is_lost() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::sharing(&store);
    let (pages, ends) = (guest.pages, Arc::new(AtomicBool::new(false)));
    let told = ends.clone();
    // The guest writes pages and restores them, so that there are copies to heal all the time.
    let writer = std::thread::spawn(move || {
        let mut round = 0u64;
        while !told.load(Ordering::Acquire) {
            round += 1;
            for page in (0..PAGES).step_by(8) {
                pages.store(page, 5, round);
                assert_eq!(pages.load(page, 5), round, "a write is lost");
                pages.fill(page, twin(page));
            }
            std::thread::sleep(Duration::from_millis(60));
        }
    });
    guest.wait("healing", |s| s.heals_total > 0);
    for pin in 0..20 {
        // Passes come every 10 ms, writes every 60: at any time of both.
        std::thread::sleep(Duration::from_millis(7 * pin));
        let pinned = guest.supervisor.pinned().expect("it is given back");
        assert_eq!(guest.supervisor.stats().map(|s| s.pages_mapped), Some(0));
        drop(pinned);
        guest.wait("sharing", |s| s.pages_mapped > 0);
    }
    ends.store(true, Ordering::Release);
    writer.join().expect("no write is lost");
    guest.supervisor.detach(true).expect("it ends");
    guest.check();
}

#[test]
fn memory_that_a_vm_has_left_shared_is_refused_by_that_reason_until_it_is_new() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::sharing(&store);
    guest.supervisor.detach(false).expect("it ends");
    guest.attach(&store).expect("it fits");
    guest.add();
    // Whether or not it was tried by itself before.
    let started = guest.supervisor.start();
    assert!(started.is_err(), "{started:?}");
    assert_eq!(guest.supervisor.status(), Status::Waiting(left_over()));
    guest.check();
    guest.supervisor.detach(false).expect("it ends");
    guest.pages.renew();
    (0..PAGES).for_each(|page| guest.pages.fill(page, twin(page)));
    guest.attach(&store).expect("it fits");
    guest.add();
    guest.wait("sharing", |s| s.pages_mapped > PAGES as u64 / 4);
    guest.supervisor.detach(true).expect("it ends");
    guest.check();
}

/// Memory that others can map, which is never unmapped.
fn shared_memory() -> HostRange {
    const LEN: usize = PAGES * 4096;
    // SAFETY: new memory at no given address.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            LEN,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    HostRange::try_new(at as usize, LEN).expect("aligned")
}

/// The one VM that the store has: why it is refused, if it is.
fn only_vm(store: &StoreThread) -> Option<Option<Reason>> {
    let (_, vms) = Observer::connect(&store.socket()).ok()?.stats().ok()?;
    (vms.len() == 1).then(|| vms[0].reason)
}

#[test]
fn whose_memory_is_refused_is_announced_until_some_of_it_is_served() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::new();
    guest.attach(&store).expect("it fits");
    // Each is tried, and fails by the same reason.
    for _ in 0..2 {
        // SAFETY: as promised.
        unsafe { guest.supervisor.add_range(shared_memory()) };
        let started = guest.supervisor.start();
        assert!(started.is_err(), "{started:?}");
        let start = Instant::now();
        while only_vm(&store) != Some(Some(Reason::SharedMemory)) {
            assert!(start.elapsed() < PATIENCE, "it is not announced");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    guest.add();
    guest.supervisor.start().expect("a service runs");
    assert_eq!(guest.supervisor.status(), Status::Serving);
    assert_eq!(only_vm(&store), Some(None));
    guest.supervisor.detach(true).expect("it ends");
}

#[test]
fn starting_goes_well_if_some_memory_is_served_whichever_came_first() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    for shared_first in [true, false] {
        let guest = Guest::new();
        guest.attach(&store).expect("it fits");
        let add_shared = || {
            // SAFETY: as promised.
            unsafe { guest.supervisor.add_range(shared_memory()) }
        };
        if shared_first {
            add_shared();
            guest.add();
        } else {
            guest.add();
            add_shared();
        }
        let started = guest.supervisor.start();
        assert!(started.is_ok(), "{started:?}");
        assert_eq!(guest.supervisor.status(), Status::Serving);
        guest.supervisor.detach(true).expect("it ends");
    }
}

#[test]
fn a_vm_ends_in_time_while_its_store_is_away() {
    need_userfaultfd!();
    let _alone = alone();
    for unmerge in [true, false] {
        let store = StoreThread::start();
        let guest = Guest::sharing(&store);
        drop(store);
        (0..PAGES)
            .step_by(4)
            .for_each(|page| guest.pages.store(page, 9, 9));
        let start = Instant::now();
        guest.supervisor.detach(unmerge).expect("it ends");
        let waited = start.elapsed();
        assert!(waited < ANSWERED, "{waited:?}");
        (0..PAGES).step_by(4).for_each(|page| {
            assert_eq!(guest.pages.load(page, 9), 9);
            guest.pages.fill(page, twin(page));
        });
        guest.check();
        // The next VM has another store, and memory that maps none.
        guest.pages.renew();
        (0..PAGES).for_each(|page| guest.pages.fill(page, twin(page)));
        let store = StoreThread::start();
        guest.attach(&store).expect("it fits");
        guest.add();
        guest.wait("sharing", |s| s.pages_mapped > 0);
        guest.supervisor.detach(true).expect("it ends");
        guest.check();
    }
}
