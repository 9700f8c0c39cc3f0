//! A vCPU's thread: into the guest, out for a port access or a kick, in again.

use std::sync::Arc;

use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::unblock_signal;

use crate::devices::{Devices, ExitReason};
use crate::error::Error;
use crate::gate::Gate;
use crate::kick::kick_signal;
use crate::memory::GuestMemory;
use crate::registers;

/// What a vCPU thread owns.
pub(crate) struct Vcpu {
    pub(crate) id: u8,
    pub(crate) fd: VcpuFd,
    pub(crate) devices: Arc<Devices>,
    pub(crate) gate: Arc<Gate>,
    /// Keeps the mappings alive that KVM runs the guest on.
    pub(crate) memory: GuestMemory,
}

/// Tells the gate that the thread is gone, even if it panics.
struct Leave<'a> {
    gate: &'a Gate,
    outcome: Option<Result<ExitReason, Error>>,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.gate.leave(self.outcome.take());
    }
}

impl Vcpu {
    /// Runs until the guest ends, something fails, or the gate sends it away.
    pub(crate) fn run(mut self) {
        let gate = self.gate.clone();
        let mut leave = Leave {
            gate: &gate,
            outcome: Some(Err(Error::VcpuPanicked)),
        };
        leave.outcome = self.run_guest().transpose();
        // In this order: the vCPU is gone before its memory may be, and before the VM counts as ended.
        let Vcpu { fd, memory, .. } = self;
        drop(fd);
        drop(memory);
        drop(leave);
    }

    fn run_guest(&mut self) -> Result<Option<ExitReason>, Error> {
        // The thread that started the VM may have it blocked, and threads inherit that.
        unblock_signal(kick_signal()).map_err(|error| Error::Host {
            what: "unblock a signal",
            source: std::io::Error::other(format!("{error:?}")),
        })?;
        while self.gate.pass() {
            let crash = match self.fd.run() {
                Ok(VcpuExit::IoOut(port, data)) => {
                    if let Some(reason) = self.devices.write(port, data) {
                        return Ok(Some(reason));
                    }
                    continue;
                }
                Ok(VcpuExit::IoIn(port, data)) => {
                    self.devices.read(port, data);
                    continue;
                }
                // No devices there; reads float.
                Ok(VcpuExit::MmioRead(_, data)) => {
                    data.fill(0xff);
                    continue;
                }
                Ok(VcpuExit::MmioWrite(..) | VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen) => {
                    continue;
                }
                Ok(VcpuExit::Shutdown) => "triple fault".to_owned(),
                Ok(VcpuExit::FailEntry(reason, _)) => {
                    format!("the CPU refuses to enter it (reason {reason:#x})")
                }
                Ok(VcpuExit::InternalError) => "KVM cannot emulate what it does (internal error)".to_owned(),
                Ok(exit) => format!("unexpected exit {exit:?}"),
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => continue,
                Err(error) if error.errno() == libc::EFAULT => {
                    "KVM cannot access its memory (EFAULT)".to_owned()
                }
                Err(error) => format!("KVM_RUN failed ({error})"),
            };
            let registers = registers::describe(&self.fd);
            return Err(Error::VcpuCrashed {
                vcpu: self.id,
                reason: crash,
                registers,
            });
        }
        Ok(None)
    }
}
