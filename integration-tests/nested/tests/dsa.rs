//! The model of DSA under software that nobody here wrote. Needs apt with a Debian mirror, dpkg-deb and a C compiler; skips
//! visibly where one of them is missing, except in CI. The first test fetches some 400 MB of packages into the target
//! directory.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use vmm_dedup_nested::dsa::{Play, Said, Stage};

/// The CLI, which `cargo test` of this package alone does not build.
fn programs() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let own = Path::new(env!("CARGO_BIN_EXE_vmm-dedup-nested"));
        let profile = own.parent().expect("programs are in PROFILE");
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "-p", "vmm-dedup-cli", "--manifest-path"]);
        cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        cargo
            .arg("--target-dir")
            .arg(profile.parent().expect("profiles are in the target directory"));
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(
            cargo
                .status()
                .expect("cargo runs the tests, so it can be run")
                .success()
        );
        profile.to_owned()
    })
}

/// The executable of a test of another package.
fn executable(package: &str, test: &str) -> PathBuf {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args([
        "test",
        "--no-run",
        "--quiet",
        "--message-format=json",
        "-p",
        package,
    ]);
    cargo.args(["--test", test, "--manifest-path"]);
    cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    let profile = programs();
    cargo
        .arg("--target-dir")
        .arg(profile.parent().expect("profiles are in the target directory"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    let output = cargo.output().expect("cargo runs the tests, so it can be run");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    let executable = messages.lines().find_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let ours = message["target"]["name"] == test;
        message["executable"].as_str().filter(|_| ours).map(PathBuf::from)
    });
    executable.expect("a test has an executable")
}

/// Plays; `None`, and the reason on standard error, where this machine cannot.
fn play(play: Play) -> Option<Said> {
    // One after the other: they prepare the same folder.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = programs();
    let stage = Stage {
        cache: folder.with_file_name("nested"),
        vmm_dedup: folder.join("vmm-dedup"),
        conformance: executable("vmm-dedup-dsa", "conformance"),
        verifiers: executable("vmm-dedup-integration-tests", "verifiers"),
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
    assert_eq!(passed, 27, "{}", said.console);
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
