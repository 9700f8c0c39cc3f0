//! The frequency of the time stamp counter, for VMMs that do not tell it.
#![allow(unsafe_code)] // for one instruction

use std::arch::x86_64::_rdtsc;
use std::thread;
use std::time::{Duration, Instant};

/// Measures how fast this machine's time stamp counter runs; a guest's runs as fast unless its VMM scales it.
/// Takes 20 ms. Prefer `KVM_GET_TSC_KHZ` where it can be asked.
#[must_use]
pub fn measure_tsc_khz() -> u64 {
    let (clock, start) = (Instant::now(), cycles());
    thread::sleep(Duration::from_millis(20));
    let (time, cycles) = (clock.elapsed(), cycles().saturating_sub(start));
    let khz = u128::from(cycles) * 1_000_000 / time.as_nanos().max(1);
    u64::try_from(khz).unwrap_or(u64::MAX)
}

fn cycles() -> u64 {
    // SAFETY: rdtsc exists on every x86-64 and has no preconditions in user mode on Linux (CR4.TSD is clear
    // unless a process asks for it with prctl, which ends in a signal and not in undefined behaviour).
    unsafe { _rdtsc() }
}
