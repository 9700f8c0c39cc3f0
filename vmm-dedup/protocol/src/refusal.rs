//! Why a VM is not deduplicated, and what would change that.

use crate::malformed::Malformed;
use crate::name::{Name, cut};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Longest text of a refusal (and of any other answer) in bytes.
pub const MAX_TEXT: usize = 512;

/// Why a VM is refused. Each has a name that is stable in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Reason {
    /// Guest memory is shared with other processes.
    SharedMemory = 1,
    /// Guest memory is made of hugetlb pages.
    Hugetlb = 2,
    /// A VFIO or vDPA device has guest memory pinned.
    Vfio = 3,
    /// A vhost-user device needs shared memory.
    VhostUser = 4,
    /// A vfio-user device needs shared memory.
    VfioUser = 5,
    /// The guest's memory is encrypted.
    Confidential = 6,
    /// The kernel lacks a feature.
    KernelTooOld = 7,
    /// This process may not open a userfaultfd.
    NoUserfaultfd = 8,
    /// Another userfaultfd owns guest memory (postcopy, on-demand restore).
    ForeignUserfaultfd = 9,
    /// The VMM gave KVM no memory that could be found.
    NoKvmMemory = 10,
    /// Direct I/O on a file system that does not pin pages.
    DirectIoFilesystem = 11,
    /// vm.max_map_count leaves too few mappings.
    TooFewMappings = 12,
    /// The store refused, or speaks another version.
    Store = 13,
    /// Switched off in the VM's configuration.
    Disabled = 14,
    /// Anything else: the detail tells.
    Other = 15,
}

impl Reason {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Self; 15] = [
        Self::SharedMemory,
        Self::Hugetlb,
        Self::Vfio,
        Self::VhostUser,
        Self::VfioUser,
        Self::Confidential,
        Self::KernelTooOld,
        Self::NoUserfaultfd,
        Self::ForeignUserfaultfd,
        Self::NoKvmMemory,
        Self::DirectIoFilesystem,
        Self::TooFewMappings,
        Self::Store,
        Self::Disabled,
        Self::Other,
    ];

    /// Name in metrics and JSON.
    pub fn label(self) -> &'static str {
        match self {
            Self::SharedMemory => "shared_memory",
            Self::Hugetlb => "hugetlb",
            Self::Vfio => "vfio",
            Self::VhostUser => "vhost_user",
            Self::VfioUser => "vfio_user",
            Self::Confidential => "confidential",
            Self::KernelTooOld => "kernel_too_old",
            Self::NoUserfaultfd => "no_userfaultfd",
            Self::ForeignUserfaultfd => "foreign_userfaultfd",
            Self::NoKvmMemory => "no_kvm_memory",
            Self::DirectIoFilesystem => "direct_io_filesystem",
            Self::TooFewMappings => "too_few_mappings",
            Self::Store => "store",
            Self::Disabled => "disabled",
            Self::Other => "other",
        }
    }

    /// The reason of this number, if there is one.
    pub fn of_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|r| u64::from(*r as u32) == number)
    }
}

/// Why a VM is not deduplicated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of reason.
    pub reason: Reason,
    detail: String,
    lift: String,
}

impl Refusal {
    /// `detail`: what was found, in one line; `lift`: the change that would lift it. Both are cut at [`MAX_TEXT`] bytes.
    pub fn new(reason: Reason, detail: &str, lift: &str) -> Self {
        Self {
            reason,
            detail: plain(detail),
            lift: plain(lift),
        }
    }

    /// What was found.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// The change that would lift it.
    pub fn lift(&self) -> &str {
        &self.lift
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.reason.label(), self.detail)?;
        if self.lift.is_empty() {
            Ok(())
        } else {
            write!(f, "; to lift it: {}", self.lift)
        }
    }
}

/// A text of at most [`MAX_TEXT`] bytes that is safe on a terminal, in a log and in JSON: one line, no control
/// characters.
pub fn plain(text: &str) -> String {
    let one_line = text.replace(|c: char| c.is_control(), " ");
    cut(&one_line, MAX_TEXT).to_owned()
}

/// A refused VM's announcement, or the answer to somebody who asks to have it explained; followed by the two texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Head {
    serial: u64,
    pages: u64,
    reason: u32,
    detail: u16,
    lift: u16,
    name: Name,
}

/// A refused VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The question that this answers; 0 in an announcement.
    pub serial: u64,
    /// Guest pages of the VM.
    pub pages: u64,
    /// Its name.
    pub name: Name,
    /// Why it is refused.
    pub refusal: Refusal,
}

impl Refused {
    /// The body of the record.
    pub fn body(&self) -> Vec<u8> {
        let Refusal { reason, detail, lift } = &self.refusal;
        #[allow(clippy::cast_possible_truncation)] // <= MAX_TEXT
        let head = Head {
            serial: self.serial,
            pages: self.pages,
            reason: *reason as u32,
            detail: detail.len() as u16,
            lift: lift.len() as u16,
            name: self.name,
        };
        [head.as_bytes(), detail.as_bytes(), lift.as_bytes()].concat()
    }

    pub(crate) fn parse(body: &[u8], got: usize) -> Result<Self, Malformed> {
        let length = || Malformed::Length { got };
        let (head, texts) = Head::read_from_prefix(body).map_err(|_| length())?;
        let (detail, lift) = (usize::from(head.detail), usize::from(head.lift));
        if detail > MAX_TEXT || lift > MAX_TEXT || texts.len() != detail + lift {
            return Err(length());
        }
        let reason = Reason::of_number(head.reason.into()).ok_or(Malformed::Value {
            field: "reason",
            value: head.reason.into(),
        })?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Ok(Self {
            serial: head.serial,
            pages: head.pages,
            name: head.name,
            refusal: Refusal::new(reason, &text(&texts[..detail]), &text(&texts[detail..])),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_labels_are_distinct_and_complete() {
        for (number, reason) in (1..).zip(Reason::ALL) {
            assert_eq!(Reason::of_number(number), Some(reason));
        }
        let labels: std::collections::HashSet<_> = Reason::ALL.map(Reason::label).into();
        assert_eq!(labels.len(), Reason::ALL.len());
        assert_eq!((Reason::of_number(0), Reason::of_number(16)), (None, None));
    }

    #[test]
    fn texts_are_made_safe_and_short() {
        let refusal = Refusal::new(Reason::Other, "a\n\x1b[2Jb", &"ä".repeat(300));
        assert_eq!((refusal.detail(), refusal.lift().len()), ("a  [2Jb", MAX_TEXT));
    }
}
