//! The example does what the preload library does, and its guests find every word right.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vmm_dedup_integration_tests::seccomp::Recorder;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::{need_kvm, need_userfaultfd};
use vmm_dedup_payload::{Console, PayloadConfig, Report, WorkingSet, measure_tsc_khz};

#[path = "../src/calls.rs"]
mod calls;

const PATIENCE: Duration = Duration::from_secs(120);
const COMMON_MIB: u64 = 12;
const COMMON_PAGES: u64 = COMMON_MIB * 256;
/// Plugged memory: of each page there are as many as MiB.
const PLUGGED_MIB: u64 = 8;
const PLUGGED_PAGES: u64 = PLUGGED_MIB * 256;
/// Where the test that stands for a store's process makes its socket.
const STORE_AT: &str = "EMBEDDED_STORE_AT";
/// Lines of the example that dedup may take.
const MOST_GLUE: usize = 150;

/// A VM under the example.
struct Vmm {
    child: Child,
    stdin: Option<ChildStdin>,
    console: Console,
    /// What the VMM itself says.
    answers: Console,
    asked: usize,
}

impl Vmm {
    fn start(folder: &Path, store: &Path, seed: u64) -> Self {
        Self::start_with(folder, store, seed, None)
    }

    fn start_with(folder: &Path, store: &Path, seed: u64, more: Option<&str>) -> Self {
        Self::begin(Self::program(folder, store, seed, more))
    }

    fn program(folder: &Path, store: &Path, seed: u64, more: Option<&str>) -> Command {
        let kernel = folder.join("payload.elf");
        std::fs::write(&kernel, vmm_dedup_payload::ELF).expect("the payload is written");
        let payload = PayloadConfig::default()
            .seed(seed)
            .private_mib(2)
            .zero_mib(4)
            .common_mib(COMMON_MIB)
            .ws_area(WorkingSet::Private)
            .ws_pages(256)
            .rate(1000)
            .report_ms(100)
            .seconds(100_000)
            .tsc_khz(measure_tsc_khz());
        let settings = format!(
            "store={},name=vm-{seed},pass_period_ms=50,cpu_percent=80",
            store.display()
        );
        let mut command = Command::new(env!("CARGO_BIN_EXE_embedded-vmm"));
        command
            .arg(&kernel)
            .args([payload.command_line(), "48".to_owned(), settings])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn begin(mut command: Command) -> Self {
        let mut child = command.spawn().expect("the example starts");
        let (console, answers) = (Console::new(), Console::new());
        show(child.stdout.take().expect("a pipe"), console.clone());
        show(child.stderr.take().expect("a pipe"), answers.clone());
        let stdin = child.stdin.take();
        Self {
            child,
            stdin,
            console,
            answers,
            asked: 0,
        }
    }

    fn send(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("it is open");
        writeln!(stdin, "{line}").expect("it reads");
    }

    /// Gives a command; its answer.
    fn ask(&mut self, line: &str) -> String {
        self.send(line);
        let nth = self.asked;
        self.asked += 1;
        let answer = |text: &str| {
            let mut answers = text.match_indices("vmm: ").map(|(at, _)| &text[at + 5..]);
            let (answer, _) = answers.nth(nth)?.split_once('\n')?;
            Some(answer.to_owned())
        };
        let answered = self.answers.wait(PATIENCE, |text, _| answer(text));
        answered.unwrap_or_else(|| {
            let (console, answers) = (self.console.text(), self.answers.text());
            panic!("{line} is not answered: {console} {answers}")
        })
    }

    fn done(&mut self, line: &str) {
        assert_eq!(self.ask(line), "done", "{line}");
    }

    /// A number of the account.
    fn stat(&mut self, name: &str) -> u64 {
        let stats = self.ask("stats");
        let mut all = stats.split_whitespace().filter_map(|word| word.split_once('='));
        let found = all.find(|(known, _)| *known == name);
        found.and_then(|(_, value)| value.parse().ok()).expect("a number")
    }

    fn wait(&mut self, what: &str, is: impl Fn(&mut Self) -> bool) {
        let start = Instant::now();
        while !is(self) {
            let stats = self.ask("stats");
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{what} does not happen: {stats}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn wait_ready(&self, nth: usize) {
        let ready = |text: &str| (text.matches("@payload ready ").count() >= nth).then_some(());
        let booted = self.console.wait(PATIENCE, |text, _| ready(text));
        assert!(booted.is_some(), "it does not boot: {}", self.console.text());
    }

    fn wait_shared(&mut self) {
        self.wait("sharing", |vm| vm.stat("mapped") >= COMMON_PAGES);
    }

    /// What the guest says of the balloon, for the nth time.
    fn wait_balloon(&self, nth: usize) -> Report {
        let said = |reports: &[Report]| {
            let balloon = |report: &&Report| matches!(report, Report::Balloon { .. });
            reports.iter().filter(balloon).nth(nth).cloned()
        };
        let said = self.console.wait(PATIENCE, |_, reports| said(reports));
        said.unwrap_or_else(|| panic!("it does not say: {}", self.console.text()))
    }

    /// Pages that the guest has written, as it says in the last of its ticks.
    fn writes(&self) -> Option<u64> {
        let reports = self.console.reports();
        let mut writes = reports.iter().filter_map(|report| match report {
            Report::Tick { writes, .. } => Some(*writes),
            _ => None,
        });
        writes.next_back()
    }

    /// Lets the guest verify all of its memory.
    fn finish(mut self) {
        self.done("type q");
        // A reboot may have cut a line, which is no report then.
        let verdict = |reports: &[Report]| {
            reports.iter().find_map(|report| match report {
                Report::Done { ok } => Some(*ok),
                _ => None,
            })
        };
        let done = self.console.wait(PATIENCE, |_, reports| verdict(reports));
        assert_eq!(done, Some(true), "{}", self.console.text());
        self.send("quit");
        let ended = self.child.wait().expect("it ends");
        assert!(ended.success(), "{ended}");
    }
}

/// Shows what a program writes.
fn show(mut output: impl Read + Send + 'static, mut screen: Console) {
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(len) = output.read(&mut buffer) {
            if len == 0 || screen.write_all(&buffer[..len]).is_err() {
                return;
            }
        }
    });
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Bench {
    store: StoreThread,
    folder: TempDir,
}

impl Bench {
    fn new() -> Self {
        Self {
            store: StoreThread::start(),
            folder: tempfile::tempdir().expect("a folder"),
        }
    }

    /// Two VMs, whose common pages are twins.
    fn started(&self, store: &Path) -> Vec<Vmm> {
        let start = |seed| Vmm::start(self.folder.path(), store, seed);
        let vms: Vec<Vmm> = (1..=2).map(start).collect();
        vms.iter().for_each(|vm| vm.wait_ready(1));
        vms
    }

    fn sharing(&self) -> Vec<Vmm> {
        let mut vms = self.started(&self.store.socket());
        vms.iter_mut().for_each(Vmm::wait_shared);
        vms
    }
}

/// A store in a process of its own, which is killed (SIGKILL) when this is dropped.
struct StoreProcess(Child);

impl StoreProcess {
    fn start(bench: &Bench, socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        let program = std::env::current_exe().expect("this program");
        let child = Command::new(program)
            .args(["--exact", "a_store_for_others", "--quiet"])
            .env(STORE_AT, socket)
            // What it cannot remove goes with the folder.
            .env("TMPDIR", bench.folder.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let store = Self(child);
        let start = Instant::now();
        while !socket.exists() {
            assert!(start.elapsed() < PATIENCE, "there is no store");
            std::thread::sleep(Duration::from_millis(5));
        }
        store
    }
}

impl Drop for StoreProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// No test by itself: what a [`StoreProcess`] runs.
#[test]
fn a_store_for_others() {
    let Some(socket) = std::env::var_os(STORE_AT) else {
        return;
    };
    let store = StoreThread::start();
    std::os::unix::fs::symlink(store.socket(), socket).expect("a link");
    loop {
        std::thread::park();
    }
}

/// Tests of which each has a store.
macro_rules! scenarios {
    ($($name:ident)*) => {
        $(#[test] fn $name() {
            need_kvm!();
            need_userfaultfd!();
            scenario::$name(Bench::new());
        })*
    };
}

scenarios! {
    guests_share
    plugged_memory_is_shared_given_up_and_shared_again
    sharing_survives_pausing
    sharing_survives_a_reboot
    what_the_balloon_takes_is_free_and_shared_again
    a_snapshot_goes_on_where_it_was_taken
    locked_memory_is_left_alone
    a_vm_whose_memory_becomes_secret_shares_nothing
    guests_that_may_run_guests_run_on
    a_vm_that_does_not_boot_is_followed_by_one_that_shares
    a_device_pins_memory_and_lets_go
    lent_memory_comes_back
    a_store_that_comes_later_is_found
    a_store_that_is_killed_is_replaced
    shared_memory_is_refused_by_range
    events_in_any_order_hang_nobody
    the_vmms_filter_lets_nothing_through_that_it_does_not_do
}

mod scenario {
    use super::*;

    pub(super) fn guests_share(bench: Bench) {
        bench.sharing().into_iter().for_each(Vmm::finish);
    }

    pub(super) fn plugged_memory_is_shared_given_up_and_shared_again(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        let before = vm.stat("pages");
        vm.done(&format!("plug {PLUGGED_MIB}"));
        vm.wait("growing", |vm| vm.stat("pages") == before + PLUGGED_PAGES);
        for seed in [3, 5] {
            vm.done(&format!("fill {seed}"));
            vm.wait("sharing", |vm| {
                vm.stat("mapped") >= COMMON_PAGES + PLUGGED_PAGES / 2
            });
            assert_eq!(vm.ask(&format!("check {seed}")), "wrong=0");
            assert_eq!(vm.ask("discard"), "wrong=0");
        }
        // What is shared goes as it is, and what comes next to its place is fresh memory.
        vm.done("fill 3");
        vm.wait("sharing", |vm| {
            vm.stat("mapped") >= COMMON_PAGES + PLUGGED_PAGES / 2
        });
        vm.done("unplug");
        assert_eq!(vm.stat("pages"), before);
        vm.done(&format!("plug {PLUGGED_MIB}"));
        assert_eq!(vm.ask("check 0"), "wrong=0");
        vm.wait("growing", |vm| vm.stat("pages") == before + PLUGGED_PAGES);
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn sharing_survives_pausing(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        let before = vm.stat("pages");
        vm.done(&format!("plug {PLUGGED_MIB}"));
        vm.wait("growing", |vm| vm.stat("pages") == before + PLUGGED_PAGES);
        for vm in &mut vms {
            vm.done("pause");
        }
        // What is shared stays so, and what would be is not looked at.
        let vm = &mut vms[0];
        let mapped = vm.stat("mapped");
        assert!(mapped >= COMMON_PAGES);
        vm.done("fill 3");
        let passes = vm.stat("passes");
        std::thread::sleep(Duration::from_millis(500)); // else ten passes
        assert_eq!(vm.stat("mapped"), mapped);
        assert_eq!(vm.stat("passes"), passes);
        assert_eq!(vm.ask("check 3"), "wrong=0");
        for vm in &mut vms {
            vm.done("resume");
        }
        let vm = &mut vms[0];
        vm.wait("sharing again", |vm| {
            vm.stat("mapped") >= COMMON_PAGES + PLUGGED_PAGES / 2
        });
        assert_eq!(vm.ask("check 3"), "wrong=0");
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn sharing_survives_a_reboot(bench: Bench) {
        let mut vms = bench.sharing();
        for nth in 2..=3 {
            for vm in &mut vms {
                vm.done("reboot");
                vm.wait_ready(nth);
            }
            vms.iter_mut().for_each(Vmm::wait_shared);
        }
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn what_the_balloon_takes_is_free_and_shared_again(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        // Inflating and deflating, then reporting: the guest looks what it reads meanwhile.
        for (nth, key) in ["b", "f"].into_iter().enumerate() {
            let passes = vm.stat("passes");
            vm.done(&format!("type {key}"));
            let free = Report::Balloon {
                pages: COMMON_PAGES,
                stale: 0,
            };
            assert_eq!(vm.wait_balloon(nth), free);
            vm.wait("looking", |vm| vm.stat("passes") > passes + 1);
            vm.wait_shared();
        }
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn a_snapshot_goes_on_where_it_was_taken(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        vm.wait("writing", |vm| vm.writes() > Some(0));
        vm.done("save");
        let saved = vm.writes();
        vm.wait("writing more", |vm| {
            vm.writes() > saved.map(|writes| writes + 200)
        });
        let later = vm.writes();
        vm.done("restore");
        // It did not boot: it has written what it had when it was saved.
        vm.wait("going on", |vm| vm.writes() < later);
        assert!(vm.writes() >= saved);
        assert_eq!(vm.console.text().matches("@payload ready ").count(), 1);
        vm.wait_shared();
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn locked_memory_is_left_alone(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        vm.done(&format!("plug {PLUGGED_MIB}"));
        vm.done("fill 3");
        let all = COMMON_PAGES + PLUGGED_PAGES / 2;
        vm.wait("sharing", |vm| vm.stat("mapped") >= all);
        vm.done("lock");
        assert_eq!(vm.ask("check 3"), "wrong=0");
        std::thread::sleep(Duration::from_millis(500)); // ten passes
        assert!(vm.stat("mapped") < all);
        assert!(vm.ask("stats").contains("Serving"));
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn a_vm_whose_memory_becomes_secret_shares_nothing(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        vm.done("seal");
        assert_eq!(vm.stat("mapped"), 0);
        let stats = vm.ask("stats");
        assert!(
            stats.contains("Refused") && stats.contains("confidential"),
            "{stats}"
        );
        vm.done("reboot");
        vm.wait_ready(2);
        vm.wait_shared();
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn guests_that_may_run_guests_run_on(bench: Bench) {
        let start = |seed| {
            let (folder, store) = (bench.folder.path(), bench.store.socket());
            Vmm::start_with(folder, &store, seed, Some("nested"))
        };
        let mut vms = [start(1), start(2)];
        vms.iter().for_each(|vm| vm.wait_ready(1));
        // Refused is who runs guests before Linux 6.13.
        vms[0].wait("a decision", |vm| {
            vm.stat("mapped") >= COMMON_PAGES || vm.ask("stats").contains("Refused")
        });
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn a_vm_that_does_not_boot_is_followed_by_one_that_shares(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        // A device, and with it its pin, goes with its VM.
        vm.done(&format!("plug {PLUGGED_MIB}"));
        vm.done("pin");
        let kernel = bench.folder.path().join("payload.elf");
        let away = bench.folder.path().join("away.elf");
        std::fs::rename(&kernel, &away).expect("it is renamed");
        let answer = vm.ask("reboot");
        assert!(answer.starts_with("error: "), "{answer}");
        std::fs::rename(&away, &kernel).expect("it is renamed");
        vm.done("reboot");
        vm.wait_ready(2);
        vms.iter_mut().for_each(Vmm::wait_shared);
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn a_device_pins_memory_and_lets_go(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        vm.done(&format!("plug {PLUGGED_MIB}"));
        vm.done("fill 3");
        vm.wait("sharing", |vm| {
            vm.stat("mapped") >= COMMON_PAGES + PLUGGED_PAGES / 2
        });
        vm.done("pin");
        assert_eq!(vm.stat("mapped"), 0);
        assert_eq!(vm.ask("check 3"), "wrong=0");
        vm.done("dma 3");
        assert_eq!(vm.ask("check 0"), "wrong=0");
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(vm.stat("mapped"), 0);
        vm.done("unpin");
        vm.wait_shared();
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn lent_memory_comes_back(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        vm.done(&format!("plug {PLUGGED_MIB}"));
        vm.done("fill 3");
        let all = COMMON_PAGES + PLUGGED_PAGES / 2;
        vm.wait("sharing", |vm| vm.stat("mapped") >= all);
        vm.done("lend");
        assert!(vm.stat("mapped") < all);
        vm.done("back");
        vm.wait("sharing again", |vm| vm.stat("mapped") >= all);
        assert_eq!(vm.ask("check 3"), "wrong=0");
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn a_store_that_comes_later_is_found(bench: Bench) {
        let socket = bench.folder.path().join("later.sock");
        let mut vms = bench.started(&socket);
        for vm in &mut vms {
            let stats = vm.ask("stats");
            assert!(stats.contains("Waiting"), "{stats}");
        }
        std::os::unix::fs::symlink(bench.store.socket(), &socket).expect("a link");
        vms.iter_mut().for_each(Vmm::wait_shared);
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn a_store_that_is_killed_is_replaced(bench: Bench) {
        let socket = bench.folder.path().join("killed.sock");
        let store = StoreProcess::start(&bench, &socket);
        let mut vms = bench.started(&socket);
        vms.iter_mut().for_each(Vmm::wait_shared);
        // It cannot say farewell.
        drop(store);
        let _next = StoreProcess::start(&bench, &socket);
        for vm in &mut vms {
            // New content needs the new store.
            vm.done(&format!("plug {PLUGGED_MIB}"));
            vm.done("fill 9");
            vm.wait("sharing", |vm| vm.stat("mapped") >= PLUGGED_PAGES / 2);
            assert_eq!(vm.ask("check 9"), "wrong=0");
        }
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn shared_memory_is_refused_by_range(bench: Bench) {
        let mut vms = bench.sharing();
        let vm = &mut vms[0];
        let pages = vm.stat("pages");
        vm.done("share 16");
        let told = |text: &str| text.contains("guest memory is MAP_SHARED").then_some(());
        let refusal = vm.answers.wait(PATIENCE, |text, _| told(text));
        assert!(refusal.is_some(), "no reason: {}", vm.answers.text());
        assert_eq!(vm.stat("pages"), pages);
        assert!(vm.ask("stats").contains("Serving"));
        vms.into_iter().for_each(Vmm::finish);
    }

    pub(super) fn events_in_any_order_hang_nobody(bench: Bench) {
        let nowhere = bench.folder.path().join("nowhere.sock");
        let mut vms = bench.started(&nowhere);
        for vm in &mut vms {
            vm.done("unpin");
            vm.done(&format!("plug {PLUGGED_MIB}"));
            for line in [
                "pin", "pin", "pause", "lend", "unpin", "back", "resume", "back", "unpin", "unpin",
            ] {
                vm.done(line);
            }
            vm.done("fill 2");
            assert_eq!(vm.ask("discard"), "wrong=0");
            vm.done("reboot");
            vm.wait_ready(2);
        }
        std::os::unix::fs::symlink(bench.store.socket(), &nowhere).expect("a link");
        vms.iter_mut().for_each(Vmm::wait_shared);
        vms.into_iter().for_each(Vmm::finish);
    }

    /// Whatever the filter lacks ends the VMM, in this test and in all others.
    pub(super) fn the_vmms_filter_lets_nothing_through_that_it_does_not_do(bench: Bench) {
        let recorder = Recorder::new();
        let (theirs, command) = (
            recorder.clone(),
            Vmm::program(bench.folder.path(), &bench.store.socket(), 1, None),
        );
        // The thread's filter, which asks this process for each call, goes to the VMM, and lies above that one's own.
        let begun = std::thread::spawn(move || {
            theirs.record_this_thread();
            Vmm::begin(command)
        });
        let mut vm = begun.join().expect("it begins");
        vm.wait_ready(1);
        // What it does before it is filtered it may do.
        recorder.forget();
        vm.done(&format!("plug {PLUGGED_MIB}"));
        for line in [
            "fill 3", "pin", "dma 3", "unpin", "lock", "pause", "resume", "save", "share 1", "lend", "back",
            "discard", "unplug", "restore",
        ] {
            vm.ask(line);
        }
        vm.done("type b");
        vm.wait_balloon(0);
        vm.done("reboot");
        vm.wait_ready(2);
        vm.finish();
        let own = |name: &str| !name.starts_with("dedup-");
        let made: std::collections::BTreeSet<i64> = recorder
            .seen()
            .into_iter()
            .filter(|seen| own(&seen.thread))
            .map(|seen| seen.call)
            .collect();
        let unused: Vec<_> = calls::CALLS.iter().filter(|call| !made.contains(call)).collect();
        assert!(unused.is_empty(), "calls that nobody makes: {unused:?}");
        assert!(calls::RARE.iter().all(|call| !calls::CALLS.contains(call)));
    }
}

/// What a line of dedup names.
const NAMES: [&str; 8] = [
    "supervisor",
    "discarder",
    "dedup",
    "setup",
    "lease",
    "pinned",
    "hostrange",
    "refusal",
];

/// What dedup takes of a VMM's source: every line of code that names it, and those that go on with what such a line begins.
fn glue(text: &str) -> usize {
    let names = |line: &str| NAMES.iter().any(|name| line.to_lowercase().contains(name));
    let code = text.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    let (mut glue, mut open, mut goes_on) = (0, 0_usize, false);
    for line in code {
        if !names(line) && open == 0 && !(goes_on && line.starts_with('.')) {
            goes_on = false;
            continue;
        }
        glue += 1;
        let count = |brackets: [char; 3]| line.matches(brackets).count();
        open = (open + count(['(', '[', '{'])).saturating_sub(count([')', ']', '}']));
        goes_on = !line.ends_with(';');
    }
    glue
}

#[test]
fn the_glue_is_short() {
    assert_eq!(
        glue("let a = 1;\nlet supervisor = spawn(A {\n    b,\n})\n.d()?;\nfoo();"),
        4
    );
    assert_eq!(glue("// a supervisor\nfoo()\n    .bar();"), 0);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let sources = std::fs::read_dir(&folder).expect("sources");
    let read = |file: std::fs::DirEntry| std::fs::read_to_string(file.path()).expect("text");
    let lines: usize = sources.map(|file| glue(&read(file.expect("a file")))).sum();
    assert!((30..=MOST_GLUE).contains(&lines), "{lines} lines");
    let main = std::fs::read_to_string(folder.join("main.rs")).expect("text");
    assert!(
        main.contains(&format!("\"{}\"", NAMES.join("|"))),
        "what the text has one grep for"
    );
}
