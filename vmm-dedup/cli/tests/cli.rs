//! The command as its users meet it: the demo, the benchmark's smoke run, errors.

#[path = "operator/drawn.rs"]
mod plots;

use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn vmm_dedup(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args(args)
        .output()
        .expect("the command runs")
}

fn send(process: &Child, signal: Signal) {
    let pid = Pid::from_child(process);
    rustix::process::kill_process(pid, signal).expect("kill");
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

fn ksm_is_there() -> bool {
    let there = Path::new("/sys/kernel/mm/ksm/run").exists() && rustix::process::geteuid().is_root();
    if !there {
        eprintln!("SKIPPED: the benchmark needs KSM and root");
    }
    there
}

/// The settings that a comparison with KSM changes for its time; that of KSM's work is the first.
fn settings() -> Vec<String> {
    let read = |path: &str| std::fs::read_to_string(path).expect(path);
    ["ksm/run", "ksm/pages_to_scan", "ksm/sleep_millisecs"]
        .map(|name| read(&format!("/sys/kernel/mm/{name}")))
        .into_iter()
        .chain([read("/proc/sys/vm/max_map_count")])
        .collect()
}

#[test]
fn the_benchmark_reports_every_key_and_puts_settings_back() {
    if !ksm_is_there() {
        return;
    }
    let before = settings();
    let mut interrupted = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args(["bench", "ksm", "--mib", "64"])
        .spawn()
        .expect("the command runs");
    let start = Instant::now();
    while settings()[0].trim() != "1" {
        assert!(start.elapsed() < Duration::from_secs(120), "KSM does not run");
        std::thread::sleep(Duration::from_millis(10));
    }
    send(&interrupted, Signal::TERM);
    assert_eq!(interrupted.wait().expect("wait").code(), Some(128 + 15));
    assert_eq!(settings(), before);
    let plots = tempfile::tempdir().expect("a folder");
    let folder = plots.path().to_str().expect("UTF-8");
    let output = vmm_dedup(&[
        "bench",
        "ksm",
        "--mib",
        "64",
        "--repetitions",
        "1",
        "--json",
        "--plot",
        folder,
    ]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(settings(), before);
    plots::are_whole(plots.path(), &["ksm-freed", "ksm-cpu", "ksm-idle"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let kinds = report["kinds"].as_array().expect("kinds");
    assert_eq!(kinds.len(), 6);
    let common = [
        "cpu_s",
        "wall_s",
        "saved_pages",
        "idle_pass_cpu_s",
        "dirty_pass_cpu_s",
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
        // Memory of the whole host: with so little content other processes weigh more, so that only the key counts.
        for side in ["ksm", "ours"] {
            assert!(
                kind[side]["freed_bytes"].is_number(),
                "{side}.freed_bytes in {kind}"
            );
        }
        assert!(kind["ratio"]["freed"].is_number(), "ratio.freed in {kind}");
        for key in ["cpu", "idle", "dirty", "saved"] {
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
fn the_benchmark_of_churn_counts_every_round_against_what_is_common() {
    if !ksm_is_there() {
        return;
    }
    let before = settings();
    let sizes = ["--guests", "3", "--mib", "16", "--rounds", "2", "--thp", "false"];
    let tiny = [&["bench", "churn", "--json", "--patience", "1"][..], &sizes].concat();
    let plots = tempfile::tempdir().expect("a folder");
    let folder = plots.path().to_str().expect("UTF-8");
    let output = vmm_dedup(&[&tiny[..], &["--kinds", "extents", "--plot", folder]].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(settings(), before);
    plots::are_whole(plots.path(), &["churn-shared", "churn-freed"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["kinds"].as_array().expect("kinds").len(), 1);
    let kind = &report["kinds"][0];
    assert_eq!((&kind["name"], &kind["thp"]), (&"extents".into(), &false.into()));
    // Half of the memory, in all guests but one.
    let common = 2 * 16 * 256 / 2;
    let written = 3 * 16 * 256 / 2 / 4;
    for side in ["ksm", "ours"] {
        let rounds = kind["runs"][side][0]["rounds"].as_array().expect("rounds");
        assert_eq!(rounds.len(), 3);
        for (number, round) in rounds.iter().enumerate() {
            assert_eq!(round["round"], number);
            assert_eq!(round["common_pages"], common);
            assert_eq!(round["pages_written"], if number == 0 { 0 } else { written });
            let shared = round["saved_of_common"].as_f64().expect("a number");
            assert!((0.9..1.1).contains(&shared), "{side}: {round}");
            assert!(
                round["cpu_s"].as_f64().is_some_and(|v| v > 0.0),
                "{side}: {round}"
            );
        }
        for key in [
            "cpu_s",
            "writers_s",
            "write_p50_us",
            "write_p99_us",
            "write_max_us",
        ] {
            let median = kind[side]["median"][key].as_f64();
            assert!(median.is_some_and(|v| v > 0.0), "{side}.median.{key}");
            assert!(kind[side]["last"][key].is_number(), "{side}.last.{key}");
        }
        assert!(kind[side]["median"]["freed_bytes"].is_number());
    }
    let ours = &kind["ours"]["median"];
    for key in ["mapped_pages", "slots_in_use", "store_resident_bytes", "vmas"] {
        assert!(ours[key].as_u64().is_some_and(|v| v > 0), "{key} in {ours}");
    }
    assert!(ours["claimed_bytes"].is_number() && ours["vmas_per_merged_page"].is_number());
    // So little memory is within what a store may have beside its use, whatever it does.
    assert!(ours["store_settled_s"].is_number(), "{ours}");
    let left = &kind["ours"]["one_guest_left"];
    assert_eq!(left["slots_in_use"], 16 * 256 / 2);
    for when in ["first", "median", "last"] {
        for key in ["saved", "cpu"] {
            let ratio = kind["ratio"][when][key].as_f64();
            assert!(ratio.is_some_and(|v| v > 0.0), "ratio.{when}.{key}");
        }
    }
}

#[test]
fn a_missing_store_is_named_with_the_command_that_starts_one() {
    let (text, code) = error_of(&["stat", "--socket", "/nonexistent.sock"]);
    assert!(
        text.contains("vmm-dedup store --socket /nonexistent.sock"),
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
    // As whoever asks that store is told; and what to ask first.
    let (other, _) = error_of(&["stat", "--store", "/nonexistent/s.sock"]);
    let doctor = "; `vmm-dedup doctor` tells what is wrong on this host";
    assert_eq!(text.trim_end(), format!("{}{doctor}", other.trim_end()));
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
fn a_store_says_that_it_listens_and_removes_its_socket_on_hangup() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("s.sock");
    let mut store = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args(["store", "--metrics", "127.0.0.1:0", "--socket"])
        .arg(&socket)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command runs");
    let mut errors = BufReader::new(store.stderr.take().expect("errors"));
    let mut line = String::new();
    errors.read_line(&mut line).expect("a line");
    assert!(
        line.contains(socket.to_str().expect("UTF-8")) && line.contains("http://127.0.0.1:"),
        "{line}"
    );
    assert!(socket.exists());
    send(&store, Signal::HUP);
    assert!(store.wait().expect("wait").success());
    assert!(!socket.exists());
}

/// A user that is neither root nor who runs the tests.
const STRANGER: u32 = 65_533;

#[test]
fn who_runs_as_the_stores_user_cannot_look_into_it() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("store.sock");
    let is_root = rustix::process::geteuid().is_root();
    let mut store = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"));
    if is_root {
        // To itself, root may always look: so the store is another user's, and a copy that he may run.
        let program = folder.path().join("vmm-dedup");
        std::fs::copy(env!("CARGO_BIN_EXE_vmm-dedup"), &program).unwrap();
        std::os::unix::fs::chown(folder.path(), Some(STRANGER), Some(STRANGER)).unwrap();
        store = Command::new(program);
        store.uid(STRANGER).gid(STRANGER);
    }
    let mut store = store
        .args(["store", "--metrics", "none", "--socket"])
        .arg(&socket)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !socket.exists() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{:?}",
            store.try_wait()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    let memory = format!("/proc/{}/mem", store.id());
    // What a process of the same user could open is root's once the process may not be traced.
    let owner = std::fs::metadata(&memory).unwrap().uid();
    let opened = std::fs::File::open(&memory).map(drop);
    store.kill().unwrap();
    store.wait().unwrap();
    assert_eq!(owner, 0);
    assert!(is_root || opened.is_err());
}

#[test]
fn a_child_whose_parent_is_gone_ends() {
    // Process 1 is not the parent of this command.
    let output = vmm_dedup(&["--die-with-parent", "1", "stat", "--socket", "/nonexistent"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.is_empty(), "it did not get to its work");
}

#[test]
fn a_reserve_without_managed_breaks_is_refused() {
    for option in ["--reserve-pages", "--reserve-floor-mib"] {
        let (text, code) = error_of(&["run", "--payload", "--store", "/nonexistent", option, "64"]);
        assert!(text.contains("--breaks managed") && code == Some(2), "{text}");
        let output = vmm_dedup(&[
            "run",
            "--payload",
            "--store",
            "/nonexistent",
            "--breaks",
            "managed",
            option,
            "0",
        ]);
        assert!(String::from_utf8_lossy(&output.stderr).contains("1..=16777216"));
    }
}

#[test]
fn a_line_of_settings_is_checked_before_the_vm_is_made() {
    for (line, says) in [
        ("cpu_percent=10", "store is empty"),
        ("store=/s,cpu_percent=0", "cpu_percent is 0"),
        ("store=/s,agent=cid:5", "no vsock"),
        ("store=/s,search=hash", "search is \"hash\""),
    ] {
        let output = vmm_dedup(&["run", "--payload", "--dedup", line]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(says) && output.status.code() == Some(2), "{text}");
    }
    for also in [["--store", "/s"], ["--cpu-percent", "5"], ["--name", "web1"]] {
        let run = ["run", "--payload", "--dedup", "store=/s"];
        let output = vmm_dedup(&[&run, &also[..]].concat());
        assert_eq!(output.status.code(), Some(2), "{also:?}");
    }
}

#[test]
fn engines_that_there_are_not_are_refused_with_those_there_are() {
    let run = ["run", "--payload", "--store", "/nonexistent"];
    let refused = |options: &[&str]| error_of(&[&run, options].concat());
    let (text, code) = refused(&["--search", "hash"]);
    let known = "search is \"hash\", but this program has index, dsa, dsa-model, pagecmp, pagecmp-hybrid, pageforge, tree";
    assert!(text.contains(known) && code == Some(2), "{text}");
    let (text, code) = refused(&["--verify", "tree"]);
    let known = "verify.engine is \"tree\", but this program has cpu, dsa, dsa-model, pagecmp, pagecmp-hybrid, pageforge";
    assert!(text.contains(known) && code == Some(2), "{text}");
    let (text, code) = refused(&["--verify-socket", "/s"]);
    assert!(text.contains("verify.socket is /s") && code == Some(2), "{text}");
}

#[test]
fn a_demo_that_does_not_fit_is_refused() {
    if !kvm_is_there() {
        return;
    }
    let info = std::fs::read_to_string("/proc/meminfo").expect("meminfo");
    let total = info.split_ascii_whitespace().nth(1).expect("MemTotal");
    if total.parse::<u64>().expect("a number") > 120 << 20 {
        eprintln!("SKIPPED: the biggest demo fits");
        return;
    }
    let (text, code) = error_of(&["demo", "--guests", "32", "--memory-mib", "4096"]);
    assert!(text.contains("available") && code == Some(1), "{text}");
}

#[test]
fn wrong_usage_ends_with_2() {
    assert_eq!(vmm_dedup(&["bench", "ksm", "--mib", "1"]).status.code(), Some(2));
    assert_eq!(vmm_dedup(&["run"]).status.code(), Some(2));
}
