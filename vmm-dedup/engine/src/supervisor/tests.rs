//! A supervisor with its thread, where no guest is needed.

use super::*;
use crate::config::Config;
use std::os::unix::net::UnixListener;
use std::time::Instant;
use vm_memory::{GuestAddress, GuestMemoryMmap};

fn supervisor() -> Supervisor {
    Supervisor::spawn(Options::default()).unwrap()
}

/// A VM that looks for a store at a path.
fn setup(store: &std::path::Path) -> Setup {
    Setup {
        store: store.into(),
        config: Config {
            name: "vm".into(),
            ..Config::default()
        },
    }
}

fn nowhere() -> Setup {
    setup("/nonexistent/store.sock".as_ref())
}

/// Memory in two regions.
fn memory() -> Arc<GuestMemoryMmap<()>> {
    let ranges = [(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 1 << 20)];
    Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap())
}

/// Waits until all letters so far are read.
fn settle(supervisor: &Supervisor) {
    assert_eq!(supervisor.with_service(|service| service.is_none()), Some(true));
}

#[test]
fn a_store_that_hangs_does_not_hang_whoever_asks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sock");
    let supervisor = supervisor();
    // It is there, and never answers.
    let listener = UnixListener::bind(&path);
    supervisor.attach(setup(&path)).unwrap();
    supervisor.add_memory(memory()).unwrap();
    for _ in 0..2 {
        // The store is asked by now.
        std::thread::sleep(Duration::from_millis(1500));
        let start = Instant::now();
        supervisor.pin().unwrap();
        supervisor.unpin();
        let waited = start.elapsed();
        assert!(waited < Duration::from_secs(6), "{waited:?}");
    }
    let start = Instant::now();
    supervisor.detach(false).unwrap();
    assert!(start.elapsed() < Duration::from_secs(6));
    drop(listener);
}

#[test]
fn memory_is_kept_for_a_vm_only() {
    let (supervisor, memory) = (supervisor(), memory());
    let add = || supervisor.add_memory(memory.clone()).unwrap();
    add();
    settle(&supervisor);
    assert_eq!(Arc::strong_count(&memory), 1, "there is no VM");
    supervisor.attach(nowhere()).unwrap();
    // Twice: the second time nothing is added, but kept.
    add();
    add();
    settle(&supervisor);
    assert_eq!(Arc::strong_count(&memory), 3);
    supervisor.detach(false).unwrap();
    assert_eq!(Arc::strong_count(&memory), 1, "the VM has ended");
}
