//! A supervisor is told things in any order: nothing hangs, and no write is lost. (The state machine alone, and a supervisor without
//! guest memory, have tests in the engine.)
#![allow(unsafe_code)] // guest memory

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use vmm_dedup::refusal::{confidential, left_over, protected};
use vmm_dedup::seccomp::Part;
use vmm_dedup::{
    AgentSocket, Breaks, Config, Error, HostRange, Lease, Options, ServiceStats, Setup, Status, Supervisor,
    Switch,
};
use vmm_dedup_integration_tests::dying::kill_scanner;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::{alone, need_userfaultfd};
use vmm_dedup_protocol::control::Settings;
use vmm_dedup_protocol::observer::Observer;
use vmm_dedup_protocol::refusal::Reason;

const PAGES: usize = 1024;
/// What is taken for memory of its own by calls that concern a part.
const PART: usize = PAGES / 4;
const PATIENCE: Duration = Duration::from_secs(60);
/// A question to a store that hangs takes 5 s; four times that is no hang.
const ANSWERED: Duration = Duration::from_secs(20);
/// A supervisor that nobody calls looks every 10 s whether its service lives.
const FOUND_DEAD: Duration = Duration::from_secs(60);

struct Guest {
    supervisor: Supervisor,
    pages: Pages,
}

impl Guest {
    fn new() -> Self {
        Self::with(Options::default())
    }

    fn with(options: Options) -> Self {
        let options = Options {
            vouch_for_pins: true,
            ..options
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
        self.attach_at(store.socket())
    }

    fn attach_at(&self, store: std::path::PathBuf) -> Result<(), Error> {
        let (agent, config) = (None, config());
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

fn config() -> Config {
    Config {
        cpu_percent: 100,
        pass_period_ms: 10,
        breaks: Breaks::Kernel {
            heal_stall_us: 5000,
            heal_without_fork: true,
        },
        ..Config::default()
    }
}

/// Each page has a twin.
fn twin(page: usize) -> u64 {
    (page % (PAGES / 2)) as u64 + 1
}

/// A pass takes as long as the CPU budget makes it; whoever asks for one waits for it alone.
#[test]
fn a_pass_keeps_nobody_else_waiting() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let guest = Arc::new(Guest::sharing(&store));
    let (goes_on, stands) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let mut first = true;
    let observer = vmm_dedup::Observer::begin(move |_| {
        let is_scanner = std::thread::current().name() == Some("dedup-scan");
        if is_scanner && std::mem::take(&mut first) {
            _ = tell.send(());
            _ = stands.recv();
        }
    });
    let passes = {
        let guest = guest.clone();
        std::thread::spawn(move || guest.supervisor.pass())
    };
    told.recv_timeout(PATIENCE).expect("it works");
    let asks = {
        let (guest, (tell, told)) = (guest.clone(), mpsc::channel());
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            tell.send(guest.supervisor.with_service(|service| service.is_some()))
        });
        told.recv_timeout(ANSWERED)
    };
    goes_on.send(()).expect("it waits");
    assert_eq!(asks, Ok(Some(true)));
    drop(observer);
    assert!(passes.join().expect("no panic").is_ok());
    guest.check();
}

/// To give everything back takes as long as the CPU budget makes it; whoever asks for that waits for it alone.
#[test]
fn giving_everything_back_keeps_nobody_else_waiting() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Arc::new(Guest::sharing(&store));
    guest.wait("sharing all", |s| s.pages_mapped == PAGES as u64);
    let (goes_on, stands) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let (answered, steps) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let (is_answered, seen) = (answered.clone(), steps.clone());
    let observer = vmm_dedup::Observer::begin(move |site| {
        let is_scanner = std::thread::current().name() == Some("dedup-scan");
        // A step of giving back.
        if !is_scanner || site.call != vmm_dedup::Call::Remap {
            return;
        }
        let mut seen = seen.lock().expect("no panic");
        if seen.is_empty() {
            _ = tell.send(());
            _ = stands.recv();
        }
        let start = Instant::now();
        while !seen.is_empty() && !is_answered.load(Ordering::Acquire) && start.elapsed() < ANSWERED / 4 {
            std::thread::sleep(Duration::from_millis(5));
        }
        seen.push(is_answered.load(Ordering::Acquire));
    });
    let gives_back = {
        let guest = guest.clone();
        let off = Settings {
            switch: Some(Switch::OffUnmerge),
            ..Settings::default()
        };
        std::thread::spawn(move || guest.supervisor.set(off))
    };
    told.recv_timeout(PATIENCE).expect("it works");
    let asks = {
        let (guest, answered) = (guest.clone(), answered.clone());
        std::thread::spawn(move || {
            let done = guest.supervisor.direct_io_opened();
            answered.store(true, Ordering::Release);
            done
        })
    };
    // By then it waits.
    std::thread::sleep(Duration::from_millis(200));
    goes_on.send(()).expect("it waits");
    asks.join().expect("no panic").expect("nothing is open");
    gives_back.join().expect("no panic").expect("it goes back");
    drop(observer);
    let steps = steps.lock().expect("no panic");
    assert!(steps.contains(&true), "it waits for all steps: {steps:?}");
    guest.wait("giving back", |s| s.pages_mapped == 0);
    guest.check();
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

#[test]
fn memory_that_another_supervisor_has_is_refused_and_that_one_goes_on() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::sharing(&store);
    let second = Guest {
        supervisor: Supervisor::spawn(Options::default()).expect("it starts"),
        pages: guest.pages,
    };
    second.attach(&store).expect("it knows of no other");
    second.add();
    let started = second.supervisor.start();
    assert!(started.is_err(), "{started:?}");
    assert_eq!(second.supervisor.status(), Status::Waiting(left_over()));
    second.supervisor.detach(true).expect("there is nothing to end");
    assert_eq!(guest.supervisor.status(), Status::Serving);
    guest.check();
    guest.wait("sharing all", |s| s.pages_mapped == PAGES as u64);
    guest.supervisor.detach(true).expect("it ends");
    guest.check();
}

#[test]
fn a_vm_that_ends_leaves_the_store_although_its_process_goes_on() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::sharing(&store);
    for _reboot in 0..2 {
        guest.supervisor.detach(false).expect("it ends");
        let start = Instant::now();
        let account = || {
            let (store, vms) = Observer::connect(&store.socket()).ok()?.stats().ok()?;
            Some((store.pages_shared, store.slots_limbo, vms.len()))
        };
        while account() != Some((0, 0, 0)) {
            assert!(start.elapsed() < PATIENCE, "{:?} are left", account());
            std::thread::sleep(Duration::from_millis(5));
        }
        // Whatever becomes of the slots, what is still read of the memory is right.
        guest.check();
        guest.renew();
        guest.attach(&store).expect("the next VM begins");
        guest.add();
        guest.wait("sharing", |s| s.pages_mapped > PAGES as u64 / 4);
    }
    guest.supervisor.detach(true).expect("it ends");
}

#[test]
fn what_a_vm_shares_stays_counted_when_only_its_supervisor_goes() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let Guest { supervisor, pages } = Guest::sharing(&store);
    drop(supervisor);
    let account = || {
        let (store, vms) = Observer::connect(&store.socket()).ok()?.stats().ok()?;
        Some((store.pages_shared, vms.len()))
    };
    let start = Instant::now();
    while account().is_none_or(|(_, vms)| vms > 0) {
        assert!(start.elapsed() < PATIENCE, "{:?} are left", account());
        std::thread::sleep(Duration::from_millis(5));
    }
    // What a service that says goodbye has held is free within some of these.
    for _ in 0..40 {
        assert!(
            account().is_none_or(|(slots, _)| slots > 0),
            "slots that are mapped are free"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!((0..PAGES).all(|page| pages.holds(page, twin(page))));
}

/// Lets the scanning thread die.
fn kill_service(guest: &Guest) {
    kill_scanner(|| guest.pages.fill(0, twin(0)));
}

#[test]
fn a_vm_whose_service_dies_is_refused_although_nobody_calls() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::sharing(&store);
    kill_service(&guest);
    let start = Instant::now();
    while !matches!(guest.supervisor.status(), Status::Refused(_)) {
        assert!(start.elapsed() < FOUND_DEAD, "{:?}", guest.supervisor.status());
        std::thread::sleep(Duration::from_millis(5));
    }
    guest.check();
    guest.supervisor.detach(true).expect("there is nothing to end");
}

#[test]
fn a_vm_whose_service_dies_is_refused_and_leaves_no_pin() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::sharing(&store);
    kill_service(&guest);
    let pinned = guest.supervisor.pinned().map(|_| ());
    assert!(matches!(pinned, Err(Error::Refused(_))), "{pinned:?}");
    let status = guest.supervisor.status();
    assert!(matches!(status, Status::Refused(_)), "{status:?}");
    let start = Instant::now();
    while !matches!(only_vm(&store), Some(Some(Reason::Other))) {
        assert!(start.elapsed() < PATIENCE, "it is not announced");
        std::thread::sleep(Duration::from_millis(5));
    }
    guest.check();
    guest.supervisor.detach(true).expect("there is nothing to end");
    // No pin is left, so the next VM is served.
    guest.renew();
    guest.attach(&store).expect("the next VM begins");
    guest.add();
    guest.wait("sharing", |s| s.pages_mapped > PAGES as u64 / 4);
    guest.supervisor.detach(true).expect("it ends");
    guest.check();
}

/// Whoever has greeted counts for the store until he says goodbye, or until this process ends.
#[test]
fn starts_that_fail_leave_nobody_in_the_store() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::with_metrics();
    // So there are segments, which the store sends behind its answer.
    let other = Guest::sharing(&store);
    let lacks = Arc::new(AtomicBool::new(true));
    let theirs = lacks.clone();
    let guest = Guest::with(Options {
        each: Some(Arc::new(move |part| {
            let lacks = part == Part::Scan && theirs.load(Ordering::Acquire);
            assert!(!lacks, "no thread for now");
        })),
        ..Options::default()
    });
    guest.attach(&store).expect("it fits");
    guest.add();
    // More often than a store lets one process in.
    for _ in 0..40 {
        let started = guest.supervisor.start();
        assert!(matches!(started, Err(Error::Thread(_))), "{started:?}");
    }
    lacks.store(false, Ordering::Release);
    guest.supervisor.start().expect("there are threads again");
    guest.wait("sharing", |s| s.pages_mapped > PAGES as u64 / 4);
    let start = Instant::now();
    while store.metric("orphans") > 0 {
        assert!(start.elapsed() < PATIENCE, "{}", store.metric("orphans"));
        std::thread::sleep(Duration::from_millis(10));
    }
    for guest in [guest, other] {
        guest.supervisor.detach(true).expect("it ends");
        guest.check();
    }
}

/// Ends the connections that this process has made to a store, as if the store had cut them off.
fn cut_off(store: &StoreThread) -> usize {
    let cut = |entry: std::io::Result<std::fs::DirEntry>| {
        let number = entry.ok()?.file_name().to_str()?.parse().ok()?;
        // SAFETY: only asked and shut down in this call; a descriptor that another thread closes meanwhile is an error, or a socket
        // whose peer's name is compared.
        let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        let peer = rustix::net::getpeername(socket).ok()??;
        let peer = rustix::net::SocketAddrUnix::try_from(peer).ok()?;
        let is_its = peer.path_bytes()? == store.socket().as_os_str().as_encoded_bytes();
        is_its.then(|| rustix::net::shutdown(socket, rustix::net::Shutdown::Both).ok())?
    };
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("/proc");
    descriptors.filter_map(cut).count()
}

/// Its references would count until this process ends, since nobody told the store that nothing is mapped any more.
#[test]
fn a_service_that_gives_back_while_it_has_no_connection_leaves_nothing_in_the_store() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::with_metrics();
    let guest = Guest::sharing(&store);
    assert_eq!(cut_off(&store), 1);
    guest.supervisor.detach(true).expect("it ends");
    guest.check();
    let start = Instant::now();
    let counts = || ["orphans", "orphan_references", "vms"].map(|name| store.metric(name));
    while counts() != [0, 0, 0] {
        assert!(start.elapsed() < PATIENCE, "{:?}", counts());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn an_agent_is_heard_when_there_is_a_thread_for_that() {
    need_userfaultfd!();
    let _alone = alone();
    let (store, folder) = (StoreThread::start(), tempfile::tempdir().expect("a folder"));
    let lacks = AtomicBool::new(true);
    let guest = Guest::with(Options {
        each: Some(Arc::new(move |part| {
            let fails = part == Part::Agent && lacks.swap(false, Ordering::AcqRel);
            assert!(!fails, "no thread for now");
        })),
        ..Options::default()
    });
    let socket = folder.path().join("vm.vsock");
    let setup = Setup {
        store: store.socket(),
        agent: Some(AgentSocket::Hybrid(socket)),
        config: config(),
    };
    guest.supervisor.attach(setup).expect("it fits");
    guest.add();
    guest.supervisor.start().expect("it starts without it");
    let start = Instant::now();
    while std::fs::read_dir(folder.path())
        .expect("it is there")
        .next()
        .is_none()
    {
        assert!(start.elapsed() < PATIENCE, "nobody listens");
        std::thread::sleep(Duration::from_millis(10));
    }
    guest.supervisor.detach(true).expect("it ends");
}

#[test]
fn a_vm_that_was_not_to_run_without_dedup_keeps_nothing_of_it() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let pages = Pages::map(PAGES);
    (0..PAGES).for_each(|page| pages.fill(page, twin(page)));
    let setup = Setup {
        store: store.socket(),
        agent: None,
        config: config(),
    };
    let served = Supervisor::serving(Options::default(), setup, |supervisor| {
        let range = HostRange::try_new(pages.address(0), PAGES * 4096)?;
        // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
        unsafe { supervisor.add_range(range) };
        let start = Instant::now();
        while supervisor.stats().is_none_or(|s| s.pages_mapped == 0) {
            assert!(start.elapsed() < PATIENCE, "{:?}", supervisor.status());
            std::thread::sleep(Duration::from_millis(5));
        }
        // What comes next fails.
        HostRange::try_new(1, 4096).map(drop)
    });
    assert!(matches!(served, Err(Error::Unaligned { .. })), "{served:?}");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    let memory = pages.address(0)..pages.address(PAGES - 1) + 4096;
    let is_left = |line: &&str| {
        let start = line.split('-').next().expect("an address");
        let start = usize::from_str_radix(start, 16).expect("an address");
        memory.contains(&start) && line.contains("memfd")
    };
    let left: Vec<&str> = maps.lines().filter(is_left).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!((0..PAGES).all(|page| pages.holds(page, twin(page))));
}

/// From joining the store on an operator can reach a service. What he switches on then must not merge before those who free memory
/// know of the service: madvise would bring the store's pages back in the place of zeros.
#[test]
fn a_vm_that_is_switched_on_while_it_starts_merges_nothing_before_discards_know_it() {
    need_userfaultfd!();
    let _alone = alone();
    let (store, folder) = (StoreThread::start(), tempfile::tempdir().expect("a folder"));
    let (starts, starting) = mpsc::channel();
    let (lets_go, may_go) = mpsc::channel::<()>();
    let may_go = Mutex::new(may_go);
    // The agent's thread is the last one that is started, and is waited for.
    let guest = Guest::with(Options {
        each: Some(Arc::new(move |part| {
            if part == Part::Agent {
                starts.send(()).expect("the test waits");
                let _ = may_go.lock().expect("nobody panics").recv();
            }
        })),
        ..Options::default()
    });
    // Should the test fail, nobody waits for it.
    let lets_go = lets_go;
    let setup = Setup {
        store: store.socket(),
        agent: Some(AgentSocket::Hybrid(folder.path().join("vm.vsock"))),
        config: Config {
            name: "vm".into(),
            enabled: false,
            ..config()
        },
    };
    guest.supervisor.attach(setup).expect("it fits");
    guest.add();
    starting.recv_timeout(PATIENCE).expect("it starts");
    let discarder = guest.supervisor.discarder();
    let (at, len) = (guest.pages.address(0), PAGES * 4096);
    assert!(!discarder.covers(at, len));
    let mut observer = Observer::connect(&store.socket()).expect("an observer");
    let on = Settings {
        switch: Some(Switch::On),
        ..Settings::default()
    };
    observer.set("vm", on).expect("it is on");
    // Twenty passes.
    let told = Instant::now();
    while told.elapsed() < Duration::from_millis(200) {
        let merges = observer.stats().expect("an account").1[0].stats.merges_total;
        assert_eq!(merges, 0, "nobody who frees memory knows the service");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!discarder.covers(at, len));
    lets_go.send(()).expect("it waits");
    guest.wait("sharing", |s| s.pages_mapped > PAGES as u64 / 4);
    assert!(discarder.covers(at, len));
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

/// The scanning thread may be about to ask a store that hangs, which takes seconds, whenever it is told of a region: of all regions only one
/// waits for that.
#[test]
fn a_pin_of_many_regions_waits_as_long_for_a_store_that_hangs_as_one_of_one_region() {
    const REGIONS: usize = 64;
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let guest = Guest::new();
    guest.attach(&store).expect("it fits");
    for region in 0..REGIONS {
        let start = guest.pages.address(region * (PAGES / REGIONS));
        let range = HostRange::try_new(start, PAGES / REGIONS * 4096).expect("aligned");
        // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
        unsafe { guest.supervisor.add_range(range) };
    }
    guest.wait("sharing all", |s| s.pages_mapped == PAGES as u64);
    let socket = store.socket();
    drop(store);
    std::fs::create_dir_all(socket.parent().expect("a folder")).expect("it is gone, or ours");
    // Whoever connects is let in, and never answered.
    let hangs = vmm_dedup_protocol::socket::listen(&socket).expect("nobody else is there");
    let start = Instant::now();
    let asks = std::iter::repeat_with(|| vmm_dedup_protocol::socket::accept(&hangs)).find(|came| {
        assert!(start.elapsed() < PATIENCE, "nobody looks for a store");
        std::thread::sleep(Duration::from_millis(5));
        came.is_ok()
    });
    let start = Instant::now();
    let pinned = guest.supervisor.pinned().expect("it is given back");
    let waited = start.elapsed();
    eprintln!("a pin of {REGIONS} regions took {waited:?}");
    // A try takes 10 s at most where connecting works, and a busy machine its time.
    assert!(waited < ANSWERED, "{waited:?}");
    assert_eq!(guest.supervisor.stats().map(|s| s.pages_mapped), Some(0));
    guest.check();
    drop((pinned, asks, hangs));
    guest.supervisor.detach(true).expect("it ends");
    guest.check();
}

/// Numbers that are the same in every run (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % end as u64).expect("it is below a usize")
    }
}

/// What a VMM may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Attach,
    Add,
    Start,
    Remove,
    Lend,
    TakeBack,
    Pin,
    Unpin,
    Refuse,
    LeaveAlone,
    Pause,
    Resume,
    Snapshot,
    Set,
    Pass,
    DirectIo,
    Reboot,
    ShutDown,
    StoreGoes,
    StoreComes,
}

/// Each as often as it stands here: VMs begin more often than they end, so that most calls meet one.
const CALLS: [Call; 26] = {
    use Call::{
        Add, Attach, DirectIo, LeaveAlone, Lend, Pass, Pause, Pin, Reboot, Refuse, Remove, Resume, Set,
        ShutDown, Snapshot, Start, StoreComes, StoreGoes, TakeBack, Unpin,
    };
    [
        Attach, Attach, Add, Add, Start, Remove, Lend, TakeBack, TakeBack, Pin, Unpin, Unpin, Refuse,
        LeaveAlone, Pause, Resume, Resume, Snapshot, Set, Pass, Pass, DirectIo, Reboot, ShutDown, StoreGoes,
        StoreComes,
    ]
};

/// A VMM that makes calls in any order, and what it knows of its VM by the table of the supervisor's documentation.
struct AnyOrder {
    guest: Guest,
    store: Option<StoreThread>,
    /// Where the VM looks for a store, be it there or not.
    place: tempfile::TempDir,
    content: [u64; PAGES],
    vm: bool,
    refused: bool,
    pins: usize,
    done: Vec<Call>,
}

impl AnyOrder {
    fn new() -> Self {
        let mut all = Self {
            guest: Guest::new(),
            store: None,
            place: tempfile::tempdir().expect("a folder"),
            content: std::array::from_fn(twin),
            vm: false,
            refused: false,
            pins: 0,
            done: Vec::new(),
        };
        all.store_comes();
        all
    }

    fn socket(&self) -> std::path::PathBuf {
        self.place.path().join("store.sock")
    }

    fn store_comes(&mut self) {
        if self.store.is_none() {
            let store = StoreThread::start();
            std::os::unix::fs::symlink(store.socket(), self.socket()).expect("a link");
            self.store = Some(store);
        }
    }

    fn store_goes(&mut self) {
        if self.store.take().is_some() {
            std::fs::remove_file(self.socket()).expect("it is there");
        }
    }

    /// A part of memory.
    fn part(numbers: &mut Numbers) -> usize {
        numbers.below(PAGES / PART) * PART
    }

    fn range(&self, first: usize) -> std::ops::Range<usize> {
        let start = self.guest.pages.address(first);
        start..start + PART * 4096
    }

    fn attach(&mut self) {
        let attached = self.guest.attach_at(self.socket());
        assert_eq!(attached.is_ok(), !self.vm, "{attached:?} {:?}", self.done);
        self.vm = true;
    }

    fn end(&mut self) {
        self.guest.supervisor.detach(true).expect("it ends");
        // What the kernel had copied lies in mappings of the store still, so the next VM has new memory.
        self.check();
        self.guest.pages.renew();
        (0..PAGES).for_each(|page| self.guest.pages.fill(page, self.content[page]));
        (self.vm, self.refused) = (false, false);
        assert_eq!(self.guest.supervisor.status(), Status::Detached);
    }

    /// What fails without a VM, or without a service, and only then.
    fn expect(&self, result: &Result<(), Error>) {
        let fits = match result {
            Ok(()) => true,
            Err(Error::Detached) => !self.vm || self.guest.supervisor.status() != Status::Serving,
            Err(_) => false,
        };
        assert!(fits, "{result:?} {:?}", self.done);
    }

    /// Whether it went well, or concerned no memory that the supervisor was told of.
    fn is_known(&self, result: &Result<(), Error>) -> bool {
        match result {
            Ok(()) => true,
            Err(Error::Detached) => !self.vm,
            Err(Error::NotAdded { .. }) => self.vm,
            Err(_) => false,
        }
    }

    fn call(&mut self, call: Call, numbers: &mut Numbers) {
        let supervisor = &self.guest.supervisor;
        let range = self.range(Self::part(numbers));
        match call {
            Call::Attach => self.attach(),
            Call::Add => self.guest.add(),
            Call::Start => {
                let started = supervisor.start();
                let status = supervisor.status();
                assert_eq!(
                    started.is_ok(),
                    status == Status::Serving,
                    "{started:?} {:?}",
                    self.done
                );
            }
            Call::Remove => supervisor.remove_range(range).expect("it goes"),
            Call::Lend => {
                let lent = supervisor.lend(range, Lease::UntilTakenBack);
                // By an earlier call, which nobody has taken back.
                assert!(
                    matches!(lent, Err(Error::Lent(_))) || self.is_known(&lent),
                    "{lent:?} {:?}",
                    self.done
                );
            }
            Call::TakeBack => supervisor.take_back(range),
            Call::Pin => {
                supervisor.pin().expect("it is given back");
                self.pins += 1;
            }
            Call::Unpin => {
                supervisor.unpin();
                self.pins = self.pins.saturating_sub(1);
            }
            Call::Refuse => {
                let refused = supervisor.refuse(confidential());
                assert_eq!(refused.is_ok(), self.vm, "{refused:?} {:?}", self.done);
                self.refused |= self.vm;
            }
            Call::LeaveAlone => {
                let left = supervisor.leave_alone(range, protected());
                assert!(self.is_known(&left), "{left:?} {:?}", self.done);
            }
            Call::Pause => supervisor.pause(),
            Call::Resume => supervisor.resume(),
            Call::Snapshot => {
                supervisor.pause();
                self.check();
                self.guest.supervisor.resume();
            }
            Call::Set => self.expect(&supervisor.set(Settings::default())),
            Call::Pass => self.expect(&supervisor.pass().map(drop)),
            Call::DirectIo => supervisor.direct_io_opened().expect("it is looked at"),
            Call::Reboot => {
                self.end();
                self.attach();
                self.guest.add();
            }
            Call::ShutDown => self.end(),
            Call::StoreGoes => self.store_goes(),
            Call::StoreComes => self.store_comes(),
        }
    }

    /// Makes a call, which must come back, and looks at what holds whatever came before.
    fn step(&mut self, numbers: &mut Numbers) {
        let call = CALLS[numbers.below(CALLS.len())];
        self.done.push(call);
        let start = Instant::now();
        self.call(call, numbers);
        let waited = start.elapsed();
        assert!(waited < ANSWERED, "{waited:?}: {:?}", self.done);
        let status = self.guest.supervisor.status();
        assert_eq!(status == Status::Detached, !self.vm, "{status:?} {:?}", self.done);
        let refused = status == Status::Refused(confidential());
        assert_eq!(refused, self.refused, "{status:?} {:?}", self.done);
        if self.pins > 0 || !self.vm || self.refused {
            let mapped = self.guest.supervisor.stats().map_or(0, |s| s.pages_mapped);
            assert_eq!(mapped, 0, "{:?}", self.done);
        }
        // The guest writes, as any other guest would.
        for _ in 0..64 {
            let page = numbers.below(PAGES);
            self.content[page] = twin(numbers.below(PAGES));
            self.guest.pages.fill(page, self.content[page]);
        }
        std::thread::sleep(Duration::from_millis(numbers.below(30) as u64));
    }

    fn check(&self) {
        let right = |page: &usize| self.guest.pages.holds(*page, self.content[*page]);
        let wrong: Vec<usize> = (0..PAGES).filter(|page| !right(page)).collect();
        assert!(wrong.is_empty(), "{wrong:?}: {:?}", self.done);
    }

    /// Whatever has happened: a new VM shares.
    fn ends(mut self) {
        self.check();
        self.end();
        (0..self.pins).for_each(|_| self.guest.supervisor.unpin());
        self.store_comes();
        self.attach();
        self.guest.add();
        self.guest.wait("sharing", |s| s.pages_mapped > PAGES as u64 / 4);
        self.end();
    }
}

#[test]
fn calls_in_any_order_are_answered_and_lose_no_write() {
    const ORDERS: u64 = 12;
    const STEPS: usize = 40;
    need_userfaultfd!();
    let _alone = alone();
    for seed in 0..ORDERS {
        let mut numbers = Numbers(seed);
        let mut all = AnyOrder::new();
        (0..STEPS).for_each(|_| all.step(&mut numbers));
        all.ends();
    }
}
