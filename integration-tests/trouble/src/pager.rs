//! Threads that page memory out.
#![allow(unsafe_code)] // madvise

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const PAGE: usize = 4096;

/// Pages out ranges of this process, a few pages at a time in no order, until it is dropped.
#[derive(Debug)]
pub struct Pager {
    stop: Arc<AtomicBool>,
    calls: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Pager {
    /// Starts a thread that pages out what `ranges` tells, asked again from time to time; at most `most` pages a call,
    /// `pause` between two calls. A range may be unmapped meanwhile: no content changes by this.
    ///
    /// # Panics
    /// If there can be no thread.
    #[must_use]
    pub fn start(
        seed: u64,
        most: usize,
        pause: Duration,
        ranges: impl FnMut() -> Vec<Range<usize>> + Send + 'static,
    ) -> Self {
        Self::start_sparing(seed, most, pause, ranges, |_| false)
    }

    /// As [`start`](Self::start), but pages out no part of a range of which `spares` tells, just before, that it is to stay.
    ///
    /// # Panics
    /// If there can be no thread.
    #[must_use]
    pub fn start_sparing(
        seed: u64,
        most: usize,
        pause: Duration,
        mut ranges: impl FnMut() -> Vec<Range<usize>> + Send + 'static,
        mut spares: impl FnMut(&Range<usize>) -> bool + Send + 'static,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let calls = Arc::new(AtomicU64::new(0));
        let work = {
            let (stop, calls) = (stop.clone(), calls.clone());
            move || {
                let mut random = Random(seed);
                while !stop.load(Ordering::Relaxed) {
                    let ranges = ranges();
                    for _ in 0..256 {
                        if !ranges.is_empty() {
                            let range = &ranges[random.below(ranges.len())];
                            let part = part(range, most, &mut random);
                            if !spares(&part) {
                                page_out(&part);
                            }
                        }
                        calls.fetch_add(1, Ordering::Relaxed);
                        if !pause.is_zero() {
                            std::thread::sleep(pause);
                        }
                    }
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("pager".into())
            .spawn(work)
            .expect("a thread");
        Self {
            stop,
            calls,
            thread: Some(thread),
        }
    }

    /// Calls so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Some pages of a range.
fn part(range: &Range<usize>, most: usize, random: &mut Random) -> Range<usize> {
    let pages = range.len() / PAGE;
    let first = random.below(pages.max(1));
    let count = (1 + random.below(most.max(1))).min(pages - first.min(pages));
    range.start + first * PAGE..range.start + (first + count) * PAGE
}

/// Pages a range out, once. Pages in use for a moment may stay.
pub fn page_out(range: &Range<usize>) {
    // SAFETY: this advice changes no content; the kernel refuses what is not mapped.
    unsafe { libc::madvise(range.start as *mut _, range.len(), libc::MADV_PAGEOUT) };
}

/// How many pages of a range of this process are swapped out.
///
/// # Panics
/// If the kernel does not tell.
#[must_use]
pub fn swapped_out(range: &Range<usize>) -> usize {
    let mut entries = vec![0; range.len() / PAGE * 8];
    let pagemap = File::open("/proc/self/pagemap").expect("pagemap");
    let at = u64::try_from(range.start / PAGE * 8).expect("64 bits");
    pagemap.read_exact_at(&mut entries, at).expect("entries");
    // Bit 62 of an entry tells that the page is swapped, bit 63 that it is present.
    let is_out = |entry: &[u8; 8]| u64::from_ne_bytes(*entry) >> 62 == 1;
    entries.as_chunks().0.iter().filter(|entry| is_out(entry)).count()
}

/// A generator of numbers that are random enough (Knuth's MMIX constants).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % end
    }
}
