//! 64 connections of one user that do their worst, all at once, and what an honest VM notices of it.
//!
//! For ten seconds, or as many as `VMM_DEDUP_WORST_SECONDS` says (60 by `make worst`). The hostile processes have a lower priority:
//! sharing out the host's CPUs is not the store's task.

mod support;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::set_socket_linger;
use std::io::{BufRead, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{Client, HELPER_SOCKET, Helper, Observer, Server, eventually, page, stats};
use vmm_dedup_protocol::control::{Settings, Switch};
use vmm_dedup_protocol::mapping::Mapping;
use vmm_dedup_protocol::message::{Hello, Kind, Role, StatsRequest, encode};
use vmm_dedup_protocol::socket;
use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::IntoBytes;

/// Hostile processes, each with as many connections as one may have.
const PROCESSES: usize = 2;
const CONNECTIONS: usize = 32;

/// A user that is neither root nor who runs the tests.
const STRANGER: u32 = 65_533;

/// The honest VM has so many new pages each time, and comes so often: it makes no use of all that the store can do.
const PAGES_AT_ONCE: u64 = 8;
const PERIOD: Duration = Duration::from_millis(10);

/// What the store may use at most: 64 MiB of pages, and as many sightings as there are.
const MAX_BYTES: u64 = 64 << 20;
/// Members let go of emptied segments when they have their turn: those are beyond the limit until then, up to 64 MiB and two segments.
const MAX_RESIDENT: u64 = MAX_BYTES + (64 << 20) + (32 << 20);
const MAX_SIGHTINGS: u64 = 1 << 20;
/// 12 bytes each, what else it needs for each connection, and the index and its ring.
const MAX_METADATA: u64 = MAX_SIGHTINGS * 12 + (32 << 20);

/// What the honest VM may notice.
const P99: Duration = Duration::from_millis(20);
const MAX: Duration = Duration::from_secs(1);
/// What is said to hold is said of runs as long as this.
const LONG: Duration = Duration::from_secs(60);

/// When the attackers have gone, all is given back within this.
const GIVEN_BACK: Duration = Duration::from_secs(10);

fn duration() -> Duration {
    let seconds = std::env::var("VMM_DEDUP_WORST_SECONDS").ok();
    Duration::from_secs(seconds.and_then(|n| n.parse().ok()).unwrap_or(10))
}

/// What an honest VM lived through.
#[derive(Debug)]
struct Experience {
    p99: Duration,
    max: Duration,
    merged: u64,
}

/// Shares pages with itself for so long. Pages are numbered from `next` on.
fn live(honest: &mut Client, next: &mut u64, time: Duration) -> Experience {
    let (start, mut times, mut merged) = (Instant::now(), Vec::new(), 0);
    while start.elapsed() < time {
        let begun = Instant::now();
        let pages: Vec<_> = (*next..*next + PAGES_AT_ONCE).map(page).collect();
        *next += PAGES_AT_ONCE;
        let keys: Vec<u64> = pages.iter().map(|page| honest.full_key(page)).collect();
        let mut timed = |honest: &mut Client, act: &mut dyn FnMut(&mut Client)| {
            let asked = Instant::now();
            act(honest);
            times.push(asked.elapsed());
        };
        timed(honest, &mut |honest| _ = honest.batch(&keys, &[], &[]));
        timed(honest, &mut |honest| _ = honest.batch(&keys, &[], &[]));
        let mut slots = Vec::new();
        timed(honest, &mut |honest| slots = honest.publish(&pages));
        // Its pages change again: the store has room for the next, and no use for keys of those that found none.
        let lost = keys.iter().zip(&slots).filter(|(_, slot)| slot.is_none());
        let withdrawn: Vec<u64> = lost.flat_map(|(key, _)| [*key; 2]).collect();
        let found: Vec<_> = slots.into_iter().flatten().collect();
        merged += found.len() as u64;
        let dropped: Vec<_> = found.iter().map(|slot| (*slot, -1)).collect();
        timed(honest, &mut |honest| _ = honest.batch(&[], &withdrawn, &dropped));
        honest.release();
        std::thread::sleep(PERIOD.saturating_sub(begun.elapsed()));
    }
    times.sort_unstable();
    Experience {
        p99: times[times.len() * 99 / 100],
        max: times[times.len() - 1],
        merged,
    }
}

/// Tries, of which one is to show that the store can do it: a busy machine makes everybody wait.
const TRIES: usize = 3;

#[test]
fn an_honest_vm_gets_on_while_64_connections_do_their_worst() {
    let failed: Vec<String> = (0..TRIES).map_while(|_| attacked().err()).collect();
    assert!(failed.len() < TRIES, "{failed:#?}");
}

/// What goes against what the honest VM may notice, if anything does.
fn attacked() -> Result<(), String> {
    let server = Server::start(|config| {
        config.mode = 0o666;
        config.metrics = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        config.max_bytes = MAX_BYTES;
        config.max_sightings = MAX_SIGHTINGS;
    });
    std::fs::set_permissions(server.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(
        address_beside(&server.socket),
        server.metrics.unwrap().to_string(),
    )
    .unwrap();
    let mut honest = Client::connect(&server.socket, "honest");
    let (mut next, time) = (1 << 40, duration());
    let undisturbed = live(&mut honest, &mut next, time / 2);
    println!("undisturbed for {:?}: {undisturbed:?}", time / 2);

    let mut attackers: Vec<_> = (0..PROCESSES)
        .map(|_| Helper::start("attacker", &server.socket))
        .collect();
    for (n, attacker) in attackers.iter_mut().enumerate() {
        assert_eq!(attacker.ask(["patient", "all"][n]), "begun");
    }
    let disturbed = live(&mut honest, &mut next, time);
    println!("disturbed for {time:?}: {disturbed:?}");
    let busy = stats(&server.socket).store;
    println!(
        "the store has {} MiB of pages and {} MiB of metadata",
        busy.resident_bytes >> 20,
        busy.metadata_bytes >> 20
    );
    let mut done = vec![0u64; 2 * ATTACKS.len()];
    for attacker in &mut attackers {
        let numbers = attacker.ask("count");
        let numbers = numbers.split(' ').map(|number| number.parse::<u64>().unwrap());
        done.iter_mut()
            .zip(numbers)
            .for_each(|(sum, number)| *sum += number);
    }
    let (done, cut_off) = done.split_at(ATTACKS.len());
    println!("attacks, kind by kind: {done:?}; those that were cut off: {cut_off:?}");
    drop(attackers);
    let left = eventually(|| {
        honest.acknowledge();
        honest.release();
        let store = stats(&server.socket);
        store.vms == 1 && store.store.sightings < 1000 && store.store.pages_shared == 0
    });
    println!("given back after {left:?}");

    assert!(
        busy.resident_bytes <= MAX_RESIDENT && busy.metadata_bytes <= MAX_METADATA,
        "{busy:?}"
    );
    assert!(left <= GIVEN_BACK, "{left:?}");
    let expected = undisturbed.merged as f64 * time.as_secs_f64() / (time / 2).as_secs_f64();
    // In a short run, which is one beside others, the machine itself makes it wait.
    let slack = u32::from(time < LONG) * 2;
    let is_well = disturbed.p99 <= P99 + slack * undisturbed.p99
        && disturbed.max <= MAX + slack * undisturbed.max
        && disturbed.merged as f64 >= expected / 2.0;
    match is_well {
        true => Ok(()),
        false => Err(format!("{disturbed:?} after {undisturbed:?}")),
    }
}

/// The attacks, each by connections of its own.
type Attack = fn(&Path, u64);
const ATTACKS: [Attack; 14] = [
    // These do not make news, for which their process would have to wait.
    sight_and_go,
    publish_others,
    fill,
    hold,
    do_not_read,
    report,
    connect,
    flap_in_a_batch,
    linger,
    scrape,
    steer,
    read_the_index,
    // These do.
    flap,
    decline,
];
const PATIENT: usize = 12;

/// The other side: 32 threads that attack until they are killed.
#[test]
fn attacker() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    std::panic::set_hook(Box::new(|_| ()));
    rustix::process::nice(10).unwrap();
    if rustix::process::geteuid().is_root() {
        // The threads that are started from here have this user, too.
        let stranger = rustix::process::Uid::from_raw(STRANGER);
        rustix::thread::set_thread_res_uid(stranger, stranger, stranger).unwrap();
    }
    let counts = || [const { AtomicU64::new(0) }; ATTACKS.len()];
    let (path, done, cut_off) = (Path::new(&path), counts(), counts());
    let attack = &|n: usize, attacks: &[Attack]| {
        let mut seed = ((n as u64) << 32) | (u64::from(std::process::id()) << 40);
        loop {
            seed += 1 << 12;
            let n = n % attacks.len();
            match std::panic::catch_unwind(|| attacks[n](path, seed)) {
                Ok(()) => done[n].fetch_add(1, Ordering::Relaxed),
                Err(_) => cut_off[n].fetch_add(1, Ordering::Relaxed),
            };
        }
    };
    std::thread::scope(|scope| {
        for line in std::io::stdin().lock().lines() {
            let attacks = match &*line.unwrap() {
                "count" => {
                    let numbers = done
                        .iter()
                        .chain(&cut_off)
                        .map(|count| count.load(Ordering::Relaxed).to_string());
                    println!("\n> {}", numbers.collect::<Vec<_>>().join(" "));
                    continue;
                }
                "patient" => &ATTACKS[..PATIENT],
                _ => &ATTACKS[..],
            };
            for n in 0..CONNECTIONS {
                scope.spawn(move || attack(n, attacks));
            }
            println!("\n> begun");
        }
    });
}

/// Rounds of an attack before it is begun anew.
const ROUNDS: u64 = 50;

fn fresh_keys(seed: u64) -> Vec<u64> {
    (0..2048)
        .map(|n| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (n * 0x1_0003)) >> 17)
        .collect()
}

/// Says goodbye: an orphan would keep a place until the process ends.
fn leave(evil: Client) {
    evil.send(Kind::Goodbye, &[]);
}

fn flap_in_a_batch(path: &Path, seed: u64) {
    let mut evil = Client::connect(path, "evil");
    let slot = evil.publish(&[page(seed)])[0].unwrap();
    let changes: Vec<_> = [(slot, -1), (slot, 1)].into_iter().cycle().take(2048).collect();
    (0..ROUNDS).for_each(|_| {
        evil.batch(&[], &[], &changes);
        evil.release();
    });
    leave(evil);
}

fn flap(path: &Path, seed: u64) {
    let mut evil = Client::connect(path, "evil");
    let pages: Vec<_> = (0..512).map(|n| page(seed + n)).collect();
    let slots: Vec<_> = evil.publish(&pages).into_iter().flatten().collect();
    for round in 0..ROUNDS {
        let delta = if round % 2 == 0 { -1 } else { 1 };
        let changes: Vec<_> = slots.iter().map(|slot| (*slot, delta)).collect();
        // It acknowledges nothing, so that none of them is free.
        evil.send_batch(0, &[], &[], &changes);
        evil.batch_reply();
        evil.release();
    }
    leave(evil);
}

fn sight_and_go(path: &Path, seed: u64) {
    let mut evil = Client::connect_with(path, "evil", 1 << 24);
    for round in 0..ROUNDS {
        evil.batch(&fresh_keys(seed + round), &[], &[]);
        evil.release();
    }
    leave(evil);
}

fn decline(path: &Path, seed: u64) {
    let mut evil = Client::connect_with(path, "evil", 1 << 24);
    for round in 0..ROUNDS {
        let keys = fresh_keys(seed + round);
        evil.batch(&keys, &[], &[]);
        evil.batch(&keys, &[], &[]);
        evil.release();
    }
    leave(evil);
}

fn publish_others(path: &Path, seed: u64) {
    let mut evil = Client::connect(path, "evil");
    let keys = fresh_keys(seed);
    for _ in 0..ROUNDS {
        evil.publish_staged(&keys[..512]);
        evil.release();
    }
    leave(evil);
}

fn fill(path: &Path, seed: u64) {
    let mut evil = Client::connect(path, "evil");
    for round in 0..8 {
        let pages: Vec<_> = (0..512).map(|n| page(seed + 512 * round + n)).collect();
        let slots: Vec<_> = evil.publish(&pages).into_iter().flatten().collect();
        let dropped: Vec<_> = slots.iter().map(|slot| (*slot, -1)).collect();
        evil.batch(&[], &[], &dropped);
        evil.release();
    }
    leave(evil);
}

/// Takes what it can get, and keeps it for a while.
fn hold(path: &Path, seed: u64) {
    let mut evil = Client::connect(path, "evil");
    for round in 0..ROUNDS {
        let pages: Vec<_> = (0..512).map(|n| page(seed + 512 * round + n)).collect();
        evil.publish(&pages);
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn do_not_read(path: &Path, _: u64) {
    let evil = Observer::connect(path);
    let question = StatsRequest { from: 0, reserved: 0 };
    let question = encode(Kind::StatsRequest, &[question.as_bytes()]);
    while socket::send(&evil.socket, &question, &[]).is_ok() {}
}

fn report(path: &Path, _: u64) {
    let evil = Client::connect(path, "honest");
    let mut all = ServiceStats::default();
    all.as_mut_bytes().fill(0xff);
    (0..ROUNDS).for_each(|_| evil.send(Kind::Report, all.as_bytes()));
    leave(evil);
}

/// A descriptor that takes long to close, where the kernel lets it through.
fn linger(path: &Path, _: u64) {
    let evil = socket::connect(path).unwrap();
    let hello = encode(Kind::Hello, &[Hello::new(Role::Observer, "evil", 0).as_bytes()]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    lingering.set_nonblocking(true).unwrap();
    while lingering.write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&lingering, Some(Duration::from_secs(8))).unwrap();
    // Where it has come so far it is the store's to close, else this thread's.
    if socket::send(&evil, &hello, &[lingering.as_fd()]).is_err() {
        set_socket_linger(&lingering, Some(Duration::ZERO)).unwrap();
    }
}

/// Where the store's metrics are, for who plays an attacker.
fn address_beside(path: &Path) -> PathBuf {
    path.with_file_name("metrics")
}

/// Asks for metrics over many connections, and reads nothing of what comes.
fn scrape(path: &Path, _: u64) {
    let address = std::fs::read_to_string(address_beside(path)).unwrap();
    let question = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(50);
    let asking: Vec<_> = (0..200)
        .filter_map(|_| {
            let mut stream = TcpStream::connect(&address).ok()?;
            stream.write_all(question.as_bytes()).ok()?;
            Some(stream)
        })
        .collect();
    drop(asking);
}

/// Would have its neighbour switched off, and look at its pages.
fn steer(path: &Path, _: u64) {
    let mut evil = Observer::connect(path);
    let off = Settings {
        switch: Some(Switch::OffUnmerge),
        ..Settings::default()
    };
    for serial in 0..ROUNDS {
        evil.set("honest", serial, off);
        evil.refusal();
        evil.explain("honest", serial);
        evil.refusal();
    }
}

/// Fills the index's file, as far as it has holes.
fn read_the_index(path: &Path, _: u64) {
    let evil = Client::connect(path, "evil");
    let len = usize::try_from(rustix::fs::fstat(&evil.index_file).unwrap().st_size).unwrap();
    let map = Mapping::read_only(&evil.index_file, len).unwrap();
    let sum: u64 = map
        .words()
        .iter()
        .map(|word| word.load(Ordering::Relaxed) & 1)
        .sum();
    assert!(sum < u64::MAX);
    leave(evil);
}

fn connect(path: &Path, _: u64) {
    let evil = socket::connect(path).unwrap();
    let hello = encode(Kind::Hello, &[Hello::new(Role::Observer, "evil", 0).as_bytes()]);
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let _ = socket::send(&evil, &hello, &[event.as_fd(), event.as_fd()]);
    let _ = set_socket_linger(&evil, Some(Duration::from_secs(1)));
}
