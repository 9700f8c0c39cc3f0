//! What is shown is so: frozen VMs, full stores, ages, names.

use crate::host::{COMMON_PAGES, Host, eventually, kvm_is_there, text};
use rustix::process::Signal;
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
    let stat = host.must(&["stat"]);
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
    let _store = host.store("default", &["--max-mib", "2"]);
    let _guests = [host.guest("web"), host.guest("db")];

    eventually("the store is full", || {
        let stat = host.json(&["stat", "--json"]);
        (stat["store"]["full"] == true).then_some(())
    });
    let stat = host.must(&["stat"]);
    let explained = host.must(&["explain", "web"]);
    let json = host.json(&["explain", "web", "--json"]);

    assert!(
        stat.contains("FULL: ") && stat.contains("of at most 2.0 MiB"),
        "{stat}"
    );
    assert!(
        explained.contains("is FULL and refused") && explained.contains("--max-mib"),
        "{explained}"
    );
    assert!(
        explained.contains("no twin is known: the full store refused them")
            && !explained.contains("  nobody else has the same page"),
        "{explained}"
    );
    let doctor = text(&host.run(&["doctor"]).stdout);
    let told = format!("at {} is full", host.path("default.sock").display());
    assert!(doctor.contains(&told), "{doctor}");
    assert_eq!(json["store_full"], true, "{json}");
    assert!(json["store_refused_full_total"].as_u64() > Some(0), "{json}");
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
