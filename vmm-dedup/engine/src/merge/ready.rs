//! Before a window is opened: what it would wait for, with a guest that waits for it.
//!
//! A page or a slot that is swapped out must be read in to be compared. That takes as long as the disk takes, so it is not
//! done while pages are away: pages that are swapped out are left alone ([`swapped`]), slots are read in. Reclaim may still swap
//! something out in the microseconds between; then the window waits.
//!
//! [`swapped`]: mod@crate::merge::swapped

use crate::lookup::request::MergeRequest;
use crate::store::connection::Store;
use crate::sys::guest;

/// Reads a word of each slot that pages will be compared with.
#[allow(unsafe_code)] // reads slots
pub(crate) fn touch_slots(store: &Store, requests: &[MergeRequest]) {
    let slots = requests.iter().filter_map(|request| store.slot(request.slot?));
    // SAFETY: the store's mapping of a live segment, which is a whole number of pages.
    slots.for_each(|at| unsafe { guest::touch(at) });
}
