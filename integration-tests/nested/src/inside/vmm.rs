//! VMMs that run in L1 as they are, with dedup by way of the preload library.

use super::store;
use crate::guest::{Guest, cmdline};
use crate::{Failure, Workload};
use std::path::{Path, PathBuf};
use std::process::Command;

const MEMORY_MIB: u32 = 192;
/// The library, in L1.
const PRELOAD: &str = "/bin/libvmm_dedup_preload.so";
/// What QEMU's smallest machine boots with.
const QEMU_FIRMWARE: &str = "/usr/share/qemu/qboot.rom";

/// A VMM.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Vmm {
    Qemu,
    CloudHypervisor,
}

const ALL: [Vmm; 2] = [Vmm::Qemu, Vmm::CloudHypervisor];

impl Vmm {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Vmm::Qemu => "qemu",
            Vmm::CloudHypervisor => "cloud-hypervisor",
        }
    }

    fn program(self) -> &'static str {
        match self {
            Vmm::Qemu => "qemu-system-x86_64",
            Vmm::CloudHypervisor => "cloud-hypervisor",
        }
    }

    /// Starts a VM.
    pub(super) fn start(self, name: &str, workload: Workload) -> Result<Guest, Failure> {
        let mut command = Command::new(self.program());
        let line = cmdline(name, workload);
        command.env("LD_PRELOAD", PRELOAD);
        command
            .env("VMM_DEDUP_STORE", store::SOCKET)
            .env("VMM_DEDUP_NAME", name);
        match self {
            Vmm::Qemu => {
                command.args([
                    "-M",
                    "microvm,mem-merge=off",
                    "-accel",
                    "kvm",
                    "-cpu",
                    "host",
                    "-nodefaults",
                    "-no-user-config",
                ]);
                command.args([
                    "-bios",
                    QEMU_FIRMWARE,
                    "-display",
                    "none",
                    "-no-reboot",
                    "-serial",
                    "stdio",
                ]);
                command.args([
                    "-m",
                    &MEMORY_MIB.to_string(),
                    "-kernel",
                    "/vmlinuz",
                    "-initrd",
                    "/guest.cpio",
                ]);
                command.args(["-append", &format!("{line} reboot=t")]);
                Guest::start(name, &mut command)
            }
            Vmm::CloudHypervisor => {
                // Its serial line takes input from a terminal or a socket, and from nothing else.
                let socket = PathBuf::from(format!("/run/{name}.serial"));
                command.args(["--memory", &format!("size={MEMORY_MIB}M"), "--cpus", "boot=1"]);
                command.args([
                    "--kernel",
                    "/vmlinuz",
                    "--initramfs",
                    "/guest.cpio",
                    "--cmdline",
                    &line,
                ]);
                command.args([
                    "--serial",
                    &format!("socket={}", socket.display()),
                    "--console",
                    "off",
                ]);
                Guest::start_on_socket(name, &mut command, &socket)
            }
        }
    }
}

/// Where a program is on the PATH; for Cloud Hypervisor, the variable CLOUD_HYPERVISOR comes first.
fn path_of(vmm: Vmm) -> Option<PathBuf> {
    let named = matches!(vmm, Vmm::CloudHypervisor)
        .then(|| std::env::var_os("CLOUD_HYPERVISOR"))
        .flatten();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).map(|folder| folder.join(vmm.program()));
    named
        .map(PathBuf::from)
        .into_iter()
        .chain(places)
        .find(|path| path.is_file())
}

/// The VMMs that are here.
pub(crate) fn found() -> impl Iterator<Item = Vmm> {
    ALL.into_iter().filter(|vmm| path_of(*vmm).is_some())
}

/// Their programs.
pub(crate) fn programs() -> Vec<PathBuf> {
    ALL.into_iter().filter_map(path_of).collect()
}

/// Other files that they need.
pub(crate) fn trees() -> Vec<PathBuf> {
    let firmware = Path::new(QEMU_FIRMWARE);
    firmware
        .exists()
        .then(|| firmware.to_owned())
        .into_iter()
        .collect()
}
