//! Sampling by taking: memory is moved away for some milliseconds, and whoever uses it says so by waiting for it.
//!
//! This is slide 11's "reset, sleep, check" without access bits, which no process can read of its own memory. It needs
//! nothing but what merging needs, and sees what access bits of the host's page tables do not show: a guest's reads
//! through KVM's own tables.
//!
//! # Why nothing is lost
//!
//! Taking is that of `crate::merge::merger`: the addresses are registered for missing pages, and UFFDIO_MOVE moves what is
//! there, refusing (EBUSY) what is pinned. Nobody can reach a page that we hold, so it goes back as it was, to a place
//! that is still empty: who came meanwhile waits there. He waits until this thread has seen his fault and put the page
//! back, tens of microseconds, since it does nothing else meanwhile and is not preempted by normal threads. What nobody
//! wanted goes back at the end. Like merging, it must put back: the page exists nowhere else.
//!
//! # How soon it is missed
//!
//! A thread that waits for one range touches no other, and with many ranges away it waits many times. That time counts for
//! none of them: it would make what comes last look idle. A wait takes at least as long as the shortest time between two
//! faults of the window, of which so much is taken off for every fault before.
//!
//! A huge page moves as one mapping and stays one (1 to 2 us each way), provided that its destination has no page table.

use crate::error::Error;
use crate::sys::huge_scratch::HugeScratch;
use crate::sys::page_size::{HUGE_SIZE, PAGE_SIZE, bytes};
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate::{move_away, put_back_pages};
use crate::sys::sched::Urgent;
use crate::sys::uffd::{Mode, MoveError, Uffd};
use crate::track::access::{AccessMonitor, PROBES, Target, Use};
use crate::track::access_source::UseSource;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ranges taken at a time. A guest that uses all of them waits for each once.
pub(crate) const BATCH: usize = 64;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct TakeAndWait {
    tracker: Arc<Uffd>,
    pagemap: Pagemap,
    scratch: HugeScratch,
    /// Small pages were in it, or still are: a huge page would be split to fit in.
    stained: bool,
}

/// A target of which something is, or was, away.
#[derive(Debug)]
struct Taken {
    target: Target,
    /// Its place in scratch memory.
    place: usize,
    /// Offsets that are away.
    away: Vec<Range<usize>>,
    /// What is known of its use.
    used: Option<Use>,
}

/// Faults that were read at once.
struct Missed {
    /// Since the beginning of the window.
    after: Duration,
    /// Who was missed.
    wanted: Vec<usize>,
}

/// Notes how long the guest had run before it missed what was taken.
fn note_missed(taken: &mut [Taken], missed: &[Missed]) {
    let waited = missed.windows(2).map(|pair| pair[1].after - pair[0].after).min();
    let waited = waited.unwrap_or_default();
    for (before, at) in (0..).zip(missed) {
        let ran = at.after.saturating_sub(waited * before);
        for which in &at.wanted {
            let used = &mut taken[*which].used;
            // Two vCPUs may ask for one range.
            if *used == Some(Use::None) {
                *used = Some(Use::After(ran));
            }
        }
    }
}

impl TakeAndWait {
    pub(crate) fn new(tracker: Arc<Uffd>) -> Result<Self, Error> {
        let scratch = HugeScratch::new(&tracker, BATCH).map_err(Error::Scratch)?;
        Ok(Self {
            tracker,
            pagemap: Pagemap::open()?,
            scratch,
            stained: false,
        })
    }

    fn sample_batch(&mut self, targets: &[Target], window: Duration) -> io::Result<Vec<Option<Use>>> {
        let mut done: Vec<Taken> = Vec::with_capacity(targets.len());
        let mut broken = None;
        let urgent = Urgent::begin();
        for (number, target) in targets.iter().enumerate() {
            let place = self.scratch.place(number);
            match self.take(*target, place) {
                Ok(taken) => done.push(taken),
                Err(error) => {
                    broken = Some(error);
                    break;
                }
            }
        }
        self.wait(&mut done, window);
        for taken in &mut done {
            self.put_back(taken);
            self.disarm(taken.target);
        }
        drop(urgent);
        for taken in &done {
            // Who missed it may have got a page table, for want of a huge page: then it was split to fit in.
            let missed = matches!(taken.used, Some(Use::After(_)));
            if let (true, Target::Huge(start)) = (missed, taken.target) {
                self.stained |= !self.pagemap.is_huge(start);
            }
        }
        if self.stained {
            match HugeScratch::new(&self.tracker, BATCH) {
                Ok(fresh) => (self.scratch, self.stained) = (fresh, false),
                Err(error) => log::debug!("no fresh scratch memory: {error}"),
            }
        }
        match broken {
            Some(error) => Err(error),
            None => Ok(done.into_iter().map(|taken| taken.used).collect()),
        }
    }

    /// Takes a target, or what can be had of it. On an error it is as it was.
    fn take(&mut self, target: Target, place: usize) -> io::Result<Taken> {
        let pieces = pieces_of(target);
        for (n, piece) in pieces.iter().enumerate() {
            let at = target.start() + piece.start;
            if let Err(error) = self.tracker.register(at, piece.len(), Mode::Missing) {
                pieces[..n]
                    .iter()
                    .for_each(|piece| self.disarm_piece(target.start(), piece));
                return Err(error);
            }
        }
        let mut taken = Taken {
            target,
            place,
            away: Vec::new(),
            used: None,
        };
        for piece in &pieces {
            let (moved, error) = move_away(
                &self.tracker,
                target.start() + piece.start,
                place + piece.start,
                piece.len(),
            );
            if moved > 0 {
                self.stained |= moved < HUGE_SIZE;
                taken.away.push(piece.start..piece.start + moved);
            }
            if error == Some(MoveError::Pinned) {
                taken.used = Some(Use::AT_ONCE); // a device works on it
            }
        }
        let whole = match target {
            Target::Huge(_) => taken.away.first().is_some_and(|away| away.len() == HUGE_SIZE),
            Target::Split(_) => !taken.away.is_empty(),
        };
        if whole {
            taken.used = Some(Use::None); // until somebody comes
        } else {
            // It is not what it was, or in use. Nobody shall wait at places that stay empty.
            self.put_back(&mut taken);
            self.disarm(target);
        }
        Ok(taken)
    }

    /// Until the window ends, or everything was asked for.
    fn wait(&mut self, taken: &mut [Taken], window: Duration) {
        let start = Instant::now();
        let end = start + window;
        let mut faults = Vec::new();
        let mut missed: Vec<Missed> = Vec::new();
        while taken.iter().any(|t| !t.away.is_empty()) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.tracker.wait_for_fault(left) {
                break;
            }
            if let Err(error) = self.tracker.read_faults(&mut faults) {
                log::error!("cannot read faults: {error}");
                break;
            }
            let mut wanted = Vec::with_capacity(faults.len());
            let after = start.elapsed();
            for address in faults.drain(..) {
                if let Some(which) = taken.iter().position(|t| t.target.contains(address)) {
                    self.put_back(&mut taken[which]);
                    wanted.push(which);
                }
                let _ = self.tracker.wake(address & !(PAGE_SIZE - 1), PAGE_SIZE);
            }
            missed.push(Missed { after, wanted });
        }
        note_missed(taken, &missed);
    }

    /// Tries until it works.
    fn put_back(&mut self, taken: &mut Taken) {
        for away in taken.away.drain(..) {
            let (from, to) = (taken.place + away.start, taken.target.start() + away.start);
            self.stained |= !put_back_pages(&self.tracker, from, to, away.len());
        }
    }

    /// Tracks writes again and lets everybody go on.
    fn disarm(&self, target: Target) {
        pieces_of(target)
            .iter()
            .for_each(|piece| self.disarm_piece(target.start(), piece));
    }

    fn disarm_piece(&self, start: usize, piece: &Range<usize>) {
        let at = start + piece.start;
        if let Err(error) = self.tracker.register(at, piece.len(), Mode::Wp) {
            // Never leave anyone waiting: without registration nobody does. It is not tracked any more.
            log::error!("write tracking of {at:#x} is lost: {error}");
            let _ = self.tracker.unregister(at, piece.len());
        }
        let _ = self.tracker.wake(at, piece.len());
    }
}

impl AccessMonitor for TakeAndWait {
    fn source(&self) -> UseSource {
        UseSource::TakeAndWait
    }

    fn needs_probes(&self) -> bool {
        true
    }

    fn sample(&mut self, targets: &[Target], window: Duration) -> io::Result<Vec<Option<Use>>> {
        let mut used = Vec::with_capacity(targets.len());
        for batch in targets.chunks(BATCH) {
            used.extend(self.sample_batch(batch, window)?);
        }
        Ok(used)
    }
}

/// Offsets of what is taken.
fn pieces_of(target: Target) -> Vec<Range<usize>> {
    match target {
        Target::Huge(_) => std::iter::once(0..HUGE_SIZE).collect(),
        Target::Split(_) => PROBES
            .iter()
            .map(|p| bytes(*p as usize)..bytes(*p as usize + 1))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn taken(count: usize) -> Vec<Taken> {
        let one = |number| Taken {
            target: Target::Huge(number * HUGE_SIZE),
            place: 0,
            away: Vec::new(),
            used: Some(Use::None),
        };
        (0..count).map(one).collect()
    }

    fn missed(times: &[Duration]) -> Vec<Missed> {
        let one = |(which, after): (usize, &Duration)| Missed {
            after: *after,
            wanted: vec![which],
        };
        times.iter().enumerate().map(one).collect()
    }

    #[test]
    fn waiting_for_others_does_not_make_a_range_look_idle() {
        let mut ranges = taken(41);
        // One thread uses 40 ranges all the time, and each wait takes it a tenth of a millisecond.
        let times: Vec<Duration> = (1..=40).map(|n| MS * n / 10).collect();
        note_missed(&mut ranges, &missed(&times));
        assert!(ranges[..40].iter().all(|r| r.used == Some(Use::After(MS / 10))));
        assert_eq!(ranges[40].used, Some(Use::None));
    }

    #[test]
    fn running_counts() {
        let mut ranges = taken(3);
        note_missed(&mut ranges, &missed(&[MS, MS * 2, MS * 8]));
        let used = |ran| Some(Use::After(ran));
        assert_eq!(
            ranges.iter().map(|r| r.used).collect::<Vec<_>>(),
            [used(MS), used(MS), used(MS * 6)]
        );
    }
}
