//! The exchange with a live store, message by message.

mod support;

use std::time::Duration;
use support::{Client, PAGES, Server, TICKS, eventually, page, stats};
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::index::{Line, News};
use vmm_dedup_protocol::key::Key;
use vmm_dedup_protocol::message::{Ask, Kind, Staged, Wish, encode};
use vmm_dedup_protocol::socket;
use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::IntoBytes;

#[test]
fn a_page_that_two_vms_have_ends_up_shared() {
    let server = Server::start(|_| ());
    let (mut a, mut b) = (
        Client::connect(&server.socket, "a"),
        Client::connect(&server.socket, "b"),
    );
    let p = page(1);
    let line = a.line_key(&p);

    assert!(a.batch(&[line], &[], &[]).is_empty());
    assert_eq!(b.batch(&[7, line], &[], &[]), [1]);
    b.staging.write_page(0, &p);
    let slot = b.publish_staged(&[line])[0].unwrap();
    assert_eq!(a.line(&p), Some(Line::Sole(slot)));
    assert_eq!(a.batch(&[line], &[7], &[(slot, 1)]), [Ask::LookUp.of(0)]);
    assert_eq!((a.content(slot), b.content(slot)), (p, p));

    let account = stats(&server.socket).store;
    assert_eq!((account.pages_shared, account.pages_sharing), (1, 1));
    // Only b's key 7 is left, which a may not withdraw.
    assert_eq!(
        (account.sightings, account.marks, account.published_total),
        (1, 0, 1)
    );
}

#[test]
fn pages_that_are_alike_in_their_key_lines_are_found_by_their_hashes() {
    let server = Server::start(|_| ());
    let (mut a, mut b) = (
        Client::connect(&server.socket, "a"),
        Client::connect(&server.socket, "b"),
    );
    let (p, mut q) = (page(1), page(1));
    q[0] ^= 1;
    let line = a.line_key(&p);
    assert_eq!(a.line_key(&q), line);
    a.batch(&[line], &[], &[]);
    assert_eq!(b.batch(&[line], &[], &[]), [0]);
    b.staging.write_page(0, &p);
    let slot = b.publish_staged(&[line])[0].unwrap();
    assert_eq!(a.line(&q), Some(Line::Sole(slot)));

    // a compares, and tells. Twice makes no difference.
    a.ambiguous(&[line, line]);
    assert_eq!(a.line(&q), Some(Line::Marked(1)));
    assert_eq!((a.find(&p), a.find(&q)), (Some(slot), None));
    let full = a.full_key(&q);
    assert_eq!(a.batch(&[line, full], &[], &[]), [Ask::LookUp.of(0)]);
    assert_eq!(b.batch(&[full], &[], &[]), [0]);
    let other = b.publish(&[q])[0].unwrap();
    assert_eq!((a.find(&p), a.find(&q)), (Some(slot), Some(other)));
    assert_eq!(a.line(&q), Some(Line::Marked(2)));
    b.batch(&[], &[], &[(slot, -1), (other, -1)]);
    assert_eq!((a.line(&p), a.find(&p), a.find(&q)), (None, None, None));
    let account = stats(&server.socket).store;
    assert_eq!((account.sightings, account.marks, account.slots_limbo), (0, 0, 2));
}

#[test]
fn a_vm_that_got_memory_may_sight_more_pages() {
    const MAX: u64 = 20;
    let server = Server::start(|config| config.max_vm_pages = MAX);
    let report = |client: &Client, pages| {
        let stats = ServiceStats {
            pages,
            ..ServiceStats::default()
        };
        client.send(Kind::Report, stats.as_bytes());
    };
    let mut grown = Client::connect_with(&server.socket, "grown", 2);
    grown.batch(&[1, 2], &[], &[]);
    report(&grown, 3);
    report(&grown, 1); // some went: what was said of it goes with the next batches
    assert!(grown.batch(&[3], &[], &[]).is_empty());
    grown.send_batch(0, &[4], &[], &[]);
    assert!(grown.error().contains("sightings"));

    let mut greedy = Client::connect_with(&server.socket, "greedy", 2);
    report(&greedy, u64::MAX); // counts as the most there may be
    let keys: Vec<u64> = (101..=MAX + 101).collect();
    greedy.send_batch(0, &keys, &[], &[]);
    assert!(greedy.error().contains("sightings"));
}

#[test]
fn a_page_known_by_its_hash_is_found_by_it_although_its_line_key_was_sole() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let p = page(1);
    a.staging.write_page(0, &p);
    let line = a.line_key(&p);
    let slot = a.publish_staged(&[line])[0];
    assert_eq!(a.publish(&[p]), [slot]);
    assert_eq!(a.line(&p), Some(Line::Marked(1)));
    assert_eq!(a.find(&p), slot);
}

#[test]
fn slots_repeat_the_gaps_between_pages() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let staged = |client: &Client, gaps: &[u16]| -> Vec<u64> {
        let pages = (100u64..).zip(gaps).enumerate();
        pages
            .map(|(at, (seed, gap))| {
                client.staging.write_page(at, &page(seed));
                let key = Key::try_new(client.line_key(&page(seed))).unwrap();
                Staged {
                    key,
                    gap: *gap,
                    wish: Wish::Slot,
                }
                .raw()
            })
            .collect()
    };
    let list = staged(&a, &[0, 0, 3, 1, 0, 7]);
    let slots = a.publish_staged(&list);
    let numbers: Vec<u32> = slots.iter().map(|s| s.unwrap().number()).collect();
    assert_eq!(numbers, [0, 1, 5, 7, 8, 16]);
    assert_eq!(stats(&server.socket).store.resident_bytes, 6 * 4096);
    // The gaps are free for others.
    let others: Vec<u32> = (0..10)
        .map(|n| a.publish(&[page(n)])[0].unwrap().number())
        .collect();
    assert_eq!(others, [2, 3, 4, 6, 9, 10, 11, 12, 13, 14]);
    for (at, slot) in slots.into_iter().enumerate() {
        assert_eq!(a.content(slot.unwrap()), page(100 + at as u64));
    }
    a.publish_staged_unanswered(&[8 << 48]);
    assert!(a.error().contains("gap is 8"));
}

#[test]
fn a_number_is_given_away_only_after_everyone_has_looked_again_and_let_go() {
    let server = Server::start(|config| config.max_bytes = 4096);
    let (mut a, mut b) = (
        Client::connect(&server.socket, "a"),
        Client::connect(&server.socket, "b"),
    );
    let slot = a.publish(&[page(1)])[0].unwrap();
    a.batch(&[], &[], &[(slot, -1)]);
    assert_eq!(a.find(&page(1)), None);
    assert_eq!(
        a.publish(&[page(2)]),
        [None],
        "what is dead takes its room until its segment goes"
    );
    eventually(|| {
        a.acknowledge();
        a.retired == [0]
    });
    let account = stats(&server.socket).store;
    assert_eq!((account.slots_limbo, account.refused_full_total), (1, 1));
    let next = a.publish(&[page(2)])[0].unwrap();
    assert_eq!(next.segment(), 1);
    // b found it before and tells only now. It is counted, and nobody finds it.
    b.send_batch(1, &[], &[], &[(slot, 1)]);
    b.batch_reply();
    assert_eq!(
        (stats(&server.socket).store.slots_limbo, a.find(&page(1))),
        (0, None)
    );
    a.release();
    b.batch(&[], &[], &[(slot, -1)]);
    b.release();
    let another = |a: &mut Client, last: Slot, seed| {
        a.batch(&[], &[], &[(last, -1)]);
        eventually(|| {
            a.acknowledge();
            a.retired == [last.segment()]
        });
        a.release();
        std::thread::sleep(TICKS);
        a.publish(&[page(seed)])[0].unwrap()
    };
    // b has not looked again since the first page died.
    let next = another(&mut a, next, 3);
    assert_eq!(next.segment(), 2);
    b.acknowledge();
    assert_eq!(another(&mut a, next, 4).segment(), 0);
}

#[test]
fn who_releases_what_he_references_or_what_is_there_is_cut_off() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    a.publish(&[page(1)]);
    a.retired.push(0);
    a.release();
    assert!(a.error().contains("Released"));
}

#[test]
fn neighbours_get_neighbouring_slots_and_twins_one_slot() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let pages: Vec<_> = [1, 2, 1, 3, 2].into_iter().map(page).collect();
    let slots: Vec<_> = a
        .publish(&pages)
        .into_iter()
        .map(|s| s.unwrap().number())
        .collect();
    assert_eq!(slots, [0, 1, 0, 3, 1]);
    let account = stats(&server.socket).store;
    assert_eq!(
        (
            account.pages_shared,
            account.pages_sharing,
            account.resident_bytes
        ),
        // Memory comes for the whole publication at once; what twins left over is free for others.
        (3, 2, 5 * 4096)
    );
}

#[test]
fn a_page_that_is_not_what_was_announced_gets_no_slot() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    a.staging.write_page(0, &page(1));
    a.staging.write_page(1, &page(2));
    let keys = [a.full_key(&page(9)), a.full_key(&page(2))];
    let slots = a.publish_staged(&keys);
    assert_eq!(slots[0], None);
    assert_eq!(a.content(slots[1].unwrap()), page(2));
}

#[test]
fn only_one_holder_is_asked_and_another_when_it_does_not_deliver() {
    let server = Server::start(|_| ());
    let mut clients: Vec<_> = ["a", "b", "c", "d"]
        .iter()
        .map(|n| Client::connect(&server.socket, n))
        .collect();
    let full = clients[0].full_key(&page(1));
    let news = clients[0].index.news_position();
    let mut sight = |n: usize| clients[n].batch(&[full], &[], &[]).len();
    assert_eq!([sight(0), sight(1), sight(2)], [0, 1, 0]);
    // b sends something else instead of the page.
    clients[1].acknowledge();
    let told = || clients[0].index.news_since(news);
    let again = |times| News::Keys(vec![Key::try_new(full).unwrap(); times]);
    assert_eq!(told(), again(1), "c is not asked unless it sights the page anew");
    // b is not asked again at once, and nobody is a second one because of what he told before.
    assert!(clients[1].batch(&[full], &[], &[]).is_empty());
    assert!(clients[1].batch(&[full], &[], &[]).is_empty());
    assert_eq!(clients[3].batch(&[full], &[], &[]), [0]);
    assert_eq!(
        clients[3].publish_staged(&[full]),
        [None],
        "another page is staged"
    );
    assert_eq!(clients[0].index.news_since(news), again(2));
}

#[test]
fn a_page_that_a_full_store_passed_over_is_asked_for_when_there_is_room() {
    let server = Server::start(|config| config.max_bytes = 4096);
    let mut clients: Vec<_> = ["a", "b"]
        .iter()
        .map(|n| Client::connect(&server.socket, n))
        .collect();
    let slot = clients[0].publish(&[page(1)])[0].unwrap();
    let keys = [2, 3].map(|seed| clients[0].full_key(&page(seed)));
    let news = clients[0].index.news_position();
    for client in &mut clients {
        assert!(client.batch(&keys, &[], &[]).is_empty());
    }
    // Who was first has it no more; a second one still has.
    clients[0].batch(&[], &[keys[0]], &[]);
    assert_eq!(stats(&server.socket).store.sightings, 2);
    clients[0].batch(&[], &[], &[(slot, -1)]);
    eventually(|| {
        clients.iter_mut().for_each(Client::acknowledge);
        clients[0].index.news_position() > news
    });
    // There is room for one page: of one they are told in this second.
    let News::Keys(told) = clients[0].index.news_since(news) else {
        panic!("the ring is longer");
    };
    let told = told[0];
    assert!(clients[1].batch(&[told.raw()], &[], &[]).is_empty());
    assert_eq!(clients[0].batch(&[told.raw()], &[], &[]), [0]);
    let seed = if told.raw() == keys[0] { 2 } else { 3 };
    assert!(clients[0].publish(&[page(seed)])[0].is_some());
}

#[test]
fn a_page_that_found_no_slot_when_it_was_handed_over_is_asked_for_again() {
    let server = Server::start(|config| config.max_bytes = 4096);
    let mut clients: Vec<_> = ["a", "b", "c"]
        .iter()
        .map(|n| Client::connect(&server.socket, n))
        .collect();
    let keys = [2, 3].map(|seed| clients[0].full_key(&page(seed)));
    assert!(clients[0].batch(&keys, &[], &[]).is_empty());
    // There is room for one page, and nobody knows who will be first.
    assert_eq!(clients[1].batch(&keys[..1], &[], &[]), [0]);
    assert_eq!(clients[2].batch(&keys[1..], &[], &[]), [0]);
    for (who, seed) in [(1, 2), (2, 3)] {
        clients[who].staging.write_page(0, &page(seed));
    }
    let slot = clients[1].publish_staged(&keys[..1])[0].unwrap();
    assert_eq!(clients[2].publish_staged(&keys[1..]), [None]);
    let news = clients[0].index.news_position();
    clients[1].batch(&[], &[], &[(slot, -1)]);
    eventually(|| {
        clients.iter_mut().for_each(Client::acknowledge);
        clients[0].index.news_position() > news
    });
    let told = clients[0].index.news_since(news);
    let News::Keys(told) = told else {
        panic!("the ring is longer")
    };
    assert_eq!(told[0].raw(), keys[1]);
}

#[test]
fn who_sights_what_the_index_has_is_told_to_look_again() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let keys = [a.line_key(&page(1)), a.line_key(&page(2))];
    a.publish(&[page(1)])[0].unwrap();
    assert_eq!(a.batch(&keys, &[], &[]), [Ask::LookUp.of(0)]);
    assert_eq!(a.batch(&keys, &[], &[]), [Ask::LookUp.of(0), Ask::Publish.of(1)]);
}

#[test]
fn duplicates_within_one_vm_and_one_batch_count() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let (line, full) = (a.line_key(&page(1)), a.full_key(&page(1)));
    assert_eq!(a.batch(&[line, line, full, full], &[], &[]), [1, 3]);
}

type Offence<'a> = Box<dyn Fn(&Client) + 'a>;

#[test]
fn what_breaks_the_rules_is_named_and_ends_the_connection() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let slot = a.publish(&[page(1)])[0].unwrap();
    let other = vmm_dedup_protocol::Slot::try_new(99).unwrap();
    let cases: [(&str, Offence<'_>); 8] = [
        (
            "were dropped, but this connection holds 0",
            Box::new(|c| c.send_batch(1, &[], &[], &[(slot, -1)])),
        ),
        (
            "holds no page",
            Box::new(|c| c.send_batch(1, &[], &[], &[(other, 1)])),
        ),
        (
            "but the index is only at",
            Box::new(|c| c.send_batch(99, &[], &[], &[])),
        ),
        ("key is", Box::new(|c| c.send_batch(1, &[u64::MAX], &[], &[]))),
        (
            "not expected here",
            Box::new(|c| send(c, &encode(Kind::Index, &[&[0; 8]]))),
        ),
        ("does not fit its kind", Box::new(|c| send(c, &[1, 2, 3]))),
        (
            "does not fit its kind",
            Box::new(|c| send(c, &encode(Kind::Goodbye, &[&[0; 8]]))),
        ),
        (
            "more references than a count",
            Box::new(|c| {
                c.send_batch(
                    1,
                    &[],
                    &[],
                    &[(slot, i32::MAX), (slot, i32::MAX), (slot, i32::MAX)],
                );
            }),
        ),
    ];
    for (text, case) in &cases {
        let mut c = Client::connect(&server.socket, "c");
        case(&c);
        let error = c.error();
        assert!(error.contains(text), "{error}");
    }
    assert_eq!(stats(&server.socket).store.malformed_total, cases.len() as u64);
    assert_eq!(a.content(slot), page(1));
}

fn send(client: &Client, record: &[u8]) {
    socket::send(&client.socket, record, &[]).unwrap();
}

#[test]
fn sightings_are_bounded_by_the_announced_pages() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    for first in (0..PAGES - 2048).step_by(2048) {
        a.batch(&(first..first + 2048).collect::<Vec<_>>(), &[], &[]);
    }
    a.send_batch(1, &(PAGES..PAGES + 2048).collect::<Vec<_>>(), &[], &[]);
    assert!(a.error().contains("for 100000 announced pages"));
    eventually(|| stats(&server.socket).store.sightings == 0);
}

#[test]
fn the_index_grows_under_its_readers() {
    let server = Server::start(|_| ());
    let (mut a, mut b) = (
        Client::connect(&server.socket, "a"),
        Client::connect(&server.socket, "b"),
    );
    let start = a.index_file_len();
    for first in (0..40_000).step_by(500) {
        let pages: Vec<_> = (first..first + 500).map(page).collect();
        assert!(a.publish(&pages).iter().all(Option::is_some));
    }
    assert!(a.index_file_len() > start);
    assert!(b.index.retired());
    b.acknowledge();
    assert!(!b.index.retired());
    for seed in [0, 20_000, 39_999] {
        let slot = b.find(&page(seed)).unwrap();
        assert_eq!(b.content(slot), page(seed));
    }
}

impl Client {
    fn index_file_len(&self) -> u64 {
        rustix::fs::fstat(&self.index_file)
            .unwrap()
            .st_size
            .cast_unsigned()
    }
}

#[test]
fn an_empty_segment_is_retired() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let slot = a.publish(&[page(1)])[0].unwrap();
    a.batch(&[], &[], &[(slot, -1)]);
    eventually(|| {
        a.acknowledge();
        a.segments[0].is_none()
    });
    a.release();
    eventually(|| stats(&server.socket).store.resident_bytes == 0);
    let again = a.publish(&[page(2)])[0].unwrap();
    assert_eq!(a.content(again), page(2));
}

#[test]
fn a_slot_is_written_once() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let slots = a.publish(&[page(1), page(2)]);
    a.batch(&[], &[], &[(slots[0].unwrap(), -1)]);
    a.acknowledge();
    let account = stats(&server.socket).store;
    assert_eq!((account.pages_shared, account.slots_limbo), (1, 0));
    let others: Vec<_> = (10..30)
        .map(|seed| a.publish(&[page(seed)])[0].unwrap())
        .collect();
    assert!(!others.contains(&slots[0].unwrap()));
    assert_eq!(a.content(slots[0].unwrap()), page(1));
}

#[test]
fn who_does_not_greet_is_sent_away() {
    let server = Server::start(|_| ());
    let socket = socket::connect(&server.socket).unwrap();
    let start = std::time::Instant::now();
    let mut buffer = vmm_dedup_protocol::message::aligned_buffer();
    let answer = loop {
        match socket::receive(&socket, &mut buffer) {
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            other => break other.unwrap().unwrap(),
        }
    };
    let elapsed = start.elapsed();
    assert!(elapsed > Duration::from_secs(9) && elapsed < Duration::from_secs(60));
    let message = answer.parse(&buffer).unwrap();
    assert!(matches!(message, vmm_dedup_protocol::message::Message::Error(text) if text.contains("Hello")));
}

#[test]
fn who_sends_and_never_reads_is_cut_off() {
    let server = Server::start(|_| ());
    let a = Client::connect(&server.socket, "a");
    let record = vmm_dedup_protocol::message::encode_batch(1, &[], &[], &[], &[]);
    let cut_off = (0..1_000_000).any(|_| socket::send(&a.socket, &record, &[]).is_err());
    assert!(cut_off);
}

#[test]
fn clients_cannot_write_segments_or_the_index() {
    use vmm_dedup_protocol::mapping::Mapping;
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let slot = a.publish(&[page(1)])[0].unwrap();
    let segment = &a.segments[slot.segment() as usize].as_ref().unwrap().0;
    for file in [segment, &a.index_file] {
        assert!(Mapping::read_write(file, 4096).is_err());
        assert!(rustix::io::pwrite(file, &[1], 0).is_err());
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
        let again = std::fs::OpenOptions::new().read(true).write(true).open(path);
        let again = again.expect("the file's mode lets its owner reopen it: the seal has to hold");
        assert!(Mapping::read_write(&again, 4096).is_err());
        assert!(rustix::io::pwrite(&again, &[1], 0).is_err());
        assert!(rustix::fs::ftruncate(&again, 0).is_err());
    }
    assert_eq!(a.content(slot), page(1));
}

#[test]
fn a_vm_with_a_taken_name_gets_another() {
    let server = Server::start(|_| ());
    let _a = Client::connect(&server.socket, "twin");
    let _b = Client::connect(&server.socket, "twin");
    assert_eq!(stats(&server.socket).vms, 2);
}
