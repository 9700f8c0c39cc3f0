//! Fuzzed messages against a store in a process of its own, from others: none of them ends it, what it has grows by nothing, and an
//! honest VM beside them gets on with the right bytes.
//!
//! A message is a valid one of random content, or one of which bytes were changed. Connections that end are made anew, and take the
//! earlier membership over; so each process has as many as it may have. `VMM_DEDUP_FUZZ_MESSAGES` says how many messages: `make fuzz`
//! sends 10^8.
#![allow(clippy::cast_possible_truncation)] // of numbers below small limits, and of such that may be any

mod support;

use rustix::net::{RecvFlags, SendFlags};
use std::io::BufRead;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{Client, HELPER_SOCKET, Helper, Server, TICKS, eventually, page, stats};
use vmm_dedup_protocol::key::{Key, PageHash, Salt, line_words};
use vmm_dedup_protocol::mapping::Mapping;
use vmm_dedup_protocol::message::{
    Hello, Kind, Message, NO_SLOT, RefDelta, Role, StatsRequest, aligned_buffer, encode, encode_batch,
};
use vmm_dedup_protocol::stats::ServiceStats;
use vmm_dedup_protocol::{PAGE_SIZE, STAGING_PAGES, socket};
use zerocopy::IntoBytes;

/// Messages without `VMM_DEDUP_FUZZ_MESSAGES`, and the fewest that tell anything.
const MESSAGES: u64 = 200_000;

/// Processes that send them, and the connections of each.
const PROCESSES: usize = 2;
const CONNECTIONS: u64 = 2;

/// What the store may have more afterwards, in memory of its own: the allocator of its process keeps some.
const MAX_GROWTH: u64 = 8 << 20;

/// Messages that are sent before answers are read.
const BURST: u64 = 16;

/// One message in so many is of the kind that ends its connection, most often: to connect takes as long as many messages.
const ENDS: u64 = 256;

/// Different pages that are published.
const PAGES: u64 = 512;

fn messages() -> u64 {
    let messages = std::env::var("VMM_DEDUP_FUZZ_MESSAGES").ok();
    messages.map_or(MESSAGES, |n| n.parse().expect("a number of messages"))
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Fewer than eight, of which each is made anew.
    fn some<T>(&mut self, mut make: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(8)).map(|_| make(self)).collect()
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words: Vec<u64> = (0..len.div_ceil(8)).map(|_| self.next()).collect();
        words.as_bytes()[..len].to_vec()
    }
}

/// A connection that sends what comes into its mind.
struct Fuzzer {
    socket: OwnedFd,
    staging: Mapping,
    salt: Salt,
    membership: u64,
    /// Slots of which it has a reference each.
    held: Vec<u32>,
    /// What lies in the first page of its staging buffer.
    staged: u64,
    buffer: Vec<u64>,
}

/// Numbers that parsers get wrong.
const EDGES: [u64; 8] = [0, 1, 0x7f, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 48, u64::MAX];

impl Fuzzer {
    /// Connects, and ends the earlier membership. `None` if it is cut off, or its place is not free yet.
    fn connect(path: &Path, earlier: u64) -> Option<Self> {
        let socket = socket::connect(path).ok()?;
        let hello = Hello::new(Role::Service, "fuzz", 100_000);
        socket::send(&socket, &encode(Kind::Hello, &[hello.as_bytes()]), &[]).ok()?;
        let mut buffer = aligned_buffer();
        let mut answer = socket::receive(&socket, &mut buffer).ok()??;
        let Ok(Message::Welcome(welcome)) = answer.parse(&buffer) else {
            return None;
        };
        let staging = Mapping::read_write(answer.fds.pop()?, STAGING_PAGES * PAGE_SIZE).ok()?;
        if earlier != 0 {
            socket::send(&socket, &encode(Kind::TakeOver, &[earlier.as_bytes()]), &[]).ok()?;
        }
        staging.write_page(0, &page(0));
        Some(Self {
            socket,
            staging,
            salt: Salt(welcome.salt),
            membership: welcome.membership,
            held: Vec::new(),
            staged: 0,
            buffer,
        })
    }

    /// Sends some messages and reads what has been answered; how many it sent, and whether the connection is still there.
    fn burst(&mut self, random: &mut Random) -> (u64, bool) {
        for sent in 0..BURST {
            let record = self.record(random);
            match rustix::net::send(&self.socket, &record, SendFlags::NOSIGNAL) {
                Ok(_) => {}
                // Not longer than a record may be, but longer than the kernel takes at once.
                Err(rustix::io::Errno::MSGSIZE) => {}
                Err(_) => return (sent, false),
            }
        }
        (BURST, self.read())
    }

    /// Reads all there is; whether the connection is still there.
    fn read(&mut self) -> bool {
        loop {
            let into = self.buffer.as_mut_bytes();
            match rustix::net::recv(&self.socket, into, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return false,
                Ok((len, _)) => self.take_in(len),
                Err(rustix::io::Errno::AGAIN) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Remembers slots that it got, and lets go of segments that it is told to.
    fn take_in(&mut self, len: usize) {
        let record = &self.buffer.as_bytes()[..len];
        let Some(kind) = record.get(6..8) else { return };
        let number = |at: usize| u32::from_ne_bytes(record[at..at + 4].try_into().unwrap());
        match u16::from_ne_bytes([kind[0], kind[1]]) {
            kind if kind == Kind::Published as u16 => {
                let slots = (16..len).step_by(4).map(number).filter(|slot| *slot != NO_SLOT);
                self.held.extend(slots);
            }
            kind if kind == Kind::SegmentRetired as u16 => {
                let released = encode(Kind::Released, &[&record[16..20]]);
                let _ = socket::send(&self.socket, &released, &[]);
            }
            _ => {}
        }
    }

    /// A message.
    fn record(&mut self, random: &mut Random) -> Vec<u8> {
        if random.below(ENDS) > 0 {
            return self.valid(random);
        }
        let mut record = match random.below(8) {
            0 => encode(Kind::Done, &[&random.next().to_ne_bytes()]),
            // Kinds that only others send, and some that nobody does, with bodies of any length.
            1 => {
                let len = random.below(256) as usize;
                let mut record = encode(Kind::Error, &[&random.bytes(len)]);
                record[6..8].copy_from_slice(&(random.below(32) as u16).to_ne_bytes());
                record
            }
            2 => {
                let len = random.below(200) as usize;
                random.bytes(len + 1)
            }
            _ => self.valid(random),
        };
        for _ in 0..=random.below(3) {
            change(&mut record, random);
        }
        record
    }

    /// What a service may say, or does not know better.
    fn valid(&mut self, random: &mut Random) -> Vec<u8> {
        match random.below(64) {
            0..32 => self.batch(random),
            32..44 => self.publication(random),
            44..50 => {
                let bytes = random.bytes(size_of::<ServiceStats>());
                encode(Kind::Report, &[&bytes])
            }
            50..52 => {
                let from = random.next() as u32;
                let request = StatsRequest { from, reserved: 0 };
                encode(Kind::StatsRequest, &[request.as_bytes()])
            }
            _ => encode_batch(0, &random.some(key), &random.some(key), &[], &[]),
        }
    }

    fn batch(&mut self, random: &mut Random) -> Vec<u8> {
        let mut refs = Vec::new();
        // It gives most of what it has back, and takes more of some, netted out or not.
        while self.held.len() > 64 || (!self.held.is_empty() && random.below(16) == 0) {
            let at = random.below(self.held.len() as u64) as usize;
            let slot = self.held.swap_remove(at);
            refs.push(RefDelta { slot, delta: -1 });
        }
        if random.below(4) == 0
            && let Some(slot) = self.held.last().copied()
        {
            refs.extend([RefDelta { slot, delta: 1 }, RefDelta { slot, delta: -1 }]);
        }
        let ambiguous = if random.below(16) == 0 {
            vec![self.line_key(random.below(PAGES))]
        } else {
            Vec::new()
        };
        encode_batch(0, &random.some(key), &random.some(key), &ambiguous, &refs)
    }

    fn publication(&mut self, random: &mut Random) -> Vec<u8> {
        if random.below(4) == 0 {
            self.staged = random.below(PAGES);
            self.staging.write_page(0, &page(self.staged));
        }
        let staged = self.staged;
        let staged = match random.below(4) {
            0 => self.line_key(staged),
            1 | 2 => PageHash::of(&page(staged), self.salt).key().raw(),
            _ => key(random),
        };
        encode(Kind::Publish, &[staged.as_bytes()])
    }

    fn line_key(&self, seed: u64) -> u64 {
        let words = page(seed);
        Key::of_lines(&line_words(|at| words[at]), self.salt).raw()
    }
}

/// Any key.
fn key(random: &mut Random) -> u64 {
    random.next() >> 16
}

fn change(record: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(record.len() as u64 + 1) as usize;
    let rest = record.len() - at;
    match random.below(6) {
        0 if rest > 0 => record[at] ^= 1 << random.below(8),
        1 => record.truncate(at),
        2 => {
            let more = random.below(64) as usize;
            let more = random.bytes(more);
            record.splice(at..at, more);
        }
        3 => {
            let len = (random.below(16) as usize).min(rest);
            record.drain(at..at + len);
        }
        4 => record.resize(record.len() + random.below(64 << 10) as usize, 0x5a),
        _ => {
            let edge = EDGES[random.below(EDGES.len() as u64) as usize].to_ne_bytes();
            let len = [1, 2, 4, 8][random.below(4) as usize].min(rest);
            record[at..at + len].copy_from_slice(&edge[..len]);
        }
    }
    // An empty record ends a connection for its peer, and is none.
    if record.is_empty() {
        record.push(0);
    }
}

/// The other side: sends so many messages over some connections at once.
#[test]
fn fuzzer() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let (sent, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for line in std::io::stdin().lock().lines() {
            match line.unwrap().parse::<u64>() {
                Ok(messages) => {
                    for n in 0..CONNECTIONS {
                        let (path, sent, ended) = (Path::new(&path), &sent, &ended);
                        let seed = u64::from(std::process::id()) << 32 | n;
                        scope.spawn(move || fuzz(path, seed, messages / CONNECTIONS, sent, ended));
                    }
                    println!("\n> begun");
                }
                Err(_) => println!("\n> {sent:?} {ended:?}"),
            }
        }
    });
}

fn fuzz(path: &Path, seed: u64, messages: u64, sent: &AtomicU64, ended: &AtomicU64) {
    let (mut random, mut done, mut earlier) = (Random(seed), 0, 0);
    while done < messages {
        let Some(mut fuzzer) = Fuzzer::connect(path, earlier) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        earlier = fuzzer.membership;
        loop {
            let (some, is_there) = fuzzer.burst(&mut random);
            done += some;
            sent.fetch_add(some, Ordering::Relaxed);
            if !is_there || done >= messages {
                break;
            }
        }
        ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// The store, in a process of its own.
#[test]
fn a_store() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let server = Server::start(|config| {
        config.socket = path.into();
        config.max_bytes = 64 << 20;
        config.max_sightings = 1 << 16;
    });
    for _ in std::io::stdin().lock().lines() {
        println!("\n> it is there");
    }
    drop(server);
}

/// What a process has: memory of its own, and descriptors.
fn has(pid: u32) -> (u64, usize) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").trim().parse().unwrap();
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    (kib << 10, descriptors)
}

/// One page after the other is shared, found, read and dropped: how long the longest step took.
fn live(honest: &mut Client, seed: u64) -> Duration {
    let start = Instant::now();
    let pages = [page(seed), page(seed + 1)];
    let slots: Vec<_> = honest.publish(&pages).into_iter().flatten().collect();
    let took = start.elapsed();
    for (slot, expected) in slots.iter().zip(&pages) {
        assert_eq!(&honest.content(*slot), expected, "{slot:?} has changed");
        assert_eq!(honest.find(expected), Some(*slot));
    }
    assert_eq!(slots.len(), 2, "there is room");
    let start = Instant::now();
    let dropped: Vec<_> = slots.iter().map(|slot| (*slot, -1)).collect();
    honest.batch(&[], &[], &dropped);
    honest.acknowledge();
    honest.release();
    took.max(start.elapsed())
}

/// Sends so many messages; how many were sent, and the longest that the honest VM waited.
fn round(path: &Path, honest: &mut Client, messages: u64) -> (u64, Duration) {
    let mut fuzzers: Vec<_> = (0..PROCESSES).map(|_| Helper::start("fuzzer", path)).collect();
    for fuzzer in &mut fuzzers {
        assert_eq!(fuzzer.ask(&(messages / PROCESSES as u64).to_string()), "begun");
    }
    let (start, mut longest, mut told, mut seed) = (Instant::now(), Duration::ZERO, Instant::now(), 1 << 40);
    loop {
        longest = longest.max(live(honest, seed));
        seed += 2;
        std::thread::sleep(Duration::from_millis(10));
        if told.elapsed() < Duration::from_secs(1) {
            continue;
        }
        told = Instant::now();
        let counts: Vec<(u64, u64)> = fuzzers
            .iter_mut()
            .map(|fuzzer| {
                let counts = fuzzer.ask("count");
                let (sent, ended) = counts.split_once(' ').unwrap();
                (sent.parse().unwrap(), ended.parse().unwrap())
            })
            .collect();
        let (sent, ended) = counts.iter().fold((0, 0), |sum, n| (sum.0 + n.0, sum.1 + n.1));
        if start.elapsed().as_secs().is_multiple_of(60) || sent >= messages {
            let elapsed = start.elapsed();
            println!(
                "{sent} messages over {ended} connections in {elapsed:?}, the honest VM waited {longest:?}"
            );
        }
        if sent >= messages {
            return (sent, longest);
        }
    }
}

/// What the store has when the honest VM is alone with it, and shares nothing.
fn settled(path: &Path, honest: &mut Client, store: u32) -> (u64, usize) {
    eventually(|| {
        honest.acknowledge();
        honest.release();
        let there = stats(path);
        there.vms == 1 && there.store.pages_shared == 0 && there.store.sightings == 0
    });
    std::thread::sleep(TICKS);
    has(store)
}

#[test]
fn fuzzed_messages_end_nothing_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sock");
    let mut store = Helper::start("a_store", &path);
    assert_eq!(store.ask("?"), "it is there");
    let mut honest = Client::connect(&path, "honest");
    let wanted = messages();
    // What it needs for that at all, it needs from here on.
    round(&path, &mut honest, wanted / 20);
    let before = settled(&path, &mut honest, store.pid());
    let (sent, longest) = round(&path, &mut honest, wanted);
    let after = settled(&path, &mut honest, store.pid());
    println!("{sent} messages; memory and descriptors of the store: {before:?} before, {after:?} after");
    assert!(sent >= wanted);
    assert!(
        after.0 <= before.0 + MAX_GROWTH,
        "{before:?} before, {after:?} after"
    );
    assert!(after.1 <= before.1 + 2, "{before:?} before, {after:?} after");
    assert!(
        longest < Duration::from_secs(5),
        "the honest VM waited {longest:?}"
    );
    // It was not cut off.
    assert!(live(&mut honest, 7) < Duration::from_secs(5));
}
