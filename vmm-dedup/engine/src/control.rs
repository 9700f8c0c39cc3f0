//! How the VMM's threads talk to the scanning thread.

use crate::error::Error;
use crate::memory::HostRange;
use crate::resize::Change;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::stats::ServiceStats;

/// What the scanning thread is asked to do next.
#[derive(Debug)]
pub(crate) enum Request {
    /// One pass, now; then tell.
    Pass(Sender<ServiceStats>),
    /// A change of guest memory; then tell.
    Change(Change, HostRange, Sender<Result<(), Error>>),
    /// End; with `unmerge`, after everything went back to anonymous memory.
    Stop { unmerge: bool },
}

#[derive(Debug, Default)]
struct Inner {
    requests: Vec<Request>,
    stats: ServiceStats,
}

/// Shared between the service's handle and its threads.
#[derive(Debug, Default)]
pub(crate) struct Control {
    inner: Mutex<Inner>,
    changed: Condvar,
    pause: AtomicBool,
    stop: AtomicBool,
    /// A change of guest memory waits, and with it a thread of the VMM.
    change: AtomicBool,
}

impl Control {
    pub(crate) fn request(&self, request: Request) {
        if matches!(request, Request::Stop { .. }) {
            self.stop.store(true, Ordering::Release);
        }
        let mut inner = self.lock();
        if matches!(request, Request::Change(..)) {
            self.change.store(true, Ordering::Release);
        }
        inner.requests.push(request);
        drop(inner);
        self.changed.notify_all();
    }

    pub(crate) fn set_paused(&self, paused: bool) {
        // Under the lock, or a thread that is about to wait could miss it.
        let _guard = self.lock();
        self.pause.store(paused, Ordering::Release);
        self.changed.notify_all();
    }

    pub(crate) fn paused(&self) -> bool {
        self.pause.load(Ordering::Acquire)
    }

    /// Whether a pass should end early.
    pub(crate) fn interrupted(&self) -> bool {
        self.stop.load(Ordering::Acquire) || self.change.load(Ordering::Acquire) || self.paused()
    }

    pub(crate) fn publish(&self, stats: &ServiceStats) {
        self.lock().stats = *stats;
    }

    pub(crate) fn stats(&self) -> ServiceStats {
        self.lock().stats
    }

    /// Sleeps, but no longer than until something is asked for.
    pub(crate) fn sleep(&self, time: Duration) {
        let guard = self.lock();
        let _ = self
            .changed
            .wait_timeout_while(guard, time, |_| !self.interrupted());
    }

    /// Waits for the next request until `deadline`, or for ever while paused.
    pub(crate) fn next(&self, deadline: Instant) -> Option<Request> {
        let mut guard = self.lock();
        loop {
            if !guard.requests.is_empty() {
                let request = guard.requests.remove(0);
                let change = |r: &Request| matches!(r, Request::Change(..));
                self.change
                    .store(guard.requests.iter().any(change), Ordering::Release);
                return Some(request);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() && !self.paused() {
                return None;
            }
            let wait = if self.paused() {
                Duration::from_secs(1)
            } else {
                left
            };
            guard = self
                .changed
                .wait_timeout(guard, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
