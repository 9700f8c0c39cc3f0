//! Ranges that share all of a huge page of the store.
//!
//! Such a range is as fast to read as an own huge page, and is not built again unless it is written. So it needs no probes
//! ([`PROBES`]), which would be holes in it. As soon as it is none any more, or the store could not make its memory a huge
//! page, its probes become private and it is sampled as others are.

use crate::account::Account;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::page_state::Backing;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::sys::vma::populate_read;
use crate::track::access::{PROBES, Probes};
use crate::unmerge::address_space::AddressSpace;

/// Parts chunks into those to be sampled, and those that map a huge page of the store or that nothing can be taken of.
pub(super) fn sort_out(
    map: &mut PageMap,
    space: &mut AddressSpace,
    account: &mut Account,
    probes: Probes,
    batch: &[usize],
) -> (Vec<usize>, Vec<usize>) {
    let (mut sampled, mut unsampled) = (Vec::with_capacity(batch.len()), Vec::new());
    for at in batch.iter().copied() {
        let ready = map.chunk(at).huge
            || (!maps_huge_page_of_store(map, space, at) && has_probes(map, space, account, probes, at));
        if ready { &mut sampled } else { &mut unsampled }.push(at);
    }
    (sampled, unsampled)
}

/// Whether a split chunk maps a huge page of the store, or soon will.
fn maps_huge_page_of_store(map: &PageMap, space: &mut AddressSpace, at: usize) -> bool {
    if !shares_huge_page(map, at) {
        return false;
    }
    // Touched only if it is not mapped as one: what was swapped out would come back.
    let start = map.chunk_at(at).start;
    let huge = space.pagemap.is_huge(start)
        || (populate_read(start, PAGE_SIZE).is_ok() && space.pagemap.is_huge(start));
    huge || map.chunk(at).thp.may_become_huge()
}

/// Whether all of a chunk's pages share the slots of what is or may become a huge page of the store.
fn shares_huge_page(map: &PageMap, at: usize) -> bool {
    let pages = &map.chunk_at(at).pages;
    let backing = |n: Page| map.backing(pages.start + n);
    let Backing::Slot(first) = backing(0) else {
        return false;
    };
    let shared = |n| first.checked_add_in_segment(n).map(Backing::Slot) == Some(backing(n));
    // What tells most of them apart comes first.
    let probes = pages.len() == CHUNK_PAGES && first.begins_huge_page() && PROBES.into_iter().all(shared);
    probes && (0..pages.end - pages.start).all(shared)
}

/// Makes probes private that the source needs and that were shared. False if one stays in a mapping of the store, since the
/// kernel has copied it there; such memory must not be registered or moved.
fn has_probes(
    map: &mut PageMap,
    space: &mut AddressSpace,
    account: &mut Account,
    probes: Probes,
    at: usize,
) -> bool {
    if !probes.needed {
        return true;
    }
    let first = map.chunk_at(at).pages.start;
    PROBES.into_iter().all(|probe| {
        let page = first + probe;
        if map.backing(page).in_file_mapping() {
            space.make_private(map, account, page..page + 1);
        }
        if map.backing(page).is_with_packer() {
            space.bring_back(map, &(page..page + 1));
        }
        map.backing(page).is_anonymous()
    })
}
