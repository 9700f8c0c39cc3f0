//! Scenarios about what is shared, and by whom.

use super::fleet::{Fleet, Plan};
use super::ksm::{self, timed};
use super::store::{self, Stat, Store};
use super::{Stage, vmm};
use crate::guest::Guest;
use crate::wait::check;
use crate::{Failure, Workload};
use serde_json::{Value, json};
use std::process::Command;
use vmm_dedup_protocol::control::Switch;

pub(super) fn boot(stage: &mut Stage) -> Result<(), Failure> {
    for vcpus in ["1", "2"] {
        let plan = Plan {
            dedup: false,
            ..Plan::DEDUP
        };
        let mut command = plan.command("boot", Workload::Idle);
        let mut guest = Guest::start("boot", command.args(["--vcpus", vcpus]))?;
        let line = guest.wait("L2 ready")?;
        check(line.contains(&format!("{vcpus} CPUs")), || line)?;
        guest.progress()?;
        guest.type_line("poweroff")?;
        guest.powered_off()?;
        stage.measured(&format!("booted_with_{vcpus}"), true)?;
    }
    Ok(())
}

pub(super) fn old_kernel(stage: &mut Stage) -> Result<(), Failure> {
    let _store = Store::start()?;
    let output = Plan::DEDUP.command("old", Workload::Idle).output();
    let output = output.map_err(|e| Failure::new(e.to_string()))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    stage.measured("exit_code", output.status.code())?;
    stage.measured("guest_said", String::from_utf8_lossy(&output.stdout))?;
    stage.measured("refusal", said)
}

/// Four same guests under KSM, then under us: once settled, what each has freed, and where the rest is. The very same
/// guests, since two boots differ by some per cent.
pub(super) fn same(stage: &mut Stage) -> Result<(), Failure> {
    let plan = Plan {
        mergeable: true,
        ..Plan::DEDUP
    };
    let _store = Store::start()?;
    let mut fleet = Fleet::start(stage, plan, &[Workload::Idle; 4])?;
    let before = available()?;
    let (ksm, seconds) = timed(ksm::converge)?;
    stage.measured("ksm", ksm)?;
    stage.measured("ksm_seconds", seconds)?;
    stage.measured("ksm_freed_mib", available()? - before)?;
    ksm::stop()?;

    let before = available()?;
    let (stat, seconds) = fleet.share()?;
    stage.measured("ours", account(&stat, seconds))?;
    stage.measured("ours_freed_mib", available()? - before)?;
    stage.file("metrics.txt", store::metrics()?)?;
    fleet.verify()?;
    fleet.power_off()
}

pub(super) fn mixed(stage: &mut Stage) -> Result<(), Failure> {
    let workloads = [Workload::Idle, Workload::Web, Workload::Db, Workload::Python];
    let _store = Store::start()?;
    let mut fleet = Fleet::start(stage, Plan::DEDUP, &workloads)?;
    let (stat, seconds) = fleet.share()?;
    stage.measured("ours", account(&stat, seconds))?;
    fleet.wait_for_work()?;
    stage.note("all guests go on working")?;
    fleet.verify()?;
    stage.measured("verified", fleet.guests.len())?;
    fleet.power_off()
}

pub(super) fn huge(stage: &mut Stage) -> Result<(), Failure> {
    let plan = Plan {
        // It saves soonest, and the saving has settled when it stands still for seconds.
        arguments: &["--thp", "always", "--huge-policy", "ksm"],
        ..Plan::DEDUP
    };
    let _store = Store::start()?;
    let mut fleet = Fleet::start(stage, plan, &[Workload::Idle, Workload::Idle])?;
    let huge: u64 = fleet
        .guests
        .iter()
        .map(|guest| anonymous_huge_kib(guest.pid()))
        .sum();
    stage.measured("huge_mib_at_first", huge >> 10)?;
    let (stat, seconds) = fleet.share()?;
    stage.measured("ours", account(&stat, seconds))?;
    fleet.verify()?;
    fleet.power_off()
}

/// Other VMMs, unmodified, with the engine in a library: what sharing would free is told first, then done.
pub(super) fn vmms(stage: &mut Stage) -> Result<(), Failure> {
    for vmm in vmm::found() {
        let store = Store::start()?;
        let mut guests = Vec::new();
        for number in 1..=2 {
            let name = format!("{}{number}", vmm.name());
            guests.push(vmm.start(&name, Workload::Idle)?);
            store::switch(&name, Switch::Off)?;
        }
        for guest in &mut guests {
            guest.wait("L2 ready")?;
        }
        stage.note(format!("guests of {} are up", vmm.name()))?;
        let estimated = estimate(&guests)?;
        let mut fleet = Fleet { guests };
        let (stat, seconds) = fleet.share()?;
        let ours = account(&stat, seconds);
        stage.measured(
            vmm.name(),
            json!({ "estimated": estimated["total"], "ours": ours }),
        )?;
        fleet.verify()?;
        fleet.type_line("poweroff")?;
        // What VMMs make of a guest that powers off, their exit codes tell differently.
        fleet
            .guests
            .iter_mut()
            .try_for_each(|guest| guest.ended().map(drop))?;
        drop(store);
    }
    Ok(())
}

fn estimate(guests: &[Guest]) -> Result<Value, Failure> {
    let pids: Vec<String> = guests.iter().map(|guest| guest.pid().to_string()).collect();
    let output = Command::new("vmm-dedup")
        .args(["estimate", "--json", "--pid", &pids.join(",")])
        .output();
    let output = output.map_err(|e| Failure::new(e.to_string()))?;
    let said = || Failure::new(String::from_utf8_lossy(&output.stderr).into_owned());
    serde_json::from_slice(&output.stdout).map_err(|_| said())
}

/// What was saved, for what, and where the rest is.
pub(super) fn account(stat: &Stat, seconds: f64) -> Value {
    json!({
        "saved_pages": stat.saved_pages(),
        "saved_net_bytes": stat.store("saved_net_bytes"),
        "pages": stat.vms("pages"),
        "zero": stat.vms("pages_zero"),
        "mapped": stat.vms("pages_mapped"),
        "shared": stat.store("pages_shared"),
        "unique": stat.vms("pages_unshared"),
        "volatile": stat.vms("pages_volatile"),
        "broken": stat.vms("pages_broken"),
        "vmas": stat.vms("vmas"),
        "huge_ranges": stat.vms("huge_ranges"),
        "cpu_seconds": stat.cpu_seconds(),
        "seconds": seconds,
    })
}

/// MemAvailable, MiB.
pub(super) fn available() -> Result<i64, Failure> {
    let text = std::fs::read_to_string("/proc/meminfo").map_err(|e| Failure::new(e.to_string()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<i64>().ok());
    kib.map(|kib| kib >> 10)
        .ok_or_else(|| Failure::new("/proc/meminfo has no MemAvailable"))
}

fn anonymous_huge_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("AnonHugePages:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}
