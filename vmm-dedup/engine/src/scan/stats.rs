//! What the scanning thread says of its work: CPU time by stage, pages by state, costs.

use crate::memory::chunk_state::ChunkState;
use crate::scan::pass::Scanner;
use crate::sys::proc;
use vmm_dedup_protocol::stats::CpuNs;

/// Kernel memory that one more mapping costs: a VMA (192 bytes), its share of maple tree nodes, and for every second
/// one an anon_vma_chain (64 bytes). Measured: 530 bytes for the two mappings of a single merged page.
const VMA_BYTES: u64 = 265;

/// What the CPU time of the last stretch of work was for.
pub(crate) type Stage = fn(&mut CpuNs) -> &mut u64;

impl Scanner {
    /// Books the CPU time since the last call.
    pub(crate) fn lap(&mut self, stage: Stage) {
        let now = proc::thread_cpu_ns();
        *stage(&mut self.stats.cpu_ns) += now.saturating_sub(self.cpu_mark);
        self.cpu_mark = now;
    }

    /// Books the CPU time since a point (this thread's CPU time then) that is not to count for the stage around it.
    pub(crate) fn lap_within(&mut self, since: u64, stage: Stage) {
        let ns = proc::thread_cpu_ns().saturating_sub(since);
        *stage(&mut self.stats.cpu_ns) += ns;
        self.cpu_mark += ns;
    }

    pub(crate) fn fill_stats(&mut self) {
        self.fill_mixed_stats();
        let counts = self.table.counts();
        let (breaks, reserve) = self.breaker.stats();
        let stats = &mut self.stats;
        stats.pages = self.memory.pages() as u64;
        stats.pages_mapped = counts.shared + counts.foreign;
        stats.pages_zero = counts.zero;
        stats.pages_unshared = counts.candidates;
        stats.pages_volatile = counts.volatile;
        stats.pages_new = counts.armed;
        stats.pages_pinned = counts.pinned;
        stats.pages_broken = counts.private;
        stats.huge_ranges = self.chunks.iter().filter(|c| c.huge).count() as u64;
        stats.vmas = u64::try_from(self.vmas).unwrap_or(0);
        stats.vmas_max = u64::try_from(self.vmas_max).unwrap_or(0);
        stats.vma_bytes = stats.vmas * VMA_BYTES;
        let bytes = self.table.bytes()
            + self.chunks.len() * size_of::<ChunkState>()
            + self.breaker.bytes()
            + self.searcher.bytes()
            + self.discards.bytes();
        stats.metadata_bytes = bytes as u64;
        stats.reserve_pages = reserve.pages as u64;
        stats.reserve_target = reserve.target as u64;
        stats.reserve_waits_total = breaks.waits;
        stats.waiting_writers = breaks.waiting;
        stats.break_latency = breaks.latency;
        stats.cpu_ns.break_ = breaks.cpu_ns;
        stats.cpu_percent = self.control.cpu_percent().into();
        self.stats.backend = self.searcher.number();
        self.stats.search_failures_total = self.searcher.failures();
        self.stats.state = self.state();
    }

    /// A number of [`vmm_dedup_protocol::stats::STATES`].
    pub(crate) fn state(&self) -> u64 {
        match () {
            () if self.ended => 2,
            () if self.store.is_none() => 3,
            () if self.control.is_off() => 6,
            () if self.control.rests() => 1,
            () if self.suspended => 5,
            () => 0,
        }
    }
}
