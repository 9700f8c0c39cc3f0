//! Seams for hardware that compares pages: what a comparing backend does, and the CPU as the first of them.
//!
//! A [`Backend`] makes keys, compares pages and searches trees of pages, in batches, over [`Pages`] that it is given
//! with each call. What it finds is a suggestion: before a page is merged, the engine itself compares what it took,
//! all 4,096 bytes, on the CPU (see [`merge`](mod@crate::merge::merger)). So a backend that errs costs time or savings, never
//! content.
//!
//! Duties of both sides:
//! - The pages may change while a backend reads them (candidates in a guest's memory, a staging buffer): then any
//!   answer is right, but there is one, and soon.
//! - A page that cannot be read is an error for the item that named it, not for the batch.
//! - Answers come in the order of the questions, one for each.
//! - A backend reads pages and nothing else of the caller's memory.
//!
//! All backends pass the suite in [`conformance`].

mod account;
mod arena;
mod comparing;
pub mod conformance;
mod cpu;
mod jhash;
pub mod ksm;
pub(crate) mod registry;

pub use account::{Account, Stopwatch};
pub use arena::Arena;
pub use comparing::{among_by_comparing, search_by_comparing};
pub use cpu::{CpuBackend, KeyKind, LineCounts};
pub use jhash::jhash2;

use std::cmp::Ordering;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;
use vmm_dedup_protocol::key::PAGE_WORDS;
use vmm_dedup_protocol::tree::{Node, TreeReader};

/// A page as backends see it: words that may change under their eyes.
pub type PageView = [AtomicU64; PAGE_WORDS];

/// Names a page among [`Pages`]. The nodes of a tree are pages of the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u64);

impl PageId {
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

/// The pages that a backend may read.
pub trait Pages: Sync {
    /// The page of this number; `None` if there is none.
    fn view(&self, page: PageId) -> Option<&PageView>;
}

/// Why a question has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no such page, or the device was not given it.
    #[error("{0} cannot be read: give it to the backend first")]
    Fault(PageId),
    /// The device failed; nothing can be asked of it any more.
    #[error("the device failed ({0}): the CPU backend does the same")]
    Device(String),
}

/// An answer.
pub type Answer<T> = Result<T, Error>;

/// What a search found, and the key of the candidate as it was then, if it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Searched {
    /// The twin.
    pub twin: Option<PageId>,
    /// As [`Backend::keys`] makes it.
    pub key: Option<u64>,
}

/// Something that makes keys of pages, compares pages and searches among them.
pub trait Backend: Send {
    /// A short name for reports.
    fn name(&self) -> &'static str;

    /// Lets it read the pages of a file, as pages `first` and following: for devices, which do not see [`Pages`]. The
    /// file cannot shrink.
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

    /// Makes a key of each page: a hash of a part of it. Equal pages have equal keys, with one backend; keys of
    /// different backends have nothing to do with each other.
    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>>;

    /// Compares pairs of pages as `memcmp` does.
    fn compare(&mut self, pages: &dyn Pages, pairs: &[(PageId, PageId)]) -> Vec<Answer<Ordering>>;

    /// Searches the tree for a twin of each candidate.
    fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>>;

    /// The same; with a twin's absence comes the candidate's key, where that was made on the way.
    fn search_keyed(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Searched>> {
        let twins = self.search(pages, tree, candidates).into_iter();
        let without_key = |twin| Searched { twin, key: None };
        twins.map(|twin| twin.map(without_key)).collect()
    }

    /// Finds the first twin of a candidate in an arbitrary set of pages (PageForge, section 4.2): its place in the set.
    fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>>;

    /// What was done so far, and what it cost.
    fn account(&self) -> Account;
}
