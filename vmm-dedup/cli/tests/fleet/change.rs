//! A fleet that is changed while it is up.

use crate::host::{Host, QEMU_VM, TWO, kvm_is_there, send, vmm_is_there, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::{Command, Output, Stdio};
use vmm_dedup_integration_tests::unmodified::library;

/// VMs and their processes.
fn pids(host: &Host) -> BTreeMap<String, i64> {
    let status = host.status();
    let vms = status["vms"].as_array().expect("VMs").iter();
    vms.filter_map(|vm| Some((vm["name"].to_string(), vm["pid"].as_i64()?)))
        .collect()
}

/// What a command prints, and its exit code.
fn shown(output: &Output) -> (String, Option<i32>) {
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    (shown, output.status.code())
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
    let said = host.leaves();
    wait_until("both have it", || {
        ["pay-0", "pay-1"].iter().all(|name| {
            let dedup = &host.vm(name)["dedup"];
            let live = ["cpu_percent", "pass_period_ms", "stop_target_us"].map(|key| dedup[key].as_u64());
            live == [Some(7), Some(123), Some(99)]
        })
    });
    let again = host.leaves();

    let line = said.lines().find(|line| line.starts_with("~ pay-0: "));
    let live = ["cpu_percent", "pass_period_ms", "stop_target_us"];
    assert!(
        line.is_some_and(|line| live.iter().all(|key| line.contains(key))),
        "{said}"
    );
    let restart = format!(
        "! pay-1: dedup.max_vmas changed: `vmm-dedup fleet restart {}",
        host.path("fleet.toml").display()
    );
    for text in [&said, &again] {
        assert!(text.contains(&restart), "{text}");
    }
    assert!(!again.contains("~ pay-0"), "{again}");
    assert_eq!(pids(&host), before);
    // By another of its names.
    edit(&host, "cpu_percent = 7", "cpu-percent = 8");
    assert!(host.leaves().contains("~ pay-0: dedup.cpu_percent\n"));
    wait_until("both have that", || {
        ["pay-0", "pay-1"]
            .iter()
            .all(|name| host.vm(name)["dedup"]["cpu_percent"] == 8)
    });
    host.must("restart", &["pay-1"]);
    let after = pids(&host);
    assert_eq!(after["\"pay-0\""], before["\"pay-0\""]);
    assert_ne!(after["\"pay-1\""], before["\"pay-1\""]);
    let said = host.leaves();
    assert!(
        said.contains("! pay-0: ") && !said.contains("! pay-1: "),
        "{said}"
    );
    host.must("restart", &["pay-0"]);
    assert_eq!(host.must("up", &["--plan"]), "fleet fleet: nothing to do\n");
    host.must("down", &[]);
    host.assert_nothing_left(&BTreeSet::new());
}

/// What `vmm-dedup set` says of a VM of this fleet.
fn set(host: &Host, words: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"));
    command.arg("set").args(words);
    command.arg("--store").arg(host.path("store.sock"));
    let output = command.output().expect("a run");
    assert!(output.status.success(), "{words:?}: {output:?}");
}

/// Runs the command that a line has in backquotes.
fn paste(line: &str, beginning: &str) {
    let mut commands = line.split('`').skip(1).step_by(2);
    let command = commands.find(|command| command.starts_with(beginning));
    let command = command.unwrap_or_else(|| panic!("no {beginning}: {line}"));
    let program = env!("CARGO_BIN_EXE_vmm-dedup");
    let command = command.replacen("vmm-dedup", program, 1);
    let status = Command::new("sh").args(["-c", &command]).status();
    assert!(status.expect("a run").success(), "{command}");
}

#[test]
fn what_somebody_has_set_is_put_back_but_nothing_is_switched_on() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    wait_until("both have told their settings", || {
        ["pay-0", "pay-1"]
            .iter()
            .all(|name| host.vm(name)["dedup"]["cpu_percent"] == 20)
    });
    assert_eq!(host.must("up", &["--plan"]), "fleet fleet: nothing to do\n");

    // Numbers are as the file says again.
    set(&host, &["pay-0", "cpu_percent=40", "pass_period_ms=700"]);
    let plan = host.must("up", &["--plan"]);
    let status = host.must("status", &[]);
    let up = host.must("up", &[]);
    let again = host.must("up", &[]);

    let told = "~ pay-0: dedup.cpu_percent (40 by `set`, 20 in the file), dedup.pass_period_ms (700 by `set`, 1000 in the file)\n";
    for text in [&plan, &status, &up] {
        assert!(text.contains(told), "{text}");
    }
    assert!(!plan.contains("pay-1"), "{plan}");
    assert_eq!(again, "fleet fleet: nothing to do\n");
    assert_eq!(host.vm("pay-0")["dedup"]["cpu_percent"], 20);

    // Off stays off until somebody switches it on.
    set(&host, &["pay-1", "off"]);
    let said = host.leaves();
    let status = host.must("status", &[]);
    let line = |text: &str| {
        let mut lines = text.lines();
        let line = lines.find(|line| line.starts_with("! pay-1 was switched off by `set`: "));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    assert_eq!(line(&said), line(&status));
    assert_eq!(host.vm("pay-1")["dedup"]["state"], "off");
    paste(&line(&said), "vmm-dedup set ");
    assert_eq!(host.must("up", &[]), "fleet fleet: nothing to do\n");
    assert_eq!(host.vm("pay-1")["dedup"]["state"], "running");

    // One that the file only has stand by is switched on by whoever wants.
    edit(&host, "cpu_percent = 20", "cpu_percent = 20, mode = \"standby\"");
    host.must("up", &[]);
    set(&host, &["pay-0", "on"]);
    assert_eq!(host.must("up", &[]), "fleet fleet: nothing to do\n");
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_plan_that_cannot_be_carried_out_lists_nothing_that_is_not_done() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    host.must("down", &["pay-1", "--grace", "0"]);
    edit(
        &host,
        "vmm = \"reference\"\ndedup",
        "vmm = \"reference\"\nkernel = \"gone.elf\"\ndedup",
    );

    let ends = [&["--plan"][..], &[]].map(|more| host.run("up", more));

    for output in ends {
        let (error, code) = Host::failure(&output);
        assert!(
            error.contains("VM \"pay-1\": cannot open the kernel") && code == 1,
            "{error}"
        );
        assert_eq!(shown(&output).0, "");
    }
    host.must("down", &["--grace", "0"]);
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
    assert_eq!(host.vm("pay-0")["state"], "down");
    let status = host.must("status", &[]);
    assert!(status.contains("\npay-0 down: `vmm-dedup fleet up "), "{status}");
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
    let (plan, code) = shown(&host.run("up", &["--plan"]));
    assert_eq!(code, Some(3));
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
            "no VM of this fleet is called web: there are more, pay-0, pay-1; down: other",
        ),
        ("restart", "more", "more is not in the file any more"),
        ("down", "web*", "no VM of this fleet is called web*"),
    ] {
        let (error, code) = Host::failure(&host.run(command, &[word]));
        assert!(error.contains(part) && code == 1, "{error}");
    }
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn what_is_down_is_taken_down_again_and_started_by_a_restart() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    let never = host.must("down", &["pay-0"]);
    let (unknown, code) = Host::failure(&host.run("down", &["web"]));
    host.must("up", &[]);
    host.must("down", &["pay-1", "--grace", "0"]);

    let again = host.must("down", &["pay-1"]);
    let both = host.must("down", &["pay-1", "pay-0", "--grace", "0"]);
    let none = host.must("down", &["pay-*"]);
    let output = host.run("restart", &["pay-1"]);

    assert_eq!(never, "fleet fleet is not up: nothing to do\n");
    let expected = "vmm-dedup: no VM of this fleet is called web: all are down: pay-0, pay-1";
    assert_eq!((unknown.as_str(), code), (expected, 1));
    assert_eq!(again, "pay-1 is down already\n");
    assert_eq!(
        both,
        "pay-1 is down already\nfleet fleet: 1 VM ended, 0 VMs are left\n"
    );
    assert_eq!(none, "pay-0 is down already\npay-1 is down already\n");
    let (said, code) = shown(&output);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(code, Some(0), "{errors}");
    assert!(
        errors.starts_with("pay-1 did not run\n") && !errors.contains("ended"),
        "{errors}"
    );
    assert_eq!(said, "fleet fleet: 1 VM started anew\n");
    assert_eq!(host.vm("pay-1")["state"], "running");
    // A file that cannot be read keeps nobody from ending what runs.
    edit(&host, "[[vm]]", "[[vm");
    let (error, code) = Host::failure(&host.run("down", &["pay-0"]));
    assert!(error.contains("there are pay-1") && code == 1, "{error}");
    host.must("down", &["pay-1", "--grace", "0"]);
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
        error.ends_with("fleet fleet: not done: 1 of 1") && code == 3,
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
        up.0.ends_with("fleet fleet: not done: 1 of 1") && up.1 == 3,
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
        let (error, code) = Host::failure(&output);
        let expected =
            "vmm-dedup: fleet fleet is not all well: VMs that do not run: 1 (`vmm-dedup fleet logs ";
        assert!(error.starts_with(expected) && code == 1, "{error}");
        assert!(
            error.contains(", `vmm-dedup fleet up ") && error.ends_with("` starts them)"),
            "{error}"
        );
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
    let said = host.leaves();
    let line = said
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
    let left = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"));
        command.env("VMM_DEDUP_RUNTIME_DIR", host.path("run"));
        let output = command.args(["fleet", "up", &file]).args(more).output();
        let (said, code) = shown(&output.expect("a run"));
        assert_eq!(code, Some(3), "{said}");
        said
    };
    let (plan, said) = (left(&["--plan"]), left(&[]));

    let told = format!(
        "! name changed to second: this fleet stays first until it is down: `vmm-dedup fleet down {file}`, then \
         `vmm-dedup fleet up {file}`"
    );
    for text in [plan, said] {
        assert!(text.starts_with(&told), "{text}");
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

    let said = host.leaves();
    wait_until("the third is connected", || !host.vm("pay-2")["dedup"].is_null());

    let told = format!(
        "! store of domain \"default\": socket changed to {}: it stays {} until the fleet is down: `vmm-dedup fleet down ",
        host.path("other.sock").display(),
        host.path("store.sock").display()
    );
    assert!(said.contains(&told) && !said.contains("+ store"), "{said}");
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

    let said = host.leaves();

    let pid = host.status()["stores"][0]["pid"].clone();
    let told = format!(
        "! store of domain \"default\": max_mib, metrics changed: `kill {pid}` ends it, then `vmm-dedup fleet up {} ",
        host.path("fleet.toml").display()
    );
    assert!(said.contains(&told), "{said}");
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
        // One that cannot answer is not waited for.
        let pid = host.vm("q")["pid"].clone();
        send(&pid, Signal::STOP);
        let (error, code) = Host::failure(&host.run("api", &["q", "query-status"]));
        assert!(
            code == 1 && error.contains(&format!("`kill -CONT {pid}`")),
            "{error}"
        );
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
