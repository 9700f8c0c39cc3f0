//! Handing pages to the store that it asked for.

use crate::account::Account;
use crate::error::Error;
use crate::lookup::gaps::Gaps;
use crate::lookup::request::MergeRequest;
use crate::memory::layout::{Memory, Page};
use crate::memory::page_map::PageMap;
use crate::store::session::Session;
use crate::sys::guest;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use vmm_dedup_protocol::STAGING_PAGES;
use vmm_dedup_protocol::key::{Key, PAGE_WORDS, PageHash, Salt, line_words};
use vmm_dedup_protocol::message::{Staged, Wish};

const _: () = assert!(STAGING_PAGES == CHUNK_PAGES);

/// Pages as they are published together: all of a chunk in a message of its own, so that the store can make a huge page
/// of them, others as they come.
fn messages<'a>(memory: &Memory, mut pages: &'a [Page]) -> Vec<&'a [Page]> {
    let mut messages = Vec::new();
    while !pages.is_empty() {
        let begins =
            |at: &usize| whole_chunk(memory, &pages[*at..(at + CHUNK_PAGES).min(pages.len())]).is_some();
        let most = pages.len().min(STAGING_PAGES);
        let end = match (0..most).find(begins) {
            Some(0) => CHUNK_PAGES,
            Some(at) => at,
            None => most,
        };
        let (message, rest) = pages.split_at(end);
        messages.push(message);
        pages = rest;
    }
    messages
}

/// The chunk that pages are all of, in order.
fn whole_chunk(memory: &Memory, pages: &[Page]) -> Option<usize> {
    let (first, last) = (*pages.first()?, *pages.last()?);
    // Cheap tests first: this is asked for every page.
    let span = last.checked_sub(first)? as usize + 1;
    if (pages.len(), span) != (CHUNK_PAGES, CHUNK_PAGES) {
        return None;
    }
    let chunk = memory.chunk_of(first);
    // There is none if the memory was removed meanwhile.
    let whole = memory.chunks().get(chunk)?.pages == (first..last + 1);
    (whole && pages.is_sorted()).then_some(chunk)
}

/// Publishes what the store wants; returns what got a slot. What got none since it was written is keyed anew: while it was a
/// candidate the store would ask for it again and again. What the store had no place for stays a candidate.
///
/// Where it wants pages of a huge page that is likely to be somebody else's as a whole, it gets all of them: it has been told of
/// all, but the other VM has told only of a sample so far. (What has no twin after all is in the store then instead of in the
/// guest, and takes no more memory there.)
///
/// # Errors
/// Those of the connection.
pub(crate) fn publish(
    map: &mut PageMap,
    session: &mut Session,
    account: &mut Account,
    huge_pages: bool,
    wanted: &[Page],
) -> Result<Vec<MergeRequest>, Error> {
    let memory = map.memory().clone();
    let mut pages = Vec::with_capacity(wanted.len());
    // What is not there any more was removed meanwhile.
    for (chunk, part) in memory.by_chunk(wanted, |page| *page) {
        if !memory.has(part[0]) {
            continue;
        }
        let all = map.chunk_at(chunk).pages.clone();
        let state = map.chunk(chunk);
        let known = |page: Page| map.private_candidate(page).is_some();
        if state.huge && state.thp.likely_whole && all.clone().all(known) {
            pages.extend(all);
        } else {
            pages.extend_from_slice(part);
        }
    }
    let mut requests = Vec::with_capacity(pages.len());
    for message in messages(&memory, &pages) {
        requests.extend(publish_message(map, session, account, huge_pages, message)?);
    }
    Ok(requests)
}

/// Hands pages to the store. It checks their content itself, so a page that changes meanwhile does no harm.
#[allow(unsafe_code)] // reads guest memory
fn publish_message(
    map: &mut PageMap,
    session: &mut Session,
    account: &mut Account,
    huge_pages: bool,
    pages: &[Page],
) -> Result<Vec<MergeRequest>, Error> {
    let Some(store) = session.store_mut() else {
        return Ok(Vec::new());
    };
    let (mut keys, mut staged) = (Vec::with_capacity(pages.len()), Vec::with_capacity(pages.len()));
    let mut gaps = Gaps::default();
    for page in pages {
        let Some(key) = map.known(*page).candidate() else {
            continue;
        };
        // SAFETY: guest memory stays mapped while the service runs.
        unsafe { store.stage(staged.len(), map.memory().address(*page)) };
        keys.push(Staged {
            key,
            gap: gaps.before(map, *page),
            wish: Wish::Slot,
        });
        staged.push(*page);
    }
    if staged.is_empty() {
        return Ok(Vec::new());
    }
    let huge = |chunk: usize| map.chunk(chunk).huge && huge_pages;
    if whole_chunk(map.memory(), &staged).is_some_and(huge) {
        keys[0].wish = Wish::HugePage;
    }
    let slots = store.publish(&keys)?;
    account.stats.bytes_read.publish += (staged.len() * PAGE_SIZE) as u64;
    let mut requests = Vec::with_capacity(staged.len());
    for (page, slot) in staged.into_iter().zip(slots) {
        match slot {
            Some(slot) => requests.push(MergeRequest::published(page, slot)),
            None if has_changed(map, session.salt(), page) => map.key_anew(page),
            None => {}
        }
    }
    account.stats.published_total += requests.len() as u64;
    Ok(requests)
}

/// Whether a candidate's page has another key by now.
#[allow(unsafe_code)] // reads guest memory
fn has_changed(map: &PageMap, salt: Salt, page: Page) -> bool {
    let mut words = [0; PAGE_WORDS];
    // SAFETY: guest memory stays mapped while the service runs.
    unsafe { guest::copy_page(map.memory().address(page), &mut words) };
    let key = map.known(page).candidate();
    key.is_some_and(|key| match key.is_full() {
        true => PageHash::of(&words, salt).key() != key,
        false => Key::of_lines(&line_words(|word| words[word]), salt) != key,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::HostRange;
    use crate::sys::vma::Anonymous;

    #[test]
    fn a_chunk_that_is_asked_for_whole_is_published_by_itself() {
        let area = Anonymous::new(4 * CHUNK_PAGES).unwrap();
        let base = area.base().next_multiple_of(crate::sys::page_size::HUGE_SIZE);
        let range = HostRange::try_new(base, 3 * crate::sys::page_size::HUGE_SIZE).unwrap();
        let memory = Memory::new(&[range]).unwrap();
        let lens =
            |pages: &[Page]| -> Vec<usize> { messages(&memory, pages).iter().map(|m| m.len()).collect() };
        let pages: Vec<Page> = (100..1300).collect();
        assert_eq!(lens(&pages), [412, 512, 276]);
        assert_eq!(lens(&pages[1..412]), [411]);
        assert_eq!(lens(&(0..1536).collect::<Vec<_>>()), [512; 3]);
        let without_one: Vec<Page> = (0..1536).filter(|page| *page != 700).collect();
        assert_eq!(lens(&without_one), [512, 511, 512]);
        let backwards: Vec<Page> = (0..1024).rev().collect();
        assert_eq!(lens(&backwards), [512, 512]);
        assert!(
            messages(&memory, &backwards)
                .iter()
                .all(|m| whole_chunk(&memory, m).is_none())
        );
        assert_eq!(lens(&[]), [0; 0]);
        let removed: Vec<Page> = (1536..2048).collect();
        assert!(whole_chunk(&memory, &removed).is_none());
    }
}
