//! Keyed > found: who proposes the slot of a page. That is the tree search, if there is one ([`tree_search`]), else the
//! store's index.
//!
//! A page has a line key. If the index has one slot for it, that is proposed at once; if the key is known to be ambiguous, the
//! page's whole hash decides; else the store is told of the page: it is *sighted*.
//!
//! With a tree search keys are read in batches: those of the next one while a device compares the pages of the last one. So
//! what is compared, and what is looked up, has keys that were read just before.
//!
//! [`tree_search`]: mod@crate::lookup::tree_search

use crate::account::Account;
use crate::lookup::request::{Keyed, MergeRequest};
use crate::lookup::tree_search::{BATCH, FEW, Proposal, SearchScope, Searcher};
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::store::session::Session;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::{guest, proc};
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::index::{IndexReader, Line};
use vmm_dedup_protocol::key::{Key, PAGE_WORDS, PageHash};

/// Keys that are looked up one after the other, so that the loads overlap.
const TOGETHER: usize = 64;
/// Pages that are hashed at a time.
const HASHED_AT_ONCE: usize = 1024;

/// What the index says of a key.
enum Answer {
    Slot(Slot),
    /// Several pages have the key: the hash decides.
    Ambiguous,
    Nothing,
}

impl Answer {
    fn of_line(index: &IndexReader, page: Page, key: Key) -> Self {
        match index.line(key) {
            Some(Line::Marked(_)) => Self::Ambiguous,
            Some(line) => line.slot_for(page).map_or(Self::Ambiguous, Self::Slot),
            None => Self::Nothing,
        }
    }

    /// For a key that may be a whole page's hash.
    fn of_candidate(index: &IndexReader, page: Page, key: Key) -> Self {
        if key.is_full() {
            index.slot_of_key(key).map_or(Self::Nothing, Self::Slot)
        } else {
            Self::of_line(index, page, key)
        }
    }
}

/// What looking again for twins of candidates found.
#[derive(Debug, Default)]
pub(crate) struct FoundAgain {
    pub(crate) requests: Vec<MergeRequest>,
    /// Those whose keys are in no index.
    pub(crate) missing: Vec<(Page, Key)>,
}

/// Where pages and their keys come from, batch by batch: at most [`Finder::at_once`] each.
pub(crate) type Batches<'b> = dyn FnMut(&mut Account) -> Option<Keyed> + 'b;

/// Finds twins.
#[derive(Debug)]
pub(crate) struct Finder {
    search: Searcher,
    /// Pages whose whole content is to be hashed.
    to_hash: Vec<Page>,
}

impl Finder {
    pub(crate) fn new(search: Searcher) -> Self {
        Self {
            search,
            to_hash: Vec::new(),
        }
    }

    pub(crate) fn search(&self) -> &Searcher {
        &self.search
    }

    pub(crate) fn search_mut(&mut self) -> &mut Searcher {
        &mut self.search
    }

    /// Before a pass: sees to it that there is an engine, if there can be one.
    pub(crate) fn prepare(&mut self, session: &Session, pass: u64) {
        if let Some(store) = session.store() {
            self.search.prepare(store, pass);
        }
    }

    /// The store was lost.
    pub(crate) fn forget_store(&mut self) {
        self.search.forget_store();
        self.to_hash.clear();
    }

    /// Leaves out pages that are not worked on any more.
    pub(crate) fn retain(&mut self, keep: impl Fn(Page) -> bool) {
        self.to_hash.retain(|page| keep(*page));
    }

    pub(crate) fn has_pages_to_hash(&self) -> bool {
        !self.to_hash.is_empty()
    }

    /// So many of these pages are best looked for at once.
    pub(crate) fn at_once(&self, pages: usize) -> usize {
        if self.search.is_on() { BATCH } else { pages.max(1) }
    }

    /// Looks for twins of pages that stood still and have line keys.
    pub(crate) fn find(
        &mut self,
        map: &mut PageMap,
        session: &Session,
        account: &mut Account,
        pass: u64,
        batches: &mut Batches<'_>,
    ) -> Vec<MergeRequest> {
        let mut requests = Vec::new();
        let mut batch = batches(account);
        while let Some(Keyed { zeros, keys }) = batch {
            let (proposed, next) = self.propose(map, session, account, pass, &keys, batches);
            requests.extend(zeros.into_iter().map(MergeRequest::zero));
            requests.extend(self.look_up(map, session, account, pass, &keys, &proposed));
            batch = next;
        }
        requests
    }

    /// Asks the engine about a batch of pages, if there is one; and the next batch.
    fn propose(
        &mut self,
        map: &PageMap,
        session: &Session,
        account: &mut Account,
        pass: u64,
        keyed: &[(Page, Key)],
        batches: &mut Batches<'_>,
    ) -> (Vec<Proposal>, Option<Keyed>) {
        let pages: Vec<Page> = keyed.iter().map(|(page, _)| *page).collect();
        let mut next = None;
        let proposed = self.ask_engine(
            map,
            session,
            account,
            pass,
            pages.len(),
            |search, with, account| {
                let mut reading_ns = 0;
                let found = search.first(with, &pages, &mut || {
                    let since = proc::thread_cpu_ns();
                    let batch = batches(account);
                    reading_ns = proc::thread_cpu_ns().saturating_sub(since);
                    let keys = batch.iter().flat_map(|batch| &batch.keys);
                    let pages = keys.map(|(page, _)| *page).collect();
                    next = Some(batch);
                    pages
                });
                (found, reading_ns)
            },
        );
        // Without an engine nobody has asked for it.
        (proposed, next.unwrap_or_else(|| batches(account)))
    }

    /// Looks the keys up for which the engine proposes nothing.
    fn look_up(
        &mut self,
        map: &mut PageMap,
        session: &Session,
        account: &mut Account,
        pass: u64,
        keyed: &[(Page, Key)],
        proposed: &[Proposal],
    ) -> Vec<MergeRequest> {
        let mut requests = proposals(account, keyed, proposed);
        for (group, keys) in keyed.chunks(TOGETHER).enumerate() {
            if let Some(index) = session.index() {
                touch(index, keys);
            }
            for (at, (page, key)) in (group * TOGETHER..).zip(keys) {
                if matches!(proposed.get(at), Some(Proposal::Twin(_))) {
                    continue;
                }
                let answer = session
                    .index()
                    .map_or(Answer::Nothing, |index| Answer::of_line(index, *page, *key));
                match answer {
                    Answer::Slot(slot) => requests.push(MergeRequest::twin_of(*page, slot)),
                    Answer::Ambiguous => self.to_hash.push(*page),
                    Answer::Nothing => map.sight(*page, *key, pass),
                }
            }
        }
        requests
    }

    /// Looks for twins of candidates that had none when they were sighted.
    pub(crate) fn find_again(
        &mut self,
        map: &mut PageMap,
        session: &Session,
        account: &mut Account,
        pass: u64,
        candidates: &[(Page, Key)],
    ) -> FoundAgain {
        let set = if candidates.len() <= FEW {
            slots_of(session, candidates)
        } else {
            Vec::new()
        };
        let pages: Vec<Page> = candidates.iter().map(|(page, _)| *page).collect();
        let proposed = self.ask_engine(map, session, account, pass, pages.len(), |search, with, _| {
            let batches = pages.chunks(BATCH);
            let found = batches.flat_map(|batch| search.again(with, batch, &set));
            (found.collect(), 0)
        });
        let mut again = FoundAgain {
            requests: proposals(account, candidates, &proposed),
            missing: Vec::new(),
        };
        for (at, (page, key)) in candidates.iter().enumerate() {
            match proposed.get(at) {
                Some(Proposal::Twin(_)) => continue,
                Some(Proposal::Changed) if map.private_candidate(*page).is_some() => {
                    map.candidate_changed(*page);
                    continue;
                }
                _ => {}
            }
            let answer = session
                .index()
                .map_or(Answer::Nothing, |index| Answer::of_candidate(index, *page, *key));
            match answer {
                Answer::Slot(slot) => again.requests.push(MergeRequest::twin_of(*page, slot)),
                Answer::Ambiguous => self.to_hash.push(*page),
                Answer::Nothing => again.missing.push((*page, *key)),
            }
        }
        again
    }

    /// Hashes some of the pages whose keys are ambiguous, and looks the hashes up.
    #[allow(unsafe_code)] // reads guest memory
    pub(crate) fn hash_some(
        &mut self,
        map: &mut PageMap,
        session: &Session,
        account: &mut Account,
        pass: u64,
    ) -> Vec<MergeRequest> {
        let rest = self.to_hash.len().saturating_sub(HASHED_AT_ONCE);
        let pages = self.to_hash.split_off(rest);
        let mut words = [0; PAGE_WORDS];
        let mut requests = Vec::new();
        for (at, page) in pages.iter().copied().enumerate() {
            if let Some(ahead) = pages.get(at + 1) {
                guest::prefetch_page(map.memory().address(*ahead));
            }
            // SAFETY: guest memory stays mapped while the service runs.
            unsafe { guest::copy_page(map.memory().address(page), &mut words) };
            let hash = PageHash::of(&words, session.salt());
            account.stats.pages_hashed_total += 1;
            account.stats.bytes_read.hash += PAGE_SIZE as u64;
            match session.index().and_then(|index| index.slot_of(hash)) {
                Some(slot) => requests.push(MergeRequest::twin_of(page, slot)),
                None if map.known(page).candidate() == Some(hash.key()) => {}
                None => map.sight(page, hash.key(), pass),
            }
        }
        requests
    }

    /// Asks the engine about so many pages; no answers without one. `ask` tells for how long it did what was no searching, ns.
    fn ask_engine(
        &mut self,
        map: &PageMap,
        session: &Session,
        account: &mut Account,
        pass: u64,
        pages: usize,
        ask: impl FnOnce(&mut Searcher, &SearchScope<'_>, &mut Account) -> (Vec<Proposal>, u64),
    ) -> Vec<Proposal> {
        let (Some(store), true) = (session.store(), self.search.is_on()) else {
            return Vec::new();
        };
        let (cpu, helpers) = (proc::thread_cpu_ns(), self.search.helper_cpu_ns());
        let with = SearchScope {
            store,
            memory: map.memory(),
            pass,
        };
        let (found, other_ns) = ask(&mut self.search, &with, account);
        account.stats.searches_total += pages as u64;
        account.stats.cpu_ns.search += self.search.helper_cpu_ns() - helpers;
        account.lap_within(cpu + other_ns, |cpu| &mut cpu.search);
        found
    }
}

/// Requests for what the engine has found.
fn proposals(account: &mut Account, keyed: &[(Page, Key)], found: &[Proposal]) -> Vec<MergeRequest> {
    let twin = |((page, _), found): (&(Page, Key), &Proposal)| match found {
        Proposal::Twin(slot) => Some(MergeRequest::proposed(*page, *slot)),
        _ => None,
    };
    let requests: Vec<MergeRequest> = keyed.iter().zip(found).filter_map(twin).collect();
    account.stats.search_twins_total += requests.len() as u64;
    requests
}

/// The slots that the index names for some keys.
fn slots_of(session: &Session, candidates: &[(Page, Key)]) -> Vec<Slot> {
    let twins = candidates.iter();
    let mut slots: Vec<Slot> = twins
        .filter_map(|(page, key)| twin(session, *page, *key))
        .collect();
    slots.sort_unstable();
    slots.dedup();
    slots
}

/// Brings what keys will be looked up in into the cache.
fn touch(index: &IndexReader, keys: &[(Page, Key)]) {
    std::hint::black_box(keys.iter().fold(0, |sum, (_, key)| sum ^ index.touch(*key)));
}

/// The slot that the index has for a page with this key.
pub(crate) fn twin(session: &Session, page: Page, key: Key) -> Option<Slot> {
    if session.is_secure() {
        return None;
    }
    match Answer::of_candidate(session.index()?, page, key) {
        Answer::Slot(slot) => Some(slot),
        Answer::Ambiguous | Answer::Nothing => None,
    }
}
