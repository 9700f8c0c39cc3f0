//! The model of DSA under Linux's own driver: a Debian kernel in QEMU finds it on PCI, and software that nobody here wrote
//! drives it.
//!
//! ```text
//!  this program: model behind vfio-user <---- socket ----> QEMU 11, emulating, with MOVDIR64B ([`emulator`])
//!                                                             Linux: idxd; accel-config, dmatest ([`image`], [`module`])
//! ```
//!
//! With programs' addresses, the model is served by this process itself, and looks them up in the tables of QEMU's IOMMU
//! ([`vtd`]).
//!
//! The guest says what it sees on its console, in lines that begin with `DSA`.

mod emulator;
mod image;
mod module;
mod vtd;

use crate::Failure;
use crate::debian::{Packages, Release, WholeKernel};
use crate::qemu::{self, Running};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use image::Play;

/// Memory of the guest, MiB.
const MEMORY_MIB: u64 = 1024;
/// The end of all patience, for a slow machine that does other things as well.
const LIMIT: Duration = Duration::from_secs(360);
/// The device's slot on QEMU's bus.
const SLOT: u8 = 5;
/// 6.12.107 does not bind a process's addresses on QEMU's IOMMU.
const SVA_KERNEL: &str = "linux-image-6.12.57+deb12-amd64";
const POLL: Duration = Duration::from_millis(50);

/// What a guest needs.
#[derive(Debug)]
pub struct Stage {
    /// Where packages are kept: inside the target directory.
    pub cache: PathBuf,
    /// The `vmm-dedup` command, which serves the device.
    pub vmm_dedup: PathBuf,
    /// The driver's tests of conformance.
    pub conformance: PathBuf,
    /// The tests of engines that verify for the service.
    pub verifiers: PathBuf,
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
        let folder = tempfile::tempdir().map_err(|e| Failure::new(format!("no temporary folder: {e}")))?;
        let (initrd, console) = (folder.path().join("initrd"), folder.path().join("console.log"));
        let (emulator, kernel) = self.prepare(play, folder.path(), &initrd)?;
        qemu::need_memory(MEMORY_MIB)?;
        let socket = folder.path().join("dsa");
        let monitor = folder.path().join("monitor");
        let _device = match play {
            Play::Dmatest | Play::Vfio => Some(Device::start(&self.vmm_dedup, &socket)?),
            Play::Sva | Play::Driver => {
                serve_spaces(&socket, &monitor)?;
                None
            }
        };
        let mut command = emulator.machine(&kernel, &initrd, MEMORY_MIB, play.iommu());
        command.arg("-serial").arg(format!("file:{}", console.display()));
        command.arg("-append").arg(format!(
            "console=ttyS0 panic=-1 mitigations=off {} {} play={play}",
            qemu::KERNEL_ARGUMENTS,
            play.kernel_arguments()
        ));
        command.arg("-device").arg(format!(
            r#"{{"driver":"vfio-user-pci","addr":"{SLOT}","socket":{{"type":"unix","path":"{}"}}}}"#,
            socket.display()
        ));
        command
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()));
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

    /// Fetches what is needed and writes the RAM disk: the emulator and the kernel's image.
    fn prepare(
        &self,
        play: Play,
        folder: &Path,
        initrd: &Path,
    ) -> Result<(emulator::Emulator, PathBuf), Failure> {
        // One after the other: all use the same cache.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let emulator = emulator::Emulator::fetch(&self.cache, folder)?;
        let release = Release::BookwormBackports;
        let (kernel, dmatest) = match play {
            Play::Dmatest => {
                let kernel = WholeKernel::fetch(&self.cache, release)?;
                let dmatest = module::dmatest(&kernel, &self.cache)?;
                (kernel, Some(dmatest))
            }
            Play::Vfio => (WholeKernel::fetch(&self.cache, release)?, None),
            Play::Sva | Play::Driver => (WholeKernel::fetch_image(&self.cache, release, SVA_KERNEL)?, None),
        };
        let tools = Packages::fetch(
            &self.cache,
            "dsa-tools",
            release,
            &["busybox-static", "accel-config", "accel-config-test"],
        )?;
        let ours: &[(&str, &Path)] = match play {
            Play::Driver | Play::Vfio => {
                &[("conformance", &self.conformance), ("verifiers", &self.verifiers)]
            }
            Play::Dmatest | Play::Sva => &[],
        };
        let archive = image::guest(play, &kernel, &tools, dmatest.as_deref(), ours)?;
        fs::write(initrd, archive).map_err(|e| Failure::file(initrd, e))?;
        Ok((emulator, kernel.image()?))
    }
}

/// Serves the device in this process, with address spaces as QEMU's IOMMU has them, for ever.
fn serve_spaces(socket: &Path, monitor: &Path) -> Result<(), Failure> {
    let failed =
        |error: &dyn std::fmt::Display| Failure::new(format!("the device cannot be served: {error}"));
    let spaces = vtd::Vtd::follow(monitor, SLOT << 3).map_err(|error| failed(&error))?;
    let device = vmm_dedup_dsa_server::Device {
        spaces: Some(spaces),
        ..Default::default()
    };
    let server = vmm_dedup_dsa_server::Server::bind(socket, device, 1).map_err(|error| failed(&error))?;
    std::thread::spawn(move || server.run());
    Ok(())
}

/// The device's process; killed when dropped.
struct Device(Child);

impl Device {
    fn start(vmm_dedup: &Path, socket: &Path) -> Result<Self, Failure> {
        let mut command = Command::new(vmm_dedup);
        command.args(["device", "dsa", "--socket"]);
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
