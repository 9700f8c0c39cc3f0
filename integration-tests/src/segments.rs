//! Segments of the stores of this process: what of them is in memory, and how they are paged out.
#![allow(unsafe_code)] // madvise, mincore

use std::ops::Range;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::{PAGE_SIZE, SEGMENT_BYTES, SEGMENT_NAME};
use vmm_dedup_trouble::page_out;

/// How long the kernel may use a page for a moment, so that it stays.
const PATIENCE: Duration = Duration::from_secs(10);

/// A mapping of a segment's file.
#[derive(Debug)]
struct Mapping {
    range: Range<usize>,
    file: String,
    /// The store's own: nobody else may write.
    of_store: bool,
}

/// The segments that the stores of this process have now.
#[derive(Debug)]
pub struct Segments {
    /// The store's mapping of each, without what is behind the slots.
    of_store: Vec<Range<usize>>,
    others: Vec<Range<usize>>,
}

impl Segments {
    /// As they are mapped now.
    ///
    /// # Panics
    /// If /proc is not there.
    #[must_use]
    pub fn now() -> Self {
        let text = std::fs::read_to_string("/proc/self/maps").expect("/proc is there");
        let (of_store, others): (Vec<_>, Vec<_>) = text
            .lines()
            .filter_map(mapping)
            .partition(|mapping| mapping.of_store);
        let live = |mapping: &Mapping| of_store.iter().any(|own| own.file == mapping.file);
        let others = others.into_iter().filter(live).map(|mapping| mapping.range);
        let others = others.collect();
        let slots = |own: &Mapping| own.range.start..own.range.end.min(own.range.start + SEGMENT_BYTES);
        Self {
            of_store: of_store.iter().map(slots).collect(),
            others,
        }
    }

    /// Pages of slots that are in memory.
    ///
    /// # Panics
    /// If a segment is gone.
    #[must_use]
    pub fn resident(&self) -> usize {
        let resident = |range: &Range<usize>| {
            let mut pages = vec![0u8; range.len() / PAGE_SIZE];
            // SAFETY: a byte is written for each page, and there are so many.
            let asked = unsafe { libc::mincore(range.start as *mut _, range.len(), pages.as_mut_ptr()) };
            assert_eq!(asked, 0, "{}", std::io::Error::last_os_error());
            pages.iter().filter(|page| **page & 1 == 1).count()
        };
        self.of_store.iter().map(resident).sum()
    }

    /// Pages all slots out. No guest may have pages of its own in mappings of them.
    ///
    /// # Panics
    /// If some stay.
    pub fn page_out(&self) {
        let start = Instant::now();
        while self.resident() > 0 {
            assert!(
                start.elapsed() < PATIENCE,
                "{} pages stay in memory",
                self.resident()
            );
            // The kernel leaves alone what several mappings show, and what none shows.
            for range in &self.others {
                // SAFETY: what a mapping of a file shows is in the file; the caller vouches for private ones.
                unsafe { libc::madvise(range.start as *mut _, range.len(), libc::MADV_DONTNEED) };
            }
            for range in &self.of_store {
                touch(range);
                page_out(range);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Maps the pages of a range that are in memory.
fn touch(range: &Range<usize>) {
    let mut pages = vec![0u8; range.len() / PAGE_SIZE];
    // SAFETY: as in `resident`.
    unsafe { libc::mincore(range.start as *mut _, range.len(), pages.as_mut_ptr()) };
    let resident = (0..).zip(&pages).filter(|(_, page)| **page & 1 == 1);
    for (page, _) in resident {
        // SAFETY: it is mapped and readable.
        unsafe { ((range.start + page * PAGE_SIZE) as *const u8).read_volatile() };
    }
}

/// A line of maps, if it is of a segment. Source: Linux, Documentation/filesystems/proc.rst.
fn mapping(line: &str) -> Option<Mapping> {
    let hex = |text: &str| usize::from_str_radix(text, 16).ok();
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let access = fields.next()?;
    let file = fields.nth(2)?;
    let of_segment = fields.next()?.ends_with(SEGMENT_NAME);
    of_segment.then_some(Mapping {
        range: hex(start)?..hex(end)?,
        file: file.to_owned(),
        of_store: access == "rw-s",
    })
}
