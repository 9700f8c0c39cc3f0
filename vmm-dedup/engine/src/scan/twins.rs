//! Keyed > found: twins on their way from keys to admission, and what the store is told and asks for on that way.

use crate::account::Account;
use crate::error::Error;
use crate::lookup::candidates;
use crate::lookup::find::{Batches, Finder, FoundAgain};
use crate::lookup::keys::KeyReader;
use crate::lookup::publish;
use crate::lookup::request::{Keyed, MergeRequest};
use crate::lookup::tree_search::Searcher;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::store::session::{ResyncCause, Session};
use vmm_dedup_protocol::index::News;
use vmm_dedup_protocol::key::Key;

/// Requests collected before they are merged; bounds the memory for them.
const MAX_FOUND: usize = 1 << 17;

/// What finding twins needs, borrowed for one step.
pub(super) struct Finding<'a> {
    pub(super) map: &'a mut PageMap,
    pub(super) session: &'a mut Session,
    pub(super) account: &'a mut Account,
    /// The number of the pass.
    pub(super) pass: u64,
    /// The service breaks sharing.
    pub(super) managed: bool,
}

/// Who finds twins, and what was found.
#[derive(Debug)]
pub(crate) struct Twins {
    pub(super) finder: Finder,
    /// Pages with a twin that were not admitted yet.
    found: Vec<MergeRequest>,
}

impl Twins {
    pub(super) fn new(search: Searcher) -> Self {
        Self {
            finder: Finder::new(search),
            found: Vec::new(),
        }
    }

    /// Whether nothing waits to be admitted.
    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Whether what was found is to be merged before more is.
    pub(super) fn is_full(&self) -> bool {
        self.found.len() >= MAX_FOUND
    }

    /// What comes back, unmerged, or was deferred until now.
    pub(super) fn add(&mut self, requests: Vec<MergeRequest>) {
        self.found.extend(requests);
    }

    /// Takes all that was found.
    pub(super) fn take(&mut self) -> Vec<MergeRequest> {
        std::mem::take(&mut self.found)
    }

    /// Takes out what was found of pages that are not worked on any more.
    pub(super) fn drop_work(&mut self, keep: impl Fn(Page) -> bool) -> Vec<MergeRequest> {
        self.finder.retain(&keep);
        self.found.extract_if(.., |request| !keep(request.page)).collect()
    }

    /// The store was lost.
    pub(super) fn forget_store(&mut self) {
        self.finder.forget_store();
        self.found.clear();
    }

    /// Reads the line keys of pages that stood still, and looks for their twins.
    pub(super) fn key_and_find(&mut self, with: &mut Finding<'_>, pages: &[Page]) {
        if with.session.is_secure() {
            return Self::key_only(with, pages);
        }
        let (memory, salt) = (with.map.memory().clone(), with.session.salt());
        let mut batches = pages.chunks(self.finder.at_once(pages.len()));
        self.find_all(with, &mut |account| {
            let pages = batches.next()?;
            let memory = &memory;
            let mut reader = KeyReader {
                memory,
                salt,
                account,
            };
            Some(reader.read_all(pages))
        });
    }

    /// Reads the keys of pages that stood still, zeros among them: where pages are shared securely all are treated alike, and nothing is
    /// looked up.
    fn key_only(with: &mut Finding<'_>, pages: &[Page]) {
        let memory = with.map.memory().clone();
        let mut reader = KeyReader {
            memory: &memory,
            salt: with.session.salt(),
            account: with.account,
        };
        for page in pages {
            let (key, _) = reader.read_key(*page);
            with.map.sight(*page, key, with.pass);
        }
        with.map.tell_refs_only();
    }

    /// Looks for the twins of pages that have keys: those of a chunk at most.
    pub(super) fn find(&mut self, with: &mut Finding<'_>, keyed: Keyed) {
        let mut keyed = Some(keyed);
        self.find_all(with, &mut |_| keyed.take());
    }

    fn find_all(&mut self, with: &mut Finding<'_>, batches: &mut Batches<'_>) {
        let found = self
            .finder
            .find(with.map, with.session, with.account, with.pass, batches);
        self.found.extend(found);
    }

    /// Looks for the twins of candidates. Returns those whose keys are in no index.
    pub(super) fn find_again(
        &mut self,
        with: &mut Finding<'_>,
        candidates: &[(Page, Key)],
    ) -> Vec<(Page, Key)> {
        let FoundAgain { requests, missing } =
            self.finder
                .find_again(with.map, with.session, with.account, with.pass, candidates);
        self.found.extend(requests);
        missing
    }

    /// The same; what the index lacks is sighted.
    pub(super) fn find_again_or_sight(&mut self, with: &mut Finding<'_>, candidates: &[(Page, Key)]) {
        for (page, key) in self.find_again(with, candidates) {
            with.map.sight(page, key, with.pass);
        }
    }

    /// Looks for the twins of some pages by their whole content; whether there were any, and room for what is found.
    pub(super) fn hash_some(&mut self, with: &mut Finding<'_>) -> bool {
        let some = self.finder.has_pages_to_hash() && !self.is_full();
        if some {
            let found = self
                .finder
                .hash_some(with.map, with.session, with.account, with.pass);
            self.found.extend(found);
            with.account.lap(|cpu| &mut cpu.hash);
        }
        some
    }

    /// Looks whether what entered the index lately concerns a candidate.
    pub(super) fn take_news(&mut self, with: &mut Finding<'_>) {
        let Some(news) = with.session.news() else {
            return;
        };
        let candidates = candidates::in_news(with.map, &news);
        match news {
            News::Overrun => {
                self.find_again(with, &candidates);
                with.session.schedule_resync(with.pass, ResyncCause::Missed);
            }
            // What entered the index is no sighting for the store any more. If it has left already, it must become one again.
            News::Keys(_) => self.find_again_or_sight(with, &candidates),
        }
    }

    /// Tells the store what there is to tell, and publishes what it asks for.
    ///
    /// # Errors
    /// Those of the connection.
    pub(super) fn tell_store(&mut self, with: &mut Finding<'_>) -> Result<(), Error> {
        if with.session.is_secure() {
            with.map.tell_refs_only();
        }
        while !with.map.outbox().is_empty() && with.session.is_connected() {
            let pending = !self.found.is_empty();
            let asked = with.session.flush(with.map, pending)?;
            self.look_up_again(with, asked.look_up);
            let huge_pages = !with.managed;
            let published =
                publish::publish(with.map, with.session, with.account, huge_pages, &asked.publish)?;
            self.found.extend(published);
        }
        Ok(())
    }

    /// Pages that were sighted although the index has their keys. What it does not have after all is repeated later: a store that
    /// contradicts its index must not be asked for ever.
    fn look_up_again(&mut self, with: &mut Finding<'_>, mut sighted: Vec<(Page, Key)>) {
        sighted.retain(|(page, key)| with.map.known(*page).candidate() == Some(*key));
        if !self.find_again(with, &sighted).is_empty() {
            with.session.schedule_resync(with.pass, ResyncCause::Missed);
        }
    }
}
