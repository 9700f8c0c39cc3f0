//! Why a VM, or a part of its memory, is not deduplicated: what only this library can see. The rest says the engine.

use vmm_dedup::{Reason, Refusal};

/// Whether it may pass by itself.
pub(crate) fn passes(refusal: &Refusal) -> bool {
    matches!(refusal.reason, Reason::ForeignUserfaultfd | Reason::Store)
}

/// Guest memory that others can map.
pub(crate) fn shared(arguments: &[String]) -> Refusal {
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
pub(crate) fn hugetlb() -> Refusal {
    Refusal::new(
        Reason::Hugetlb,
        "guest memory consists of hugetlb pages, which cannot be shared in parts",
        "start the VM without hugepages=on; transparent huge pages are fine",
    )
}

/// Guest memory that is private, but of a file.
pub(crate) fn file() -> Refusal {
    Refusal::new(
        Reason::SharedMemory,
        "guest memory is a mapping of a file",
        "start the VM with anonymous memory",
    )
}

/// A device with direct access.
pub(crate) fn passthrough() -> Refusal {
    Refusal::new(
        Reason::Vfio,
        "a device has direct access to guest memory (VFIO, vDPA, vhost-scsi), which pins it or takes it without a trace",
        "remove the device, and start the VMM anew",
    )
}

/// A guest that may run guests, on a kernel whose KVM then takes its memory without a trace.
pub(crate) fn nested() -> Refusal {
    Refusal::new(
        Reason::Other,
        "the guest can run guests of its own (VMX, SVM), for which KVM before Linux 6.13 uses guest memory without a trace",
        "run Linux 6.13 or later, or start the VM without them (`--cpus nested=off`, `-cpu host,-vmx,-svm`), or load kvm_intel or kvm_amd with nested=0",
    )
}

/// Guest memory that the VMM protects.
pub(crate) fn protected() -> Refusal {
    Refusal::new(
        Reason::Other,
        "the VMM protects guest memory (mprotect)",
        "report this with the VMM's name and version",
    )
}

/// A guest that hides its memory.
pub(crate) fn confidential() -> Refusal {
    Refusal::new(
        Reason::Confidential,
        "guest memory is private to the guest (SEV, TDX, guest_memfd)",
        "start the VM without confidential computing",
    )
}

/// A userfaultfd of the VMM's own.
pub(crate) fn foreign_userfaultfd() -> Refusal {
    Refusal::new(
        Reason::ForeignUserfaultfd,
        "the VMM uses a userfaultfd on guest memory (postcopy, on-demand restore, background snapshot)",
        "wait until that is over",
    )
}

/// Memory that was mapped by a call that is not interposed.
pub(crate) fn unknown_memory(bytes: usize) -> Refusal {
    Refusal::new(
        Reason::NoKvmMemory,
        &format!("{bytes} bytes of guest memory were not mapped by a call that this library sees"),
        "report this with the VMM's name and version",
    )
}

/// A thread that may not do its work.
pub(crate) fn sandboxed() -> Refusal {
    Refusal::new(
        Reason::Other,
        "the VMM had restricted its system calls before it talked to KVM",
        "start the VMM without its sandbox",
    )
}

/// A settings file with a mistake.
pub(crate) fn settings(mistake: &str) -> Refusal {
    Refusal::new(
        Reason::Other,
        mistake,
        "correct the file that VMM_DEDUP_CONFIG names",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(passes(&foreign_userfaultfd()) && !passes(&passthrough()));
    }
}
