//! Finding out what was written: the stage *written*.
//!
//! Small pages are write-protected asynchronously (UFFD_FEATURE_WP_ASYNC): the kernel lets a writer go on and remembers. A
//! visit asks PAGEMAP_SCAN what was written since the last one, protects that again, and names the pages that stood still
//! and have no key yet. What the guest calls worth sharing need not stand still first. Huge pages are never protected, so that a write does not split them.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::page_state::{Backing, Known};
use crate::sys::late_log;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::sys::pagemap::{Pagemap, Written};
use crate::sys::uffd::Uffd;
use crate::track::access::Probes;
use std::ops::Range;

/// One bit for each page of a chunk.
type Bits = [u64; CHUNK_PAGES / 64];

/// Visits consecutive chunks without gaps between them; returns the pages to be keyed.
///
/// # Errors
/// [`Error::Pagemap`].
pub(crate) fn visit(
    map: &mut PageMap,
    pagemap: &mut Pagemap,
    uffd: &Uffd,
    probes: Probes,
    pass: u64,
    chunks: Range<usize>,
) -> Result<Vec<Page>, Error> {
    let (written, huge) = ask(map, pagemap, &chunks)?;
    let (mut to_key, mut to_protect) = (Vec::new(), Vec::new());
    for ((at, written), huge) in chunks.zip(&written).zip(huge) {
        if huge {
            map.found_huge(at);
            // Nobody keys a page of these at once.
            map.forget_reads(at);
            continue;
        }
        visit_small(map, probes, pass, at, written, &mut to_key, &mut to_protect);
    }
    // Protected only now, and keyed after that, in a later pass or, what the guest calls worth sharing, in this one: a write in between is
    // still seen there.
    for range in to_protect {
        if let Err(error) = uffd.write_protect(range.start, range.len(), true) {
            late_log::note(
                "tracking writes",
                &error,
                "the pages count as written until the next pass",
            );
            let address = |page: Page| map.memory().addresses(&(page..page + 1)).start;
            to_key.retain(|page| !range.contains(&address(*page)));
        }
    }
    Ok(to_key)
}

/// Asks the kernel which pages of consecutive chunks were written, and which chunks huge pages map.
fn ask(map: &PageMap, pagemap: &mut Pagemap, chunks: &Range<usize>) -> Result<(Vec<Bits>, Vec<bool>), Error> {
    let chunks = &map.memory().chunks()[chunks.clone()];
    let mut written = vec![Bits::default(); chunks.len()];
    let mut huge = vec![false; chunks.len()];
    // What was found comes in order.
    let mut chunk = 0;
    let note = |found: Written| {
        for address in found.range.step_by(PAGE_SIZE) {
            while chunks[chunk].addresses().end <= address {
                chunk += 1;
            }
            if found.huge {
                huge[chunk] = true;
            } else {
                let page = (address - chunks[chunk].start) / PAGE_SIZE;
                written[chunk][page / 64] |= 1 << (page % 64);
            }
        }
    };
    let end = chunks[chunks.len() - 1].addresses().end;
    pagemap
        .written(chunks[0].start..end, note)
        .map_err(Error::Pagemap)?;
    Ok((written, huge))
}

/// Draws the conclusions for a chunk of small pages.
fn visit_small(
    map: &mut PageMap,
    probes: Probes,
    pass: u64,
    at: usize,
    written: &Bits,
    to_key: &mut Vec<Page>,
    to_protect: &mut Vec<Range<usize>>,
) {
    let pages = map.chunk_at(at).pages.clone();
    let start = map.chunk_at(at).start;
    let unarmed = map.found_small(at);
    let mut waiting = false;
    for (offset, page) in pages.enumerate() {
        let was_written = written[offset / 64] & 1 << (offset % 64) != 0;
        if !was_written && map.is_settled(page) {
            continue;
        }
        let state = map.state(page);
        if was_written {
            // What lay in a mapping of the store when the pass began was broken since. The next pass learns of that, and must
            // find it written then.
            if !state.backing.in_file_mapping() {
                protect(to_protect, start + offset * PAGE_SIZE);
            }
            let at_once = map.keys_at_once(page) && !probes.include(map, at, page);
            waiting |= map.note_written(page, !unarmed);
            map.see(page, !unarmed);
            if at_once && map.state(page).awaits_key() {
                to_key.push(page);
            }
            continue;
        }
        map.see(page, false);
        if map.is_withheld(page) {
            continue;
        }
        let key = match (state.backing, state.known) {
            // Not worth a visit of its own: chunks are visited now and then.
            (Backing::Private, Known::Pinned(retry)) => retry.is_due(pass),
            _ => state.awaits_key() && !map.is_paused(page) && !probes.include(map, at, page),
        };
        if key {
            to_key.push(page);
        }
    }
    map.end_visit(at, waiting);
}

/// Remembers a page to be protected. (PAGEMAP_SCAN could find and protect in one request, but the kernel then drops KVM's
/// mappings of the whole range, written or not.)
fn protect(ranges: &mut Vec<Range<usize>>, start: usize) {
    let end = start + PAGE_SIZE;
    match ranges.last_mut() {
        Some(last) if last.end == start => last.end = end,
        _ => ranges.push(start..end),
    }
}
