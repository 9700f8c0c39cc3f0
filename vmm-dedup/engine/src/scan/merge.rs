//! Found > admitted > merged: what was found is admitted, planned, and merged window by window.

use crate::error::Error;
use crate::lookup::request::{MergeRequest, in_page_order};
use crate::lookup::{collisions, series};
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::page_state::{Backing, PageState};
use crate::merge::admission::{Admission, Admitted, Obstacle, Terms};
use crate::merge::bridged_runs;
use crate::merge::context::Tools;
use crate::merge::healer::Healed;
use crate::merge::merger::Batch;
use crate::merge::outcomes::{self, Learnt};
use crate::merge::plan::Plan;
use crate::merge::run::{Outcome, Take};
use crate::merge::{ready, refusals};
use crate::scan::merging::Merging;
use crate::scan::pass::Pass;
use crate::store::session::ResyncCause;
use crate::sys::page_size::PAGE_SIZE;
use crate::thp::{split, twin_count};
use std::ops::Range;

/// Requests that are merged at once where others come before them: a fraction of a second's work.
const PIECE: usize = 1 << 12;

impl Pass {
    /// Found > admitted > merged; where the guest gives hints, some of what was found.
    pub(super) fn merge(&mut self) -> Result<(), Error> {
        let found = self.take_found();
        let admitted = self.admit(found)?;
        self.plan(admitted);
        let mut result = Ok(());
        // What is left once merging is suspended comes back, for `exchange` to let go of.
        while result.is_ok() && self.direct_io.glance_again() && self.merge_next() {
            result = self.yield_and_poll();
        }
        self.end_merging();
        result?;
        self.tell_store()
    }

    /// Merges what was found so far, and says so: what others give up must not wait for the end of a long pass.
    pub(super) fn keep_up(&mut self) -> Result<(), Error> {
        self.tell_store()?;
        while !self.twins.is_empty() && self.direct_io.glance() {
            self.merge()?;
            self.yield_and_poll()?;
        }
        match self.twins.is_empty() && self.map.outbox().is_empty() {
            true => self.session.acknowledge(),
            // The next time.
            false => Ok(()),
        }
    }

    /// What is merged now of what was found, in page order. Where the guest gives hints, those chunks come first of which it says that much
    /// is worth sharing. The others come in pieces, so that what is found of the former meanwhile need not wait for all of them, unless
    /// there is no room for more.
    fn take_found(&mut self) -> Vec<MergeRequest> {
        let all = self.twins.is_full() || !self.map.has_hints();
        let (found, twice) = in_page_order(self.twins.take());
        for again in twice {
            self.map.give_up_published(again.publisher_ref());
        }
        if all {
            return found;
        }
        let memory = self.map.memory().clone();
        let (mut now, mut later) = (Vec::new(), Vec::new());
        for (chunk, group) in memory.by_chunk(&found, |request| request.page) {
            match self.map.is_worth(chunk) {
                true => now.extend(group),
                false => later.push(group),
            }
        }
        let mut later = later.into_iter();
        if now.is_empty() {
            while now.len() < PIECE
                && let Some(group) = later.next()
            {
                now.extend(group);
            }
        }
        self.twins.add(later.flatten().copied().collect());
        now
    }

    /// Found > admitted. Requests are in page order, each page once.
    fn admit(&mut self, found: Vec<MergeRequest>) -> Result<Vec<MergeRequest>, Error> {
        let found = self.leave_out_changed_copies(found);
        twin_count::count(&mut self.map, &self.session, &self.monitor, &found);
        let any_copy = found.iter().any(|request| is_copy(&self.map, request));
        self.merging.terms = Terms {
            probes: self.monitor.probes(),
            suspended: !self.direct_io.glance(),
            managed: self.space.breaker.managed(),
            heals: any_copy && self.merging.healer.can_heal(&self.map, self.number),
        };
        let admitted = self.admission().admit(found);
        let mut admitted = self.leave_out_refused(admitted);
        series::use_series(&self.map, &mut self.session, &mut self.account, &mut admitted)?;
        Ok(admitted)
    }

    /// Admitted > plan: which requests wait, which copies are healed, and which runs have exceptions. Pages that still map a
    /// lost store's file go back to private memory just before they are merged anew.
    fn plan(&mut self, mut admitted: Vec<MergeRequest>) {
        let copies: Vec<MergeRequest> = admitted
            .extract_if(.., |request| is_copy(&self.map, request))
            .collect();
        let quiesced = self.admission().admit_quiesced(admitted, self.number);
        let mut now = self.leave_out_refused(quiesced);
        self.make_orphans_private(&mut now);
        if !self.merging.terms.managed {
            now = bridged_runs::with_exceptions(&self.map, self.number, now);
        }
        self.merging.plan = Plan::new(now, copies);
        self.merging.swapped.look();
    }

    /// Admitted > merged: the next window, or else the next batch of copies; whether there was one.
    fn merge_next(&mut self) -> bool {
        let Some((first, take)) = self.merging.plan.next(&self.map) else {
            return self.heal_next();
        };
        if take == Take::Pages {
            split::split_if_huge(&mut self.map, &mut self.account, &self.monitor, first);
        }
        let Merging { plan, .. } = &self.merging;
        let window = plan.window(&self.map, take, self.merging.window_size);
        let requests = plan.requests(&window);
        let last = requests.last().map_or(first, |request| request.page);
        let (pagemap, memory) = (&mut self.space.pagemap, self.map.memory());
        let swapped = self.merging.swapped.out(pagemap, memory, &(first..last + 1));
        let is_swapped = |page: Page| swapped.contains((page - first) as usize);
        let again = self.admission().admit_again(requests, is_swapped);
        if again.refused.is_empty() {
            self.merging.plan.begin(&window);
            self.merge_window(&window, take);
        } else {
            let left = self.leave_out_refused(again);
            self.merging.plan.cut_anew(window, left);
        }
        true
    }

    /// Admitted > merged, one window.
    fn merge_window(&mut self, window: &Range<usize>, take: Take) {
        // No discard meets pages that are away, until the states say what became of them.
        let discards = self.space.discards.clone();
        let mut discards = discards.lock();
        self.space.note_discards(&mut discards, &mut self.map);
        let requests = self.merging.plan.requests(window);
        let discarded = |request: &MergeRequest| {
            let state = self.map.state(request.page);
            state.backing == Backing::Zero || state == PageState::UNTRACKED
        };
        if take != Take::Pages && requests.iter().any(discarded) {
            // Just discarded, so it is not that huge page any more.
            for request in requests {
                self.map.defer(request.page, request.publisher_ref());
            }
            return;
        }
        let Some(store) = self.session.store() else {
            return;
        };
        ready::touch_slots(store, requests);
        let open = self.merging.plan.open(&self.map, window);
        let batch = Batch { requests, open, take };
        // Said before: whoever discards must not believe pages to be anonymous if this thread dies before it has noted what they are.
        let mapped = || requests.iter().filter(|request| request.slot.is_some());
        self.map.expect_in_file(mapped().map(|request| request.page));
        let merged = self
            .merging
            .merger
            .merge(self.map.memory(), store, &mut self.space, batch);
        let Ok(merged) = merged else {
            self.map.sync_in_file(mapped().map(|request| request.page));
            // The window has noted why.
            self.account.stats.refused_other_total += requests.len() as u64;
            self.session.schedule_resync(self.number, ResyncCause::Missed);
            for request in requests {
                self.map.give_up_published(request.publisher_ref());
            }
            return;
        };
        self.account.stats.stop.observe(merged.stop_ns);
        self.account.stats.bytes_read.verify += (requests.len() * 2 * PAGE_SIZE) as u64;
        let (map, account, outcomes) = (&mut self.map, &mut self.account, &merged.outcomes);
        match take {
            Take::Pages => self.merging.window_size.adapt(requests.len(), merged.stop_ns),
            Take::HugePage { .. } => {
                let (pagemap, first) = (&mut self.space.pagemap, requests[0].page);
                outcomes::note_huge(map, pagemap, account, &self.monitor, first, outcomes);
            }
        }
        let learnt = outcomes::note(map, account, self.number, requests, outcomes);
        self.map.sync_in_file(mapped().map(|request| request.page));
        self.learn(&learnt);
    }

    /// Admitted > merged, for pages that the kernel copied: the next batch; whether there was one.
    fn heal_next(&mut self) -> bool {
        // No discard meets frozen pages, until the states say what became of them.
        let discards = self.space.discards.clone();
        let mut discards = discards.lock();
        self.space.note_discards(&mut discards, &mut self.map);
        let Merging { plan, healer, .. } = &mut self.merging;
        // What was discarded just now is no copy any more; a publication of it is of no use.
        for changed in plan.take_changed_copies(&self.map) {
            self.map.give_up_published(changed.publisher_ref());
        }
        let copies = plan.copies();
        if copies.is_empty() {
            return false;
        }
        let len = healer.batch_len(self.map.memory(), copies);
        let batch = plan.begin_copies(len);
        // The healer reads them in.
        let again = self.admission().admit_again(&batch, |_| false);
        let batch = self.leave_out_refused(again);
        if batch.is_empty() {
            return true;
        }
        let Some(store) = self.session.store() else {
            return false;
        };
        let (map, account) = (&mut self.map, &mut self.account);
        let Merging { healer, merger, .. } = &mut self.merging;
        let mut tools = Tools {
            store,
            space: &mut self.space,
            verify: &mut merger.verify_engine,
        };
        let Healed { outcomes, stall_ns } = healer.heal(map, &mut tools, self.number, &batch);
        stall_ns.into_iter().for_each(|ns| account.stats.heal.observe(ns));
        account.stats.bytes_read.verify += (batch.len() * 2 * PAGE_SIZE) as u64;
        let learnt = outcomes::note_healed(map, account, self.number, &batch, &outcomes);
        self.learn(&learnt);
        true
    }

    /// Ends what was planned, at its end or before: frees what was merged, and takes back what was not, for the next time.
    fn end_merging(&mut self) {
        let Merging { plan, merger, .. } = &mut self.merging;
        merger.clean_up();
        self.space.scratch.free();
        self.twins.add(std::mem::take(plan).left_over());
        self.merging
            .swapped
            .tell(self.account.stats.refused_swapped_total);
        self.account.lap(|cpu| &mut cpu.merge);
    }

    /// What outcomes tell of how twins are found.
    fn learn(&mut self, learnt: &Learnt) {
        let Learnt { different } = learnt;
        collisions::note(&mut self.map, &self.session, &mut self.account, different);
        let search = self.twins.finder.search_mut();
        search.note_wrong(learnt.wrong_proposals());
    }

    /// Who is left of these.
    fn leave_out_refused(&mut self, admitted: Admitted) -> Vec<MergeRequest> {
        let Admitted { now, refused } = admitted;
        let (map, deferred) = (&mut self.map, &mut self.merging.deferred);
        refusals::note(
            map,
            &mut self.session,
            &mut self.account,
            deferred,
            self.number,
            &refused,
        );
        for (request, obstacle) in &refused {
            // It is to become small pages before it is taken.
            if *obstacle == Obstacle::Deferred {
                split::split_if_huge(&mut self.map, &mut self.account, &self.monitor, request.page);
            }
        }
        now
    }

    /// Who is left of these. A copy has been written, and most writes change no key line: so its key leads to the slot that it was
    /// copied from, which it does not hold any more. To see that here is cheaper than to heal it in vain.
    fn leave_out_changed_copies(&mut self, mut found: Vec<MergeRequest>) -> Vec<MergeRequest> {
        let (map, session) = (&self.map, &self.session);
        let changed = |request: &mut MergeRequest| {
            is_copy(map, request) && !collisions::looks_equal(map, session, request)
        };
        let changed: Vec<MergeRequest> = found.extract_if(.., changed).collect();
        let outcomes = vec![Outcome::Different; changed.len()];
        let (map, account) = (&mut self.map, &mut self.account);
        let learnt = outcomes::note_healed(map, account, self.number, &changed, &outcomes);
        self.learn(&learnt);
        found
    }

    /// What could not be made private must not be taken: it lies in a mapping of a file.
    fn make_orphans_private(&mut self, requests: &mut Vec<MergeRequest>) {
        let in_file = |map: &PageMap, request: &MergeRequest| map.backing(request.page).in_file_mapping();
        let orphans = requests.iter().filter(|request| in_file(&self.map, request));
        let orphans: Vec<Page> = orphans.map(|request| request.page).collect();
        self.space
            .make_all_private(&mut self.map, &mut self.account, &orphans);
        requests.retain(|request| {
            let stays = in_file(&self.map, request);
            if stays {
                self.map.give_up_published(request.publisher_ref());
            }
            !stays
        });
    }

    fn admission(&self) -> Admission<'_> {
        Admission {
            map: &self.map,
            terms: self.merging.terms,
        }
    }
}

fn is_copy(map: &PageMap, request: &MergeRequest) -> bool {
    map.backing(request.page).is_copied()
}
