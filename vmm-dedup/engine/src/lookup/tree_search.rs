//! Looking for twins with an engine that compares pages ([`crate::compare`]), instead of by keys.
//!
//! ```text
//!  guest page --copied--> staging buffer --.
//!                                           engine --> proposal: page, slot --> take, verify, map
//!  store: slots, tree in their order ------'
//! ```
//!
//! The staging buffer has two halves: while a device compares the pages of one, the next pages are copied to the other.
//!
//! An engine reads the staging buffer and the store, never guest memory, and it only proposes: what becomes of a
//! proposal is the CPU's ([`merge`](mod@crate::merge::merger)). A page without a proposal goes the way of the index: it is
//! sighted, published, or found there after all.
//!
//! The tree changes while it is read, as the store does not wait for its readers. A search that was led astray finds
//! nothing, or a page that is not equal.
//!
//! An engine that fails is let go, and made anew after a while; meanwhile the index does the work. So is one whose
//! proposals are wrong too often, since each costs a guest a moment without the page.

use crate::compare::{
    Arena, CheckedSearch, DeviceWork, Engines, Error, Meanwhile, PageId, PageView, Pages, Retry, Searched,
};
use crate::config::{Config, INDEX};
use crate::memory::layout::{Memory, Page};
use crate::store::connection::Store;
use crate::store::told_segments::ToldSegments;
use crate::sys::page_size::PAGE_SIZE;
use std::path::PathBuf;
use vmm_dedup_protocol::{MAX_SLOTS, Slot};

/// Pages of half the staging buffer: so many are asked for at once.
pub(crate) const BATCH: usize = 1024;
/// Page number of the staging buffer; the numbers below are slots.
const STAGING: PageId = PageId(MAX_SLOTS as u64);
/// Wrong proposals that are forgiven: guests write their pages meanwhile.
const FORGIVEN: usize = 64;

/// Most pages that are compared with single slots, and the most slots for that: those of one of PageForge's tables.
pub(crate) const FEW: usize = 8;
const SET: usize = 31;

/// What was found for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proposal {
    /// No slot holds it, as far as the engine can tell.
    Nothing,
    /// This one seems to.
    Twin(Slot),
    /// It has changed since it was searched for: that was not asked again.
    Changed,
}

impl Proposal {
    fn of(twin: Option<Slot>) -> Self {
        twin.map_or(Proposal::Nothing, Proposal::Twin)
    }
}

/// Where pages are searched for.
pub(crate) struct SearchScope<'a> {
    pub(crate) store: &'a Store,
    pub(crate) memory: &'a Memory,
    /// The number of the pass.
    pub(crate) pass: u64,
}

/// What there is to search with.
pub(crate) struct Searcher {
    /// What the settings ask for.
    name: String,
    socket: Option<PathBuf>,
    engines: Engines,
    engine: Option<Engine>,
    retry: Retry,
    /// CPU time of the helpers of engines that are gone, ns.
    past_helper_ns: u64,
    /// What their devices did.
    past_device: DeviceWork,
    /// The engine's keys of pages that had no twin, by page; 0: none.
    keys: Vec<u32>,
}

/// An engine with all that it may read.
struct Engine {
    search: CheckedSearch,
    staging: Staging,
    told: ToldSegments,
    /// Its proposals, and those of them that turned out wrong.
    proposed: usize,
    wrong: usize,
}

/// What the pages of an engine's questions are.
struct Readable<'a> {
    store: &'a Store,
    staging: &'a Staging,
}

/// Copies of pages, for an engine to read.
struct Staging {
    arena: Arena,
    /// The half with the pages that are asked about.
    half: usize,
    /// The pages that the other half has copies of, for the next question and none after it.
    ahead: Vec<Page>,
}

impl Pages for Readable<'_> {
    fn view(&self, page: PageId) -> Option<&PageView> {
        match page.0.checked_sub(STAGING.0) {
            Some(candidate) => self.staging.arena.view(PageId(candidate)),
            None => self.store.page(Slot::try_new(u32::try_from(page.0).ok()?)?),
        }
    }
}

impl Searcher {
    /// Makes no engine yet.
    pub(crate) fn new(config: &Config, engines: Engines) -> Self {
        Self {
            name: config.search.clone(),
            socket: config.search_socket.clone(),
            engines,
            engine: None,
            retry: Retry::default(),
            past_helper_ns: 0,
            past_device: DeviceWork::default(),
            keys: Vec::new(),
        }
    }

    /// Whether there is an engine.
    pub(crate) fn is_on(&self) -> bool {
        self.engine.is_some()
    }

    /// What searches now, by its name in settings.
    pub(crate) fn name(&self) -> &str {
        if self.is_on() { &self.name } else { INDEX }
    }

    /// Times that an engine failed or could not be made.
    pub(crate) fn failures(&self) -> u64 {
        self.retry.failures()
    }

    /// Own memory, bytes.
    pub(crate) fn bytes(&self) -> usize {
        let staging = self
            .engine
            .as_ref()
            .map_or(0, |e| e.staging.arena.pages() * PAGE_SIZE);
        staging + self.keys.len() * size_of::<u32>()
    }

    /// CPU time of threads that drive engines, ns.
    pub(crate) fn helper_cpu_ns(&self) -> u64 {
        let now = self.engine.as_ref().map_or(0, |e| e.search.helper_cpu_ns());
        self.past_helper_ns + now
    }

    /// What devices of engines were given to do.
    pub(crate) fn device_work(&self) -> DeviceWork {
        let now = self.engine.as_ref().map(|engine| engine.search.device_work());
        self.past_device.and(&now.unwrap_or_default())
    }

    /// Before a pass: makes the engine if it is time for that, and lets it read what the store has now.
    pub(crate) fn prepare(&mut self, store: &Store, pass: u64) {
        if self.name == INDEX || store.index().tree().version() == 0 {
            // The store has no tree, or none yet.
            self.forget_store();
            return;
        }
        if let Some(Engine { proposed, wrong, .. }) = self.engine
            && wrong > FORGIVEN
            && wrong * 2 > proposed
        {
            let reason = format!("{wrong} of {proposed} proposals were wrong");
            self.fail(&Error::Device(reason), pass);
        }
        if self.engine.is_none() && self.retry.is_due(pass) {
            match self.new_engine() {
                Ok(engine) => self.engine = Some(engine),
                Err(error) => self.fail(&error, pass),
            }
        }
        let told = self.engine.as_mut().map_or(Ok(()), |engine| {
            let Engine { search, told, .. } = engine;
            told.tell(search.engine(), store)
        });
        if let Err(error) = told {
            self.fail(&error, pass);
        }
    }

    fn new_engine(&self) -> Result<Engine, Error> {
        let engine = self.engines.tree_search(&self.name, self.socket.as_deref())?;
        let mut search = CheckedSearch::new(engine);
        let arena = Arena::new(2 * BATCH).map_err(|error| Error::Device(error.to_string()))?;
        search.engine().map(STAGING, arena.pages(), arena.file())?;
        Ok(Engine {
            search,
            staging: Staging {
                arena,
                half: 0,
                ahead: Vec::new(),
            },
            told: ToldSegments::default(),
            proposed: 0,
            wrong: 0,
        })
    }

    /// Lets go of an engine that cannot be used, and of the store's memory with it.
    fn fail(&mut self, error: &Error, pass: u64) {
        let (name, pause) = (&self.name, self.retry.fail(pass));
        log::warn!("no search by {name} for {pause} passes, but by the index: {error}");
        self.forget_store();
    }

    /// Lets go of the engine, which may read the store that there was. Its successor makes other keys.
    pub(crate) fn forget_store(&mut self) {
        self.past_device = self.device_work();
        if let Some(engine) = self.engine.take() {
            self.past_helper_ns += engine.search.helper_cpu_ns();
        }
        self.keys = Vec::new();
    }

    /// Searches the store's tree for twins of at most [`BATCH`] pages. What has none is keyed, for [`Self::again`]. Meanwhile
    /// `next`, which is called once at most, names the pages of the next question, if there is one.
    pub(crate) fn first(
        &mut self,
        with: &SearchScope<'_>,
        pages: &[Page],
        next: &mut dyn FnMut() -> Vec<Page>,
    ) -> Vec<Proposal> {
        self.ask(with, pages.len(), |engine, keys| {
            let ids = engine.staging.stage(with.memory, pages);
            let searched = engine.search(with, &ids, next)?;
            keys.resize(with.memory.end(), 0);
            let mut left = Vec::new();
            for ((page, id), (found, key)) in pages.iter().zip(ids).zip(&searched) {
                match (found, key) {
                    (Proposal::Nothing, None) => left.push((*page, id)),
                    (Proposal::Nothing, Some(key)) => keys[*page as usize] = *key,
                    _ => {}
                }
            }
            let left_ids: Vec<PageId> = left.iter().map(|(_, id)| *id).collect();
            for ((page, _), key) in left.iter().zip(engine.keys(with.store, &left_ids)?) {
                keys[*page as usize] = key;
            }
            let found = searched.into_iter().map(|(found, _)| found).collect();
            Ok(found)
        })
    }

    /// Searches anew for twins of at most [`BATCH`] pages that had none. Those with another key than then have changed
    /// (PageForge, section 3.3), and are not searched for. Few pages are compared with the slots of `set`, if it is
    /// small, as an arbitrary set (section 4.2): just after a change, all of the tree's tables would have to be loaded.
    pub(crate) fn again(&mut self, with: &SearchScope<'_>, pages: &[Page], set: &[Slot]) -> Vec<Proposal> {
        self.ask(with, pages.len(), |engine, keys| {
            let ids = engine.staging.stage(with.memory, pages);
            let mut found = vec![Proposal::Changed; pages.len()];
            let now = engine.keys(with.store, &ids)?;
            let before = |at: usize| keys.get(pages[at] as usize).copied().unwrap_or(0);
            let same = |(at, now): (usize, u32)| (before(at) == 0 || before(at) == now).then_some(at);
            let same: Vec<usize> = now.into_iter().enumerate().filter_map(same).collect();
            let same_ids: Vec<PageId> = same.iter().map(|at| ids[*at]).collect();
            let answers = if pages.len() <= FEW && (1..=SET).contains(&set.len()) {
                engine.among(with.store, &same_ids, set)?
            } else {
                let searched = engine.search(with, &same_ids, &mut Vec::new)?.into_iter();
                searched.map(|(found, _)| found).collect()
            };
            for (at, answer) in same.into_iter().zip(answers) {
                found[at] = answer;
            }
            Ok(found)
        })
    }

    /// Asks the engine, and lets go of it if it fails: then nothing is found.
    fn ask(
        &mut self,
        with: &SearchScope<'_>,
        pages: usize,
        ask: impl FnOnce(&mut Engine, &mut Vec<u32>) -> Result<Vec<Proposal>, Error>,
    ) -> Vec<Proposal> {
        let answer = self
            .engine
            .as_mut()
            .map_or(Ok(Vec::new()), |engine| ask(engine, &mut self.keys));
        let mut found = answer.unwrap_or_else(|error| {
            self.fail(&error, with.pass);
            Vec::new()
        });
        found.resize(pages, Proposal::Nothing);
        if let Some(engine) = &mut self.engine {
            engine.proposed += found
                .iter()
                .filter(|found| matches!(found, Proposal::Twin(_)))
                .count();
        }
        found
    }

    /// So many pages that the engine proposed were not what their slots hold.
    pub(crate) fn note_wrong(&mut self, proposals: usize) {
        if let Some(engine) = &mut self.engine {
            engine.wrong += proposals;
        }
    }
}

impl Staging {
    /// Where the pages are that are asked about next, which are copied unless they were [ahead](Self::copy).
    fn stage(&mut self, memory: &Memory, pages: &[Page]) -> Vec<PageId> {
        self.half = self.other_half();
        if std::mem::take(&mut self.ahead) != pages {
            self.copy(self.half, memory, pages);
        }
        let first = STAGING.0 + (self.half * BATCH) as u64;
        (first..).map(PageId).take(pages.len()).collect()
    }

    fn other_half(&self) -> usize {
        1 - self.half
    }

    /// Copies pages into a half; torn where the guest writes meanwhile.
    #[allow(unsafe_code)] // reads guest memory
    fn copy(&self, half: usize, memory: &Memory, pages: &[Page]) {
        assert!(pages.len() <= BATCH, "the caller asks in batches");
        for (at, page) in pages.iter().enumerate() {
            // SAFETY: guest memory stays mapped while the service runs.
            unsafe {
                self.arena
                    .copy_from_address(half * BATCH + at, memory.address(*page))
            };
        }
    }
}

impl Engine {
    /// Searches the tree for staged pages, and tells the keys that were made on the way, cut as [`Self::keys`]. Meanwhile the
    /// pages that `next` names are staged for the next question.
    #[allow(clippy::cast_possible_truncation)]
    fn search(
        &mut self,
        with: &SearchScope<'_>,
        ids: &[PageId],
        next: &mut dyn FnMut() -> Vec<Page>,
    ) -> Result<Vec<(Proposal, Option<u32>)>, Error> {
        let (store, staging) = (with.store, &self.staging);
        let mut ahead = Vec::new();
        let mut stage = || {
            ahead = next();
            staging.copy(staging.other_half(), with.memory, &ahead);
        };
        let (readable, tree) = (Readable { store, staging }, store.index().tree());
        let meanwhile = &mut Meanwhile::new(&mut stage);
        let searched = self.search.search(&readable, tree, ids, meanwhile);
        self.staging.ahead = ahead;
        let found = |one: Searched| {
            let found = Proposal::of(one.twin.and_then(slot_of));
            (found, one.key.map(|key| key as u32))
        };
        let searched = searched?.into_iter();
        Ok(searched.map(|one| found(one.unwrap_or_default())).collect())
    }

    /// Looks for each staged page in a set of slots.
    fn among(&mut self, store: &Store, ids: &[PageId], set: &[Slot]) -> Result<Vec<Proposal>, Error> {
        let slots: Vec<PageId> = set.iter().map(|slot| PageId(slot.number().into())).collect();
        let readable = Readable {
            store,
            staging: &self.staging,
        };
        let twin = |id: &PageId| {
            let at = self.search.among(&readable, *id, &slots)?;
            Ok(Proposal::of(at.and_then(|at| set.get(at)).copied()))
        };
        ids.iter().map(twin).collect()
    }

    /// Keys of staged pages, cut to 32 bits as the paper's are; 0 where there is none.
    #[allow(clippy::cast_possible_truncation)]
    fn keys(&mut self, store: &Store, ids: &[PageId]) -> Result<Vec<u32>, Error> {
        let readable = Readable {
            store,
            staging: &self.staging,
        };
        let keys = self.search.keys(&readable, ids)?.into_iter();
        Ok(keys.map(|key| key.map_or(0, |key| key as u32)).collect())
    }
}

fn slot_of(page: PageId) -> Option<Slot> {
    Slot::try_new(u32::try_from(page.0).ok()?)
}

impl std::fmt::Debug for Searcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Searcher")
            .field("name", &self.name)
            .field("engine", &self.engine.as_ref().map(|engine| engine.search.name()))
            .finish_non_exhaustive()
    }
}
