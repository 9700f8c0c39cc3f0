//! The unit files: systemd takes them, and the commands in them work.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const STORE: &str = include_str!("../systemd/vmm-dedup-store@.service");
const FLEET: &str = include_str!("../systemd/vmm-dedup-fleet@.service");
const VMS: &str = include_str!("../systemd/vmm-dedup-vms@.service");
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
        ("vmm-dedup-vms@.service", VMS),
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

/// What `systemd-analyze security` may find of a unit that is not root's: 0 is best, 10 worst.
const EXPOSURE: f64 = 1.5;

#[test]
fn units_that_are_not_roots_take_all_rights_away_that_they_can() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        eprintln!("SKIPPED: systemd-analyze is missing");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for (name, unit) in [("store", STORE), ("vms", VMS)] {
        let path = folder.path().join(format!("vmm-dedup-{name}@blue.service"));
        fs::write(&path, unit).expect("a unit");
        let output = Command::new("systemd-analyze")
            .args(["security", "--offline=true", "--no-pager"])
            .arg(&path)
            .output()
            .expect("a run");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let level = said.split("Overall exposure level for ").nth(1);
        let number = level.and_then(|text| text.split_whitespace().nth(1)?.parse::<f64>().ok());
        assert!(number.is_some_and(|number| number <= EXPOSURE), "{said}");
    }
}

#[test]
fn memory_is_limited_and_no_core_has_guest_pages() {
    let has = |unit: &str, line: &str| unit.lines().any(|l| l.starts_with(line));
    assert!(has(STORE, "MemoryMax=") && !has(STORE, "OOMScoreAdjust="));
    // The store takes its size from that limit.
    assert!(has(STORE, "Environment=METRICS=none MAX_MIB=auto") && has(STORE_ENV, "MAX_MIB=auto"));
    assert!([STORE, FLEET, VMS].iter().all(|unit| has(unit, "LimitCORE=0")));
}

#[test]
fn a_fleet_of_which_a_vm_failed_is_not_ended_by_its_unit() {
    // systemd ends all that a unit has started if its command ends with what is no success.
    // 3 is that of a fleet that is up; see `leaves` in the tests of fleets.
    for unit in [FLEET, VMS] {
        assert!(unit.lines().any(|line| line == "SuccessExitStatus=3"));
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
    // Words of a variable that is not set are none.
    line.split(' ')
        .filter(|word| !word.starts_with('$'))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_stores_command_starts_a_store() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().to_str().expect("UTF-8");
    fs::create_dir(folder.path().join("blue")).expect("a folder");
    let group = rustix::process::getegid().as_raw().to_string();
    let arguments = command(STORE, "ExecStart", "blue");
    let arguments = arguments
        .iter()
        .map(|a| a.replace("/run/vmm-dedup", run).replace(":9753", ":0"))
        // The package makes the group.
        .map(|a| if a == "vmm-dedup" { group.clone() } else { a });
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
    let commands = [("ExecStart", "up"), ("ExecStop", "down")];
    for (unit, (key, expected)) in [FLEET, VMS].iter().flat_map(|unit| commands.map(|c| (unit, c))) {
        let arguments = command(unit, key, "no-such-fleet");
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
