//! A VM whose vCPUs have threads.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_ioctls::VmFd;
use vm_memory::mmap::GuestRegionMmap;
use vmm_sys_util::signal::Killable;

use crate::devices::{Devices, ExitReason};
use crate::error::Error;
use crate::gate::Gate;
use crate::kick::kick_signal;
use crate::memory::{self, GuestMemory};

/// A VM that runs (or is paused, or has just ended). Dropping it stops it.
pub struct RunningVm {
    threads: Vec<JoinHandle<()>>,
    gate: Arc<Gate>,
    devices: Arc<Devices>,
    memory: GuestMemory,
    /// Kept to the end: the vCPUs are its children.
    vm: VmFd,
}

impl RunningVm {
    pub(crate) fn new(vm: VmFd, memory: GuestMemory, devices: Arc<Devices>, gate: Arc<Gate>) -> Self {
        RunningVm {
            threads: Vec::new(),
            gate,
            devices,
            memory,
            vm,
        }
    }

    pub(crate) fn adopt(&mut self, thread: JoinHandle<()>) {
        self.threads.push(thread);
    }

    /// The guest's RAM.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Gives the guest `mib` MiB more RAM, behind what it has and not below 4 GiB. Nothing tells the guest.
    ///
    /// # Errors
    /// If there is no memory, or KVM refuses.
    pub fn plug(&mut self, mib: u64) -> Result<Arc<GuestRegionMmap<()>>, Error> {
        let (all, region) = memory::plug(&self.vm, &self.memory, mib)?;
        self.memory = all;
        Ok(region)
    }

    /// Types into the guest's COM1.
    pub fn serial_input(&self, bytes: &[u8]) {
        self.devices.serial_input(bytes);
    }

    /// Returns when no vCPU runs any more. Does nothing on a VM that has ended.
    pub fn pause(&self) {
        self.gate.pause(|| self.kick());
    }

    /// Lets the vCPUs run again after [`RunningVm::pause`].
    pub fn resume(&self) {
        self.gate.resume();
    }

    /// Asks the vCPUs to leave; [`RunningVm::wait`] then returns [`ExitReason::Stopped`].
    pub fn stop(&self) {
        self.gate.stop(|| self.kick());
    }

    /// Waits for the end, at most for `timeout`; whether it came.
    #[must_use]
    pub fn ends_within(&self, timeout: Duration) -> bool {
        self.gate.wait_end_for(timeout)
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// [`Error::VcpuCrashed`], with the registers, if a vCPU could not go on.
    pub fn wait(mut self) -> Result<ExitReason, Error> {
        self.gate.wait_end();
        self.finish()
    }

    fn finish(&mut self) -> Result<ExitReason, Error> {
        let outcome = self.gate.drain(|| self.kick());
        let panicked = self
            .threads
            .drain(..)
            .map(JoinHandle::join)
            .filter(Result::is_err)
            .count()
            > 0;
        if panicked {
            Err(Error::VcpuPanicked)
        } else {
            outcome
        }
    }

    fn kick(&self) {
        for thread in &self.threads {
            // A thread that is gone already cannot be kicked, and need not be.
            let _ = thread.kill(kick_signal());
        }
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        if !self.threads.is_empty()
            && let Err(error) = self.finish()
        {
            log::warn!("the VM ended badly: {error}");
        }
    }
}
