//! The device in this process, on the caller's thread: the model without a socket.

use super::port::Port;
use crate::memory::{Line, Memory};
use crate::ring::Ring;
use crate::scan_table::Ppn;
use crate::timing;
use crate::window::{Job, WINDOW_BYTES, Window};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use vmm_dedup::compare::{Answer, PageId, Pages, Stopwatch};

/// A device of its own, which reads the pages that it is given with each call.
#[derive(Debug)]
pub struct InProcess {
    window: Vec<AtomicU64>,
    ring: Ring,
    worked_ns: u64,
}

impl InProcess {
    /// A device with `modules` modules.
    pub fn new(modules: usize) -> Self {
        Self {
            window: (0..WINDOW_BYTES / 8).map(|_| AtomicU64::new(0)).collect(),
            ring: Ring::new(modules),
            worked_ns: 0,
        }
    }
}

impl Port for InProcess {
    fn name(&self) -> &'static str {
        "pageforge"
    }

    fn window(&self) -> Window<'_> {
        Window::new(&self.window)
    }

    fn has_memory_of_its_own(&self) -> bool {
        false
    }

    /// Does them.
    fn begin(&mut self, pages: &dyn Pages, jobs: &[Job]) -> Answer<u32> {
        let window = Window::new(&self.window);
        let first = self.ring.head();
        let numbers = (0u32..).map(|n| first.wrapping_add(n));
        numbers
            .zip(jobs)
            .for_each(|(number, job)| window.set_job(number, job));
        let watch = Stopwatch::start();
        jobs.iter().for_each(|_| self.ring.step(window, &PagesOf(pages)));
        self.worked_ns += watch.stop_cpu();
        Ok(first)
    }

    fn done(&mut self, _known: u32, _wait: Duration) -> Answer<u32> {
        Ok(self.ring.head())
    }

    fn account(&self) -> timing::Account {
        self.ring.account()
    }

    fn device_cpu_ns(&self) -> u64 {
        self.worked_ns
    }

    fn borrowed_cpu_ns(&self) -> u64 {
        self.worked_ns
    }
}

/// The caller's pages as the device's memory: a page's number is its address.
struct PagesOf<'a>(&'a dyn Pages);

impl Memory for PagesOf<'_> {
    fn line(&self, page: Ppn, line: usize) -> Option<Line> {
        let view = self.0.view(PageId(page.number()))?;
        Some(std::array::from_fn(|word| {
            view[line * 8 + word].load(Ordering::Relaxed)
        }))
    }
}
