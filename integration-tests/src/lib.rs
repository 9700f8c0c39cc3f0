//! What the integration tests share: a store in a thread, a payload guest with dedup, memory under merging.
//!
//! The scenarios that prove safety ([`guests`], [`direct_io`], [`swap_chaos`] and others) are functions with a size, so that the same code runs
//! for seconds in CI and for an hour by `cargo run --release -p vmm-dedup-integration-tests --bin chaos -- --long`.

pub mod agent;
pub mod dashboards;
pub mod direct_io;
pub mod dying;
pub mod failing;
pub mod follow_chaos;
pub mod guests;
pub mod heal_chaos;
pub mod hostile;
pub mod huge;
pub mod huge_chaos;
pub mod lives;
pub mod logged;
pub mod memory;
pub mod pinned;
pub mod prometheus;
pub mod random;
pub mod seccomp;
pub mod segments;
pub mod soak;
pub mod store;
pub mod suspended;
pub mod swap_chaos;
pub mod twins;
pub mod unmodified;
pub mod vm;
pub mod windows;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One test of this process at a time: for tests that take much of what a process has, or change what holds for all of it.
pub fn alone() -> MutexGuard<'static, ()> {
    static TEST: Mutex<()> = Mutex::new(());
    TEST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells when so much time has gone by since now.
pub fn within(time: Duration) -> impl Fn() -> bool {
    let start = Instant::now();
    move || start.elapsed() > time
}

/// Returns from a test, saying why, where /dev/kvm is missing. In CI that is a failure: there it must run.
#[macro_export]
macro_rules! need_kvm {
    () => {
        if let Err(error) = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
        {
            assert!(
                std::env::var_os("CI").is_none(),
                "/dev/kvm cannot be opened in CI: {error}"
            );
            eprintln!("SKIPPED: /dev/kvm cannot be opened: {error}");
            return;
        }
    };
}

/// As [`need_kvm`], for the kernel features of the engine.
#[macro_export]
macro_rules! need_userfaultfd {
    () => {
        if let Err(error) = std::fs::File::open("/dev/userfaultfd") {
            assert!(
                std::env::var_os("CI").is_none(),
                "/dev/userfaultfd cannot be opened in CI: {error}"
            );
            eprintln!("SKIPPED: /dev/userfaultfd cannot be opened: {error}");
            return;
        }
    };
}
