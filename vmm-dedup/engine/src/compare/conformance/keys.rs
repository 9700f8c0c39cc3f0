//! What every engine that makes keys does: [`check`].

use super::pages::{IMPOSSIBLE, MISSING, arena, contents, ids, page};
use crate::compare::{Arena, Error, Keys, PageId};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering as Memory};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};

/// Makes an engine that can read the pages of an arena, and no others.
type Make<'a> = &'a mut dyn FnMut(&Arena) -> Box<dyn Keys>;

/// Runs the suite.
///
/// # Panics
/// If the engine does not conform.
pub fn check(make: Make<'_>) {
    equal_pages_have_equal_keys(make);
    keys_follow_a_page_that_changes(make);
    missing_pages_are_faults_and_leave_the_others_alone(make);
    more_pages_than_a_device_holds_have_keys(make);
    torn_pages_have_keys(make);
    accounts_grow(make);
}

fn equal_pages_have_equal_keys(make: Make<'_>) {
    const KINDS: u64 = 16;
    let mut contents: Vec<PageWords> = (0..2 * KINDS).map(|n| page(n % KINDS)).collect();
    contents.extend([[0; PAGE_WORDS]; 2]);
    let arena = arena(&contents);
    let mut engine = make(&arena);
    let mut keys = engine.keys(&arena, &ids(0..2 * KINDS + 2));
    assert!(keys.iter().all(Result::is_ok), "{keys:?}");
    assert_eq!(keys.pop(), keys.pop(), "pages of zeros");
    assert_eq!(keys[..16], keys[16..]);
    let distinct: HashSet<_> = keys.into_iter().flatten().collect();
    assert!(distinct.len() > 12, "keys tell random pages apart, mostly");
    assert!(engine.keys(&arena, &[]).is_empty());
}

fn keys_follow_a_page_that_changes(make: Make<'_>) {
    const TIMES: u64 = 16;
    let arena = arena(&[page(0), page(0)]);
    let mut engine = make(&arena);
    let mut keys = HashSet::new();
    for time in 0..TIMES {
        arena.write(0, &page(time));
        arena.write(1, &page(time));
        let both = engine.keys(&arena, &ids(0..2));
        assert_eq!(both[0], both[1], "time {time}");
        keys.extend(both.into_iter().flatten());
    }
    assert!(keys.len() > 12, "a key of another content is another one, mostly");
}

fn missing_pages_are_faults_and_leave_the_others_alone(make: Make<'_>) {
    let arena = arena(&[page(1), page(2), page(2)]);
    let mut engine = make(&arena);
    for missing in [PageId(3), MISSING, IMPOSSIBLE] {
        let keys = engine.keys(&arena, &[PageId(1), missing, PageId(2)]);
        assert_eq!(keys[1], Err(Error::Fault(missing)));
        assert!(keys[0].is_ok() && keys[0] == keys[2], "{keys:?}");
    }
}

fn more_pages_than_a_device_holds_have_keys(make: Make<'_>) {
    const TIMES: usize = 5000;
    let arena = arena(&contents(8));
    let mut engine = make(&arena);
    let once = engine.keys(&arena, &ids(0..8));
    let asked: Vec<PageId> = (0..TIMES).flat_map(|_| ids(0..8)).collect();
    let keys = engine.keys(&arena, &asked);
    assert_eq!(keys.len(), asked.len());
    assert!(keys.chunks(8).all(|keys| keys == once));
}

/// A page that changes all the time: any key will do, as long as there is one.
fn torn_pages_have_keys(make: Make<'_>) {
    let arena = arena(&[page(0), page(1)]);
    let mut engine = make(&arena);
    let still = engine.keys(&arena, &[PageId(1)]);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut round = 0;
            while !done.load(Memory::Acquire) {
                round += 1;
                arena.write(0, &page(round % 2));
            }
        });
        for _ in 0..200 {
            let keys = engine.keys(&arena, &ids(0..2));
            assert!(keys[0].is_ok());
            assert_eq!(keys[1..], still, "the others' keys are right");
        }
        done.store(true, Memory::Release);
    });
}

fn accounts_grow(make: Make<'_>) {
    let arena = arena(&contents(8));
    let mut engine = make(&arena);
    let before = engine.account();
    engine.keys(&arena, &ids(0..8));
    let after = engine.account();
    assert_eq!(after.pages, before.pages + 8);
    assert!(after.bytes > before.bytes && after.wall_ns > before.wall_ns);
}
