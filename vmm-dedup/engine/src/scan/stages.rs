//! The scanning thread's work, pass by pass.
//!
//! ```text
//!   written  ---->  keyed  ---->  found  ---->  admitted  ---->  plan  ---->  merged  ---->  noted
//!   track::dirty    lookup::keys  lookup::find  merge::admission merge::plan  merge::merger  merge::outcomes
//!   (scan::order)                 (scan::twins) (thp::twin_count)             merge::healer
//!                                                     |
//!                                                     `---> refused: merge::refusals
//! ```
//!
//! Each stage takes what the one before has left and returns what it made of it; none names another. The pass hands on (to the left
//! of *found* here, to its right in [`merge`]), and between any two pieces of work it yields and polls: it keeps the CPU budget,
//! answers questions, and notices the wish to stop.
//!
//! [`merge`]: mod@crate::scan::merge

use crate::error::Error;
use crate::lookup::copies;
use crate::memory::page_map::PageMap;
use crate::scan::order::{Chunks, ScanOrder};
use crate::scan::pass::Pass;
use crate::track::dirty;
use vmm_dedup_protocol::clock;

/// After so many visits a guest that gives hints looks whether others have found twins of what came first.
const NEWS_PERIOD: u32 = 16;

impl Pass {
    /// One pass. Errors of the store are survived: what was shared stays shared, and a new store is looked for.
    pub(crate) fn run(&mut self) {
        self.number += 1;
        self.account.stats.passes_total += 1;
        self.merging.window_size.aim_at(self.control.stop_target_us());
        match self.try_run() {
            // That the page tables could not be looked at has been noted; the next pass tries again.
            Ok(()) | Err(Error::Stopped | Error::Pagemap(_)) => {}
            Err(error) => self.lose_store(&error),
        }
        self.map.let_time_pass(self.number);
        self.account.stats.last_pass_ms = clock::since_boot_ms();
        self.report();
    }

    fn try_run(&mut self) -> Result<(), Error> {
        self.prepare()?;
        self.hear_hints();
        while self.heed_hints() {
            self.tell_store_of_many(|cpu| &mut cpu.track)?;
            self.yield_and_poll()?;
        }
        self.tell_store()?;
        self.heard.done();
        if !self.direct_io.begin_pass() {
            return self.stand_by();
        }
        if self.session.is_connected() {
            let mut order = ScanOrder::new(&self.map, self.number);
            let (has_hints, mut visits) = (self.map.has_hints(), 0_u32);
            while let Some(chunks) = order.next(&self.map) {
                self.visit(chunks)?;
                visits += 1;
                // (What comes first may have twins in VMs that come to it later.)
                if has_hints
                    && !self.session.is_secure()
                    && (order.comes_first() || visits.is_multiple_of(NEWS_PERIOD))
                {
                    self.share_soon()?;
                }
                if self.session.is_waited_for() {
                    self.keep_up()?;
                }
                self.yield_and_poll()?;
            }
            self.account.stats.full_scans_total += u64::from(order.is_full());
            let watches_use = self.monitor.watches_use();
            self.space
                .find_copied(&mut self.map, &mut self.account, self.number, watches_use)?;
            self.account.lap(|cpu| &mut cpu.track);
            self.look_at_copies()?;
        }
        self.watch_use()?;
        if !self.session.is_connected() {
            return Ok(());
        }
        // Whatever replaces memory from here on glances before that.
        if self.direct_io.refused().is_some() {
            return self.stand_by();
        }
        if self.session.is_secure() {
            return self.share_securely();
        }
        self.look_at_huge_pages()?;
        self.exchange()?;
        self.pack_cold()
    }

    /// A pass's work once everything is keyed that stood still.
    fn share_securely(&mut self) -> Result<(), Error> {
        self.leave_earlier_stores()?;
        self.follow_slots();
        self.tell_store()?;
        self.acknowledge()?;
        self.split_idle()?;
        let shared = self.pack_cold();
        self.give_up_slots();
        self.tell_store()?;
        shared
    }

    /// What others did since the last pass.
    fn prepare(&mut self) -> Result<(), Error> {
        self.heed_pins();
        self.note_breaks();
        let discards = self.space.discards.clone();
        self.space.note_discards(&mut discards.lock(), &mut self.map);
        self.note_unpacked();
        self.track_what_was_lost();
        if self.map.asks_for_vmas_again(self.number) {
            // What was refused meanwhile is to be found again.
            self.session.overrun_news();
        }
        self.space
            .breaker
            .set_vmas_left(self.map.vmas_max() - self.map.vmas());
        self.find_store();
        self.session.take_pushes()?;
        self.twins.finder.prepare(&self.session, self.number);
        self.merging.verify_engine().prepare(self.number);
        // Every first write to a protected page, and every copy-on-write, is a fault of some other thread.
        if self.space.others_had_faults() {
            self.map.note_faults();
        }
        self.account.lap(|cpu| &mut cpu.track);
        Ok(())
    }

    /// Written > keyed > found, for some chunks.
    fn visit(&mut self, chunks: std::ops::Range<usize>) -> Result<(), Error> {
        let probes = self.monitor.probes();
        let (space, number) = (&mut self.space, self.number);
        let pages = dirty::visit(
            &mut self.map,
            &mut space.pagemap,
            &space.uffd,
            probes,
            number,
            chunks,
        )?;
        if pages.is_empty() {
            return self.tell_store_of_many(|cpu| &mut cpu.track);
        }
        self.account.lap(|cpu| &mut cpu.track);
        // A page that is keyed by the visit that found it written may be sighted by the key that it had: behind its withdrawal, or the store
        // takes it for its own twin.
        if self.map.has_hints() && self.map.outbox().has_withdrawals() {
            self.tell_store()?;
            self.account.lap(|cpu| &mut cpu.store);
        }
        let (twins, mut with) = self.finding();
        twins.key_and_find(&mut with, &pages);
        self.account.lap(|cpu| &mut cpu.key);
        self.tell_store_of_many(|cpu| &mut cpu.key)?;
        if self.twins.is_full() {
            self.merge()?;
        }
        Ok(())
    }

    /// Merges what was found so far, so that what the guest calls worth sharing need not wait for the end of a long pass.
    fn share_soon(&mut self) -> Result<(), Error> {
        self.tell_store()?;
        // To look everything up again is for the end of the pass, once.
        if !self.session.missed_news() {
            let (twins, mut with) = self.finding();
            twins.take_news(&mut with);
        }
        self.account.lap(|cpu| &mut cpu.store);
        if self.twins.is_empty() || !self.direct_io.glance() {
            return Ok(());
        }
        self.merge()
    }

    /// Keyed > found, for pages that the kernel copied.
    fn look_at_copies(&mut self) -> Result<(), Error> {
        let mut prospect = None;
        let mut chunks = Chunks::new(&self.map);
        while let Some(at) = chunks.next(&mut self.map, PageMap::copies_due) {
            let prospect =
                *prospect.get_or_insert_with(|| self.merging.healer.prospect(&self.map, self.number));
            let (map, pagemap) = (&mut self.map, &mut self.space.pagemap);
            let keyed = copies::look(
                map,
                pagemap,
                &self.session,
                &mut self.account,
                self.number,
                at,
                prospect,
            )?;
            self.find(keyed);
            self.tell_store_of_many(|cpu| &mut cpu.key)?;
            self.yield_and_poll()?;
            if self.twins.is_full() {
                self.account.lap(|cpu| &mut cpu.key);
                self.merge()?;
            }
        }
        self.account.lap(|cpu| &mut cpu.key);
        Ok(())
    }
}
