//! QEMU as a child process.

use crate::Failure;
use crate::debian::output;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const PROGRAM: &str = "qemu-system-x86_64";

/// For the kernel command line of every machine: no check of the timer, which fails where the emulation waits for a busy
/// host.
pub(crate) const KERNEL_ARGUMENTS: &str = "no_timer_check";

/// Whether KVM runs QEMU's guests, or QEMU itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Accelerator {
    /// The processor's own virtualisation, nested.
    Kvm,
    /// Emulation of a processor with AMD-V. Slow, and the same everywhere.
    Tcg,
}

impl Accelerator {
    /// KVM if that runs stock kernels and their guests: on a processor with VT-x or AMD-V, with nesting allowed. (A
    /// KVM that does without those, in software, runs no stock kernel.)
    #[must_use]
    pub fn best() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let flags = read("/proc/cpuinfo");
        let virtualisation = flags
            .split_whitespace()
            .any(|word| word == "vmx" || word == "svm");
        let nested = ["intel", "amd"].iter().any(|vendor| {
            let value = read(&format!("/sys/module/kvm_{vendor}/parameters/nested"));
            matches!(value.trim(), "Y" | "1")
        });
        let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
        if virtualisation && nested && kvm.is_ok() {
            Self::Kvm
        } else {
            Self::Tcg
        }
    }

    /// More for the command line of guests' kernels in L1.
    pub(crate) fn guest_arguments(self) -> &'static str {
        match self {
            Self::Kvm => "",
            // Under QEMU 7.2's emulation of AMD-V, guests whose memory is under a userfaultfd end in a triple fault
            // about when userland starts, unless KVM keeps from injecting asynchronous page faults. Why is not known.
            Self::Tcg => "no-kvmapf",
        }
    }

    /// One CPU where QEMU emulates. With two, VMRUN now and then starts a guest without nested paging, although the VMCB asks
    /// for it (QEMU's flag for it, HF2_NPT_MASK, is set and gone a moment later; seen in a build of 7.2 that logs it). The
    /// guest's CR3 is then taken for an address of the host: a triple fault, and the host's memory overwritten. One in two
    /// hosts with four busy guests ended so with 7.2 and with 10.0, with one CPU none. Two also let one run into code that
    /// the other is patching. Scenarios are played two at a time, so one CPU is no slower.
    fn arguments(self) -> [&'static str; 6] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host", "-smp", "2"],
            // QEMU 7.2's `max` makes Linux panic in SLUB, and so does cmpxchg16b.
            Self::Tcg => ["-accel", "tcg", "-cpu", "qemu64,+svm,+npt,-cx16", "-smp", "1"],
        }
    }
}

/// Fails unless QEMU is installed.
///
/// # Errors
/// That it is missing.
pub fn need() -> Result<(), Failure> {
    output(Command::new(PROGRAM).arg("--version")).map(drop)
}

/// A machine to be started: a kernel, an initial RAM disk, memory, CPUs, nothing else.
pub(crate) fn machine(accelerator: Accelerator, kernel: &Path, initrd: &Path, mib: u64) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(accelerator.arguments());
    // KSM on this machine would merge the machine's memory, which takes its time and CPU.
    command.args(["-machine", "pc,mem-merge=off"]);
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.arg("-m").arg(mib.to_string());
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Has an emulated machine's time go by with its instructions, 8 ns each, and not while it has nothing to do: however busy this
/// machine is, that one is not late. By this machine's clock, L1's kernel finds that nobody used any memory in the 100 ms that
/// DAMON looks at, if QEMU did not run just then; and rests last as long as they are.
pub(crate) fn count_instructions(command: &mut Command) {
    command.args(["-icount", "shift=3,sleep=off"]);
}

/// Gives a machine an IOMMU, and behind it a network card that nobody needs.
pub(crate) fn add_device(command: &mut Command) {
    command.args(["-machine", "q35,mem-merge=off"]);
    command.args(["-device", "intel-iommu", "-device", "e1000e,romfile="]);
}

/// A running machine; killed when dropped.
#[derive(Debug)]
pub(crate) struct Running(Child);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Result<Self, Failure> {
        let child = command.spawn();
        child
            .map(Self)
            .map_err(|e| Failure::missing(format!("{PROGRAM} cannot be run ({e}): install it")))
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&mut self) -> Result<bool, Failure> {
        let status = self
            .0
            .try_wait()
            .map_err(|e| Failure::new(format!("QEMU is lost: {e}")))?;
        Ok(status.is_some())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both do nothing to one that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Fails unless that much memory is available here for a machine.
///
/// # Errors
/// How much is missing.
pub(crate) fn need_memory(mib: u64) -> Result<(), Failure> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    // QEMU's translated code and its own memory.
    let (available, needed) = (kib.unwrap_or(0) >> 10, mib + 512);
    if available >= needed {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{available} MiB of memory are available, {needed} needed: free some"
    )))
}
