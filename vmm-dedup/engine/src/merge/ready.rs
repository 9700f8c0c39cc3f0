//! Before a window is opened: what it would wait for, with a guest that waits for it.
//!
//! A page or a slot that is swapped out must be read in to be compared. That takes as long as the disk takes, so it is not
//! done while pages are away. Reclaim may still swap something out in the microseconds between; then the window waits.

use crate::lookup::request::MergeRequest;
use crate::memory::layout::Memory;
use crate::store::connection::Store;
use crate::sys::guest;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::window::PageSet;

/// Which of some pages are swapped out, counted from the first request's; all, if nothing tells. The requests are for one
/// window.
pub(crate) fn swapped_out(pagemap: &mut Pagemap, memory: &Memory, requests: &[MergeRequest]) -> PageSet {
    let (Some(first), Some(last)) = (requests.first(), requests.last()) else {
        return PageSet::default();
    };
    let pages = (last.page - first.page) as usize + 1;
    let start = memory.address(first.page);
    let page = |address: usize| (address - start) / PAGE_SIZE;
    match pagemap.swapped(start..start + bytes(pages)) {
        Ok(found) => PageSet::of(found.into_iter().map(|part| page(part.start)..page(part.end))),
        Err(_) => PageSet::of(std::iter::once(0..pages)),
    }
}

/// Reads a word of each slot that pages will be compared with.
#[allow(unsafe_code)] // reads slots
pub(crate) fn touch_slots(store: &Store, requests: &[MergeRequest]) {
    let slots = requests.iter().filter_map(|request| store.slot(request.slot?));
    // SAFETY: the store's mapping of a live segment, which is a whole number of pages.
    slots.for_each(|(_, at)| unsafe { guest::touch(at) });
}
