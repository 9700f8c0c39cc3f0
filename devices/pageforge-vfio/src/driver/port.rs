//! Where the device is.

use crate::memory::LINE_BYTES;
use crate::timing;
use crate::window::{Info, Job, Window};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use vmm_dedup::compare::{Account, Answer, Error, PageId, Pages};

/// How long a device may take to answer a command, or to do jobs that somebody waits for. The longest jobs compare 31 equal
/// pages each: a ring of those takes well below a second.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// A device and its window.
pub trait Port: Send {
    /// The engine's name for reports.
    fn name(&self) -> &'static str;

    /// The window. While no jobs run it is the driver's.
    fn window(&self) -> Window<'_>;

    /// Whether the device reads what was mapped for it ([`Self::map`]), and nothing that it is given with a call.
    fn has_memory_of_its_own(&self) -> bool;

    /// Has jobs begun, behind those that run; at most as many as the [`RING`](crate::window::RING) has room for. Returns the
    /// number of the first.
    ///
    /// # Errors
    /// If the device has failed.
    fn begin(&mut self, pages: &dyn Pages, jobs: &[Job]) -> Answer<u32>;

    /// The number of the first job that is not done. If that is `known`, it waits for another one, at most so long.
    ///
    /// # Errors
    /// If the device has failed.
    fn done(&mut self, known: u32, wait: Duration) -> Answer<u32>;

    /// Runs jobs, at most [`RING`](crate::window::RING), when no others do, and returns their outcomes, in order.
    ///
    /// # Errors
    /// If the device has failed.
    fn run(&mut self, pages: &dyn Pages, jobs: &[Job]) -> Answer<Vec<Info>> {
        let first = self.begin(pages, jobs)?;
        let numbers = (0u32..).zip(jobs).map(|(at, _)| first.wrapping_add(at));
        let end = numbers.clone().last().map_or(first, |last| last.wrapping_add(1));
        let deadline = Instant::now() + PATIENCE;
        let mut done = first;
        while done != end {
            let left = deadline.saturating_duration_since(Instant::now());
            done = self.done(done, left)?;
            if left.is_zero() && done != end {
                return Err(Error::Device("it does not answer".to_owned()));
            }
        }
        let window = self.window();
        Ok(numbers.map(|number| window.outcome(number)).collect())
    }

    /// What the device says it has done.
    fn account(&self) -> timing::Account;

    /// CPU time that the model of the device has taken, wherever.
    fn device_cpu_ns(&self) -> u64;

    /// That part of it that was taken on threads that called [`Self::begin`].
    fn borrowed_cpu_ns(&self) -> u64;

    /// CPU time of threads of the driver's own, ns.
    fn helper_cpu_ns(&self) -> u64 {
        0
    }

    /// What the driver took, and what the device says it has done.
    fn add_account(&self, own: Account) -> Account {
        let device = self.account();
        Account {
            comparisons: device.comparisons,
            lines: device.lines(),
            bytes: device.lines() * LINE_BYTES as u64,
            device_cpu_ns: self.device_cpu_ns(),
            // The model in this process works on the caller's thread; that is not the driver's time.
            cpu_ns: own.cpu_ns.saturating_sub(self.borrowed_cpu_ns()) + self.helper_cpu_ns(),
            ..own
        }
    }

    /// Lets the device read the pages of a file, as pages `first` and following, if it does not read what it is given
    /// with each call.
    ///
    /// # Errors
    /// If the device cannot be told.
    fn map(&mut self, _first: PageId, _pages: usize, _file: BorrowedFd<'_>) -> Answer<()> {
        Ok(())
    }

    /// Ends [`Self::map`] of the very same range.
    ///
    /// # Errors
    /// If the device cannot be told.
    fn unmap(&mut self, _first: PageId, _pages: usize) -> Answer<()> {
        Ok(())
    }
}
