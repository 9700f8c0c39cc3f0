//! Everything that can go wrong, each in one line that says what to do.

use std::io;

use crate::layout;

/// Why a VM cannot be built, or how it ended badly.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The fields are the values in the messages.
pub enum Error {
    /// The configured memory size is out of range.
    #[error(
        "{mib} MiB of guest memory is out of range: give between {} and {}",
        layout::MIN_MEMORY_MIB,
        layout::MAX_MEMORY_MIB
    )]
    MemorySize { mib: u64 },
    /// The configured number of vCPUs is out of range.
    #[error("{vcpus} vCPUs is out of range: give between 1 and {}", layout::MAX_VCPUS)]
    VcpuCount { vcpus: u8 },
    /// The kernel command line cannot be passed.
    #[error(
        "the kernel command line ({bytes} bytes) must be ASCII without NUL and shorter than {} bytes",
        layout::CMDLINE_SIZE
    )]
    CommandLine { bytes: usize },

    /// There is no KVM here.
    #[error(
        "there is no /dev/kvm: load kvm_intel or kvm_amd, and enable virtualisation in the firmware (in a VM: nested virtualisation)"
    )]
    KvmMissing,
    /// KVM is there but not for us.
    #[error("/dev/kvm may not be opened: join the group that owns it (usually kvm), or run as root")]
    KvmDenied,
    /// An operation of KVM failed.
    #[error("KVM refused to {operation}")]
    Kvm {
        operation: &'static str,
        source: kvm_ioctls::Error,
    },

    /// Guest memory cannot be mapped.
    #[error(
        "cannot map {mib} MiB of guest memory: check vm.overcommit_memory and the limits of this process"
    )]
    MapMemory {
        mib: u64,
        source: vm_memory::mmap::FromRangesError,
    },
    /// The huge page mode cannot be set.
    #[error(
        "cannot set the huge page mode of guest memory: use ThpMode::Default on kernels without transparent huge pages"
    )]
    HugePages(#[source] io::Error),
    /// A boot structure does not fit, which the checks before should have told.
    #[error("cannot write boot parameters into guest memory: give the VM more memory")]
    WriteMemory(#[source] vm_memory::GuestMemoryError),

    /// The kernel cannot be read.
    #[error("cannot read the kernel {kernel}")]
    KernelRead { kernel: String, source: io::Error },
    /// The kernel is something else.
    #[error(
        "{kernel} is neither an x86-64 ELF image nor a bzImage: give a bzImage, a vmlinux or a PVH image"
    )]
    KernelFormat { kernel: String },
    /// The kernel contradicts itself.
    #[error("the kernel {kernel} is damaged ({problem}): build or fetch it again")]
    KernelDamaged { kernel: String, problem: &'static str },
    /// The kernel is too old, or was built without something.
    #[error(
        "the bzImage {kernel} cannot be entered in 64-bit mode: it must be an x86-64 kernel with boot protocol 2.12 (Linux 3.8) or newer"
    )]
    KernelNot64Bit { kernel: String },
    /// The kernel does not fit.
    #[error(
        "the kernel {kernel} needs memory up to {needed_mib} MiB and there are {low_mib} MiB at low addresses: give the VM more memory"
    )]
    KernelTooLarge {
        kernel: String,
        needed_mib: u64,
        low_mib: u64,
    },
    /// The loader gave up on the kernel.
    #[error("cannot load the kernel {kernel}")]
    KernelLoad {
        kernel: String,
        source: linux_loader::loader::Error,
    },
    /// The initrd cannot be read.
    #[error("cannot read the initrd {initrd}")]
    InitrdRead { initrd: String, source: io::Error },
    /// The initrd does not fit.
    #[error(
        "the initrd {initrd} has {size} bytes and there is room for {room}: give the VM more memory, or shrink it"
    )]
    InitrdTooLarge { initrd: String, size: u64, room: u64 },

    /// A thread or an event cannot be created.
    #[error("cannot {what}: check the limits on processes and open files")]
    Host { what: &'static str, source: io::Error },
    /// The vCPU cannot go on.
    #[error("vcpu{vcpu} stopped: {reason}; {registers}")]
    VcpuCrashed {
        vcpu: u8,
        reason: String,
        registers: String,
    },
    /// A vCPU thread panicked.
    #[error("a vCPU thread panicked: its message is on stderr")]
    VcpuPanicked,
}

impl Error {
    /// Names what KVM was asked for.
    pub(crate) fn kvm(operation: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Error {
        move |source| Error::Kvm { operation, source }
    }
}
