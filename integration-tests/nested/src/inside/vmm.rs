//! VMMs that run in L1 as they are, with dedup by way of the preload library, and one that has it built in.

use super::store;
use crate::guest::{Guest, cmdline};
use crate::{Failure, Workload};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The disk of [`Extras::files`].
const DISK: &str = "/files.disk";
/// The library, in L1.
const PRELOAD: &str = "/bin/libvmm_dedup_preload.so";
/// What QEMU's smallest machine boots with.
const QEMU_FIRMWARE: &str = "/usr/share/qemu/qboot.rom";

/// A VMM.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Vmm {
    Qemu,
    CloudHypervisor,
    /// Cloud Hypervisor with the engine in it (docs/cloud-hypervisor.md).
    Embedded,
}

/// What a VM has beside a serial line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extras {
    pub(super) memory_mib: u32,
    /// A disk with files, the same for all, for reading only.
    pub(super) files: bool,
    /// A vsock with this CID, on which the guest's agent is heard.
    pub(super) cid: Option<u32>,
}

impl Extras {
    const NONE: Self = Self {
        memory_mib: 192,
        files: false,
        cid: None,
    };
}

const UNMODIFIED: [Vmm; 2] = [Vmm::Qemu, Vmm::CloudHypervisor];
const PASS_THROUGH: [Vmm; 2] = [Vmm::CloudHypervisor, Vmm::Embedded];

impl Vmm {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Vmm::Qemu => "qemu",
            Vmm::CloudHypervisor => "cloud-hypervisor",
            Vmm::Embedded => "embedded",
        }
    }

    fn program(self) -> &'static str {
        match self {
            Vmm::Qemu => "qemu-system-x86_64",
            Vmm::CloudHypervisor => "cloud-hypervisor",
            Vmm::Embedded => "cloud-hypervisor-dedup",
        }
    }

    /// Starts a VM.
    pub(super) fn start(self, name: &str, workload: Workload) -> Result<Guest, Failure> {
        self.start_with(name, workload, Extras::NONE)
    }

    /// The same, with more devices.
    pub(super) fn start_with(self, name: &str, workload: Workload, extras: Extras) -> Result<Guest, Failure> {
        let mut command = Command::new(self.program());
        let line = cmdline(name, workload);
        if matches!(self, Vmm::Embedded) {
            command.args(["--dedup", &format!("store={},name={name}", store::SOCKET)]);
        } else {
            command.env("LD_PRELOAD", PRELOAD);
            command
                .env("VMM_DEDUP_STORE", store::SOCKET)
                .env("VMM_DEDUP_NAME", name);
        }
        self.add(&mut command, name, extras);
        match self {
            Vmm::Qemu => {
                // Without PCI, devices are found by the kernel command line, which takes a module more.
                let machine = if extras.files || extras.cid.is_some() {
                    "microvm,mem-merge=off,pcie=on"
                } else {
                    "microvm,mem-merge=off"
                };
                command.args([
                    "-M",
                    machine,
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
                    &extras.memory_mib.to_string(),
                    "-kernel",
                    "/vmlinuz",
                    "-initrd",
                    "/guest.cpio",
                ]);
                command.args(["-append", &format!("{line} reboot=t")]);
                Guest::start(name, &mut command)
            }
            Vmm::CloudHypervisor | Vmm::Embedded => {
                command.args(["--api-socket", &format!("path={}", api(name).display())]);
                // Its serial line takes input from a terminal or a socket, and from nothing else.
                let socket = PathBuf::from(format!("/run/{name}.serial"));
                command.args([
                    "--memory",
                    &format!("size={}M", extras.memory_mib),
                    "--cpus",
                    "boot=1",
                ]);
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

impl Vmm {
    fn add(self, command: &mut Command, name: &str, extras: Extras) {
        let vsock = format!("/run/{name}.vsock");
        match self {
            Vmm::Qemu => {
                if extras.files {
                    // Reads by io_uring are not noted by the library: without agents nobody says anything of them.
                    let drive = format!("file={DISK},format=raw,if=none,id=files,readonly=on,aio=io_uring");
                    command.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=files"]);
                }
                if let Some(cid) = extras.cid {
                    command.args(["-device", &format!("vhost-vsock-pci,guest-cid={cid}")]);
                    command.env("VMM_DEDUP_AGENT", format!("cid:{cid}"));
                }
            }
            Vmm::CloudHypervisor | Vmm::Embedded => {
                if extras.files {
                    command.args(["--disk", &format!("path={DISK},readonly=on")]);
                }
                if let Some(cid) = extras.cid {
                    command.args(["--vsock", &format!("cid={cid},socket={vsock}")]);
                    command.env("VMM_DEDUP_AGENT", vsock);
                }
            }
        }
    }
}

/// The API's socket of a VM of Cloud Hypervisor.
pub(super) fn api(name: &str) -> PathBuf {
    PathBuf::from(format!("/run/{name}.api"))
}

/// Where a program is on the PATH; for Cloud Hypervisor, the variable CLOUD_HYPERVISOR comes first, and CLOUD_HYPERVISOR_DEDUP for the
/// one with the engine in it. The file must have the program's name.
fn path_of(vmm: Vmm) -> Option<PathBuf> {
    let variable = match vmm {
        Vmm::Qemu => None,
        Vmm::CloudHypervisor => Some("CLOUD_HYPERVISOR"),
        Vmm::Embedded => Some("CLOUD_HYPERVISOR_DEDUP"),
    };
    let named = variable.and_then(std::env::var_os);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).map(|folder| folder.join(vmm.program()));
    named
        .map(PathBuf::from)
        .into_iter()
        .chain(places)
        .find(|path| path.is_file() && path.ends_with(vmm.program()))
}

fn those_here(all: [Vmm; 2]) -> impl Iterator<Item = Vmm> {
    all.into_iter().filter(|vmm| path_of(*vmm).is_some())
}

/// The unmodified VMMs that are here.
pub(crate) fn found() -> impl Iterator<Item = Vmm> {
    those_here(UNMODIFIED)
}

/// The VMMs that are here and have an API by which a device comes and goes.
pub(crate) fn that_pass_through() -> impl Iterator<Item = Vmm> {
    those_here(PASS_THROUGH)
}

/// Their programs.
pub(crate) fn programs() -> Vec<PathBuf> {
    let all = [Vmm::Qemu, Vmm::CloudHypervisor, Vmm::Embedded];
    all.into_iter().filter_map(path_of).collect()
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
