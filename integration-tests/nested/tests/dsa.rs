//! The model of DSA under software that nobody here wrote. Needs apt with a Debian mirror, dpkg-deb and a C compiler; skips
//! visibly where one of them is missing, except in CI. The first test fetches some 400 MB of packages into the target
//! directory.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use vmm_dedup_nested::dsa::{Play, Said, Stage};

/// The CLI, which `cargo test` of this package alone does not build.
fn programs() -> &'static Path {
    static FOLDER: OnceLock<std::path::PathBuf> = OnceLock::new();
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

/// Plays; `None`, and the reason on standard error, where this machine cannot.
fn play(play: Play) -> Option<Said> {
    let folder = programs();
    let stage = Stage {
        cache: folder.with_file_name("nested"),
        vmm_dedup: folder.join("vmm-dedup"),
    };
    match stage.play(play) {
        Err(failure) if failure.is_missing() && std::env::var_os("CI").is_none() => {
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
