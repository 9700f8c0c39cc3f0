//! What an ioctl of a VMM means to us. Sources: Linux, include/uapi/linux/{kvm,vfio,iommufd,vhost,userfaultfd}.h.

use kvm_bindings::{KVM_MEM_GUEST_MEMFD, KVM_MEM_READONLY, kvm_cpuid_entry2};
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

/// What to do about an ioctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// Nothing.
    Other,
    /// The process is a VMM.
    Hello,
    /// A memory slot is set, which `argument` describes ([`MemorySlot`]).
    Slot,
    /// Guest memory becomes private to the guest.
    Confidential,
    /// Memory is about to be pinned for a device, by the file that this is asked of.
    Pin,
    /// Memory is about to be used without a trace.
    Take,
    /// Somebody registers a userfaultfd; `argument` begins with the range.
    Userfaultfd,
    /// A vCPU is told what it can do ([`has_nested_virtualisation`]).
    Cpuid,
}

/// KVM_RUN: the one ioctl that has to be fast.
pub(crate) const KVM_RUN: u32 = 0xae80;

const KVM_GET_API_VERSION: u32 = 0xae00;
const KVM_CREATE_VM: u32 = 0xae01;
const KVM_SET_USER_MEMORY_REGION: u32 = 0x4020_ae46;
const KVM_SET_USER_MEMORY_REGION2: u32 = 0x40a0_ae49;
const KVM_SET_CPUID2: u32 = 0x4008_ae90;
const KVM_CREATE_GUEST_MEMFD: u32 = 0xc040_aed4;
const KVM_SET_MEMORY_ATTRIBUTES: u32 = 0x4020_aed2;
const KVM_MEMORY_ENCRYPT_REG_REGION: u32 = 0x8010_aebb;
const VFIO_IOMMU_MAP_DMA: u32 = 0x3b71;
const IOMMU_IOAS_MAP: u32 = 0x3b85;
const IOMMU_IOAS_MAP_FILE: u32 = 0x3b8f;
const UFFDIO_REGISTER: u32 = 0xc020_aa00;
/// VHOST_SCSI_SET_ENDPOINT, whatever the size of its argument. From then on the kernel reads and writes guest memory through
/// plain references, which nothing shows (Linux, drivers/vhost/scsi.c: iov_iter_get_pages2).
const VHOST_SCSI_SET_ENDPOINT: u32 = 0xaf40;
/// Type and first number of the VHOST_VDPA_* ioctls; they end at 0x7f. A vDPA device gets its memory by write(), after
/// the first of these.
const VHOST_VDPA: u32 = 0xaf70;

/// What `request` means.
pub(crate) fn meaning(request: u32) -> Meaning {
    match request {
        KVM_GET_API_VERSION | KVM_CREATE_VM => Meaning::Hello,
        KVM_SET_USER_MEMORY_REGION | KVM_SET_USER_MEMORY_REGION2 => Meaning::Slot,
        KVM_CREATE_GUEST_MEMFD | KVM_SET_MEMORY_ATTRIBUTES | KVM_MEMORY_ENCRYPT_REG_REGION => {
            Meaning::Confidential
        }
        VFIO_IOMMU_MAP_DMA | IOMMU_IOAS_MAP | IOMMU_IOAS_MAP_FILE => Meaning::Pin,
        UFFDIO_REGISTER => Meaning::Userfaultfd,
        KVM_SET_CPUID2 => Meaning::Cpuid,
        _ if request & 0xfff0 == VHOST_VDPA => Meaning::Pin,
        _ if request & 0xffff == VHOST_SCSI_SET_ENDPOINT => Meaning::Take,
        _ => Meaning::Other,
    }
}

/// A memory slot: kvm_userspace_memory_region2 begins in the same way.
pub(crate) type MemorySlot = kvm_bindings::kvm_userspace_memory_region;

/// Host addresses of memory that the guest can write; `None` for a slot that is removed, or read-only. (KVM's dirty
/// log, another flag, is of no interest: merging changes no content, so no page becomes dirty by it, and a guest
/// that writes a shared page takes the fault that logs it, like with any other page.)
pub(crate) fn ram(slot: &MemorySlot) -> Option<Range<usize>> {
    let start = usize::try_from(slot.userspace_addr).ok()?;
    let end = start.checked_add(usize::try_from(slot.memory_size).ok()?)?;
    (slot.flags & KVM_MEM_READONLY == 0 && start < end).then_some(start..end)
}

/// Whether the memory is private to the guest.
pub(crate) fn is_confidential(slot: &MemorySlot) -> bool {
    slot.flags & KVM_MEM_GUEST_MEMFD != 0
}

/// struct uffdio_register.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct UffdRegister {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) mode: u64,
    ioctls: u64,
}

const _: () = assert!(size_of::<UffdRegister>() == (UFFDIO_REGISTER >> 16 & 0x3fff) as usize);

/// Registers a range with a userfaultfd of the VMM's.
#[allow(unsafe_code)] // ioctl on a descriptor of the VMM's
pub(crate) fn register_again(uffd: RawFd, range: &Range<usize>, mode: u64) -> io::Result<()> {
    let mut argument = UffdRegister {
        start: range.start as u64,
        len: range.len() as u64,
        mode,
        ioctls: 0,
    };
    let argument = std::ptr::from_mut(&mut argument).cast();
    // SAFETY: the request's argument. If the VMM has closed the descriptor this fails; if that is another file by now, the
    // request means nothing to it.
    if unsafe { crate::real::ioctl(uffd, u64::from(UFFDIO_REGISTER), argument) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Leaves that KVM takes at most (KVM_MAX_CPUID_ENTRIES).
const MOST_LEAVES: u32 = 256;
const VMX_IN_ECX_OF_1: u32 = 1 << 5;
const SVM_IN_ECX_OF_8000_0001: u32 = 1 << 2;

fn offers_nested_virtualisation(leaf: &kvm_cpuid_entry2) -> bool {
    match leaf.function {
        1 => leaf.ecx & VMX_IN_ECX_OF_1 != 0,
        0x8000_0001 => leaf.ecx & SVM_IN_ECX_OF_8000_0001 != 0,
        _ => false,
    }
}

/// Whether KVM_SET_CPUID2's argument tells a vCPU of VMX or SVM.
///
/// # Safety
/// `argument` must be a struct kvm_cpuid2 with all of its leaves.
#[allow(unsafe_code)] // what a caller of ioctl hands over
pub(crate) unsafe fn has_nested_virtualisation(argument: *const u32) -> bool {
    // SAFETY: the number of leaves comes first, then 4 bytes of padding, then the leaves.
    let leaves = unsafe { argument.read_unaligned() }.min(MOST_LEAVES);
    (0..leaves as usize).any(|at| {
        // SAFETY: as promised by the caller.
        let leaf = unsafe {
            argument
                .add(2)
                .cast::<kvm_cpuid_entry2>()
                .add(at)
                .read_unaligned()
        };
        offers_nested_virtualisation(&leaf)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(unsafe_code)] // reads what a VMM would hand over
    fn vcpus_that_can_run_guests_are_recognised() {
        let leaf = |function, ecx| kvm_cpuid_entry2 {
            function,
            ecx,
            ..kvm_cpuid_entry2::default()
        };
        let cpuid = |leaves: &[kvm_cpuid_entry2]| {
            let mut words = vec![u32::try_from(leaves.len()).unwrap(), 0];
            for leaf in leaves {
                words.extend([leaf.function, leaf.index, leaf.flags]);
                words.extend([leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]);
                words.extend(leaf.padding);
            }
            // SAFETY: as many leaves as the first word says.
            unsafe { has_nested_virtualisation(words.as_ptr()) }
        };
        assert!(cpuid(&[leaf(0, 0), leaf(1, VMX_IN_ECX_OF_1)]));
        assert!(cpuid(&[leaf(0x8000_0001, SVM_IN_ECX_OF_8000_0001 | 1)]));
        assert!(!cpuid(&[leaf(1, !VMX_IN_ECX_OF_1), leaf(7, VMX_IN_ECX_OF_1)]));
        assert!(!cpuid(&[]));
    }

    #[test]
    fn the_ioctls_that_matter_are_known_and_the_others_are_not() {
        assert_eq!(meaning(0x4020_ae46), Meaning::Slot);
        assert_eq!(meaning(0x8004_af70), Meaning::Pin); // VHOST_VDPA_GET_DEVICE_ID
        assert_eq!(meaning(0x40e8_af40), Meaning::Take); // VHOST_SCSI_SET_ENDPOINT
        assert_eq!(meaning(0x4008_af30), Meaning::Other); // VHOST_NET_SET_BACKEND
        assert_eq!(meaning(0x4008_ae90), Meaning::Cpuid);
        assert_eq!(meaning(0x4008_af00), Meaning::Other); // VHOST_SET_FEATURES, as vhost-net does
        assert_eq!(meaning(0x4004_af61), Meaning::Other); // VHOST_VSOCK_SET_RUNNING
        assert_eq!(meaning(KVM_RUN), Meaning::Other);
        assert_eq!(meaning(0x5401), Meaning::Other); // TCGETS
    }

    #[test]
    fn slots_that_go_or_are_read_only_are_no_ram() {
        let slot = MemorySlot {
            slot: 0,
            flags: 1,
            guest_phys_addr: 0,
            memory_size: 4096,
            userspace_addr: 8192,
        };
        assert_eq!(ram(&slot), Some(8192..12288));
        assert_eq!(
            ram(&MemorySlot {
                memory_size: 0,
                ..slot
            }),
            None
        );
        assert_eq!(ram(&MemorySlot { flags: 2, ..slot }), None);
        let nowhere = MemorySlot {
            userspace_addr: u64::MAX,
            ..slot
        };
        assert_eq!(ram(&nowhere), None);
    }
}
