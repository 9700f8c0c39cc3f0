//! What went wrong while nobody could be told.
//!
//! While guest pages are away, or a writer waits for the fault thread, nothing may be logged: a log may end in a thread of
//! the VMM that waits for one of those pages, with the log's lock held. So it is noted, and told at the next occasion when
//! the scanning thread holds nothing.
//!
//! Failures are told by kind, with how often they came, so that one that comes with every window does not fill the log.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Kinds remembered between two occasions; failures of more kinds are told without a number.
const MOST: usize = 64;

/// A step that failed, why (errno), and what was done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    step: &'static str,
    errno: i32,
    then: &'static str,
}

/// Kinds of failures and how often they came, in the order of the first of each. It has its place here: no memory is asked for while
/// pages are away.
static FAILURES: Mutex<[Option<(Kind, u64)>; MOST]> = Mutex::new([None; MOST]);

/// Failures of all kinds.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Failures noted in this process so far.
pub(crate) fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Notes that a step failed. `then`: what was done about it.
pub(crate) fn note(step: &'static str, error: &io::Error, then: &'static str) {
    COUNT.fetch_add(1, Ordering::Relaxed);
    let errno = error.raw_os_error().unwrap_or(0);
    let kind = Kind { step, errno, then };
    let mut failures = FAILURES.lock().unwrap_or_else(PoisonError::into_inner);
    let place = failures
        .iter_mut()
        .find(|place| place.is_none_or(|(known, _)| known == kind));
    if let Some(place) = place {
        let times = place.map_or(0, |(_, times)| times);
        *place = Some((kind, times + 1));
    }
}

/// Lines to be told, in order.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Notes a line that is to be told once.
pub(crate) fn say(line: String) {
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    if lines.len() < MOST {
        lines.push(line);
    }
}

/// Tells what was noted. To be called where no guest page is away, nobody waits, and no lock is held.
pub(crate) fn tell() {
    let lines = std::mem::take(&mut *LINES.lock().unwrap_or_else(PoisonError::into_inner));
    lines.iter().for_each(|line| log::warn!("{line}"));
    let failures = std::mem::replace(
        &mut *FAILURES.lock().unwrap_or_else(PoisonError::into_inner),
        [None; MOST],
    );
    for (Kind { step, errno, then }, times) in failures.into_iter().flatten() {
        let error = io::Error::from_raw_os_error(errno);
        let times = if times == 1 {
            String::new()
        } else {
            format!(" {times} times")
        };
        log::warn!("{step} failed{times} ({error}): {then}");
    }
}

/// Says at once, on standard error, that something does not go on. For what is tried again and again with guest pages away,
/// since nobody would ever be told otherwise.
pub(crate) fn cry(step: &str, error: &io::Error) {
    let line = format!("vmm-dedup: {step} fails again and again ({error}); trying on\n");
    // One write, without the lock that writers of this process's own share.
    let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_counted_by_kind() {
        let (busy, none) = [libc::EBUSY, libc::ENOMEM]
            .map(io::Error::from_raw_os_error)
            .into();
        let before = count();
        tell();
        note("a step", &busy, "it stays");
        note("a step", &none, "it stays");
        note("a step", &busy, "it stays");
        let noted: Vec<(i32, u64)> = FAILURES
            .lock()
            .unwrap()
            .iter()
            .flatten()
            .map(|(kind, n)| (kind.errno, *n))
            .collect();
        assert_eq!(noted, [(libc::EBUSY, 2), (libc::ENOMEM, 1)]);
        assert_eq!(count() - before, 3);
        tell();
        assert_eq!(*FAILURES.lock().unwrap(), [None; MOST]);
    }
}
