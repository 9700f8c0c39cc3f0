//! Scanning threads that die, which only a bug explains.

use std::time::{Duration, Instant};
use vmm_dedup::Observer;

const PATIENCE: Duration = Duration::from_secs(60);

/// Lets the one scanning thread of this process die in the middle of its work. `touch` gives it some: something that it looks at.
///
/// # Panics
/// If it lives on.
pub fn kill_scanner(touch: impl Fn()) {
    let is_scanning = |name: &str| name == "dedup-scan";
    let mut lives = true;
    let observer = Observer::begin(move |_| {
        let here = std::thread::current();
        assert!(
            !(here.name().is_some_and(is_scanning) && std::mem::take(&mut lives)),
            "the scanning thread dies"
        );
    });
    let scans = || {
        let threads = std::fs::read_dir("/proc/self/task").expect("procfs");
        let names =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        names.into_iter().any(|name| is_scanning(name.trim()))
    };
    let start = Instant::now();
    while scans() {
        assert!(start.elapsed() < PATIENCE, "it lives on");
        touch();
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(observer);
}
