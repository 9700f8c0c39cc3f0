//! Found: how many twins a huge page has, and whether that is enough to split it.

use crate::lookup::collisions::looks_equal;
use crate::lookup::request::MergeRequest;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::thp_state::{Asked, SAMPLING};
use crate::store::session::Session;
use crate::sys::page_size::CHUNK_PAGES;
use crate::thp::duplicates::is_sampled;
use crate::thp::monitor::Monitor;

/// Fewest pages of a sample, chosen by key, that tell something of a whole huge page.
const LEAST_SAMPLE: usize = CHUNK_PAGES / SAMPLING / 2;

/// Counts the twins of huge pages that are not to be split so far. Requests are in page order, each page once.
pub(crate) fn count(map: &mut PageMap, session: &Session, monitor: &Monitor, found: &[MergeRequest]) {
    let memory = map.memory().clone();
    for (chunk, group) in memory.by_chunk(found, |request| request.page) {
        if map.chunk(chunk).huge && !map.chunk(chunk).twins.split {
            count_in(map, session, monitor, chunk, group);
        }
    }
}

/// Adds to the twins that a huge page is known to have, and decides on splitting it. A line key is not enough for
/// that: a huge page may be busy outside its key lines.
fn count_in(map: &mut PageMap, session: &Session, monitor: &Monitor, chunk: usize, found: &[MergeRequest]) {
    let mixed = map.chunk(chunk).thp;
    let Some(wanted) = monitor.twins_wanted(&mixed) else {
        return;
    };
    let sampled = mixed.asked == Asked::Sample;
    let share = if sampled { SAMPLING } else { 1 };
    let enough = (wanted as usize / share).max(1);
    let known = usize::from(map.chunk(chunk).twins.known);
    let equal = found.iter().filter(|request| looks_equal(map, session, request));
    let more = equal.take(enough.saturating_sub(known)).count();
    let likely_whole = sampled && is_sample_repeated(map, chunk, found);
    let all = known + more >= enough || likely_whole;
    map.note_twins(chunk, known + more, all && !sampled);
    if all {
        // Those that were deferred before are found again at the next look.
        map.look_again(chunk);
        map.ask_about_all(chunk, likely_whole);
    }
}

/// Whether all pages of a huge page that were asked about as a sample have twins.
fn is_sample_repeated(map: &PageMap, chunk: usize, found: &[MergeRequest]) -> bool {
    let in_sample = |page: Page| map.private_candidate(page).is_some_and(is_sampled);
    let pages = map.chunk_at(chunk).pages.clone();
    let asked = pages.filter(|page| in_sample(*page));
    let twins = found.iter().filter(|request| in_sample(request.page)).count();
    twins >= LEAST_SAMPLE && asked.count() == twins
}
