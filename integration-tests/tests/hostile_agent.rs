//! A guest's agent that attacks a real service of a real guest, beside another guest that shares memory with it.
//!
//! Each way to attack goes on for some seconds, and it comes and goes two thousand times, or as often as
//! `VMM_DEDUP_HOSTILE_RECONNECTS` says (a million by `make hostile`). It costs its VM no more than the CPU budget of its service,
//! nothing that lasts, and no guest a byte.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vmm_dedup::{AgentSocket, Config, Settings, Setup, Switch};
use vmm_dedup_agent_wire::message::Sources;
use vmm_dedup_agent_wire::said::{Kind, Said};
use vmm_dedup_integration_tests::agent::Agent;
use vmm_dedup_integration_tests::hostile::{Done, Play};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::vm::Guest;
use vmm_dedup_integration_tests::{alone, need_kvm, need_userfaultfd};
use vmm_dedup_payload::{PayloadConfig, Rewrite, WorkingSet};
use vmm_dedup_refvmm::ThpMode;

/// Of one core, in percent, for each service.
const BUDGET: u32 = 2;
/// How long one play goes on.
const PLAY: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(60);
const MEMORY_MIB: u64 = 24;
const BLOCKS: u64 = MEMORY_MIB / 2;
/// What a budget may be exceeded by at any time, in seconds of it: what was not used before, of both threads.
const BURST: f64 = 0.75;
/// What one piece of work may take that has begun, and what the kernel counts late.
const PIECE: f64 = 0.05;
/// What may stay behind in the process: tables that have grown, and memory that the allocator keeps.
const MOST_LEFT_KIB: u64 = 8 << 10;

fn reconnects() -> u64 {
    let wanted = std::env::var("VMM_DEDUP_HOSTILE_RECONNECTS").ok();
    wanted.and_then(|n| n.parse().ok()).unwrap_or(2000)
}

fn config(name: &str) -> Config {
    Config {
        name: name.into(),
        cpu_percent: BUDGET,
        pass_period_ms: 100,
        ..Config::default()
    }
}

fn payload(seed: u64) -> PayloadConfig {
    PayloadConfig::default()
        .seed(seed)
        .private_mib(2)
        .zero_mib(2)
        .common_mib(8)
        .ws_pages(1 << 20)
        .ws_area(WorkingSet::All)
        .rate(500)
        .rewrite(Rewrite::Restore)
        .seconds(1_000_000)
}

/// Threads of the services of this process.
fn service_threads() -> Vec<PathBuf> {
    let tasks = std::fs::read_dir("/proc/self/task")
        .expect("/proc is there")
        .flatten();
    let is_a_services = |task: &PathBuf| {
        let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        name.starts_with("dedup-")
    };
    tasks.map(|task| task.path()).filter(is_a_services).collect()
}

/// Seconds of CPU time.
fn cpu_of(threads: &[PathBuf]) -> f64 {
    let of = |thread: &PathBuf| {
        let text = std::fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
        text.split(' ')
            .next()
            .and_then(|ns| ns.parse::<u64>().ok())
            .expect("the thread lives")
    };
    let ns: u64 = threads.iter().map(of).sum();
    Duration::from_nanos(ns).as_secs_f64()
}

/// Descriptors of this process, by what they are.
fn descriptors() -> BTreeMap<String, usize> {
    let all = std::fs::read_dir("/proc/self/fd")
        .expect("/proc is there")
        .flatten();
    let mut kinds = BTreeMap::new();
    for entry in all {
        let name = std::fs::read_link(entry.path()).unwrap_or_default();
        let kind = name
            .to_string_lossy()
            .split(':')
            .next()
            .unwrap_or_default()
            .to_owned();
        *kinds.entry(kind).or_default() += 1;
    }
    kinds
}

fn sockets() -> usize {
    descriptors().get("socket").copied().unwrap_or(0)
}

/// KiB in memory of this process that are anonymous and no guest's.
fn own_memory_kib(guests: &[&Guest]) -> u64 {
    let guests: Vec<_> = guests.iter().flat_map(|guest| guest.memory()).collect();
    let text = std::fs::read_to_string("/proc/self/smaps").expect("/proc is there");
    let number = |hex: &str| usize::from_str_radix(hex, 16).ok();
    let (mut counts, mut sum) = (false, 0);
    for line in text.lines() {
        if let Some(kib) = line.strip_prefix("Anonymous:") {
            let kib = kib
                .trim()
                .trim_end_matches(" kB")
                .parse::<u64>()
                .expect("a number");
            sum += if counts { kib } else { 0 };
        } else if let Some(start) = line.split_once('-').and_then(|(start, _)| number(start)) {
            counts = !guests.iter().any(|guest| guest.contains(&start));
        }
    }
    sum
}

/// Waits until something is so.
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < PATIENCE, "no {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs something for a while; the CPU time of these threads must be within the budget.
fn within_budget(what: &str, threads: &[PathBuf], run: impl FnOnce() -> Done) {
    let (start, before) = (Instant::now(), cpu_of(threads));
    let done = run();
    let (time, cpu) = (start.elapsed().as_secs_f64(), cpu_of(threads) - before);
    println!(
        "{what}: {done:?} in {time:.1} s; {cpu:.3} s of CPU, {:.2} % of a core",
        100.0 * cpu / time
    );
    let share = f64::from(BUDGET) / 100.0;
    let most = share * (time + BURST) + PIECE;
    assert!(
        cpu <= most,
        "{what}: {cpu} s of CPU, where {most} s are allowed in {time} s"
    );
}

#[test]
fn an_agent_that_attacks_costs_its_own_vm_its_cpu_budget_at_most_and_no_byte() {
    need_kvm!();
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let folder = TempDir::new().expect("a folder");
    let agent = AgentSocket::Hybrid(folder.path().join("vm.vsock"));
    let socket = agent.service_socket().expect("it is a Unix socket");
    let setup = Setup {
        store: store.socket(),
        agent: Some(agent),
        config: config("victim"),
    };
    let victim = Guest::boot_with(payload(1), MEMORY_MIB, ThpMode::Never, Some(setup));
    until("agent's socket", || socket.exists());
    let threads = service_threads();
    let honest = (store.socket(), config("honest"));
    let honest = Guest::boot(
        payload(2),
        MEMORY_MIB,
        ThpMode::Never,
        Some((&honest.0, honest.1)),
    );
    let shares = |guest: &Guest| guest.stats().merges_total > 100;
    until("sharing", || shares(&victim) && shares(&honest));
    let (descriptors_before, memory_before) = (descriptors(), own_memory_kib(&[&victim, &honest]));
    let before = victim.stats();

    let attack = |what: &str, play: Play| {
        let (progress, merges) = (honest.progress(), honest.stats().merges_total);
        let start = Instant::now();
        let is_enough = |done: &Done| match play {
            Play::Reconnects => done.connections >= reconnects(),
            _ => {
                assert!(start.elapsed() < PATIENCE, "nobody is let in");
                done.welcomed > 0 && start.elapsed() >= PLAY
            }
        };
        within_budget(&format!("{play:?}{what}"), &threads, || {
            play.play(&socket, BLOCKS, is_enough)
        });
        // Whom it does not concern lives on.
        until("progress of the other VM", || {
            honest.progress() > progress && honest.stats().merges_total > merges
        });
    };
    // Who has come too often is kept out for a while: that comes last.
    let heard_of = Play::ALL.into_iter().filter(|play| *play != Play::Reconnects);
    heard_of.for_each(|play| attack("", play));
    // Also while nothing is to be merged, and what is said is taken over all the same.
    let switch = |to| Settings {
        switch: Some(to),
        ..Settings::default()
    };
    victim.set(switch(Switch::Off)).expect("off");
    attack(", off", Play::Flood);
    attack(", off", Play::Lies);
    victim.set(switch(Switch::On)).expect("on");
    attack("", Play::Reconnects);

    // The account is a little older than what happened last.
    until("word of who was refused and cut off", || {
        let after = victim.stats().hints;
        after.agents_refused_total > before.hints.agents_refused_total
            && after.agents_cut_off_total > before.hints.agents_cut_off_total
    });
    // Who comes in peace is heard, as soon as the attackers' connections are forgiven.
    let start = Instant::now();
    let mut agent = loop {
        match Agent::try_greet(&socket, Sources::default(), 0) {
            Some(agent) => break agent,
            None => assert!(start.elapsed() < PATIENCE, "nobody is let in"),
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    agent.say_use(1, &[]);
    agent.say_of(
        0..usize::try_from(BLOCKS * 512).expect("64 bits"),
        Said::new(Kind::FileClean),
    );
    until("word of the agent", || {
        victim.stats().hints.file_clean == BLOCKS * 512
    });
    drop(agent);
    until("end of sockets", || sockets() <= descriptors_before["socket"]);
    let after = victim.stats();
    let memory_after = own_memory_kib(&[&victim, &honest]);
    println!(
        "descriptors: {descriptors_before:?} before, {:?} after; memory that is no guest's: {memory_before} and {memory_after} KiB; \
         tables of the service: {} and {} bytes; let in {}, refused {}, cut off {}",
        descriptors(),
        before.metadata_bytes,
        victim.stats().metadata_bytes,
        after.hints.agents_total,
        after.hints.agents_refused_total,
        after.hints.agents_cut_off_total,
    );
    assert!(
        memory_after <= memory_before + MOST_LEFT_KIB,
        "{memory_before} and {memory_after} KiB"
    );
    assert_eq!(
        threads,
        service_threads()[..threads.len()],
        "the threads are the same"
    );
    for guest in [victim, honest] {
        let (verdict, stats) = guest.finish();
        assert!(
            verdict.ok && verdict.errors == 0,
            "a guest found wrong bytes: {verdict:?}"
        );
        assert!(
            verdict.writes > 0 && verdict.pages > 0 && stats.merges_total > 0,
            "{verdict:?}"
        );
    }
}

/// What is said of 16 GiB is thousands of blocks again and again, which the scanning thread takes over: within the budget, too, whether or
/// not anything is merged. The memory is there only by its addresses.
#[test]
fn a_flood_about_much_memory_costs_the_cpu_budget_at_most() {
    need_userfaultfd!();
    const PAGES: usize = 4 << 20;
    let _alone = alone();
    let store = StoreThread::start();
    let folder = TempDir::new().expect("a folder");
    let agent = AgentSocket::Hybrid(folder.path().join("vm.vsock"));
    let socket = agent.service_socket().expect("it is a Unix socket");
    let pages = Pages::map(PAGES);
    let others = service_threads();
    let mut service = pages
        .serve_at(&store.socket(), config("big"), 0)
        .expect("dedup starts");
    service.listen_to_agent(agent).expect("a thread");
    until("agent's socket", || socket.exists());
    let mut threads = service_threads();
    threads.retain(|thread| !others.contains(thread));
    let flood = |what: &str| {
        let start = Instant::now();
        let is_enough = |_: &Done| start.elapsed() >= 2 * PLAY;
        within_budget(what, &threads, || {
            Play::Flood.play(&socket, (PAGES / 512) as u64, is_enough)
        });
    };
    // The first pass over so many pages has its own debt.
    until("passes", || service.stats().passes_total >= 2);
    flood("16 GiB");
    service.pause();
    flood("16 GiB, paused");
    service.resume();
    // What an agent said goes with its connection.
    let agents = service.stats().hints.agents_total;
    assert!(agents > 0, "nobody was heard");
    service.stop(true).expect("it stops");
}
