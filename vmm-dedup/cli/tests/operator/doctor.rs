//! `doctor` on this host, and on hosts that are not as they should be.

use crate::host::{Host, eventually, hints, kvm_is_there, pasted, text};
use rustix::process::Signal;
use serde_json::Value;
use std::process::Command;

/// The verdict on something, and what to change.
fn finding<'a>(json: &'a Value, what: &str) -> (&'a str, &'a str) {
    let findings = json["findings"].as_array().expect("findings");
    let found = findings.iter().find(|finding| finding["what"] == what);
    let found = found.unwrap_or_else(|| panic!("nothing on {what}: {json:#}"));
    (
        found["verdict"].as_str().expect("a verdict"),
        found["change"].as_str().expect("a text"),
    )
}

fn doctor(host: &Host, args: &[&str]) -> (Value, Option<i32>) {
    let output = host.run(&[&["doctor", "--json"], args].concat());
    let json = serde_json::from_slice(&output.stdout);
    (
        json.unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr))),
        output.status.code(),
    )
}

#[test]
fn stores_and_vms_that_are_not_well_are_told() {
    let host = Host::new();
    let mut store = host.store("default", &[]);
    let (json, _) = doctor(&host, &[]);
    assert_eq!(finding(&json, "store default"), ("ok", ""));
    assert_eq!(finding(&json, "kernel").0, "ok");

    let _refused = host.refused("default", "gpu");
    let (json, code) = doctor(&host, &[]);
    let (verdict, change) = finding(&json, "VM gpu");
    assert!(
        verdict == "warn" && change.contains("`vmm-dedup explain gpu."),
        "{json:#}"
    );
    assert!(code > Some(0), "{code:?}");
    store.send(Signal::STOP);
    let (hangs, _) = doctor(&host, &[]);
    store.kill();
    let (gone, _) = doctor(&host, &[]);
    let revive = format!("`kill -CONT {}` lets it go on", store.pid());
    assert_eq!(finding(&hangs, "store default"), ("warn", &*revive));
    let (verdict, change) = finding(&gone, "store default");
    assert!(
        verdict == "warn" && change.starts_with("start it again with `vmm-dedup store --socket "),
        "{change}"
    );
}

#[test]
fn it_is_the_answer_to_a_refusal_and_looks_there() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    let _refused = host.refused("default", "gpu");
    let socket = host.path("default.sock");
    let socket = socket.to_str().expect("UTF-8");

    for args in [
        &["stat"][..],
        &["stat", "--store", socket],
        &["explain", "gpu"],
        &["explain", "gpu", "--store", socket],
    ] {
        let told = host.must(args);
        let hint = hints(&told).pop().unwrap_or_default();
        assert!(hint.starts_with("vmm-dedup doctor"), "{args:?}: {told}");
        assert_eq!(hint.contains("--store"), args.contains(&"--store"), "{hint}");
        let looked = text(&pasted(&host, &hint).output().expect("a shell").stdout);
        assert!(looked.contains("VM gpu: is not deduplicated: vfio"), "{looked}");
    }
}

#[test]
fn a_host_without_kvm_is_bad_and_the_exit_code_says_so() {
    let host = Host::new();
    // Device files do not work on a mount with nodev: even root is refused.
    let script =
        "mount --bind /dev/kvm /dev/kvm && mount -o remount,bind,nodev /dev/kvm || exit 77; exec \"$@\"";
    let doctor = host.command(&["doctor"]);
    let mut unshare = Command::new("unshare");
    unshare
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(doctor.get_program())
        .args(doctor.get_args());
    unshare.env("VMM_DEDUP_RUNTIME_DIR", host.runtime());
    match unshare.output() {
        Ok(output) if output.status.code() != Some(77) && !output.stderr.starts_with(b"unshare") => {
            let told = text(&output.stdout);
            assert!(
                told.contains("BAD  kvm: /dev/kvm cannot be used") && told.contains("group kvm"),
                "{told}"
            );
            assert!(
                text(&output.stderr).contains("dedup does not work here"),
                "{}",
                text(&output.stderr)
            );
            assert_eq!(output.status.code(), Some(2));
        }
        _ => eprintln!("SKIPPED: a mount namespace cannot be had"),
    }
}

#[test]
fn a_vmm_is_looked_at_by_name_and_by_number() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new();
    let _store = host.store("default", &[]);
    let guest = host.guest("web");
    eventually("it is there", || host.vm("web"));

    let (by_name, _) = doctor(&host, &["web"]);
    let (by_number, _) = doctor(&host, &["--pid", &guest.pid().to_string()]);
    guest.send(Signal::STOP);
    let (frozen, code) = doctor(&host, &["web"]);
    guest.send(Signal::CONT);
    let own = std::process::id().to_string();
    let (other, _) = doctor(&host, &["--pid", &own]);

    for json in [&by_name, &by_number] {
        assert_eq!(
            (finding(json, "process").0, finding(json, "service").0),
            ("ok", "ok"),
            "{json:#}"
        );
    }
    let (verdict, change) = finding(&frozen, "process");
    assert!(
        verdict == "warn" && change.contains("kill -CONT") && code > Some(0),
        "{frozen:#}"
    );
    let (verdict, change) = finding(&other, "service");
    assert!(verdict == "warn" && change.contains("LD_PRELOAD"), "{other:#}");
    assert!(
        host.error(&["doctor", "--pid", "999999999"], 1)
            .contains("there is no process 999999999")
    );
}

#[test]
fn what_was_found_is_told_also_if_there_is_no_such_vm() {
    let host = Host::new();
    let _store = host.store("default", &[]);
    // Larger than any process number that Linux gives (2^22).
    let (by_number, code) = doctor(&host, &["--pid", "999999999"]);
    let (by_name, _) = doctor(&host, &["web"]);
    let told = host.run(&["doctor", "web"]);

    assert_eq!(finding(&by_number, "kernel").0, "ok");
    assert_eq!(by_number["error"], "there is no process 999999999");
    assert_eq!(code, Some(1));
    assert_eq!(finding(&by_name, "store default").0, "ok");
    assert!(
        by_name["error"]
            .as_str()
            .is_some_and(|error| error.contains("no VM is called web"))
    );
    assert!(text(&told.stdout).contains("kernel: "));
    assert!(text(&told.stderr).contains("no VM is called web"));
}
