//! What tests start or preload and cannot depend on: a cdylib, another package's program. So cargo is called, for the target
//! directory and the profile of the program that runs.

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// This variable is set where the whole workspace has just been built with all its targets, as `.ci/test` does. A package that is built
/// alone has other features, and so has what it depends on: all of that would be built a second time.
const ALL_IS_BUILT: &str = "VMM_DEDUP_ALL_IS_BUILT";

/// Where cargo puts the programs and libraries of this program's profile.
///
/// # Panics
/// If this program is not where cargo puts programs.
#[must_use]
pub fn profile() -> PathBuf {
    // .../PROFILE/deps/test-1234 or .../PROFILE/program
    let own = std::env::current_exe().expect("we run");
    let folder = own
        .ancestors()
        .skip(1)
        .find(|folder| !folder.ends_with("deps"))
        .expect("a program is in a folder");
    folder.to_owned()
}

/// Runs a command of cargo's on this workspace; what it prints on standard output.
///
/// # Panics
/// If it fails.
pub fn cargo(command: &[&str]) -> String {
    let profile = profile();
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(command).arg("--quiet");
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo
        .arg("--target-dir")
        .arg(profile.parent().expect("profiles are in the target directory"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    let output = cargo.stderr(Stdio::inherit()).output().expect("cargo runs");
    assert!(output.status.success(), "cargo {command:?}: {}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Builds a package, unless all is built: see [`ALL_IS_BUILT`].
///
/// # Panics
/// If it cannot be built.
pub fn package(name: &str) {
    if std::env::var_os(ALL_IS_BUILT).is_none() {
        cargo(&["build", "--package", name]);
    }
}

/// Path of a package's library to preload.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn library(name: &str) -> PathBuf {
    package(name);
    profile().join(format!("lib{}.so", name.replace('-', "_")))
}
