//! A runtime folder of the test's own, stores that list themselves in it, and VMs.

use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use vmm_dedup::{Reason, Refusal, Refused};
use vmm_dedup_host::process::Stat;

const PATIENCE: Duration = Duration::from_secs(120);

/// Pages that the VMs of [`Host::vm`] have in common: 8 MiB.
pub(crate) const COMMON_PAGES: u64 = 2048;

/// Ends with the test.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    pub(crate) fn send(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.0), signal).expect("kill");
        if signal == Signal::STOP {
            has_stopped(self.pid().into());
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Kills it, as the kernel does that is out of memory.
    pub(crate) fn kill(&mut self) {
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

/// Waits until a process to which SIGSTOP was sent has stopped: on a busy machine that takes a moment.
pub(crate) fn has_stopped(pid: u64) {
    eventually("it has stopped", || {
        Stat::of(pid).is_some_and(|stat| stat.is_stopped()).then_some(())
    });
}

/// Waits for something.
pub(crate) fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What a command printed.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
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

/// A host with nothing but what the test starts.
pub(crate) struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    /// Its paths are such that a shell takes them for one word only if they are quoted.
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("a'b ").tempdir();
        Self {
            folder: folder.expect("a folder"),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The runtime folder.
    pub(crate) fn runtime(&self) -> PathBuf {
        self.path("run")
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"));
        command.args(args);
        command.env("VMM_DEDUP_RUNTIME_DIR", self.runtime());
        command.env_remove("VMM_DEDUP_STORE");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the command runs")
    }

    /// Runs a command that must succeed.
    pub(crate) fn must(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.must(args)).expect("JSON")
    }

    /// A fleet file with one VM.
    pub(crate) fn fleet_file(&self, vm: &str) -> String {
        fs::write(self.path("payload.elf"), vmm_dedup_payload::ELF).expect("a kernel");
        let file = self.path("fleet.toml");
        let text = format!(
            "name = \"f\"\n[store]\nmetrics = \"none\"\n[[vm]]\nname = \"{vm}\"\nvmm = \"reference\"\nmemory_mib = 64\n\
             kernel = \"payload.elf\"\ncmdline = \"private_mib=4 zero_mib=4 ws_pages=0 seconds=1000000\"\n"
        );
        fs::write(&file, text).expect("a file");
        file.to_str().expect("UTF-8").to_owned()
    }

    /// The one line on standard error of a command that fails with this code.
    pub(crate) fn error(&self, args: &[&str], code: i32) -> String {
        error_of(self.command(args), code)
    }

    /// A store that listens at NAME.sock and is of the domain NAME.
    pub(crate) fn store(&self, name: &str, options: &[&str]) -> Process {
        let socket = self.path(&format!("{name}.sock"));
        let mut store = self.command(&["store", "--metrics", "none", "--domain", name, "--socket"]);
        store.arg(&socket).args(options).stderr(Stdio::null());
        let store = Process(store.spawn().expect("the command runs"));
        eventually("the store is listed", || {
            let stat = self.run(&["stat", "--json"]);
            let stat: Value = serde_json::from_slice(&stat.stdout).ok()?;
            let pid = stat["stores"].as_array()?.iter().any(|s| s["pid"] == store.pid());
            pid.then_some(())
        });
        store
    }

    /// A VM of a store that is not deduplicated: it needs no KVM.
    pub(crate) fn refused(&self, store: &str, name: &str) -> Refused {
        let refusal = Refusal::new(Reason::Vfio, "a device has memory pinned", "detach it");
        let socket = self.path(&format!("{store}.sock"));
        let refused = Refused::announce(&socket, name, 512, &refusal).expect("a thread");
        eventually("the VM is listed", || self.vm(name));
        refused
    }

    /// A VM of the store `default`.
    pub(crate) fn guest(&self, name: &str) -> Process {
        self.guest_with(name, "")
    }

    /// The same; `parameters`: more of the test guest's.
    pub(crate) fn guest_with(&self, name: &str, parameters: &str) -> Process {
        let payload = format!("common_mib=8 private_mib=4 ws_area=private seconds=1000000 {parameters}");
        let mut run = self.command(&[
            "run",
            "--payload",
            &payload,
            "--memory-mib",
            "64",
            "--pass-period-ms",
            "100",
        ]);
        run.args(["--name", name, "--store"])
            .arg(self.path("default.sock"));
        run.stdin(Stdio::null()).stdout(Stdio::null());
        Process(run.spawn().expect("the command runs"))
    }

    /// What `stat --json` says of a VM.
    pub(crate) fn vm(&self, name: &str) -> Option<Value> {
        let stat = self.run(&["stat", "--json"]);
        let stat: Value = serde_json::from_slice(&stat.stdout).ok()?;
        stat["vms"]
            .as_array()?
            .iter()
            .find(|vm| vm["name"] == name)
            .cloned()
    }

    /// Waits until a VM shares what it has in common with others.
    pub(crate) fn wait_for_sharing(&self, name: &str) {
        eventually("it shares", || {
            (self.vm(name)?["pages_mapped"].as_u64()? >= COMMON_PAGES).then_some(())
        });
    }

    /// Four images of memory with something in common, for `estimate`.
    pub(crate) fn images(&self) -> Vec<String> {
        let page = |id: u64| {
            (0..512u64)
                .flat_map(move |word| ((id << 16 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_ne_bytes())
        };
        let image = |vm: u64| {
            let pages = (0..256).map(move |n| if n % 2 == 0 { n } else { vm << 32 | n });
            let path = self.path(&format!("a-memory-image-with-a-long-name-{vm}"));
            fs::write(&path, pages.flat_map(page).collect::<Vec<u8>>()).expect("a file");
            path.to_str().expect("UTF-8").to_owned()
        };
        (1..=4).map(image).collect()
    }
}

/// The one line on standard error of a command that fails with this code.
pub(crate) fn error_of(mut command: Command, code: i32) -> String {
    let output = command.output().expect("the command runs");
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{command:?}: {errors}");
    assert_eq!(errors.trim_end().lines().count(), 1, "{command:?}: {errors}");
    errors
}

/// The commands in a text's backquotes that begin with the program's name.
pub(crate) fn hints(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted
        .filter(|hint| hint.starts_with("vmm-dedup "))
        .map(str::to_owned)
        .collect()
}

/// A hint in a shell, as if it was pasted.
pub(crate) fn pasted(host: &Host, hint: &str) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_vmm-dedup"));
    let path = format!(
        "{}:{}",
        program.parent().expect("a folder").display(),
        std::env::var("PATH").unwrap_or_default()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("exec {hint}")]).env("PATH", path);
    shell.env("VMM_DEDUP_RUNTIME_DIR", host.runtime());
    shell.env_remove("VMM_DEDUP_STORE");
    shell
}
