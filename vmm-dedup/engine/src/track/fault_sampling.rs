//! Sampling by taking: memory is moved away for some milliseconds, and whoever uses it says so by waiting for it.
//!
//! This is slide 11's "reset, sleep, check" without access bits, which no process can read of its own memory. It needs
//! nothing but what merging needs, and sees what access bits of the host's page tables do not show: a guest's reads
//! through KVM's own tables.
//!
//! # Why nothing is lost
//!
//! Each target has a [`Window`]: nobody can reach a page that we hold, so it goes back as it was, to a place that is still
//! empty. Who came meanwhile waits there until this thread has seen his fault and put the page back, tens of microseconds,
//! since it does nothing else meanwhile and is not preempted by normal threads. What nobody wanted goes back at the end.
//!
//! # How soon it is missed
//!
//! A thread that waits for one range touches no other, and with many ranges away it waits many times. That time counts for
//! none of them: it would make what comes last look idle. A wait takes at least as long as the shortest time between two
//! faults of the window, of which so much is taken off for every fault before.
//!
//! A huge page moves as one mapping and stays one (1 to 2 us each way), provided that its destination has no page table.

use crate::config::UseSource;
use crate::error::Error;
use crate::memory::thp_state::Use;
use crate::sys::late_log;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::sys::pagemap::Pagemap;
use crate::sys::relocate;
use crate::sys::sched::Urgent;
use crate::sys::uffd::Uffd;
use crate::track::access::{AccessMonitor, PROBES, Target};
use crate::window::{HugeScratch, PageSet, Taken, Window};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ranges taken at a time. A guest that uses all of them waits for each once.
pub(crate) const BATCH: usize = 64;
/// Most faults that are noted: the first of each range, and what comes at places without a page, as far as there is room. (It is made
/// before anything is away.)
const MOST_NOTED: usize = 4 * BATCH;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct FaultSampling {
    tracker: Arc<Uffd>,
    pagemap: Pagemap,
    scratch: HugeScratch,
    /// Small pages were in it, or still are: a huge page would be split to fit in.
    stained: bool,
}

/// A target of which something is, or was, away.
#[derive(Debug)]
struct Away<'a> {
    target: Target,
    window: Window<'a>,
    /// What is known of its use.
    used: Option<Use>,
}

/// Faults that were read at once.
struct Missed {
    /// Since the beginning of the window.
    after: Duration,
    /// Which of the batch were missed for the first time: a bit of each.
    wanted: u64,
}

const _: () = assert!(BATCH <= u64::BITS as usize);

/// Notes how long the guest had run before it missed what was taken.
fn note_missed(used: &mut [Option<Use>], missed: &[Missed]) {
    let waited = missed.windows(2).map(|pair| pair[1].after - pair[0].after).min();
    let waited = waited.unwrap_or_default();
    for (before, at) in (0..).zip(missed) {
        let ran = at.after.saturating_sub(waited * before);
        for (which, used) in (0u32..).zip(used.iter_mut()) {
            if at.wanted & 1 << which != 0 && *used == Some(Use::None) {
                *used = Some(Use::After(ran));
            }
        }
    }
}

impl FaultSampling {
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
        // Copies of guest pages may still be in it.
        if self.stained {
            (self.scratch, self.stained) = (HugeScratch::new(&self.tracker, BATCH)?, false);
        }
        let uffd = self.tracker.clone();
        let (mut faults, mut missed) = (Vec::with_capacity(MOST_NOTED), Vec::with_capacity(MOST_NOTED));
        let mut away: Vec<Away<'_>> = Vec::with_capacity(targets.len());
        let mut used = Vec::with_capacity(targets.len());
        let urgent = Urgent::begin();
        let mut broken = None;
        for (number, target) in targets.iter().enumerate() {
            match self.take(&uffd, *target, number) {
                Ok(taken) => away.push(taken),
                Err(error) => {
                    broken = Some(error);
                    break;
                }
            }
        }
        self.wait(&uffd, &mut away, window, (&mut faults, &mut missed));
        for taken in &mut away {
            self.put_back(taken);
        }
        used.extend(away.drain(..).map(|taken| taken.used)); // every window is closed
        drop(urgent);
        note_missed(&mut used, &missed);
        for (used, target) in used.iter().zip(targets) {
            // Who missed it may have got a page table, for want of a huge page: then it was split to fit in.
            if let (Some(Use::After(_)), Target::Huge(start)) = (used, target) {
                self.stained |= !self.pagemap.is_huge(*start);
            }
        }
        match broken {
            Some(Error::Register { source, .. }) => Err(source),
            Some(error) => Err(io::Error::other(error)),
            None => Ok(used),
        }
    }

    /// Takes a target, or what can be had of it. On an error it is as it was.
    fn take<'a>(&mut self, uffd: &'a Uffd, target: Target, number: usize) -> Result<Away<'a>, Error> {
        let pages = pages_of(target);
        let mut window = Window::open(uffd, target.start(), self.scratch.place(number), &pages)?;
        let mut pinned = false;
        for run in pages.runs() {
            pinned |= window.take_prefix(run).1 == Taken::Pinned;
        }
        let whole = match target {
            Target::Huge(_) => window.away() == pages,
            Target::Split(_) => !window.away().is_empty(),
        };
        let as_one = matches!(target, Target::Huge(_)) && whole;
        self.stained |= !window.away().is_empty() && !as_one;
        let mut taken = Away {
            target,
            window,
            // Until somebody comes. What is pinned a device works on.
            used: whole.then_some(Use::None),
        };
        if pinned {
            taken.used = Some(Use::AT_ONCE);
        }
        if !whole {
            // It is not what it was, or in use. Nobody shall wait at places that stay empty.
            self.put_back(&mut taken);
            taken.window.let_go();
        }
        Ok(taken)
    }

    /// Until the window ends, or everything was asked for. There is room for faults of one reading, and for those that are noted.
    fn wait(
        &mut self,
        uffd: &Uffd,
        away: &mut [Away<'_>],
        window: Duration,
        (faults, missed): (&mut Vec<usize>, &mut Vec<Missed>),
    ) {
        let start = Instant::now();
        let end = start + window;
        // What was missed already: a bit of each.
        let mut all_wanted = 0;
        while away.iter().any(|taken| !taken.window.away().is_empty()) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let came = uffd.wait_for_fault(left).and_then(|came| match came {
                true => uffd.read_faults(faults).map(|()| true),
                false => Ok(false),
            });
            match came {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    late_log::note(
                        "reading who waits for a sample",
                        &error,
                        "all goes back, and nothing is learnt",
                    );
                    let unknown = away.iter_mut().filter(|taken| taken.used == Some(Use::None));
                    unknown.for_each(|taken| taken.used = None);
                    break;
                }
            }
            let mut wanted: u64 = 0;
            let after = start.elapsed();
            for address in faults.drain(..) {
                if let Some(which) = away.iter().position(|taken| taken.target.contains(address)) {
                    self.put_back(&mut away[which]);
                    // Who touched a place where there never was a page must not wait on, and come again.
                    away[which].window.let_go();
                    // (Two vCPUs may ask for one range.)
                    wanted |= 1 << which & !all_wanted;
                }
                let page = address & !(PAGE_SIZE - 1);
                relocate::wake(uffd, &(page..page + PAGE_SIZE));
            }
            all_wanted |= wanted;
            if wanted != 0 || missed.len() < MOST_NOTED - BATCH {
                missed.push(Missed { after, wanted });
            }
        }
    }

    fn put_back(&mut self, taken: &mut Away<'_>) {
        let as_one = taken.window.put_back_all();
        self.stained |= !as_one;
    }
}

impl AccessMonitor for FaultSampling {
    fn source(&self) -> UseSource {
        UseSource::FaultSampling
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

/// What is taken of a target.
fn pages_of(target: Target) -> PageSet {
    match target {
        Target::Huge(_) => PageSet::of(std::iter::once(0..CHUNK_PAGES)),
        Target::Split(_) => PageSet::of(PROBES.map(|probe| probe as usize..probe as usize + 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn missed(times: &[Duration]) -> Vec<Missed> {
        let one = |(which, after): (usize, &Duration)| Missed {
            after: *after,
            wanted: 1 << which,
        };
        times.iter().enumerate().map(one).collect()
    }

    #[test]
    fn waiting_for_others_does_not_make_a_range_look_idle() {
        let mut ranges = [Some(Use::None); 41];
        // One thread uses 40 ranges all the time, and each wait takes it a tenth of a millisecond.
        let times: Vec<Duration> = (1..=40).map(|n| MS * n / 10).collect();
        note_missed(&mut ranges, &missed(&times));
        assert_eq!(ranges[..40], [Some(Use::After(MS / 10)); 40]);
        assert_eq!(ranges[40], Some(Use::None));
    }

    #[test]
    fn running_counts() {
        let mut ranges = [Some(Use::None); 3];
        note_missed(&mut ranges, &missed(&[MS, MS * 2, MS * 8]));
        let used = |ran| Some(Use::After(ran));
        assert_eq!(ranges, [used(MS), used(MS), used(MS * 6)]);
    }
}
