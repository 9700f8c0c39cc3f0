//! A folder with a fleet file, and the proof that nothing of a fleet is left.

use rustix::process::{Pid, Signal, WaitOptions};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use vmm_dedup_host::process::Stat;

/// Guests touch little, since the first touch of a page is slow where KVM is emulated: 1,024 pages each.
pub(crate) const CMDLINE: &str =
    "seed={index} private_mib=1 zero_mib=1 common_mib=2 ws_pages=0 rate=1 report_ms=5000 seconds=100000";
/// Of those, pages that all guests have, and zero pages.
pub(crate) const COMMON_PAGES: u64 = 512;

/// Two VMs of one entry.
pub(crate) const TWO: &str = "[[vm]]\nname = \"pay\"\ncount = 2\ntemplate = \"payload\"\nvmm = \"reference\"\ndedup = { cpu_percent = 20 }\n";

/// A VM under QEMU without dedup. Some nested KVMs do not let QEMU set the register behind this flag.
pub(crate) const QEMU_VM: &str = "[[vm]]\nname = \"q\"\ntemplate = \"payload\"\nvmm = \"qemu\"\nextra_args = [\"-cpu\", \"host,-arch-capabilities\"]\ndedup = { mode = \"off\" }\n";

/// One fleet's folder.
pub(crate) struct Host {
    folder: tempfile::TempDir,
    /// What was there before the fleet.
    inputs: BTreeSet<PathBuf>,
    program: PathBuf,
}

impl Host {
    /// A folder with a payload kernel and the file `fleet.toml`. Its store has no metrics and a small limit.
    pub(crate) fn new(toml: &str) -> Self {
        // Processes whose parent ends become ours, so that they can be found and waited for.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).expect("a subreaper");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        fs::write(path.join("payload.elf"), vmm_dedup_payload::ELF).expect("a kernel");
        let tsc = vmm_dedup_payload::measure_tsc_khz();
        let template = format!(
            "[template.payload]\nmemory_mib = 64\nkernel = \"payload.elf\"\ncmdline = \"{CMDLINE} tsc_khz={tsc}\"\n"
        );
        let store = "[store]\nsocket = \"store.sock\"\nmetrics = \"none\"\nmax_mib = 256\n";
        let store = if toml.contains("[store]") { "" } else { store };
        fs::write(path.join("fleet.toml"), format!("{toml}\n{store}{template}")).expect("a file");
        let mut host = Self {
            folder,
            inputs: BTreeSet::new(),
            program: env!("CARGO_BIN_EXE_vmm-dedup").into(),
        };
        host.inputs = host.files();
        host
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Lets other users reach the folder, and the program, which may be where only who built it can.
    pub(crate) fn open_to_all(&mut self) {
        let everybody = fs::Permissions::from_mode(0o755);
        fs::set_permissions(self.folder.path(), everybody).expect("a mode");
        self.program = self.path("vmm-dedup");
        fs::copy(env!("CARGO_BIN_EXE_vmm-dedup"), &self.program).expect("a copy");
        self.inputs.insert(self.program.clone());
    }

    /// Adds a file that the fleet uses, executable.
    pub(crate) fn add(&mut self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path(name);
        let mut file = fs::File::create(&path).expect("a file");
        file.write_all(content).expect("a file");
        rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o755)).expect("a mode");
        self.inputs.insert(path.clone());
        path
    }

    /// `vmm-dedup fleet COMMAND FILE`, to be run.
    pub(crate) fn command(&self, command: &str) -> Command {
        self.with_arguments(Command::new(&self.program), command)
    }

    /// The same, which finds devices that these users may open, whatever the host lets them do: in a mount namespace of its own.
    pub(crate) fn command_with(&self, devices: &Devices, command: &str) -> Command {
        let mut process = devices.command();
        process.arg(&self.program);
        self.with_arguments(process, command)
    }

    /// `vmm-dedup doctor`, which finds these devices.
    pub(crate) fn doctor(&self, devices: &Devices) -> Command {
        let mut process = devices.command();
        process.arg(&self.program).arg("doctor");
        process.arg("--store").arg(self.path("store.sock"));
        process
    }

    fn with_arguments(&self, mut process: Command, command: &str) -> Command {
        process.args(["fleet", command]).arg(self.path("fleet.toml"));
        process.arg("--runtime-dir").arg(self.path("run"));
        process
    }

    pub(crate) fn run(&self, command: &str, more: &[&str]) -> Output {
        self.command(command)
            .args(more)
            .output()
            .expect("the command runs")
    }

    /// Runs a command that must succeed; returns its output.
    pub(crate) fn must(&self, command: &str, more: &[&str]) -> String {
        let output = self.run(command, more);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {errors}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// `up`, of a fleet of which something is left to whoever runs it: the plan says the same and ends with the same code. Returns
    /// what was said.
    pub(crate) fn leaves(&self) -> String {
        let [plan, said] = [&["--plan"][..], &[]].map(|more| {
            let output = self.run("up", more);
            let (error, code) = Self::failure(&output);
            let name = error.split(' ').nth(2).unwrap_or_default().to_owned();
            let expected = format!("vmm-dedup: fleet {name} is not as its file says: ");
            assert!(error.starts_with(&expected) && code == 3, "{more:?}: {error}");
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(!said.contains("nothing to do"), "{more:?}: {said}");
            said
        });
        let left = |text: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| line.starts_with("! "));
            lines.map(str::to_owned).collect()
        };
        assert!(
            !left(&said).is_empty() && left(&said) == left(&plan),
            "{plan}{said}"
        );
        plan + &said
    }

    /// `status --json`, whatever its exit code.
    pub(crate) fn status(&self) -> Value {
        let output = self.run("status", &["--json"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {errors}"))
    }

    /// A VM's entry in `status --json`.
    pub(crate) fn vm(&self, name: &str) -> Value {
        let status = self.status();
        let vms = status["vms"].as_array().expect("VMs");
        vms.iter()
            .find(|vm| vm["name"] == name)
            .unwrap_or_else(|| panic!("no {name}"))
            .clone()
    }

    /// The last line that a failing command writes to standard error, and its exit code.
    pub(crate) fn failure(output: &Output) -> (String, i32) {
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = errors.lines().last().unwrap_or_default().to_owned();
        (last, output.status.code().unwrap_or(-1))
    }

    fn files(&self) -> BTreeSet<PathBuf> {
        let entries = fs::read_dir(self.folder.path()).expect("the folder");
        entries.map(|entry| entry.expect("an entry").path()).collect()
    }

    /// The memfds that a process holds: device and inode.
    pub(crate) fn memfds_of(pid: &Value) -> BTreeSet<(u64, u64)> {
        let found = memfds(&Path::new("/proc").join(pid.to_string()));
        assert!(!found.is_empty(), "process {pid} has memfds");
        found
    }

    /// Fails if a process, a file, a socket or one of these memfds is left.
    pub(crate) fn assert_nothing_left(&self, memfds_before: &BTreeSet<(u64, u64)>) {
        let folder = self.folder.path().to_str().expect("UTF-8");
        let start = Instant::now();
        let (mut children, mut named) = (living_children(), processes_naming(folder));
        // A killed process is a zombie, then gone; how soon the kernel gets there is not up to us.
        while !(children.is_empty() && named.is_empty()) && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(20));
            (children, named) = (living_children(), processes_naming(folder));
        }
        assert!(children.is_empty(), "processes left: {children:?}");
        assert!(named.is_empty(), "processes left: {named:?}");
        assert_eq!(self.files(), self.inputs, "files left");
        let sockets = fs::read_to_string("/proc/net/unix").expect("sockets");
        let left: Vec<_> = sockets.lines().filter(|line| line.contains(folder)).collect();
        assert!(left.is_empty(), "sockets left: {left:?}");
        for process in process_folders() {
            assert!(
                memfds(&process).is_disjoint(memfds_before),
                "{} holds a memfd",
                process.display()
            );
        }
    }
}

impl Drop for Host {
    /// Also when a test has failed nothing goes on: what it started besides the fleet would fail the next ones.
    fn drop(&mut self) {
        let _ = self.run("down", &["--grace", "0"]);
        if std::thread::panicking() {
            for stat in living_children() {
                let pid = stat.split(' ').next().and_then(|pid| pid.parse().ok());
                if let Some(pid) = pid.and_then(Pid::from_raw) {
                    let _ = rustix::process::kill_process(pid, Signal::KILL);
                }
            }
        }
    }
}

/// /dev/kvm and /dev/userfaultfd of one group, which only the processes see that are started with them: nothing of the host changes.
pub(crate) struct Devices {
    pub(crate) group: u32,
    /// Of /dev/kvm and /dev/userfaultfd.
    pub(crate) modes: [&'static str; 2],
}

/// Makes the devices in a file system of its own, puts them in their places, and goes on with what it is told.
const WITH_DEVICES: &str = r#"set -e
group=$1; shift
mount -t tmpfs -o mode=0755 tmpfs /mnt
for device in kvm userfaultfd; do
    [ -e /dev/$device ]
    mknod -m "$1" /mnt/$device c $((0x$(stat -c %t /dev/$device))) $((0x$(stat -c %T /dev/$device)))
    chgrp "$group" /mnt/$device
    mount --bind /mnt/$device /dev/$device
    shift
done
umount -l /mnt
exec "$@"
"#;

impl Devices {
    fn command(&self) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", WITH_DEVICES, "sh", &self.group.to_string()]);
        command.args(self.modes);
        command
    }

    /// Whether this test may become other users, and make devices for them; says so if not.
    pub(crate) fn are_possible(&self) -> bool {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: only root can start VMs of other users");
            return false;
        }
        let tried = self.command().arg("true").output();
        match tried {
            Ok(output) if output.status.success() => true,
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                eprintln!("SKIPPED: devices cannot be made for other users: {said}");
                false
            }
            Err(e) => {
                eprintln!("SKIPPED: unshare cannot be run: {e}");
                false
            }
        }
    }
}

fn process_folders() -> Vec<PathBuf> {
    let entries = fs::read_dir("/proc")
        .expect("/proc")
        .flatten()
        .map(|entry| entry.path());
    let is_process = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.as_encoded_bytes()[0].is_ascii_digit())
    };
    entries.filter(is_process).collect()
}

fn memfds(process: &Path) -> BTreeSet<(u64, u64)> {
    let entries = fs::read_dir(process.join("fd"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let is_memfd =
        |path: &PathBuf| fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:"));
    let held = entries
        .filter(is_memfd)
        .filter_map(|path| fs::metadata(path).ok());
    held.map(|file| (file.dev(), file.ino())).collect()
}

/// Our children that have not ended; those that have are waited for.
fn living_children() -> Vec<String> {
    let own = std::process::id().to_string();
    let mut living = Vec::new();
    for process in process_folders() {
        let Ok(stat) = fs::read_to_string(process.join("stat")) else {
            continue;
        };
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        if fields.get(1) != Some(&own.as_str()) {
            continue;
        }
        if fields[0] == "Z" {
            let pid = process
                .file_name()
                .and_then(|name| name.to_str()?.parse().ok())
                .and_then(Pid::from_raw);
            let _ = rustix::process::waitpid(pid, WaitOptions::NOHANG);
        } else {
            living.push(stat);
        }
    }
    living
}

/// Processes that have the folder in their arguments.
fn processes_naming(folder: &str) -> Vec<String> {
    let arguments = process_folders()
        .into_iter()
        .filter_map(|process| fs::read(process.join("cmdline")).ok());
    let texts = arguments.map(|bytes| String::from_utf8_lossy(&bytes).replace('\0', " "));
    texts.filter(|text| text.contains(folder)).collect()
}

/// Sends a signal to a process by number. What is to stop has stopped then: on a busy machine that takes a moment.
pub(crate) fn send(pid: &Value, signal: Signal) {
    let number = pid.as_u64().expect("a number");
    let process = i32::try_from(number).ok().and_then(Pid::from_raw);
    rustix::process::kill_process(process.expect("a process"), signal).expect("kill");
    if signal == Signal::STOP {
        wait_until("it stops", || {
            Stat::of(number).is_some_and(|stat| stat.is_stopped())
        });
    }
}

/// Waits for a condition.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "{what}: not within two minutes"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Whether KVM can be used; says so if not. In CI it must.
pub(crate) fn kvm_is_there() -> bool {
    let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    assert!(
        kvm.is_ok() || std::env::var_os("CI").is_none(),
        "/dev/kvm cannot be opened in CI"
    );
    if kvm.is_err() {
        eprintln!("SKIPPED: /dev/kvm cannot be opened");
    }
    kvm.is_ok()
}

/// Whether a VMM is there: named by the variable, or on PATH; says so if not.
pub(crate) fn vmm_is_there(variable: &str, program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::var_os(variable).is_some()
        || std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if !found {
        eprintln!("SKIPPED: {program} is neither on PATH nor named by {variable}");
    }
    found
}
