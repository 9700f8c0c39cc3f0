//! Verifying taken pages with a PageForge: a candidate and a table of one entry for each pair.
//!
//! The device cannot see taken pages, which lie in private memory: they are copied into a buffer that it was given, one page
//! for each place in the ring. The store's slots it reads where they are. So when pairs are aborted the jobs may go on, and
//! their places are used again when they are done.
//!
//! The device tells equal pages (Duplicate) from others, but not where they differ.
#![allow(unsafe_code)] // the trait's submit() is unsafe; here it copies what the caller promises to keep

use super::jobs::{NOWHERE, job, ppn_of};
use super::port::Port;
use crate::scan_table::{EntryIndex, OtherPage, Pointer, RunError};
use crate::window::{Info, Job, JobError, RING};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use vmm_dedup::compare::{
    Account, Answer, Arena, Compared, Engine, Error, Limits, PageId, PageView, Pages, Pair, PairAnswer,
    Stopwatch, Verify, With,
};

/// Pairs that are copied in a call.
const AT_ONCE: usize = 32;

/// PageForge behind a port, for verification.
#[derive(Debug)]
pub struct PageForgeVerifier<P> {
    port: P,
    /// For each place in the ring a copy of the taken page, and behind all of these, for a device without memory of its own,
    /// one of the slot.
    copies: Arena,
    /// The jobs that the device has, in order.
    running: VecDeque<Running>,
    /// The first one's number.
    first: u32,
    ready: Vec<PairAnswer>,
    own: Account,
}

/// A job that the device has.
#[derive(Clone, Copy, Debug)]
struct Running {
    /// `None` if the pair was aborted.
    pair: Option<u64>,
    slot: PageId,
}

/// The copies as a device's memory, for one that reads what it is given with a call.
struct Copies<'a>(&'a Arena);

impl Pages for Copies<'_> {
    fn view(&self, page: PageId) -> Option<&PageView> {
        self.0.view(PageId(page.0.checked_sub(PageId::OWN.0)?))
    }
}

impl<P: Port> PageForgeVerifier<P> {
    /// Drives the device behind this port, which nobody else may do.
    ///
    /// # Errors
    /// If there is no memory, or the device cannot be given any.
    pub fn new(mut port: P) -> Answer<Self> {
        let areas = if port.has_memory_of_its_own() { 1 } else { 2 };
        let copies = Arena::new(areas * RING).map_err(|error| Error::Device(error.to_string()))?;
        port.map(PageId::OWN, copies.pages(), copies.file())?;
        Ok(Self {
            port,
            copies,
            running: VecDeque::with_capacity(RING),
            first: 0,
            ready: Vec::new(),
            own: Account::default(),
        })
    }

    /// Copies a pair's page into the place of the job of this number, and writes its table.
    fn prepare(&self, number: u32, pair: &Pair<'_>) -> Answer<(Job, PageId)> {
        let With::Slot { id, page } = pair.with else {
            return Err(Error::Address(pair.taken.address()));
        };
        let place = number as usize % RING;
        #[allow(clippy::cast_possible_truncation)] // below RING
        let table = place as u32;
        let own = |place: usize| ppn_of(PageId(PageId::OWN.0 + place as u64));
        let other = if self.port.has_memory_of_its_own() {
            ppn_of(id)?
        } else {
            self.copies.write(RING + place, page.words());
            own(RING + place)?
        };
        self.copies.write(place, pair.taken.words());
        let entry = OtherPage {
            ppn: other,
            less: Pointer::new(NOWHERE),
            more: Pointer::new(NOWHERE),
        };
        self.port.window().set_entry(table, EntryIndex::ROOT, Some(entry));
        Ok((job(own(place)?, table, 0, false), id))
    }
}

/// What a job's outcome says of its pair.
fn compared(info: &Info, slot: PageId) -> Answer<Compared> {
    match info.error {
        None if info.duplicate => Ok(Compared::Equal),
        None if info.scanned && info.ptr.bits() == NOWHERE => Ok(Compared::Different(None)),
        None => Err(Error::Device(format!("a comparison ended with {info:?}"))),
        Some(JobError::Run(RunError::OtherFault)) => Err(Error::Fault(slot)),
        Some(error) => Err(Error::Device(error.to_string())),
    }
}

impl<P: Port> Engine for PageForgeVerifier<P> {
    fn name(&self) -> &'static str {
        self.port.name()
    }

    fn map(&mut self, first: PageId, pages: usize, file: BorrowedFd<'_>) -> Answer<()> {
        self.port.map(first, pages, file)
    }

    fn unmap(&mut self, first: PageId, pages: usize) -> Answer<()> {
        self.port.unmap(first, pages)
    }

    fn helper_cpu_ns(&self) -> u64 {
        self.port.helper_cpu_ns()
    }

    fn account(&self) -> Account {
        self.port.add_account(self.own)
    }
}

impl<P: Port> Verify for PageForgeVerifier<P> {
    fn limits(&self) -> Limits {
        Limits {
            at_once: AT_ONCE,
            zeros: false,
        }
    }

    unsafe fn submit(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize> {
        let watch = Stopwatch::start();
        let room = RING - self.running.len();
        let taken = &pairs[..pairs.len().min(room)];
        let mut jobs = Vec::with_capacity(taken.len());
        for (number, pair) in taken
            .iter()
            .enumerate()
            .map(|(at, pair)| (first + at as u64, pair))
        {
            #[allow(clippy::cast_possible_truncation)] // at most RING
            let next = self.first.wrapping_add(self.running.len() as u32);
            match self.prepare(next, pair) {
                Ok((job, slot)) => {
                    jobs.push(job);
                    let pair = Some(number);
                    self.running.push_back(Running { pair, slot });
                }
                Err(error) => self.ready.push(PairAnswer {
                    number,
                    answer: Err(error),
                }),
            }
        }
        self.port.begin(&Copies(&self.copies), &jobs)?;
        self.own.pages += taken.len() as u64;
        watch.stop(&mut self.own);
        Ok(taken.len())
    }

    fn poll(&mut self, wait: Duration, answers: &mut Vec<PairAnswer>) -> Answer<()> {
        let watch = Stopwatch::start();
        let wait = if self.ready.is_empty() {
            wait
        } else {
            Duration::ZERO
        };
        answers.append(&mut self.ready);
        let done = self.port.done(self.first, wait)?;
        while self.first != done {
            let running = self.running.pop_front();
            let Running { pair, slot } =
                running.ok_or_else(|| Error::Device("it has done jobs that it was not given".to_owned()))?;
            let answer = compared(&self.port.window().outcome(self.first), slot);
            self.first = self.first.wrapping_add(1);
            answers.extend(pair.map(|number| PairAnswer { number, answer }));
        }
        watch.stop(&mut self.own);
        Ok(())
    }

    fn abort(&mut self) {
        self.ready.clear();
        self.running.iter_mut().for_each(|running| running.pair = None);
    }
}
