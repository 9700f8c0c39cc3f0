//! The suites find what is wrong with an engine, and nothing wrong with a slow one.

use super::doubles::{Double, Faults};
use crate::compare::{Cpu, KeyKind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use vmm_dedup_protocol::key::Salt;

fn double(faults: Faults) -> Double<Cpu> {
    Double::new(Cpu::new(KeyKind::Lines(Salt(7))), faults)
}

fn slow() -> Faults {
    Faults {
        latency: Duration::from_micros(200),
        reorder: true,
        ..Faults::default()
    }
}

/// Doubles with one fault each.
fn bad() -> [Faults; 2] {
    let good = Faults::default();
    [
        Faults { lies: 50, ..good },
        Faults {
            dies_after: Some(20),
            ..good
        },
    ]
}

fn fails(check: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(check)).is_err()
}

#[test]
fn a_slow_engine_conforms() {
    super::keys(&mut |_| Box::new(double(slow())));
    super::verify(&mut |_| Box::new(double(slow())));
}

#[test]
fn bad_keys_do_not_conform() {
    let lost = Faults {
        lost: 50,
        ..Faults::default()
    };
    for faults in bad().into_iter().chain([lost]) {
        assert!(
            fails(|| super::keys(&mut |_| Box::new(double(faults)))),
            "{faults:?}"
        );
    }
}

#[test]
fn bad_searches_do_not_conform() {
    let lost = Faults {
        lost: 50,
        ..Faults::default()
    };
    for faults in bad().into_iter().chain([lost]) {
        assert!(
            fails(|| super::tree_search(&mut |_| Box::new(double(faults)))),
            "{faults:?}"
        );
    }
}

#[test]
fn bad_verifiers_do_not_conform() {
    let good = Faults::default();
    let others = [
        Faults { lost: 2, ..good },
        Faults { twice: 2, ..good },
        Faults { strays: 2, ..good },
        Faults { faults: 2, ..good },
    ];
    for faults in bad().into_iter().chain(others) {
        assert!(
            fails(|| super::verify(&mut |_| Box::new(double(faults)))),
            "{faults:?}"
        );
    }
}
