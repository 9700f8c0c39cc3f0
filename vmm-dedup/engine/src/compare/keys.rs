//! Making keys of pages.

use super::{Answer, Engine, PageId, Pages};

/// Makes keys: hashes of a page, or of a part of it.
///
/// The caller may ask for any number of pages at once, and may pass pages that a guest or another process writes
/// meanwhile: then any key is right. It uses keys to tell that a page has changed, and to tell pages apart; never to tell
/// that two pages are equal.
///
/// The engine answers each page, in the order of the questions. Equal pages have equal keys, as long as the engine lives;
/// keys of different engines have nothing to do with each other. The CPU time of a key should be well below that of
/// comparing the page.
pub trait Keys: Engine {
    /// The key of each page.
    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>>;
}
