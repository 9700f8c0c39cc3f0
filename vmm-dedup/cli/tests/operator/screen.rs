//! What is shown is so: frozen VMs, full stores, ages, names.

use crate::host::{COMMON_PAGES, Host, Process, eventually, kvm_is_there, pasted, text};
use rustix::process::Signal;
use serde_json::Value;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn a_frozen_vm_looks_frozen_and_is_not_changed_behind_ones_back() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &[]);
    let guest = host.guest("web");
    eventually("it has passed once", || {
        (host.vm("web")?["passes_total"].as_u64()? > 0).then_some(())
    });

    guest.send(Signal::STOP);
    std::thread::sleep(Duration::from_millis(1500));
    let stat = text(&host.run(&["stat"]).stdout);
    let error = host.error(&["set", "web", "off"], 1);
    let explained = host.error(&["explain", "web"], 1);
    guest.send(Signal::CONT);

    let row = stat.lines().find(|line| line.starts_with("web")).expect("a row");
    assert!(row.contains("frozen") && !row.contains("running"), "{row}");
    // More than the second that it was stopped for.
    let age = row
        .split_whitespace()
        .nth(4)
        .expect("an age")
        .parse::<f64>()
        .expect("seconds");
    assert!(age >= 1.4, "{row}");
    let revive = format!("`kill -CONT {}`", guest.pid());
    assert!(
        error.contains("nothing was changed") && error.contains(&revive),
        "{error}"
    );
    assert!(explained.contains(&revive), "{explained}");
    let passes = host.vm("web").expect("web")["passes_total"].as_u64();
    eventually("it goes on", || {
        (host.vm("web")?["passes_total"].as_u64() > passes).then_some(())
    });
    assert_eq!(host.vm("web").expect("web")["state"], "running");
}

#[test]
fn a_full_store_is_called_full_and_what_it_has_no_room_for_is_not_called_unique_alone() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    // Of 8 MiB in common a quarter has room.
    let mut store = host.store("default", &["--max-mib", "2"]);
    let _guests = [host.guest("web"), host.guest("db")];
    let stat_json = || {
        let output = host.run(&["stat", "--json"]);
        // Without a store in the list, as between two of them, there is none.
        let stat: Value = serde_json::from_slice(&output.stdout).ok()?;
        let answers = stat["store"]["state"] == "running";
        let well = answers && stat["store"]["full"] == false;
        assert_eq!(output.status.success(), well, "{stat:#}");
        answers.then_some(stat)
    };

    eventually("the store is full", || {
        (stat_json()?["store"]["full"] == true).then_some(())
    });
    let output = host.run(&["stat"]);
    let (stat, error) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{stat}");
    assert!(
        error.starts_with("vmm-dedup: the store at ")
            && error.ends_with(" is full, and shares nothing more\n"),
        "{error}"
    );
    let explained = host.must(&["explain", "web"]);
    let json = host.json(&["explain", "web", "--json"]);

    assert!(
        stat.contains("FULL: ") && stat.contains("of at most 2.0 MiB"),
        "{stat}"
    );
    assert!(
        explained.contains("store full: ")
            && explained.contains("is FULL and refused")
            && explained.contains("--max-mib"),
        "{explained}"
    );
    assert!(
        explained.contains("no twin is known: the full store refused them")
            && !explained.contains("  nobody else has the same page"),
        "{explained}"
    );
    let doctor = text(&host.run(&["doctor"]).stdout);
    let told = format!("at {} is full", host.path("default.sock").display());
    assert!(
        doctor.contains(&told) && doctor.contains("warn store full: "),
        "{doctor}"
    );
    assert_eq!(json["store_full"], true, "{json}");
    assert!(json["store_refused_full_total"].as_u64() > Some(0), "{json}");
    // What is told is pasted: the next store has twice the room.
    let full = stat.lines().find(|line| line.contains("FULL: ")).expect("a line");
    let told: Vec<&str> = full.split('`').skip(1).step_by(2).collect();
    assert!(doctor.replace('\n', " ").contains(told[1]), "{doctor}");
    let end = Command::new("sh").args(["-c", told[0]]).status();
    assert!(end.expect("a shell").success(), "{full}");
    store.0.wait().expect("an end");
    let next = Process(
        pasted(&host, told[1])
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell"),
    );
    let store = eventually("all has room there", || {
        let stat = stat_json()?;
        let shared = stat["store"]["pages_shared"].as_u64()?;
        (shared > 512).then(|| stat["store"].clone())
    });
    assert_eq!(
        (&store["pid"], &store["limit_bytes"]),
        (&next.pid().into(), &(4 << 20).into())
    );
}

#[test]
fn stat_tells_what_the_stores_memory_is_in_use_for_and_sorts_vms() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _guests = ["web-10", "web-2", "db"].map(|name| host.guest(name));
    for name in ["web-10", "web-2", "db"] {
        host.wait_for_sharing(name);
    }

    let stat = host.must(&["stat"]);
    let json = host.json(&["stat", "--json"]);

    let names: Vec<&str> = stat
        .lines()
        .skip_while(|line| !line.starts_with("VM "))
        .skip(1)
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert_eq!(names, ["db", "web-2", "web-10"], "{stat}");
    let store = &json["store"];
    let in_use = store["in_use_bytes"].as_u64().expect("bytes");
    assert!(
        in_use >= COMMON_PAGES * 4096 && store["resident_bytes"].as_u64() >= Some(in_use),
        "{store}"
    );
    assert!(
        stat.contains(" in use, of at most 64.0 GiB") || stat.contains("65536.0 MiB"),
        "{stat}"
    );
    assert_eq!(json["vms"][0]["domain"], "default");
}

#[test]
fn what_is_taken_back_is_all_that_is_shared_zero_pages_too() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &[]);
    let guests = ["web", "db"].map(|name| host.guest_with(name, "zero_mib=8 ws_pages=0"));
    let zeros = || host.vm("web").and_then(|vm| vm["pages_zero"].as_u64());
    for name in ["web", "db"] {
        host.wait_for_sharing(name);
    }
    eventually("zero pages are given up", || (zeros()? >= 2048).then_some(()));
    let (before, shared) = (anonymous_kib(guests[0].pid()), zeros().expect("a number"));

    host.must(&["set", "web", "off", "--unmerge"]);

    let web = host.vm("web").expect("it is connected");
    let left = ["pages_mapped", "pages_zero"].map(|key| web[key].as_u64());
    assert_eq!(left, [Some(0), Some(0)], "{web:#}");
    let taken_back = web["unmerged_total"].as_u64();
    assert!(taken_back >= Some(COMMON_PAGES + shared), "{taken_back:?}");
    // The kernel says so, too: it had none of these pages as the VM's own.
    let grown = anonymous_kib(guests[0].pid()) - before;
    assert!(
        grown >= 4 * (COMMON_PAGES + shared),
        "{grown} KiB for {shared} zero pages"
    );
    host.must(&["set", "web", "on"]);
    eventually("they are given up again", || (zeros()? >= 2048).then_some(()));
}

/// A process's memory that is its own.
fn anonymous_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    number
        .and_then(|number| number.trim().parse().ok())
        .expect("a number")
}

#[test]
fn what_a_guest_writes_does_not_fill_the_disk() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let (log, last) = (host.path("serial.log"), host.path("serial.log.1"));
    // A guest takes long for as much.
    std::fs::write(&log, vec![b'\n'; (1 << 20) - 100]).expect("a log");
    let mut run = host.command(&[
        "run",
        "--payload",
        "seconds=1000000 report_ms=10",
        "--memory-mib",
        "64",
        "--serial-log",
    ]);
    let guest = run.arg(&log).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut guest = Process(guest.spawn().expect("the command runs"));

    eventually("the next log is begun", || {
        let text = std::fs::read_to_string(&log).ok()?;
        (last.exists() && text.contains("@payload")).then_some(())
    });
    guest.kill();

    let len = |path| std::fs::metadata(path).expect("a log").len();
    assert!(
        (1 << 20..(1 << 20) + 4096).contains(&len(&last)),
        "{}",
        len(&last)
    );
    assert!(len(&log) < 1 << 20);
    let mut shown = String::new();
    let mut output = guest.0.stdout.take().expect("a pipe");
    output.read_to_string(&mut shown).expect("UTF-8");
    assert_eq!(shown, "");
}

/// Figures of one time stand beside each other: what a service has shared since its last pass ended is in the store's figures, too.
#[test]
fn services_tell_within_a_pass_how_far_they_are() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _guests = ["web", "db"].map(|name| host.guest_with(name, "common_mib=40 ws_pages=0"));
    for name in ["web", "db"] {
        eventually("it is there", || host.vm(name));
    }
    host.must(&["set", "--all", "cpu_percent=1"]);

    let mut before: Option<Value> = None;
    eventually("a pass goes on, and more is shared", || {
        let now = host.vm("web")?;
        let key = |vm: &Value, key: &str| vm[key].as_u64();
        let last = before.replace(now.clone())?;
        let within = key(&now, "passes_total") == key(&last, "passes_total");
        (within && key(&now, "pages_mapped") > key(&last, "pages_mapped")).then_some(())
    });
}

#[test]
fn what_vms_do_counts_for_their_next_store_from_the_first_moment() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let mut store = host.store("default", &[]);
    let _guests = ["web", "db"].map(|name| host.guest_with(name, "ws_pages=0"));
    for name in ["web", "db"] {
        host.wait_for_sharing(name);
    }
    let merges = || {
        let vms = ["web", "db"].map(|name| host.vm(name)?["merges_total"].as_u64());
        Some(vms[0]? + vms[1]?)
    };
    let mut last = None;
    let before = eventually("nothing is merged any more", || {
        std::thread::sleep(Duration::from_secs(1));
        let now = merges()?;
        (last.replace(now) == Some(now)).then_some(now)
    });

    store.kill();
    let address = free_address();
    let mut next = host.command(&["store", "--domain", "default", "--metrics", &address, "--socket"]);
    next.arg(host.path("default.sock")).stderr(Stdio::null());
    let _next = Process(next.spawn().expect("the command runs"));
    eventually("they share again", || {
        (merges()? >= before + 2 * COMMON_PAGES).then_some(())
    });

    let series = "vmmdedup_merges_total{domain=\"default\"} ";
    eventually("the host's counter is the sum of what both did since", || {
        let sum = merges()? - before;
        let text = metrics(&address)?;
        let of_host = text.lines().find_map(|line| line.strip_prefix(series))?;
        (of_host.parse() == Ok(sum)).then_some(())
    });
}

/// An address that nobody serves at, for now.
fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").to_string()
}

fn metrics(address: &str) -> Option<String> {
    let mut stream = std::net::TcpStream::connect(address).ok()?;
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

#[test]
fn what_is_taken_back_and_a_store_that_goes_are_not_called_writes_of_the_guest() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let mut store = host.store("default", &[]);
    // They write nothing of what they have in common.
    let _guests = [host.guest("web"), host.guest("db")];
    let both_share = || ["web", "db"].map(|name| host.wait_for_sharing(name));
    let count = |name: &str, keys: &[&str]| {
        let vm = host.vm(name).expect("it is connected");
        keys.iter()
            .map(|key| vm[key].as_u64().expect("a number"))
            .sum::<u64>()
    };
    let breaks = |name| count(name, &["breaks_kernel_total", "breaks_managed_total"]);
    // Guests write some pages of their program, and of their own memory, half as much again, which may be shared before it differs.
    let some = COMMON_PAGES * 3 / 4;
    both_share();

    host.must(&["set", "web", "off", "--unmerge"]);
    eventually("all of it is taken back", || {
        (count("web", &["unmerged_total"]) >= COMMON_PAGES - some).then_some(())
    });
    host.must(&["set", "web", "on"]);
    both_share();
    store.kill();
    let _next = host.store("default", &[]);
    both_share();
    eventually("they have left the store that has gone", || {
        (host.json(&["explain", "db", "--json"])["classes"]["foreign"] == 0).then_some(())
    });

    for name in ["web", "db"] {
        assert!(breaks(name) < some, "{name}: {} writes", breaks(name));
    }
}

#[test]
fn names_that_would_be_shown_otherwise_are_refused() {
    let host = Host::new();
    let line = host.run(&["run", "--payload", "--dedup", "store=/nonexistent,name=web 1"]);
    let error = text(&line.stderr);
    assert_eq!(line.status.code(), Some(2), "{error}");
    assert!(
        error.contains("name is \"web 1\", but it must be 1 to 64"),
        "{error}"
    );
    let rule = "it must be 1 to 64 letters, digits and any of -_.:/, the first no dash";
    for name in ["web 1", "", "ä", "-web", &"x".repeat(65)] {
        let named = format!("--name={name}");
        let error = host.error(&["run", "--payload", "--store", "/nonexistent", &named], 2);
        assert!(error.contains(rule), "{error}");
    }
    let domain = host.error(&["store", "--metrics", "none", "--domain=-web"], 2);
    assert!(domain.contains("the first a letter or digit"), "{domain}");
}

#[test]
fn a_test_guest_that_gives_up_fails_the_command() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let output = host.run(&["run", "--payload", "foo=1", "--memory-mib", "16"]);
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(
        errors.starts_with("vmm-dedup: the test guest gave up: "),
        "{errors}"
    );
    host.must(&[
        "run",
        "--payload",
        "seconds=0 private_mib=1 zero_mib=0",
        "--memory-mib",
        "16",
    ]);
}

/// What the row of a VM has under a heading of two words: a number and its unit.
fn cell(table: &str, vm: &str, heading: &str) -> Option<String> {
    let head = table.lines().find(|line| line.starts_with("VM "))?;
    let end = head.find(heading)? + heading.len();
    let row = table.lines().find(|line| line.starts_with(vm))?;
    let mut words = row.get(..end)?.rsplit(' ').filter(|word| !word.is_empty());
    let (unit, number) = (words.next()?, words.next()?);
    Some(format!("{number} {unit}"))
}

#[test]
fn stat_and_the_status_of_a_fleet_call_the_same_shared() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let file = &*host.fleet_file("web");
    host.must(&["fleet", "up", file]);

    // It has nothing in common with anybody, and 4 MiB of zeros.
    let shared = std::panic::catch_unwind(|| {
        eventually("both show the zeros", || {
            let status = cell(&host.must(&["fleet", "status", file]), "web", "SHARED")?;
            let stat = cell(&host.must(&["stat"]), "web", "SHARED")?;
            (status == stat && stat.starts_with("4.")).then_some(())
        });
    });

    host.must(&["fleet", "down", file]);
    assert!(shared.is_ok());
}
