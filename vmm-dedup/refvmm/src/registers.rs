//! The state in which the first vCPU enters the guest. The others wait for its startup interrupt.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Address, Bytes};

use crate::boot::Entry;
use crate::error::Error;
use crate::layout;
use crate::memory::GuestMemory;

const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;
const CODE_32: u64 = 0x00cf_9b00_0000_ffff;
const CODE_64: u64 = 0x00af_9b00_0000_ffff;
const DATA_32: u64 = 0x00cf_9300_0000_ffff;
const BUSY_TASK: u64 = 0x0000_8b00_0000_0067;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// The bit of RFLAGS that is always set.
const RFLAGS: u64 = 2;

const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_FAST_STRINGS: u64 = 1;
const MSR_MTRR_DEFAULT: u32 = 0x2ff;
/// MTRRs on, all memory write-back.
const MTRR_WRITE_BACK: u64 = 0x806;

/// Local APIC registers LINT0 and LINT1, and what firmware leaves in them.
const LINT0: usize = 0x350;
const LINT1: usize = 0x360;
const EXTERNAL: u32 = 0x700;
const NMI: u32 = 0x400;

/// Sets up vCPU 0, where the guest is entered.
pub(crate) fn set_entry_state(vcpu: &VcpuFd, memory: &GuestMemory, entry: Entry) -> Result<(), Error> {
    set_segments(vcpu, memory, entry)?;
    set_local_apic(vcpu)?;
    let regs = match entry {
        Entry::Pvh(address) => kvm_regs {
            rip: address.raw_value(),
            rbx: layout::PVH_INFO.raw_value(),
            rflags: RFLAGS,
            ..Default::default()
        },
        Entry::Linux64(address) => kvm_regs {
            rip: address.raw_value(),
            rsi: layout::ZERO_PAGE.raw_value(),
            rsp: layout::BOOT_STACK.raw_value(),
            rflags: RFLAGS,
            ..Default::default()
        },
    };
    vcpu.set_regs(&regs).map_err(Error::kvm("set a vCPU's registers"))
}

fn set_segments(vcpu: &VcpuFd, memory: &GuestMemory, entry: Entry) -> Result<(), Error> {
    let code = match entry {
        Entry::Pvh(_) => CODE_32,
        Entry::Linux64(_) => CODE_64,
    };
    let table = [0, 0, code, DATA_32, BUSY_TASK, 0];
    memory
        .write_slice(&table.map(u64::to_le_bytes).concat(), layout::GDT)
        .map_err(Error::WriteMemory)?;

    let mut sregs = vcpu.get_sregs().map_err(Error::kvm("read a vCPU's segments"))?;
    sregs.gdt.base = layout::GDT.raw_value();
    sregs.gdt.limit = 8 * 6 - 1;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cs = segment(code, CODE);
    let data = segment(DATA_32, DATA);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = segment(BUSY_TASK, TASK);
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
    if let Entry::Linux64(_) = entry {
        sregs.cr3 = layout::PAGE_TABLES.raw_value();
        sregs.cr4 = CR4_PAE;
        sregs.cr0 |= CR0_PG;
        sregs.efer = EFER_LME | EFER_LMA;
    }
    vcpu.set_sregs(&sregs)
        .map_err(Error::kvm("set a vCPU's segments"))
}

/// The descriptor as the CPU caches it when `selector` is loaded.
fn segment(descriptor: u64, selector: u16) -> kvm_segment {
    let [
        limit_low,
        limit_high,
        base_0,
        base_1,
        base_2,
        access,
        flags,
        base_3,
    ] = descriptor.to_le_bytes();
    let bit = |byte: u8, bit: u8| byte >> bit & 1;
    let limit = u32::from_le_bytes([limit_low, limit_high, flags & 0xf, 0]);
    kvm_segment {
        base: u32::from_le_bytes([base_0, base_1, base_2, base_3]).into(),
        limit: if bit(flags, 7) == 1 {
            limit << 12 | 0xfff
        } else {
            limit
        },
        selector,
        type_: access & 0xf,
        s: bit(access, 4),
        dpl: access >> 5 & 3,
        present: bit(access, 7),
        avl: bit(flags, 4),
        l: bit(flags, 5),
        db: bit(flags, 6),
        g: bit(flags, 7),
        ..Default::default()
    }
}

/// Sets what firmware would have set on every CPU alike.
pub(crate) fn set_msrs(vcpu: &VcpuFd) -> Result<(), Error> {
    for (index, data) in [
        (MSR_MISC_ENABLE, MISC_FAST_STRINGS),
        (MSR_MTRR_DEFAULT, MTRR_WRITE_BACK),
    ] {
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[entry]).map_err(|_| Error::Kvm {
            operation: "take an MSR",
            source: kvm_ioctls::Error::new(libc::E2BIG),
        })?;
        // Guests manage without, so a KVM that does not know one of them is good enough.
        if vcpu.set_msrs(&msrs).map_err(Error::kvm("set a vCPU's MSRs"))? == 0 {
            log::debug!("KVM does not know MSR {index:#x}");
        }
    }
    Ok(())
}

fn set_local_apic(vcpu: &VcpuFd) -> Result<(), Error> {
    let mut state = vcpu.get_lapic().map_err(Error::kvm("read a local APIC"))?;
    for (register, mode) in [(LINT0, EXTERNAL), (LINT1, NMI)] {
        for (place, byte) in state.regs[register..].iter_mut().zip(mode.to_ne_bytes()) {
            *place = std::os::raw::c_char::from_ne_bytes([byte]);
        }
    }
    vcpu.set_lapic(&state).map_err(Error::kvm("set a local APIC"))
}

/// A vCPU's state in one line, for error messages.
pub(crate) fn describe(vcpu: &VcpuFd) -> String {
    let (Ok(regs), Ok(sregs)) = (vcpu.get_regs(), vcpu.get_sregs()) else {
        return "its registers cannot be read".to_owned();
    };
    format!(
        "rip={:#x} rsp={:#x} rflags={:#x} rax={:#x} rbx={:#x} rcx={:#x} rdx={:#x} rsi={:#x} rdi={:#x} \
         cs={:#x} cr0={:#x} cr2={:#x} cr3={:#x} cr4={:#x} efer={:#x}",
        regs.rip,
        regs.rsp,
        regs.rflags,
        regs.rax,
        regs.rbx,
        regs.rcx,
        regs.rdx,
        regs.rsi,
        regs.rdi,
        sregs.cs.selector,
        sregs.cr0,
        sregs.cr2,
        sregs.cr3,
        sregs.cr4,
        sregs.efer
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_taken_apart() {
        let code = segment(CODE_64, CODE);
        let task = segment(BUSY_TASK, TASK);

        assert_eq!(
            (code.limit, code.type_, code.l, code.db, code.s),
            (u32::MAX, 0xb, 1, 0, 1)
        );
        assert_eq!(
            (task.limit, task.type_, task.g, task.s, task.present),
            (0x67, 0xb, 0, 0, 1)
        );
    }
}
