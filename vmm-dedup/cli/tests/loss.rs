//! kill -9 of each process, and a store that stands still, under load.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{Config, DedupService, Pack};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::random::Random;
use vmm_dedup_payload::{PayloadConfig, Report, Rewrite, WorkingSet};

const COMMON_MIB: u64 = 12;
const COMMON_PAGES: i64 = COMMON_MIB.cast_signed() * 256;

fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
}

fn kvm_is_there() -> bool {
    let kvm = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    assert!(
        kvm.is_ok() || std::env::var_os("CI").is_none(),
        "/dev/kvm cannot be opened in CI"
    );
    if kvm.is_err() {
        eprintln!("SKIPPED: /dev/kvm cannot be opened");
    }
    kvm.is_ok()
}

/// A child that does not outlive the test.
struct Process(Child);

impl Process {
    fn kill(&mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("wait");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_store(socket: &Path) -> Process {
    start_store_with(socket, &["--metrics", "none"])
}

fn start_store_with(socket: &Path, options: &[&str]) -> Process {
    let store = command()
        .args(["store", "--socket"])
        .arg(socket)
        .args(options)
        .spawn()
        .expect("a store");
    let store = Process(store);
    wait_until("the store listens", || stat(socket).is_some());
    store
}

fn stat(socket: &Path) -> Option<Value> {
    let output = command()
        .args(["stat", "--json", "--socket"])
        .arg(socket)
        .output()
        .expect("stat runs");
    output
        .status
        .success()
        .then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{what}: not within a minute"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn start_guest(socket: &Path, n: u64, breaks: &str) -> Process {
    let payload = PayloadConfig::default()
        .seed(n)
        .private_mib(2)
        .zero_mib(2)
        .common_mib(COMMON_MIB)
        .rate(5000)
        .seconds(100_000);
    let payload = match breaks {
        // Shared pages are written and restored, so that there is always something to break.
        "managed" => payload
            .ws_area(WorkingSet::Common)
            .ws_pages(512)
            .rewrite(Rewrite::Restore)
            .rest_ms(600),
        _ => payload
            .ws_area(WorkingSet::Private)
            .ws_pages(256)
            .rewrite(Rewrite::None),
    };
    let name = format!("guest-{n}");
    let guest = command()
        .args([
            "run",
            "--memory-mib",
            "32",
            "--pass-period-ms",
            "50",
            "--thp",
            "never",
        ])
        .args([
            "--payload",
            &payload.command_line(),
            "--name",
            &name,
            "--breaks",
            breaks,
            "--store",
        ])
        .arg(socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    Process(guest.expect("a guest"))
}

/// Tells a guest to verify all of its memory; whether it was right.
fn verify(mut guest: Process) -> bool {
    guest
        .0
        .stdin
        .take()
        .expect("input")
        .write_all(b"q")
        .expect("the guest takes input");
    let output = BufReader::new(guest.0.stdout.take().expect("output"));
    let reports = output
        .lines()
        .map_while(Result::ok)
        .filter_map(|line| Report::parse(&line).ok().flatten());
    let mut good = false;
    for report in reports {
        match report {
            Report::Done { ok } => good = ok,
            Report::Bad { .. } | Report::Fault { .. } => eprintln!("{report:?}"),
            _ => {}
        }
    }
    good && guest.0.wait().expect("wait").success()
}

fn sharing(socket: &Path) -> i64 {
    stat(socket)
        .and_then(|s| s["store"]["pages_sharing"].as_i64())
        .unwrap_or(-1)
}

/// A counter of each VM.
fn counters(socket: &Path, name: &str) -> Vec<i64> {
    let stat = stat(socket).expect("the store answers");
    let vms = stat["vms"].as_array().expect("VMs");
    vms.iter()
        .map(|vm| vm[name].as_i64().expect("a number"))
        .collect()
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("store.sock");
    (folder, socket)
}

fn store_killed(breaks: &str) {
    let managed = breaks == "managed";
    // With shared pages being written some are broken at any time.
    let enough = if managed { COMMON_PAGES } else { 2 * COMMON_PAGES };
    let (_folder, socket) = folder();
    let mut store = start_store(&socket);
    let guests: Vec<Process> = (1..=3).map(|n| start_guest(&socket, n, breaks)).collect();
    wait_until("three guests share", || sharing(&socket) >= enough);
    store.kill();
    std::thread::sleep(Duration::from_millis(500));
    let _store = start_store(&socket);
    wait_until("they share again through the new store", || {
        sharing(&socket) >= enough
    });
    if managed {
        wait_until("the service breaks pages of each guest", || {
            let breaks = counters(&socket, "breaks_managed_total");
            breaks.len() == 3 && breaks.iter().all(|n| *n > 0)
        });
    }
    let passes = counters(&socket, "passes_total");
    wait_until("passes go on", || {
        let now = counters(&socket, "passes_total");
        now.len() == 3 && now.iter().zip(&passes).all(|(now, before)| now > before)
    });
    for guest in guests {
        assert!(verify(guest), "a guest found wrong bytes");
    }
}

#[test]
fn guests_survive_a_killed_store_and_share_again() {
    if kvm_is_there() {
        store_killed("kernel");
    }
}

#[test]
fn guests_with_managed_breaks_survive_a_killed_store_and_share_again() {
    if kvm_is_there() {
        store_killed("managed");
    }
}

/// A metric of the store that serves them at this address.
fn metric(address: &str, name: &str) -> Option<u64> {
    let mut stream = TcpStream::connect(address).ok()?;
    let request = "GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Stops a store for longer than services wait for an answer, and lets it go on.
fn store_stands_still(breaks: &str) {
    let enough = if breaks == "managed" {
        COMMON_PAGES
    } else {
        2 * COMMON_PAGES
    };
    let (_folder, socket) = folder();
    let store = start_store_with(&socket, &["--metrics", "127.0.0.1:0"]);
    let guests: Vec<Process> = (1..=3).map(|n| start_guest(&socket, n, breaks)).collect();
    wait_until("three guests share", || sharing(&socket) >= enough);
    let stat_before = stat(&socket).expect("the store answers");
    let metrics = stat_before["store"]["metrics"]
        .as_str()
        .expect("an address")
        .to_owned();
    let connections = || metric(&metrics, "vmmdedup_connections_accepted_total");
    let before = connections().expect("a number");
    let pid = rustix::process::Pid::from_child(&store.0);
    let tell = |signal| rustix::process::kill_process(pid, signal).expect("it runs");
    tell(rustix::process::Signal::STOP);
    std::thread::sleep(Duration::from_secs(8));
    tell(rustix::process::Signal::CONT);
    wait_until("all have connected again", || connections() >= Some(before + 3));
    wait_until("the store waits for nobody", || {
        metric(&metrics, "vmmdedup_orphans") == Some(0)
    });
    wait_until("they share again", || sharing(&socket) >= enough);
    for guest in guests {
        assert!(verify(guest), "a guest found wrong bytes");
    }
    wait_until("nothing is in use", || {
        stat(&socket)
            .is_some_and(|stat| stat["store"]["pages_shared"] == 0 && stat["store"]["slots_limbo"] == 0)
    });
}

#[test]
fn a_store_that_stood_still_waits_for_nobody() {
    if kvm_is_there() {
        store_stands_still("kernel");
    }
}

#[test]
fn a_store_that_stood_still_waits_for_nobody_with_managed_breaks() {
    if kvm_is_there() {
        store_stands_still("managed");
    }
}

/// How long the slots of one VMM that is killed are in use, and those of the last two.
fn slots_stay() -> [Duration; 2] {
    let (_folder, socket) = folder();
    let _store = start_store(&socket);
    let mut guests: Vec<Process> = (1..=3).map(|n| start_guest(&socket, n, "kernel")).collect();
    wait_until("three guests share", || sharing(&socket) >= 2 * COMMON_PAGES);
    let gone = Instant::now();
    guests.pop().expect("three guests").kill();
    wait_until("its references go", || {
        sharing(&socket) < COMMON_PAGES + COMMON_PAGES / 2
    });
    let of_one = gone.elapsed();
    guests.iter_mut().for_each(Process::kill);
    let gone = Instant::now();
    let in_use = || {
        let stat = stat(&socket).expect("the store answers");
        stat["store"]["pages_shared"].as_i64().expect("a number")
            + stat["store"]["slots_limbo"].as_i64().expect("a number")
    };
    wait_until("all slots are free", || in_use() == 0);
    [of_one, gone.elapsed()]
}

/// A busy machine may hold up one of them, or what looks at them.
#[test]
fn the_slots_of_a_killed_vmm_are_free_within_a_second() {
    if !kvm_is_there() {
        return;
    }
    let mut shortest = [Duration::MAX; 2];
    for _ in 0..4 {
        let stay = slots_stay();
        shortest = [0, 1].map(|n| stay[n].min(shortest[n]));
        if shortest.iter().all(|stay| *stay < Duration::from_secs(1)) {
            return;
        }
    }
    panic!("slots are free only after {shortest:?}");
}

/// Pages of a VM of a store that shares securely: every fourth is used, the others rest.
struct Resting {
    pages: Pages,
    service: DedupService,
    guest: u64,
}

impl Resting {
    const PAGES: usize = 2048;
    /// The first so many are the same in all guests, unless they are used.
    const SAME: usize = 1024;
    /// Pages that rest.
    const REST: usize = Self::PAGES / 4 * 3;
    /// Of them, those that all guests have.
    const SHARED: i64 = (Self::SAME as u64 / 4 * 3).cast_signed();

    fn start(socket: &Path, guest: u64) -> Self {
        let pages = Pages::map(Self::PAGES);
        let config = Config {
            name: format!("guest-{guest}"),
            pass_period_ms: 20,
            cpu_percent: 100,
            pack: Pack {
                idle_ms: 40,
                ..Pack::default()
            },
            ..Config::default()
        };
        (0..Self::PAGES).for_each(|page| pages.fill(page, Self::id(guest, page)));
        let service = pages.serve(socket, config).expect("dedup starts");
        Self {
            pages,
            service,
            guest,
        }
    }

    fn id(guest: u64, page: usize) -> u64 {
        let guest = if page < Self::SAME { 7 } else { guest };
        (guest << 32) | (page as u64 + 1)
    }

    /// How many lie in slots of a store.
    fn kept(&self) -> usize {
        usize::try_from(self.service.stats().packing.pages).expect("few")
    }

    fn assert_rests(&self, pages: impl Iterator<Item = usize>) {
        for page in pages.filter(|page| page % 4 != 0) {
            let right = self.pages.holds(page, Self::id(self.guest, page));
            assert!(right, "page {page} of guest {} is wrong", self.guest);
        }
    }

    /// Writes and reads those that are used.
    fn use_until(&self, stop: &AtomicBool) {
        let mut random = Random(self.guest);
        let mut ids: Vec<u64> = (0..Self::PAGES).map(|page| Self::id(self.guest, page)).collect();
        let check = |page: usize, ids: &[u64]| {
            let right = self.pages.holds(page, ids[page]);
            assert!(right, "used page {page} of guest {} is wrong", self.guest);
        };
        while !stop.load(Ordering::Relaxed) {
            let number = random.next();
            let page = usize::try_from(number % Self::PAGES as u64).expect("few") / 4 * 4;
            check(page, &ids);
            if number.is_multiple_of(3) {
                ids[page] = number;
                self.pages.fill(page, number);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        (0..Self::PAGES).step_by(4).for_each(|page| check(page, &ids));
    }
}

/// What lies in slots is nowhere else.
#[test]
fn a_store_that_shares_securely_and_is_killed_takes_no_page_with_it() {
    need_userfaultfd!();
    let (_folder, socket) = folder();
    let options = ["--metrics", "none", "--secure"];
    let mut store = start_store_with(&socket, &options);
    let guests = [1, 2].map(|guest| Resting::start(&socket, guest));
    let stop = AtomicBool::new(false);
    let rest = |guests: &[Resting]| guests.iter().all(|guest| guest.kept() >= Resting::REST);
    std::thread::scope(|scope| {
        // A check that fails must not leave threads that go on.
        let stop = StopAtEnd(&stop);
        for guest in &guests {
            let stop = stop.0;
            scope.spawn(move || guest.use_until(stop));
        }
        wait_until("pages lie in slots", || {
            rest(&guests) && sharing(&socket) >= Resting::SHARED
        });
        store.kill();
        std::thread::sleep(Duration::from_millis(500));
        assert!(rest(&guests), "some did not stay where they were");
        for guest in &guests {
            guest.assert_rests((0..Resting::PAGES).step_by(7));
        }
        let mut next = start_store_with(&socket, &options);
        wait_until("they take part again", || sharing(&socket) >= Resting::SHARED);
        next.kill();
        for guest in &guests {
            guest.assert_rests(0..Resting::PAGES);
        }
    });
    for guest in guests {
        let stats = guest.service.stop(false).expect("it stops");
        assert_eq!((stats.packing.pages, stats.packing.broken_total), (0, 0));
        guest.pages.renew();
    }
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
