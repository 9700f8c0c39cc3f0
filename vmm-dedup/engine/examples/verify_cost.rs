//! What the verifier's seam costs: ns for a page of a window of 512, by `memcmp` in a bare loop and by
//! [`Verifier`] without an engine and with the CPU as one. `cargo run --release -p vmm-dedup --example verify_cost`
//!
//! Rounds take turns, so that other load hits all alike; the figures are medians. The pages do not fit the second
//! level's cache, as those of a window do not.
#![allow(unsafe_code)] // compares pages by their addresses

use std::hint::black_box;
use std::time::{Duration, Instant};
use vmm_dedup::compare::{Cpu, KeyKind, PageId, Pair, StablePage, Verifier, With};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords, Salt};

const PAGES: usize = 512;
const ROUNDS: usize = 2001;
/// Pages between two questions whether somebody waits.
const BLOCK: usize = 16;

/// Addresses of a taken page and of its slot; without, it is to be zeros.
#[derive(Clone, Copy)]
struct Item {
    taken: usize,
    slot: Option<usize>,
}

/// A way to compare, which notes what is equal.
type Timed<'a> = &'a mut dyn FnMut(&mut [bool]);

fn main() {
    println!("ns a page         memcmp  verifier  ratio  as an engine");
    let content = |page: usize| -> PageWords { std::array::from_fn(|word| (page * 7919 + word) as u64 | 1) };
    let slots: Vec<PageWords> = (0..PAGES).map(content).collect();
    let changed = |word: usize| {
        let mut pages = slots.clone();
        pages.iter_mut().for_each(|page| page[word] ^= 1 << 40);
        pages
    };
    let zeros = vec![[0; PAGE_WORDS]; PAGES];
    measure("equal", &slots.clone(), Some(&slots));
    measure("first word", &changed(0), Some(&slots));
    measure("middle", &changed(PAGE_WORDS / 2), Some(&slots));
    measure("last word", &changed(PAGE_WORDS - 1), Some(&slots));
    measure("zeros", &zeros, None);
    measure("not zeros", &slots, None);
}

fn measure(name: &str, taken: &[PageWords], slots: Option<&[PageWords]>) {
    let item = |at: usize| Item {
        taken: taken[at].as_ptr() as usize,
        slot: slots.map(|slots| slots[at].as_ptr() as usize),
    };
    let items: Vec<Item> = (0..PAGES).map(item).collect();
    let mut alone = Verifier::new(false, Duration::from_secs(1));
    let mut engine = Verifier::new(true, Duration::from_secs(1));
    let cpu = Box::new(Cpu::new(KeyKind::Lines(Salt(0))));
    engine.attach(cpu).expect("the CPU takes pairs");
    let mut times: [Vec<f64>; 3] = Default::default();
    let mut found = [0; 3];
    for _ in 0..ROUNDS {
        let mut outcomes = [[true; PAGES]; 3];
        let timed: [Timed<'_>; 3] = [
            &mut |outcomes| by_memcmp(black_box(&items), outcomes),
            &mut |outcomes| by_verifier(&mut alone, black_box(&items), outcomes),
            &mut |outcomes| by_verifier(&mut engine, black_box(&items), outcomes),
        ];
        for (at, by) in timed.into_iter().enumerate() {
            let start = Instant::now();
            by(&mut outcomes[at]);
            times[at].push(start.elapsed().as_nanos() as f64 / PAGES as f64);
            found[at] += outcomes[at].iter().filter(|equal| **equal).count();
        }
    }
    assert!(found.iter().all(|equal| *equal == found[0]), "they do not agree");
    let [memcmp, verifier, engine] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    println!(
        "{name:<15} {memcmp:>8.1} {verifier:>9.1} {:>6.3} {engine:>13.1}",
        verifier / memcmp
    );
}

/// As the service did it without the seam.
#[inline(never)]
fn by_memcmp(items: &[Item], outcomes: &mut [bool]) {
    for (items, outcomes) in items.chunks(BLOCK).zip(outcomes.chunks_mut(BLOCK)) {
        if !black_box(true) {
            return;
        }
        for (item, equal) in items.iter().zip(outcomes) {
            // SAFETY: pages of our own that nobody writes.
            *equal = unsafe {
                match item.slot {
                    Some(slot) => libc::memcmp(item.taken as *const _, slot as *const _, PAGE_WORDS * 8) == 0,
                    None => std::slice::from_raw_parts(item.taken as *const u64, PAGE_WORDS)
                        .chunks_exact(8)
                        .all(|line| line.iter().fold(0, |all, w| all | w) == 0),
                }
            };
        }
    }
}

#[inline(never)]
fn by_verifier(verifier: &mut Verifier, items: &[Item], outcomes: &mut [bool]) {
    let pairs = items.iter().zip(outcomes).map(|(item, equal)| {
        // SAFETY: pages of our own that nobody writes.
        let page = |address| unsafe { StablePage::at(address) };
        let id = PageId(0);
        let taken = page(item.taken);
        let with = item
            .slot
            .map_or(With::Zeros, |slot| With::Slot { id, page: page(slot) });
        (Pair { taken, with }, equal)
    });
    verifier.verify(pairs, |equal| **equal = false, || black_box(true));
}
