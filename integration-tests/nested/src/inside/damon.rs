//! A kernel with DAMON for virtual addresses, which nobody else uses: it tells which memory is used.

use super::Stage;
use crate::Failure;
use crate::wait::check;
use serde_json::Value;
use std::process::Command;

/// Plain memory and two guests, of which a part is hot, by `bench mixed`.
pub(super) fn damon(stage: &mut Stage) -> Result<(), Failure> {
    let output = Command::new("vmm-dedup")
        .args([
            "bench",
            "mixed",
            "--json",
            "--mib",
            "64",
            "--seconds",
            "2",
            "--interval-ms",
            "2000",
        ])
        .args(["--policies", "smartmd", "--use-source", "damon"])
        .output()
        .map_err(|e| Failure::new(e.to_string()))?;
    let said = || Failure::new(String::from_utf8_lossy(&output.stderr).into_owned());
    check(output.status.success(), || said().to_string())?;
    let report: Value = serde_json::from_slice(&output.stdout).map_err(|_| said())?;
    let policies = report["policies"].as_array();
    let smartmd = policies.and_then(|all| all.iter().find(|one| one["policy"] == "smartmd"));
    stage.measured("smartmd", smartmd.ok_or_else(said)?)?;
    let users = std::fs::read_to_string("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds");
    let users = users.map_err(|e| Failure::new(format!("DAMON's files: {e}")))?;
    stage.measured("users_of_damon_afterwards", users.trim())
}
