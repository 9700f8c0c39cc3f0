//! The store writes, a service reads: what the orderings allow, walked through.
//!
//! A page is a cell whose accesses loom checks: reading it while it is written, or without having seen it written, is an
//! error whatever the value. A socket is an atomic of its own.

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use std::sync::atomic::AtomicUsize;
use vmm_dedup_protocol_loom::forward;
use vmm_dedup_protocol_loom::index::{IndexReader, IndexWriter, Line, News, create};
use vmm_dedup_protocol_loom::key::{Key, PageHash};
use vmm_dedup_protocol_loom::mapping::Mapping;
use vmm_dedup_protocol_loom::{SLOTS_PER_SEGMENT, Slot};

/// Entries of the table.
const CAPACITY: usize = 4;

/// Times that one of three threads is stopped where it could go on.
const PREEMPTIONS: usize = 3;

/// Walks through a model. One that is walked through in a few runs leaves nothing to chance, and shows nothing.
fn explore(least_runs: usize, model: impl Fn() + Send + Sync + 'static) {
    explore_with(Builder::new(), least_runs, model);
}

/// Walks through a model of a store and two services. Without a bound neither model is through in 100 s. Of the orders left
/// out each stops threads more often.
fn explore_three(least_runs: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    explore_with(builder, least_runs, model);
}

fn explore_with(builder: Builder, least_runs: usize, model: impl Fn() + Send + Sync + 'static) {
    // Not loom's: it counts over all runs.
    let runs: &'static AtomicUsize = Box::leak(Box::new(AtomicUsize::new(0)));
    builder.check(move || {
        runs.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let runs = runs.load(Ordering::Relaxed);
    println!("{runs} runs");
    assert!(runs >= least_runs, "only {runs} runs");
}

fn slot(number: u32) -> Slot {
    Slot::try_new(number).unwrap()
}

/// Line keys whose places in the table all begin at the same word.
fn keys_of_one_home(count: usize) -> Vec<Key> {
    // The index multiplies a key's upper 32 bits by 0x9e3779b1 (modulo 2^32), and the product's uppermost bits are the place.
    let is_first = |tag: &u32| tag.wrapping_mul(0x9e37_79b1) >> 30 == 0;
    let tags = (1u32..).filter(is_first);
    tags.map(|tag| Key::try_new(u64::from(tag) << 16).unwrap())
        .take(count)
        .collect()
}

/// Pages of a store.
struct Pages(Vec<UnsafeCell<u64>>);

// SAFETY: loom reports every access that is not ordered with a write.
#[allow(unsafe_code)]
unsafe impl Sync for Pages {}

impl Pages {
    fn new(count: usize) -> Arc<Self> {
        Arc::new(Self((0..count).map(|_| UnsafeCell::new(0)).collect()))
    }

    #[allow(unsafe_code)]
    fn write(&self, page: u32, content: u64) {
        // SAFETY: loom has checked that nobody reads the cell now; the pointer does not leave the closure.
        self.0[page as usize].with_mut(|cell| unsafe { *cell = content });
    }

    #[allow(unsafe_code)]
    fn read(&self, page: u32) -> u64 {
        // SAFETY: loom has checked that nobody writes the cell now; the pointer does not leave the closure.
        self.0[page as usize].with(|cell| unsafe { *cell })
    }
}

/// An index, and a service's view of it.
fn index() -> (IndexWriter, IndexReader) {
    let (writer, map) = create(CAPACITY);
    (writer, IndexReader::new(map).unwrap())
}

/// An index, and the views of it that two services have.
fn index_of_two() -> (IndexWriter, [IndexReader; 2]) {
    let (writer, map) = create(CAPACITY);
    let views = [map.clone(), map].map(|map| IndexReader::new(map).unwrap());
    (writer, views)
}

/// What a service has told the store: the newest epoch that it acknowledges, and whether it references the slot.
#[derive(Default)]
struct Socket {
    told: AtomicU64,
}

impl Socket {
    const REFERENCE: u64 = 1 << 32;

    fn tell(&self, epoch: u64, reference: bool) {
        let reference = if reference { Self::REFERENCE } else { 0 };
        self.told.store(epoch | reference, Ordering::Release);
    }

    /// Whether the slot that left the index at this epoch is free.
    fn frees(&self, epoch: u64) -> bool {
        let told = self.told.load(Ordering::Acquire);
        told & Self::REFERENCE == 0 && told >= epoch
    }
}

#[test]
fn who_finds_a_line_key_finds_its_page() {
    explore(5, || {
        let (mut store, service) = index();
        let (pages, key) = (Pages::new(1), keys_of_one_home(1)[0]);
        let written = pages.clone();
        let writer = thread::spawn(move || {
            written.write(0, 7);
            store.set_line(key, Line::Sole(slot(0)));
        });
        if let Some(line) = service.line(key) {
            assert_eq!(line, Line::Sole(slot(0)));
            assert_eq!(pages.read(0), 7);
        }
        writer.join().unwrap();
    });
}

#[test]
fn who_finds_a_hash_finds_its_page() {
    explore(5, || {
        let (mut store, service) = index();
        let pages = Pages::new(2);
        let hash = PageHash(3 << 64 | 5 << 20);
        let written = pages.clone();
        let writer = thread::spawn(move || {
            written.write(1, 7);
            store.insert_slot(hash, slot(1));
        });
        if let Some(found) = service.slot_of(hash) {
            assert_eq!((found, pages.read(1)), (slot(1), 7));
        }
        writer.join().unwrap();
    });
}

/// What a service does between reading the epoch and telling.
#[derive(Clone, Copy, PartialEq)]
enum Batch {
    /// It looks for the page.
    LooksUp,
    /// It is about other pages.
    OfOthers,
}

/// A service tells of each batch what it found, with the epoch that it read before. `find` looks for the page.
fn tell_all(
    service: &IndexReader,
    socket: &Socket,
    pages: &Pages,
    batches: [Batch; 2],
    find: impl Fn(&IndexReader) -> bool,
) {
    let mut reference = false;
    for batch in batches {
        let epoch = service.epoch();
        if batch == Batch::LooksUp && find(service) {
            assert_eq!(pages.read(0), 1, "the slot is another page's");
            reference = true;
        }
        socket.tell(epoch, reference);
    }
}

const LATE: [Batch; 2] = [Batch::OfOthers, Batch::LooksUp];
const TWICE: [Batch; 2] = [Batch::LooksUp, Batch::LooksUp];

/// The store takes a page out of the index, and writes another one into its slot as soon as it is free.
fn reuse_while_looked_up(batches: [Batch; 2]) {
    let (mut store, service) = index();
    let (pages, key) = (Pages::new(1), keys_of_one_home(1)[0]);
    pages.write(0, 1);
    store.set_line(key, Line::Sole(slot(0)));
    let socket = Arc::new(Socket::default());
    let (told, seen) = (socket.clone(), pages.clone());
    let thread = thread::spawn(move || {
        tell_all(&service, &told, &seen, batches, |index| index.line(key).is_some());
    });
    store.remove_line(key);
    let epoch = store.advance_epoch();
    if socket.frees(epoch) {
        pages.write(0, 2);
    }
    thread.join().unwrap();
}

#[test]
fn a_slot_that_was_looked_up_is_not_rewritten_before_that_was_told() {
    explore(400, || reuse_while_looked_up(TWICE));
}

#[test]
fn a_slot_is_not_found_any_more_once_its_epoch_was_told() {
    explore(100, || reuse_while_looked_up(LATE));
}

/// As [`reuse_while_looked_up`], with two services, each in its way. The slot is free when both have told.
#[test]
fn a_slot_that_two_looked_up_is_not_rewritten_before_both_have_told() {
    explore_three(10_000, || {
        let (mut store, services) = index_of_two();
        let (pages, key) = (Pages::new(1), keys_of_one_home(1)[0]);
        pages.write(0, 1);
        store.set_line(key, Line::Sole(slot(0)));
        let sockets = [(); 2].map(|()| Arc::new(Socket::default()));
        let threads: Vec<_> = services
            .into_iter()
            .zip(&sockets)
            .zip([TWICE, LATE])
            .map(|((service, socket), batches)| {
                let (told, seen) = (socket.clone(), pages.clone());
                let find = move |index: &IndexReader| index.line(key).is_some();
                thread::spawn(move || tell_all(&service, &told, &seen, batches, find))
            })
            .collect();
        store.remove_line(key);
        let epoch = store.advance_epoch();
        if sockets.iter().all(|socket| socket.frees(epoch)) {
            pages.write(0, 2);
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// As [`reuse_while_looked_up`], with the tree.
fn reuse_while_searched(batches: [Batch; 2]) {
    let (mut store, service) = index();
    let pages = Pages::new(1);
    pages.write(0, 1);
    assert_eq!(store.tree().insert(0, |_| unreachable!()), None);
    let socket = Arc::new(Socket::default());
    let (told, seen) = (socket.clone(), pages.clone());
    let thread = thread::spawn(move || {
        let find = |index: &IndexReader| {
            let node = index.tree().search(|node| 1.cmp(&seen.read(node)));
            node == Some(0)
        };
        tell_all(&service, &told, &seen, batches, find);
    });
    assert!(store.tree().remove(0, |_| unreachable!()));
    let epoch = store.advance_epoch();
    if socket.frees(epoch) {
        pages.write(0, 2);
    }
    thread.join().unwrap();
}

#[test]
fn a_slot_that_was_searched_is_not_rewritten_before_that_was_told() {
    explore(2000, || reuse_while_searched(TWICE));
}

#[test]
fn a_slot_is_not_found_by_search_any_more_once_its_epoch_was_told() {
    explore(100, || reuse_while_searched(LATE));
}

#[test]
fn who_reads_a_forward_finds_the_page_that_has_moved() {
    explore(5, || {
        let segment = Mapping::zeroed(SLOTS_PER_SEGMENT as usize);
        let (pages, view) = (Pages::new(2), segment.clone());
        let written = pages.clone();
        let store = thread::spawn(move || {
            written.write(1, 7);
            forward::write(&segment, slot(0), slot(1));
        });
        if let Some(to) = forward::read(&view, slot(0)) {
            assert_eq!((to, pages.read(to.number())), (slot(1), 7));
        }
        store.join().unwrap();
    });
}

/// A page has moved from slot 0 to slot 1, and moves on to slot 2. The store writes another page into slot 1 as soon as it
/// is free.
fn moved_on_while_followed(batches: [Batch; 2]) {
    let (store, service) = index();
    let segment = Mapping::zeroed(SLOTS_PER_SEGMENT as usize);
    let (pages, view) = (Pages::new(3), segment.clone());
    pages.write(1, 1);
    forward::write(&segment, slot(0), slot(1));
    let socket = Arc::new(Socket::default());
    let (told, seen) = (socket.clone(), pages.clone());
    let thread = thread::spawn(move || {
        let mut reference = false;
        for batch in batches {
            let epoch = service.epoch();
            if batch == Batch::LooksUp {
                let to = forward::read(&view, slot(0)).expect("it has moved");
                assert_eq!(seen.read(to.number()), 1, "the slot is another page's");
                reference |= to == slot(1);
            }
            told.tell(epoch, reference);
        }
    });
    pages.write(2, 1);
    forward::write(&segment, slot(0), slot(2));
    let epoch = store.advance_epoch();
    if socket.frees(epoch) {
        pages.write(1, 2);
    }
    thread.join().unwrap();
}

#[test]
fn a_slot_that_a_forward_named_is_not_rewritten_before_that_was_told() {
    explore(100, || moved_on_while_followed(TWICE));
}

#[test]
fn a_slot_is_not_led_to_any_more_once_its_epoch_was_told() {
    explore(100, || moved_on_while_followed(LATE));
}

#[test]
fn an_entry_that_moves_is_found_or_missed_and_leads_to_its_page() {
    explore(800, || {
        let (mut store, service) = index();
        let (pages, keys) = (Pages::new(3), keys_of_one_home(3));
        let entry = |number: u32| Line::Sole(slot(number));
        for number in 0..2 {
            pages.write(number, number.into());
            store.set_line(keys[number as usize], entry(number));
        }
        let (written, all) = (pages.clone(), keys.clone());
        let writer = thread::spawn(move || {
            written.write(2, 2);
            store.set_line(all[2], entry(2));
            // The others move towards their home.
            assert!(store.remove_line(all[0]));
            store
        });
        for (key, number) in [(keys[2], 2), (keys[1], 1)] {
            if let Some(found) = service.line(key) {
                assert_eq!((found, pages.read(number)), (entry(number), number.into()));
            }
        }
        let store = writer.join().unwrap();
        for number in 1..3 {
            assert_eq!(store.reader().line(keys[number as usize]), Some(entry(number)));
        }
    });
}

#[test]
fn news_are_what_was_announced_and_their_entries_are_there() {
    explore(30, || {
        let (mut store, service) = index();
        let (keys, start) = (keys_of_one_home(4), service.news_position());
        let announced = keys.clone();
        let writer = thread::spawn(move || {
            for (key, number) in announced.into_iter().take(2).zip(0..) {
                store.set_line(key, Line::Sole(slot(number)));
                store.add_news(key);
            }
        });
        if let News::Keys(news) = service.news_since(start) {
            assert_eq!(news, keys[..news.len()]);
            assert!(news.iter().all(|key| service.line(*key).is_some()));
        }
        writer.join().unwrap();
    });
}

/// What a service takes for news is the first that was announced, or the service knows that it was lapped.
fn assert_what_was_announced(service: &IndexReader, start: u64, announced: &[Key]) {
    if let News::Keys(news) = service.news_since(start) {
        assert_eq!(news, announced[..news.len()]);
    }
}

#[test]
fn news_that_were_lapped_are_not_taken_for_others() {
    explore(700, || {
        let (store, service) = index();
        let (keys, start) = (keys_of_one_home(5), service.news_position());
        let announced = keys.clone();
        let writer = thread::spawn(move || announced.into_iter().for_each(|key| store.add_news(key)));
        assert_what_was_announced(&service, start, &keys);
        writer.join().unwrap();
    });
}

#[test]
fn news_that_lap_two_readers_are_not_taken_for_others_by_either() {
    explore_three(50_000, || {
        let (store, services) = index_of_two();
        let (keys, start) = (keys_of_one_home(5), services[0].news_position());
        let announced = keys.clone();
        let writer = thread::spawn(move || announced.into_iter().for_each(|key| store.add_news(key)));
        let [here, there] = services;
        let expected = keys.clone();
        let other = thread::spawn(move || assert_what_was_announced(&there, start, &expected));
        assert_what_was_announced(&here, start, &keys);
        writer.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn who_sees_that_an_index_is_retired_finds_all_in_the_next() {
    explore(10, || {
        let (mut store, service) = index();
        let (mut next, map) = create(2 * CAPACITY);
        let next_service = IndexReader::new(map).unwrap();
        let (key, hash) = (keys_of_one_home(1)[0], PageHash(3 << 64 | 5 << 20));
        store.set_line(key, Line::Marked(1));
        store.insert_slot(hash, slot(1));
        store.add_news(key);
        assert_eq!(store.tree().insert(1, |_| unreachable!()), None);
        let (epoch, news) = (store.advance_epoch(), service.news_position());
        let writer = thread::spawn(move || {
            assert_eq!(store.retire_into(&mut next), 1);
            next.advance_epoch();
        });
        let (index, least) = match service.retired() {
            true => (&next_service, epoch),
            false => (&service, epoch),
        };
        assert!(index.epoch() >= least);
        assert_eq!(index.line(key), Some(Line::Marked(1)));
        assert_eq!(index.slot_of(hash), Some(slot(1)));
        assert_eq!((index.news_position(), index.tree().root()), (news, Some(1)));
        writer.join().unwrap();
    });
}

#[test]
fn a_search_compares_written_pages_only_and_finds_the_right_one_or_none() {
    explore(40, || {
        let (mut store, service) = index();
        let pages = Pages::new(3);
        pages.write(0, 0);
        assert_eq!(store.tree().insert(0, |_| unreachable!()), None);
        let written = pages.clone();
        let writer = thread::spawn(move || {
            // In order: the tree turns, and gets another root.
            for node in 1..3 {
                written.write(node, node.into());
                let content = u64::from(node);
                let there = store
                    .tree()
                    .insert(node, |other| content.cmp(&written.read(other)));
                assert_eq!(there, None);
            }
            store
        });
        let search =
            |index: &IndexReader, content: u64| index.tree().search(|node| content.cmp(&pages.read(node)));
        for node in [2, 0] {
            let found = search(&service, node.into());
            assert!(found.is_none() || found == Some(node), "{found:?}");
        }
        let store = writer.join().unwrap();
        for node in 0..3 {
            assert_eq!(search(store.reader(), node.into()), Some(node));
        }
    });
}
