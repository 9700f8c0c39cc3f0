//! Segments that are emptied: what services see of it.

mod support;

use std::time::Duration;
use support::{Client, Server, eventually, page, stats};
use vmm_dedup_protocol::{PAGE_SIZE, SLOTS_PER_SEGMENT, Slot};

const SEGMENT: u64 = SLOTS_PER_SEGMENT as u64;
/// Dead slots for which nothing is moved, as in the store: 4 MiB.
const SLACK: u64 = 1024;

/// Publishes so many pages, in order.
fn publish(client: &mut Client, pages: std::ops::Range<u64>) -> Vec<(u64, Slot)> {
    let seeds: Vec<u64> = pages.collect();
    let mut all = Vec::new();
    for some in seeds.chunks(256) {
        let pages: Vec<_> = some.iter().map(|seed| page(*seed)).collect();
        let slots = client.publish(&pages);
        all.extend(some.iter().copied().zip(slots.into_iter().map(Option::unwrap)));
    }
    all
}

/// Drops the references to slots, and tells that everything was looked up anew.
fn drop_slots(client: &mut Client, slots: &[Slot]) {
    for some in slots.chunks(1000) {
        let refs: Vec<(Slot, i32)> = some.iter().map(|slot| (*slot, -1)).collect();
        client.batch(&[], &[], &refs);
    }
    client.acknowledge();
}

/// Does as a service that follows. Returns where everything is then.
fn follow(client: &mut Client, pages: &mut [(u64, Slot)]) -> usize {
    let (mut refs, mut moved) = (Vec::new(), 0);
    for (seed, slot) in pages {
        if client.evacuated.contains(&slot.segment())
            && let Some(to) = client.forward(*slot)
        {
            assert_eq!(client.content(to), page(*seed), "the page that it moved to");
            assert_eq!(client.content(*slot), page(*seed), "the old one stays");
            refs.extend([(to, 1), (*slot, -1)]);
            *slot = to;
            moved += 1;
        }
    }
    for some in refs.chunks(1000) {
        client.batch(&[], &[], some);
    }
    client.acknowledge();
    client.release();
    moved
}

/// Follows until the store is as small as it should be.
fn until_small(server: &Server, client: &mut Client, pages: &mut [(u64, Slot)]) -> usize {
    let mut moved = 0;
    eventually(|| {
        moved += follow(client, pages);
        let account = stats(&server.socket).store;
        assert_eq!(account.pages_shared, pages.len() as u64);
        let in_use = account.pages_shared * PAGE_SIZE as u64;
        account.resident_bytes <= in_use * 115 / 100 + (8 << 20)
    });
    moved
}

#[test]
fn what_dies_gives_its_memory_back_and_what_lives_moves() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let pages = publish(&mut a, 0..4 * SEGMENT);
    // Of each segment a quarter stays, in stretches of 16.
    let (mut stay, go): (Vec<_>, Vec<_>) = pages.into_iter().partition(|(seed, _)| seed % 64 < 16);
    let go: Vec<Slot> = go.into_iter().map(|(_, slot)| slot).collect();
    drop_slots(&mut a, &go);
    let moved = until_small(&server, &mut a, &mut stay);
    println!("{moved} moved");
    for (seed, slot) in &stay {
        assert_eq!(a.find(&page(*seed)), Some(*slot), "it is found where it is");
        assert_eq!(a.content(*slot), page(*seed));
    }
    // Stretches stayed together.
    let together = stay.windows(2).filter(|pair| {
        let [(seed, slot), (next_seed, next)] = pair else {
            unreachable!()
        };
        next_seed - seed == 1 && slot.checked_add_in_segment(1) == Some(*next)
    });
    assert!(together.count() * 16 >= stay.len() * 14);
    // Whoever comes now finds them as ever.
    let mut b = Client::connect(&server.socket, "b");
    b.acknowledge();
    assert_eq!(b.find(&page(3)), a.find(&page(3)));
    assert_eq!(b.content(b.find(&page(3)).unwrap()), page(3));
    let slots: Vec<Slot> = stay.into_iter().map(|(_, slot)| slot).collect();
    drop_slots(&mut a, &slots);
    eventually(|| {
        b.acknowledge();
        a.acknowledge();
        b.release();
        a.release();
        stats(&server.socket).store.resident_bytes == 0
    });
}

#[test]
fn who_does_not_follow_holds_up_nobody() {
    let server = Server::start(|_| ());
    let (mut a, mut b) = (
        Client::connect(&server.socket, "a"),
        Client::connect(&server.socket, "b"),
    );
    let mut pages = publish(&mut a, 0..2 * SEGMENT);
    // b maps one page, and never says anything again.
    b.acknowledge();
    b.batch(&[], &[], &[(pages[5].1, 1)]);
    let (silent, kept) = (pages[5].1, b.content(pages[5].1));
    for round in 1..5 {
        let (stay, go): (Vec<_>, Vec<_>) = pages.into_iter().partition(|(seed, _)| seed % 8 == 5);
        let go: Vec<Slot> = go.into_iter().map(|(_, slot)| slot).collect();
        drop_slots(&mut a, &go);
        pages = stay;
        pages.extend(publish(
            &mut a,
            round * 10 * SEGMENT..round * 10 * SEGMENT + SEGMENT,
        ));
        std::thread::sleep(Duration::from_millis(1500));
        follow(&mut a, &mut pages);
        follow(&mut a, &mut pages);
    }
    assert_eq!(b.content(silent), kept);
    let account = stats(&server.socket).store;
    assert_eq!(account.pages_shared, pages.len() as u64);
    // What b holds is what was there when it fell silent.
    let in_use = account.pages_shared * PAGE_SIZE as u64;
    let held = (2 * SEGMENT + SLACK) * PAGE_SIZE as u64;
    println!(
        "{} in use, {} resident",
        in_use >> 20,
        account.resident_bytes >> 20
    );
    assert!(account.resident_bytes <= in_use * 115 / 100 + (8 << 20) + held + (64 << 20));
}
