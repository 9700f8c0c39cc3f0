//! What goes wrong while a fleet starts or runs.

use crate::host::{COMMON_PAGES, Host, QEMU_VM, kvm_is_there, send, vmm_is_there, wait_until};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use vmm_dedup_integration_tests::unmodified::library;

const TWO: &str = "[[vm]]\nname = \"pay\"\ncount = 2\ntemplate = \"payload\"\nvmm = \"reference\"\ndedup = { pass_period_ms = 100 }\n";

#[test]
fn a_crashed_vm_is_reported_with_its_log_and_a_lost_store_is_brought_back() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&TWO.replace("count = 2", "count = 3"));
    host.must("up", &[]);
    let status = host.status();
    let log = status["vms"][1]["log"].as_str().expect("a path").to_owned();
    let mut log = fs::OpenOptions::new().append(true).open(log).expect("the log");
    log.write_all(b"its last words\n").expect("a line");
    send(&status["vms"][1]["pid"], Signal::KILL);
    send(&status["stores"][0]["pid"], Signal::KILL);
    wait_until("the VM has crashed", || host.vm("pay-1")["state"] == "crashed");
    wait_until("the store is gone", || {
        host.status()["stores"][0]["state"] == "gone"
    });

    let output = host.run("status", &[]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.contains("GONE") && table.contains("fleet up"), "{table}");
    assert!(
        table.contains("pay-1 crashed") && table.contains("  its last words"),
        "{table}"
    );
    let told = table.lines().find(|line| line.starts_with("pay-1 crashed ("));
    assert!(
        told.is_some_and(
            |line| line.contains("): `vmm-dedup fleet up ") && line.contains("` starts it again; ")
        ),
        "{table}"
    );
    let (error, code) = Host::failure(&output);
    let not_well = "vmm-dedup: fleet fleet is not all well: VMs that do not run: 1 (`vmm-dedup fleet logs ";
    assert!(error.starts_with(not_well) && code == 1, "{error}");
    assert!(
        error.contains("` starts them), stores that are gone or silent: 1 (`vmm-dedup fleet up "),
        "{error}"
    );

    let left = status["vms"][0]["pid"].clone();
    let plan = host.must("up", &["--plan"]);
    assert!(
        plan.contains("+ store of domain \"default\"") && plan.contains("+ pay-1 (reference, crashed)"),
        "{plan}"
    );
    assert_eq!(host.vm("pay-1")["state"], "crashed");
    host.must("up", &[]);
    wait_until("all VMs share again", || {
        let status = host.status();
        let mapped = |n: usize| status["vms"][n]["dedup"]["pages_mapped"].as_u64().unwrap_or(0);
        (0..3).all(|n| mapped(n) >= COMMON_PAGES)
    });
    assert_eq!(host.vm("pay-0")["pid"], left);
    host.must("status", &[]);
    host.must("down", &[]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_spoilt_state_costs_no_vm_and_says_what_to_do() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let status = host.status();
    let pids = [
        &status["stores"][0]["pid"],
        &status["vms"][0]["pid"],
        &status["vms"][1]["pid"],
    ]
    .map(|pid| pid.as_u64().expect("a number"));
    let lives = |pid: &u64| Path::new(&format!("/proc/{pid}/exe")).exists();
    let state = host.path("run/state.json");
    let whole = fs::read_to_string(&state).expect("the state");
    let spoils: [&dyn Fn(); 3] = [
        &|| fs::write(&state, "").expect("the state"),
        &|| fs::write(&state, &whole[..whole.len() / 2]).expect("the state"),
        &|| fs::remove_file(&state).expect("the state"),
    ];
    let commands: [(&str, &[&str]); 6] = [
        ("status", &[]),
        ("up", &["--plan"]),
        ("up", &[]),
        ("restart", &["pay-0"]),
        ("down", &["pay-0"]),
        ("down", &["--grace", "0"]),
    ];
    for spoil in spoils {
        spoil();
        for (command, more) in commands {
            let (error, code) = Host::failure(&host.run(command, more));
            let told = [
                format!("pay-0 is process {}", pids[1]),
                format!("pay-1 is process {}", pids[2]),
                format!("the store of domain \"default\" is process {}", pids[0]),
                "put a copy of the file back, or end the fleet with `kill ".to_owned(),
                format!("`rm -r {}`", host.path("run").display()),
            ];
            assert!(
                told.iter().all(|part| error.contains(part)) && code == 1,
                "{command}: {error}"
            );
        }
        assert!(pids.iter().all(lives));
        fs::write(&state, &whole).expect("the state");
        host.must("status", &[]);
    }
    assert_eq!(host.status()["vms"][0]["pid"], pids[1]);
    fs::write(&state, "{").expect("the state");
    let (error, _) = Host::failure(&host.run("status", &[]));
    let ends = error.split('`').skip(1).step_by(2);
    for command in ends {
        let pasted = std::process::Command::new("sh").args(["-c", command]).status();
        assert!(pasted.expect("a run").success(), "{command}");
        wait_until("all have ended", || !pids.iter().any(lives));
    }
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_start_that_cannot_tell_of_itself_does_not_end_as_if_nothing_was_started() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    let full = fs::File::options()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full");
    let up = host
        .command("up")
        .stdout(full)
        .output()
        .expect("the command runs");
    let (error, code) = Host::failure(&up);
    assert!(error.contains("cannot write to standard output"), "{error}");
    assert_eq!(code, 3);
    host.must("status", &[]);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_fleet_whose_store_is_full_is_not_all_well() {
    if !kvm_is_there() {
        return;
    }
    // Its guests have two MiB in common.
    let store = "[store]\nsocket = \"store.sock\"\nmetrics = \"none\"\nmax_mib = 1\n";
    let host = Host::new(&format!("{TWO}{store}"));
    host.must("up", &[]);
    wait_until("the store is full", || {
        host.status()["stores"][0]["account"]["full"] == true
    });

    let status = host.run("status", &[]);

    let (error, code) = Host::failure(&status);
    let told = "stores that are full: 1 (`vmm-dedup doctor` tells how they get room)";
    assert!(code == 1 && error.contains(told), "{error}");
    let shown = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(shown.contains("FULL: refused "), "{shown}");
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_fleet_that_is_up_is_not_started_twice() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let before = host.status();
    let said = host.must("up", &[]);
    assert_eq!(said, "fleet fleet: nothing to do\n");
    let pids = |status: &Value| [&status["vms"][0]["pid"], &status["vms"][1]["pid"]].map(Value::as_i64);
    assert_eq!(pids(&host.status()), pids(&before));
    host.must("down", &[]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn vms_that_ended_by_themselves_are_told_from_crashed_ones() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&format!(
        "{TWO}cmdline = \"private_mib=1 zero_mib=0 ws_pages=0 seconds=0\"\n"
    ));
    host.must("up", &[]);
    wait_until("the guests have powered off", || {
        let status = host.status();
        [0, 1].iter().all(|n| status["vms"][*n]["state"] == "ended")
    });
    let status = host.run("status", &[]);
    let plan = host.must("up", &["--plan"]);
    assert!(plan.contains("+ pay-0 (reference, ended)"), "{plan}");
    let table = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(
        table.contains("pay-0 ended (in order): `vmm-dedup fleet up ") && !table.contains("not connected"),
        "{table}"
    );
    host.must("down", &[]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn if_one_vm_cannot_start_none_is_left() {
    if !kvm_is_there() {
        return;
    }
    let mut host = Host::new(&format!(
        "{TWO}[[vm]]\nname = \"bad\"\ntemplate = \"payload\"\nvmm = \"reference\"\nkernel = \"bad.elf\"\n"
    ));
    host.add("bad.elf", b"no kernel");
    let output = host.run("up", &[]);
    let (error, code) = Host::failure(&output);
    assert!(
        error.starts_with("vmm-dedup: VM \"bad\": reference: it ended with exit code 1: ") && code == 1,
        "{error}"
    );
    assert!(error.contains("bad.elf"), "{error}");
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_vm_that_crashes_while_others_start_ends_the_start() {
    if !kvm_is_there() || !vmm_is_there("QEMU", "qemu-system-x86_64") {
        return;
    }
    // One VM at a time: the second's VMM kills the first, which runs already.
    let mut host = Host::new(&format!(
        "parallel = 1\n{}{QEMU_VM}",
        TWO.replace("count = 2", "count = 1")
    ));
    let qemu = std::env::var("QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into());
    let script = format!("#!/bin/sh\nkill -9 $(cat run/vm/pay-0/vmm.pid)\nexec {qemu} \"$@\"\n");
    host.add("killer", script.as_bytes());
    let output = host
        .command("up")
        .env("QEMU", host.path("killer"))
        .output()
        .expect("up");
    let (error, code) = Host::failure(&output);
    let expected = "VM \"pay-0\": reference: it ended with signal 9 soon after its start";
    assert!(error.contains(expected) && code == 1, "{error}");
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn an_error_of_the_api_is_told_and_nothing_is_left() {
    if !kvm_is_there() || !vmm_is_there("CLOUD_HYPERVISOR", "cloud-hypervisor") {
        return;
    }
    let mut host = Host::new(
        "[[vm]]\nname = \"good\"\ntemplate = \"payload\"\ndedup = { mode = \"off\" }\n[[vm]]\nname = \"bad\"\ntemplate = \"payload\"\nkernel = \"bad.elf\"\ndedup = { mode = \"off\" }\n",
    );
    host.add("bad.elf", b"no kernel");
    let (error, code) = Host::failure(&host.run("up", &[]));
    assert!(
        error.starts_with("vmm-dedup: VM \"bad\": cloud-hypervisor: vm.") && code == 1,
        "{error}"
    );
    host.assert_nothing_left(&BTreeSet::new());
}

/// A fleet of one VM whose VMM starts and never answers, beside a good one.
fn with_a_silent_vmm(start_timeout_s: u32) -> Host {
    let mut host = Host::new(&format!(
        "start_timeout_s = {start_timeout_s}\n{TWO}[[vm]]\nname = \"silent\"\ntemplate = \"payload\"\nvmm = \"qemu\"\ndedup = {{ mode = \"off\" }}\n"
    ));
    host.add(
        "silent",
        b"#!/bin/sh\necho I say nothing more\nexec sleep 100000\n",
    );
    host
}

/// Starts `up` in the background and waits until all three VMMs have been started.
fn start_up(host: &Host) -> Child {
    let up = host
        .command("up")
        .env("QEMU", host.path("silent"))
        .stderr(Stdio::null())
        .spawn()
        .expect("up");
    let state = host.path("run/state.json");
    let vms = |state: &Path| {
        let text = fs::read_to_string(state).unwrap_or_default();
        serde_json::from_str::<Value>(&text).map_or(0, |state| state["vms"].as_array().map_or(0, Vec::len))
    };
    wait_until("all three have been started", || vms(&state) == 3);
    up
}

#[test]
fn a_vmm_that_does_not_answer_in_time_ends_the_start() {
    if !kvm_is_there() {
        return;
    }
    let host = with_a_silent_vmm(2);
    let output = host
        .command("up")
        .env("QEMU", host.path("silent"))
        .output()
        .expect("up");
    let (error, code) = Host::failure(&output);
    assert_eq!(
        error,
        "vmm-dedup: VM \"silent\": qemu: not running after 2 s: I say nothing more"
    );
    assert_eq!(code, 1);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn an_interrupted_start_leaves_nothing() {
    if !kvm_is_there() {
        return;
    }
    let host = with_a_silent_vmm(100);
    let mut up = start_up(&host);
    rustix::process::kill_process(Pid::from_child(&up), Signal::INT).expect("kill");
    assert_eq!(up.wait().expect("wait").code(), Some(128 + 2));
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn what_a_killed_start_leaves_is_taken_down() {
    if !kvm_is_there() {
        return;
    }
    let host = with_a_silent_vmm(100);
    let mut up = start_up(&host);
    up.kill().expect("kill");
    up.wait().expect("wait");
    let (error, code) = Host::failure(&host.run("status", &[]));
    let down = format!("`vmm-dedup fleet down {}", host.path("fleet.toml").display());
    assert!(
        error.contains("its start was killed: then run") && error.contains(&down) && code == 1,
        "{error}"
    );
    let plan = host
        .command("up")
        .arg("--plan")
        .env("QEMU", host.path("silent"))
        .output()
        .expect("a plan");
    let told = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(told.contains("+ silent (qemu, not started completely)"), "{told}");
    assert!(plan.status.success());
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_start_that_is_killed_at_any_moment_leaves_nothing_that_down_does_not_find() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&TWO.replace("count = 2", "count = 12"));
    // The whole start takes some hundred milliseconds.
    for milliseconds in [20, 40, 60, 80, 100, 130, 160] {
        let mut up = host.command("up").stderr(Stdio::null()).spawn().expect("up");
        std::thread::sleep(Duration::from_millis(milliseconds));
        let _ = up.kill();
        up.wait().expect("wait");
        host.must("down", &["--grace", "0"]);
        host.assert_nothing_left(&BTreeSet::new());
    }
}

#[test]
fn a_store_that_hangs_is_told_from_one_that_is_gone() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let store = host.status()["stores"][0]["pid"].clone();
    send(&store, Signal::STOP);
    let output = host.run("status", &[]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        table.contains(&format!("end it (process {store}), then"))
            && table.contains(&format!("`kill -CONT {store}` lets it go on"))
            && table.contains("store silent"),
        "{table}"
    );
    assert!(host.status()["stores"][0]["state"] == "silent" && output.status.code() == Some(1));
    let said = host.leaves();
    let hangs =
        format!("does not answer: its process {store} is stopped; `kill -CONT {store}` lets it go on");
    assert!(
        said.contains("! store of domain") && said.contains(&hangs),
        "{said}"
    );
    send(&store, Signal::KILL);
    wait_until("the store is gone", || {
        host.status()["stores"][0]["state"] == "gone"
    });
    // A VM that could not be started again is not ended.
    let vm = host.vm("pay-0")["pid"].clone();
    let (refused, _) = Host::failure(&host.run("restart", &["pay-0"]));
    assert!(
        refused.contains("it does not run: `vmm-dedup fleet up "),
        "{refused}"
    );
    assert!(host.vm("pay-0")["pid"] == vm && host.vm("pay-0")["state"] == "running");
    host.must("up", &[]);
    // How long services take to find it depends on what they were asking the one that hung.
    wait_until("all is well", || host.run("status", &[]).status.success());
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

/// Each that hangs takes five seconds: one after the other they would take twenty.
#[test]
fn stores_that_hang_are_waited_for_together() {
    if !kvm_is_there() {
        return;
    }
    let domains = ["blue", "green", "red", "white"];
    let part = |domain: &str| {
        format!(
            "[domain.{domain}]\nsocket = \"{domain}.sock\"\nmax_mib = 64\n[[vm]]\nname = \"{domain}\"\ntemplate = \"payload\"\n\
             vmm = \"reference\"\ndomain = \"{domain}\"\n"
        )
    };
    let host = Host::new(&domains.map(part).concat());
    host.must("up", &[]);
    let stores = host.status()["stores"].clone();
    let send_all = |signal| {
        let stores = stores.as_array().expect("stores").iter();
        stores.for_each(|store| send(&store["pid"], signal));
    };
    send_all(Signal::STOP);

    let commands: [(&str, &[&str]); 4] = [
        ("status", &[]),
        ("up", &["--plan"]),
        ("up", &[]),
        ("restart", &[]),
    ];
    let took = commands.map(|(command, more)| {
        let begun = Instant::now();
        let output = host.run(command, more);
        // `up` leaves the stores to whoever asked.
        let expected = if command == "up" { 3 } else { 1 };
        assert_eq!(output.status.code(), Some(expected), "{command}");
        begun.elapsed()
    });
    send_all(Signal::CONT);

    assert!(
        took.iter().all(|took| *took < Duration::from_secs(15)),
        "{took:?}"
    );
    wait_until("all is well", || host.run("status", &[]).status.success());
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn vms_that_run_without_their_dedup_are_counted() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&format!(
        "{TWO}[[vm]]\nname = \"plain\"\ntemplate = \"payload\"\nvmm = \"reference\"\ndedup = {{ mode = \"off\" }}\n"
    ));
    host.must("up", &[]);
    // They may still be about to connect: that is waited for.
    host.must("status", &[]);
    // Another store, which answers for the one that the VMs are connected to.
    let mut other = std::process::Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args(["store", "--metrics", "none", "--socket"])
        .arg(host.path("other.sock"))
        .stderr(Stdio::null())
        .spawn()
        .expect("a store");
    wait_until("it listens", || host.path("other.sock").exists());
    let state = host.path("run/state.json");
    let own = fs::read_to_string(&state).expect("the state");
    let strange = own.replace("/store.sock", "/other.sock");
    assert_ne!(strange, own);
    fs::write(&state, strange).expect("the state");

    let output = host.run("status", &[]);
    let json = host.run("status", &["--json"]);

    fs::write(&state, own).expect("the state");
    send(&other.id().into(), Signal::TERM);
    other.wait().expect("wait");
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    let log = host.path("run/vm/pay-1/vmm.log");
    assert!(
        table.contains(&format!(
            "pay-1 is not connected to its store: {} tells why",
            log.display()
        )),
        "{table}"
    );
    let expected = "vmm-dedup: fleet fleet is not all well: VMs that run without their dedup: 2 (`vmm-dedup doctor` tells what to change)";
    for output in [output, json] {
        assert_eq!(Host::failure(&output), (expected.to_owned(), 1));
    }
    host.must("status", &[]);
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_refused_vm_is_counted() {
    if !kvm_is_there() || !vmm_is_there("QEMU", "qemu-system-x86_64") {
        return;
    }
    let shared = "\"-object\", \"memory-backend-memfd,id=ram,size=64M,share=on\", \"-machine\", \"memory-backend=ram\"";
    let vm = QEMU_VM
        .replace("dedup = { mode = \"off\" }\n", "")
        .replace("-capabilities\"", &format!("-capabilities\", {shared}"));
    let host = Host::new(&format!("preload = {:?}\n{vm}", library::path()));
    host.must("up", &[]);
    wait_until("it is refused", || {
        host.vm("q")["dedup"]["refused"] == "shared_memory"
    });

    let output = host.run("status", &[]);

    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        table.contains("q is not deduplicated (shared_memory): `vmm-dedup doctor q --store "),
        "{table}"
    );
    let expected = "vmm-dedup: fleet fleet is not all well: VMs that run without their dedup: 1 (`vmm-dedup doctor` tells what to change)";
    assert_eq!(Host::failure(&output), (expected.to_owned(), 1));
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_store_that_others_use_stays() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    host.must("up", &[]);
    let store = host.status()["stores"][0]["pid"].clone();
    let mut other = std::process::Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args([
            "run",
            "--payload",
            "private_mib=1 zero_mib=0 ws_pages=0 seconds=1000",
            "--memory-mib",
            "16",
        ])
        .args(["--name", "other", "--pass-period-ms", "100", "--store"])
        .arg(host.path("store.sock"))
        .stdout(Stdio::null())
        .stdin(Stdio::null())
        .spawn()
        .expect("a VM");
    wait_until("the other VM is connected", || {
        let stat = std::process::Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
            .args(["stat", "--socket"])
            .arg(host.path("store.sock"))
            .output();
        String::from_utf8_lossy(&stat.expect("stat").stdout).contains("other")
    });
    let output = host.run("down", &[]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && errors.contains("stays: 1 VM of others connected"),
        "{errors}"
    );
    assert!(host.path("store.sock").exists() && !host.path("run").exists());
    // A second fleet uses the store that runs, and does not end it.
    host.must("up", &[]);
    assert_eq!(host.status()["stores"][0]["pid"], Value::Null);
    other.kill().expect("kill");
    other.wait().expect("wait");
    host.must("down", &[]);
    assert!(host.path("store.sock").exists());
    send(&store, Signal::TERM);
    wait_until("the store has ended", || !host.path("store.sock").exists());
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn a_vm_that_has_run_is_not_ended_since_it_does_not_answer() {
    if !kvm_is_there() || !vmm_is_there("QEMU", "qemu-system-x86_64") {
        return;
    }
    let host = Host::new(QEMU_VM);
    host.must("up", &[]);
    let before = host.vm("q")["pid"].clone();
    // It cannot be asked any more, and an `up` was killed meanwhile.
    fs::remove_file(host.path("run/vm/q/api.sock")).expect("its socket");
    let state = host.path("run/state.json");
    let text = fs::read_to_string(&state).expect("the state");
    let killed = text.replace("\"complete\": true", "\"complete\": false");
    assert_ne!(killed, text);
    fs::write(&state, killed).expect("the state");

    let said = host.leaves();

    assert!(said.contains("! q does not answer"), "{said}");
    let after = host.vm("q");
    assert_eq!((&after["pid"], &after["state"]), (&before, &"silent".into()));
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn of_two_ups_at_once_one_starts_the_fleet_and_the_other_says_so() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(TWO);
    let up = || {
        let mut up = host.command("up");
        up.stdout(Stdio::piped()).stderr(Stdio::piped());
        up.spawn().expect("up")
    };
    let [one, other] = [up(), up()].map(|up| up.wait_with_output().expect("an end"));
    let told = |output: &std::process::Output| {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("{}{errors}", String::from_utf8_lossy(&output.stdout))
    };
    let told = [told(&one), told(&other)];

    let started = told.iter().filter(|told| told.contains("2 VMs run, after"));
    assert_eq!(started.count(), 1, "{told:?}");
    let clear = ["fleet fleet: nothing to do", "another fleet command is at work"];
    let said_so = told
        .iter()
        .filter(|told| clear.iter().any(|clear| told.contains(clear)));
    assert_eq!(said_so.count(), 1, "{told:?}");
    host.must("status", &[]);
    host.must("down", &[]);
    host.assert_nothing_left(&BTreeSet::new());
}
