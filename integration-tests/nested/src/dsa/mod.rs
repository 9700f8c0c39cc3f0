//! The model of DSA under Linux's own driver: a Debian kernel in QEMU finds it on PCI, and software that nobody here wrote
//! drives it.
//!
//! ```text
//!  this program: model behind vfio-user <---- socket ----> QEMU 11, emulating, with MOVDIR64B ([`emulator`])
//!                                                             Linux: idxd; accel-config, dmatest ([`image`], [`module`])
//! ```
//!
//! The guest says what it sees on its console, in lines that begin with `DSA`.

mod emulator;
mod image;
mod module;

use crate::Failure;
use crate::debian::{Packages, Release, WholeKernel};
use crate::qemu::{self, Running};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub use image::Play;

/// Memory of the guest, MiB.
const MEMORY_MIB: u64 = 1024;
/// The end of all patience, for a slow machine that does other things as well.
const LIMIT: Duration = Duration::from_secs(240);
const POLL: Duration = Duration::from_millis(50);

/// What a guest needs.
#[derive(Debug)]
pub struct Stage {
    /// Where packages are kept: inside the target directory.
    pub cache: PathBuf,
    /// The `vmm-dedup` command, which serves the device.
    pub vmm_dedup: PathBuf,
}

/// What the guest said.
#[derive(Debug)]
pub struct Said {
    /// Lines that begin with `DSA`, without that.
    pub lines: Vec<String>,
    /// The whole console.
    pub console: String,
}

impl Said {
    /// The rest of the line that begins so.
    #[must_use]
    pub fn line(&self, beginning: &str) -> Option<&str> {
        self.lines.iter().find_map(|line| line.strip_prefix(beginning))
    }
}

impl Stage {
    /// Boots a guest with the device, and lets it play.
    ///
    /// # Errors
    /// If something is missing, or the guest does not come to its end; its console is part of the message.
    pub fn play(&self, play: Play) -> Result<Said, Failure> {
        qemu::need_memory(MEMORY_MIB)?;
        let emulator = emulator::Emulator::fetch(&self.cache)?;
        let kernel = WholeKernel::fetch(&self.cache, Release::BookwormBackports)?;
        let tools = Packages::fetch(
            &self.cache,
            "dsa-tools",
            Release::BookwormBackports,
            &["busybox-static", "accel-config", "accel-config-test"],
        )?;
        let dmatest = module::dmatest(&kernel, &self.cache)?;
        let folder = tempfile::tempdir().map_err(|e| Failure::new(format!("no temporary folder: {e}")))?;
        let (initrd, console) = (folder.path().join("initrd"), folder.path().join("console.log"));
        let archive = image::guest(&kernel, &tools, &dmatest, play)?;
        fs::write(&initrd, archive).map_err(|e| Failure::file(&initrd, e))?;
        let socket = folder.path().join("dsa");
        let _device = Device::start(&self.vmm_dedup, &socket, play)?;
        let mut command = emulator.machine(&kernel.image()?, &initrd, MEMORY_MIB, play.iommu());
        command.arg("-serial").arg(format!("file:{}", console.display()));
        command.arg("-append").arg(format!(
            "console=ttyS0 panic=-1 mitigations=off {} {} play={play}",
            qemu::KERNEL_ARGUMENTS,
            play.kernel_arguments()
        ));
        command.arg("-device").arg(format!(
            r#"{{"driver":"vfio-user-pci","socket":{{"type":"unix","path":"{}"}}}}"#,
            socket.display()
        ));
        let mut running = Running::start(&mut command)?;
        let start = Instant::now();
        let ended = loop {
            if running.has_ended()? {
                break true;
            }
            if start.elapsed() > LIMIT {
                break false;
            }
            std::thread::sleep(POLL);
        };
        drop(running);
        let text = fs::read(&console).unwrap_or_default();
        let console = String::from_utf8_lossy(&text).into_owned();
        let said = |line: &str| line.split_once("DSA ").map(|(_, rest)| rest.trim().to_owned());
        let lines: Vec<String> = console.lines().filter_map(said).collect();
        if !ended || lines.last().map(String::as_str) != Some("done") {
            let why = if ended {
                "ended early"
            } else {
                "was not done in time"
            };
            return Err(Failure::new(format!("{play}: the guest {why}\n{console}")));
        }
        Ok(Said { lines, console })
    }
}

/// The device's process; killed when dropped.
struct Device(Child);

impl Device {
    fn start(vmm_dedup: &Path, socket: &Path, play: Play) -> Result<Self, Failure> {
        let mut command = Command::new(vmm_dedup);
        command.args(["device", "dsa", "--generation", play.generation(), "--socket"]);
        let child = command
            .arg(socket)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let failed = |error| Failure::new(format!("{} cannot be run: {error}", vmm_dedup.display()));
        let device = Self(child.map_err(failed)?);
        let start = Instant::now();
        while !socket.exists() {
            if start.elapsed() > LIMIT {
                return Err(Failure::new("the device does not listen"));
            }
            std::thread::sleep(POLL);
        }
        Ok(device)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Both do nothing to one that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
