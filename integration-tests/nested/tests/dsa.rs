//! The model of DSA under software that nobody here wrote. Needs apt with a Debian mirror, dpkg-deb and a C compiler; skips
//! visibly where one of them is missing, except in CI. The first test fetches some 400 MB of packages into the target
//! directory.

use serde_json::Value;
use std::path::PathBuf;
use std::sync::OnceLock;
use vmm_dedup_built::{cargo, profile};
use vmm_dedup_nested::dsa::{Play, Said, Stage};

/// The CLI, the driver's suites, and the tests of engines that verify for the service. They are chosen as `make test` chooses all
/// tests but these, so that cargo finds them built, with the very same features. (The test `loss` needs the CLI.)
fn executables() -> &'static [PathBuf; 3] {
    static ALL: OnceLock<[PathBuf; 3]> = OnceLock::new();
    ALL.get_or_init(|| {
        let messages = cargo(&[
            "test",
            "--no-run",
            "--message-format=json",
            "--workspace",
            "--exclude",
            "vmm-dedup-nested",
            "--test",
            "conformance",
            "--test",
            "verifiers",
            "--test",
            "loss",
        ]);
        ["vmm-dedup", "conformance", "verifiers"].map(|name| {
            let executable = messages.lines().find_map(|line| {
                let message: Value = serde_json::from_str(line).ok()?;
                let ours = message["target"]["name"] == name;
                message["executable"].as_str().filter(|_| ours).map(PathBuf::from)
            });
            executable.expect("cargo has built it")
        })
    })
}

/// Plays; `None`, and the reason on standard error, where this machine cannot.
fn play(play: Play) -> Option<Said> {
    let [vmm_dedup, conformance, verifiers] = executables().clone();
    let stage = Stage {
        cache: profile().with_file_name("nested"),
        vmm_dedup,
        conformance,
        verifiers,
    };
    match stage.play(play) {
        // The kernel of these two is of a certain version, which a mirror may have dropped.
        Err(failure)
            if failure.is_missing()
                && (matches!(play, Play::Sva | Play::Driver) || std::env::var_os("CI").is_none()) =>
        {
            eprintln!("SKIPPED {play}: {failure}");
            None
        }
        result => Some(result.unwrap_or_else(|failure| panic!("{failure}"))),
    }
}

#[test]
fn linux_drives_the_model_and_its_own_test_passes() {
    let Some(said) = play(Play::Dmatest) else {
        return;
    };
    assert_eq!(said.line("queue "), Some("enabled"), "{}", said.console);
    let summary = said.line("summary ").unwrap_or_default();
    assert!(summary.starts_with("20 tests, 0 failures"), "{}", said.console);
    assert_eq!(said.line("afterwards "), Some("disabled"), "{}", said.console);
}

/// Every operation that Intel's test has for a dedicated queue, with addresses of its process.
#[test]
fn intels_own_test_passes_with_a_programs_addresses() {
    let Some(said) = play(Play::Sva) else {
        return;
    };
    // Sapphire Rapids' set as Linux shows it, which leaves batches out (INTEL-SA-01084).
    let device = said.line("device ").unwrap_or_default();
    assert!(device.ends_with("00000001,003f03fd"), "{device}");
    let failed: Vec<&String> = said
        .lines
        .iter()
        .filter(|line| line.starts_with("not passed"))
        .collect();
    assert!(failed.is_empty(), "{failed:?}\n{}", said.console);
    let passed = said
        .lines
        .iter()
        .filter(|line| line.starts_with("passed"))
        .count();
    // Without operands; each of ten and of four in four ways; and three more sizes of these.
    assert_eq!(passed, 3 + 14 * 4 + 4 * 3, "{}", said.console);
}

/// Our driver through Linux's device nodes: its suites, and two services that merge real pages.
#[test]
fn our_driver_conforms_and_merges_through_device_nodes() {
    let Some(said) = play(Play::Driver) else {
        return;
    };
    for test in [
        "it_conforms_through_a_device_node",
        "real_pages_are_merged_through_device_nodes",
    ] {
        assert!(
            said.line(&format!("passed {test}, ")).is_some(),
            "{}",
            said.console
        );
    }
}

/// Our driver by VFIO: its suites, and a service that merges real pages.
#[test]
fn our_driver_conforms_and_merges_through_vfio() {
    let Some(said) = play(Play::Vfio) else {
        return;
    };
    for test in [
        "it_conforms_through_a_device_node",
        "real_pages_are_merged_through_vfio",
    ] {
        assert!(
            said.line(&format!("passed {test}, ")).is_some(),
            "{}",
            said.console
        );
    }
}
