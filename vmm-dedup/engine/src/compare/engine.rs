//! What all engines have, and what they are asked about.

use super::account::Account;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;
use vmm_dedup_protocol::key::PAGE_WORDS;
use vmm_dedup_protocol::stats::DeviceWork;
use vmm_dedup_protocol::tree::Node;

/// A page as engines see it: words that may change under their eyes.
pub type PageView = [AtomicU64; PAGE_WORDS];

/// Names a page among [`Pages`] and the files of [`Engine::map`]. The nodes of a tree are pages of the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u64);

impl PageId {
    /// The first of the numbers that callers give to no page: an engine may name pages of its own by it and the
    /// following ones, e.g. a buffer that its device reads.
    pub const OWN: Self = Self(1 << 32);

    /// The page of a tree's node.
    pub fn of_node(node: Node) -> Self {
        Self(node.into())
    }
}

impl std::fmt::Display for PageId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

/// The pages that an engine may read in a call.
pub trait Pages: Sync {
    /// The page of this number; `None` if there is none.
    fn view(&self, page: PageId) -> Option<&PageView>;
}

/// Why a question has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no such page, or the device was not given it.
    #[error("{0} cannot be read: give it to the engine first")]
    Fault(PageId),
    /// Memory at an address that an engine was given cannot be read by its device.
    #[error("the device cannot read the page at {0:#x}")]
    Address(usize),
    /// The device failed; nothing can be asked of it any more.
    #[error("the device failed ({0}): the CPU does the same")]
    Device(String),
}

/// An answer.
pub type Answer<T> = Result<T, Error>;

/// What all engines have, whatever they offer.
pub trait Engine: Send {
    /// A short name for reports and logs. (In settings and metrics it has the name that it was registered by.)
    fn name(&self) -> &'static str;

    /// Lets it read the pages of a file, as pages `first` and following: for devices, which do not see the caller's
    /// memory. The file cannot shrink. Not called while pages of a guest are away.
    ///
    /// # Errors
    /// If the device cannot be told.
    fn map(&mut self, _first: PageId, _pages: usize, _file: BorrowedFd<'_>) -> Answer<()> {
        Ok(())
    }

    /// Ends [`Self::map`] of the very same range.
    ///
    /// # Errors
    /// If the device cannot be told.
    fn unmap(&mut self, _first: PageId, _pages: usize) -> Answer<()> {
        Ok(())
    }

    /// CPU time of threads of its own that drive a device, ns. It is part of the account's.
    fn helper_cpu_ns(&self) -> u64 {
        0
    }

    /// What its device was given to do, if it has one.
    fn device_work(&self) -> DeviceWork {
        DeviceWork::default()
    }

    /// What was done so far, and what it cost.
    fn account(&self) -> Account;
}
