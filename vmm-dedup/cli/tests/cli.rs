//! The command as its users meet it: the demo, the benchmark's smoke run, errors.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn vmm_dedup(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args(args)
        .output()
        .expect("the command runs")
}

fn kvm_is_there() -> bool {
    let kvm = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    assert!(
        kvm.is_ok() || std::env::var_os("CI").is_none(),
        "/dev/kvm cannot be opened in CI"
    );
    if kvm.is_err() {
        eprintln!("SKIPPED: /dev/kvm cannot be opened");
    }
    kvm.is_ok()
}

/// The one line on standard error, and the exit code.
fn error_of(args: &[&str]) -> (String, Option<i32>) {
    let output = vmm_dedup(args);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{args:?} succeeded");
    assert_eq!(text.trim_end().lines().count(), 1, "{args:?} said: {text}");
    (text, output.status.code())
}

#[test]
fn the_demo_shares_verifies_and_says_what_it_saved() {
    if !kvm_is_there() {
        return;
    }
    let output = vmm_dedup(&["demo", "--guests", "3", "--memory-mib", "96", "--json"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let result: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(result["verified"], true);
    assert_eq!(result["guests"].as_array().expect("guests").len(), 3);
    // Three guests hold the files twice each (the initrd and its copy) and zero pages: most of that must go.
    let files = result["initrd_bytes"].as_i64().expect("a number");
    assert!(
        result["saved_net_bytes"].as_i64().expect("a number") > files * 4,
        "{result}"
    );
    assert!(result["guests"][0]["writes"].as_i64().expect("a number") > 0);
}

#[test]
fn the_benchmark_reports_every_key_and_puts_settings_back() {
    if !Path::new("/sys/kernel/mm/ksm/run").exists() || !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: the benchmark needs KSM and root");
        return;
    }
    let settings = || {
        let read = |path: &str| std::fs::read_to_string(path).expect(path);
        ["ksm/run", "ksm/pages_to_scan", "ksm/sleep_millisecs"]
            .map(|name| read(&format!("/sys/kernel/mm/{name}")))
            .into_iter()
            .chain([read("/proc/sys/vm/max_map_count")])
            .collect::<Vec<_>>()
    };
    let before = settings();
    let output = vmm_dedup(&["bench", "ksm", "--mib", "64", "--repetitions", "1", "--json"]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(settings(), before);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let kinds = report["kinds"].as_array().expect("kinds");
    assert_eq!(kinds.len(), 6);
    let common = [
        "cpu_s",
        "wall_s",
        "saved_pages",
        "idle_pass_cpu_s",
        "dirty_pass_cpu_s",
        "freed_bytes",
    ];
    for kind in kinds {
        assert!(kind["name"].is_string() && kind["thp"].is_boolean());
        for key in common {
            assert!(
                kind["ksm"][key].as_f64().is_some_and(|v| v > 0.0),
                "ksm.{key} in {kind}"
            );
            assert!(
                kind["ours"][key].as_f64().is_some_and(|v| v > 0.0),
                "ours.{key} in {kind}"
            );
        }
        for key in ["metadata_bytes_per_page", "vmas"] {
            assert!(
                kind["ours"][key].as_f64().is_some_and(|v| v > 0.0),
                "ours.{key} in {kind}"
            );
        }
        for key in ["cpu", "idle", "dirty", "saved", "freed"] {
            assert!(
                kind["ratio"][key].as_f64().is_some_and(|v| v > 0.0),
                "ratio.{key} in {kind}"
            );
        }
        assert!(
            kind["ratio"]["saved"].as_f64().expect("a number") > 0.95,
            "{kind}"
        );
    }
}

#[test]
fn a_missing_store_is_named_with_the_command_that_starts_one() {
    let (text, code) = error_of(&["stat", "--socket", "/nonexistent/s.sock"]);
    assert!(
        text.contains("vmm-dedup store --socket /nonexistent/s.sock"),
        "{text}"
    );
    assert_eq!(code, Some(1));
}

#[test]
fn a_vm_with_a_missing_store_does_not_start() {
    if !kvm_is_there() {
        return;
    }
    let (text, code) = error_of(&["run", "--payload", "--store", "/nonexistent/s.sock"]);
    assert!(text.contains("/nonexistent/s.sock") && code == Some(1), "{text}");
}

#[test]
fn a_kernel_that_is_no_kernel_is_refused() {
    if !kvm_is_there() {
        return;
    }
    let (text, code) = error_of(&["run", "--kernel", "/etc/passwd"]);
    assert!(
        text.contains("/etc/passwd") && text.contains("ELF") && code == Some(1),
        "{text}"
    );
    let (text, _) = error_of(&["run", "--kernel", "/nonexistent/vmlinux"]);
    assert!(text.contains("/nonexistent/vmlinux"), "{text}");
}

#[test]
fn a_store_without_a_place_for_its_socket_says_so() {
    let (text, code) = error_of(&[
        "store",
        "--metrics",
        "none",
        "--socket",
        "/nonexistent/dir/s.sock",
    ]);
    assert!(text.contains("/nonexistent/dir") && code == Some(1), "{text}");
}

#[test]
fn wrong_usage_ends_with_2() {
    assert_eq!(vmm_dedup(&["bench", "ksm", "--mib", "1"]).status.code(), Some(2));
    assert_eq!(vmm_dedup(&["run"]).status.code(), Some(2));
}
