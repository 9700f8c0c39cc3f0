//! Giving up huge pages that are all zeros.
//!
//! # Why no write and no DMA is lost
//!
//! The huge page is taken as a whole ([`crate::window`]), so nobody writes it, and pinned ones refuse. If all of it is zero its
//! place stays empty: the next touch gets a fresh huge page of zeros from the kernel, which is the same content. Else it goes
//! back.

use crate::account::{Account, ns};
use crate::memory::page_map::PageMap;
use crate::sys::guest;
use crate::sys::late_log;
use crate::sys::page_size::CHUNK_PAGES;
use crate::sys::sched::Urgent;
use crate::unmerge::address_space::AddressSpace;
use crate::window::{HugeScratch, PageSet, Window};
use std::time::Instant;

/// A huge page that seems to be all zeros: takes it, and leaves the place empty if it is.
#[allow(unsafe_code)] // reads pages that were taken
pub(crate) fn free(map: &mut PageMap, space: &mut AddressSpace, account: &mut Account, chunk: usize) -> bool {
    let discards = space.discards.clone();
    let mut discards = discards.lock();
    space.note_discards(&mut discards, map);
    let start = map.chunk_at(chunk).start;
    let scratch = match HugeScratch::new(&space.uffd, 1) {
        Ok(scratch) => scratch,
        Err(error) => {
            late_log::note(
                "making room for a huge page",
                &error,
                "a huge page of zeros stays for now",
            );
            return false;
        }
    };
    let urgent = Urgent::begin();
    let clock = Instant::now();
    let all = PageSet::of(std::iter::once(0..CHUNK_PAGES));
    let Ok(mut window) = Window::open(&space.uffd, start, scratch.place(0), &all) else {
        return false;
    };
    let (taken, _) = window.take_prefix(0..CHUNK_PAGES);
    // SAFETY: what was taken is ours.
    let zero = |page| unsafe { guest::is_zero_page(window.taken(page)) };
    let all_zero = taken == CHUNK_PAGES && (0..CHUNK_PAGES).all(zero);
    if all_zero {
        window.leave_empty(0..CHUNK_PAGES);
    }
    window.close();
    account.stats.stop.observe(ns(clock.elapsed()));
    drop(urgent);
    if all_zero {
        map.note_huge_zero(chunk);
        account.stats.zero_merges_total += CHUNK_PAGES as u64;
        account.stats.huge_zero_total += 1;
    }
    all_zero
}
