//! Chaos under swap: a thread pages out guest, scratch and store memory all the time, while guests write, restore and rest,
//! and the services merge, break, sample, give up zeros, and build huge pages again.
//!
//! Parts of huge pages are paged out in a few cases only, while these are away to be sampled: that splits them, and a service does
//! not build again what it has not split itself, so that soon no huge page would be left to split or to sample.

use crate::guests::{self, Exceptions, Size};
use crate::huge_chaos::{Outcome, boot, outcome};
use crate::store::StoreThread;
use crate::vm::Guest;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use vmm_dedup::ServiceStats;
use vmm_dedup_trouble::{Pager, Swap, Watchdog};

/// Pages paged out in one call, at most.
const MOST: usize = 32;
/// How long no guest may get on. (One that waits for ever is found by it, not one that is slow.)
const HUNG: Duration = Duration::from_secs(120);
const HUGE: usize = 2 << 20;
/// Huge pages, of some thirty, that are split by paging a part of them out while they are away.
const SPLIT_ASIDE: usize = 5;
/// Mappings of the service's own that are at least as large may be scratch memory.
const SCRATCH: usize = HUGE;

/// What is to happen under swap besides merges and breaks, at least. (A huge page that is built takes in 512 pages, some of them
/// from swap; a sample takes a huge page, or some of its pages, and puts them back.)
#[derive(Clone, Copy, Debug)]
pub struct AtLeast {
    /// Huge pages that are built again.
    pub rebuilt: u64,
    /// Samples.
    pub samples: u64,
    /// How long these are waited for: where memory is short there may be none.
    pub within: Duration,
}

/// What happened under swap.
#[derive(Clone, Copy, Debug)]
pub struct Swapped<O = Outcome> {
    /// What guests and services did.
    pub outcome: O,
    /// Pages that went to swap.
    pub pages_out: u64,
    /// Pages that came back.
    pub pages_in: u64,
}

/// What happens under swap while something is done.
fn counted<O>(what: impl FnOnce() -> O) -> Swapped<O> {
    let before = swapped_pages();
    let outcome = what();
    let after = swapped_pages();
    Swapped {
        outcome,
        pages_in: after.0 - before.0,
        pages_out: after.1 - before.1,
    }
}

/// Pages out the memory of guests, of their services and of the store.
fn page_out(guests: &[Guest]) -> Pager {
    let memory: Vec<Range<usize>> = guests.iter().flat_map(Guest::memory).collect();
    let huge = HugePages::open();
    let guests = memory.clone();
    let away = move |part: &Range<usize>| !guests.iter().any(|g| g.contains(&part.start));
    let mut left = SPLIT_ASIDE;
    Pager::start_sparing(
        1,
        MOST,
        Duration::ZERO,
        move || ranges(&memory),
        move |part| {
            let is_huge = huge.meet(part);
            let splits = is_huge && left > 0 && away(part);
            if splits {
                left -= 1;
                eprintln!("a part of a huge page that is away is paged out");
            }
            is_huge && !splits
        },
    )
}

/// Two guests with kernel breaks and runs with exceptions.
///
/// # Panics
/// As [`guests::exceptions`], or if they hang.
#[must_use]
pub fn exceptions(seed: u64, swap: &Swap) -> Swapped<Exceptions> {
    let last = swap.clone();
    let _watchdog = Watchdog::start(2 * HUNG, move || last.off());
    counted(|| guests::exceptions_beside(seed, page_out))
}

/// Two guests with the same pages and zero pages, until `size.merges` pages were merged, as many breaks done, and memory sampled and
/// huge pages built again as often as is wanted.
///
/// # Panics
/// If a guest reports a wrong byte or does not get on, or the wanted numbers are not reached in time.
#[must_use]
pub fn chaos(size: Size, least: AtLeast, swap: &Swap) -> Swapped {
    counted(|| merge_and_break(size, least, swap))
}

fn merge_and_break(size: Size, least: AtLeast, swap: &Swap) -> Outcome {
    let store = StoreThread::start();
    let guests = boot(&store, size);
    let last = swap.clone();
    let watchdog = Watchdog::start(HUNG, move || last.off());
    // Until the guests have verified their memory.
    let _pager = page_out(&guests);
    let (start, mut shown) = (Instant::now(), Instant::now());
    let mut seen = vec![0; guests.len()];
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let done: Vec<u64> = guests.iter().map(Guest::progress).collect();
        if done.iter().zip(&seen).all(|(now, before)| now > before) {
            watchdog.feed();
            seen = done;
        }
        let stats: Vec<ServiceStats> = guests.iter().map(Guest::stats).collect();
        let sum = |field: fn(&ServiceStats) -> u64| stats.iter().map(field).sum::<u64>();
        let merges = sum(|s| s.merges_total + s.zero_merges_total);
        let breaks = sum(ServiceStats::breaks_total);
        let (rebuilt, samples) = (sum(|s| s.huge_rebuilt_total), sum(|s| s.samples_total));
        let is_reached = rebuilt >= least.rebuilt && samples >= least.samples;
        let enough = is_reached || start.elapsed() >= least.within;
        if merges.min(breaks) >= size.merges && enough {
            break;
        }
        assert!(
            start.elapsed() < size.patience,
            "only {merges} merges and {breaks} breaks of {}, {rebuilt} huge pages and {samples} samples of {least:?} in time: {stats:?}",
            size.merges
        );
        if shown.elapsed() > Duration::from_secs(10) {
            eprintln!(
                "{merges} merges and {breaks} breaks of {} after {} s, {rebuilt} huge pages built ({} pinned, {} memory, {} other), {samples} samples ({} used), {} split",
                size.merges,
                start.elapsed().as_secs(),
                sum(|s| s.rebuild_pinned_total),
                sum(|s| s.rebuild_memory_total),
                sum(|s| s.rebuild_other_total),
                sum(|s| s.samples_used_total),
                sum(|s| s.huge_split),
            );
            shown = Instant::now();
        }
    }
    outcome(guests)
}

/// What is paged out: guests, mappings of the store besides, and what may be scratch memory.
fn ranges(guests: &[Range<usize>]) -> Vec<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let hex = |text: &str| usize::from_str_radix(text, 16).ok();
    let besides = maps.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let range = hex(start)?..hex(end)?;
        let access = fields.next()?;
        let name = fields.nth(3).unwrap_or_default();
        let is_store = name.starts_with("/memfd:vmm-dedup");
        let is_scratch = name.is_empty() && access == "rw-p" && range.len() >= SCRATCH;
        let in_guest = guests.iter().any(|g| g.start < range.end && range.start < g.end);
        ((is_store || is_scratch) && !in_guest).then_some(range)
    });
    let mut all: Vec<Range<usize>> = besides.collect();
    let chunks = guests.iter().flat_map(|guest| {
        let starts = (guest.start / HUGE * HUGE..guest.end).step_by(HUGE);
        starts.map(|start| start.max(guest.start)..guest.end.min(start + HUGE))
    });
    let guests: Vec<Range<usize>> = chunks.collect();
    // As often as all the rest.
    let times = all.len().div_ceil(guests.len().max(1)).max(1);
    all.extend(std::iter::repeat_n(guests, times).flatten());
    all
}

/// Tells where huge pages are in this process. Source: Linux, Documentation/admin-guide/mm/pagemap.rst.
struct HugePages {
    /// An entry for each page of this process.
    pagemap: File,
    /// Flags of each page of the machine.
    flags: File,
}

impl HugePages {
    fn open() -> Self {
        let open = |path: &str| File::open(path).unwrap_or_else(|error| panic!("{path}: {error}"));
        Self {
            pagemap: open("/proc/self/pagemap"),
            flags: open("/proc/kpageflags"),
        }
    }

    /// Whether a part of at most 2 MiB begins or ends in a huge page.
    fn meet(&self, part: &Range<usize>) -> bool {
        !part.is_empty() && (self.holds(part.start) || self.holds(part.end - 1))
    }

    fn holds(&self, address: usize) -> bool {
        const PRESENT: u64 = 1 << 63;
        const FRAME: u64 = (1 << 55) - 1;
        const THP: u64 = 1 << 22;
        let entry = |file: &File, at: u64| {
            let mut entry = [0; 8];
            // What is not mapped has no entry.
            let read = file.read_exact_at(&mut entry, at * 8);
            read.map_or(0, |()| u64::from_ne_bytes(entry))
        };
        let page = entry(&self.pagemap, (address / 4096) as u64);
        page & PRESENT != 0 && entry(&self.flags, page & FRAME) & THP != 0
    }
}

/// Pages that came from swap and went there, on this machine since it was started.
fn swapped_pages() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let count = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
    };
    (count("pswpin "), count("pswpout "))
}
