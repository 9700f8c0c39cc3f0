//! One host, one view: several stores, VMs of the same name, changes of many VMs.

use crate::host::{Host, eventually, kvm_is_there, text};
use rustix::process::Signal;
use serde_json::Value;

#[test]
fn all_stores_of_the_host_are_one_view() {
    let host = Host::new();
    let _stores = [host.store("blue", &[]), host.store("red", &[])];
    let _refused = [host.refused("blue", "web"), host.refused("red", "db")];

    let stat = host.json(&["stat", "--json"]);
    let table = host.must(&["stat"]);
    let explained = host.json(&["explain", "db", "--json"]);
    let red = host.path("red.sock");
    let only = host
        .command(&["stat", "--json"])
        .env("VMM_DEDUP_STORE", &red)
        .output()
        .expect("a run");

    let domains: Vec<&Value> = stat["stores"]
        .as_array()
        .expect("stores")
        .iter()
        .map(|s| &s["domain"])
        .collect();
    assert_eq!(domains, ["blue", "red"]);
    assert_eq!(stat["vms"].as_array().map(Vec::len), Some(2));
    assert!(
        table.contains("by 2 VMs in 2 stores") && table.contains("store blue: running"),
        "{table}"
    );
    assert_eq!(
        (&explained["domain"], &explained["reason"]),
        (&"red".into(), &"vfio".into())
    );
    let only: Value = serde_json::from_slice(&only.stdout).expect("JSON");
    assert_eq!(
        (only["vms"].as_array().map(Vec::len), &only["store"]["domain"]),
        (Some(1), &"red".into())
    );
}

#[test]
fn a_store_that_shares_securely_is_told_apart() {
    let host = Host::new();
    let _stores = [host.store("blue", &[]), host.store("red", &["--secure"])];
    let _refused = host.refused("red", "db");

    let stat = host.must(&["stat"]);
    let line = |name: &str| {
        let start = format!("store {name}: running");
        let lines = stat.split("store ").map(|part| format!("store {part}"));
        let mut lines = lines.filter(|line| line.starts_with(&start));
        lines.next().unwrap_or_else(|| panic!("{stat}"))
    };
    assert!(
        line("red").contains("secure") && !line("blue").contains("secure"),
        "{stat}"
    );
    let explained = host.json(&["explain", "db", "--json"]);
    assert_eq!(explained["store_secure"], true);
    let doctor = text(&host.run(&["doctor"]).stdout);
    let told = |name: &str| {
        let rest = doctor.split(&format!("store {name}: ")).nth(1);
        let rest = rest.unwrap_or_else(|| panic!("{doctor}"));
        rest.split_once(" connected")
            .expect("a number of VMs")
            .1
            .starts_with(", shares securely")
    };
    assert!(told("red") && !told("blue"), "{doctor}");
}

#[test]
fn vms_of_one_name_in_two_stores_are_told_apart() {
    let host = Host::new();
    let _stores = [host.store("blue", &[]), host.store("red", &[])];
    let _blue = host.refused("blue", "web");
    let red = host.path("red.sock");
    let refusal = vmm_dedup::Refusal::new(vmm_dedup::Reason::Hugetlb, "huge", "small pages");
    let _red = vmm_dedup::Refused::announce(&red, "web", 512, &refusal).expect("a thread");
    eventually("both are listed", || {
        let stat = host.json(&["stat", "--json"]);
        (stat["vms"].as_array()?.len() == 2).then_some(())
    });

    let error = host.error(&["explain", "web"], 1);
    let named = host.json(&[
        "explain",
        "web",
        "--json",
        "--store",
        red.to_str().expect("UTF-8"),
    ]);

    assert!(error.contains("2 VMs are called web: say which"), "{error}");
    assert_eq!(named["reason"], "hugetlb");
}

#[test]
fn vms_of_one_long_name_in_one_store_are_told_apart() {
    // With the first there is no room for a process number, with the second for a part of one.
    for length in [64, 62] {
        let name = "x".repeat(length);
        let host = Host::new();
        let _store = host.store("default", &[]);
        let socket = host.path("default.sock");
        let announce = |reason| {
            let refusal = vmm_dedup::Refusal::new(reason, "why", "what");
            vmm_dedup::Refused::announce(&socket, &name, 512, &refusal).expect("a thread")
        };
        let names = |host: &Host| -> Vec<String> {
            let stat = host.json(&["stat", "--json"]);
            let vms = stat["vms"].as_array().expect("VMs").iter();
            vms.map(|vm| vm["name"].as_str().expect("a name").to_owned())
                .collect()
        };
        let _first = announce(vmm_dedup::Reason::Hugetlb);
        eventually("one is listed", || (names(&host).len() == 1).then_some(()));
        let _second = announce(vmm_dedup::Reason::Vfio);
        eventually("both are listed", || (names(&host).len() == 2).then_some(()));

        let explained = |name: &str| host.json(&["explain", name, "--json"])["reason"].clone();

        let pid = std::process::id();
        for shown in names(&host) {
            let reason = if shown == name { "hugetlb" } else { "vfio" };
            assert_eq!(explained(&shown), reason, "{shown}");
            assert!(shown == name || shown.ends_with(&format!(".{pid}")), "{shown}");
        }
    }
}

#[test]
fn a_store_that_was_killed_is_missed_and_one_that_ended_is_not() {
    let host = Host::new();
    let mut blue = host.store("blue", &[]);
    let red = host.store("red", &[]);
    let _refused = host.refused("red", "web");

    blue.kill();
    let output = host.run(&["stat"]);
    let json = host.run(&["stat", "--json"]);

    let (table, errors) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        table.contains("store blue: gone") && table.contains("web"),
        "{table}"
    );
    assert!(errors.contains("blue.sock has ended: guests go on"), "{errors}");
    let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(
        (&json["stores"][0]["state"], &json["stores"][1]["state"]),
        (&"gone".into(), &"running".into())
    );
    // Started again at the same place it is one store.
    let _blue = host.store("blue", &[]);
    assert_eq!(
        host.json(&["stat", "--json"])["stores"].as_array().map(Vec::len),
        Some(2)
    );
    red.send(Signal::TERM);
    eventually("it has ended", || {
        // While it ends it may be listed and not listen any more: then stat ends with 1.
        let stat = host.run(&["stat", "--json"]);
        let stat: Value = serde_json::from_slice(&stat.stdout).ok()?;
        (stat["stores"].as_array()?.len() == 1).then_some(())
    });
}

#[test]
fn without_a_store_it_is_said_where_one_was_looked_for() {
    let host = Host::new();
    let error = host.error(&["stat"], 1);
    let runtime = host.runtime();
    assert!(
        error.contains(&format!("no store is listed in {}", runtime.display())),
        "{error}"
    );
}

#[test]
fn a_store_without_a_place_in_the_list_works_for_who_names_it() {
    let host = Host::new();
    // No folder can be made below a file.
    std::fs::write(host.runtime(), "").expect("a file");
    let socket = host.path("s.sock");
    let mut store = host.command(&["store", "--metrics", "none", "--socket"]);
    let store = store
        .arg(&socket)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("a store");
    let mut store = crate::host::Process(store);

    let named = ["stat", "--store", socket.to_str().expect("UTF-8")];
    eventually("it answers", || host.run(&named).status.success().then_some(()));
    store.send(Signal::TERM);
    store.0.wait().expect("an end");

    let mut errors = String::new();
    std::io::Read::read_to_string(&mut store.0.stderr.take().expect("errors"), &mut errors).expect("text");
    assert!(errors.contains("cannot be listed on this host"), "{errors}");
}

#[test]
fn many_vms_are_changed_at_once() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &[]);
    let guests = ["web-1", "web-2", "db"].map(|name| host.guest(name));
    let _refused = host.refused("default", "gpu");
    for name in ["web-1", "web-2", "db"] {
        eventually("it is there", || host.vm(name));
    }
    let percents = |host: &Host| -> Vec<u64> {
        let stat = host.json(&["stat", "--json"]);
        let vms = stat["vms"].as_array().expect("VMs").iter();
        vms.filter(|vm| vm["refused"].is_null())
            .filter_map(|vm| vm["cpu_percent"].as_u64())
            .collect()
    };

    let said = host.must(&["set", "web-*", "cpu_percent=7"]);
    eventually("two have it", || (percents(&host) == [20, 7, 7]).then_some(()));
    let all = host.must(&["set", "--all", "budget=9"]);
    eventually("all have it", || (percents(&host) == [9, 9, 9]).then_some(()));
    host.must(&["set", "--all", "--cpu-percent", "11"]);
    eventually("all have that", || {
        (percents(&host) == [11, 11, 11]).then_some(())
    });
    host.must(&["set", "web-1", "cpu_budget_cores=0.3"]);
    eventually("one has that", || (percents(&host) == [11, 30, 11]).then_some(()));
    let none = host.error(&["set", "mail-*", "off"], 1);
    for empty in [&["set", "", "off"][..], &["set", "", "--cpu-percent", "5"]] {
        let error = host.error(empty, 2);
        assert!(
            error.contains("names a VM or is a pattern, and it is empty"),
            "{error}"
        );
    }
    host.error(&["set", "--all"], 2);
    host.error(&["set", "web-1", "budget=5", "--cpu-percent", "5"], 2);
    let pid = guests[2].pid();
    guests[2].send(Signal::STOP);
    let frozen = host.run(&["set", "--all", "on"]);
    let alone = host.error(&["set", "db", "on"], 1);
    guests[2].send(Signal::CONT);

    let stopped =
        format!("its process {pid} is stopped, and nothing was changed: `kill -CONT {pid}` lets it go on\n");
    assert_eq!(alone, format!("vmm-dedup: VM db: {stopped}"));
    let frozen = text(&frozen.stdout);
    assert!(
        frozen.starts_with(&format!("db: NOT DONE: {stopped}")),
        "{frozen}"
    );
    assert_eq!(said, "web-1: done\nweb-2: done\n");
    assert_eq!(
        all,
        "db: done\ngpu: refused, left as it is\nweb-1: done\nweb-2: done\n"
    );
    assert!(
        none.contains("no VM is called mail-*: there are db, gpu, web-1, web-2"),
        "{none}"
    );
}

#[test]
fn a_change_that_no_vm_takes_is_a_failure() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _one = host.refused("default", "gpu");
    let alone = host.run(&["set", "--all", "off"]);
    let _two = host.refused("default", "nic");

    let output = host.run(&["set", "--all", "off"]);

    assert_eq!(alone.status.code(), Some(1), "{}", text(&alone.stderr));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert_eq!(
        text(&output.stdout),
        "gpu: refused, left as it is\nnic: refused, left as it is\n"
    );
    assert!(text(&output.stderr).contains("all 2 VMs are refused"));
}

#[test]
fn a_fleet_folder_of_somebody_else_hides_no_other() {
    let host = Host::new();
    let state = |name: &str, mode: u32| {
        let folder = host.runtime().join(format!("fleet-{name}"));
        std::fs::create_dir_all(&folder).expect("a folder");
        let state = format!(
            "{{\"fleet\": \"{name}\", \"file\": null, \"complete\": true, \"stores\": [], \"vms\": []}}"
        );
        std::fs::write(folder.join("state.json"), state).expect("a state");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&folder, mode).expect("a mode");
    };
    state("alien", 0o777);
    state("mine", 0o700);

    let output = host.run(&["fleet", "ls"]);
    let json = host.run(&["fleet", "ls", "--json"]);

    let (table, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(table.contains("mine") && !table.contains("alien"), "{table}");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        errors.contains("fleet-alien") && errors.contains("others can write"),
        "{errors}"
    );
    let fleets: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(fleets.as_array().map(Vec::len), Some(1), "{fleets}");
    if !rustix::process::geteuid().is_root() {
        return;
    }
    // Whoever may not look into them does not know of fleets.
    std::fs::set_permissions(host.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("a mode");
    std::fs::remove_dir_all(host.runtime().join("fleet-alien")).expect("a folder");
    let mut ls = host.command(&["fleet", "ls"]);
    let output = std::os::unix::process::CommandExt::uid(&mut ls, 65_534)
        .output()
        .expect("a run");
    assert_eq!(text(&output.stdout), "");
    assert!(
        text(&output.stderr).contains("run this as the user whose fleet it is"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn vms_that_a_pattern_means_are_explained_together() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = ["gpu-1", "gpu-2", "nic"].map(|name| host.refused("default", name));

    let told = host.must(&["explain", "gpu-*"]);
    let json = host.json(&["explain", "gpu-?", "--json"]);
    let nobody = host.error(&["explain", "web-*"], 1);
    let range = host.error(&["explain", "gpu-*", "--gpa", "0-4096"], 2);

    assert!(
        told.starts_with("0 VMs called gpu-* of 1 store: 0 pages\n")
            && told.contains("not deduplicated: gpu-1 (vfio), gpu-2 (vfio);"),
        "{told}"
    );
    assert_eq!(json["vms"].as_array().map(Vec::len), Some(2), "{json}");
    assert!(
        nobody.contains("no VM is called web-*: there are gpu-1, gpu-2, nic"),
        "{nobody}"
    );
    assert!(range.contains("--gpa goes with one VM"), "{range}");
}
