//! What the service holds of the guest's address space, and how shared pages come out of it again.

use crate::account::Account;
use crate::error::Error;
use crate::memory::chunk_state::PARTS;
use crate::memory::layout::{Memory, Page};
use crate::memory::page_map::PageMap;
use crate::memory::page_state::{Backing, PageState};
use crate::memory::ranges::complement;
use crate::pack::Packer;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::track;
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::{late_log, proc, vma};
use crate::unmerge::copy_room::CopyRoom;
use crate::unmerge::cow::Breaker;
use crate::unmerge::discard::{self, Discards};
use crate::unmerge::page_reserve::Reserve;
use crate::window::Scratch;
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Passes from one look for copied pages in a chunk to the next, or in one of its parts.
const BREAKS_PERIOD: u64 = PARTS as u64;

/// How long packed pages wait for memory to come back to, where whoever wants them goes on without.
const WITHOUT_MEMORY: Duration = Duration::from_secs(1);

/// The descriptors and locks with which guest memory is tracked, taken, and made private again. The scanning thread's; the
/// breaker and the discards are shared with other threads.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    /// Tracks writes, and takes pages.
    pub(crate) uffd: Arc<Uffd>,
    pub(crate) pagemap: Pagemap,
    pub(crate) breaker: Arc<Breaker>,
    pub(crate) discards: Arc<Discards>,
    /// If pages are packed.
    pub(crate) packer: Option<Arc<Packer>>,
    pub(crate) scratch: Scratch,
    /// Faults of the process's other threads, when they were last counted.
    faults: u64,
}

impl AddressSpace {
    /// Prepares everything; touches no guest page. Memory is not registered yet.
    pub(crate) fn new(
        memory: &Arc<Memory>,
        map: &PageMap,
        reserve: Option<Reserve>,
        packs: bool,
    ) -> Result<Self, Error> {
        let pagemap = Pagemap::open()?;
        let uffd = Arc::new(Uffd::tracker()?);
        let packer = packs.then(|| Packer::new(uffd.clone(), memory.clone()).map(Arc::new));
        Ok(Self {
            breaker: Arc::new(Breaker::new(uffd.clone(), memory.clone(), reserve)?),
            discards: Arc::new(Discards::new(memory.clone(), map.in_file())),
            scratch: Scratch::new(uffd.clone())?,
            packer: packer.transpose()?,
            pagemap,
            uffd,
            faults: 0,
        })
    }

    /// Whether the process's other threads had faults since the last call: they wrote protected pages or copied shared ones, if
    /// they did.
    pub(crate) fn others_had_faults(&mut self) -> bool {
        let faults = proc::faults_of_others();
        std::mem::replace(&mut self.faults, faults) != faults
    }

    /// Tracks writes to a range of guest memory.
    pub(crate) fn register(&self, range: &Range<usize>) -> Result<(), Error> {
        self.uffd
            .register(range.start, range.len(), Mode::Wp)
            .map_err(|source| Error::Register {
                address: range.start,
                source,
            })
    }

    /// Takes note of what was discarded. Whoever replaces memory keeps the lock, and takes note first: a page that was
    /// discarded and merged since would be forgotten.
    pub(crate) fn note_discards(&self, inner: &mut discard::Inner, map: &mut PageMap) {
        for pages in inner.take() {
            for pages in map.memory().existing(pages) {
                let chunks = map.chunk_of(pages.start)..=map.chunk_of(pages.end - 1);
                chunks.clone().for_each(|chunk| map.requeue_chunk(chunk));
                // What was packed is the packer's to register until its place goes home, which it was told of.
                for pages in not_packed(map, pages) {
                    self.note_discarded(map, pages);
                }
            }
        }
    }

    fn note_discarded(&self, map: &mut PageMap, pages: Range<Page>) {
        let chunks = map.chunk_of(pages.start)..=map.chunk_of(pages.end - 1);
        let discarded = map.memory().addresses(&pages);
        map.forget(pages);
        // Memory that was lent is somebody else's to register, until it comes back.
        let lent = chunks.filter(|chunk| map.chunk(*chunk).lent);
        let lent: Vec<Range<usize>> = lent
            .map(|chunk| map.chunk_at(chunk).addresses())
            .map(|chunk| chunk.start.max(discarded.start)..chunk.end.min(discarded.end))
            .collect();
        for ours in complement(&discarded, &lent) {
            track(&self.uffd, ours, "tracking writes to discarded memory");
        }
    }

    /// Brings back what is packed of some pages, and lets its places go home, as far as there is memory for that: what stays packed
    /// the states tell.
    pub(crate) fn bring_back(&self, map: &mut PageMap, pages: &Range<Page>) {
        self.bring_all_back(map, std::slice::from_ref(pages));
    }

    /// The same of one chunk, if wanted without waiting for memory; whether there was enough.
    pub(crate) fn bring_chunk_back(&self, map: &mut PageMap, pages: &Range<Page>, waits: bool) -> bool {
        let patience = if waits { WITHOUT_MEMORY } else { Duration::ZERO };
        self.bring_back_within(map, pages, patience)
    }

    /// The same of several: without memory one of them is waited for, not each.
    pub(crate) fn bring_all_back(&self, map: &mut PageMap, ranges: &[Range<Page>]) {
        let mut patience = WITHOUT_MEMORY;
        for pages in ranges {
            if !self.bring_back_within(map, pages, patience) {
                patience = Duration::ZERO;
            }
        }
    }

    /// Memory goes, and what was packed of it has come back as far as there was memory for that: the rest would be lost, as the memory
    /// is.
    pub(crate) fn give_up_packed(&self, range: &Range<usize>) {
        if let Some(packer) = &self.packer {
            packer.let_go(range, WITHOUT_MEMORY);
        }
    }

    fn bring_back_within(&self, map: &mut PageMap, pages: &Range<Page>, patience: Duration) -> bool {
        let Some(packer) = &self.packer else { return true };
        let back = packer.bring_back(pages, patience);
        let end = Page::try_from(map.memory().end()).unwrap_or(Page::MAX);
        let packed = pages.start..pages.end.min(end);
        let packed: Vec<Page> = packed
            .filter(|page| map.backing(*page).is_with_packer())
            .collect();
        packer.go_home(map, packed);
        back
    }

    /// Takes over what the fault thread broke; whether there was anything.
    pub(crate) fn take_broken(&self, map: &mut PageMap, account: &mut Account) -> bool {
        let mut touched = BTreeSet::new();
        for page in self.breaker.take_broken() {
            if !map.memory().has(page) || map.backing(page).is_copied() {
                continue;
            }
            map.broken_by_service(page);
            account.stats.breaks_managed_total += 1;
            touched.insert(map.chunk_of(page));
        }
        !touched.is_empty()
    }

    /// Looks for shared pages that the kernel copied, in chunks where something may have happened, each in its turn: what a copy
    /// frees is only known later then, and walking the store's mappings costs most of a pass.
    ///
    /// Where the guest or its VMM says that it filled shared pages, nobody waits for the chunk's turn.
    ///
    /// `watches_use`: a chunk whose huge page we split is to be one again soon after it is written everywhere. So its turn comes in
    /// every pass, but with one of its parts only; and if a page of that was copied, with all of it. Where nothing
    /// is copied that walks as many pages as before, by sixteen times as many calls.
    pub(crate) fn find_copied(
        &mut self,
        map: &mut PageMap,
        account: &mut Account,
        pass: u64,
        watches_use: bool,
    ) -> Result<(), Error> {
        for at in 0..map.chunks().len() {
            let pages = map.chunk_at(at).pages.clone();
            let found = if map.take_overwritten(at) {
                self.find_copied_of(map, account, pages)
            } else if watches_use && map.chunk(at).thp.ours {
                let Some(number) = map.take_unchecked_part(at) else {
                    continue;
                };
                match self.find_copied_of(map, account, part(&pages, number)) {
                    Ok(true) if map.take_unchecked(at) => self.find_copied_of(map, account, pages),
                    found => found,
                }
            } else {
                let turn = (pass + at as u64).is_multiple_of(BREAKS_PERIOD);
                if !turn || !map.take_unchecked(at) {
                    continue;
                }
                self.find_copied_of(map, account, pages)
            };
            // What was not looked at is looked at in another pass.
            found.inspect_err(|_| map.note_faults())?;
        }
        Ok(())
    }

    /// Looks for shared pages of a chunk that the kernel copied.
    pub(crate) fn find_copied_in(
        &mut self,
        map: &mut PageMap,
        account: &mut Account,
        at: usize,
    ) -> Result<(), Error> {
        let pages = map.chunk_at(at).pages.clone();
        self.find_copied_of(map, account, pages).map(drop)
    }

    /// The same for some pages of a chunk; whether there were any.
    fn find_copied_of(
        &mut self,
        map: &mut PageMap,
        account: &mut Account,
        pages: Range<Page>,
    ) -> Result<bool, Error> {
        let mut any = false;
        if !pages.clone().any(|page| map.backing(page).maps_a_slot()) {
            return Ok(any);
        }
        let range = map.memory().addresses(&pages);
        for copied in self.pagemap.copied(range.clone()).map_err(Error::Pagemap)? {
            for address in copied.step_by(PAGE_SIZE) {
                let page = pages.start + Page::try_from((address - range.start) / PAGE_SIZE).unwrap_or(0);
                any |= self.note_copied(map, account, page);
            }
        }
        Ok(any)
    }

    /// A page that maps a slot, as far as is known, was found to be anonymous. What the fault thread replaced it will tell.
    /// Whether the kernel copied it.
    pub(crate) fn note_copied(&self, map: &mut PageMap, account: &mut Account, page: Page) -> bool {
        let copied = map.backing(page).maps_a_slot() && self.breaker.kernel_broke(page);
        if copied {
            map.copied_by_kernel(page);
            account.stats.breaks_kernel_total += 1;
        }
        copied
    }

    /// Makes consecutive pages of store mappings anonymous, as far as that is possible.
    pub(crate) fn make_private(&mut self, map: &mut PageMap, account: &mut Account, pages: Range<Page>) {
        let start = map.memory().address(pages.start);
        let run = start..start + bytes(pages.len());
        let room = CopyRoom::prepare(&mut self.pagemap, &run);
        let Ok(mut room) = room.inspect_err(note_still_shared) else {
            return;
        };
        let discards = self.discards.clone();
        let mut discards = discards.lock();
        self.note_discards(&mut discards, map);
        if !pages.clone().all(|page| map.backing(page).in_file_mapping()) {
            return; // some were discarded just now; whoever wants the others asks again
        }
        let outcome = self.breaker.make_private(&mut self.pagemap, &run, &mut room);
        let within = |ranges: &[Range<usize>], at: usize| ranges.iter().any(|r| r.contains(&at));
        for page in pages.clone() {
            let (backing, at) = (map.backing(page), map.memory().address(page));
            match (within(&outcome.anonymous, at), within(&outcome.examined, at)) {
                (true, _) => {
                    account.stats.unmerged_total += 1;
                    if map.state(page).may_become(PageState::UNTRACKED) {
                        map.made_private(page);
                    }
                }
                // Examined to the end and not brought back: the kernel had copied it.
                (false, true) if outcome.error.is_none() && backing.maps_a_slot() => {
                    account.stats.breaks_kernel_total += 1;
                    map.copied_by_kernel(page);
                }
                // Replaced by the fault thread, which will tell; or still shared.
                _ => {}
            }
        }
        outcome.error.iter().for_each(note_still_shared);
    }

    /// Gives consecutive pages that the service made the zero page memory of their own, as writing them would: whoever writes one
    /// meanwhile finds it there.
    pub(crate) fn fill_zeros(&self, map: &mut PageMap, account: &mut Account, pages: Range<Page>) {
        let mut discards = self.discards.lock();
        self.note_discards(&mut discards, map);
        if !pages.clone().all(|page| map.backing(page) == Backing::Zero) {
            return; // some were discarded just now; whoever wants the others asks again
        }
        match vma::populate_write(map.memory().address(pages.start), bytes(pages.len())) {
            Ok(()) => {
                account.stats.unmerged_total += u64::from(pages.end - pages.start);
                pages.for_each(|page| map.fill(page));
            }
            Err(error) => late_log::note("giving zero pages memory", &error, "they stay shared for now"),
        }
    }

    /// The next pages of a range that are wanted, as many as are worked on at a time.
    pub(crate) fn next_run(
        map: &PageMap,
        pages: &Range<Page>,
        wanted: impl Fn(Page) -> bool,
    ) -> Option<Range<Page>> {
        let start = pages.clone().find(|page| wanted(*page))?;
        let goes_on = |end: &Page| {
            map.memory().adjacent(end - 1) && wanted(*end) && ((end - start) as usize) < CHUNK_PAGES
        };
        let end = (start + 1..pages.end).find(|end| !goes_on(end));
        Some(start..end.unwrap_or(pages.end))
    }

    /// Takes some of the pages in order, neighbours of one region together, and makes them private.
    pub(crate) fn make_all_private(&mut self, map: &mut PageMap, account: &mut Account, pages: &[Page]) {
        let neighbours = |a: &Page, b: &Page| *b == a + 1 && map.memory().adjacent(*a);
        let runs: Vec<Range<Page>> = pages
            .chunk_by(neighbours)
            .flat_map(|run| run.chunks(CHUNK_PAGES))
            .map(|run| run[0]..run[0] + Page::try_from(run.len()).unwrap_or(0))
            .collect();
        for run in runs {
            self.make_private(map, account, run);
        }
    }
}

/// A part of a chunk.
fn part(chunk: &Range<Page>, number: u8) -> Range<Page> {
    let pages = chunk.end - chunk.start;
    let until = |parts: u8| chunk.start + pages * Page::from(parts) / Page::from(PARTS);
    until(number)..until(number + 1)
}

/// Shared pages could not be made private.
fn note_still_shared(error: &io::Error) {
    late_log::note(
        "making shared pages private",
        error,
        "what is still shared stays so for now",
    );
}

/// Stretches of some pages that are not packed.
fn not_packed(map: &PageMap, pages: Range<Page>) -> Vec<Range<Page>> {
    let is_packed = |page: Page| map.backing(page).is_with_packer();
    let (mut stretches, mut at) = (Vec::new(), pages.start);
    while let Some(start) = (at..pages.end).find(|page| !is_packed(*page)) {
        at = (start..pages.end)
            .find(|page| is_packed(*page))
            .unwrap_or(pages.end);
        stretches.push(start..at);
    }
    stretches
}
