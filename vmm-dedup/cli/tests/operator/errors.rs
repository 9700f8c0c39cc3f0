//! What is wrong is said in one line, with what to do, and the hint can be pasted.

use crate::drawn;
use crate::host::{Host, Process, error_of, eventually, hints, kvm_is_there, pasted, text};
use crate::network::Network;
use crate::peer;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use vmm_dedup_protocol::stats::ServiceStats;

/// A user without any rights here.
const NOBODY: u32 = 65_534;

#[test]
fn a_store_that_may_not_be_used_is_not_to_be_started() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &[]);
    fs::set_permissions(host.path(""), fs::Permissions::from_mode(0o755)).expect("a mode");
    let socket = host.path("default.sock");
    let mut stat = host.command(&["stat", "--store"]);

    let output = stat.arg(&socket).uid(NOBODY).output().expect("a run");

    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("may not use the store at") && hints(&errors).is_empty(),
        "{errors}"
    );
    let shown = text(&output.stdout);
    assert!(
        shown.starts_with("saved net: not known, this user may not use the store: run this as root")
            && !shown.contains("does not answer"),
        "{shown}"
    );
    // The list may be read, so that the store is named without being named.
    let output = host.command(&["stat"]).uid(NOBODY).output().expect("a run");
    assert!(
        text(&output.stderr).contains("may not use the store at"),
        "{}",
        text(&output.stderr)
    );
}

/// Who may see VMs is no one to ask them: no table tells him that there are none.
#[test]
fn who_may_look_and_not_explain_is_told_only_that() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &["--socket-mode", "0666"]);
    fs::set_permissions(host.path(""), fs::Permissions::from_mode(0o755)).expect("a mode");
    let connection = peer::connect(&host.path("default.sock"), "web");
    peer::report(&connection, &ServiceStats::default());
    eventually("it is there", || host.vm("web"));

    let output = host.command(&["explain"]).uid(NOBODY).output().expect("a run");

    let (shown, errors) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((output.status.code(), &*shown), (Some(1), ""), "{errors}");
    assert!(errors.contains("VMs that did not answer: 1"), "{errors}");
}

#[test]
fn a_runtime_folder_that_may_not_be_looked_into_is_not_called_empty() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &[]);
    fs::set_permissions(host.runtime(), fs::Permissions::from_mode(0o700)).expect("a mode");
    for (args, what) in [(&["fleet", "ls"][..], "fleets"), (&["stat"], "stores")] {
        let mut command = host.command(args);
        command.uid(NOBODY);

        let error = error_of(command, 1);

        let told = format!(
            "cannot look for {what} in {}: Permission denied",
            host.runtime().display()
        );
        assert!(error.contains(&told) && hints(&error).is_empty(), "{error}");
    }
}

#[test]
fn a_store_that_is_stopped_is_told_from_one_that_is_gone() {
    let host = Host::new();
    let mut store = host.store("default", &[]);

    store.send(Signal::STOP);
    let hangs = host.error(&["stat"], 1);
    store.kill();
    let gone = host.error(&["stat"], 1);

    let revive = format!("`kill -CONT {}`", store.pid());
    assert!(
        hangs.contains("does not answer") && hangs.contains(&revive),
        "{hangs}"
    );
    assert!(!hangs.contains("os error"), "{hangs}");
    assert!(gone.contains("has ended: guests go on"), "{gone}");
}

/// What `stat` says of the only store, which a pasted hint starts; it is ended then.
fn started(host: &Host, mut hint: Command) -> Value {
    let mut store = Process(hint.spawn().expect("a shell"));
    let told = eventually("it runs", || {
        let stat = host.run(&["stat", "--json"]);
        let stat: Value = serde_json::from_slice(&stat.stdout).ok()?;
        // It answers a moment before it is listed, and only then its process and its metrics are known.
        let is_listed = stat["store"]["state"] == "running" && stat["store"]["pid"].is_u64();
        is_listed.then(|| stat["store"].clone())
    });
    store.send(Signal::TERM);
    assert!(store.0.wait().expect("an end").success(), "{hint:?}");
    told
}

/// The only hint in a command's error.
fn only_hint(command: Command) -> String {
    let error = error_of(command, 1);
    match &hints(&error)[..] {
        [hint] => hint.clone(),
        hints => panic!("{hints:?} in {error}"),
    }
}

#[test]
fn a_vm_whose_store_cannot_be_used_says_of_it_what_others_are_told() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let mut store = host.store("default", &[]);
    let socket = host.path("default.sock");
    let run = ["run", "--payload", "--store", socket.to_str().expect("UTF-8")];

    store.send(Signal::STOP);
    let hangs = host.error(&run, 1);
    store.kill();
    let gone = host.error(&run, 1);

    let revive = format!(
        "`kill -CONT {}` lets it go on; `vmm-dedup doctor` tells",
        store.pid()
    );
    assert!(hangs.contains(&revive), "{hangs}");
    assert!(
        gone.contains("has ended: guests go on, nothing merges; start it again with `vmm-dedup store "),
        "{gone}"
    );
}

#[test]
fn hints_that_start_a_store_start_one_also_beside_another() {
    let Some(network) = Network::new() else { return };
    let (host, other) = (Host::new(), Host::new());
    let odd = host.path("it's a store.sock");
    let odd = odd.to_str().expect("UTF-8");
    let metrics_of_each = || {
        let commands = [
            &["stat", "--store", odd][..],
            &["stat"],
            &["explain", "web", "--store", odd],
            &["set", "web", "off", "--store", odd],
        ];
        commands.map(|args| {
            let hint = only_hint(network.inside(&host.command(args)));
            started(&host, network.inside(&pasted(&host, &hint)))["metrics"].clone()
        })
    };

    let alone = metrics_of_each();
    let mut store = other.command(&["store", "--socket"]);
    store.arg(other.path("s.sock")).stderr(Stdio::null());
    let _store = Process(network.inside(&store).spawn().expect("a store"));
    eventually("it listens", || {
        other.run(&["stat"]).status.success().then_some(())
    });
    let beside = metrics_of_each();

    let default = vmm_dedup_host::store::DEFAULT_METRICS.to_string();
    assert_eq!(alone, [0; 4].map(|_| Value::from(&*default)));
    assert_eq!(beside, [0; 4].map(|_| Value::Null));
}

#[test]
fn a_store_that_was_killed_is_started_again_as_it_was() {
    let host = Host::new();
    let access = ["--socket-mode", "0666", "--join-user", "65533"];
    let mut store = host.store("tiny", &[&["--max-mib", "8"], &access[..]].concat());
    let was = host.json(&["stat", "--json"])["store"].clone();
    store.kill();

    let hint = only_hint(host.command(&["stat"]));
    let is = started(&host, pasted(&host, &hint));

    // VMs of other users find it as open as it was.
    assert!(hint.contains(&access.join(" ")), "{hint}");

    for what in ["socket", "domain", "limit_bytes", "metrics"] {
        assert_eq!(is[what], was[what], "{what}");
    }
    assert_eq!(is["domain"], "tiny");
}

#[test]
fn what_listens_and_is_no_store_is_not_to_be_started() {
    let host = Host::new();
    let odd = host.path("odd.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&odd).expect("a socket");

    let error = host.error(&["stat", "--store", odd.to_str().expect("UTF-8")], 1);

    assert!(error.contains("is no store: name a store's socket"), "{error}");
    assert!(hints(&error).is_empty() && !error.contains("os error"), "{error}");
}

/// Pastes the only hint in what a command tells.
fn follow(host: &Host, told: &str) {
    let hints = hints(told);
    assert_eq!(hints.len(), 1, "{told}");
    let followed = pasted(host, &hints[0]).status().expect("a shell");
    assert!(followed.success(), "{told}");
}

#[test]
fn hints_of_explanations_can_be_pasted() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    follow(&host, &host.must(&["explain"]));
    if !kvm_is_there() {
        return;
    }
    let _guest = host.guest("web");
    eventually("it is there", || host.vm("web"));
    host.must(&["set", "web", "off"]);

    follow(&host, &host.must(&["explain", "web"]));

    eventually("it is on", || {
        (host.vm("web")?["state"] == "running").then_some(())
    });
}

#[test]
fn a_bench_that_is_stopped_tells_what_it_has_measured() {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !rustix::process::geteuid().is_root()
        || !enabled.contains("[madvise]") && !enabled.contains("[always]")
    {
        eprintln!("SKIPPED: the bench needs root, and 2 MiB pages");
        return;
    }
    let host = Host::new();
    let args =
        "bench mixed --mib 64 --seconds 1 --interval-ms 100 --no-guests --json --policies ksm,no-splitting";
    let plots = host.path("plots");
    let mut bench = host.command(&args.split(' ').collect::<Vec<_>>());
    bench.arg("--plot").arg(&plots);
    let mut bench = Process(
        bench
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs"),
    );
    let mut said = BufReader::new(bench.0.stderr.take().expect("a pipe")).lines();
    let second = said.find(|line| line.as_ref().is_ok_and(|line| line.ends_with(": ksm")));
    assert!(
        second.is_some(),
        "it says where it is, although nobody sits at a terminal"
    );

    bench.send(Signal::INT);

    let mut report = String::new();
    let mut output = bench.0.stdout.take().expect("a pipe");
    output.read_to_string(&mut report).expect("UTF-8");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let policies = report["policies"].as_array().expect("policies");
    assert_eq!(
        (policies.len(), &policies[0]["policy"]),
        (1, &Value::from("none")),
        "{report}"
    );
    assert_eq!(bench.0.wait().expect("a status").code(), Some(130));
    drawn::are_whole(&plots, &["mixed-saved", "mixed-speed"]);
}

#[test]
fn settings_that_cannot_change_while_a_vm_runs_are_named() {
    let host = Host::new();
    let error = host.error(&["set", "web", "max_vmas=10"], 2);
    assert!(
        error.contains("max_vmas cannot be changed while the VM runs"),
        "{error}"
    );
    let error = host.error(&["set", "web", "onn"], 2);
    assert!(
        error.contains("expected on, off, cpu_percent=PERCENT, pass_period_ms=MS, stop_target_us=US or reserve_pages=PAGES"),
        "{error}"
    );
}

#[test]
fn mistakes_in_a_fleet_file_have_a_line() {
    let host = Host::new();
    let file = host.path("fleet.toml");
    let up = |text: &str| {
        fs::write(&file, text).expect("a file");
        host.error(&["fleet", "up", file.to_str().expect("UTF-8")], 1)
    };
    let vm = "[[vm]]\nname = \"a\"\nkernel = \"k\"\nvmm = \"reference\"\n";
    for (text, parts) in [
        (
            format!("{vm}dedup = {{ breaks = 3 }}\n"),
            ["fleet.toml:5:9: VM \"a\": ", "breaks must be \"kernel\""],
        ),
        (
            format!("{vm}dedup.cpu_percnt = 3\n"),
            ["fleet.toml:5:", "unknown field `cpu_percnt`"],
        ),
        (format!("{vm}cpus = 0\n"), ["fleet.toml:5:8: ", "cpus is 0"]),
        (
            format!("\nname = \"-f\"\n{vm}"),
            ["fleet.toml:2:8: ", "the fleet's name is \"-f\""],
        ),
        (
            format!("\n\n{vm}template = \"t\"\n"),
            ["fleet.toml:7:12: ", "there is no [template.t]; there are none"],
        ),
    ] {
        let error = up(&text);
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert!(!error.contains("internally tagged"), "{error}");
    }
}

#[test]
fn a_fleet_whose_file_is_spoilt_or_gone_is_shown_and_ended() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let file = &*host.fleet_file("web");
    host.must(&["fleet", "up", file]);

    std::fs::write(file, "[[vm").expect("a file");
    let shown = host.run(&["fleet", "status", file]);
    let said = host.run(&["fleet", "up", file]);
    std::fs::remove_file(file).expect("a file");
    let ended = host.run(&["fleet", "down", file]);
    let again = host.error(&["fleet", "down", file], 1);

    assert!(text(&shown.stdout).contains("web"), "{}", text(&shown.stderr));
    assert!(
        text(&said.stderr).contains("fleet.toml:1:"),
        "{}",
        text(&said.stderr)
    );
    assert!(
        text(&ended.stdout).contains("fleet f: 1 VM ended"),
        "{}",
        text(&ended.stderr)
    );
    assert!(again.contains("cannot read the fleet file"), "{again}");
}
