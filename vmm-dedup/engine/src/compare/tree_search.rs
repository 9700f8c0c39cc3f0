//! Searching for equal pages.

use super::{Answer, Keys, Meanwhile, PageId, Pages};
use vmm_dedup_protocol::tree::TreeReader;

/// What a search found, and the key of the candidate as it was then, if it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Searched {
    /// The twin.
    pub twin: Option<PageId>,
    /// As [`Keys::keys`] of the same engine makes it.
    pub key: Option<u64>,
}

/// Finds the twin of a page: in a tree of pages, or in a set.
///
/// It needs the order of two pages, as `memcmp` gives it; to know that they differ is not enough. And it needs [`Keys`]:
/// who searches has to see which candidates without a twin have changed since.
///
/// The caller may pass candidates that are written meanwhile, and a tree that its writer changes meanwhile: a search that
/// is led astray ends all the same, without a twin, with a wrong one or with a fault. It takes a twin for a proposal: what
/// is merged is verified.
///
/// The engine answers each candidate, in the order of the questions. Answers are those of the tree as it was at some time
/// during the call: what an engine keeps of a tree it uses while [`TreeReader::name`] and [`TreeReader::version`] stay.
pub trait TreeSearch: Keys {
    /// Searches the tree for a twin of each candidate.
    fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>>;

    /// The same; with a twin's absence comes the candidate's key, where that was made on the way. An engine that waits for a
    /// device may have the caller's work done meanwhile; what is left undone the caller does.
    fn search_keyed(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
        meanwhile: &mut Meanwhile<'_>,
    ) -> Vec<Answer<Searched>> {
        let _ = meanwhile;
        let twins = self.search(pages, tree, candidates).into_iter();
        let without_key = |twin| Searched { twin, key: None };
        twins.map(|twin| twin.map(without_key)).collect()
    }

    /// Finds the first twin of a candidate in an arbitrary set of pages (PageForge, section 4.2): its place in the set.
    fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>>;
}
