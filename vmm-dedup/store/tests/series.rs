//! Content that is in a series of slots.

mod support;

use support::{Client, Server, page, stats};
use vmm_dedup_protocol::index::Line;
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::{Staged, Wish};
use vmm_dedup_protocol::{SERIES, Slot};

/// The least pages of a VM that may have a series made.
const PAGES: u64 = 64 * (SERIES as u64 - 1);

/// Publishes page `seed`, wanting a series of it.
fn ask(client: &mut Client, seed: u64) -> Slot {
    client.staging.write_page(0, &page(seed));
    let key = Key::try_new(client.line_key(&page(seed))).unwrap();
    let staged = Staged {
        key,
        gap: 0,
        wish: Wish::Series,
    };
    client.publish_staged(&[staged.raw()])[0].unwrap()
}

fn publish(client: &mut Client, seed: u64) -> Slot {
    client.staging.write_page(0, &page(seed));
    let key = client.line_key(&page(seed));
    client.publish_staged(&[key])[0].unwrap()
}

fn nth(first: Slot, n: u32) -> Slot {
    first.checked_add_in_segment(n).unwrap()
}

#[test]
fn a_series_holds_the_page_in_each_of_its_slots_and_goes_with_its_first() {
    let server = Server::start(|_| ());
    let mut a = Client::connect_with(&server.socket, "a", PAGES);
    let mut b = Client::connect_with(&server.socket, "b", 10);
    let p = page(1);
    let single = publish(&mut a, 1);
    let first = ask(&mut a, 1);
    assert_eq!(b.line(&p), Some(Line::Series(first)));
    assert_eq!(ask(&mut b, 1), first, "there is one already");
    assert!((0..SERIES).all(|n| b.content(nth(first, n)) == p));
    let sixth = Line::Series(first).slot_for(5).unwrap();
    assert_eq!(sixth, nth(first, 5));
    b.batch(&[], &[], &[(sixth, 40), (first, -1)]);
    let account = stats(&server.socket).store;
    let slots = u64::from(SERIES) + 1;
    assert_eq!((account.pages_shared, account.pages_sharing), (slots, 42 - slots));

    // The single slot is like others, but for not being found.
    a.batch(&[], &[], &[(single, -1)]);
    assert_eq!(b.line(&p), Some(Line::Series(first)));
    // The last one who maps the first slot ends the series. What others map of it stays.
    a.batch(&[], &[], &[(first, -1)]);
    assert_eq!((b.line(&p), b.find(&p)), (None, None));
    let account = stats(&server.socket).store;
    assert_eq!((account.pages_shared, account.slots_limbo), (1, slots - 1));
    assert_eq!(b.content(sixth), p);
    b.batch(&[], &[], &[(sixth, -40)]);
    assert_eq!(stats(&server.socket).store.pages_shared, 0);
    let again = publish(&mut a, 1);
    assert_eq!(b.line(&p), Some(Line::Sole(again)));
    let epoch = |client: &mut Client| _ = client.batch(&[], &[], &[]);
    epoch(&mut a);
    epoch(&mut b);
    epoch(&mut a);
    let account = stats(&server.socket).store;
    assert_eq!((account.pages_shared, account.slots_limbo), (1, 0));
}

#[test]
fn whose_key_becomes_ambiguous_is_found_by_its_hash() {
    let server = Server::start(|_| ());
    let mut a = Client::connect_with(&server.socket, "a", PAGES);
    publish(&mut a, 1);
    let first = ask(&mut a, 1);
    let line = a.line_key(&page(1));
    a.ambiguous(&[line]);
    assert_eq!(a.line(&page(1)), Some(Line::Marked(1)));
    assert_eq!(a.find(&page(1)), Some(first));
    assert_eq!(ask(&mut a, 1), first, "an ambiguous key gets none");
    a.batch(&[], &[], &[(first, -2)]);
    assert_eq!((a.line(&page(1)), a.find(&page(1))), (None, None));
}

#[test]
fn a_vm_gets_no_more_series_than_its_share() {
    let server = Server::start(|_| ());
    let mut small = Client::connect_with(&server.socket, "small", PAGES - 1);
    let slot = publish(&mut small, 1);
    assert_eq!(ask(&mut small, 1), slot);
    assert_eq!(small.line(&page(1)), Some(Line::Sole(slot)));

    let mut other = Client::connect_with(&server.socket, "other", 2 * PAGES);
    for seed in 2..5 {
        let slot = publish(&mut other, seed);
        assert_eq!(ask(&mut other, seed) == slot, seed == 4);
    }
}

#[test]
fn content_that_nobody_published_gets_one_slot() {
    let server = Server::start(|_| ());
    let mut a = Client::connect_with(&server.socket, "a", PAGES);
    let slot = ask(&mut a, 1);
    assert_eq!(a.line(&page(1)), Some(Line::Sole(slot)));
    assert_eq!(stats(&server.socket).store.pages_shared, 1);
}

#[test]
fn a_store_without_room_for_a_series_keeps_the_slot() {
    let server = Server::start(|config| config.max_bytes = 1 << 20);
    let mut a = Client::connect_with(&server.socket, "a", PAGES);
    let slots: Vec<Slot> = (0..240).map(|seed| publish(&mut a, seed)).collect();
    assert_eq!(ask(&mut a, 3), slots[3]);
    assert_eq!(stats(&server.socket).store.pages_shared, 240);
}
