//! The logs of a fleet: shown, followed, and kept short.

use crate::host::{Host, QEMU_VM, TWO, kvm_is_there, send, vmm_is_there, wait_until};
use rustix::fs::{Mode, OFlags};
use rustix::process::Signal;
use rustix::pty::{self, OpenptFlags};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use vmm_dedup_integration_tests::unmodified::library;

#[test]
fn logs_are_shown_and_followed() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    wait_until("both guests have said something", || {
        let said = host.must("logs", &["--serial"]);
        said.contains("pay-0: @payload ready") && said.contains("pay-1: @payload ready")
    });
    let one = host.must("logs", &["pay-1", "--serial", "-n", "1"]);
    assert_eq!(one.lines().count(), 1, "{one}");

    let mut following = host
        .command("logs")
        .args(["pay-0", "-f", "-n", "0"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("logs");
    let mut lines = BufReader::new(following.stdout.take().expect("output")).lines();
    let log = host.vm("pay-0")["log"].as_str().expect("a path").to_owned();
    std::thread::sleep(Duration::from_millis(500));
    let mut file = fs::OpenOptions::new().append(true).open(log).expect("the log");
    std::io::Write::write_all(&mut file, b"a new line \x1b[2J\n").expect("a line");
    assert_eq!(lines.next().expect("a line").expect("text"), "a new line ?[2J");
    drop(lines);
    std::io::Write::write_all(&mut file, b"one\ntwo\n").expect("lines");
    // Its reader has gone.
    let begun = Instant::now();
    let status = loop {
        std::io::Write::write_all(&mut file, b"more\n").expect("a line");
        match following.try_wait().expect("a status") {
            Some(status) => break status,
            None => assert!(begun.elapsed() < Duration::from_secs(20), "it does not end"),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    assert_eq!(status.code(), Some(141));
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn logs_that_grow_are_begun_anew_and_nobody_notices() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let log = std::path::PathBuf::from(host.vm("pay-0")["log"].as_str().expect("a path"));
    let mut following = host
        .command("logs")
        .args(["pay-0", "-f", "-n", "0"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("logs");
    let mut lines = BufReader::new(following.stdout.take().expect("output")).lines();
    std::thread::sleep(Duration::from_millis(500));
    // As a VMM does: at its end, whatever happens to what was before.
    let mut writer = fs::OpenOptions::new().append(true).open(&log).expect("the log");
    let mut write = |numbers: std::ops::Range<u32>| {
        let text: String = numbers
            .map(|n| format!("line {n:06} {}\n", "x".repeat(1000)))
            .collect();
        std::io::Write::write_all(&mut writer, text.as_bytes()).expect("lines");
    };

    write(0..3000);
    wait_until("it is begun anew", || {
        fs::metadata(&log).expect("the log").len() == 0
    });
    write(3000..3005);

    let shown = host.must("logs", &["pay-0", "-n", "8"]);
    let number = |line: &str| line.get(5..11).and_then(|n| n.parse::<u32>().ok());
    assert_eq!(
        shown.lines().map(number).collect::<Vec<_>>(),
        (2997..3005).map(Some).collect::<Vec<_>>(),
        "{shown}"
    );
    for expected in 0..3005 {
        let line = lines.next().expect("a line").expect("text");
        assert_eq!(number(&line), Some(expected), "{line}");
    }
    following.kill().expect("kill");
    following.wait().expect("wait");
    let last = log.with_extension("log.1");
    assert!(fs::metadata(&last).expect("the last one").len() < 4 << 20);

    // It is a process of the fleet's, which `up` starts again.
    let killed = keeper(&host);
    send(&killed, Signal::KILL);
    wait_until("it has ended", || {
        vmm_dedup_host::process::Stat::of(killed.as_u64().expect("a number"))
            .is_none_or(|stat| stat.has_ended())
    });
    host.must("up", &[]);
    assert_ne!(keeper(&host), killed);
    write(0..3000);
    wait_until("it is begun anew once more", || {
        fs::metadata(&log).expect("the log").len() == 0
    });
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

/// The process that keeps the fleet's logs short.
fn keeper(host: &Host) -> Value {
    let state = fs::read_to_string(host.path("run/state.json")).expect("the state");
    let state: Value = serde_json::from_str(&state).expect("JSON");
    state["log_keeper"]["pid"].clone()
}

/// Nobody keeps logs short: `status` ends with 1, and its last line has this to do, as a line of what it shows.
fn is_told(host: &Host, what_to_do: &str) {
    let status = host.run("status", &[]);
    let shown = String::from_utf8_lossy(&status.stdout).into_owned();
    let (error, code) = Host::failure(&status);
    let (line, last) = (
        format!("logs are not kept short, and grow: {what_to_do}"),
        format!("is not all well: logs are not kept short ({what_to_do}"),
    );
    assert!(
        code == 1 && error.contains(&last) && shown.contains(&line),
        "{shown}{error}"
    );
    assert_eq!(host.status()["logs_kept_short"], false);
}

#[test]
fn logs_that_nobody_keeps_short_are_told_with_what_to_do() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    host.must("status", &[]);
    assert_eq!(host.status()["logs_kept_short"], true);
    let killed = keeper(&host);

    send(&killed, Signal::STOP);
    is_told(&host, &format!("`kill -CONT {killed}` lets the process go on"));
    let left = host.leaves();
    send(&killed, Signal::CONT);
    wait_until("all is well", || host.run("status", &[]).status.success());
    send(&killed, Signal::KILL);
    wait_until("it has ended", || {
        vmm_dedup_host::process::Stat::of(killed.as_u64().expect("a number"))
            .is_none_or(|stat| stat.has_ended())
    });
    let folder = host.path("run").display().to_string();
    let file = host.path("fleet.toml").display().to_string();
    is_told(
        &host,
        &format!("`vmm-dedup fleet up {file} --runtime-dir {folder}` starts the process"),
    );
    let plan = host.must("up", &["--plan"]);
    let done = host.must("up", &[]);

    assert!(
        left.contains("! the process that keeps logs short is stopped by a signal"),
        "{left}"
    );
    assert_eq!(plan, "+ the process that keeps logs short\n");
    assert_eq!(done, plan);
    host.must("status", &[]);
    assert_eq!(host.must("up", &[]), "fleet fleet: nothing to do\n");
    assert_ne!(keeper(&host), killed);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

/// What a guest writes to a log that was emptied.
fn writes_at_the_end(host: &Host, name: &str) {
    let log = host.vm(name)["serial"].as_str().expect("a path").to_owned();
    let text = || fs::read(&log).expect("the log");
    wait_until("the guest has written", || text().ends_with(b"\n"));
    fs::File::options()
        .write(true)
        .open(&log)
        .and_then(|log| log.set_len(0))
        .expect("an empty log");
    wait_until("the guest writes on", || !text().is_empty());
    assert!(!text().contains(&0), "{name} leaves a hole");
}

#[test]
fn guests_under_qemu_and_cloud_hypervisor_write_at_the_end_of_their_logs() {
    if !kvm_is_there() {
        return;
    }
    if vmm_is_there("QEMU", "qemu-system-x86_64") {
        let host = Host::new(QEMU_VM);
        host.must("up", &[]);
        writes_at_the_end(&host, "q");
        host.must("down", &["--grace", "0"]);
        host.assert_nothing_left(&BTreeSet::new());
    }
    if vmm_is_there("CLOUD_HYPERVISOR", "cloud-hypervisor") {
        let library = library::path();
        let host = Host::new(&format!(
            "preload = {library:?}\n[[vm]]\nname = \"c\"\ntemplate = \"payload\"\n"
        ));
        host.must("up", &[]);
        writes_at_the_end(&host, "c");
        host.must("down", &["--grace", "0"]);
        host.assert_nothing_left(&BTreeSet::new());
    }
}

#[test]
fn logs_of_quiet_vms_are_not_followed_longer_than_they_are_read() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let follow = |output: Stdio| {
        let mut logs = host.command("logs");
        logs.args(["pay-0", "-f", "-n", "0"]).stdout(output);
        let logs = logs.spawn().expect("logs");
        // It has begun to wait.
        std::thread::sleep(Duration::from_millis(500));
        logs
    };
    let ends = |mut logs: Child| {
        let mut status = None;
        wait_until("it ends", || {
            status = logs.try_wait().expect("a status");
            status.is_some()
        });
        status.and_then(|status| status.code())
    };

    let mut piped = follow(Stdio::piped());
    assert!(piped.try_wait().expect("a status").is_none());
    drop(piped.stdout.take());
    let piped = ends(piped);
    let terminal =
        pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
    pty::grantpt(&terminal).expect("a terminal");
    pty::unlockpt(&terminal).expect("a terminal");
    let name = pty::ptsname(&terminal, Vec::new()).expect("its name");
    let end = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("its end");
    let mut on_terminal = follow(end.into());
    assert!(on_terminal.try_wait().expect("a status").is_none());
    drop(terminal);
    let on_terminal = ends(on_terminal);

    assert_eq!((piped, on_terminal), (Some(141), Some(141)));
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn what_guests_under_cloud_hypervisor_write_is_followed_over_a_restart() {
    if !kvm_is_there() || !vmm_is_there("CLOUD_HYPERVISOR", "cloud-hypervisor") {
        return;
    }
    let host = Host::new(&format!(
        "preload = {:?}\n[[vm]]\nname = \"c\"\ncount = 2\ntemplate = \"payload\"\n",
        library::path()
    ));
    host.must("up", &[]);
    let mut logs = host.command("logs");
    logs.args(["--serial", "-f"]).stdout(Stdio::piped());
    let mut logs = logs.spawn().expect("the command runs");
    let (tell, told) = channel();
    let output = BufReader::new(logs.stdout.take().expect("a pipe"));
    std::thread::spawn(move || {
        output
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| tell.send(line))
    });
    let comes = |part: &str| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            if told
                .recv_timeout(Duration::from_secs(1))
                .is_ok_and(|line| line.contains(part))
            {
                return;
            }
        }
        panic!("nothing comes with {part:?}");
    };

    comes("c-0: @payload");
    comes("c-1: @payload");
    host.must("restart", &["c-1"]);
    // Both go on; one of them in a log that was begun anew.
    while told.try_recv().is_ok() {}
    comes("c-1: @payload");
    comes("c-0: @payload");

    logs.kill().expect("kill");
    logs.wait().expect("wait");
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}
