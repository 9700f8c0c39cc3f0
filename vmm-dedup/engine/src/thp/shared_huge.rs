//! Ranges that share all of a huge page of the store.
//!
//! Such a range is as fast to read as an own huge page, and is not built again unless it is written. So it needs no probes
//! ([`PROBES`]), which would be holes in it. As soon as it is none any more, or the store could not make its memory a huge
//! page, its probes become private and it is sampled as others are.

use crate::memory::layout::Page;
use crate::memory::page_state::State;
use crate::scan::pass::Scanner;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::sys::vma::populate_read;
use crate::track::access::PROBES;

impl Scanner {
    /// Parts chunks into those to be sampled, and those that map a huge page of the store or that nothing can be taken of.
    pub(crate) fn sort_out(&mut self, batch: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let (mut sampled, mut unsampled) = (Vec::with_capacity(batch.len()), Vec::new());
        for at in batch.iter().copied() {
            let ready = self.chunks[at].huge || (!self.maps_huge_page_of_store(at) && self.has_probes(at));
            if ready { &mut sampled } else { &mut unsampled }.push(at);
        }
        (sampled, unsampled)
    }

    /// Whether a split chunk maps a huge page of the store, or soon will.
    fn maps_huge_page_of_store(&mut self, at: usize) -> bool {
        if !self.shares_huge_page(at) {
            return false;
        }
        // Touched only if it is not mapped as one: what was swapped out would come back.
        let start = self.memory.chunks()[at].start;
        let huge =
            self.pagemap.is_huge(start) || (populate_read(start, PAGE_SIZE) && self.pagemap.is_huge(start));
        huge || self.chunks[at].mixed.may_become_huge()
    }

    /// Whether all of a chunk's pages share the slots of what is or may become a huge page of the store.
    fn shares_huge_page(&self, at: usize) -> bool {
        let pages = &self.memory.chunks()[at].pages;
        let state = |n: Page| self.table.get(pages.start + n);
        let State::Shared(first) = state(0) else {
            return false;
        };
        let shared = |n| first.checked_add_in_segment(n).map(State::Shared) == Some(state(n));
        // What tells most of them apart comes first.
        let probes = pages.len() == CHUNK_PAGES && first.begins_huge_page() && PROBES.into_iter().all(shared);
        probes && (0..pages.end - pages.start).all(shared)
    }

    /// Makes probes private that the source needs and that were shared. False if one stays in a mapping of the store, since
    /// the kernel has copied it there; such memory must not be registered or moved.
    fn has_probes(&mut self, at: usize) -> bool {
        if !self.mixed.needs_probes() {
            return true;
        }
        let first = self.memory.chunks()[at].pages.start;
        PROBES.into_iter().all(|probe| {
            let page = first + probe;
            if self.table.get(page).in_file_mapping() {
                self.restore(page..page + 1);
            }
            !self.table.get(page).in_file_mapping()
        })
    }
}
