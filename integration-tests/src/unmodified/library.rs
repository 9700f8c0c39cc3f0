//! Libraries to preload, built as they are. Tests cannot depend on a cdylib, so cargo is called.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// Path of the preload library: what the variable VMM_DEDUP_PRELOAD names, or else built here, once.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn path() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    let named = || std::env::var_os("VMM_DEDUP_PRELOAD").map(PathBuf::from);
    PATH.get_or_init(|| named().unwrap_or_else(|| build("vmm-dedup-preload")))
        .clone()
}

/// Path of the library that stands in for KVM's nested state.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn nested_state() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build("vmm-dedup-nested-state")).clone()
}

fn build(package: &str) -> PathBuf {
    // .../PROFILE/deps/test-1234 or .../PROFILE/program
    let exe = std::env::current_exe().expect("we run");
    let folder = exe
        .ancestors()
        .skip(1)
        .find(|folder| !folder.ends_with("deps"))
        .expect("a folder");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", package]);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo
        .arg("--target-dir")
        .arg(folder.parent().expect("a target folder"));
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(
        cargo.status().expect("cargo runs").success(),
        "the library is not built"
    );
    folder.join(format!("lib{}.so", package.replace('-', "_")))
}
