//! Why a service cannot start or go on. Each message says what to do.

use std::io;
use std::path::PathBuf;
use vmm_dedup_protocol::refusal::Refusal;

/// Errors of the engine.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages are the documentation
#[non_exhaustive]
pub enum Error {
    #[error("the kernel lacks {0}: run Linux 6.8 or later")]
    KernelLacks(&'static str),
    #[error("memory is deduplicated on x86-64 only, and this program is for {0}: run it on an x86-64 host")]
    Architecture(&'static str),
    #[error(
        "cannot open a userfaultfd ({0}): give this process read access to /dev/userfaultfd, or CAP_SYS_PTRACE"
    )]
    NoUserfaultfd(io::Error),
    #[error(
        "the userfaultfd handshake failed: run Linux 6.8 or later with CONFIG_USERFAULTFD, or raise the limit on open files"
    )]
    Userfaultfd(#[source] io::Error),
    #[error("cannot use /proc/self/pagemap: mount /proc and allow access to it")]
    Pagemap(#[source] io::Error),
    #[error("cannot read {0}: mount /proc, and allow access to it")]
    Proc(&'static str, #[source] io::Error),
    #[error(
        "guest memory at {start:#x} is {backing} ({path}): start the VM with private anonymous memory (no shared=on, no hugepages=on)"
    )]
    NotPrivate {
        start: usize,
        backing: Backing,
        path: String,
    },
    #[error("guest memory {start:#x}..{end:#x} is not mapped throughout: map all of it before it is added")]
    NotMapped { start: usize, end: usize },
    #[error(
        "guest memory at {0:#x} is not readable and writable: start the VM without what protects it, e.g. a pvmemcontrol device"
    )]
    Protected(usize),
    #[error(
        "guest memory at {start:#x} ({len} bytes) is not made of whole, aligned 4 KiB pages: add whole pages"
    )]
    Unaligned { start: usize, len: usize },
    #[error("no guest memory was given: add it first")]
    NoMemory,
    #[error("guest memory regions overlap at {0:#x}: add each once")]
    Overlap(usize),
    #[error("{0} guest pages are more than one service handles (2^32): leave some regions out")]
    TooManyPages(usize),
    #[error(
        "vm.max_map_count is {limit} and {used} mappings are in use, which leaves fewer than {needed} for merging: raise it, e.g. `sysctl vm.max_map_count=1048576`"
    )]
    TooFewVmas {
        limit: usize,
        used: usize,
        needed: usize,
    },
    #[error("{field} is {value}, but {rule}")]
    Config {
        field: &'static str,
        value: String,
        rule: &'static str,
    },
    #[error("the settings cannot be read: {0}")]
    Settings(String),
    #[error(
        "the store at {} shares securely (--secure), which this program cannot: build it with the feature `pack` of vmm-dedup, or name another store",
        path.display()
    )]
    CannotShareSecurely { path: std::path::PathBuf },
    #[error(
        "the store at {} {}, and the one before did not: start dedup of this VM anew, or the store as it was",
        path.display(),
        if *secure { "shares securely (--secure)" } else { "does not share securely" }
    )]
    OtherWay { path: std::path::PathBuf, secure: bool },
    #[error("{field} is {name:?}, but this program has {known}")]
    NoEngine {
        field: &'static str,
        name: String,
        known: String,
    },
    #[error("cannot connect to the store at {path} ({source}): start it, or name another's socket")]
    Connect { path: PathBuf, source: io::Error },
    #[error(
        "the connection to the store broke: see what the store logged, and start it again if it has ended"
    )]
    StoreIo(#[from] io::Error),
    #[error("the store closed the connection: see what it logged, and start it again if it has ended")]
    StoreGone,
    #[error("the store refused: {0}")]
    StoreRefused(String),
    #[error("the store sent an unexpected {0}: run store and VMM of one release")]
    Unexpected(&'static str),
    #[error("the store's message is malformed: run store and VMM of one release")]
    Malformed(#[from] vmm_dedup_protocol::message::Malformed),
    #[error("the store's index is unusable: run store and VMM of one release")]
    Index(#[from] vmm_dedup_protocol::index::IndexError),
    #[error(
        "cannot change guest memory's registration at {address:#x}: wait until another userfaultfd that has it is closed, else raise vm.max_map_count"
    )]
    Register { address: usize, source: io::Error },
    #[error("out of address space for scratch memory: raise the VMM's limits on memory, or vm.max_map_count")]
    Scratch(#[source] io::Error),
    #[error("cannot make an eventfd: raise the limit on open files")]
    Eventfd(#[source] io::Error),
    #[error("cannot start a thread: raise the limits on threads (ulimit -u, pids.max) and memory")]
    Thread(#[source] io::Error),
    #[error(
        "descriptor {fd} is for direct I/O on {filesystem}, which is not known to pin guest memory, so that a read could be lost under merging: use cache=writeback (no direct=on) for this disk, or put it on a block device, ext4, XFS or btrfs, or switch dedup off for this VM"
    )]
    UnpinnedDirectIo { fd: i32, filesystem: String },
    #[error(
        "{0} pages could not be brought back to anonymous memory, and still map the store or the zero page, or are packed: free memory and try again"
    )]
    NotUnmerged(u64),
    #[error("the VMM did not say at which addresses the guest sees its memory: ask about the whole VM")]
    NoGuestAddresses,
    #[error("there is no guest memory at {start:#x}..{end:#x}: ask about where the guest has some")]
    NotGuestMemory { start: u64, end: u64 },
    #[error("the service has stopped: the log says why, if nobody asked for that")]
    Stopped,
    #[error("the seccomp filter cannot be made: {0}")]
    Seccomp(String),
    #[error("the process has a supervisor already, with other options: make it before whoever uses it first")]
    Supervised,
    #[error("a VM is attached already: detach it first")]
    Attached,
    #[error("no VM is attached: attach it first")]
    Detached,
    #[error(
        "guest memory at {0:#x} is lent already: take it back first, since loans of one region do not nest"
    )]
    Lent(usize),
    #[error(
        "the supervisor knows no memory at {start:#x}..{end:#x}: add it first, since what is said of memory that it does not know is not kept"
    )]
    NotAdded { start: usize, end: usize },
    #[error("this VM is not deduplicated: {0}")]
    Refused(Refusal),
}

impl Error {
    /// Whether what failed may go well later, though nobody changes the VM: memory, mappings, descriptors and threads come back,
    /// stores and files of others come and go.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Userfaultfd(_)
                | Self::Pagemap(_)
                | Self::Proc(..)
                | Self::TooFewVmas { .. }
                | Self::Connect { .. }
                | Self::StoreIo(_)
                | Self::StoreGone
                | Self::StoreRefused(_)
                | Self::Malformed(_)
                | Self::Index(_)
                | Self::Register { .. }
                | Self::Scratch(_)
                | Self::Eventfd(_)
                | Self::Thread(_)
                | Self::UnpinnedDirectIo { .. }
        )
    }
}

/// What memory is that is not private and anonymous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backing {
    /// Others may map it too.
    Shared,
    /// A private mapping of a file.
    File,
    /// Pages of hugetlbfs.
    Hugetlb,
    /// It maps a store's pages: of a service that has ended without unmerging, of pages that the kernel had copied, or of another service,
    /// which has the memory still.
    Store,
}

impl std::fmt::Display for Backing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Shared => "shared",
            Self::File => "a private mapping of a file",
            Self::Hugetlb => "made of hugetlb pages",
            Self::Store => "in parts a store's, of a service that has ended or of another one",
        })
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_message_says_what_to_do() {
        let attributes = include_str!("error.rs").split("#[error(").skip(1);
        let messages: Vec<&str> = attributes.filter_map(|rest| rest.split('"').nth(1)).collect();
        assert!(messages.len() > 30, "{messages:#?}");
        // Behind a colon, or by a clause of its own; what another part of the message says is that part's.
        let silent = |message: &&&str| !message.contains(": ") && !message.contains(", but ");
        let silent: Vec<&&str> = messages.iter().filter(silent).collect();
        assert!(silent.is_empty(), "{silent:#?}");
    }
}
