//! `set`, `explain` and `top` on a real VM.

use rustix::process::{Pid, Signal};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vmm_dedup::{Reason, Refusal, Refused};
use vmm_dedup_host::process::Stat;

const PATIENCE: Duration = Duration::from_secs(120);

/// Ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
}

fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

struct Store {
    socket: PathBuf,
    _process: Process,
    _folder: tempfile::TempDir,
}

impl Store {
    fn start() -> Self {
        Self::start_with(&[])
    }

    fn start_with(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("s.sock");
        let mut store = command();
        store
            .args(["store", "--metrics", "none", "--socket"])
            .arg(&socket)
            .args(options);
        let process = Process(store.stderr(Stdio::null()).spawn().expect("the command runs"));
        eventually("the store listens", || socket.exists().then_some(()));
        Self {
            socket,
            _process: process,
            _folder: folder,
        }
    }

    fn ask(&self, args: &[&str]) -> Output {
        let mut command = command();
        command.args(args).arg("--store").arg(&self.socket);
        command.output().expect("the command runs")
    }

    /// The one line on standard error of a command that fails.
    fn error(&self, args: &[&str]) -> String {
        let output = self.ask(args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        assert_eq!(text.trim_end().lines().count(), 1, "{text}");
        text
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.ask(args);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn vm(&self, name: &str) -> Option<Value> {
        let stat = self.json(&["stat", "--json"]);
        stat["vms"]
            .as_array()?
            .iter()
            .find(|vm| vm["name"] == name)
            .cloned()
    }
}

fn kvm_is_there() -> bool {
    let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    assert!(
        kvm.is_ok() || std::env::var_os("CI").is_none(),
        "/dev/kvm cannot be opened in CI"
    );
    if kvm.is_err() {
        eprintln!("SKIPPED: /dev/kvm cannot be opened");
    }
    kvm.is_ok()
}

fn vm(store: &Path, name: &str) -> Process {
    vm_with(store, name, &[])
}

fn vm_with(store: &Path, name: &str, options: &[&str]) -> Process {
    let mut run = command();
    run.args([
        "run",
        "--payload",
        "common_mib=8 private_mib=4 ws_area=private seconds=1000000",
    ])
    .args([
        "--memory-mib",
        "64",
        "--pass-period-ms",
        "100",
        "--name",
        name,
        "--store",
    ])
    .arg(store)
    .args(options)
    .stdin(Stdio::null())
    .stdout(Stdio::null());
    Process(run.spawn().expect("the command runs"))
}

#[test]
fn a_vm_is_switched_and_explained_while_it_runs() {
    if !kvm_is_there() {
        return;
    }
    let store = Store::start();
    let _vms = [vm(&store.socket, "web"), vm(&store.socket, "db")];
    // 8 MiB in common are 2048 pages.
    eventually("they share", || {
        let mapped = store.vm("web")?["pages_mapped"].as_u64()?;
        (mapped >= 2048).then_some(())
    });
    let explained = store.json(&["explain", "web", "--json"]);
    let classes = explained["classes"].as_object().expect("classes");
    let sum: u64 = classes.values().filter_map(Value::as_u64).sum();
    assert_eq!((explained["pages"].as_u64(), sum), (Some(64 << 8), 64 << 8));
    assert!(classes["shared"].as_u64() >= Some(2048), "{explained}");
    let first_mib = store.json(&["explain", "web", "--json", "--gpa", "0x100000-0x200000"]);
    assert_eq!(first_mib["pages"], 256);
    let text = store.ask(&["explain", "web"]).stdout;
    let text = String::from_utf8(text).expect("UTF-8");
    assert!(
        text.starts_with("web: running") && text.contains("pinned"),
        "{text}"
    );

    assert!(
        store
            .ask(&["set", "web", "off", "--unmerge", "budget=7"])
            .status
            .success()
    );
    let web = store.vm("web").expect("web");
    assert_eq!(
        (&web["state"], &web["pages_mapped"], &web["cpu_percent"]),
        (&Value::from("off"), &Value::from(0), &Value::from(7))
    );
    let note = store.json(&["explain", "web", "--json"])["note"].to_string();
    assert!(note.contains("switched off"), "{note}");
    assert!(store.ask(&["set", "web", "on", "budget=90"]).status.success());
    eventually("it shares again", || {
        (store.vm("web")?["pages_mapped"].as_u64()? >= 2048).then_some(())
    });
}

#[test]
fn what_cannot_be_asked_is_said_in_one_line() {
    let store = Store::start();
    let text = store.error(&["set", "web", "off"]);
    assert!(
        text.contains("no VM is called web") && text.contains("no VM is connected"),
        "{text}"
    );
    let refusal = Refusal::new(
        Reason::SharedMemory,
        "RAM is MAP_SHARED",
        "use virtio-net for net0",
    );
    let _refused = Refused::announce(&store.socket, "gpu", 512, &refusal).expect("a thread");
    eventually("the refused VM is listed", || store.vm("gpu"));
    let text = store.error(&["set", "gpu", "on"]);
    assert!(
        text.contains("RAM is MAP_SHARED") && text.contains("use virtio-net"),
        "{text}"
    );
    let explained = store.json(&["explain", "gpu", "--json"]);
    assert_eq!(
        (&explained["reason"], &explained["lift"]),
        (
            &Value::from("shared_memory"),
            &Value::from("use virtio-net for net0")
        )
    );
    let text = String::from_utf8(store.ask(&["explain", "gpu"]).stdout).expect("UTF-8");
    assert!(text.starts_with("gpu: refused (shared_memory)"), "{text}");
    for wrong in [
        &["set", "gpu"][..],
        &["set", "gpu", "on", "off"],
        &["set", "gpu", "on", "--unmerge"],
        &["set", "gpu", "budget=0"],
        &["explain", "gpu", "--gpa", "5-4"],
        &["top"],
    ] {
        assert_eq!(store.ask(wrong).status.code(), Some(2), "{wrong:?}");
    }
    let nowhere = command()
        .args(["explain", "x", "--store", "/nonexistent"])
        .output();
    let text = String::from_utf8(nowhere.expect("it runs").stderr).expect("UTF-8");
    assert!(text.contains("vmm-dedup store --socket /nonexistent"), "{text}");
}

/// `top` in a terminal of 80 by 24, and what it has drawn so far.
struct Terminal {
    top: Process,
    keyboard: File,
    screen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn open(store: &Path) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pty");
        grantpt(&master).expect("grantpt");
        unlockpt(&master).expect("unlockpt");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let name = name.into_string().expect("UTF-8");
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&master, size).expect("a size");
        let slave = || {
            let terminal = OpenOptions::new().read(true).write(true).open(&name);
            terminal.expect("the terminal")
        };
        let mut top = command();
        top.args(["top", "--interval", "0.2", "--store"]).arg(store);
        top.stdin(slave())
            .stdout(slave())
            .stderr(slave())
            .env("TERM", "xterm");
        let top = Process(top.spawn().expect("the command runs"));
        let keyboard = File::from(master.try_clone().expect("a descriptor"));
        let screen = Arc::new(Mutex::new(Vec::new()));
        let (seen, mut output) = (screen.clone(), File::from(master));
        // It ends with the last descriptor of the terminal.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut bytes) {
                seen.lock().expect("a lock").extend_from_slice(&bytes[..n]);
            }
        });
        Self {
            top,
            keyboard,
            screen,
        }
    }

    fn shows(&self, what: &str) -> Option<()> {
        let screen = self.screen.lock().expect("a lock");
        String::from_utf8_lossy(&screen).contains(what).then_some(())
    }

    /// How it ended, once it has left the alternate screen that it had entered.
    fn end(&mut self) -> ExitStatus {
        let status = eventually("it ends", || self.top.0.try_wait().expect("a status"));
        assert!(self.shows("\x1b[?1049h").is_some());
        eventually("the screen is as it was", || self.shows("\x1b[?1049l"));
        status
    }
}

#[test]
fn top_draws_in_a_terminal_of_80_by_24_and_leaves_it_as_it_was() {
    let store = Store::start();
    let refusal = Refusal::new(Reason::Vfio, "a device", "detach it");
    let _refused = Refused::announce(&store.socket, "gpu", 512, &refusal).expect("a thread");
    eventually("the refused VM is listed", || store.vm("gpu"));
    let mut terminal = Terminal::open(&store.socket);
    eventually("the VM is shown", || terminal.shows("vfio"));
    terminal.keyboard.write_all(b"r").expect("a key");
    // Only what changes is drawn: the mark of the column.
    eventually("the sort order is reversed", || terminal.shows("^"));
    terminal.keyboard.write_all(b"q").expect("a key");
    assert!(terminal.end().success());

    let mut terminal = Terminal::open(&store.socket);
    eventually("the VM is shown", || terminal.shows("vfio"));
    rustix::process::kill_process(Pid::from_child(&terminal.top.0), Signal::TERM).expect("kill");
    assert_eq!(terminal.end().code(), Some(128 + 15));
}

#[test]
fn a_vm_whose_device_stops_is_searched_by_the_index() {
    if !kvm_is_there() {
        return;
    }
    let store = Store::start_with(&["--ordered"]);
    let socket = store.socket.with_file_name("device");
    let mut device = command();
    device.args(["device", "pageforge", "--socket"]).arg(&socket);
    let device = Process(device.stderr(Stdio::null()).spawn().expect("the command runs"));
    eventually("the device listens", || socket.exists().then_some(()));
    let socket = socket.to_str().expect("UTF-8");
    let by_device = ["--search", "pageforge", "--search-socket", socket];
    let _vms = ["web", "db"].map(|name| vm_with(&store.socket, name, &by_device));
    let shares = |vm: &Value| vm["pages_mapped"].as_u64() >= Some(2048);
    let web = eventually("they share", || store.vm("web").filter(shares));
    assert_eq!(web["search"]["engine"], "pageforge", "{web}");
    assert!(web["search"]["twins_total"].as_u64() >= Some(2048), "{web}");

    let pid = Pid::from_child(&device.0);
    rustix::process::kill_process(pid, Signal::STOP).expect("kill");
    eventually("it has stopped", || {
        Stat::of(device.0.id().into())
            .is_some_and(|stat| stat.is_stopped())
            .then_some(())
    });
    assert!(store.ask(&["set", "web", "off", "--unmerge"]).status.success());
    assert!(store.ask(&["set", "web", "on"]).status.success());
    let web = eventually("it shares again", || store.vm("web").filter(shares));
    assert_eq!(
        (&web["search"]["engine"], &web["state"]),
        (&"index".into(), &"running".into())
    );
    assert!(web["search"]["failures_total"].as_u64() > Some(0), "{web}");
}
