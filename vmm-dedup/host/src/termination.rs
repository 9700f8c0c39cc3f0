//! Cleaning up although a user presses ^C.

use crate::children;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::{Arc, Mutex, PoisonError};

/// Runs `work`, then `cleanup`; on SIGINT, SIGTERM or SIGHUP ends all children, runs `cleanup` and ends the process
/// with 128 + signal.
pub fn on_termination<T>(cleanup: impl FnOnce() + Send + 'static, work: impl FnOnce() -> T) -> T {
    let cleanup = Arc::new(Mutex::new(Some(cleanup)));
    let handle = Signals::new([SIGINT, SIGTERM, SIGHUP]).ok().map(|mut signals| {
        let handle = signals.handle();
        let cleanup = cleanup.clone();
        std::thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                // Locked until the end, so that `work`, failing for want of its children, does not return earlier.
                let mut cleanup = cleanup.lock().unwrap_or_else(PoisonError::into_inner);
                children::stop();
                if let Some(cleanup) = cleanup.take() {
                    cleanup();
                }
                std::process::exit(128 + signal);
            }
        });
        handle
    });
    let result = work();
    if let Some(handle) = handle {
        handle.close();
    }
    let rest = cleanup.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(cleanup) = rest {
        cleanup();
    }
    result
}
