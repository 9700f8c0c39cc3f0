//! Scenarios in which something happens to guests that share.

use super::Stage;
use super::fleet::{Fleet, Plan};
use super::sharing::account;
use super::store::{self, Stat, Store};
use crate::wait::wait_for;
use crate::{Failure, Workload};
use std::fs;
use vmm_dedup_protocol::control::Switch;

/// A tenth of a small guest: less is no sharing to speak of.
const SOME_PAGES: u64 = 4915;

/// Each writer has 1024 pages of files.
const SOME_BREAKS: u64 = 200;

/// The store is killed and comes back; a guest is killed, one reboots, one rewrites what it shares. Guests that live
/// on keep every byte, and share again.
pub(super) fn trouble(stage: &mut Stage) -> Result<(), Failure> {
    let store = Store::start()?;
    let mut fleet = Fleet::start(
        stage,
        Plan::DEDUP,
        &[Workload::Idle, Workload::Writer, Workload::Writer],
    )?;
    stage.measured("before", fleet.share()?.0.saved_pages())?;
    store.kill()?;
    // What is shared stays shared, and guests go on.
    fleet.wait_for_work()?;
    stage.note("the store is dead, the guests work on")?;
    let _store = Store::start()?;
    stage.measured("after_store_loss", wait_until_shared("writer2")?.saved_pages())?;

    fleet.guests.remove(0).kill()?;
    let after = wait_for("the store to forget the killed guest", || {
        let stat = Stat::fetch()?;
        Ok(stat.vm("idle1", "pages").is_none().then_some(stat))
    })?;
    stage.measured("after_kill", after.saved_pages())?;

    // The VMM ends when the guest resets, and whoever runs it starts it anew, as it was.
    let rebooting = &mut fleet.guests[0];
    rebooting.type_line("reboot")?;
    rebooting.wait("Reboot")?;
    rebooting.ended()?;
    *rebooting = Plan::DEDUP.start("writer2", Workload::Writer)?;
    rebooting.wait("L2 ready")?;
    store::switch("writer2", Switch::On)?;
    stage.measured("after_reboot", wait_until_shared("writer2")?.saved_pages())?;

    let before = breaks(&Stat::fetch()?);
    fleet.rewrite("once")?;
    // What the kernel copied is found some passes later.
    let broken = wait_for("the copies to be found", || {
        let broken = breaks(&Stat::fetch()?).saturating_sub(before);
        Ok((broken >= SOME_BREAKS).then_some(broken))
    })?;
    stage.measured("breaks", broken)?;
    fleet.verify()?;
    stage.measured("verified", fleet.guests.len())?;
    fleet.power_off()
}

/// Copies on write so far.
fn breaks(stat: &Stat) -> u64 {
    stat.vms("breaks_managed_total") + stat.vms("breaks_kernel_total")
}

/// Writers break what they share while the host has no memory: they wait, and go on when there is some.
pub(super) fn pressure(stage: &mut Stage) -> Result<(), Failure> {
    let plan = Plan {
        arguments: &[
            "--breaks",
            "managed",
            "--reserve-pages",
            "256",
            "--reserve-floor-mib",
            "256",
        ],
        ..Plan::DEDUP
    };
    let _store = Store::start()?;
    let mut fleet = Fleet::start(stage, plan, &[Workload::Writer, Workload::Writer])?;
    let (settled, seconds) = fleet.share()?;
    stage.measured("ours", account(&settled, seconds))?;
    let ballast = Ballast::down_to(192)?;
    stage.note(format!("{} MiB of ballast", ballast.mib()))?;
    fleet.type_line("rewrite under-pressure")?;
    let waiting = wait_for("a writer to wait for memory", || {
        let waits = Stat::fetch()?.vms("reserve_waits_total");
        Ok((waits > 0).then_some(waits))
    })?;
    stage.measured("reserve_waits", waiting)?;
    drop(ballast);
    fleet.wait("L2 rewrote under-pressure")?;
    fleet.verify()?;
    stage.measured("verified", fleet.guests.len())?;
    stage.measured("oom_kills", oom_kills()?)?;
    fleet.power_off()
}

pub(super) fn panic() -> Result<(), Failure> {
    let trigger = "/proc/sysrq-trigger";
    fs::write(trigger, "c").map_err(|e| Failure::new(format!("{trigger}: {e}")))
}

pub(super) fn hang() -> Result<(), Failure> {
    loop {
        std::thread::park();
    }
}

/// Waits until a guest has more than a little merged.
fn wait_until_shared(name: &str) -> Result<Stat, Failure> {
    wait_for(&format!("{name} to share"), || {
        let stat = Stat::fetch()?;
        let pages = stat.vm(name, "pages_mapped").unwrap_or(0) + stat.vm(name, "pages_zero").unwrap_or(0);
        Ok((pages > SOME_PAGES).then_some(stat))
    })
}

fn oom_kills() -> Result<u64, Failure> {
    let text = fs::read_to_string("/proc/vmstat").map_err(|e| Failure::new(e.to_string()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|n| n.trim().parse().ok())
        .ok_or_else(|| Failure::new("/proc/vmstat has no oom_kill"))
}

/// Memory that is in use, as files in /dev/shm would be.
struct Ballast(Vec<Vec<u8>>);

impl Ballast {
    const MIB: usize = 1 << 20;

    /// Takes memory until so many MiB are available.
    fn down_to(mib: i64) -> Result<Self, Failure> {
        let mut ballast = Vec::new();
        while super::sharing::available()? > mib {
            ballast.push(vec![1; Self::MIB]);
        }
        Ok(Self(ballast))
    }

    fn mib(&self) -> usize {
        self.0.len()
    }
}
