//! Building huge pages again, and giving up those that are all zeros.
//!
//! # Why no write and no DMA is lost
//!
//! *Rebuilding* gathers 512 small pages in a fresh huge page and puts that in their place:
//!
//! 1. The huge page is allocated and zeroed aside. If there is none, nothing was touched.
//! 2. Shared pages are write-protected on the breaker's userfaultfd, as for breaking (`crate::unmerge::cow`): they still are
//!    the store's, so nobody has them pinned for writing, and whoever writes from here on waits. Readers go on.
//! 3. Private pages are taken, as for merging (`crate::merge::merger`): pinned ones refuse, and whoever touches their place
//!    waits. A place without a page stays without, since its first touch waits as well; it stands for zeros.
//! 4. Now nobody can change any of the range. Its bytes are copied, and mremap() puts the copy over the range in one
//!    step: who reads sees the old page or the new one, which are equal, and who waits is woken afterwards.
//!
//! Pages that we broke lie in mappings of their own, and taking each costs a system call and, for a guest, a flush of its
//! translations. If there are many, all would be away for as long as that takes. So these steps are done twice: first for
//! an eighth of the range at a time, with small pages as the copy, which leaves one mapping; that is then taken in one call.
//!
//! A pinned page, or one that the kernel copied on write (it may be pinned, which nothing tells), ends it: everything goes
//! back as it was. A range with a page that the kernel copied is not rebuilt while that page stays.
//!
//! MADV_COLLAPSE would do without a copy of our own, but not here: it wants all of the range in one anonymous mapping, and
//! where sharing was broken by remapping it never is again.
//!
//! *Giving up zeros* takes a huge page as a whole. If all of it is zero its place stays empty: the next touch gets a
//! fresh huge page of zeros from the kernel, which is the same content.

use crate::memory::layout::Page;
use crate::memory::page_state::State;
use crate::merge::request::{Item, Outcome};
use crate::scan::pass::Scanner;
use crate::sys::huge_scratch::HugeScratch;
use crate::sys::page_size::{CHUNK_PAGES, HUGE_SIZE, PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::{move_away, put_back_pages, put_over};
use crate::sys::sched::Urgent;
use crate::sys::uffd::Mode;
use crate::sys::vma::Anonymous;
use crate::sys::{guest, proc};
use std::ops::Range;
use std::time::Instant;
use vmm_dedup_protocol::key::PAGE_WORDS;

/// Bytes that the host must have available beyond the huge page: rebuilding gives up memory, and must not take the last.
const MEMORY_TO_SPARE: u64 = 128 << 20;
/// Mappings that a rebuilt range may add: its own, and the rest behind it.
const VMAS_PER_HUGE: i64 = 2;
/// Stretches of private pages that are taken together with all the rest.
const FEW_STRETCHES: usize = 16;
/// Pages that are gathered at a time if there are more.
const PIECE: usize = CHUNK_PAGES / 8;
#[allow(clippy::cast_possible_truncation)] // 64
const PIECE_SPAN: Page = PIECE as Page;
/// Tries while writers go on breaking pages that are to stand still.
const TRIES: usize = 16;

/// Why a huge page was not built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A page is pinned, or the kernel copied it on write, so that it may be.
    Pinned,
    /// The host has too little memory, or no huge page.
    Memory,
    /// No mapping left, or a call failed.
    Other,
}

impl Scanner {
    /// Gathers the small pages of a chunk in a huge page. On an error some may have gone back to private small pages.
    pub(crate) fn rebuild(&mut self, at: usize) -> Result<(), Refusal> {
        let pages = self.memory.chunks()[at].pages.clone();
        if pages.len() != CHUNK_PAGES || self.vmas + VMAS_PER_HUGE > self.vmas_max {
            return Err(Refusal::Other);
        }
        self.take_breaks();
        let may_be_pinned = |page| match self.table.get(page) {
            State::Private(_) => true,
            State::Pinned(retry) => !retry.is_due(self.passes),
            _ => false,
        };
        if pages.clone().any(may_be_pinned) {
            return Err(Refusal::Pinned);
        }
        let mut huge = self.fresh_huge_page()?;
        if self.private_stretches(at) > FEW_STRETCHES {
            let mut small = Anonymous::new(CHUNK_PAGES).map_err(|_| Refusal::Memory)?;
            small.populate().map_err(|_| Refusal::Memory)?;
            for first in pages.clone().step_by(PIECE) {
                self.put_in_place(at, &(first..first + PIECE_SPAN), &mut small)?;
            }
        }
        self.put_in_place(at, &pages, &mut huge)?;
        self.note_rebuilt(at);
        Ok(())
    }

    /// Mappings with private pages in a chunk, about.
    fn private_stretches(&self, at: usize) -> usize {
        let begins = |page: &Page| {
            let private = |page| !self.table.get(page).in_file_mapping();
            private(*page) && (*page == self.memory.chunks()[at].pages.start || !private(*page - 1))
        };
        let stretches = self.memory.chunks()[at].pages.clone().filter(begins).count();
        stretches + usize::from(self.chunks[at].mixed.broken)
    }

    /// Puts copies of consecutive pages of a chunk into their place, made at the front of `fresh`.
    fn put_in_place(&mut self, at: usize, pages: &Range<Page>, fresh: &mut Anonymous) -> Result<(), Refusal> {
        for _ in 0..TRIES {
            // What the fault thread replaced for a writer is private now.
            self.take_breaks();
            match self.try_to_put_in_place(pages, fresh) {
                Some(Ok(())) => {
                    self.note_private(at, pages);
                    return Ok(());
                }
                Some(refused) => return refused,
                None => {}
            }
        }
        Err(Refusal::Pinned)
    }

    /// `None`: a shared page was broken just now.
    fn try_to_put_in_place(
        &mut self,
        pages: &Range<Page>,
        fresh: &mut Anonymous,
    ) -> Option<Result<(), Refusal>> {
        // Nobody frees any of it meanwhile.
        let discards = self.discards.clone();
        let mut discards = discards.lock();
        self.note_discards(&mut discards);
        let start = self.memory.address(pages.start);
        let range = start..start + bytes(pages.len());
        let (mut shared, mut private): (Vec<Range<usize>>, Vec<Item>) = (Vec::new(), Vec::new());
        for (page, address) in pages.clone().zip(range.clone().step_by(PAGE_SIZE)) {
            match self.table.get(page) {
                State::Private(_) => return Some(Err(Refusal::Pinned)),
                state if !state.in_file_mapping() => private.push(Item::zero(page)),
                _ => match shared.last_mut() {
                    Some(run) if run.end == address => run.end += PAGE_SIZE,
                    _ => shared.push(address..address + PAGE_SIZE),
                },
            }
        }
        let breaker = self.breaker.clone();
        let Ok(mut pagemap) = Pagemap::open() else {
            return Some(Err(Refusal::Other));
        };
        let mut refusal = None;
        let done = breaker.hold_still(&mut pagemap, &shared, || {
            let done = self.replace(&range, &shared, &private, fresh);
            done.map_err(|reason| refusal = Some(reason)).ok()
        });
        match (done, refusal) {
            (Some(()), _) => Some(Ok(())),
            (None, Some(reason)) => Some(Err(reason)),
            (None, None) => None,
        }
    }

    /// An empty huge page of our own.
    fn fresh_huge_page(&mut self) -> Result<Anonymous, Refusal> {
        let spare = MEMORY_TO_SPARE.max(self.breaker.stats().1.floor_bytes);
        if proc::mem_available()
            .is_none_or(|available| available < spare.saturating_add(2 * HUGE_SIZE as u64))
        {
            return Err(Refusal::Memory);
        }
        let area = Anonymous::new_huge().map_err(|_| Refusal::Memory)?;
        area.populate().map_err(|_| Refusal::Memory)?;
        let range = area.base()..area.base() + HUGE_SIZE;
        let huge = self
            .pagemap
            .huge(range.clone())
            .is_ok_and(|found| found == [range]);
        huge.then_some(area).ok_or(Refusal::Memory)
    }

    /// Steps 3 and 4. The shared pages stand still.
    #[allow(unsafe_code)] // copies and replaces guest pages
    fn replace(
        &mut self,
        range: &Range<usize>,
        shared: &[Range<usize>],
        private: &[Item],
        fresh: &mut Anonymous,
    ) -> Result<(), Refusal> {
        let first = self.memory.page_at(range.start).ok_or(Refusal::Other)?;
        let pages = range.len() / PAGE_SIZE;
        let hold = self.merger.hold(&self.memory, first, pages, &self.tracker);
        let stretches = hold.stretches(private);
        self.memory.advise_copy(range, fresh.base());
        hold.arm(&stretches).map_err(|_| Refusal::Other)?;
        let urgent = Urgent::begin();
        let clock = Instant::now();
        let outcomes = hold.take(private);
        let taken = || {
            private
                .iter()
                .zip(&outcomes)
                .filter(|(_, o)| **o == Outcome::Merged)
                .map(|(item, _)| item)
        };
        let known = outcomes
            .iter()
            .all(|o| matches!(o, Outcome::Merged | Outcome::Absent));
        let copies = fresh.base();
        let copy = |from: usize, address: usize| {
            let mut words = [0; PAGE_WORDS];
            // SAFETY: what was taken is ours, and shared pages are readable and stand still; the copies' place is ours.
            unsafe {
                guest::copy_page(from, &mut words);
                guest::store_page(copies + (address - range.start), &words);
            }
        };
        let done = if known {
            taken().for_each(|item| copy(hold.scratch_of(item), self.memory.address(item.page)));
            let shared = shared.iter().flat_map(|run| run.clone().step_by(PAGE_SIZE));
            shared.for_each(|address| copy(address, address));
            // SAFETY: the copies hold what the guest's pages hold, and nobody can change those.
            unsafe { put_over(fresh.take_front(pages), range) }.map_err(|_| Refusal::Other)
        } else {
            Err(Refusal::Pinned)
        };
        if done.is_ok() {
            if let Err(error) = self.tracker.register(range.start, range.len(), Mode::Wp) {
                log::error!("write tracking of {range:x?} is lost: {error}");
            }
        } else {
            taken().for_each(|item| hold.put_back_item(item));
            hold.disarm(&stretches, &[]);
            // They come back without write tracking's marks, so all of them count as written.
        }
        let _ = self.tracker.wake(range.start, range.len());
        let away = clock.elapsed();
        drop(urgent);
        self.stats
            .rebuild
            .observe(u64::try_from(away.as_nanos()).unwrap_or(u64::MAX));
        done
    }

    /// Pages of a chunk lie in fresh memory of their own.
    fn note_private(&mut self, at: usize, pages: &Range<Page>) {
        let before = self.boundaries(pages);
        for page in pages.clone() {
            match self.table.get(page) {
                State::Shared(slot) => self.release(slot),
                State::Candidate { key, .. } => self.outbox.withdrawals.push(key.raw()),
                _ => {}
            }
            self.table.set(page, State::Untracked);
        }
        self.vmas += self.boundaries(pages) - before;
        let chunk = &mut self.chunks[at];
        chunk.pending = true;
        if !std::mem::replace(&mut chunk.mixed.own_mapping, true) {
            self.vmas += VMAS_PER_HUGE;
        }
    }

    fn note_rebuilt(&mut self, at: usize) {
        let chunk = &mut self.chunks[at];
        (chunk.huge, chunk.unarmed) = (true, false);
        (chunk.fragments, chunk.patience) = (0, 0);
        chunk.forget_twins();
        chunk.mixed.rebuilt();
        chunk.look_again();
        self.stats.huge_rebuilt_total += 1;
    }

    /// A huge page that seems to be all zeros: takes it, and leaves the place empty if it is.
    #[allow(unsafe_code)] // moves and reads guest pages
    pub(crate) fn give_up_zeros(&mut self, at: usize) -> bool {
        let discards = self.discards.clone();
        let mut discards = discards.lock();
        self.note_discards(&mut discards);
        let range = self.memory.chunks()[at].addresses();
        let Ok(scratch) = HugeScratch::new(&self.tracker, 1) else {
            return false;
        };
        if self
            .tracker
            .register(range.start, range.len(), Mode::Missing)
            .is_err()
        {
            return false;
        }
        let urgent = Urgent::begin();
        let clock = Instant::now();
        let (moved, _) = move_away(&self.tracker, range.start, scratch.place(0), HUGE_SIZE);
        // SAFETY: what was moved is ours.
        let zero = |offset| unsafe { guest::is_zero_page(scratch.place(0) + offset) };
        let all_zero = moved == HUGE_SIZE && (0..HUGE_SIZE).step_by(PAGE_SIZE).all(zero);
        if !all_zero {
            put_back_pages(&self.tracker, scratch.place(0), range.start, moved);
        }
        if let Err(error) = self.tracker.register(range.start, range.len(), Mode::Wp) {
            log::error!("write tracking of {range:x?} is lost: {error}");
            let _ = self.tracker.unregister(range.start, range.len());
        }
        let _ = self.tracker.wake(range.start, range.len());
        let away = clock.elapsed();
        drop(urgent);
        self.stats
            .stop
            .observe(u64::try_from(away.as_nanos()).unwrap_or(u64::MAX));
        if all_zero {
            for page in self.memory.chunks()[at].pages.clone() {
                if let State::Candidate { key, .. } = self.table.get(page) {
                    self.outbox.withdrawals.push(key.raw());
                }
                if self.table.get(page) != State::Zero {
                    self.table.set(page, State::Untracked);
                    self.table.set(page, State::Zero);
                }
            }
            let chunk = &mut self.chunks[at];
            (chunk.huge, chunk.pending, chunk.patience, chunk.rest) = (false, true, 0, 0);
            chunk.mixed.samples = 0;
            self.stats.zero_merges_total += CHUNK_PAGES as u64;
            self.stats.huge_zero_total += 1;
        }
        all_zero
    }
}
