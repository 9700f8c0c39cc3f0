//! L0's part: prepares images, runs L1 in QEMU, listens to it, ends it.

use crate::debian::{Kernel, Userland};
use crate::event::Event;
use crate::images::{self, Contents};
use crate::qemu::{self, Running};
use crate::{Failure, Scenario, shared_files};
use serde_json::{Map, Value};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

pub use crate::qemu::{Accelerator, need as need_qemu};

/// Whether there is a VMM here that passes devices through to guests.
#[must_use]
pub fn passes_devices_through() -> bool {
    crate::inside::vmm::that_pass_through().next().is_some()
}

const POLL: Duration = Duration::from_millis(50);
/// How much of L1's console is shown where it failed.
const TAIL_LINES: usize = 40;

/// How to play scenarios.
#[derive(Debug)]
pub struct Stage {
    /// Where packages are kept: inside the target directory.
    pub cache: PathBuf,
    /// The `vmm-dedup` command.
    pub vmm_dedup: PathBuf,
    /// The preload library, for scenarios with other VMMs.
    pub preload: PathBuf,
    /// A folder with the guest agent, and `examples/secret`, linked statically, for scenarios with agents.
    pub guest_programs: PathBuf,
    /// This crate's command.
    pub own: PathBuf,
    /// What runs L1.
    pub accelerator: Accelerator,
    /// Where logs and metrics are put, if they are to be kept.
    pub out: Option<PathBuf>,
}

/// What a scenario has measured, by name.
pub type Measured = Map<String, Value>;

impl Stage {
    /// Boots L1, lets it play the scenario, and returns what it has measured. `note` is told of progress.
    ///
    /// # Errors
    /// If something is missing, L1 panics, hangs or finds something wrong; the end of its log is part of the message.
    pub fn play(&self, scenario: Scenario, note: &mut dyn FnMut(&str)) -> Result<Measured, Failure> {
        qemu::need()?;
        qemu::need_memory(scenario.memory_mib())?;
        let kernel = Kernel::fetch(&self.cache, scenario.release())?;
        let folder = tempfile::tempdir().map_err(|e| Failure::new(format!("no temporary folder: {e}")))?;
        let initrd = folder.path().join("host.cpio");
        fs::write(&initrd, self.initrd(scenario, &kernel)?).map_err(|e| Failure::file(&initrd, e))?;
        note("L1 boots");

        let (console, events) = (folder.path().join("console.log"), folder.path().join("events"));
        let mut command = qemu::machine(self.accelerator, &kernel.image()?, &initrd, scenario.memory_mib());
        if scenario.measures_time() && self.accelerator == Accelerator::Tcg {
            qemu::count_instructions(&mut command);
        }
        let mut arguments = qemu::KERNEL_ARGUMENTS.to_owned();
        if scenario.wants_device() {
            qemu::add_device(&mut command);
            arguments += " intel_iommu=on";
        }
        command.arg("-append").arg(format!(
            "console=ttyS0 panic=-1 quiet mitigations=off transparent_hugepage=madvise {arguments}"
        ));
        for path in [&console, &events] {
            File::create(path).map_err(|e| Failure::file(path, e))?;
        }
        command.arg("-serial").arg(format!("file:{}", console.display()));
        command
            .arg("-chardev")
            .arg(format!("file,id=events,path={}", events.display()));
        command.args(["-device", "virtio-serial-pci"]);
        command.args(["-device", "virtserialport,chardev=events,name=events"]);
        let mut running = Running::start(&mut command)?;
        let result = self.listen(scenario, &events, &mut running, note);
        drop(running);
        let log = fs::read(&console).unwrap_or_default();
        self.keep("console.log", &log)?;
        result.map_err(|failure| match failure.is_missing() {
            true => failure,
            false => Failure::new(format!("{scenario}: {failure}\n{}", tail(&log))),
        })
    }

    fn initrd(&self, scenario: Scenario, kernel: &Kernel) -> Result<Vec<u8>, Failure> {
        let userland = Userland::fetch(&self.cache)?;
        let kernel_of_guests = Kernel::fetch(&self.cache, crate::debian::Release::Trixie)?;
        let guest_kernel = kernel_of_guests.image()?;
        let guest_kernel = fs::read(&guest_kernel).map_err(|e| Failure::file(&guest_kernel, e))?;
        let mut programs = vec![self.vmm_dedup.clone(), self.own.clone()];
        let mut trees = Vec::new();
        if scenario.wants_vmms() {
            if !self.preload.is_file() {
                let path = self.preload.display();
                return Err(Failure::new(format!(
                    "{path} is missing: cargo build -p vmm-dedup-preload"
                )));
            }
            programs.push(self.preload.clone());
            programs.extend(crate::inside::vmm::programs());
            trees.extend(crate::inside::vmm::trees());
        }
        if scenario.wants_device() && !passes_devices_through() {
            return Err(Failure::missing(
                "no Cloud Hypervisor on the PATH, in CLOUD_HYPERVISOR or in CLOUD_HYPERVISOR_DEDUP",
            ));
        }
        let mut more = Vec::new();
        let mut data = vec![("vmlinuz", guest_kernel)];
        if scenario.wants_agents() {
            more = images::agents_files(&kernel_of_guests, &self.guest_programs)?;
            data.push(("files.disk", shared_files::disk()?));
        }
        data.push(("guest.cpio", images::guest_with(&userland, &more)?));
        let contents = Contents {
            busybox: userland.busybox(),
            programs,
            files: data,
            trees,
            scenario: scenario.to_string(),
            vsock: scenario.wants_agents(),
            guest_arguments: self.accelerator.guest_arguments(),
        };
        images::host(kernel, &contents)
    }

    /// Follows L1 until it has ended, or its time is up.
    fn listen(
        &self,
        scenario: Scenario,
        events: &Path,
        running: &mut Running,
        note: &mut dyn FnMut(&str),
    ) -> Result<Measured, Failure> {
        let limit = scenario.limit();
        let deadline = Instant::now() + limit;
        let file = File::open(events).map_err(|e| Failure::file(events, e))?;
        let (mut lines, mut line) = (BufReader::new(file), Vec::new());
        let (mut measured, mut done, mut ended) = (Measured::new(), false, false);
        loop {
            let read = lines
                .read_until(b'\n', &mut line)
                .map_err(|e| Failure::file(events, e))?;
            if read > 0 && line.ends_with(b"\n") {
                // Whatever else writes to that line, a kernel message for one, is not for us.
                match serde_json::from_slice(&line) {
                    Ok(Event::Note(text)) => note(&text),
                    Ok(Event::Measured(name, value)) => drop(measured.insert(name, value)),
                    Ok(Event::File(name, text)) => self.keep(&name, text.as_bytes())?,
                    Ok(Event::Failed(text)) => return Err(Failure::new(text)),
                    Ok(Event::Done) => done = true,
                    Err(_) => {}
                }
                line.clear();
            } else if ended {
                let early = || Failure::new("L1 ended early: it panicked or could not start");
                return done.then_some(measured).ok_or_else(early);
            } else if Instant::now() > deadline {
                return Err(Failure::new(format!(
                    "L1 was not done after {} s",
                    limit.as_secs()
                )));
            } else {
                // What it wrote last is read once more after its end.
                ended = running.has_ended()?;
                thread::sleep(if ended { Duration::ZERO } else { POLL });
            }
        }
    }

    fn keep(&self, name: &str, content: &[u8]) -> Result<(), Failure> {
        let Some(out) = &self.out else { return Ok(()) };
        // A name from L1 goes into that folder and nowhere else.
        let name = Path::new(name).file_name().unwrap_or_default();
        let path = out.join(name);
        fs::create_dir_all(out).map_err(|e| Failure::file(out, e))?;
        fs::write(&path, content).map_err(|e| Failure::file(&path, e))
    }
}

/// The end of a log: its last lines, and more of them where a kernel panicked, which says why before a long stack trace.
fn tail(log: &[u8]) -> String {
    let text = String::from_utf8_lossy(log);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines.len().saturating_sub(TAIL_LINES);
    let panic = lines.iter().position(|line| line.contains("Kernel panic"));
    lines[panic.map_or(last, |panic| panic.min(last))..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_of_a_panic_begins_with_its_reason() {
        let before = "quiet\n".repeat(100);
        let trace = "a frame\n".repeat(3 * TAIL_LINES);
        let log = format!("{before}Kernel panic - not syncing: why\n{trace}");
        assert!(tail(log.as_bytes()).starts_with("Kernel panic - not syncing: why\n"));
        assert_eq!(tail(before.as_bytes()).lines().count(), TAIL_LINES);
    }
}
