//! Searching for engines that can only compare, one comparison after the other.

use super::{Answer, Error, PageId};
use std::cmp::Ordering;
use vmm_dedup_protocol::tree::TreeReader;

/// Searches a tree for a twin of a candidate, by comparing the candidate with pages of the tree.
///
/// # Errors
/// That of a comparison.
pub fn search_by_comparing(
    tree: TreeReader<'_>,
    mut compare: impl FnMut(PageId) -> Answer<Ordering>,
) -> Answer<Option<PageId>> {
    let mut failure: Option<Error> = None;
    let found = tree.search(|node| match compare(PageId::of_node(node)) {
        Ok(order) => order,
        Err(error) => {
            failure = Some(error);
            Ordering::Equal // ends the search
        }
    });
    match failure {
        Some(error) => Err(error),
        None => Ok(found.map(PageId::of_node)),
    }
}

/// Finds the first twin of a candidate in a set, by comparing it with each page of the set.
///
/// # Errors
/// That of a comparison.
pub fn among_by_comparing(
    set: &[PageId],
    mut compare: impl FnMut(PageId) -> Answer<Ordering>,
) -> Answer<Option<usize>> {
    for (at, page) in set.iter().enumerate() {
        if compare(*page)?.is_eq() {
            return Ok(Some(at));
        }
    }
    Ok(None)
}
