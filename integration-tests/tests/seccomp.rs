//! What the engine's table of system calls says is what its parts do.

use std::collections::BTreeSet;
use std::process::Command;
use vmm_dedup::seccomp::Part;
use vmm_dedup::seccomp::{CALLS, Call, Why, allowed};
use vmm_dedup_integration_tests::need_userfaultfd;

/// What the kernel keeps of a thread's name.
const LONGEST_NAME: usize = 15;

type Made = (i64, Option<u32>);
/// A thread, and what it made.
type Seen = (String, i64, Option<u32>);

/// When calls are made that are not played here, and why they are not. All others are: what the table has of a part, that part does.
const NOT_PLAYED: &[(Why, &str)] = &[
    (Why::OtherAgent, "this kernel has no vsock of its own"),
    (Why::Again, "it is a matter of chance who has to wait"),
    (Why::Locks, "it is a matter of chance whose lock is held"),
    (
        Why::Allocator,
        "it is a matter of chance whose allocation finds no room",
    ),
    (
        Why::Log,
        "nothing is logged at the level of this test, and bells ring when they must",
    ),
    (Why::OtherLibrary, "this program is linked with one C library"),
];

/// Of those that are played what is not done here.
const NOT_DONE: &[(&str, Why, &str)] = &[(
    "readlink",
    Why::Panic,
    "it follows the link to debug information that is in a file of its own",
)];

/// What has to be there for calls to be made, or stands in for it, by the names that `sandbox` has.
fn needs(why: Why) -> Option<&'static str> {
    match why {
        Why::KernelDamon => Some("damon"),
        Why::IdleBitmap => Some("page-idle"),
        Why::OpenFiles => Some("overlay"),
        _ => None,
    }
}

/// Whether nothing can be missing: what stands in is files, and an overlayfs needs a kernel that has it.
fn must_be_here(what: &str) -> bool {
    let kernel = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    what != "overlay" || kernel.lines().any(|line| line.ends_with("\toverlay"))
}

/// All that was seen in one play, and what was there.
fn play(arguments: &[&str]) -> (Vec<Seen>, Vec<String>) {
    let output = Command::new(env!("CARGO_BIN_EXE_sandbox"))
        .args(arguments)
        .env("RUST_BACKTRACE", "1")
        .output()
        .expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{arguments:?}: {}: {errors} (`sandbox record ...` runs to the end and shows all calls)",
        output.status
    );
    serde_json::from_slice(&output.stdout).expect("two lists")
}

/// The threads of the engine, which panic with a filter of the engine's making.
fn threads() -> impl Iterator<Item = Part> {
    let calls = [Part::Start, Part::Announce, Part::Call];
    Part::ALL
        .iter()
        .copied()
        .filter(move |part| !calls.contains(part))
}

/// Each part runs under a filter of what the table has of it, above one that asks for every call: what the table lacks ends the
/// process, and what nobody does is not seen.
#[test]
fn each_part_does_what_the_table_has_of_it_and_nothing_else() {
    need_userfaultfd!();
    let (mut seen, here) = play(&[]);
    seen.extend(play(&["old"]).0);
    seen.extend(play(&["trouble"]).0);
    for part in threads() {
        seen.extend(play(&["panic", part.name()]).0);
    }
    let is_here = |what: &str| here.iter().any(|told| told == what);
    for what in ["damon", "page-idle", "overlay"] {
        if !is_here(what) {
            assert!(
                !must_be_here(what) || std::env::var_os("CI").is_none(),
                "no {what} in CI"
            );
            eprintln!("SKIPPED: calls that are made with {what}, which is not here");
        }
    }
    let is_played = |call: &Call, part: Part, why: Why| {
        let listed = NOT_PLAYED.iter().any(|(other, _)| *other == why);
        let not_done = NOT_DONE
            .iter()
            .any(|(name, other, _)| (*name, *other) == (call.name, why));
        !listed && !not_done && needs(why).is_none_or(is_here) && (part != Part::Damon || is_here("damon"))
    };
    let (mut missing, mut unused) = (Vec::new(), Vec::new());
    for &part in Part::ALL {
        let name = &part.name()[..part.name().len().min(LONGEST_NAME)];
        let done: BTreeSet<Made> = seen
            .iter()
            .filter(|(thread, ..)| thread == name)
            .map(|(_, number, request)| (*number, *request))
            .collect();
        let may: BTreeSet<Made> = CALLS
            .iter()
            .filter(|call| call.is_of(part))
            .map(|call| (call.number, call.request))
            .collect();
        missing.extend(done.difference(&may).map(|call| (part, *call)));
        for call in CALLS
            .iter()
            .filter(|call| !done.contains(&(call.number, call.request)))
        {
            if call.parts.contains(&part) && (part != Part::Damon || is_here("damon")) {
                unused.push((part, call.name, None));
            }
            let rare = call.rare.iter().filter(|(_, parts)| parts.contains(&part));
            let played = rare.filter(|(why, _)| is_played(call, part, *why));
            unused.extend(played.map(|(why, _)| (part, call.name, Some(*why))));
        }
    }
    assert!(missing.is_empty(), "calls that the table lacks: {missing:?}");
    assert!(unused.is_empty(), "calls that nobody makes: {unused:?}");
}

/// Whoever says that something is not played here says why, once, and of something that the table has.
#[test]
fn what_is_not_played_is_in_the_table_with_its_reason() {
    let has = |why: Why, name: Option<&str>, part: Option<Part>| {
        let named = CALLS
            .iter()
            .filter(|call| name.is_none_or(|name| call.name == name));
        let mut rare = named.flat_map(|call| call.rare);
        rare.any(|(other, parts)| *other == why && part.is_none_or(|part| parts.contains(&part)))
    };
    for (nth, (why, reason)) in NOT_PLAYED.iter().enumerate() {
        assert!(has(*why, None, None) && !reason.is_empty(), "{why:?}");
        assert_eq!(NOT_PLAYED.iter().position(|(other, _)| other == why), Some(nth));
    }
    for (name, why, reason) in NOT_DONE {
        assert!(has(*why, Some(name), None) && !reason.is_empty(), "{name}");
    }
}

#[test]
fn a_thread_may_do_what_its_filter_lets_through_of_whoever_starts_it() {
    for &part in Part::ALL {
        let may: BTreeSet<Made> = allowed(part).map(|call| (call.number, call.request)).collect();
        for started in part.starts() {
            assert!(
                allowed(*started).all(|call| may.contains(&(call.number, call.request))),
                "{part:?} {started:?}"
            );
        }
    }
    assert!(allowed(Part::Call).all(|call| call.request.is_none()));
}
