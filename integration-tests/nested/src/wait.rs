//! Waiting for things to come about.

use crate::Failure;
use std::time::{Duration, Instant};

/// Everything waits so long at most; L0 has a limit of its own for L1.
const PATIENCE: Duration = Duration::from_secs(900);
const POLL: Duration = Duration::from_millis(250);

/// Looks again and again until `look` finds something.
pub(crate) fn wait_for<T>(
    what: &str,
    mut look: impl FnMut() -> Result<Option<T>, Failure>,
) -> Result<T, Failure> {
    let start = Instant::now();
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if start.elapsed() > PATIENCE {
            return Err(Failure::new(format!(
                "waited {} s in vain: {what}",
                PATIENCE.as_secs()
            )));
        }
        std::thread::sleep(POLL);
    }
}

/// Fails with a text unless something holds.
pub(crate) fn check(holds: bool, text: impl FnOnce() -> String) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure::new(text())) }
}
