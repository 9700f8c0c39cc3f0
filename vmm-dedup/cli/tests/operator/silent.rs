//! Stores that have gone or hang: what asks them says so, also where there is but one.

use crate::host::{Host, eventually, hints, kvm_is_there, text};
use crate::terminal::{Terminal, lines_of};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::time::Duration;

#[test]
fn stat_names_the_only_store_as_gone_or_hanging() {
    let host = Host::new();
    let mut store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");

    store.send(Signal::STOP);
    let hanging = host.run(&["stat"]);
    let hangs = host.run(&["stat", "--json"]);
    store.kill();
    let gone = host.run(&["stat", "--json"]);

    let table = text(&hanging.stdout);
    assert!(
        table.starts_with("saved net: not known, the store does not answer\nstore default: hangs ("),
        "{table}"
    );
    assert!(!table.contains("no VM is connected"), "{table}");
    for (output, state) in [(hangs, "hangs"), (gone, "gone")] {
        assert_eq!(output.status.code(), Some(1));
        let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(json["store"]["state"], state, "{json:#}");
        assert_eq!(
            (&json["store"]["domain"], &json["saved_net_bytes"]),
            (&"default".into(), &Value::Null)
        );
    }
}

#[test]
fn what_is_not_known_of_silent_stores_is_not_called_nothing() {
    let host = Host::new();
    let mut blue = host.store("blue", &[]);
    let mut red = host.store("red", &[]);
    blue.kill();

    let output = host.run(&["stat"]);
    let table = text(&output.stdout);
    let set = host.error(&["set", "--all", "on"], 1);
    let doctor = host.run(&["doctor", "web-0"]);
    let explained = host.run(&["explain"]);
    red.kill();
    let unknown = host.run(&["explain"]);

    let explained = text(&explained.stdout);
    let few = "0 VMs of 1 of 2 stores, the others do not answer: 0 pages\n";
    assert!(explained.starts_with(few), "{explained}");
    assert_eq!(
        (text(&unknown.stdout).as_str(), unknown.status.code()),
        ("", Some(1))
    );
    let first = "saved net 0.0 MiB by 0 VMs in 1 of 2 stores, the others do not answer\n";
    assert!(table.starts_with(first), "{table}");
    assert!(
        table.contains("no VM is connected to the stores that answer\n"),
        "{table}"
    );
    for error in [set, text(&doctor.stderr)] {
        assert!(
            error.contains("no VM is connected to the stores that answer"),
            "{error}"
        );
        assert!(error.contains("blue.sock has ended: guests go on"), "{error}");
    }
}

#[test]
fn top_starts_where_the_only_store_has_gone_and_finds_the_next() {
    let host = Host::new();
    let mut store = host.store("default", &[]);
    store.kill();
    let mut top = Terminal::open(host.command(&["top", "--interval", "0.2"]), 80, 24);

    top.shows("for at least");
    let screen = top.screen().join("\n");
    // Of what is on the screen: it is pasted with its line breaks.
    let hint = hints(&screen).pop().unwrap_or_default();
    assert!(hint.starts_with("vmm-dedup store --socket "), "{screen}");
    let next = crate::host::Process(shell(&host, &hint).spawn().expect("a shell"));
    eventually("it is found", || {
        (!top.screen().join("\n").contains("is gone")).then_some(())
    });
    let _refused = host.refused("default", "gpu");
    top.shows("vfio");
    top.types("q");

    assert!(top.end().success());
    drop(next);
    // One that never was there is a mistake.
    let mut top = Terminal::open(host.command(&["top", "--store", "/no/such/store"]), 80, 24);
    assert_eq!(top.end().code(), Some(1));
}

/// A shell for what is pasted, by which the command is found.
fn shell(host: &Host, pasted: &str) -> std::process::Command {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_vmm-dedup"));
    let folder = program.parent().expect("a folder").to_str().expect("UTF-8");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &format!("exec {pasted}")]);
    shell.env("PATH", format!("{folder}:{path}"));
    shell
        .env("VMM_DEDUP_RUNTIME_DIR", host.runtime())
        .env_remove("VMM_DEDUP_STORE");
    shell
}

#[test]
fn what_doctor_says_on_a_terminal_can_be_pasted() {
    let host = Host::new();
    let mut store = host.store("default", &["--max-mib", "1024"]);
    store.kill();
    let (lines, _) = lines_of(host.command(&["doctor"]), 80);
    let found: Vec<String> = lines.iter().flat_map(|line| hints(line)).collect();

    let start: Vec<&String> = { found.iter() }
        .filter(|hint| hint.starts_with("vmm-dedup store "))
        .collect();
    assert_eq!(start.len(), 1, "{lines:#?}");
    let _store = crate::host::Process(shell(&host, start[0]).spawn().expect("a shell"));
    let stat = eventually("it runs as it was", || {
        let stat: Value = serde_json::from_slice(&host.run(&["stat", "--json"]).stdout).ok()?;
        (stat["store"]["state"] == "running").then_some(stat)
    });
    assert_eq!(stat["store"]["limit_bytes"], 1u64 << 30, "{stat:#}");
}

#[test]
fn doctor_makes_no_folder() {
    let host = Host::new();
    let runtime = host.runtime();

    let told = text(&host.run(&["doctor"]).stdout);

    assert!(
        told.contains(&format!("ok   runtime folder: {}", runtime.display())),
        "{told}"
    );
    assert!(!runtime.exists());
}

/// Watches a store until there is something to plot.
fn plotting(host: &Host, folder: &str) -> Terminal {
    let args = ["top", "--interval", "0.2", "--plot", folder];
    let top = Terminal::open(host.command(&args), 80, 24);
    top.shows("vfio");
    std::thread::sleep(Duration::from_secs(1));
    top
}

#[test]
fn signals_that_end_top_leave_the_cursor_and_what_was_seen() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    for (signal, number) in [(Signal::TERM, 15), (Signal::HUP, 1)] {
        let folder = host.path(&format!("plots-{number}"));
        let mut top = plotting(&host, folder.to_str().expect("UTF-8"));

        top.process.send(signal);

        assert_eq!(top.end().code(), Some(128 + number));
        let plot = fs::read_to_string(folder.join("top-memory.svg")).expect("a plot");
        assert!(!plot.contains("no figures"), "{plot}");
        eventually("the cursor is there", || top.shows_cursor().then_some(()));
    }
}

#[test]
fn top_that_is_put_aside_leaves_the_cursor() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    let mut top = host.command(&["top", "--interval", "0.2"]);
    std::os::unix::process::CommandExt::process_group(&mut top, 0);
    let mut top = Terminal::open(top, 80, 24);
    top.shows("vfio");
    eventually("it hides the cursor", || (!top.shows_cursor()).then_some(()));

    top.types("\x1a");
    crate::host::has_stopped(top.process.pid().into());
    eventually("the cursor is there", || top.shows_cursor().then_some(()));
    top.process.send(Signal::CONT);
    eventually("it is hidden again", || (!top.shows_cursor()).then_some(()));
    top.types("q");

    assert!(top.end().success());
    eventually("the cursor is there again", || top.shows_cursor().then_some(()));
}

#[test]
fn what_is_stopped_of_a_fleet_is_told_with_what_lets_it_go_on() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let file = &*host.fleet_file("web");
    host.must(&["fleet", "up", file]);
    let stat = host.json(&["stat", "--json"]);
    let pids = [&stat["vms"][0]["pid"], &stat["store"]["pid"]].map(|pid| pid.as_u64().expect("a process"));
    let send = |pid: u64, signal| {
        let pid = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .expect("a process");
        kill_process(pid, signal).expect("kill");
    };
    let stop = |pid| {
        send(pid, Signal::STOP);
        crate::host::has_stopped(pid);
    };

    let quiet = host.run(&["fleet", "logs", file]);
    let none = host.run(&["fleet", "logs", file, "-n", "0"]);
    stop(pids[0]);
    let frozen = host.run(&["fleet", "status", file]);
    // As a command does that changes the fleet.
    let folder = fs::File::open(host.runtime().join("fleet-f")).expect("the fleet's folder");
    rustix::fs::flock(&folder, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let busy = host.run(&["fleet", "status", file]);
    drop(folder);
    send(pids[0], Signal::CONT);
    stop(pids[1]);
    let listed = host.run(&["fleet", "ls"]);
    let restart = host.run(&["fleet", "restart", file]);
    send(pids[1], Signal::CONT);
    host.must(&["fleet", "down", file]);

    let revive = |pid| format!("is stopped: `kill -CONT {pid}` lets it go on\n");
    let wait = "another fleet command is at work, so look again\n";
    let waits = [&frozen, &busy].map(|output| text(&output.stderr).contains(wait));
    assert_eq!(waits, [false, true], "{}", text(&busy.stderr));
    let frozen = text(&frozen.stdout);
    assert!(
        frozen.contains(&format!("web frozen: its process {}", revive(pids[0]))),
        "{frozen}"
    );
    let listed = text(&listed.stdout);
    assert!(listed.contains("f       1   1 0 of 1"), "{listed}");
    let restart = text(&restart.stderr);
    assert_eq!(restart.matches("the store").count(), 1, "{restart}");
    // The reference VMM has nothing to say as long as all is well.
    let (said, none) = (text(&quiet.stderr), text(&none.stderr));
    assert!(
        said.starts_with("these VMMs wrote nothing so far; `vmm-dedup fleet logs ")
            && said.contains(" --serial` shows what guests write"),
        "{said}"
    );
    assert_eq!((text(&quiet.stdout).as_str(), none.as_str()), ("", ""));
}
