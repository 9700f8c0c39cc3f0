//! L1's processors.
//!
//! Linux patches its code while it runs; with other CPUs running that code, it puts breakpoints there first. QEMU 7.2's
//! emulation now and then runs such a breakpoint after it was taken away again, and the kernel panics. So L1 boots
//! with one CPU, brings about all of KVM's patches, keeps them, and only then starts the others.

use crate::Failure;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use std::fs;
use std::path::Path;

const FOLDER: &str = "/sys/devices/system/cpu";

/// A VM whose CPU never runs. KVM patches its code when there is a first VM, a first CPU whose APIC is off, and so on,
/// and back after the last.
pub(super) struct Quiet {
    _vcpu: VcpuFd,
    _vm: VmFd,
}

/// Starts all CPUs.
pub(super) fn bring_up() -> Result<Quiet, Failure> {
    let failed = |e| Failure::new(format!("KVM does not work in L1: {e}"));
    let vm = Kvm::new().and_then(|kvm| kvm.create_vm()).map_err(failed)?;
    vm.create_irq_chip().map_err(failed)?;
    let vcpu = vm.create_vcpu(0).map_err(failed)?;
    for number in 1.. {
        let cpu = Path::new(FOLDER).join(format!("cpu{number}/online"));
        if !cpu.exists() {
            break;
        }
        fs::write(&cpu, "1").map_err(|e| Failure::file(&cpu, e))?;
    }
    Ok(Quiet { _vcpu: vcpu, _vm: vm })
}
