//! Threads of a VMM and the supervisor's, in all orders. Two uses of the VM's memory that are not ordered are an error, and so
//! is a thread that waits for ever.

use loom::thread;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use vmm_dedup_loom::{Device, Vmm};

/// Times that a thread is stopped where it could go on.
const PREEMPTIONS: usize = 3;

/// Walks through a model. One that is walked through in a few runs leaves nothing to chance, and shows nothing.
fn explore(least_runs: usize, model: impl Fn() + Send + Sync + 'static) {
    let runs: &'static AtomicUsize = Box::leak(Box::new(AtomicUsize::new(0)));
    let mut builder = loom::model::Builder::new();
    // Without a bound three threads take hours. Of the orders left out each stops threads more often.
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(move || {
        runs.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let runs = runs.load(Ordering::Relaxed);
    println!("{runs} runs");
    assert!(runs >= least_runs, "only {runs} runs");
}

/// Runs the supervisor beside what the VMM's threads do.
fn beside(vmm: &Vmm, work: impl FnOnce(&Vmm)) {
    let server = {
        let vmm = vmm.clone();
        thread::spawn(move || vmm.serve())
    };
    work(vmm);
    vmm.end();
    server.join().unwrap();
}

#[test]
fn a_device_that_has_pinned_memory_is_alone_with_it() {
    explore(5, || {
        beside(&Vmm::new(), |vmm| {
            vmm.attach();
            assert!(vmm.pin());
            vmm.use_memory();
            vmm.unpin();
        });
    });
}

#[test]
fn a_pin_races_with_memory_that_is_plugged_in() {
    explore(20, || {
        beside(&Vmm::new(), |vmm| {
            vmm.attach();
            let other = vmm.clone();
            let plugs = thread::spawn(move || other.add());
            assert!(vmm.pin());
            vmm.use_memory();
            vmm.unpin();
            plugs.join().unwrap();
        });
    });
}

#[test]
fn a_device_pins_while_memory_is_taken_back() {
    explore(20, || {
        beside(&Vmm::new(), |vmm| {
            vmm.attach();
            let other = vmm.clone();
            let lends = thread::spawn(move || {
                assert!(other.lend());
                other.take_back();
            });
            assert!(vmm.pin());
            vmm.use_memory();
            lends.join().unwrap();
        });
    });
}

#[test]
fn memory_of_a_refused_vm_is_left_alone_whatever_is_told_of_it() {
    explore(20, || {
        beside(&Vmm::new(), |vmm| {
            vmm.attach();
            let other = vmm.clone();
            let lends = thread::spawn(move || {
                assert!(other.lend());
                other.take_back();
                other.add();
            });
            assert!(vmm.refuse());
            vmm.use_memory();
            lends.join().unwrap();
        });
    });
}

#[test]
fn a_refusal_races_with_the_vm_that_it_is_of() {
    explore(20, || {
        let vmm = Vmm::new();
        beside(&vmm, |vmm| {
            let other = vmm.clone();
            let begins = thread::spawn(move || {
                other.attach();
                // Its memory goes where nobody refused it.
                assert!(other.remove());
            });
            if vmm.refuse() {
                vmm.use_memory();
            }
            begins.join().unwrap();
        });
        // Whoever came first has it no more.
        vmm.use_memory();
    });
}

#[test]
fn memory_is_taken_again_only_when_a_watched_device_has_gone() {
    explore(20, || {
        beside(&Vmm::new(), |vmm| {
            vmm.attach();
            let (device, other) = (Device::new(), vmm.clone());
            let plugs = thread::spawn(move || {
                other.add();
                other.wait();
            });
            assert!(vmm.pin_while(&device));
            vmm.use_memory();
            device.close();
            vmm.wait();
            plugs.join().unwrap();
        });
    });
}

#[test]
fn a_device_that_is_told_of_keeps_memory_that_a_watched_one_has_left() {
    explore(20, || {
        beside(&Vmm::new(), |vmm| {
            vmm.attach();
            let (device, other) = (Device::new(), vmm.clone());
            let watched = {
                let device = device.clone();
                thread::spawn(move || {
                    assert!(other.pin_while(&device));
                    device.close();
                    other.wait();
                })
            };
            assert!(vmm.pin());
            vmm.use_memory();
            watched.join().unwrap();
            vmm.use_memory();
        });
    });
}

/// Longer than whoever is lent memory, or has it pinned, has time to come to it.
const LONG: Duration = Duration::from_secs(3600);

#[test]
fn whoever_is_lent_memory_has_its_time_behind_the_copying() {
    explore(5, || {
        beside(&Vmm::that_gives_back_in(LONG), |vmm| {
            vmm.attach();
            assert!(vmm.lend_until_free());
            vmm.use_memory();
        });
    });
}

#[test]
fn a_device_has_its_time_to_be_seen_behind_the_copying() {
    explore(5, || {
        beside(&Vmm::that_gives_back_in(LONG), |vmm| {
            vmm.attach();
            let device = Device::to_come();
            assert!(vmm.pin_while(&device));
            device.open();
            vmm.use_memory();
            device.close();
            vmm.wait();
        });
    });
}

#[test]
fn memory_that_was_removed_is_its_next_owners() {
    explore(20, || {
        beside(&Vmm::new(), |vmm| {
            vmm.attach();
            let other = vmm.clone();
            let ends = thread::spawn(move || assert!(other.detach()));
            assert!(vmm.remove());
            vmm.use_memory();
            ends.join().unwrap();
        });
    });
}

#[test]
fn nobody_waits_for_a_supervisor_that_has_died() {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    explore(20, || {
        let vmm = Vmm::new();
        let asks = |ask: fn(&Vmm) -> bool| {
            let vmm = vmm.clone();
            thread::spawn(move || ask(&vmm))
        };
        let (pins, detaches) = (asks(Vmm::pin), asks(Vmm::detach));
        vmm.end();
        vmm.serve();
        vmm.close();
        // Each was answered, or has learned that nobody will.
        let answered = [pins.join().unwrap(), detaches.join().unwrap()];
        SEEN.fetch_or(
            1 << answered.iter().filter(|answered| **answered).count(),
            Ordering::Relaxed,
        );
        assert!(!vmm.pin());
    });
    assert_eq!(
        SEEN.load(Ordering::Relaxed),
        0b111,
        "one, both or none came in time"
    );
}
