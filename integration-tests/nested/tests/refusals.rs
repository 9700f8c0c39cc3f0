//! What is said where something is missing, before anything was started. Needs none of it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

const OWN: &str = env!("CARGO_BIN_EXE_vmm-dedup-nested");

/// A folder with programs that do what a line of shell says.
fn programs(scripts: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().expect("a folder");
    for (name, script) in scripts {
        let path = folder.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("the folder is writable");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is ours");
    }
    folder
}

/// Runs a command that must fail with this exit code; returns what it said.
fn refusal(command: &mut Command, code: i32) -> String {
    let Output { status, stderr, .. } = command.output().expect("it runs");
    let text = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(code), "{text}");
    text
}

/// A QEMU that is not reached.
const QEMU: (&str, &str) = ("qemu-system-x86_64", "exit 0");

/// `run boot` with an empty cache and nothing but these programs on the PATH.
fn run_boot(path: &Path) -> Command {
    let mut command = Command::new(OWN);
    // The program itself stands for the vmm-dedup command, which is not reached.
    command.args(["run", "boot", "--vmm-dedup", OWN]);
    command.arg("--cache").arg(path.join("cache")).env("PATH", path);
    command
}

/// A command in a mount namespace of its own, after this line of shell. `None`, and the reason on standard error,
/// where namespaces are not allowed.
fn after_mounting(line: &str, command: &Command) -> Option<Command> {
    let mut unshare = Command::new("unshare");
    unshare.args(["--map-root-user", "--mount", "sh", "-c"]);
    unshare.arg(format!("{line} && \"$@\"")).arg("sh");
    let tried = unshare.output().expect("unshare is in util-linux");
    if !tried.status.success() {
        eprintln!("SKIPPED: {}", String::from_utf8_lossy(&tried.stderr));
        return None;
    }
    let path = command
        .get_envs()
        .find_map(|(name, value)| (name == "PATH").then_some(value)?);
    unshare
        .arg("env")
        .args(path.map(|path| format!("PATH={}", path.display())));
    unshare.arg(command.get_program()).args(command.get_args());
    Some(unshare)
}

#[test]
fn a_missing_program_is_named_with_the_remedy() {
    let mut command = Command::new(OWN);

    let text = refusal(command.args(["run", "boot", "--vmm-dedup", "/nonexistent"]), 1);

    assert!(text.contains("/nonexistent is missing: cargo build"), "{text}");
}

#[test]
fn a_machine_without_qemu_is_told_to_install_it() {
    let path = programs(&[]);

    let text = refusal(&mut run_boot(path.path()), 2);

    assert!(text.contains("qemu-system-x86_64 cannot be run"), "{text}");
    assert!(text.contains("install it"), "{text}");
}

#[test]
fn a_machine_without_apt_is_told_that_packages_come_from_there() {
    let path = programs(&[QEMU]);

    let text = refusal(&mut run_boot(path.path()), 2);

    assert!(
        text.contains("packages come from apt, which is missing"),
        "{text}"
    );
}

#[test]
fn a_mirror_that_cannot_be_reached_is_told_in_the_words_of_apt() {
    let path = programs(&[
        QEMU,
        (
            "apt-get",
            r#"case "$*" in
        indextargets*) echo "http://mirror.invalid/debian bookworm main" ;;
        *) echo "E: Could not resolve 'mirror.invalid'" >&2; exit 100 ;;
        esac"#,
        ),
    ]);
    let system = path.path().join("os-release");
    fs::write(&system, "ID=debian\n").expect("the folder is writable");
    let mount = format!("mount --bind {} /etc/os-release", system.display());
    let run = run_boot(path.path());
    let Some(mut command) = after_mounting(&mount, &run) else {
        return;
    };

    let text = refusal(&mut command, 2);

    assert!(text.contains("the package mirror cannot be used"), "{text}");
    assert!(text.contains("Could not resolve 'mirror.invalid'"), "{text}");
}

#[test]
fn too_little_disk_is_told_with_what_is_needed() {
    let path = programs(&[QEMU]);
    let cache = path.path().join("cache");
    fs::create_dir(&cache).expect("the folder is writable");
    let mount = format!("mount -t tmpfs -o size=8m none {}", cache.display());
    let run = run_boot(path.path());
    let Some(mut command) = after_mounting(&mount, &run) else {
        return;
    };

    let text = refusal(&mut command, 1);

    assert!(text.contains("MiB are free in"), "{text}");
    assert!(
        text.contains("1024 needed: make room, or choose another --cache"),
        "{text}"
    );
}

#[test]
fn too_little_memory_is_told_with_what_is_needed() {
    let path = programs(&[QEMU]);
    let meminfo = path.path().join("meminfo");
    fs::write(&meminfo, "MemAvailable: 512000 kB\n").expect("the folder is writable");
    let mount = format!("mount --bind {} /proc/meminfo", meminfo.display());
    let run = run_boot(path.path());
    let Some(mut command) = after_mounting(&mount, &run) else {
        return;
    };

    let text = refusal(&mut command, 1);

    assert!(
        text.contains("500 MiB of memory are available, 1536 needed: free some"),
        "{text}"
    );
}

#[test]
fn guests_whose_system_does_not_fit_are_refused_with_the_least_memory() {
    let mut command = Command::new(OWN);

    let text = refusal(
        command.args(["corpus", "--out", "/nonexistent", "--memory-mib", "191"]),
        2,
    );

    assert!(text.contains("191 is not in 192..=4096"), "{text}");
}
