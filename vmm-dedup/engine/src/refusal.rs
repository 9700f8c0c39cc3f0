//! Why a VM, or a part of its memory, is not deduplicated: all texts, for whoever tells a
//! [`Supervisor`](crate::supervisor::Supervisor) what it sees, and for what the engine finds by itself.

use crate::error::{Backing, Error};
use vmm_dedup_protocol::refusal::{Reason, Refusal};

/// Whether it is likely to pass soon by itself: it is tried every second, and not announced. (Shortages, and files that are open
/// for direct I/O, are announced, and tried again every minute.)
#[must_use]
pub fn passes(refusal: &Refusal) -> bool {
    matches!(refusal.reason, Reason::ForeignUserfaultfd | Reason::Store)
}

/// Guest memory that others can map, in a program with these arguments.
#[must_use]
pub fn shared(arguments: &[String]) -> Refusal {
    let needs = |words: &[&str]| {
        let found = arguments.iter().find(|a| words.iter().any(|w| a.contains(w)));
        found.map(|argument| format!(", which `{argument}` needs"))
    };
    let vhost = needs(&["vhost_user=", "vhost-user", "virtiofs"]);
    let vfio = needs(&["user-device", "vfio-user"]);
    let (reason, by) = match (vhost, vfio) {
        (Some(by), _) => (Reason::VhostUser, by),
        (None, Some(by)) => (Reason::VfioUser, by),
        (None, None) => (Reason::SharedMemory, String::new()),
    };
    Refusal::new(
        reason,
        &format!(
            "guest memory is MAP_SHARED (shared=on, share=on, or a file){by}: others would miss private copies"
        ),
        "start the VM with private anonymous memory, and without devices in other processes",
    )
}

/// Guest memory of hugetlbfs.
#[must_use]
pub fn hugetlb() -> Refusal {
    Refusal::new(
        Reason::Hugetlb,
        "guest memory consists of hugetlb pages, which cannot be shared in parts",
        "start the VM without hugepages=on; transparent huge pages are fine",
    )
}

/// Guest memory that is private, but of a file.
#[must_use]
pub fn file() -> Refusal {
    Refusal::new(
        Reason::SharedMemory,
        "guest memory is a mapping of a file",
        "start the VM with anonymous memory",
    )
}

/// A VM whose service has ended by itself.
pub(crate) fn service_died() -> Refusal {
    Refusal::new(
        Reason::Other,
        "the scanning thread has ended by a fault of its own; what is shared stays shared",
        "start the VM anew, and report what its log says",
    )
}

/// Guest memory that maps pages of a store: those that a service has left there which has ended, or those of one that has the memory still.
#[must_use]
pub fn left_over() -> Refusal {
    Refusal::new(
        Reason::Other,
        "guest memory maps pages of a store already: a service that has ended has left them there, or another one has this memory",
        "give the VM new memory, or leave this to the other one",
    )
}

/// A device with direct access, which the VMM cannot tell to have gone.
#[must_use]
pub fn passthrough() -> Refusal {
    Refusal::new(
        Reason::Vfio,
        "a device has direct access to guest memory (VFIO, vDPA, vhost-scsi), which pins it or takes it without a trace",
        "remove the device, and start the VMM anew",
    )
}

/// A device with direct access, for as long as the VMM has it.
#[must_use]
pub fn pinned() -> Refusal {
    Refusal::new(
        Reason::Vfio,
        "a device has direct access to guest memory (VFIO, vDPA, vhost-scsi), which pins it or takes it without a trace",
        "remove the device",
    )
}

/// A guest that may run guests, on a kernel whose KVM then takes its memory without a trace.
#[must_use]
pub fn nested() -> Refusal {
    Refusal::new(
        Reason::Other,
        "the guest can run guests of its own (VMX, SVM), for which KVM before Linux 6.13 uses guest memory without a trace",
        "run Linux 6.13 or later, or start the VM without them (`--cpus nested=off`, `-cpu host,-vmx,-svm`), or load kvm_intel or kvm_amd with nested=0",
    )
}

/// Settings that the VMM could not read, by a bug of its own.
pub(crate) fn unread() -> Refusal {
    Refusal::new(
        Reason::Other,
        "the VMM's code that reads the settings has panicked",
        "report what the VMM's log says to whoever makes it",
    )
}

/// Guest memory that the VMM protects or locks.
#[must_use]
pub fn protected() -> Refusal {
    Refusal::new(
        Reason::Other,
        "the VMM protects or locks guest memory (mprotect, mlock)",
        "start the VM without what asks for that, e.g. a pvmemcontrol device",
    )
}

/// A guest that hides its memory.
#[must_use]
pub fn confidential() -> Refusal {
    Refusal::new(
        Reason::Confidential,
        "guest memory is private to the guest (SEV, TDX, guest_memfd)",
        "start the VM without confidential computing",
    )
}

/// A userfaultfd of the VMM's own.
#[must_use]
pub fn foreign_userfaultfd() -> Refusal {
    Refusal::new(
        Reason::ForeignUserfaultfd,
        "the VMM uses a userfaultfd on guest memory (postcopy, on-demand restore, background snapshot)",
        "wait until that is over",
    )
}

/// Memory that was mapped by a call that is not interposed.
#[must_use]
pub fn unknown_memory(bytes: usize) -> Refusal {
    Refusal::new(
        Reason::NoKvmMemory,
        &format!("{bytes} bytes of guest memory were not mapped by a call that this library sees"),
        "report this with the VMM's name and version",
    )
}

/// A thread that may not do its work.
#[must_use]
pub fn sandboxed() -> Refusal {
    Refusal::new(
        Reason::Other,
        "the VMM had restricted its system calls before dedup began",
        "start the VMM without its sandbox",
    )
}

/// Settings with a mistake; `lift`: where they are.
#[must_use]
pub fn settings(mistake: &str, lift: &str) -> Refusal {
    Refusal::new(Reason::Other, mistake, lift)
}

/// Those of this program.
fn arguments() -> Vec<String> {
    std::env::args_os()
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect()
}

impl From<&Error> for Refusal {
    /// Why a service could not start, or had to end.
    fn from(error: &Error) -> Self {
        let (reason, lift) = match error {
            Error::NotPrivate { backing, .. } => {
                return match backing {
                    Backing::Shared => shared(&arguments()),
                    Backing::File => file(),
                    Backing::Hugetlb => hugetlb(),
                    Backing::Store => left_over(),
                };
            }
            Error::Protected(_) => return protected(),
            Error::KernelLacks(_) => (Reason::KernelTooOld, "run Linux 6.8 or later"),
            Error::Architecture(_) => (Reason::Other, "run it on an x86-64 host"),
            Error::NoUserfaultfd(_) => (
                Reason::NoUserfaultfd,
                "give the VMM read access to /dev/userfaultfd, or CAP_SYS_PTRACE",
            ),
            Error::NoMemory | Error::NotMapped { .. } => {
                (Reason::NoKvmMemory, "give KVM guest memory before dedup starts")
            }
            Error::TooFewVmas { .. } => (
                Reason::TooFewMappings,
                "raise vm.max_map_count, e.g. `sysctl vm.max_map_count=1048576`",
            ),
            Error::Register { source, .. } if source.raw_os_error() == Some(libc::EBUSY) => (
                Reason::ForeignUserfaultfd,
                "wait until postcopy migration or on-demand restore is over",
            ),
            Error::UnpinnedDirectIo { .. } => (
                Reason::DirectIoFilesystem,
                "use cache=writeback (no direct=on) for disks there, or a block device, ext4, XFS or btrfs",
            ),
            Error::Connect { .. }
            | Error::StoreIo(_)
            | Error::StoreGone
            | Error::StoreRefused(_)
            | Error::Malformed(_)
            | Error::Index(_) => (Reason::Store, "start a store of the same release at this path"),
            _ => (Reason::Other, ""),
        };
        let mut detail = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            detail = format!("{detail}: {cause}");
            source = cause.source();
        }
        Refusal::new(reason, &detail, lift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_become_reasons_with_their_causes() {
        let busy = Error::Register {
            address: 4096,
            source: std::io::Error::from_raw_os_error(libc::EBUSY),
        };
        let refusal = Refusal::from(&busy);
        assert_eq!(refusal.reason, Reason::ForeignUserfaultfd);
        assert!(refusal.detail().contains("0x1000") && refusal.detail().contains("busy"));
        let shared = Error::NotPrivate {
            start: 0,
            backing: Backing::Hugetlb,
            path: "/dev/hugepages/ram".into(),
        };
        assert_eq!(Refusal::from(&shared).reason, Reason::Hugetlb);
        assert_eq!(Refusal::from(&Error::Stopped).reason, Reason::Other);
    }

    #[test]
    fn the_device_that_needs_shared_memory_is_named() {
        let arguments = ["ch", "--net", "vhost_user=true,socket=/s"].map(String::from);
        let refusal = shared(&arguments);
        assert_eq!(refusal.reason, Reason::VhostUser);
        assert!(
            refusal.detail().contains("vhost_user=true,socket=/s"),
            "{refusal}"
        );
        assert_eq!(shared(&["--user-device".into()]).reason, Reason::VfioUser);
        assert_eq!(shared(&[]).reason, Reason::SharedMemory);
    }

    #[test]
    fn what_is_tried_again_passes() {
        assert!(passes(&foreign_userfaultfd()) && !passes(&passthrough()) && !passes(&pinned()));
    }
}
