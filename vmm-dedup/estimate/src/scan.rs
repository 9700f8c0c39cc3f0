//! Reading all memories once, in batches, on several threads.

use crate::error::Error;
use crate::memory::Memory;
use crate::process::PAGE;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use vmm_dedup_protocol::PAGE_SIZE;

/// Bytes of a batch: it stays in a core's cache between being read and being hashed.
const BATCH: u64 = 256 << 10;

/// How to read.
pub struct Reading<'a> {
    /// Threads, at least one.
    pub threads: usize,
    /// Told now and then how many pages of how many are done, from any thread.
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl std::fmt::Debug for Reading<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reading")
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Which memory.
    pub(crate) memory: u32,
    /// Offset in its file, or address in its process.
    pub(crate) at: u64,
}

struct Batch {
    memory: u32,
    ranges: Vec<Range<u64>>,
    bytes: u64,
}

/// Shows every batch of pages to `see`, together with a state of the thread's own; returns those states.
/// `see` gets the places and, one after the other, the pages.
pub(crate) fn scan<S: Send>(
    memories: &[Memory],
    reading: &Reading<'_>,
    state: impl Fn() -> S + Sync,
    see: impl Fn(&mut S, Place, &[u8]) + Sync,
) -> Result<Vec<S>, Error> {
    let batches = batches(memories);
    let total = batches.iter().map(|batch| batch.bytes / PAGE).sum();
    let (next, done, failed) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let work = || -> Result<S, Error> {
        let mut state = state();
        let mut buffer = vec![0; usize::try_from(BATCH).unwrap_or(0)];
        while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
            if failed.load(Ordering::Relaxed) {
                break;
            }
            let read = memories[batch.memory as usize].read(&batch.ranges, &mut buffer);
            let read = read.inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            let pages = buffer[..read].chunks_exact(PAGE_SIZE);
            for (at, page) in batch.ranges.iter().flat_map(addresses).zip(pages) {
                let place = Place {
                    memory: batch.memory,
                    at,
                };
                see(&mut state, place, page);
            }
            let pages = batch.bytes / PAGE;
            (reading.progress)(done.fetch_add(pages, Ordering::Relaxed) + pages, total);
        }
        Ok(state)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..reading.threads.max(1)).map(|_| scope.spawn(work)).collect();
        let ended = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        // All are joined before the first error is returned.
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}

fn addresses(range: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
    range.clone().step_by(PAGE_SIZE)
}

impl Memory {
    /// Shows every page that is there to `see`, in order, until that fails.
    ///
    /// # Errors
    /// If the memory cannot be read (any more); or that of `see`.
    pub fn each_page<E: From<Error>>(&self, mut see: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut buffer = vec![0; usize::try_from(BATCH).unwrap_or(0)];
        for batch in batches(std::slice::from_ref(self)) {
            let read = self.read(&batch.ranges, &mut buffer)?;
            buffer[..read].chunks_exact(PAGE_SIZE).try_for_each(&mut see)?;
        }
        Ok(())
    }
}

/// All ranges, cut and gathered into batches.
fn batches(memories: &[Memory]) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    for (memory, number) in memories.iter().zip(0..) {
        let mut open = Batch {
            memory: number,
            ranges: Vec::new(),
            bytes: 0,
        };
        for range in memory.ranges() {
            let mut start = range.start;
            while start < range.end {
                let end = range.end.min(start + (BATCH - open.bytes));
                open.bytes += end - start;
                open.ranges.push(start..end);
                start = end;
                if open.bytes == BATCH {
                    let empty = Batch {
                        memory: number,
                        ranges: Vec::new(),
                        bytes: 0,
                    };
                    batches.push(std::mem::replace(&mut open, empty));
                }
            }
        }
        if open.bytes > 0 {
            batches.push(open);
        }
    }
    batches
}
