//! Who keeps slots from being given to others, and what an honest VM and the store's memory notice of it.

mod support;

use std::io::BufRead;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{Client, HELPER_SOCKET, Helper, Server, come_and_go, eventually, page, stats};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};
use vmm_dedup_protocol::{PAGE_SIZE, SLOTS_PER_SEGMENT, STAGING_PAGES};

/// A small store, in bytes.
const MAX: u64 = 64 << 20;

/// So many slots come and go that nobody acknowledges, and for so long.
const CHURNED: u64 = 300_000;
const ATTACK: Duration = Duration::from_secs(10);
/// A slot in limbo takes some 60 bytes. Two thirds of that for each that ever was there is more than the store may need.
const BYTES: u64 = 40;
/// What a store of that size has when it is over, beside hashes of slots: the index's file keeps the memory of those that were written.
const REST: u64 = 4 << 20;
const HASH: u64 = 16;

#[test]
fn who_acknowledges_nothing_does_not_make_the_store_grow() {
    let server = Server::start(|config| (config.max_bytes, config.answer_seconds) = (MAX, 1));
    let mut honest = Client::connect(&server.socket, "honest");
    let shared = honest.publish(&[page(1)])[0].unwrap();
    let mut churner = Helper::start("churner", &server.socket);
    assert_eq!(churner.ask("begin"), "begun");
    let (start, mut most, mut limbo, mut seed) = (Instant::now(), 0, 0, 1 << 40);
    let (mut got, mut tried, mut churned) = (0, 0, 0);
    while start.elapsed() < ATTACK || churned < CHURNED {
        assert!(start.elapsed() < 12 * ATTACK, "only {churned} slots");
        churned = churner.ask("count").parse().unwrap();
        let store = stats(&server.socket).store;
        (most, limbo) = (store.metadata_bytes.max(most), store.slots_limbo.max(limbo));
        // What the others have they have, and all find it, wherever it moves; and they get more.
        assert!(honest.content(shared) == page(1));
        eventually(|| honest.find(&page(1)).is_some());
        (seed, tried) = (seed + 1, tried + 1);
        if let Some(slot) = honest.publish(&[page(seed)])[0] {
            got += 1;
            honest.batch(&[], &[], &[(slot, -1)]);
        }
        honest.acknowledge();
        honest.release();
        std::thread::sleep(Duration::from_millis(50));
    }
    println!(
        "{churned} slots came and went, {limbo} of them waited at most; metadata was {} KiB at most, the honest VM got {got} of {tried}",
        most >> 10
    );
    assert!(most <= churned * BYTES, "{most} for {churned}");
    assert!(got > tried / 2, "{got} of {tried}");
    churner.kill();
    let mut rest = stats(&server.socket).store;
    eventually(|| {
        honest.acknowledge();
        honest.release();
        rest = stats(&server.socket).store;
        rest.slots_limbo == 0 && rest.metadata_bytes <= REST + limbo * HASH
    });
    println!("in the end: {} KiB", rest.metadata_bytes >> 10);
}

/// A page whose content takes no time to make.
fn cheap(seed: u64) -> PageWords {
    let mut words = page(0);
    [0, 100, PAGE_WORDS - 1].iter().for_each(|at| words[*at] = seed);
    words
}

/// Publishes pages and drops them, and lets go of segments, but acknowledges no epoch; until it is cut off.
fn churn(path: &Path, seed: &AtomicU64, churned: &AtomicU64) {
    let mut evil = Client::connect_with(path, "evil", 1 << 20);
    loop {
        let first = seed.fetch_add(STAGING_PAGES as u64, Ordering::Relaxed);
        let pages: Vec<_> = (first..first + STAGING_PAGES as u64).map(cheap).collect();
        let slots: Vec<_> = evil.publish(&pages).into_iter().flatten().collect();
        churned.fetch_add(slots.len() as u64, Ordering::Relaxed);
        let dropped: Vec<_> = slots.iter().map(|slot| (*slot, -1)).collect();
        evil.send_batch(0, &[], &[], &dropped);
        evil.batch_reply();
        evil.release();
    }
}

/// Not a test but the part of a process that makes slots come and go, and connects again whenever it is cut off.
#[test]
fn churner() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    std::panic::set_hook(Box::new(|_| ()));
    let (path, seed, churned) = (PathBuf::from(path), AtomicU64::new(1 << 20), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for line in std::io::stdin().lock().lines() {
            if line.unwrap() == "count" {
                println!("\n> {}", churned.load(Ordering::Relaxed));
                continue;
            }
            scope.spawn(|| {
                loop {
                    let cut_off = catch_unwind(AssertUnwindSafe(|| churn(&path, &seed, &churned)));
                    assert!(cut_off.is_err());
                    std::thread::sleep(Duration::from_millis(100));
                }
            });
            println!("\n> begun");
        }
    });
}

#[test]
fn what_an_orphan_found_keeps_no_number_and_what_it_told_of_stays() {
    let server = Server::start(|config| config.max_bytes = MAX);
    let mut honest = Client::connect(&server.socket, "honest");
    let found = honest.publish(&[page(9)])[0].unwrap();
    let mut untold = Helper::start("orphan", &server.socket);
    assert_eq!(untold.ask("find"), format!("{found}"));
    // The rest of the first segment, so that what is told lies in another one.
    come_and_go(&mut honest, 1 << 20);
    let mut told = Helper::start("orphan", &server.socket);
    let kept = told.ask("publish");
    assert_eq!(honest.find(&page(7)).map(|slot| format!("{slot}")), Some(kept));
    for orphan in [&mut untold, &mut told] {
        assert_eq!(orphan.ask("hang up"), "done");
    }
    honest.batch(&[], &[], &[(found, -1)]);
    // Numbers come again, that of the segment among them of which the first orphan maps a page.
    let (mut rounds, mut went, mut again) = (0, false, false);
    while rounds < 20 || !again {
        assert!(rounds < 60, "the number of the first segment does not come again");
        rounds += 1;
        assert_eq!(
            come_and_go(&mut honest, (rounds + 1) << 20),
            SLOTS_PER_SEGMENT as usize
        );
        let is_there = honest.segments[0].is_some();
        went |= !is_there;
        again |= went && is_there;
        std::thread::sleep(Duration::from_millis(100));
    }
    let numbers = honest.segments.len();
    println!("{numbers} numbers for {rounds} segments");
    assert!((numbers as u64) < rounds, "{numbers} for {rounds}");
    eventually(|| {
        honest.acknowledge();
        honest.release();
        stats(&server.socket).store.slots_limbo == 0
    });
    // It maps what it found, and what the other one has told of is counted, and found.
    assert_eq!(untold.ask("check"), "the same");
    let slot = honest.find(&page(7)).expect("it is referenced");
    assert_eq!(honest.content(slot), page(7));
    told.kill();
    // Where it has moved, the slot that it moved from waits for who may have read that.
    eventually(|| {
        honest.acknowledge();
        honest.find(&page(7)).is_none()
    });
}

/// Segments of which an orphan has one page each: most of those that there may be.
const SPREAD: u64 = 6;
/// Its pages' seeds begin here.
const OTHERS: u64 = 1 << 40;

#[test]
fn pages_of_orphans_keep_no_segments() {
    let server = Server::start(|config| config.max_bytes = MAX);
    let mut honest = Client::connect(&server.socket, "honest");
    let mut lost = Helper::start("orphan", &server.socket);
    for round in 0..SPREAD {
        lost.ask(&format!("another {round}"));
        // The rest of its segment comes and goes.
        come_and_go(&mut honest, (round + 1) << 20);
    }
    assert_eq!(lost.ask("hang up"), "done");
    // It cannot follow where its pages move, and its segments go all the same.
    let mut store = stats(&server.socket).store;
    let mut round = 100;
    eventually(|| {
        round += 1;
        come_and_go(&mut honest, round << 20);
        store = stats(&server.socket).store;
        store.resident_bytes <= MAX / 2
    });
    // They are where they moved, and counted for as long as the process lives.
    assert_eq!(store.pages_shared, SPREAD);
    for round in 0..SPREAD {
        let slot = honest.find(&page(OTHERS + round)).expect("it is referenced");
        assert_eq!(honest.content(slot), page(OTHERS + round));
    }
    lost.kill();
    eventually(|| {
        honest.acknowledge();
        stats(&server.socket).store.pages_shared == 0
    });
}

/// Not a test but the part of a process that finds or publishes a page, loses its socket, and maps the page for as long as it lives.
#[test]
fn orphan() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let mut client = Some(Client::connect(Path::new(&path), "orphan"));
    let mut kept = None;
    for line in std::io::stdin().lock().lines() {
        match &*line.unwrap() {
            "find" => {
                let client = client.as_mut().unwrap();
                // The segments come before the answer.
                client.acknowledge();
                let slot = client.find(&page(9)).unwrap();
                assert_eq!(client.content(slot), page(9));
                kept = Some((slot, client.segments[slot.segment() as usize].take().unwrap()));
                println!("\n> {slot}");
            }
            "publish" => {
                let slot = client.as_mut().unwrap().publish(&[page(7)])[0].unwrap();
                println!("\n> {slot}");
            }
            other if other.starts_with("another") => {
                let seed = OTHERS + other.split(' ').nth(1).unwrap().parse::<u64>().unwrap();
                let client = client.as_mut().unwrap();
                eventually(|| {
                    client.acknowledge();
                    client.release();
                    client.publish(&[page(seed)])[0].is_some()
                });
                println!("\n> published");
            }
            "hang up" => {
                drop(client.take());
                println!("\n> done");
            }
            _ => {
                let (slot, (_, map)) = kept.as_ref().unwrap();
                let mut words = [0; PAGE_WORDS];
                map.read_page(slot.offset() / PAGE_SIZE, &mut words);
                println!("\n> {}", if words == page(9) { "the same" } else { "another" });
            }
        }
    }
}
