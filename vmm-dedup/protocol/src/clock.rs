//! A clock that all processes of a host share, and that nobody can set.
//!
//! The wall clock jumps: it is set, or corrected after a suspension. An age that is made of two looks at it is wrong by the jump. So what
//! processes tell each other of *when* is the time since the host booted. (In a time namespace with an offset of its own it is wrong by
//! that.) It is made a date where somebody wants one, and then it is that of the wall clock as it is set now.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// The time since the host booted, suspensions included.
pub fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The same in milliseconds.
pub fn since_boot_ms() -> u64 {
    u64::try_from(since_boot().as_millis()).unwrap_or(u64::MAX)
}

/// How long ago something was that happened so many milliseconds after the boot.
pub fn age(at_ms: u64) -> Duration {
    since_boot().saturating_sub(Duration::from_millis(at_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_now_is_not_old_and_what_is_to_come_has_no_age() {
        let now = since_boot_ms();
        assert!(now > 0 && age(now) < Duration::from_secs(60));
        assert!(age(0) >= Duration::from_millis(now));
        assert_eq!(age(u64::MAX), Duration::ZERO);
    }
}
