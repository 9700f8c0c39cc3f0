//! Work on all pages, in pieces, on several threads.

use super::gather::Gathered;
use crate::error::Error;
use crate::scan::Reading;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Pages of a piece. They follow one another, so that the neighbours of most pages are in it.
const PIECE: u32 = 2048;

/// The pages, and who is told how far the work is.
pub(super) struct Work<'a> {
    pub(super) pages: &'a Gathered<'a>,
    reading: &'a Reading<'a>,
    /// Pages times steps.
    total: u64,
    done: AtomicU64,
}

impl<'a> Work<'a> {
    /// All pages will be worked on so many times.
    pub(super) fn new(pages: &'a Gathered<'a>, reading: &'a Reading<'a>, steps: u64) -> Self {
        Self {
            pages,
            reading,
            total: pages.len() as u64 * steps,
            done: AtomicU64::new(0),
        }
    }

    /// Has all pages worked on; returns what was made of each piece, in order. `make` makes what a thread needs.
    pub(super) fn on_all<S, T: Send>(
        &self,
        make: impl Fn() -> Result<S, Error> + Sync,
        work: impl Fn(&mut S, Range<u32>) -> Result<T, Error> + Sync,
    ) -> Result<Vec<T>, Error> {
        let count = u32::try_from(self.pages.len()).unwrap_or(u32::MAX);
        let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
        let pieces = Mutex::new(Vec::new());
        let thread = || -> Result<(), Error> {
            let mut state = make()?;
            while !failed.load(Ordering::Relaxed) {
                let piece = u32::try_from(next.fetch_add(PIECE.into(), Ordering::Relaxed));
                let Some(first) = piece.ok().filter(|first| *first < count) else {
                    break;
                };
                let range = first..count.min(first.saturating_add(PIECE));
                let pages = u64::from(range.end - first);
                let made = work(&mut state, range).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
                if let Ok(mut pieces) = pieces.lock() {
                    pieces.push((first, made));
                }
                let done = self.done.fetch_add(pages, Ordering::Relaxed) + pages;
                (self.reading.progress)(done, self.total);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.reading.threads.max(1))
                .map(|_| scope.spawn(thread))
                .collect();
            let ended = threads.into_iter().map(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            // All are joined before the first error is returned.
            ended
                .collect::<Vec<_>>()
                .into_iter()
                .collect::<Result<(), Error>>()
        })?;
        let mut pieces = pieces.into_inner().unwrap_or_default();
        pieces.sort_unstable_by_key(|(first, _)| *first);
        Ok(pieces.into_iter().map(|(_, made)| made).collect())
    }
}
