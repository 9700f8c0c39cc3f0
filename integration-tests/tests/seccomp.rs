//! What the engine's table of system calls says is what its threads do.

use std::collections::BTreeSet;
use std::process::Command;
use vmm_dedup::seccomp::{CALLS, Call, RARE};
use vmm_dedup_integration_tests::need_userfaultfd;

fn sandbox(mode: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_sandbox"))
        .arg(mode)
        .output()
        .expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Any call that the table lacks ends the process.
#[test]
fn everything_works_under_the_filter() {
    need_userfaultfd!();
    sandbox("enforce");
}

/// A filter that asks for every call has seen those of the table, and no others.
#[test]
fn the_table_has_what_is_done_and_nothing_else() {
    need_userfaultfd!();
    let text = sandbox("record");
    let seen: Vec<(String, i64, Option<u32>)> = serde_json::from_str(&text).expect("a list");
    let seen: BTreeSet<(i64, Option<u32>)> = seen
        .into_iter()
        .map(|(_, call, request)| (call, request))
        .collect();
    let set = |calls: &[Call]| -> BTreeSet<(i64, Option<u32>)> {
        calls.iter().map(|call| (call.number, call.request)).collect()
    };
    let (known, rare) = (set(CALLS), set(RARE));
    assert!(known.is_disjoint(&rare));
    let missing: Vec<_> = seen
        .iter()
        .filter(|call| !known.contains(call) && !rare.contains(call))
        .collect();
    let unused: Vec<_> = known.difference(&seen).collect();
    assert!(missing.is_empty(), "calls that the table lacks: {missing:?}");
    assert!(unused.is_empty(), "calls that nobody makes: {unused:?}");
}
