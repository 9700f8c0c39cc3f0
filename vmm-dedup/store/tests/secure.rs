//! A store that shares securely: who publishes a page cannot tell whether another one has it.

mod support;

use support::{Client, Server, page, stats};
use vmm_dedup_protocol::key::PageWords;
use vmm_dedup_protocol::{PAGE_SIZE, Slot};

#[test]
fn the_answer_is_a_slot_from_anywhere_whether_the_page_is_new_or_not() {
    let server = Server::start(|config| config.secure = true);
    let (mut a, mut b) = (
        Client::connect(&server.socket, "a"),
        Client::connect(&server.socket, "b"),
    );
    let pages: Vec<PageWords> = (0..400).map(page).collect();
    let published: Vec<Slot> = a.publish(&pages).into_iter().flatten().collect();
    assert_eq!(published.len(), 400);
    let neighbours = published
        .windows(2)
        .filter(|two| two[0].number() + 1 == two[1].number())
        .count();
    assert!(neighbours < 20, "{neighbours}");
    let again: Vec<Slot> = b.publish(&pages).into_iter().flatten().collect();
    assert_eq!(again, published);
    for (page, slot) in pages.iter().zip(&published) {
        assert!(b.content(*slot) == *page);
    }
    let stats = stats(&server.socket);
    assert_eq!(
        (
            stats.store.secure,
            stats.store.pages_shared,
            stats.store.pages_sharing
        ),
        (1, 400, 400)
    );
}

#[test]
fn a_full_store_refuses_pages_whether_it_has_them_or_not() {
    let answer = |old: std::ops::Range<u64>| {
        let server = Server::start(|config| {
            config.secure = true;
            config.max_bytes = 8 * PAGE_SIZE as u64;
        });
        let (mut a, mut b) = (
            Client::connect(&server.socket, "a"),
            Client::connect(&server.socket, "b"),
        );
        let had: Vec<PageWords> = (0..4).map(page).collect();
        assert!(a.publish(&had).into_iter().all(|slot| slot.is_some()));
        let wanted: Vec<PageWords> = old.clone().chain(100..106 - old.end).map(page).collect();
        let slots = b.publish(&wanted);
        slots.iter().map(Option::is_some).collect::<Vec<_>>()
    };
    let room = [true, true, true, true, false, false];
    assert_eq!(answer(0..0), room);
    assert_eq!(answer(0..2), room);
    assert_eq!(answer(0..4), room);
}
