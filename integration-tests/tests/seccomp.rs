//! What the engine's tables of system calls say is what its parts do.

use std::collections::BTreeSet;
use std::process::Command;
use vmm_dedup::seccomp::{CALLS, Call, Part, RARE, allowed};
use vmm_dedup_integration_tests::need_userfaultfd;

/// What the kernel keeps of a thread's name.
const LONGEST_NAME: usize = 15;

type Made = (i64, Option<u32>);
/// A thread, and what it made.
type Seen = (String, i64, Option<u32>);

/// Each part runs under a filter of what the tables have of it, above one that asks for every call: what the tables lack ends the
/// process, and what nobody does is not seen.
#[test]
fn each_part_does_what_the_tables_have_of_it_and_nothing_else() {
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
    let of = |calls: &[&Call]| -> BTreeSet<Made> {
        calls.iter().map(|call| (call.number, call.request)).collect()
    };
    let (mut missing, mut unused) = (Vec::new(), Vec::new());
    for part in Part::ALL {
        let name = &part.name()[..part.name().len().min(LONGEST_NAME)];
        let done: BTreeSet<Made> = seen
            .iter()
            .filter(|(thread, ..)| thread == name)
            .map(|(_, number, request)| (*number, *request))
            .collect();
        let own = |calls: &'static [Call]| -> Vec<&Call> {
            calls.iter().filter(|call| call.parts.contains(&part)).collect()
        };
        let (always, rare) = (of(&own(CALLS)), of(&own(RARE)));
        // What only some kernels have is done where this one has it.
        let of_source = |call: &&Call| match part {
            Part::Damon => sources.iter().any(|source| source == "damon") && call.parts == [Part::Damon],
            Part::Scan => {
                sources.iter().any(|source| source == "page-idle") && call.number == libc::SYS_pwrite64
            }
            _ => false,
        };
        let here: Vec<&Call> = own(RARE).into_iter().filter(of_source).collect();
        unused.extend(of(&here).difference(&done).map(|call| (part, *call)));
        let new = done
            .iter()
            .filter(|call| !always.contains(call) && !rare.contains(call));
        missing.extend(new.map(|call| (part, *call)));
        unused.extend(always.difference(&done).map(|call| (part, *call)));
    }
    assert!(missing.is_empty(), "calls that the tables lack: {missing:?}");
    assert!(unused.is_empty(), "calls that nobody makes: {unused:?}");
}

#[test]
fn a_thread_may_do_what_its_filter_lets_through_of_whoever_starts_it() {
    for part in Part::ALL {
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
