//! Which metric shows which field of a service's account.

use prometheus_client::registry::Unit;
use vmm_dedup_protocol::stats::{CpuNs, DeviceWork, Histogram, ServiceStats};

/// A field of the account.
type Get = fn(&ServiceStats) -> u64;

/// One metric of one field.
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) unit: Option<Unit>,
    pub(super) get: Get,
}

/// One metric of several fields, told apart by a label.
pub(super) struct Labelled {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) unit: Option<Unit>,
    pub(super) label: &'static str,
    pub(super) series: &'static [(&'static str, Get)],
}

const fn plain(name: &'static str, help: &'static str, get: Get) -> Field {
    Field {
        name,
        help,
        unit: None,
        get,
    }
}

const fn bytes(name: &'static str, help: &'static str, get: Get) -> Field {
    Field {
        name,
        help,
        unit: Some(Unit::Bytes),
        get,
    }
}

pub(super) static GAUGES: &[Field] = &[
    plain("pages", "Guest pages under the service", |s| s.pages),
    plain("pages_mapped", "Pages that map a page of the store", |s| {
        s.pages_mapped
    }),
    plain("pages_zero", "Pages replaced by the zero page", |s| s.pages_zero),
    plain("pages_unshared", "Pages with a key and no twin", |s| {
        s.pages_unshared
    }),
    plain(
        "pages_volatile",
        "Pages that change too often to be shared",
        |s| s.pages_volatile,
    ),
    plain("pages_new", "Pages written lately, not keyed yet", |s| {
        s.pages_new
    }),
    plain(
        "pages_pinned",
        "Pages that were pinned at the last try to share them",
        |s| s.pages_pinned,
    ),
    plain(
        "pages_broken",
        "Private pages in mappings of the store, copied by the kernel after sharing or left out of a run",
        |s| s.pages_broken,
    ),
    plain(
        "pages_restless",
        "Pages that are left alone for a while, since sharing them did not last",
        |s| s.pages_restless,
    ),
    plain("huge_ranges", "2 MiB ranges mapped by one huge page", |s| {
        s.huge_ranges
    }),
    plain(
        "huge_kept_hot",
        "Huge pages kept for speed: repetitive, but in use",
        |s| s.huge_kept_hot,
    ),
    plain(
        "pages_given_up",
        "Subpages of those that look repeated: memory given up for speed",
        |s| s.pages_given_up,
    ),
    plain("huge_split", "2 MiB ranges split for sharing", |s| s.huge_split),
    plain("vmas", "VMAs that merging added", |s| s.vmas),
    plain("vmas_max", "Most VMAs that merging may add", |s| s.vmas_max),
    bytes("metadata", "Bookkeeping of the service", |s| s.metadata_bytes),
    bytes("vma", "Kernel memory of the added VMAs, estimated", |s| {
        s.vma_bytes
    }),
    bytes("store_held", "What the store holds for the service", |s| {
        s.store_bytes
    }),
    plain("reserve_pages", "Pages in the copy-on-write reserve", |s| {
        s.reserve_pages
    }),
    plain(
        "reserve_target_pages",
        "Pages that the reserve should have",
        |s| s.reserve_target,
    ),
    plain(
        "hint_never_pages",
        "Frames that the guest has marked never to be shared",
        |s| s.hints.never,
    ),
    plain(
        "hint_worth_pages",
        "Frames that the guest has marked worth sharing",
        |s| s.hints.worth,
    ),
    plain(
        "hint_soon_pages",
        "Frames that the guest has marked soon overwritten",
        |s| s.hints.soon,
    ),
    plain("hint_free_pages", "Frames that the guest says are free", |s| {
        s.hints.free
    }),
    plain(
        "hint_file_clean_pages",
        "Frames that the guest says hold a file as it is on the disk",
        |s| s.hints.file_clean,
    ),
    plain(
        "hint_file_dirty_pages",
        "Frames that the guest says hold other pieces of files",
        |s| s.hints.file_dirty,
    ),
    plain(
        "hint_anonymous_pages",
        "Frames that the guest says hold memory of programs",
        |s| s.hints.anonymous,
    ),
    plain(
        "hint_kernel_pages",
        "Frames that the guest says are its kernel's own",
        |s| s.hints.kernel,
    ),
    plain(
        "pages_packed",
        "Pages that are kept in fewer bytes until somebody touches them",
        |s| s.packing.pages,
    ),
    bytes("packing", "Memory that packed pages lie in", |s| s.packing.bytes),
    plain("waiting_writers", "Writers that wait for the reserve now", |s| {
        s.waiting_writers
    }),
];

pub(super) static COUNTERS: &[Field] = &[
    plain("merges", "Pages merged with a page of the store", |s| {
        s.merges_total
    }),
    plain("zero_merges", "Pages replaced by the zero page", |s| {
        s.zero_merges_total
    }),
    plain(
        "mismatches",
        "Pages taken whose content had changed, and put back",
        |s| s.mismatches_total,
    ),
    plain(
        "window_failures",
        "Calls of the kernel on guest memory that failed, and were got over",
        |s| s.window_failures_total,
    ),
    plain(
        "breaks_early",
        "Of the sharing broken, that which had not lasted long enough to pay",
        |s| s.breaks_early_total,
    ),
    plain(
        "unmerged",
        "Shared pages that nobody had written and that the service made private again",
        |s| s.unmerged_total,
    ),
    plain("packs", "Pages that were packed", |s| s.packing.packs_total),
    plain(
        "packed_early",
        "Packed pages that were touched before they had rested long enough",
        |s| s.packing.early_total,
    ),
    plain(
        "packed_broken",
        "Packed pages whose bytes were broken, so that the guest met a memory error",
        |s| s.packing.broken_total,
    ),
    plain("published", "Pages handed to the store", |s| s.published_total),
    plain(
        "heals",
        "Of the pages merged, those that the kernel had copied on write",
        |s| s.heals_total,
    ),
    plain("huge_splits", "Huge pages split for sharing", |s| {
        s.huge_splits_total
    }),
    plain(
        "huge_whole",
        "Of the huge pages split, those of which every page was merged at once",
        |s| s.huge_whole_total,
    ),
    plain(
        "huge_contended",
        "Times that a huge page was given back unmerged, since somebody waited for it",
        |s| s.huge_contended_total,
    ),
    plain("huge_rebuilt", "Huge pages built again for use", |s| {
        s.huge_rebuilt_total
    }),
    plain("huge_zero", "Huge pages of zeros given up as a whole", |s| {
        s.huge_zero_total
    }),
    plain(
        "hint_merges",
        "Of the pages merged, those that the guest had called worth sharing, or pieces of files as they are on the disk",
        |s| s.hints.merges_total,
    ),
    plain(
        "hint_wrong",
        "Pages that were written although the guest had said that they are free, or worth sharing",
        |s| s.hints.wrong_total,
    ),
    plain("passes", "Passes begun", |s| s.passes_total),
    plain("full_scans", "Times that every range was looked at", |s| {
        s.full_scans_total
    }),
    plain("pages_keyed", "Pages whose key lines were read", |s| {
        s.pages_keyed_total
    }),
    plain("pages_hashed", "Pages hashed whole", |s| s.pages_hashed_total),
    plain("searches", "Pages that an engine was asked for a twin of", |s| {
        s.searches_total
    }),
    plain("search_twins", "Slots that the engine proposed", |s| {
        s.search_twins_total
    }),
    plain(
        "search_failures",
        "Times that an engine failed or could not be had, and the index took its place",
        |s| s.search_failures_total,
    ),
    plain(
        "verifications",
        "Taken pages that an engine other than the CPU has compared with their slots",
        |s| s.verifications_total,
    ),
    plain(
        "verify_failures",
        "Times that an engine failed or could not be had, and the CPU verified in its place",
        |s| s.verify_failures_total,
    ),
    plain("reserve_waits", "Writers that had to wait for the reserve", |s| {
        s.reserve_waits_total
    }),
];

pub(super) static LABELLED: &[Labelled] = &[
    Labelled {
        name: "huge_split_reasons",
        help: "Huge pages split for sharing: not used, or used rarely and with many twins",
        unit: None,
        label: "reason",
        series: &[
            ("unused", |s| {
                s.huge_splits_total.saturating_sub(s.huge_splits_rare_total)
            }),
            ("rarely_used", |s| s.huge_splits_rare_total),
        ],
    },
    Labelled {
        name: "rebuild_refusals",
        help: "Huge pages that could not be built again",
        unit: None,
        label: "reason",
        series: &[
            ("pinned", |s| s.rebuild_pinned_total),
            ("memory", |s| s.rebuild_memory_total),
            ("other", |s| s.rebuild_other_total),
        ],
    },
    Labelled {
        name: "use_samples",
        help: "2 MiB ranges whose use was sampled",
        unit: None,
        label: "result",
        series: &[
            ("used", |s| s.samples_used_total),
            ("unused", |s| s.samples_total.saturating_sub(s.samples_used_total)),
        ],
    },
    Labelled {
        name: "breaks",
        help: "Shared pages that were written, copied by the kernel or by the service",
        unit: None,
        label: "mode",
        series: &[
            ("kernel", |s| s.breaks_kernel_total),
            ("managed", |s| s.breaks_managed_total),
        ],
    },
    Labelled {
        name: "refusals",
        help: "Pages that could not be shared",
        unit: None,
        label: "reason",
        series: &[
            ("pinned", |s| s.refused_pinned_total),
            ("vmas", |s| s.refused_vmas_total),
            ("swapped", |s| s.refused_swapped_total),
            ("other", |s| s.refused_other_total),
        ],
    },
    Labelled {
        name: "heal_refusals",
        help: "Pages that the kernel had copied on write and that were not merged: perhaps pinned, somebody waited to write, or what tells of pins failed",
        unit: None,
        label: "reason",
        series: &[
            ("pinned", |s| s.heal_pinned_total),
            ("contended", |s| s.heal_contended_total),
            ("failed", |s| s.heal_failed_total),
        ],
    },
    Labelled {
        name: "unpacks",
        help: "Packed pages that came back: since somebody touched them or their neighbours, or for the service's own reasons",
        unit: None,
        label: "cause",
        series: &[
            ("touched", |s| s.packing.touched_total),
            ("other", |s| s.packing.brought_back_total),
        ],
    },
    Labelled {
        name: "agents",
        help: "Guests' agents that came: let in, not let in since they came too often, and of those let in cut off for what they sent",
        unit: None,
        label: "result",
        series: &[
            ("let_in", |s| s.hints.agents_total),
            ("refused", |s| s.hints.agents_refused_total),
            ("cut_off", |s| s.hints.agents_cut_off_total),
        ],
    },
    Labelled {
        name: "read",
        help: "Guest memory read",
        unit: Some(Unit::Bytes),
        label: "stage",
        series: &[
            ("key", |s| s.bytes_read.key),
            ("hash", |s| s.bytes_read.hash),
            ("publish", |s| s.bytes_read.publish),
            ("verify", |s| s.bytes_read.verify),
        ],
    },
    Labelled {
        name: "device_requests",
        help: "Requests that engines gave their devices",
        unit: None,
        label: "work",
        series: &[
            ("search", |s| s.search_device.requests),
            ("verify", |s| s.verify_device.requests),
        ],
    },
    Labelled {
        name: "device_batches",
        help: "Batches of requests that engines gave their devices",
        unit: None,
        label: "work",
        series: &[
            ("search", |s| s.search_device.batches),
            ("verify", |s| s.verify_device.batches),
        ],
    },
    Labelled {
        name: "device_read",
        help: "What the requests to devices were to read",
        unit: Some(Unit::Bytes),
        label: "work",
        series: &[
            ("search", |s| s.search_device.bytes),
            ("verify", |s| s.verify_device.bytes),
        ],
    },
    Labelled {
        name: "device_retries",
        help: "Requests that devices went on with after a page fault, that full queues turned away, or that were given once more for other reasons",
        unit: None,
        label: "reason",
        series: &[
            ("page_fault", |s| of_both(s, |device| device.faults)),
            ("full", |s| of_both(s, |device| device.full)),
            ("other", |s| of_both(s, |device| device.again)),
        ],
    },
    Labelled {
        name: "device_errors",
        help: "Requests to devices that cannot be done, silences, resets, and queues that were given up",
        unit: None,
        label: "kind",
        series: &[
            ("unreadable", |s| of_both(s, |device| device.unreadable)),
            ("refused", |s| of_both(s, |device| device.refused)),
            ("late", |s| of_both(s, |device| device.late)),
            ("reset", |s| of_both(s, |device| device.resets)),
            ("queue_lost", |s| of_both(s, |device| device.queues_lost)),
        ],
    },
    Labelled {
        name: "device_left_to_cpu",
        help: "Pages that the CPU compared or keyed in a device's place: it is sooner, or the device has no room or no answer",
        unit: None,
        label: "reason",
        series: &[
            ("sooner", |s| of_both(s, |device| device.cpu_sooner)),
            ("instead", |s| of_both(s, |device| device.cpu_instead)),
        ],
    },
];

/// A number of the devices of both kinds of engines.
fn of_both(s: &ServiceStats, get: fn(&DeviceWork) -> u64) -> u64 {
    get(&s.search_device).saturating_add(get(&s.verify_device))
}

/// Name, help and field of a histogram.
type HistogramField = (&'static str, &'static str, fn(&ServiceStats) -> &Histogram);

pub(super) static HISTOGRAMS: &[HistogramField] = &[
    (
        "stop",
        "How long a vCPU may have waited for the pages of a merge batch",
        |s| &s.stop,
    ),
    (
        "heal",
        "How long a writer may have waited for pages that the kernel had copied and that were merged",
        |s| &s.heal,
    ),
    (
        "rebuild",
        "How long the pages of a range were away while its huge page was built",
        |s| &s.rebuild,
    ),
    (
        "unpack",
        "How long somebody waited who touched a packed page, from when his fault was read",
        |s| &s.packing.rebuild,
    ),
    (
        "pack_stop",
        "How long pages were away while they were compared with what they had been packed to",
        |s| &s.packing.stop,
    ),
    ("break", "How long a managed copy-on-write fault took", |s| {
        &s.break_latency
    }),
    (
        "search_device",
        "How long requests and batches of searches took until their end was seen",
        |s| &s.search_device.latency,
    ),
    (
        "verify_device",
        "How long requests and batches of verifications took until their end was seen",
        |s| &s.verify_device.latency,
    ),
];

/// CPU time by stage.
pub(super) fn stages(cpu: &CpuNs) -> [(&'static str, u64); 8] {
    [
        ("track", cpu.track),
        ("key", cpu.key),
        ("search", cpu.search),
        ("hash", cpu.hash),
        ("store", cpu.store),
        ("merge", cpu.merge),
        ("break", cpu.break_),
        ("monitor", cpu.monitor),
    ]
}
