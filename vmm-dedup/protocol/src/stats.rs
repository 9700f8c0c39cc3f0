//! What a service tells about itself: fixed-size counters that travel to the store and into its metrics.

mod device_work;
mod histogram;

use crate::name::EngineName;
pub use device_work::DeviceWork;
pub use histogram::{BUCKETS, Histogram};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// CPU time by stage, nanoseconds of the service's threads (user and system).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CpuNs {
    /// Finding out what was written.
    pub track: u64,
    /// Reading key lines and looking keys up.
    pub key: u64,
    /// Looking for twins with an engine that compares pages. A device's own work is not in it.
    pub search: u64,
    /// Hashing whole pages.
    pub hash: u64,
    /// Talking with the store, publishing.
    pub store: u64,
    /// Taking, verifying and mapping; packing.
    pub merge: u64,
    /// Breaking sharing: managed copy-on-write, unmerging; bringing packed pages back.
    pub break_: u64,
    /// Sampling which memory is used.
    pub monitor: u64,
}

impl CpuNs {
    /// All stages.
    pub fn total(&self) -> u64 {
        [
            self.track,
            self.key,
            self.search,
            self.hash,
            self.store,
            self.merge,
            self.break_,
            self.monitor,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

/// Bytes of guest memory read, by stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct BytesRead {
    /// Key lines, and pages whose key lines are zero.
    pub key: u64,
    /// Whole pages, to hash them.
    pub hash: u64,
    /// Pages handed to the store.
    pub publish: u64,
    /// Pages taken and compared.
    pub verify: u64,
}

impl BytesRead {
    /// All stages.
    pub fn total(&self) -> u64 {
        [self.key, self.hash, self.publish, self.verify]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

/// Names of a service's states, by their number.
pub const STATES: [&str; 7] = [
    "running",
    "paused",
    "stopped",
    "without_store",
    "refused",
    "suspended",
    "off",
];

/// Names of what may tell a service which memory is used, by number.
pub const USE_SOURCES: [&str; 6] = [
    "nothing",
    "fault-sampling",
    "damon",
    "writes",
    "page-idle",
    "agent",
];

/// Names of what becomes of a guest's agent, by number.
pub const AGENT_STATES: [&str; 4] = ["off", "awaited", "connected", "failed"];

/// What a guest's agent says, and what came of it. Gauges count frames of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Hints {
    /// A number of [`AGENT_STATES`]: none is to be heard; none has come, or it has gone; one is connected; there is no socket
    /// for one.
    pub agent: u64,
    /// Free.
    pub free: u64,
    /// Pieces of files as they are on the disk.
    pub file_clean: u64,
    /// Other pieces of files.
    pub file_dirty: u64,
    /// Memory of programs.
    pub anonymous: u64,
    /// The guest kernel's own.
    pub kernel: u64,
    /// Marked by programs: never to be shared.
    pub never: u64,
    /// Marked by programs: worth sharing.
    pub worth: u64,
    /// Marked by programs: soon overwritten.
    pub soon: u64,
    /// Pages merged that the guest had called worth sharing, or pieces of files as they are on the disk.
    pub merges_total: u64,
    /// Pages that were written although they were said to be free, or worth sharing.
    pub wrong_total: u64,
    /// Agents that were let in.
    pub agents_total: u64,
    /// Agents that came too often, and were not let in.
    pub agents_refused_total: u64,
    /// Agents that were cut off for what they sent.
    pub agents_cut_off_total: u64,
}

/// Pages that are kept packed, in fewer bytes, and what came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Packing {
    /// Pages packed now.
    pub pages: u64,
    /// Bytes of memory that they lie in, gaps included.
    pub bytes: u64,
    /// Pages that were packed.
    pub packs_total: u64,
    /// Pages that somebody touched, or a walk through their neighbours came near to, and that came back therefore.
    pub touched_total: u64,
    /// Of these, those that were packed for too short a time.
    pub early_total: u64,
    /// Pages that came back although nobody had touched them: memory that was lent or removed, a service that ended.
    pub brought_back_total: u64,
    /// Pages whose packed bytes were broken; the guest met a memory error there.
    pub broken_total: u64,
    /// How long somebody waited who touched a packed page, from when his fault was read.
    pub rebuild: Histogram,
    /// How long pages were away while they were compared with what they had been packed to.
    pub stop: Histogram,
}

impl Hints {
    /// What became of the agent.
    pub fn agent_name(&self) -> &'static str {
        let number = usize::try_from(self.agent).unwrap_or(usize::MAX);
        AGENT_STATES.get(number).copied().unwrap_or("unknown")
    }
}

/// A service's account. Page counts are gauges of 4 KiB pages; names ending in `_total` only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ServiceStats {
    /// Guest pages under the service.
    pub pages: u64,
    /// Pages that map a slot of the store.
    pub pages_mapped: u64,
    /// Pages that the service replaced by the zero page and that still are.
    pub pages_zero: u64,
    /// Pages with a key and no twin (KSM: pages_unshared).
    pub pages_unshared: u64,
    /// Pages that change too often to be keyed (KSM: pages_volatile).
    pub pages_volatile: u64,
    /// Pages written lately, which wait to be keyed.
    pub pages_new: u64,
    /// Pages that were pinned at the last try to take them.
    pub pages_pinned: u64,
    /// Pages that stay private in mappings of the store: copied by the kernel after sharing, or exceptions in runs (see
    /// docs/design/merging.md and docs/design/unmerging.md).
    pub pages_broken: u64,
    /// Pages that are left alone for a while, since sharing them did not last.
    pub pages_restless: u64,
    /// 2 MiB ranges mapped by one huge page at the last look.
    pub huge_ranges: u64,
    /// Of these, those that are kept for speed: repetitive, but in use.
    pub huge_kept_hot: u64,
    /// Subpages of them that look repeated: memory given up for speed.
    pub pages_given_up: u64,
    /// 2 MiB ranges whose huge page was split for sharing.
    pub huge_split: u64,
    /// Pages merged with a slot.
    pub merges_total: u64,
    /// Pages replaced by the zero page.
    pub zero_merges_total: u64,
    /// Sharing broken by the kernel's copy-on-write.
    pub breaks_kernel_total: u64,
    /// Sharing broken by the service, for a waiting writer.
    pub breaks_managed_total: u64,
    /// Of both, those of pages that had been shared for fewer passes than it takes to pay.
    pub breaks_early_total: u64,
    /// Shared pages that nobody had written and that the service made private again: on request, before a device, when a store has
    /// gone, or for reasons of its own.
    pub unmerged_total: u64,
    /// Pages taken whose content had changed, and put back.
    pub mismatches_total: u64,
    /// Pages that could not be taken because they were pinned or not exclusive (EBUSY).
    pub refused_pinned_total: u64,
    /// Pages left alone because of the VMA budget.
    pub refused_vmas_total: u64,
    /// Merges put off because the page was swapped out.
    pub refused_swapped_total: u64,
    /// Pages that could not be taken for other reasons.
    pub refused_other_total: u64,
    /// Of the pages merged, those that the kernel had copied on write.
    pub heals_total: u64,
    /// Such pages left alone because they may have been pinned.
    pub heal_pinned_total: u64,
    /// Such pages left alone because somebody waited to write one of them, or of those beside them.
    pub heal_contended_total: u64,
    /// Such pages left alone because what tells of pins failed: no fork, a child that was killed, page tables that could not
    /// be read.
    pub heal_failed_total: u64,
    /// Calls of the kernel on guest memory that failed; each was tried again, done another way, or left for later, and the
    /// log tells.
    pub window_failures_total: u64,
    /// Pages handed to the store.
    pub published_total: u64,
    /// Huge pages split for sharing.
    pub huge_splits_total: u64,
    /// Of these, those that were used, if rarely, and had many twins.
    pub huge_splits_rare_total: u64,
    /// Of the huge pages split, those of which every page was taken at once, and merged.
    pub huge_whole_total: u64,
    /// Times that a huge page was given back while it was to be merged as a whole, since somebody waited for it.
    pub huge_contended_total: u64,
    /// Huge pages built again for use.
    pub huge_rebuilt_total: u64,
    /// Huge pages of zeros given up as a whole.
    pub huge_zero_total: u64,
    /// Huge pages not built because a page was, or may have been, pinned.
    pub rebuild_pinned_total: u64,
    /// Huge pages not built for want of memory.
    pub rebuild_memory_total: u64,
    /// Huge pages not built for other reasons.
    pub rebuild_other_total: u64,
    /// 2 MiB ranges whose use was sampled.
    pub samples_total: u64,
    /// Samples that found use.
    pub samples_used_total: u64,
    /// Passes begun (KSM: one wake-up of ksmd).
    pub passes_total: u64,
    /// Times that every range was looked at (KSM: full_scans).
    pub full_scans_total: u64,
    /// Pages whose key lines were read.
    pub pages_keyed_total: u64,
    /// Pages hashed whole.
    pub pages_hashed_total: u64,
    /// Pages that an engine was asked for a twin of.
    pub searches_total: u64,
    /// Slots that it proposed.
    pub search_twins_total: u64,
    /// Times that it failed, or could not be had, and the hash index took its place.
    pub search_failures_total: u64,
    /// Taken pages that an engine other than the CPU has compared with their slots.
    pub verifications_total: u64,
    /// Times that it failed, or could not be had, and the CPU took its place.
    pub verify_failures_total: u64,
    /// VMAs that merging added to this process.
    pub vmas: u64,
    /// Most VMAs it may add.
    pub vmas_max: u64,
    /// Bytes of the service's own bookkeeping.
    pub metadata_bytes: u64,
    /// Bytes of kernel memory that the added VMAs cost (estimated from their number).
    pub vma_bytes: u64,
    /// Pages in the copy-on-write reserve.
    pub reserve_pages: u64,
    /// Pages the reserve should have.
    pub reserve_target: u64,
    /// Writers that had to wait because the reserve was empty.
    pub reserve_waits_total: u64,
    /// Writers waiting now.
    pub waiting_writers: u64,
    /// The last pass's end, milliseconds since the host booted ([`crate::clock`]); 0: there was none.
    pub last_pass_ms: u64,
    /// A number of [`STATES`]: running; paused by the VMM; stopped; without store; refused (said by the store);
    /// suspended, since there is direct I/O that merging could lose; switched off.
    pub state: u64,
    /// CPU time the service may use, percent of one core.
    pub cpu_percent: u64,
    /// Time from the start of one pass to that of the next, milliseconds.
    pub pass_period_ms: u64,
    /// How long the pages of a merge window should be away at most, microseconds.
    pub stop_target_us: u64,
    /// A number of [`USE_SOURCES`].
    pub use_source: u64,
    /// What looks for twins now, by the name it has in the service's settings: `index`, or an engine.
    pub search: EngineName,
    /// What verifies taken pages now, by the name it has in the service's settings.
    pub verify: EngineName,
    /// Bytes that other connections' data structures hold for this one: filled in by the store.
    pub store_bytes: u64,
    /// What the guest's agent says.
    pub hints: Hints,
    /// Pages that are kept packed.
    pub packing: Packing,
    /// CPU time by stage.
    pub cpu_ns: CpuNs,
    /// Guest memory read by stage; only grows.
    pub bytes_read: BytesRead,
    /// How long a vCPU may have waited for the pages of a merge batch. (Not measured at the vCPU: an upper bound.)
    pub stop: Histogram,
    /// How long a writer may have waited for pages that the kernel had copied and that were merged.
    pub heal: Histogram,
    /// How long the pages of a range were away while its huge page was built.
    pub rebuild: Histogram,
    /// How long a managed copy-on-write fault took, from its delivery to the wake-up.
    pub break_latency: Histogram,
    /// What devices of engines that look for twins did.
    pub search_device: DeviceWork,
    /// What devices of engines that verify did.
    pub verify_device: DeviceWork,
}

/// The counters and gauges of a [`ServiceStats`], by name: no field can be forgotten.
macro_rules! numbers {
    ($stats:expr, $sum:expr; $($number:ident),*; $($text:ident),*) => {{
        let ServiceStats { $($number,)* $($text: _,)* hints, packing, cpu_ns, bytes_read, stop, heal, rebuild, break_latency, search_device, verify_device } = *$stats;
        [
            $((stringify!($number), $number),)*
            ("hints_agent", hints.agent),
            ("hints_free", hints.free),
            ("hints_file_clean", hints.file_clean),
            ("hints_file_dirty", hints.file_dirty),
            ("hints_anonymous", hints.anonymous),
            ("hints_kernel", hints.kernel),
            ("hints_never", hints.never),
            ("hints_worth", hints.worth),
            ("hints_soon", hints.soon),
            ("hints_merges_total", hints.merges_total),
            ("hints_wrong_total", hints.wrong_total),
            ("hints_agents_total", hints.agents_total),
            ("hints_agents_refused_total", hints.agents_refused_total),
            ("hints_agents_cut_off_total", hints.agents_cut_off_total),
            ("packing_pages", packing.pages),
            ("packing_bytes", packing.bytes),
            ("packing_packs_total", packing.packs_total),
            ("packing_touched_total", packing.touched_total),
            ("packing_early_total", packing.early_total),
            ("packing_brought_back_total", packing.brought_back_total),
            ("packing_broken_total", packing.broken_total),
            ("packing_rebuild_sum_ns", packing.rebuild.sum_ns),
            ("packing_rebuild_max_ns", packing.rebuild.max_ns),
            ("packing_stop_sum_ns", packing.stop.sum_ns),
            ("packing_stop_max_ns", packing.stop.max_ns),
            ("cpu_ns_total", cpu_ns.total()),
            ("bytes_read_total", bytes_read.total()),
            ("stop_sum_ns", stop.sum_ns),
            ("stop_max_ns", stop.max_ns),
            ("heal_sum_ns", heal.sum_ns),
            ("heal_max_ns", heal.max_ns),
            ("rebuild_sum_ns", rebuild.sum_ns),
            ("rebuild_max_ns", rebuild.max_ns),
            ("break_latency_sum_ns", break_latency.sum_ns),
            ("break_latency_max_ns", break_latency.max_ns),
            ("search_device_requests_total", search_device.requests),
            ("search_device_errors_total", $sum(&search_device.errors())),
            ("search_device_left_to_cpu_total", $sum(&search_device.left_to_cpu())),
            ("verify_device_requests_total", verify_device.requests),
            ("verify_device_errors_total", $sum(&verify_device.errors())),
            ("verify_device_left_to_cpu_total", $sum(&verify_device.left_to_cpu())),
        ]
    }};
}

impl ServiceStats {
    /// All counters and gauges by name, for a VMM's own counters; of what has parts the sum, of times sum and maximum. Collected
    /// into a map it can be serialised.
    pub fn numbers(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let sum = |parts: &[(&str, u64)]| parts.iter().fold(0, |sum: u64, (_, n)| sum.saturating_add(*n));
        let numbers = numbers!(self, sum; pages, pages_mapped, pages_zero, pages_unshared, pages_volatile, pages_new, pages_pinned, pages_broken, pages_restless, huge_ranges, huge_kept_hot, pages_given_up, huge_split, merges_total, zero_merges_total, breaks_kernel_total, breaks_managed_total, breaks_early_total, unmerged_total, mismatches_total, refused_pinned_total, refused_vmas_total, refused_swapped_total, refused_other_total, heals_total, heal_pinned_total, heal_contended_total, heal_failed_total, window_failures_total, published_total, huge_splits_total, huge_splits_rare_total, huge_whole_total, huge_contended_total, huge_rebuilt_total, huge_zero_total, rebuild_pinned_total, rebuild_memory_total, rebuild_other_total, samples_total, samples_used_total, passes_total, full_scans_total, pages_keyed_total, pages_hashed_total, searches_total, search_twins_total, search_failures_total, verifications_total, verify_failures_total, vmas, vmas_max, metadata_bytes, vma_bytes, reserve_pages, reserve_target, reserve_waits_total, waiting_writers, last_pass_ms, state, cpu_percent, pass_period_ms, stop_target_us, use_source, store_bytes; search, verify);
        numbers.into_iter()
    }

    /// Shared pages that were written, whoever copied them.
    pub fn breaks_total(&self) -> u64 {
        self.breaks_kernel_total.saturating_add(self.breaks_managed_total)
    }

    /// What tells the service which memory is used.
    pub fn use_source_name(&self) -> &'static str {
        let number = usize::try_from(self.use_source).unwrap_or(usize::MAX);
        USE_SOURCES.get(number).copied().unwrap_or("unknown")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_numbers_do_not_overflow() {
        let cpu = CpuNs {
            track: u64::MAX,
            key: 1,
            ..CpuNs::default()
        };
        assert_eq!(cpu.total(), u64::MAX);
        let stats = ServiceStats {
            breaks_kernel_total: u64::MAX,
            breaks_managed_total: 1,
            ..ServiceStats::default()
        };
        assert_eq!(stats.breaks_total(), u64::MAX);
    }

    #[test]
    fn numbers_have_names_of_their_own() {
        let stats = ServiceStats {
            pages_mapped: 7,
            ..ServiceStats::default()
        };
        let numbers: std::collections::BTreeMap<_, _> = stats.numbers().collect();
        assert_eq!(numbers.len(), stats.numbers().count());
        assert_eq!((numbers["pages_mapped"], numbers["pages"]), (7, 0));
    }
}
