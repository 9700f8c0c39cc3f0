//! A fleet that is changed while it is up.

use crate::host::{Host, QEMU_VM, kvm_is_there, send, vmm_is_there, wait_until};
use rustix::fs::{Mode, OFlags};
use rustix::process::Signal;
use rustix::pty::{self, OpenptFlags};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use vmm_dedup_integration_tests::unmodified::library;

const TWO: &str = "[[vm]]\nname = \"pay\"\ncount = 2\ntemplate = \"payload\"\nvmm = \"reference\"\ndedup = { cpu_percent = 20 }\n";

/// VMs and their processes.
fn pids(host: &Host) -> BTreeMap<String, i64> {
    let status = host.status();
    let vms = status["vms"].as_array().expect("VMs").iter();
    let with_process = vms.filter(|vm| vm["state"] != "missing");
    with_process
        .map(|vm| (vm["name"].to_string(), vm["pid"].as_i64().expect("a number")))
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
fn numbers_that_an_entry_cannot_have_are_told_with_what_to_do() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&format!(
        "{TWO}[[vm]]\nname = \"one\"\ntemplate = \"payload\"\nvmm = \"reference\"\n"
    ));
    host.must("up", &[]);

    let many = Host::failure(&host.run("scale", &["pay=1000000"]));
    let (none, code) = Host::failure(&host.run("scale", &["pay=0"]));

    let expected = "vmm-dedup: pay can have 4095 VMs at most, not 1000000: a fleet has up to 4096, others of this one: 1";
    assert_eq!(many, (expected.to_owned(), 2));
    assert!(
        none.contains("an entry has at least one VM") && code == 2,
        "{none}"
    );
    let command = none.split('`').nth(1).expect("a command");
    let command = command.replacen("vmm-dedup", env!("CARGO_BIN_EXE_vmm-dedup"), 1);
    let pasted = Command::new("sh")
        .args(["-c", &format!("{command} --grace 0")])
        .output();
    let said = String::from_utf8(pasted.expect("a run").stdout).expect("UTF-8");
    assert_eq!(said, "fleet fleet: 2 VMs ended, 1 VM is left\n");
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
fn a_vm_that_could_not_be_started_is_missed_until_it_runs_or_is_given_up() {
    if !kvm_is_there() {
        return;
    }
    let mut host = Host::new(TWO);
    host.add("bad.elf", b"no kernel");
    host.must("up", &[]);
    let before = pids(&host);
    let well = "vmm = \"reference\"\n";
    let ill = "vmm = \"reference\"\nkernel = \"bad.elf\"\n";
    edit(&host, well, ill);

    let restart = Host::failure(&host.run("restart", &["pay-0"]));
    let after_restart = host.run("status", &[]);
    let up = Host::failure(&host.run("up", &[]));
    let after_up = host.run("status", &[]);
    let missing = host.vm("pay-0");
    let api = Host::failure(&host.run("api", &["pay-0", "GET", "vm.info"]));

    let why = "reference: it ended with exit code 1: ";
    assert!(
        restart.0.contains(&format!("VM \"pay-0\": {why}")) && restart.1 == 1,
        "{restart:?}"
    );
    assert!(
        up.0.ends_with("fleet fleet: not done: 1 of 1") && up.1 == 1,
        "{up:?}"
    );
    for output in [after_restart, after_up] {
        let table = String::from_utf8_lossy(&output.stdout).into_owned();
        let row = table.lines().find(|line| line.starts_with("pay-0 "));
        assert!(row.is_some_and(|row| row.contains("missing")), "{table}");
        assert!(
            table.contains(&format!("pay-0 missing ({why}")) && table.contains("fleet up "),
            "{table}"
        );
        let expected = "vmm-dedup: fleet fleet is not all well: VMs that do not run: 1; `vmm-dedup doctor` tells what is wrong on this host";
        assert_eq!(Host::failure(&output), (expected.to_owned(), 1));
    }
    assert!(
        missing["state"] == "missing" && missing["why"].as_str().is_some_and(|text| text.starts_with(why)),
        "{missing}"
    );
    assert!(
        api.0.contains("VM \"pay-0\" does not run (reference: "),
        "{api:?}"
    );
    // Whoever takes it down does not miss it.
    host.must("down", &["pay-0"]);
    host.must("status", &[]);
    Host::failure(&host.run("up", &[]));
    assert_eq!(host.vm("pay-0")["state"], "missing");
    edit(&host, ill, well);
    host.must("up", &[]);
    host.must("status", &[]);
    assert_eq!(pids(&host)["\"pay-1\""], before["\"pay-1\""]);
    // Nor does a file that does not have it any more.
    let more = "[[vm]]\nname = \"bad\"\nvmm = \"reference\"\nkernel = \"bad.elf\"\n[[vm]]\nname = \"pay\"";
    edit(&host, "[[vm]]\nname = \"pay\"", more);
    Host::failure(&host.run("up", &[]));
    assert_eq!(host.vm("bad")["state"], "missing");
    edit(&host, more, "[[vm]]\nname = \"pay\"");
    host.must("up", &[]);
    host.must("status", &[]);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

/// Steps in a folder that becomes full: each tells how it ended. `$1` is the program, `$2` the fleet file, `$3` the folder.
const IN_A_FULL_FOLDER: &str = r#"
mount -t tmpfs -o size=512k tmpfs "$3" || exit 77
step() {
    command=$1
    shift
    "$program" fleet "$command" "$file" --runtime-dir "$folder/run" "$@"
    echo "$command $*: $?"
}
program=$1 file=$2 folder=$3
step up
cat /dev/zero > "$folder/fill" 2> /dev/null
before=$(cat "$folder/run/state.json")
step restart pay-0
test "$before" = "$(cat "$folder/run/state.json")" && echo nothing was touched
victim=$(echo "$before" | sed -n 's/.*"pid": \([0-9]*\),.*/\1/p' | tail -n 1)
kill -KILL "$victim"
# Killed is not yet ended: its memory goes first.
until grep -Eqs '^State:\s+[ZX]' "/proc/$victim/status" || ! test -d "/proc/$victim"; do sleep 0.01; done
step up --plan
step up
rm "$folder/fill"
step up
step down --grace 0
"#;

#[test]
fn a_full_runtime_folder_ends_no_vm() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    let folder = host.path("small");
    fs::create_dir(&folder).expect("a folder");

    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", IN_A_FULL_FOLDER, "sh"])
        .arg(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args([host.path("fleet.toml"), folder.clone()])
        .output()
        .expect("a run");

    fs::remove_dir(&folder).expect("the folder");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() == Some(77) || errors.starts_with("unshare") {
        eprintln!("SKIPPED: a file system cannot be mounted: {errors}");
        return;
    }
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let ends = said
        .lines()
        .filter(|line| line.contains(": ") && !line.starts_with("fleet"));
    let expected = [
        "up : 0",
        "restart pay-0: 1",
        "up --plan: 1",
        "up : 1",
        "up : 0",
        "down --grace 0: 0",
    ];
    assert_eq!(ends.collect::<Vec<_>>(), expected, "{said}{errors}");
    assert!(said.contains("\nnothing was touched\n"), "{said}");
    assert!(said.contains("\n+ pay-1 (reference, crashed)\n"), "{said}");
    let told = errors.lines().filter(|line| {
        line.starts_with("vmm-dedup: cannot write the ") && line.ends_with(": make room there")
    });
    assert_eq!(told.count(), 3, "{errors}");
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
fn a_frozen_vm_is_told_and_goes_on_by_the_command_that_is_told() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let before = pids(&host);
    send(&host.vm("pay-1")["pid"], Signal::STOP);

    let output = host.run("status", &[]);
    let plan = host.must("up", &["--plan"]);
    let line = plan
        .lines()
        .find(|line| line.starts_with("! pay-1 is stopped by a signal: "));
    let command = line.and_then(|line| line.split('`').nth(1)).expect("a command");
    let pasted = Command::new("sh").args(["-c", command]).status();

    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        table.contains("frozen") && output.status.code() == Some(1),
        "{table}"
    );
    assert!(pasted.expect("a run").success(), "{command}");
    wait_until("it goes on", || host.vm("pay-1")["state"] == "running");
    assert_eq!(pids(&host), before);
    // One that is started anew may be stopped as well.
    send(&host.vm("pay-1")["pid"], Signal::STOP);
    host.must("restart", &["pay-1"]);
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
fn a_fleet_stays_the_one_of_its_file_under_another_name() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&format!("name = \"first\"\n{TWO}"));
    let file = host.path("fleet.toml").to_str().expect("UTF-8").to_owned();
    let must = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"));
        command.env("VMM_DEDUP_RUNTIME_DIR", host.path("run"));
        let output = command.arg("fleet").args(args).output().expect("a run");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {errors}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let fleets = || {
        let fleets: Value = serde_json::from_str(&must(&["ls", "--json"])).expect("JSON");
        let fleets = fleets.as_array().expect("fleets").iter();
        fleets.map(|fleet| fleet["fleet"].to_string()).collect::<Vec<_>>()
    };
    must(&["up", &file]);

    edit(&host, "name = \"first\"", "name = \"second\"");
    let plan = must(&["up", &file, "--plan"]);
    let said = must(&["up", &file]);

    let told = format!(
        "! name changed to second: this fleet stays first until it is down: `vmm-dedup fleet down {file}`, then \
         `vmm-dedup fleet up {file}`"
    );
    for text in [plan, said] {
        assert!(
            text.contains("fleet first: nothing to do\n") && text.contains(&told),
            "{text}"
        );
    }
    assert_eq!(fleets(), ["\"first\""]);
    assert!(must(&["logs", &file, "--stores"]).contains("listening on"));
    assert_eq!(
        must(&["down", &file, "--grace", "0"]),
        "fleet first: 2 VMs ended\n"
    );
    must(&["up", &file]);
    assert_eq!(fleets(), ["\"second\""]);
    assert_eq!(
        must(&["down", &file, "--grace", "0"]),
        "fleet second: 2 VMs ended\n"
    );
    fs::remove_dir_all(host.path("run")).expect("the runtime folder");
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_fleet_keeps_the_socket_of_its_store_until_it_is_down() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    wait_until("they are connected", || !host.vm("pay-1")["dedup"].is_null());
    let store = |host: &Host| host.status()["stores"][0].clone();
    let before = store(&host);
    edit(&host, "\"store.sock\"", "\"other.sock\"");
    edit(&host, "count = 2", "count = 3");

    let plan = host.must("up", &["--plan"]);
    let said = host.must("up", &[]);
    wait_until("the third is connected", || !host.vm("pay-2")["dedup"].is_null());

    let told = format!(
        "! store of domain \"default\": socket changed to {}: it stays {} until the fleet is down: `vmm-dedup fleet down ",
        host.path("other.sock").display(),
        host.path("store.sock").display()
    );
    for text in [plan, said] {
        assert!(text.contains(&told) && !text.contains("+ store"), "{text}");
    }
    let after = store(&host);
    assert_eq!(
        (&after["pid"], &after["socket"]),
        (&before["pid"], &before["socket"])
    );
    assert_eq!(host.status()["stores"].as_array().map(Vec::len), Some(1));
    // Another domain may not have it meanwhile.
    let path = host.path("fleet.toml");
    let text = fs::read_to_string(&path).expect("the file");
    let other = "[domain.x]\nsocket = \"store.sock\"\n[[vm]]\nname = \"x\"\ntemplate = \"payload\"\nvmm = \"reference\"\ndomain = \"x\"\n";
    fs::write(&path, format!("{text}{other}")).expect("the file");
    let (error, code) = Host::failure(&host.run("up", &[]));
    assert!(
        error.contains("domains \"default\" and \"x\" would share the socket") && code == 1,
        "{error}"
    );
    fs::write(&path, text).expect("the file");
    host.must("down", &["--grace", "0"]);
    host.must("up", &[]);
    assert_eq!(store(&host)["socket"].as_str(), host.path("other.sock").to_str());
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_store_whose_socket_has_gone_is_replaced() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let before = host.status()["stores"][0]["pid"].clone();
    fs::remove_file(host.path("store.sock")).expect("the socket");

    let said = host.must("up", &[]);
    wait_until("both are connected to the new one", || {
        ["pay-0", "pay-1"]
            .iter()
            .all(|name| !host.vm(name)["dedup"].is_null())
    });

    assert!(said.contains("+ store of domain \"default\""), "{said}");
    assert_ne!(host.status()["stores"][0]["pid"], before);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn other_settings_of_a_store_are_told_and_taken_over_by_its_next_start() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let before = pids(&host);
    edit(&host, "max_mib = 256", "max_mib = 512");
    edit(&host, "metrics = \"none\"", "metrics = \"127.0.0.1:0\"");

    let plan = host.must("up", &["--plan"]);
    let said = host.must("up", &[]);

    let pid = host.status()["stores"][0]["pid"].clone();
    let told = format!(
        "! store of domain \"default\": max_mib, metrics changed: `kill {pid}` ends it, then `vmm-dedup fleet up {} ",
        host.path("fleet.toml").display()
    );
    for text in [plan, said] {
        assert!(text.contains(&told), "{text}");
    }
    send(&pid, Signal::TERM);
    wait_until("the store is gone", || {
        host.status()["stores"][0]["state"] == "gone"
    });
    host.must("up", &[]);
    let next = host.status()["stores"][0]["pid"].to_string();
    let arguments = fs::read_to_string(format!("/proc/{next}/cmdline")).expect("the store's arguments");
    assert!(arguments.contains("--max-mib\x00512\0"), "{arguments}");
    assert_eq!(host.must("up", &[]), "fleet fleet: nothing to do\n");
    assert_eq!(pids(&host), before);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_directory_that_is_named_tells_which_fleet_ends() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&format!("name = \"first\"\n{TWO}"));
    host.must("up", &[]);
    edit(&host, "name = \"first\"", "name = \"second\"");

    let said = host.must("down", &["--grace", "0"]);

    assert_eq!(said, "fleet first: 2 VMs ended\n");
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
