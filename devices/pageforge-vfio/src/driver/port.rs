//! Where the device is.

use crate::timing;
use crate::window::{Info, Job, Window};
use std::os::fd::BorrowedFd;
use vmm_dedup::compare::{Answer, PageId, Pages};

/// A device and its window.
pub trait Port: Send {
    /// The backend's name for reports.
    fn name(&self) -> &'static str;

    /// The window. While no jobs run it is the driver's.
    fn window(&self) -> Window<'_>;

    /// Runs jobs, at most [`RING`](crate::window::RING), and returns their outcomes, in order.
    ///
    /// # Errors
    /// If the device has failed.
    fn run(&mut self, pages: &dyn Pages, jobs: &[Job]) -> Answer<Vec<Info>>;

    /// What the device says it has done.
    fn account(&self) -> timing::Account;

    /// CPU time that the model of the device has taken, wherever.
    fn device_cpu_ns(&self) -> u64;

    /// That part of it that was taken on threads that called [`Self::run`].
    fn borrowed_cpu_ns(&self) -> u64;

    /// CPU time of threads of the driver's own, ns.
    fn helper_cpu_ns(&self) -> u64 {
        0
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
