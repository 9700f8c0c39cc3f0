//! Images of guests' memory, at several points in time, for work without guests.
//!
//! QEMU runs the guests, without KVM where that is missing: what is in their memory does not depend on it. The images
//! are ELF cores, as QEMU's dump-guest-memory makes them.

use crate::debian::{Kernel, Release, Userland};
use crate::guest::{Guest, cmdline};
use crate::qemu::{self, Accelerator};
use crate::wait::{check, wait_for};
use crate::{Failure, Workload, images};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Points in time, and the rounds of work that every guest has done since the one before.
const POINTS: [(&str, u64); 3] = [("start", 0), ("soon", 3), ("later", 10)];
const KINDS: [Workload; 4] = [Workload::Idle, Workload::Web, Workload::Db, Workload::Python];

/// What to make.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Memory of each guest.
    pub memory_mib: u64,
    /// So many idle guests; else one of each kind.
    pub same: Option<u8>,
    /// What runs the guests.
    pub accelerator: Accelerator,
}

impl Plan {
    fn workloads(&self) -> Vec<Workload> {
        self.same
            .map_or(KINDS.to_vec(), |count| vec![Workload::Idle; count.into()])
    }
}

/// Boots the guests, lets them work, and dumps the memory of each at each point in time. Returns the images.
///
/// # Errors
/// If something is missing, there is no room, or a guest fails.
pub fn make(
    plan: &Plan,
    cache: &Path,
    out: &Path,
    note: &mut dyn FnMut(&str),
) -> Result<Vec<PathBuf>, Failure> {
    let workloads = plan.workloads();
    let count = workloads.len() as u64;
    qemu::need()?;
    qemu::need_memory(plan.memory_mib * count)?;
    fs::create_dir_all(out).map_err(|e| Failure::file(out, e))?;
    need_disk(out, plan.memory_mib * count * POINTS.len() as u64)?;
    let kernel = Kernel::fetch(cache, Release::Trixie)?.image()?;
    let folder = tempfile::tempdir().map_err(|e| Failure::new(format!("no temporary folder: {e}")))?;
    let initrd = folder.path().join("guest.cpio");
    let userland = Userland::fetch(cache)?;
    fs::write(&initrd, images::guest(&userland)?).map_err(|e| Failure::file(&initrd, e))?;

    let mut guests = Vec::new();
    for (workload, number) in workloads.into_iter().zip(1..) {
        let name = format!("{workload}{number}");
        let socket = folder.path().join(&name);
        let mut command = qemu::machine(plan.accelerator, &kernel, &initrd, plan.memory_mib);
        let arguments = format!("{} {}", cmdline(&name, workload), qemu::KERNEL_ARGUMENTS);
        command.args(["-serial", "stdio", "-append", &arguments, "-qmp"]);
        command.arg(format!("unix:{},server=on,wait=off", socket.display()));
        let guest = Guest::start(&name, &mut command)?;
        let monitor = wait_for("QEMU's monitor", || Ok(UnixStream::connect(&socket).ok()))?;
        guests.push((guest, Monitor::open(monitor)?));
    }
    for (guest, _) in &mut guests {
        guest.wait("L2 ready")?;
    }
    note("the guests are up");
    let mut images = Vec::new();
    for (point, rounds) in POINTS {
        for (guest, monitor) in &mut guests {
            let wanted = guest.progress()? + rounds;
            let name = guest.name.clone();
            wait_for(&format!("{name} to work"), || {
                Ok((guest.progress()? >= wanted).then_some(()))
            })?;
            let image = out.join(format!("{name}-{point}.core"));
            monitor.dump(&image)?;
            note(&format!("{}", image.display()));
            images.push(image);
        }
    }
    for (guest, _) in &mut guests {
        guest.type_line("poweroff")?;
        guest.powered_off()?;
    }
    Ok(images)
}

fn need_disk(out: &Path, mib: u64) -> Result<(), Failure> {
    let space = rustix::fs::statvfs(out).map_err(|e| Failure::file(out, e))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize) >> 20;
    check(free > mib + 64, || {
        let out = out.display();
        format!(
            "{free} MiB are free in {out}, {} needed: make room, or choose less --memory-mib",
            mib + 64
        )
    })
}

/// QEMU's monitor (QMP).
struct Monitor {
    lines: BufReader<UnixStream>,
}

impl Monitor {
    fn open(stream: UnixStream) -> Result<Self, Failure> {
        let mut monitor = Self {
            lines: BufReader::new(stream),
        };
        monitor.execute(&json!({ "execute": "qmp_capabilities" }))?;
        Ok(monitor)
    }

    /// Dumps the guest's memory; the guest stands still meanwhile.
    fn dump(&mut self, image: &Path) -> Result<(), Failure> {
        let path = std::path::absolute(image).map_err(|e| Failure::file(image, e))?;
        let path = format!("file:{}", path.display());
        let arguments = json!({ "paging": false, "protocol": path });
        self.execute(&json!({ "execute": "dump-guest-memory", "arguments": arguments }))
    }

    fn execute(&mut self, command: &Value) -> Result<(), Failure> {
        let lost = |e: std::io::Error| Failure::new(format!("QEMU's monitor is lost: {e}"));
        self.lines
            .get_mut()
            .write_all(command.to_string().as_bytes())
            .map_err(lost)?;
        let mut line = String::new();
        loop {
            line.clear();
            check(self.lines.read_line(&mut line).map_err(lost)? > 0, || {
                "QEMU has ended".to_owned()
            })?;
            let answer: Value = serde_json::from_str(&line).unwrap_or_default();
            check(answer["error"].is_null(), || {
                format!("QEMU refuses: {}", answer["error"])
            })?;
            if !answer["return"].is_null() {
                return Ok(());
            }
        }
    }
}
