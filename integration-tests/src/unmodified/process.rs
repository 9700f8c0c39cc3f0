//! One VMM process with a payload guest.

use super::command::{cloud_hypervisor, preloaded, qemu};
use super::options::Options;
use super::program::Program;
use super::serial::Line;
use super::{api, qmp};
use crate::vm::Verdict;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use vmm_dedup::Setup;
use vmm_dedup_payload::{Console, PayloadConfig, Report, measure_tsc_khz};

/// Guests start slowly where KVM shadows page tables in software.
const PATIENCE: Duration = Duration::from_secs(120);

/// Where a VMM's errors go, and what it logs itself.
const ERRORS: &str = "stderr.log";

/// The settings of a VMM that has the service in it.
fn setup(store: &Path, options: &Options) -> Setup {
    let mut fields: Map<String, Value> = toml::from_str(&options.config).expect("settings");
    fields.insert("store".into(), store.to_string_lossy().into());
    fields.insert("name".into(), options.name.as_str().into());
    fields.try_into().expect("settings")
}

/// A VMM that runs. It is killed when dropped.
pub struct Vmm {
    program: Program,
    name: String,
    child: Child,
    started: Instant,
    folder: PathBuf,
    console: Console,
    line: Line,
    memory_mib: u64,
}

impl Vmm {
    /// Starts a VMM in a folder, which keeps its socket and logs.
    ///
    /// # Panics
    /// If it cannot be started: a test cannot go on then.
    #[must_use]
    pub fn start(program: &Program, folder: &Path, payload: PayloadConfig, options: &Options) -> Self {
        let folder = folder.join(&options.name);
        std::fs::create_dir_all(&folder).expect("a folder");
        let kernel = folder.join("payload.elf");
        std::fs::write(&kernel, vmm_dedup_payload::ELF).expect("the payload is written");
        let payload = payload.tsc_khz(measure_tsc_khz());
        payload.check_fits(options.memory_mib, 0).expect("the areas fit");
        let line = payload.command_line();
        // A VM that comes from elsewhere has the serial line that it had there.
        let saved = options.restore.as_ref().map(|(name, _)| name);
        let owner = saved.or(options.receive.as_ref()).unwrap_or(&options.name);
        let serial = folder.with_file_name(owner).join("serial.sock");
        let _ = std::fs::remove_file(&serial);
        let mut command = match program {
            Program::CloudHypervisor(path) | Program::Embedded(path) => {
                cloud_hypervisor(path, &folder, &kernel, &line, &serial, options)
            }
            Program::Qemu(path) => qemu(path, &folder, &kernel, &line, options),
        };
        command.args(&options.arguments);
        command.env("LD_PRELOAD", preloaded(program, options));
        let embedded = matches!(program, Program::Embedded(_));
        if let Some(store) = &options.store
            && embedded
        {
            // A VM that comes from elsewhere brings its settings along.
            if owner == &options.name {
                command.args(["--dedup", &setup(store, options).to_string()]);
            }
        } else if let Some(store) = &options.store {
            let config = folder.join("dedup.toml");
            std::fs::write(&config, &options.config).expect("the settings are written");
            command
                .env("VMM_DEDUP_STORE", store)
                .env("VMM_DEDUP_NAME", &options.name)
                .env("VMM_DEDUP_CONFIG", config)
                .env("VMM_DEDUP_LOG", folder.join("dedup.log"));
        }
        let errors = File::create(folder.join(ERRORS)).expect("a log");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors);
        let started = Instant::now();
        let mut child = command.spawn().expect("the VMM starts");
        let console = Console::new();
        let line = match program {
            Program::CloudHypervisor(_) | Program::Embedded(_) => Line::to_socket(&serial, console.clone()),
            Program::Qemu(_) => Line::to_child(&mut child, console.clone()),
        };
        Self {
            line,
            program: program.clone(),
            name: if embedded { owner } else { &options.name }.clone(),
            child,
            started,
            folder,
            console,
            memory_mib: options.memory_mib,
        }
    }

    /// The VM's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of the process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// When the process was started.
    #[must_use]
    pub fn started(&self) -> Instant {
        self.started
    }

    /// What was logged of deduplication, by the preload library or, among all else, by the VMM itself.
    #[must_use]
    pub fn dedup_log(&self) -> String {
        let file = match &self.program {
            Program::Embedded(_) => ERRORS,
            Program::CloudHypervisor(_) | Program::Qemu(_) => "dedup.log",
        };
        std::fs::read_to_string(self.folder.join(file)).unwrap_or_default()
    }

    /// Everything there is to explain a failure.
    #[must_use]
    pub fn story(&self) -> String {
        let errors = std::fs::read_to_string(self.folder.join(ERRORS)).unwrap_or_default();
        format!("{}\n{errors}\n{}", self.console.text(), self.dedup_log())
    }

    /// Waits for the `nth` report that `is` accepts, counting from 1.
    ///
    /// # Panics
    /// If it does not come.
    pub fn wait(&self, what: &str, nth: usize, is: impl Fn(&Report) -> bool) -> Report {
        let nth_of = |reports: &[Report]| reports.iter().filter(|r| is(r)).nth(nth - 1).cloned();
        let report = self.console.wait(PATIENCE, |_, reports| nth_of(reports));
        report.unwrap_or_else(|| panic!("{what} does not come: {}", self.story()))
    }

    /// Waits until the guest has filled its pages for the `nth` time.
    ///
    /// # Panics
    /// If it does not.
    pub fn wait_ready(&self, nth: usize) {
        // In the text, since a reset may cut a line and leave this report in the middle of it.
        let ready = |text: &str| (text.matches("@payload ready ").count() >= nth).then_some(());
        let booted = self.console.wait(PATIENCE, |text, _| ready(text));
        assert!(booted.is_some(), "it does not boot: {}", self.story());
    }

    /// Types a character into the guest's serial line.
    ///
    /// # Panics
    /// If the VMM is gone.
    pub fn type_in(&mut self, character: u8) {
        self.line.write(character);
    }

    /// Lets the guest give its common pages to the host (`f`: report them as free); `(pages, stale words)`.
    pub fn balloon(&mut self, command: u8, nth: usize) -> (u64, u64) {
        self.type_in(command);
        let report = self.wait("balloon", nth, |r| matches!(r, Report::Balloon { .. }));
        match report {
            Report::Balloon { pages, stale } => (pages, stale),
            _ => (0, 0),
        }
    }

    /// Stops the vCPUs.
    pub fn pause(&self) {
        match &self.program {
            Program::CloudHypervisor(_) | Program::Embedded(_) => self.api("vm.pause", ""),
            Program::Qemu(_) => self.qmp("stop", json!({})),
        }
    }

    /// Lets them go on. A VM that is being restored is not ready for that at once.
    ///
    /// # Panics
    /// If they do not.
    pub fn resume(&self) {
        let start = Instant::now();
        loop {
            let resumed = match &self.program {
                Program::CloudHypervisor(_) | Program::Embedded(_) => {
                    api::put(&self.socket(), "vm.resume", "").map(drop)
                }
                Program::Qemu(_) => self.go_on(),
            };
            let Err(error) = resumed else { return };
            assert!(start.elapsed() < PATIENCE, "{error}: {}", self.story());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// QEMU's `cont` before a restore has ended has no effect.
    fn go_on(&self) -> Result<(), String> {
        let ask = |command| qmp::execute(&self.socket(), command, json!({}));
        ask("cont")?;
        let state = ask("query-status")?;
        if state["running"] == json!(true) {
            Ok(())
        } else {
            Err(state.to_string())
        }
    }

    /// Has Cloud Hypervisor pass a device through that is none.
    ///
    /// # Panics
    /// If it finds one there.
    pub fn pass_through_nothing(&self) {
        let nothing = json!({ "path": "/sys/bus/pci/devices/none" }).to_string();
        assert!(api::put(&self.socket(), "vm.add-device", &nothing).is_err());
    }

    /// Cloud Hypervisor's counters, by device.
    ///
    /// # Panics
    /// If it does not tell them.
    #[must_use]
    pub fn counters(&self) -> serde_json::Value {
        let counters = api::get(&self.socket(), "vm.counters");
        let counters = counters.unwrap_or_else(|error| panic!("{error}: {}", self.story()));
        serde_json::from_str(&counters).expect("JSON")
    }

    /// Resets the machine.
    pub fn reboot(&self) {
        match &self.program {
            Program::CloudHypervisor(_) | Program::Embedded(_) => self.api("vm.reboot", ""),
            Program::Qemu(_) => self.qmp("system_reset", json!({})),
        }
    }

    /// Plugs memory in.
    pub fn plug(&self, mib: u64) {
        match &self.program {
            Program::CloudHypervisor(_) | Program::Embedded(_) => self.resize(mib),
            Program::Qemu(_) => {
                let backend = json!({ "qom-type": "memory-backend-ram", "id": "more", "size": mib << 20 });
                self.qmp("object-add", backend);
                self.qmp(
                    "device_add",
                    json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" }),
                );
            }
        }
    }

    /// Offers memory by virtio-mem, which is the guest's to take.
    pub fn offer(&self, mib: u64) {
        match &self.program {
            Program::CloudHypervisor(_) | Program::Embedded(_) => self.resize(mib),
            Program::Qemu(_) => {
                let device = "/machine/peripheral/mem";
                let wanted = json!({ "path": device, "property": "requested-size", "value": mib << 20 });
                self.qmp("qom-set", wanted);
            }
        }
    }

    fn resize(&self, more_mib: u64) {
        let bytes = (self.memory_mib + more_mib) << 20;
        self.api("vm.resize", &json!({ "desired_ram": bytes }).to_string());
    }

    /// Writes the paused VM into a folder, from which [`Options::restore`] can take it.
    ///
    /// # Panics
    /// If that fails.
    pub fn snapshot(&self, folder: &Path) {
        std::fs::create_dir_all(folder).expect("a folder");
        match &self.program {
            Program::CloudHypervisor(_) | Program::Embedded(_) => {
                let url = format!("file://{}", folder.display());
                self.api("vm.snapshot", &json!({ "destination_url": url }).to_string());
            }
            Program::Qemu(_) => {
                let uri = format!("exec:cat > {}", folder.join("state").display());
                self.send_state(&uri);
            }
        }
    }

    /// QEMU writes the VM somewhere.
    fn send_state(&self, uri: &str) {
        self.qmp("migrate", json!({ "uri": uri }));
        let start = Instant::now();
        loop {
            let state = qmp::execute(&self.socket(), "query-migrate", json!({})).expect("QEMU answers");
            match state["status"].as_str() {
                Some("completed") => break,
                Some("failed" | "cancelled") => panic!("{state}"),
                _ => {}
            }
            assert!(start.elapsed() < PATIENCE, "{state}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends the running VM to a VMM that waits for it ([`Options::receive`]).
    ///
    /// # Panics
    /// If it does not get there.
    pub fn migrate_to(&self, target: &Self) {
        let path = target.migration();
        let uri = format!("unix:{}", path.display());
        match &self.program {
            Program::CloudHypervisor(_) | Program::Embedded(_) => {
                target.wait_for(&target.socket());
                let (socket, body) = (target.socket(), json!({ "receiver_url": uri }).to_string());
                let received = std::thread::spawn(move || api::put(&socket, "vm.receive-migration", &body));
                target.wait_for(&path);
                self.api(
                    "vm.send-migration",
                    &json!({ "destination_url": uri }).to_string(),
                );
                let received = received.join().expect("no panic");
                assert!(received.is_ok(), "{received:?}: {}", target.story());
            }
            Program::Qemu(_) => {
                target.wait_for(&path);
                self.send_state(&uri);
            }
        }
    }

    /// Waits for a socket.
    fn wait_for(&self, path: &Path) {
        let start = Instant::now();
        while !path.exists() {
            assert!(
                start.elapsed() < PATIENCE,
                "no {}: {}",
                path.display(),
                self.story()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Lets the guest verify all of its memory and power off, and waits for the VMM to end.
    ///
    /// # Panics
    /// If any of that does not happen.
    #[must_use]
    pub fn finish(mut self, nth: usize) -> Verdict {
        self.type_in(b'q');
        self.end(nth)
    }

    /// Waits until the guest has verified all of its memory and the VMM has ended.
    ///
    /// # Panics
    /// If that does not happen.
    #[must_use]
    pub fn end(mut self, nth: usize) -> Verdict {
        let done = self.wait("done", nth, |r| matches!(r, Report::Done { .. }));
        let verify = self.wait("verify", nth, |r| matches!(r, Report::Verify { .. }));
        let Report::Verify {
            pages,
            errors,
            writes,
        } = verify
        else {
            unreachable!()
        };
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                break status;
            }
            assert!(
                start.elapsed() < PATIENCE,
                "the VMM does not end: {}",
                self.story()
            );
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "the VMM ended with {status}: {}", self.story());
        Verdict {
            ok: done == Report::Done { ok: true },
            errors,
            writes,
            pages,
        }
    }

    fn migration(&self) -> PathBuf {
        self.folder.join("migration.sock")
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("api.sock")
    }

    fn api(&self, command: &str, body: &str) {
        if let Err(error) = api::put(&self.socket(), command, body) {
            panic!("{error}: {}", self.story());
        }
    }

    fn qmp(&self, command: &str, arguments: serde_json::Value) {
        if let Err(error) = qmp::execute(&self.socket(), command, arguments) {
            panic!("{error}: {}", self.story());
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
