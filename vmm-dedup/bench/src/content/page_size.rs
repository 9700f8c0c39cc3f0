//! Memory in small pages, and in transparent huge pages.

/// With (true) and without (false) transparent huge pages, or only what was chosen.
pub(crate) fn page_sizes(chosen: Option<bool>) -> &'static [bool] {
    match chosen {
        None => &[false, true],
        Some(false) => &[false],
        Some(true) => &[true],
    }
}

/// The size of the memory's pages, as a word.
pub(crate) fn pages_name(thp: bool) -> &'static str {
    if thp { "thp" } else { "4k" }
}
