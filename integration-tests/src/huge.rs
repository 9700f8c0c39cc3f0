//! Huge pages of this process.

use crate::memory::Pages;
use std::time::{Duration, Instant};
use vmm_dedup::{DedupService, ServiceStats};

/// Small pages in a huge one.
pub const HUGE_PAGES: usize = 512;

/// KiB of the memory that private huge pages map (AnonHugePages).
///
/// # Panics
/// If /proc/self/smaps cannot be read.
#[must_use]
pub fn huge_kib(pages: &Pages) -> usize {
    smaps_kib(pages, "AnonHugePages:")
}

/// KiB of the memory that huge pages of the store map (ShmemPmdMapped).
///
/// # Panics
/// If /proc/self/smaps cannot be read.
#[must_use]
pub fn huge_kib_of_store(pages: &Pages) -> usize {
    smaps_kib(pages, "ShmemPmdMapped:")
}

fn smaps_kib(pages: &Pages, field: &str) -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let (start, end) = (pages.address(0), pages.address(pages.count() - 1) + 4096);
    let (mut inside, mut sum) = (false, 0);
    for line in smaps.lines() {
        if let Some((from, to)) = line
            .split_ascii_whitespace()
            .next()
            .and_then(|range| range.split_once('-'))
        {
            let parse = |hex: &str| usize::from_str_radix(hex, 16).unwrap_or(0);
            inside = parse(from) < end && parse(to) > start;
        } else if inside && let Some(kib) = line.strip_prefix(field) {
            sum += kib
                .trim()
                .trim_end_matches(" kB")
                .parse::<usize>()
                .expect("a number");
        }
    }
    sum
}

/// Waits for what a service's account tells.
///
/// # Panics
/// After a minute.
pub fn wait(service: &DedupService, what: &str, mut done: impl FnMut(&ServiceStats) -> bool) {
    let start = Instant::now();
    while !done(&service.stats()) {
        let stats = service.stats();
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: {stats:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether huge pages map all of it.
#[must_use]
pub fn are_huge(pages: &Pages) -> bool {
    huge_kib(pages) * 1024 >= pages.count() * 4096
}

/// Returns from a test, saying so, where the kernel gave no huge pages. In CI that is a failure.
#[macro_export]
macro_rules! huge_pages_or_skip {
    ($pages:expr) => {
        if !$crate::huge::are_huge($pages) {
            assert!(std::env::var_os("CI").is_none(), "no huge pages in CI");
            eprintln!("SKIPPED: the kernel gave no huge pages");
            return;
        }
    };
}
