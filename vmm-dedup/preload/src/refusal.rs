//! Why a VM, or a part of its memory, is not deduplicated, and what would change that.

use vmm_dedup::Error;

/// Names are those of metrics' label values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    SharedMemory,
    Hugetlb,
    Vfio,
    VhostUser,
    VfioUser,
    Confidential,
    KernelTooOld,
    NoUserfaultfd,
    ForeignUserfaultfd,
    NoKvmMemory,
    DirectIoFilesystem,
    TooFewMappings,
    Store,
    Other,
}

impl Reason {
    fn name(self) -> &'static str {
        match self {
            Reason::SharedMemory => "shared_memory",
            Reason::Hugetlb => "hugetlb",
            Reason::Vfio => "vfio",
            Reason::VhostUser => "vhost_user",
            Reason::VfioUser => "vfio_user",
            Reason::Confidential => "confidential",
            Reason::KernelTooOld => "kernel_too_old",
            Reason::NoUserfaultfd => "no_userfaultfd",
            Reason::ForeignUserfaultfd => "foreign_userfaultfd",
            Reason::NoKvmMemory => "no_kvm_memory",
            Reason::DirectIoFilesystem => "direct_io_filesystem",
            Reason::TooFewMappings => "too_few_mappings",
            Reason::Store => "store",
            Reason::Other => "other",
        }
    }

    /// Whether it may pass by itself.
    pub(crate) fn passes(self) -> bool {
        matches!(self, Reason::ForeignUserfaultfd | Reason::Store)
    }
}

/// One reason, what was seen, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    detail: String,
    lift: String,
}

impl Refusal {
    pub(crate) fn new(reason: Reason, detail: impl Into<String>, lift: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
            lift: lift.into(),
        }
    }

    /// What an error of the engine means for the VM.
    pub(crate) fn of(error: &Error) -> Self {
        let text = error.to_string();
        let (detail, lift) = text.split_once(": ").unwrap_or((&text, "see the log"));
        let reason = match error {
            Error::KernelLacks(_) => Reason::KernelTooOld,
            Error::NoUserfaultfd(_) => Reason::NoUserfaultfd,
            Error::NotPrivate { .. } => Reason::SharedMemory,
            Error::NoMemory | Error::NotMapped { .. } => Reason::NoKvmMemory,
            Error::TooFewVmas { .. } => Reason::TooFewMappings,
            Error::Register { source, .. } if source.raw_os_error() == Some(libc::EBUSY) => {
                return Self::new(
                    Reason::ForeignUserfaultfd,
                    "another userfaultfd owns guest memory (postcopy, on-demand restore)",
                    "wait until that is over",
                );
            }
            Error::UnpinnedDirectIo { .. } => Reason::DirectIoFilesystem,
            Error::Connect { .. } | Error::StoreIo(_) | Error::StoreGone | Error::StoreRefused(_) => {
                Reason::Store
            }
            _ => Reason::Other,
        };
        Self::new(reason, detail, lift)
    }

    /// Guest memory that others can map.
    pub(crate) fn shared(arguments: &[String]) -> Self {
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
        Self::new(
            reason,
            format!(
                "guest memory is MAP_SHARED (shared=on, share=on, or a file){by}: private copies would be missed"
            ),
            "start the VM with private anonymous memory, and without devices in other processes",
        )
    }

    /// Records it.
    pub(crate) fn report(&self, name: &str) {
        let Self { reason, detail, lift } = self;
        log::warn!(
            "VM {name} is not deduplicated ({}): {detail}; to change that: {lift}",
            reason.name()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_errors_have_reasons() {
        let reason = |error: &Error| Refusal::of(error).reason;
        assert_eq!(reason(&Error::KernelLacks("x")), Reason::KernelTooOld);
        assert_eq!(reason(&Error::StoreGone), Reason::Store);
        let taken = Error::Register {
            address: 0,
            source: std::io::Error::from_raw_os_error(libc::EBUSY),
        };
        assert_eq!(reason(&taken), Reason::ForeignUserfaultfd);
        assert!(reason(&taken).passes() && !Reason::Vfio.passes());
    }

    #[test]
    fn the_device_that_needs_shared_memory_is_named() {
        let arguments = ["ch", "--net", "vhost_user=true,socket=/s"].map(String::from);
        let refusal = Refusal::shared(&arguments);
        assert_eq!(refusal.reason, Reason::VhostUser);
        assert!(
            refusal.detail.contains("vhost_user=true,socket=/s"),
            "{refusal:?}"
        );
        assert_eq!(
            Refusal::shared(&["--user-device".into()]).reason,
            Reason::VfioUser
        );
        assert_eq!(Refusal::shared(&[]).reason, Reason::SharedMemory);
    }
}
