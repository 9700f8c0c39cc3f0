//! A huge page of a guest that is published as one.

mod support;

use support::{Client, Server, page};
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::{Staged, Wish};
use vmm_dedup_protocol::{HUGE_PAGES, Slot};

/// Publishes this many pages from `seed` on, as a huge page.
fn publish(client: &mut Client, seed: u64, pages: usize) -> Vec<Slot> {
    let staged = (seed..).zip(0..pages).map(|(seed, at)| {
        client.staging.write_page(at, &page(seed));
        let key = Key::try_new(client.line_key(&page(seed))).unwrap();
        let wish = if at == 0 { Wish::HugePage } else { Wish::Slot };
        Staged { key, gap: 0, wish }.raw()
    });
    let staged: Vec<u64> = staged.collect();
    let slots = client.publish_staged(&staged);
    slots.into_iter().map(Option::unwrap).collect()
}

fn numbers(slots: &[Slot]) -> Vec<u32> {
    slots.iter().map(|slot| slot.number()).collect()
}

#[test]
fn its_slots_lie_as_it_does_and_hold_its_pages() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    assert_eq!(numbers(&publish(&mut a, 1, 3)), [0, 1, 2], "that is none");
    let slots = publish(&mut a, 1000, HUGE_PAGES);
    assert_eq!(numbers(&slots), (512..1024).collect::<Vec<u32>>());
    for (slot, seed) in slots.iter().zip(1000..) {
        assert_eq!(a.content(*slot), page(seed));
        assert_eq!(a.find(&page(seed)), Some(*slot));
    }
}

#[test]
fn pages_that_have_slots_keep_them() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let known = publish(&mut a, 5, 1);
    let slots = publish(&mut a, 1, HUGE_PAGES);
    assert_eq!(slots[4], known[0]);
    assert!(
        slots
            .iter()
            .zip(1..)
            .all(|(slot, seed)| a.content(*slot) == page(seed))
    );
    // Its own place among the others is free.
    let next = publish(&mut a, 10_000, 1);
    assert!(numbers(&next)[0] < 1024);
}

#[test]
fn a_wish_that_is_none_is_refused() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    a.publish_staged_unanswered(&[3 << 62]);
    assert!(a.error().contains("wish is 3"));
}
