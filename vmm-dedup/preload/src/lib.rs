//! Dedup inside an unmodified VMM.
//!
//! Started with `LD_PRELOAD=libvmm_dedup_preload.so VMM_DEDUP_STORE=SOCKET`, a VMM (Cloud Hypervisor, QEMU) shares
//! equal pages of its guest with the other VMs on that store. docs/operating.md has the variables, docs/embedding.md
//! what a VMM does that embeds the engine instead.
//!
//! ```text
//!   the VMM's threads                                            the supervisor's thread       the engine's threads
//!   mmap, munmap, mremap ---> mappings                          .-----------------------.     .--------------.
//!   KVM_SET_USER_MEMORY_REGION -------------- add_range ------->|                       |---->|              |
//!   munmap, UFFDIO_REGISTER, VFIO: wait ----- remove, lend ---->|  vmm_dedup::Supervisor|     | DedupService |
//!   mprotect, open(O_DIRECT): wait ---------- leave_alone ----->|                       |     |              |
//!   pread, preadv --------------------------- note_read ------------------------------------->|              |
//!   madvise(MADV_DONTNEED) ------------------ Discarder ------------------------------------->|              |
//!                                                               '-----------------------'     '--------------'
//! ```
//!
//! - [`hooks`], [`files`] and [`reads`] are the interposed functions; [`kvm`] says what an ioctl means; [`devices`] knows when such have gone
//!   that pin memory; [`mappings`] remembers what was mapped, and [`watch`] holds that;
//! - [`manager`] starts the [`Supervisor`](vmm_dedup::Supervisor), which decides; [`real`] is libc.
//!
//! Rules
//! - The VMM never fails because of us: on any doubt its call goes through as if we were not there, and the reason is
//!   reported. No panic leaves a hook.
//! - A hook may run in a thread whose system calls are filtered (vCPU, virtio devices). Beyond the VMM's own call it
//!   uses futex, and mmap and madvise on guest memory, which those filters allow. Everything else is the supervisor's.
//! - A hook may run inside somebody's allocator: it does not allocate before it knows that guest memory is concerned.
//! - Nothing happens in a process that never talks to KVM: no thread, no file. The first KVM_GET_API_VERSION starts
//!   the supervisor; so wrappers (`ip netns exec`, `unshare`, shells), and what a VMM executes, are not touched, and the
//!   environment is left as it is. A child that is forked, in whatever way, finds the hooks inactive.
//! - Cloud Hypervisor asks for that before it restricts itself. QEMU with `-sandbox on` has restricted all its threads by
//!   then, nobody can ask how, and a forbidden call would end it: such a VM is refused.
//! - KVM_RUN is the first thing that the ioctl hook looks for.
//!
//! Known holes: memory that is mapped without access and gets it later by mprotect is not recognised (and is refused as
//! unknown); ranges freed by process_madvise or by io_uring's madvise, protected by pkey_mprotect, or unmapped by system
//! calls of the VMM's own making are not seen.

mod active;
mod devices;
mod files;
mod hooks;
mod kvm;
mod logging;
mod manager;
mod mappings;
mod reads;
mod real;
mod settings;
mod watch;
