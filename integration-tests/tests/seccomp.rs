//! What the engine's table of system calls says is what its parts do.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeSet;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use vmm_dedup::seccomp::Part::{
    self, Agent, Announce, Count, Damon, Fault, Pack, Refused, Scan, Start, Supervisor,
};
use vmm_dedup::seccomp::{CALLS, Call, Why, allowed};
use vmm_dedup_integration_tests::need_userfaultfd;

/// What the kernel keeps of a thread's name.
const LONGEST_NAME: usize = 15;

type Made = (i64, Option<u32>);
/// A thread, and what it made.
type Seen = (String, i64, Option<u32>);

/// What the table has of parts and what is not played here, and why. All else is: what the table has of a part, that part does.
const NOT_PLAYED: &[(&str, Why, &[Part], &str)] = &[
    (
        "brk",
        Why::Allocator,
        &[
            Supervisor, Fault, Pack, Count, Refused, Damon, Agent, Start, Announce,
        ],
        "a thread has a heap of its own, and takes of the first one when there are more threads than heaps",
    ),
    (
        "clock_gettime",
        Why::Again,
        &[Count, Refused, Announce],
        "the kernel tells the time without a call where the host's clock allows that",
    ),
    (
        "clock_nanosleep",
        Why::Again,
        &[Supervisor, Fault, Pack, Count, Damon, Start],
        "it is a matter of chance who has to wait",
    ),
    (
        "fcntl",
        Why::OtherLibrary,
        &[Pack, Damon],
        "this program is linked with one C library",
    ),
    (
        "fstat",
        Why::OtherLibrary,
        &[Fault, Pack, Count, Refused, Damon, Agent],
        "this program is linked with one C library",
    ),
    (
        "lstat",
        Why::OtherLibrary,
        &[Supervisor, Scan, Start],
        "this program is linked with one C library",
    ),
    (
        "madvise",
        Why::Allocator,
        &[Announce],
        "what it frees is less than what the allocator gives back",
    ),
    (
        "mremap",
        Why::Allocator,
        &[Announce],
        "nothing that it has grows beyond a page",
    ),
    (
        "nanosleep",
        Why::OtherLibrary,
        &[Supervisor, Scan, Fault, Pack, Count, Damon, Start],
        "this program is linked with one C library",
    ),
    (
        "open",
        Why::OtherLibrary,
        &[Scan, Fault, Pack, Count, Refused, Damon, Agent],
        "this program is linked with one C library",
    ),
    (
        "readlink",
        Why::Panic,
        &[Fault, Pack, Refused, Damon, Agent],
        "it follows the link to debug information that is in a file of its own",
    ),
    (
        "restart_syscall",
        Why::Again,
        &[Fault, Pack, Count, Refused, Agent, Start, Announce],
        "their waits begin anew where they are stopped, or are of moments",
    ),
    (
        "sched_yield",
        Why::Locks,
        &[
            Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent, Start, Announce,
        ],
        "who sends a message has to be stopped in the middle of that",
    ),
    (
        "stat",
        Why::OtherLibrary,
        &[Supervisor, Scan, Fault, Pack, Count, Refused, Damon, Agent, Start],
        "this program is linked with one C library",
    ),
];

/// What the allocator is told where others want it all the time: it maps each block of some size by itself, which grows by mremap.
const TUNABLES: &str = "glibc.malloc.mmap_threshold=4096:glibc.malloc.tcache_count=0";

/// How often is played what is a matter of chance, at most.
const CHANCES: usize = 5;

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

/// All that was seen in one play, and what was there. The program is stopped and goes on all the time, so that waits do.
fn play(arguments: &[&str]) -> (Vec<Seen>, Vec<String>) {
    let mut sandbox = Command::new(env!("CARGO_BIN_EXE_sandbox"));
    sandbox.args(arguments).env("RUST_BACKTRACE", "1");
    if arguments == ["crowded"] {
        sandbox.env("GLIBC_TUNABLES", TUNABLES);
    }
    sandbox.stdout(Stdio::piped()).stderr(Stdio::piped());
    let sandbox = sandbox.spawn().expect("it runs");
    let stopped = Stopped::of(&sandbox);
    let output = sandbox.wait_with_output().expect("it runs");
    drop(stopped);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{arguments:?}: {}: {errors} (`sandbox record ...` runs to the end and shows all calls)",
        output.status
    );
    serde_json::from_slice(&output.stdout).expect("two lists")
}

/// A program that is stopped for a moment again and again, until this is dropped.
struct Stopped {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stopped {
    fn of(program: &Child) -> Self {
        let id = Pid::from_child(program);
        // Whoever has the number next is not meant.
        let program = pidfd_open(id, PidfdFlags::empty()).expect("it is there");
        let ends = Arc::new(AtomicBool::new(false));
        let theirs = ends.clone();
        let thread = std::thread::spawn(move || {
            while !theirs.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(20));
                let _ = pidfd_send_signal(&program, Signal::STOP);
                std::thread::sleep(Duration::from_millis(2));
                let _ = pidfd_send_signal(&program, Signal::CONT);
            }
        });
        Self {
            ends,
            thread: Some(thread),
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic");
        }
    }
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
    for _ in 0..CHANCES {
        seen.extend(play(&["crowded"]).0);
        if unused(&seen, is_here).is_empty() {
            break;
        }
    }
    let unused = unused(&seen, is_here);
    let missing: Vec<(Part, Made)> = Part::ALL
        .iter()
        .flat_map(|&part| {
            let may: BTreeSet<Made> = CALLS
                .iter()
                .filter(|call| call.is_of(part))
                .map(|call| (call.number, call.request))
                .collect();
            let done = done(&seen, part).into_iter();
            done.filter(move |made| !may.contains(made))
                .map(move |made| (part, made))
        })
        .collect();
    assert!(missing.is_empty(), "calls that the table lacks: {missing:?}");
    assert!(unused.is_empty(), "calls that nobody makes: {unused:?}");
}

/// What a part was seen to do.
fn done(seen: &[Seen], part: Part) -> BTreeSet<Made> {
    let name = &part.name()[..part.name().len().min(LONGEST_NAME)];
    let theirs = seen.iter().filter(|(thread, ..)| thread == name);
    theirs.map(|(_, number, request)| (*number, *request)).collect()
}

/// What the table has of parts and none of them was seen to do, although it is played here.
fn unused(seen: &[Seen], is_here: impl Fn(&str) -> bool) -> Vec<(Part, &'static str, Option<Why>)> {
    let is_played = |call: &Call, part: Part, why: Why| {
        let mut listed = NOT_PLAYED.iter();
        let listed = listed
            .any(|(name, other, parts, _)| (*name, *other) == (call.name, why) && parts.contains(&part));
        !listed && needs(why).is_none_or(&is_here)
    };
    let mut unused = Vec::new();
    for &part in Part::ALL
        .iter()
        .filter(|part| **part != Part::Damon || is_here("damon"))
    {
        let done = done(seen, part);
        for call in CALLS
            .iter()
            .filter(|call| !done.contains(&(call.number, call.request)))
        {
            if call.parts.contains(&part) {
                unused.push((part, call.name, None));
            }
            let rare = call.rare.iter().filter(|(_, parts)| parts.contains(&part));
            let played = rare.filter(|(why, _)| is_played(call, part, *why));
            unused.extend(played.map(|(why, _)| (part, call.name, Some(*why))));
        }
    }
    unused
}

/// Whoever says that something is not played here says why, once, and of something that the table has.
#[test]
fn what_is_not_played_is_in_the_table_with_its_reason() {
    for (nth, (name, why, parts, reason)) in NOT_PLAYED.iter().enumerate() {
        let call = CALLS.iter().find(|call| call.name == *name).expect("it is there");
        let has = |part: &Part| {
            call.rare
                .iter()
                .any(|(other, parts)| other == why && parts.contains(part))
        };
        assert!(
            !parts.is_empty() && parts.iter().all(has) && !reason.is_empty(),
            "{name} {why:?}"
        );
        let same = |(other, reasons, ..): &(&str, Why, &[Part], &str)| (other, reasons) == (name, why);
        assert_eq!(NOT_PLAYED.iter().position(same), Some(nth));
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
