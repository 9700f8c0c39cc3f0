//! What guests' agents are good for: how soon files that a fleet has read are shared, and for what, with agents and without.

use super::Stage;
use super::fleet::Fleet;
use super::memory_of::{FilePages, pages_of_store};
use super::store::{self, Stat, Store};
use super::vmm::{self, Extras, Vmm};
use crate::wait::{check, wait_for};
use crate::{Failure, Workload, shared_files};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::control::Switch;

/// Guests of a fleet.
const GUESTS: u32 = 4;
const MEMORY_MIB: u32 = 512;
/// Memory of each that no other guest has the like of.
const OWN_MIB: u32 = 256;
/// What a page of the secret is full of, and one of memory that nobody marked (guest/init.sh).
const SECRET: u8 = b'k';
const OPEN: u8 = b'u';
/// Pages of it, at least.
const SECRET_PAGES: u64 = 15;
/// Rounds of building and sorting in each guest.
const ROUNDS: u32 = 2;
/// A break is known so many passes later.
const PASSES: u64 = 20;
/// From one look at what is shared to the next: it takes CPU time from whom it looks at.
const BETWEEN: Duration = Duration::from_millis(500);

/// From one word of how far it is to the next.
const PROGRESS: Duration = Duration::from_secs(5);

pub(super) fn agents(stage: &mut Stage) -> Result<(), Failure> {
    for vmm in vmm::found() {
        let without = play(stage, vmm, false)?;
        let with = play(stage, vmm, true)?;
        stage.measured(vmm.name(), json!({ "without": without, "with": with }))?;
    }
    Ok(())
}

/// A fleet starts, reads, shares what it has read, and builds.
fn play(stage: &mut Stage, vmm: Vmm, agents: bool) -> Result<Value, Failure> {
    let who = if agents { "agents" } else { "no agents" };
    let store = Store::start()?;
    let mut fleet = Fleet { guests: Vec::new() };
    for number in 1..=GUESTS {
        let name = format!("{}{number}", vmm.name());
        let extras = Extras {
            memory_mib: MEMORY_MIB,
            files: true,
            // Those below are taken.
            cid: Some(number + 2),
        };
        fleet.guests.push(vmm.start_with(&name, Workload::Idle, extras)?);
        store::switch(&name, Switch::Off)?;
    }
    fleet.wait("L2 ready")?;
    stage.note(format!("{}, {who}: guests are up", vmm.name()))?;
    if agents {
        fleet.type_line("agent")?;
        fleet.wait("L2 agent")?;
        fleet.type_line("secret")?;
        fleet.wait("L2 secret")?;
        until_told(&fleet, "marks", |stat, guest| {
            stat.hint(guest, "never") >= SECRET_PAGES
        })?;
        stage.note("agents are heard, and each guest has a secret")?;
    }
    fleet.type_line(&format!("own {OWN_MIB}"))?;
    fleet.wait("L2 own")?;
    fleet.type_line("open")?;
    fleet.wait("L2 open")?;
    fleet.type_line("read")?;
    fleet.wait("L2 read")?;
    stage.note("files have been read")?;
    if agents {
        until_told(&fleet, "files", |stat, guest| {
            stat.hint(guest, "file_clean") >= shared_files::PAGES && stat.hint(guest, "free") > 0
        })?;
        stage.note("agents have told of files")?;
    }
    let shared = share(stage, &fleet)?;
    let built = build(stage, &mut fleet)?;
    let secrets = pages_of_store(store.pid(), SECRET)?;
    let open = pages_of_store(store.pid(), OPEN)?;
    let hints = Stat::fetch()?.0["vms"].clone();
    let hints: Vec<Value> = hints
        .as_array()
        .into_iter()
        .flatten()
        .map(|vm| vm["hints"].clone())
        .collect();
    fleet.verify()?;
    fleet.type_line("poweroff")?;
    fleet
        .guests
        .iter_mut()
        .try_for_each(|guest| guest.ended().map(drop))?;
    let told = json!({
        "shared": shared,
        "built": built,
        "secret_pages_in_store": secrets,
        "open_pages_in_store": open,
        "hints": hints,
    });
    stage.note(format!("{}, {who}: {told}", vmm.name()))?;
    Ok(told)
}

/// Waits until every guest's agent has told of something.
fn until_told(fleet: &Fleet, what: &str, told: impl Fn(&Stat, &str) -> bool) -> Result<(), Failure> {
    wait_for(&format!("agents to tell of {what}"), || {
        let stat = Stat::fetch()?;
        Ok(fleet
            .guests
            .iter()
            .all(|guest| told(&stat, &guest.name))
            .then_some(()))
    })
}

/// Merging begins; ends when nine tenths of the files' pages are shared.
fn share(stage: &mut Stage, fleet: &Fleet) -> Result<Value, Failure> {
    let files: Vec<FilePages> = fleet
        .guests
        .iter()
        .map(|guest| FilePages::find(guest.pid()))
        .collect::<Result<_, _>>()?;
    let all: usize = files.iter().map(FilePages::len).sum();
    let most = u64::from(GUESTS) * shared_files::PAGES;
    // Some may have been given up, where a guest is short of memory.
    check(all as u64 * 10 >= most * 9, || {
        format!("{all} of {most} pages of files are in memory")
    })?;
    stage.note(format!("{all} pages of files are in memory"))?;
    let (start, cpu) = (Instant::now(), Stat::fetch()?.cpu_seconds());
    for guest in &fleet.guests {
        store::switch(&guest.name, Switch::On)?;
    }
    let mut told = Instant::now();
    let shared = wait_for("nine tenths of the files to be shared", || {
        std::thread::sleep(BETWEEN);
        let shared: usize = files.iter().map(FilePages::shared).sum::<Result<usize, _>>()?;
        if told.elapsed() >= PROGRESS {
            told = Instant::now();
            stage.note(progress(shared, &Stat::fetch()?))?;
        }
        Ok((shared * 10 >= all * 9).then_some(shared))
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let stat = Stat::fetch()?;
    let told = json!({
        "pages": all,
        "shared": shared,
        "seconds": seconds,
        "cpu_seconds": stat.cpu_seconds() - cpu,
        "merges": stat.vms("merges_total"),
    });
    let wrong: usize = files.iter().map(FilePages::wrong).sum::<Result<usize, _>>()?;
    check(wrong == 0, || {
        format!("{wrong} pages of files are not what they were")
    })?;
    stage.note(format!("files are shared, and are what they were: {told}"))?;
    Ok(told)
}

/// How far sharing is, and what the services' CPU time went into.
fn progress(shared: usize, stat: &Stat) -> String {
    let sums = [
        "merges_total",
        "zero_merges_total",
        "pages_keyed_total",
        "passes_total",
    ]
    .map(|name| stat.vms(name));
    let [merges, zeros, keyed, passes] = sums;
    format!(
        "{shared} pages of files are shared; {merges} merged, {zeros} zero pages, {keyed} keyed in {passes} passes; CPU {}",
        stat.cpu_of_stages()
    )
}

/// All guests build and sort at once: what they merge meanwhile, and break.
fn build(stage: &mut Stage, fleet: &mut Fleet) -> Result<Value, Failure> {
    // What was found before is merged by then.
    let before = passes(fleet, 3)?;
    fleet.type_line(&format!("build {ROUNDS}"))?;
    fleet.wait("L2 built")?;
    let after = passes(fleet, PASSES)?;
    let grown = |name: &str| after.vms(name) - before.vms(name);
    let breaks = |stat: &Stat| stat.vms("breaks_kernel_total") + stat.vms("breaks_managed_total");
    let merges = grown("merges_total") + grown("zero_merges_total");
    let told = json!({
        "merges": merges,
        "breaks": breaks(&after) - breaks(&before),
        "early_breaks": grown("breaks_early_total"),
        "merges_in_all": after.vms("merges_total"),
        "breaks_in_all": breaks(&after),
        "cpu_seconds": after.cpu_seconds() - before.cpu_seconds(),
    });
    stage.note(format!("guests have built: {told}"))?;
    Ok(told)
}

/// The account when every VM has made so many passes more.
fn passes(fleet: &Fleet, more: u64) -> Result<Stat, Failure> {
    let made = |stat: &Stat| -> Vec<u64> {
        let made = fleet
            .guests
            .iter()
            .map(|guest| stat.vm(&guest.name, "passes_total"));
        made.map(Option::unwrap_or_default).collect()
    };
    let before = made(&Stat::fetch()?);
    wait_for("some passes", || {
        let stat = Stat::fetch()?;
        let done = made(&stat)
            .iter()
            .zip(&before)
            .all(|(now, before)| *now >= before + more);
        Ok(done.then_some(stat))
    })
}
