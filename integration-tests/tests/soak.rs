//! The short form of the soak (`make soak`).

use serde_json::Value;
use std::process::Command;
use vmm_dedup_integration_tests::{need_kvm, need_userfaultfd};

#[test]
fn a_fleet_that_churns_keeps_its_sharing_and_does_not_grow() {
    need_kvm!();
    need_userfaultfd!();
    let soak = Command::new(env!("CARGO_BIN_EXE_soak"))
        .args(["--seconds", "120"])
        .output()
        .expect("the soak runs");
    let account: Value = serde_json::from_slice(&soak.stdout).expect("JSON");
    let said = String::from_utf8_lossy(&soak.stderr);
    assert!(soak.status.success(), "{account:#}\n{said}");
    assert_eq!(account["wrong"], 0);
    assert!(
        account["rounds"]
            .as_array()
            .is_some_and(|rounds| rounds.len() >= 6)
    );
}
