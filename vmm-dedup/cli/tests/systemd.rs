//! The unit files: systemd takes them, and the commands in them work.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const STORE: &str = include_str!("../systemd/vmm-dedup-store@.service");
const FLEET: &str = include_str!("../systemd/vmm-dedup-fleet@.service");
const STORE_ENV: &str = include_str!("../systemd/store.env");
const PROGRAM: &str = env!("CARGO_BIN_EXE_vmm-dedup");

#[test]
fn systemd_finds_no_fault_in_the_units() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        eprintln!("SKIPPED: systemd-analyze is missing");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for (name, unit) in [
        ("vmm-dedup-store@.service", STORE),
        ("vmm-dedup-fleet@.service", FLEET),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, unit.replace("/usr/bin/vmm-dedup", PROGRAM)).expect("a unit");
        let output = Command::new("systemd-analyze")
            .args(["verify", "--man=no"])
            .arg(&path)
            .output()
            .expect("a run");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !said.contains(name), "{said}");
    }
}

/// The command of a unit for an instance, with the variables of its environment file.
fn command(unit: &str, key: &str, instance: &str) -> Vec<String> {
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{key}=/usr/bin/vmm-dedup ")));
    let mut line = line.expect("a command").replace("%i", instance);
    let variables = STORE_ENV.lines().filter(|line| !line.starts_with('#'));
    for (name, value) in variables.filter_map(|line| line.split_once('=')) {
        line = line.replace(&format!("${{{name}}}"), value);
    }
    line.split(' ').map(str::to_owned).collect()
}

#[test]
fn the_stores_command_starts_a_store() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().to_str().expect("UTF-8");
    fs::create_dir(folder.path().join("blue")).expect("a folder");
    let arguments = command(STORE, "ExecStart", "blue");
    let arguments = arguments
        .iter()
        .map(|a| a.replace("/run/vmm-dedup", run).replace(":9753", ":0"));
    let arguments: Vec<String> = arguments.collect();
    assert!(arguments.contains(&"127.0.0.1:0".to_owned()), "{arguments:?}");
    let mut store = Command::new(PROGRAM)
        .args(&arguments)
        .stderr(Stdio::null())
        .spawn()
        .expect("a store");
    let socket = folder.path().join("blue/store.sock");
    let start = Instant::now();
    while !fs::metadata(&socket).is_ok_and(|file| file.file_type().is_socket()) {
        let early = store.try_wait().expect("wait");
        assert!(
            early.is_none() && start.elapsed() < Duration::from_secs(60),
            "no store: {early:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    store.kill().expect("kill");
    store.wait().expect("wait");
}

#[test]
fn the_fleets_commands_are_commands() {
    for (key, expected) in [("ExecStart", "up"), ("ExecStop", "down")] {
        let arguments = command(FLEET, key, "no-such-fleet");
        assert_eq!(
            arguments,
            ["fleet", expected, "/etc/vmm-dedup/no-such-fleet.toml"]
        );
        let output = Command::new(PROGRAM).args(&arguments).output().expect("a run");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            errors.contains("cannot read the fleet file /etc/vmm-dedup/no-such-fleet.toml"),
            "{errors}"
        );
    }
}
