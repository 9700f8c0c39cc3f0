//! The rebuilding thread.

use crate::memory::layout::Page;
use crate::pack::packer::{Brought, Packer, cry_at_times};
use crate::sys::late_log;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::proc;
use crate::sys::relocate::wake;
use crate::sys::sched::Urgent;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How long faults are polled for after one was served, while they keep coming: being woken takes longer than any codec.
const POLL: Duration = Duration::from_micros(50);
/// Between two tries of what there was no memory for.
const MEMORY_PAUSE: Duration = Duration::from_millis(1);
/// Longest sleep: nothing happens by itself.
const SLEEP: Duration = Duration::from_secs(3600);
/// How long everybody waits at the end for memory to come back to.
const WITHOUT_MEMORY: Duration = Duration::from_secs(1);
/// Between two tries of that where nobody waits.
const ALONE_PAUSE: Duration = Duration::from_millis(100);
/// Most neighbours that come back ahead of a walk.
const AHEAD: Page = 16;

/// Somebody who waits for a page.
#[derive(Clone, Copy, Debug)]
struct Fault {
    address: usize,
    since: Instant,
}

/// A walk through packed pages, as far as it was seen.
#[derive(Debug, Default)]
struct Walk {
    /// The page that would come next.
    next: Option<Page>,
    /// How many are brought back ahead of it: as many as were touched in order.
    ahead: Page,
}

impl Walk {
    /// Somebody touched a page; how many behind it come back as well.
    fn ahead_of(&mut self, page: Page) -> Page {
        self.ahead = if self.next == Some(page) {
            (self.ahead * 2).clamp(1, AHEAD)
        } else {
            0
        };
        self.next = page.checked_add(1 + self.ahead);
        self.ahead
    }
}

/// What the rebuilding thread lives on.
#[derive(Debug)]
pub(crate) struct Server {
    packer: Arc<Packer>,
    /// Who waits for the thread's end need not wait any longer: it goes on alone.
    alone: mpsc::Sender<()>,
}

impl Server {
    /// With what tells that the thread goes on alone. If it has ended, that is closed.
    pub(crate) fn of(packer: Arc<Packer>) -> (Self, mpsc::Receiver<()>) {
        let (alone, told) = mpsc::channel();
        (Self { packer, alone }, told)
    }

    /// The thread: serves whoever touches packed pages until [`Packer::end`]; then brings back all that are left. If there is no
    /// memory for that it says so, and serves and tries on until all is back, or was abandoned and forgotten. A panic ends
    /// nothing of that.
    pub(crate) fn serve(self) {
        let mut queue = VecDeque::new();
        let stopped = || self.packer.stop.load(Ordering::Acquire);
        self.until_done(|| self.packer.run(&mut queue, stopped, SLEEP));
        let mut back = false;
        let mut patience = WITHOUT_MEMORY;
        // Those who waited for memory come again: their page is brought back with all others, and they are woken.
        self.until_done(|| back = self.packer.bring_all_back(patience));
        while !back {
            let _ = self.alone.send(());
            patience = Duration::ZERO;
            let since = Instant::now();
            let paused = || since.elapsed() > ALONE_PAUSE;
            self.until_done(|| self.packer.run(&mut queue, paused, ALONE_PAUSE));
            self.until_done(|| back = self.packer.bring_all_back(patience));
        }
        for fault in queue {
            wake(&self.packer.uffd, &(fault.address..fault.address + PAGE_SIZE));
        }
    }

    fn until_done(&self, mut work: impl FnMut()) {
        while catch_unwind(AssertUnwindSafe(&mut work)).is_err() {
            self.packer.wanted.store(false, Ordering::Release);
            late_log::note(
                "rebuilding packed pages",
                &io::Error::from_raw_os_error(libc::EFAULT),
                "the thread panicked, and goes on",
            );
            std::thread::sleep(MEMORY_PAUSE);
        }
    }
}

impl Packer {
    /// Brings everything back, and ends all registrations; whether that is done.
    fn bring_all_back(&self, patience: Duration) -> bool {
        let all = 0..Page::MAX;
        self.bring_back(&all, patience) && self.end_registrations(&all, patience)
    }

    /// Serves whoever touches packed pages, and sleeps no longer than so long at a time.
    fn run(&self, queue: &mut VecDeque<Fault>, is_over: impl Fn() -> bool, sleep: Duration) {
        let (mut addresses, mut walk) = (Vec::new(), Walk::default());
        let (mut keep_coming, mut failures) = (false, 0);
        while !is_over() {
            keep_coming = keep_coming && self.poll();
            if !keep_coming {
                let patience = if queue.is_empty() { sleep } else { MEMORY_PAUSE };
                self.bell.wait(patience, Some(self.uffd.as_fd()));
            }
            if let Err(error) = self.uffd.read_faults(&mut addresses) {
                late_log::note("reading who touches packed pages", &error, "it is tried again");
                std::thread::sleep(POLL);
            }
            let since = Instant::now();
            keep_coming = !addresses.is_empty();
            let faults = addresses.drain(..).map(|address| Fault {
                address: address & !(PAGE_SIZE - 1),
                since,
            });
            queue.extend(faults);
            if queue.is_empty() {
                continue;
            }
            self.wanted.store(true, Ordering::Release);
            let _urgent = Urgent::begin();
            for _ in 0..queue.len() {
                // It stays in the queue until it was served: a panic forgets nobody.
                let Some(fault) = queue.front().copied() else {
                    break;
                };
                let served = self.serve_fault(fault, &mut walk);
                queue.pop_front();
                if served {
                    failures = 0;
                } else {
                    queue.push_back(fault);
                    failures += 1;
                    cry_at_times(failures);
                }
            }
            self.wanted.store(false, Ordering::Release);
            self.lock().figures.cpu_ns = proc::thread_cpu_ns();
        }
    }

    /// Whether there is a fault soon.
    fn poll(&self) -> bool {
        let begin = Instant::now();
        loop {
            if self.uffd.somebody_waits(Duration::ZERO) {
                return true;
            }
            if begin.elapsed() > POLL {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    /// Lets somebody go on who waits; `false` if there is no memory for his page.
    fn serve_fault(&self, fault: Fault, walk: &mut Walk) -> bool {
        let mut inner = self.lock();
        #[cfg(test)]
        self.panic_serving();
        let page = inner.memory.page_at(fault.address);
        let brought = match page {
            Some(page) => self.bring(&mut inner, page, true),
            // Memory that the service has forgotten since: whoever waited there goes on.
            None => Brought::WasThere,
        };
        if brought == Brought::Later {
            return false;
        }
        wake(&self.uffd, &(fault.address..fault.address + PAGE_SIZE));
        if brought == Brought::Rebuilt {
            let ns = u64::try_from(fault.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            inner.figures.rebuild.observe(ns);
        }
        drop(inner);
        if let Some(page) = page.filter(|_| brought == Brought::Rebuilt) {
            self.bring_ahead(page, walk.ahead_of(page));
        }
        true
    }

    /// Brings back what is packed of the pages behind one. Whoever waits for one of them already is woken when his fault is read.
    fn bring_ahead(&self, page: Page, ahead: Page) {
        for next in (page + 1..).take(ahead as usize) {
            let mut inner = self.lock();
            if inner.table.get(next).is_none() || self.bring(&mut inner, next, true) == Brought::Later {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_brings_back_ever_more_ahead_of_it() {
        let mut walk = Walk::default();
        let (mut page, mut ahead) = (100, Vec::new());
        for _ in 0..8 {
            let pages = walk.ahead_of(page);
            ahead.push(pages);
            page += 1 + pages;
        }
        assert_eq!(ahead, [0, 1, 2, 4, 8, 16, 16, 16]);
        assert_eq!(walk.ahead_of(7), 0);
    }
}
