//! A PageForge device in a process of its own, for the time of a measurement.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use vmm_dedup::compare::Arena;

use vmm_dedup_host::Failure;
use vmm_dedup_host::children::{self, Process};
use vmm_dedup_pageforge::driver::{PageForgeEngine, VfioUser};

/// The process, and where it listens.
#[derive(Debug)]
pub(super) struct DeviceProcess {
    process: Process,
    socket: PathBuf,
}

impl DeviceProcess {
    /// Starts one and waits until it listens.
    pub(super) fn start() -> Result<Self, Failure> {
        let socket = children::folder()?.join("device");
        let mut command = children::command()?;
        command.args(["device", "pageforge", "--socket"]).arg(&socket);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = Process::start(&mut command);
        let process = process.map_err(|e| Failure::new(format!("cannot start a device: {e}")))?;
        let device = Self { process, socket };
        let deadline = Instant::now() + Duration::from_secs(10);
        while VfioUser::connect(&device.socket).is_err() {
            if let Ok(Some(status)) = device.process.try_wait() {
                return Err(Failure::new(format!("the device ended early ({status})")));
            }
            if Instant::now() > deadline {
                return Err(Failure::new("the device did not start within ten seconds"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(device)
    }

    /// Where it listens.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// A connection to a device that may read an arena.
    pub(super) fn engine(&self, arena: &Arena) -> Result<PageForgeEngine<VfioUser>, Failure> {
        let mut port = VfioUser::connect(&self.socket).map_err(Failure::from_error)?;
        port.map_arena(arena).map_err(Failure::from_error)?;
        Ok(PageForgeEngine::new(port))
    }
}
