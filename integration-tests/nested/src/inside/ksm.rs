//! The kernel's own merging, for comparison.
#![allow(unsafe_code)] // prctl(PR_SET_MEMORY_MERGE), which rustix lacks

use crate::Failure;
use crate::wait::wait_for;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Instant;

const FOLDER: &str = "/sys/kernel/mm/ksm";
/// Full scans without gain after which KSM has converged. It takes two to merge what is quiet.
const SETTLED_SCANS: i64 = 4;

/// Makes all memory of this process, and of what it becomes, mergeable for KSM, and becomes the command.
///
/// # Errors
/// If the kernel cannot (before 6.10), or there is no such command.
pub fn run_mergeable(command: &[String]) -> Result<(), Failure> {
    let [program, arguments @ ..] = command else {
        return Err(Failure::new("no command to run was given"));
    };
    // SAFETY: sets a flag of this process; no memory is involved.
    if unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, 1, 0, 0, 0) } != 0 {
        let error = std::io::Error::last_os_error();
        return Err(Failure::new(format!("PR_SET_MEMORY_MERGE failed: {error}")));
    }
    Err(Failure::new(format!(
        "{program}: {}",
        Command::new(program).args(arguments).exec()
    )))
}

/// Lets KSM scan at full pace until nothing more is merged; returns its account.
pub(super) fn converge() -> Result<Value, Failure> {
    set("sleep_millisecs", "0")?;
    set("pages_to_scan", "10000")?;
    set("run", "1")?;
    let (mut best, mut scans) = (0, get("full_scans")?);
    wait_for("KSM to converge", || {
        let (sharing, scanned) = (get("pages_sharing")?, get("full_scans")?);
        if sharing > best + best / 200 || best == 0 {
            (best, scans) = (sharing, scanned);
        }
        Ok((best > 0 && scanned > scans + SETTLED_SCANS).then_some(()))
    })?;
    let names = [
        "pages_shared",
        "pages_sharing",
        "pages_unshared",
        "pages_volatile",
        "general_profit",
        "full_scans",
    ];
    let mut account = json!({ "cpu_seconds": ksmd_seconds() });
    for name in names {
        account[name] = get(name)?.into();
    }
    Ok(account)
}

/// Unmerges everything.
pub(super) fn stop() -> Result<(), Failure> {
    set("run", "2")
}

fn set(name: &str, value: &str) -> Result<(), Failure> {
    let path = format!("{FOLDER}/{name}");
    fs::write(&path, value).map_err(|e| Failure::new(format!("{path}: {e}")))
}

fn get(name: &str) -> Result<i64, Failure> {
    let path = format!("{FOLDER}/{name}");
    let text = fs::read_to_string(&path).map_err(|e| Failure::new(format!("{path}: {e}")))?;
    text.trim()
        .parse()
        .map_err(|_| Failure::new(format!("{path} holds no number")))
}

/// CPU seconds of ksmd.
fn ksmd_seconds() -> Option<f64> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut folders = processes.map(|process| process.path());
    let is_ksmd = |path: &std::path::PathBuf| {
        fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == "ksmd")
    };
    let schedstat = fs::read_to_string(folders.find(is_ksmd)?.join("schedstat")).ok()?;
    schedstat
        .split_whitespace()
        .next()?
        .parse::<f64>()
        .ok()
        .map(|ns| ns / 1e9)
}

/// How long something takes.
pub(super) fn timed<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<(T, f64), Failure> {
    let start = Instant::now();
    Ok((work()?, start.elapsed().as_secs_f64()))
}
