//! The preload library, built as it is.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// Path of the library. Tests of a workspace cannot depend on a cdylib, so it is built here, once, unless the variable
/// VMM_DEDUP_PRELOAD names one.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn path() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| std::env::var_os("VMM_DEDUP_PRELOAD").map_or_else(build, PathBuf::from))
        .clone()
}

fn build() -> PathBuf {
    // .../PROFILE/deps/test-1234 or .../PROFILE/program
    let exe = std::env::current_exe().expect("we run");
    let folder = exe
        .ancestors()
        .skip(1)
        .find(|folder| !folder.ends_with("deps"))
        .expect("a folder");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", "vmm-dedup-preload"]);
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
    folder.join("libvmm_dedup_preload.so")
}
