//! What the scanning thread says of its work.

use crate::scan::pass::Pass;
use crate::sys::late_log;
use vmm_dedup_protocol::name::EngineName;
use vmm_dedup_protocol::stats::{Hints, Packing};

/// Kernel memory that one more mapping costs: a VMA (192 bytes), its share of maple tree nodes, and for every second
/// one an anon_vma_chain (64 bytes). Measured: 530 bytes for the two mappings of a single merged page.
const VMA_BYTES: u64 = 265;

impl Pass {
    /// Fills in what is a state rather than a count.
    pub(crate) fn fill_stats(&mut self) {
        self.monitor.fill_stats(&self.map, &mut self.account);
        let counts = self.map.counts();
        let (breaks, reserve) = self.space.breaker.stats();
        let search = self.twins.finder.search();
        let bytes =
            self.map.bytes() + self.space.breaker.bytes() + search.bytes() + self.space.discards.bytes();
        let state = self.state();
        let stats = &mut self.account.stats;
        stats.pages = self.map.memory().pages() as u64;
        stats.window_failures_total = late_log::count();
        stats.pages_mapped = counts.slots + counts.orphaned;
        stats.pages_zero = counts.zero;
        stats.pages_unshared = counts.candidates;
        stats.pages_volatile = counts.volatile;
        stats.pages_new = counts.write_protected;
        stats.pages_pinned = counts.pinned;
        stats.pages_broken = counts.copied;
        stats.pages_restless = self.map.paused();
        stats.breaks_early_total = self.map.early_breaks();
        stats.huge_ranges = self.map.chunks().iter().filter(|c| c.huge).count() as u64;
        stats.vmas = u64::try_from(self.map.vmas()).unwrap_or(0);
        stats.vmas_max = u64::try_from(self.map.vmas_max()).unwrap_or(0);
        stats.vma_bytes = stats.vmas * VMA_BYTES;
        stats.metadata_bytes = bytes as u64;
        stats.reserve_pages = reserve.pages as u64;
        stats.reserve_target = reserve.target as u64;
        stats.reserve_waits_total = breaks.waits;
        stats.waiting_writers = breaks.waiting;
        stats.break_latency = breaks.latency;
        stats.cpu_ns.break_ = breaks.cpu_ns;
        stats.cpu_percent = self.control.cpu_percent().into();
        stats.pass_period_ms = self.control.pass_period_ms();
        stats.stop_target_us = self.control.stop_target_us();
        let named = |name| EngineName::try_new(name).unwrap_or_default();
        stats.search = named(search.name());
        stats.search_failures_total = search.failures();
        stats.search_device = search.device_work();
        let verify_engine = self.merging.verify_engine();
        stats.cpu_ns.merge += verify_engine.book_helper_cpu_ns();
        stats.verify = named(verify_engine.name());
        stats.verifications_total = verify_engine.answered();
        stats.verify_failures_total = verify_engine.failures();
        stats.verify_device = verify_engine.device_work();
        stats.state = state;
        let (hints, bytes) = self.heard.figures();
        self.fill_packing();
        let stats = &mut self.account.stats;
        let counts = self.map.hint_counts();
        stats.hints = Hints {
            merges_total: counts.merges,
            wrong_total: counts.wrong,
            ..hints
        };
        stats.metadata_bytes += bytes as u64;
        stats.cpu_ns.track += self.heard.book_cpu_ns();
    }

    fn fill_packing(&mut self) {
        let (Some(packer), Some(packing)) = (&self.space.packer, &self.packing) else {
            return;
        };
        let figures = packer.figures();
        let stats = &mut self.account.stats;
        stats.cpu_ns.break_ += figures.cpu_ns;
        stats.metadata_bytes += figures.metadata_bytes + packing.bytes() as u64;
        stats.packing = Packing {
            pages: figures.pages,
            bytes: figures.bytes,
            packs_total: figures.packs,
            touched_total: figures.touched,
            early_total: packing.early(),
            brought_back_total: figures.brought_back,
            broken_total: figures.broken,
            rebuild: figures.rebuild,
            stop: stats.packing.stop,
        };
    }

    /// A number of [`vmm_dedup_protocol::stats::STATES`].
    pub(super) fn state(&self) -> u64 {
        match () {
            () if self.ended => 2,
            () if !self.session.is_connected() => 3,
            () if self.control.is_off() => 6,
            () if self.control.stands_by() => 1,
            () if self.direct_io.refused().is_some() => 5,
            () => 0,
        }
    }
}
