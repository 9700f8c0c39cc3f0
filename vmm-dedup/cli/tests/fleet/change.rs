//! A fleet that is changed while it is up.

use crate::host::{Host, QEMU_VM, kvm_is_there, send, vmm_is_there, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use vmm_dedup_integration_tests::unmodified::library;

const TWO: &str = "[[vm]]\nname = \"pay\"\ncount = 2\ntemplate = \"payload\"\nvmm = \"reference\"\ndedup = { cpu_percent = 20 }\n";

/// VMs and their processes.
fn pids(host: &Host) -> BTreeMap<String, i64> {
    let status = host.status();
    let vms = status["vms"].as_array().expect("VMs").iter();
    vms.map(|vm| (vm["name"].to_string(), vm["pid"].as_i64().expect("a number")))
        .collect()
}

fn edit(host: &Host, from: &str, to: &str) {
    let path = host.path("fleet.toml");
    let text = fs::read_to_string(&path).expect("the file");
    assert!(text.contains(from), "{text}");
    fs::write(&path, text.replace(from, to)).expect("the file");
}

#[test]
fn settings_of_dedup_change_without_touching_vms_and_others_are_told() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    wait_until("they are connected", || !host.vm("pay-1")["dedup"].is_null());
    let before = pids(&host);

    edit(
        &host,
        "cpu_percent = 20",
        "cpu_percent = 7, pass_period_ms = 123, stop_target_us = 99, max_vmas = 1234",
    );
    let plan = host.must("up", &["--plan"]);
    let said = host.must("up", &[]);
    wait_until("both have it", || {
        ["pay-0", "pay-1"].iter().all(|name| {
            let dedup = &host.vm(name)["dedup"];
            let live = ["cpu_percent", "pass_period_ms", "stop_target_us"].map(|key| dedup[key].as_u64());
            live == [Some(7), Some(123), Some(99)]
        })
    });
    let again = host.must("up", &[]);

    let line = plan.lines().find(|line| line.starts_with("~ pay-0: "));
    let live = ["cpu_percent", "pass_period_ms", "stop_target_us"];
    assert!(
        line.is_some_and(|line| live.iter().all(|key| line.contains(key))),
        "{plan}"
    );
    let restart = format!(
        "! pay-1: dedup.max_vmas changed: `vmm-dedup fleet restart {}",
        host.path("fleet.toml").display()
    );
    for text in [&plan, &said, &again] {
        assert!(text.contains(&restart), "{text}");
    }
    assert!(again.starts_with("fleet fleet: nothing to do\n"), "{again}");
    assert_eq!(pids(&host), before);
    host.must("restart", &["pay-1"]);
    let after = pids(&host);
    assert_eq!(after["\"pay-0\""], before["\"pay-0\""]);
    assert_ne!(after["\"pay-1\""], before["\"pay-1\""]);
    let plan = host.must("up", &["--plan"]);
    assert!(
        plan.contains("! pay-0: ") && !plan.contains("! pay-1: "),
        "{plan}"
    );
    host.must("down", &[]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn vms_are_added_scaled_and_taken_away_one_by_one() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let names = |host: &Host| {
        pids(host)
            .into_keys()
            .collect::<Vec<_>>()
            .join(" ")
            .replace('"', "")
    };

    let said = host.must("scale", &["pay=4"]);
    assert!(said.contains("2 started, 0 ended, 4 VMs now"), "{said}");
    assert_eq!(names(&host), "pay-0 pay-1 pay-2 pay-3");
    assert_eq!(host.must("up", &[]), "fleet fleet: nothing to do\n");
    host.must("scale", &["pay=1", "--grace", "0"]);
    assert_eq!(names(&host), "pay-0");
    host.must("scale", &["pay=2"]);
    assert_eq!(names(&host), "pay-0 pay-1");
    let said = host.must("down", &["pay-0", "--grace", "0"]);
    assert_eq!(said, "fleet fleet: 1 VM ended, 1 VM is left\n");
    assert_eq!(names(&host), "pay-1");
    edit(
        &host,
        "[[vm]]\nname = \"pay\"",
        "[[vm]]\nname = \"more\"\ntemplate = \"payload\"\nvmm = \"reference\"\n[[vm]]\nname = \"pay\"",
    );
    let said = host.must("up", &[]);
    assert!(
        said.contains("+ more (reference, missing)") && said.contains("+ pay-0 (reference, missing)"),
        "{said}"
    );
    assert_eq!(names(&host), "more pay-0 pay-1");
    edit(&host, "name = \"more\"", "name = \"other\"");
    let plan = host.must("up", &["--plan"]);
    assert!(
        plan.contains("+ other (reference, missing)") && plan.contains("! more is not in the file any more"),
        "{plan}"
    );
    for (command, word, part) in [
        (
            "scale",
            "web=3",
            "no [[vm]] with a count is called web: there are pay",
        ),
        (
            "restart",
            "web",
            "no VM of this fleet is called web: there are other, pay-0, pay-1",
        ),
        ("down", "web*", "no VM of this fleet is called web*"),
    ] {
        let (error, code) = Host::failure(&host.run(command, &[word]));
        assert!(error.contains(part) && code == 1, "{error}");
    }
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_vm_that_cannot_start_later_leaves_the_others_alone() {
    if !kvm_is_there() {
        return;
    }
    let mut host = Host::new(TWO);
    host.add("bad.elf", b"no kernel");
    host.must("up", &[]);
    let before = pids(&host);
    edit(
        &host,
        "[[vm]]\nname = \"pay\"",
        "[[vm]]\nname = \"bad\"\nvmm = \"reference\"\nkernel = \"bad.elf\"\n[[vm]]\nname = \"pay\"",
    );

    let output = host.run("up", &[]);

    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        errors.contains("VM \"bad\": reference: it ended with exit code 1"),
        "{errors}"
    );
    let (error, code) = Host::failure(&output);
    assert!(
        error.ends_with("fleet fleet: not done: 1 of 1") && code == 1,
        "{error}"
    );
    assert_eq!(pids(&host), before);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_vm_whose_next_kernel_is_missing_is_not_ended_by_a_restart() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let before = pids(&host);
    edit(
        &host,
        "vmm = \"reference\"\ndedup",
        "vmm = \"reference\"\nkernel = \"gone.elf\"\ndedup",
    );

    let (error, code) = Host::failure(&host.run("restart", &["pay-1"]));

    assert!(
        error.contains("VM \"pay-1\": cannot open the kernel") && code == 1,
        "{error}"
    );
    assert_eq!(pids(&host), before);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_frozen_vm_is_told_and_can_be_started_anew() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let before = pids(&host);
    send(&host.vm("pay-1")["pid"], Signal::STOP);

    let output = host.run("status", &[]);
    let plan = host.must("up", &["--plan"]);
    host.must("restart", &["pay-1"]);

    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        table.contains("frozen") && output.status.code() == Some(1),
        "{table}"
    );
    assert!(plan.contains("! pay-1 is stopped by a signal"), "{plan}");
    assert_ne!(pids(&host)["\"pay-1\""], before["\"pay-1\""]);
    host.must("status", &[]);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn two_ups_at_once_start_each_vm_once() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&TWO.replace("count = 2", "count = 6"));
    let mut ups: Vec<_> = (0..2)
        .map(|_| {
            host.command("up")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("up")
        })
        .collect();
    let codes: Vec<_> = ups
        .iter_mut()
        .map(|up| up.wait().expect("an end").code())
        .collect();

    // The second waits for the first, and finds nothing to do or gives up.
    assert!(codes.contains(&Some(0)), "{codes:?}");
    assert_eq!(pids(&host).len(), 6);
    host.must("status", &[]);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

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
fn fleets_are_listed() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"));
        command
            .arg("fleet")
            .args(args)
            .env("VMM_DEDUP_RUNTIME_DIR", host.path("run"));
        let output = command.output().expect("a run");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let file = host.path("fleet.toml");
    let file = file.to_str().expect("UTF-8");

    assert!(run(&["ls"]).starts_with("no fleet is up in "));
    run(&["up", file]);
    let table = run(&["ls"]);
    let json: Value = serde_json::from_str(&run(&["ls", "--json"])).expect("JSON");
    run(&["down", file, "--grace", "0"]);

    assert!(
        table.contains("fleet   2   2 1 of 1") && table.contains(file),
        "{table}"
    );
    assert_eq!((&json[0]["vms"], &json[0]["running"]), (&2.into(), &2.into()));
    fs::remove_dir_all(host.path("run")).expect("the runtime folder");
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_vmms_api_is_asked_by_the_name_of_its_vm() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let (error, _) = Host::failure(&host.run("api", &["pay-0", "GET", "vm.info"]));
    assert!(error.contains("the reference VMM has no API"), "{error}");
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
    if vmm_is_there("QEMU", "qemu-system-x86_64") {
        let host = Host::new(QEMU_VM);
        host.must("up", &[]);
        let status: Value = serde_json::from_str(&host.must("api", &["q", "query-status"])).expect("JSON");
        assert_eq!(status["status"], "running");
        assert_eq!(host.must("api", &["q", "stop"]), "");
        assert_eq!(host.vm("q")["state"], "paused");
        let (error, _) = Host::failure(&host.run("api", &["q", "no-such-command"]));
        assert!(error.contains("no-such-command"), "{error}");
        host.must("down", &["--grace", "0"]);
        host.assert_nothing_left(&BTreeSet::new());
    }
    if vmm_is_there("CLOUD_HYPERVISOR", "cloud-hypervisor") {
        let host = Host::new(&format!(
            "preload = {:?}\n[[vm]]\nname = \"c\"\ntemplate = \"payload\"\n",
            library::path()
        ));
        host.must("up", &[]);
        let info: Value = serde_json::from_str(&host.must("api", &["c", "GET", "vm.info"])).expect("JSON");
        assert_eq!(info["state"], "Running");
        assert_eq!(host.must("api", &["c", "put", "vm.pause"]), "");
        assert_eq!(host.vm("c")["state"], "paused");
        let (error, _) = Host::failure(&host.run("api", &["c", "PUT", "vm.pause"]));
        assert!(
            error.contains("VM \"c\": cloud-hypervisor: vm.pause: 500"),
            "{error}"
        );
        host.must("down", &["--grace", "0"]);
        host.assert_nothing_left(&BTreeSet::new());
    }
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
