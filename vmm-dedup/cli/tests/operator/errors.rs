//! What is wrong is said in one line, with what to do, and the hint can be pasted.

use crate::host::{Host, Process, hints, paste, text};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

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
    // The list may be read, so that the store is named without being named.
    let output = host.command(&["stat"]).uid(NOBODY).output().expect("a run");
    assert!(
        text(&output.stderr).contains("may not use the store at"),
        "{}",
        text(&output.stderr)
    );
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

#[test]
fn hints_can_be_pasted() {
    let host = Host::new();
    let odd = host.path("it's a store.sock");
    let odd = odd.to_str().expect("UTF-8");
    for args in [
        &["stat", "--store", odd][..],
        &["stat"],
        &["explain", "web", "--store", odd],
        &["set", "web", "off", "--store", odd],
    ] {
        let error = host.error(args, 1);
        let found = hints(&error);
        assert!(!found.is_empty(), "no hint in {error}");
        for hint in found {
            let pasted = paste(&host, &hint, "--help");
            assert!(pasted.status.success(), "{hint}: {}", text(&pasted.stderr));
        }
    }
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
    let mut bench = host.command(&args.split(' ').collect::<Vec<_>>());
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
            format!("\n\n{vm}template = \"t\"\n"),
            ["fleet.toml:7:12: ", "there is no [template.t]; there are none"],
        ),
    ] {
        let error = up(&text);
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert!(!error.contains("internally tagged"), "{error}");
    }
}
