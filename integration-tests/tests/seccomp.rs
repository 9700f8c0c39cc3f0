//! What the engine's table of system calls says is what its parts do.

use std::collections::BTreeSet;
use std::process::Command;
use vmm_dedup::seccomp::{CALLS, Call, Part, Why, allowed};
use vmm_dedup_integration_tests::need_userfaultfd;

/// What the kernel keeps of a thread's name.
const LONGEST_NAME: usize = 15;

type Made = (i64, Option<u32>);
/// A thread, and what it made.
type Seen = (String, i64, Option<u32>);

/// Whether a part has to make a call that it makes rarely, since what tells the use of memory is there, or stands in for it.
fn told_here(part: Part, why: Why, sources: &[String]) -> bool {
    let source = match (part, why) {
        (Part::Damon, Why::KernelDamon) => "damon",
        (Part::Scan, Why::IdleBitmap) => "page-idle",
        _ => return false,
    };
    sources.iter().any(|told| told == source)
}

/// Each part runs under a filter of what the table has of it, above one that asks for every call: what the table lacks ends the
/// process, and what nobody does is not seen.
#[test]
fn each_part_does_what_the_table_has_of_it_and_nothing_else() {
    need_userfaultfd!();
    let output = Command::new(env!("CARGO_BIN_EXE_sandbox"))
        .output()
        .expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}: {errors} (`sandbox record` runs to the end and shows all calls)",
        output.status
    );
    let (seen, sources): (Vec<Seen>, Vec<String>) =
        serde_json::from_slice(&output.stdout).expect("two lists");
    let (mut missing, mut unused) = (Vec::new(), Vec::new());
    for &part in Part::ALL {
        let name = &part.name()[..part.name().len().min(LONGEST_NAME)];
        let done: BTreeSet<Made> = seen
            .iter()
            .filter(|(thread, ..)| thread == name)
            .map(|(_, number, request)| (*number, *request))
            .collect();
        let of_part = |is: &dyn Fn(&Call) -> bool| -> BTreeSet<Made> {
            let calls = CALLS.iter().filter(|call| is(call));
            calls.map(|call| (call.number, call.request)).collect()
        };
        let always = of_part(&|call| call.parts.contains(&part));
        // What only some kernels have is done where this one has it.
        let here = of_part(&|call| {
            let rare = call.rare.iter().filter(|(_, parts)| parts.contains(&part));
            rare.into_iter().any(|(why, _)| told_here(part, *why, &sources))
        });
        let may = of_part(&|call| call.is_of(part));
        missing.extend(done.difference(&may).map(|call| (part, *call)));
        unused.extend(
            always
                .union(&here)
                .filter(|call| !done.contains(call))
                .map(|call| (part, *call)),
        );
    }
    assert!(missing.is_empty(), "calls that the table lacks: {missing:?}");
    assert!(unused.is_empty(), "calls that nobody makes: {unused:?}");
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
