//! A VM at a moment: its memory in a file, and what KVM and the devices hold. It stays in this process.

use crate::balloon::Registers;
use crate::ports::Ports;
use crate::vm::Failure;
use kvm_bindings::{
    Msrs, kvm_fpu, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
};
use kvm_ioctls::VcpuFd;
use std::fs::File;
use std::io::Seek;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vm_superio::serial::SerialState;

/// The time stamp counter: of what MSRs hold, the only thing that the payload guest uses.
const TSC: u32 = 0x10;

pub(crate) struct Snapshot {
    memory: File,
    ranges: Vec<(GuestAddress, usize)>,
    regs: kvm_regs,
    sregs: kvm_sregs,
    fpu: kvm_fpu,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    running: kvm_mp_state,
    tsc: Msrs,
    serial: SerialState,
    balloon: Registers,
}

impl Snapshot {
    /// Takes it of a VM that is paused. Memory is read through its mapping, whatever the engine does meanwhile.
    pub(crate) fn take(memory: &GuestMemoryMmap<()>, vcpu: &VcpuFd, ports: &Ports) -> Result<Self, Failure> {
        let mut file = File::from(rustix::fs::memfd_create(
            "snapshot",
            rustix::fs::MemfdFlags::CLOEXEC,
        )?);
        let mut ranges = Vec::new();
        for region in memory.iter() {
            let len = usize::try_from(region.len())?;
            memory.write_all_volatile_to(region.start_addr(), &mut file, len)?;
            ranges.push((region.start_addr(), len));
        }
        let mut tsc = Msrs::from_entries(&[kvm_msr_entry {
            index: TSC,
            ..Default::default()
        }])
        .map_err(|error| format!("{error:?}"))?;
        vcpu.get_msrs(&mut tsc)?;
        Ok(Self {
            memory: file,
            ranges,
            regs: vcpu.get_regs()?,
            sregs: vcpu.get_sregs()?,
            fpu: vcpu.get_fpu()?,
            lapic: vcpu.get_lapic()?,
            events: vcpu.get_vcpu_events()?,
            running: vcpu.get_mp_state()?,
            tsc,
            serial: ports.serial(),
            balloon: ports.balloon.registers,
        })
    }

    /// Where memory is, and how much.
    pub(crate) fn ranges(&self) -> Vec<(GuestAddress, usize)> {
        self.ranges.clone()
    }

    /// Gives it to a VM that has memory in the same places.
    pub(crate) fn restore(
        &self,
        memory: &GuestMemoryMmap<()>,
        vcpu: &VcpuFd,
        ports: &mut Ports,
    ) -> Result<(), Failure> {
        let mut file = self.memory.try_clone()?;
        file.rewind()?;
        for (start, len) in &self.ranges {
            memory.read_exact_volatile_from(*start, &mut file, *len)?;
        }
        vcpu.set_sregs(&self.sregs)?;
        vcpu.set_regs(&self.regs)?;
        vcpu.set_fpu(&self.fpu)?;
        vcpu.set_msrs(&self.tsc)?;
        vcpu.set_lapic(&self.lapic)?;
        vcpu.set_mp_state(self.running)?;
        vcpu.set_vcpu_events(&self.events)?;
        ports.balloon.registers = self.balloon;
        ports.restore_serial(&self.serial)
    }
}
