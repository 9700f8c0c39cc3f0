//! Each target for some seconds, or with VMM_DEDUP_FUZZ_INPUTS for so many inputs, with a mutator that does the same in every run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use vmm_dedup_fuzz_bodies::mutate::Mutator;
use vmm_dedup_fuzz_bodies::{TARGETS, Target};

/// How long each target runs.
const TIME: Duration = Duration::from_secs(4);
/// Inputs that each must get through in that time also on a busy machine; if not, nothing is tested.
const FEWEST_INPUTS: u32 = 200;

fn target(name: &str) -> Target {
    *TARGETS
        .iter()
        .find(|target| target.name == name)
        .expect("a target")
}

/// Where libFuzzer finds the seeds.
fn seeds_of(target: &Target) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/seeds")
        .join(target.name)
}

/// Checks an input; on a failure says which it was.
fn check(target: &Target, input: &[u8]) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (target.check)(input))) {
        eprintln!("{} fails on the input \"{}\"", target.name, input.escape_ascii());
        std::panic::resume_unwind(panic);
    }
}

fn run(name: &str) {
    let target = target(name);
    let seeds = (target.seeds)();
    seeds.iter().for_each(|(_, seed)| check(&target, seed));
    let mut mutator = Mutator::new(seeds.into_iter().map(|(_, seed)| seed).collect());
    let wanted: Option<u32> = std::env::var("VMM_DEDUP_FUZZ_INPUTS")
        .ok()
        .map(|number| number.parse().expect("a number of inputs"));
    let (start, mut inputs) = (Instant::now(), 0);
    while wanted.map_or(start.elapsed() < TIME, |wanted| inputs < wanted) {
        check(&target, &mutator.input());
        inputs += 1;
    }
    println!("{name}: {inputs} inputs");
    assert!(inputs >= wanted.unwrap_or(FEWEST_INPUTS), "only {inputs} inputs");
}

#[test]
fn the_service_knows_what_an_agents_bytes_say() {
    run("agent");
}

#[test]
fn messages_are_what_their_bytes_say() {
    run("messages");
}

#[test]
fn fleet_files_come_to_the_plan_that_they_say() {
    run("fleet_file");
}

#[test]
fn the_gate_lets_through_what_it_should() {
    run("gate");
}

#[test]
fn the_seeds_of_libfuzzer_are_those_of_the_targets() {
    for target in TARGETS {
        let folder = seeds_of(&target);
        let mut expected = (target.seeds)();
        expected.sort();
        let files = std::fs::read_dir(&folder).expect("a folder of seeds");
        let mut found: Vec<(String, Vec<u8>)> = files
            .map(|file| {
                let file = file.expect("a file");
                let content = std::fs::read(file.path()).expect("a seed");
                (file.file_name().to_string_lossy().into_owned(), content)
            })
            .collect();
        found.sort();
        let names =
            |seeds: &[(String, Vec<u8>)]| seeds.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(name, seed)| (name.to_owned(), seed))
            .collect();
        let hint = "write them again: cargo run -p vmm-dedup-fuzz-bodies --example seeds";
        assert_eq!(names(&found), names(&expected), "{hint}");
        assert!(found == expected, "seeds of {}: {hint}", target.name);
    }
}
