//! Splitting huge pages.

use crate::account::{Account, ns};
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::sys::late_log;
use crate::sys::vma;
use crate::thp::monitor::Monitor;
use std::time::Instant;

/// Splits the huge page that a page is part of, if there is one. Taking the page would do that as well, and keep it away
/// meanwhile.
pub(crate) fn split_if_huge(map: &mut PageMap, account: &mut Account, monitor: &Monitor, page: Page) {
    let chunk = map.chunk_of(page);
    if !map.chunk(chunk).huge {
        return;
    }
    let clock = Instant::now();
    if let Err(error) = vma::split_huge_page(map.memory().address(page)) {
        late_log::note("splitting a huge page", &error, "taking its pages splits it");
    }
    // Whoever touches the huge page may wait for a part of that time.
    account.stats.stop.observe(ns(clock.elapsed()));
    note_split(map, account, monitor, chunk);
}

/// A huge page became small ones.
pub(crate) fn note_split(map: &mut PageMap, account: &mut Account, monitor: &Monitor, chunk: usize) {
    let used = monitor.is_used(&map.chunk(chunk).thp);
    account.stats.huge_splits_rare_total += u64::from(used);
    account.stats.huge_splits_total += 1;
    map.note_split(chunk);
}
