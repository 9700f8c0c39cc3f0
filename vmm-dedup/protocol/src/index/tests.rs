use super::entry::{home, tag};
use super::writer::MAX_DISTANCE;
use super::*;
use crate::key::{Key, PageHash};
use crate::mapping::Mapping;
use crate::sizes::PAGE_SIZE;
use crate::slot::Slot;
use proptest::prelude::*;
use std::collections::HashMap;

/// Room for so many slots.
const SLOTS: usize = 1 << 12;

fn key(n: u64) -> Key {
    Key::try_new((n & 0x7f) << 40 | (n & 0x7f)).unwrap()
}

fn hash(n: u64) -> PageHash {
    PageHash(u128::from(n) << 64 | u128::from(n & 0x7f) << 40)
}

fn slot(n: u32) -> Slot {
    Slot::try_new(n).unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    SetLine(u64, Line),
    RemoveLine(u64),
    Insert(u64),
    Remove(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let n = 0u64..100;
    let step = prop_oneof![
        (n.clone(), 1u32..5).prop_map(|(k, c)| Step::SetLine(k, Line::Marked(c))),
        (n.clone(), 0u32..1 << 26).prop_map(|(k, s)| Step::SetLine(k, Line::Sole(slot(s)))),
        (n.clone(), 0u32..1 << 26).prop_map(|(k, s)| Step::SetLine(k, Line::Series(slot(s)))),
        n.clone().prop_map(Step::RemoveLine),
        n.clone().prop_map(Step::Insert),
        n.prop_map(Step::Remove),
    ];
    proptest::collection::vec(step, 0..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn behaves_like_two_maps(steps in steps()) {
        let (_file, mut index) = create(300, SLOTS).unwrap();
        let (mut lines, mut slots) = (HashMap::new(), HashMap::new());
        for step in steps {
            match step {
                Step::SetLine(k, line) => {
                    let expected = match lines.insert(k, line) {
                        None => Placed::New,
                        Some(_) => Placed::Replaced,
                    };
                    prop_assert_eq!(index.set_line(key(k), line), expected);
                }
                Step::RemoveLine(k) => {
                    prop_assert_eq!(index.remove_line(key(k)), lines.remove(&k).is_some());
                }
                Step::Insert(k) => {
                    #[allow(clippy::cast_possible_truncation)]
                    index.insert_slot(hash(k), slot(k as u32));
                    slots.insert(k, k);
                }
                Step::Remove(k) => {
                    #[allow(clippy::cast_possible_truncation)]
                    let removed = slots.contains_key(&k) && index.remove_slot(slot(k as u32));
                    prop_assert_eq!(removed, slots.remove(&k).is_some());
                }
            }
        }
        prop_assert_eq!(index.used(), lines.len() + slots.len());
        let (_next_file, mut next) = create(600, SLOTS).unwrap();
        let marked = lines.values().filter(|line| matches!(line, Line::Marked(_))).count();
        prop_assert_eq!(index.retire_into(&mut next), marked);
        prop_assert!(index.reader().retired());
        for k in 0..100 {
            for index in [&index, &next] {
                prop_assert_eq!(index.reader().line(key(k)), lines.get(&k).copied());
                let found = index.reader().slot_of(hash(k)).map(|s| u64::from(s.number()));
                prop_assert_eq!(found, slots.get(&k).copied());
            }
        }
    }
}

/// Line keys with one home in a table of 2^16 entries: the inverse of what [`home`] computes.
fn keys_of_one_home(n: usize) -> Vec<Key> {
    let inverse = (0..5).fold(1u32, |x, _| {
        x.wrapping_mul(2u32.wrapping_sub(0x9e37_79b1u32.wrapping_mul(x)))
    });
    let tags = (0..1u32 << 16).map(|low| inverse.wrapping_mul(65_000 << 16 | low));
    let keys = tags.filter_map(|tag| Key::try_new(u64::from(tag) << 16));
    let keys: Vec<Key> = keys.filter(|key| !key.is_full()).take(n).collect();
    assert!(keys.len() == n && keys.iter().all(|key| home(tag(*key), 1 << 16) == 65_000));
    keys
}

#[test]
fn keys_of_one_home_are_refused_beyond_a_distance_and_all_counts_agree() {
    let (_file, mut index) = create(1 << 16, SLOTS).unwrap();
    let keys = keys_of_one_home(6000);
    let placed: Vec<Placed> = keys
        .iter()
        .map(|key| index.set_line(*key, Line::Marked(7)))
        .collect();
    let new = placed.iter().filter(|p| **p == Placed::New).count();
    assert_eq!((new, index.used()), (MAX_DISTANCE + 1, new));
    for (key, placed) in keys.iter().zip(&placed) {
        let there = *placed == Placed::New;
        assert_eq!(index.reader().line(*key).is_some(), there);
    }
    assert!(!index.admits(keys[0]));
    assert_eq!(index.set_line(keys[0], Line::Marked(8)), Placed::Replaced);
    let (_next_file, mut next) = create(1 << 15, SLOTS).unwrap();
    assert_eq!(index.retire_into(&mut next), new);
    let removed = keys.iter().filter(|key| index.remove_line(**key)).count();
    assert_eq!((removed, index.used()), (new, 0));
    assert_eq!(index.set_line(keys[5999], Line::Marked(1)), Placed::New);
}

#[test]
fn news_are_delivered_until_the_ring_laps() {
    let (_file, index) = create(64, SLOTS).unwrap();
    let start = index.reader().news_position();
    index.add_news(key(1));
    index.add_news(key(2));
    assert_eq!(index.reader().news_since(start), News::Keys(vec![key(1), key(2)]));
    assert_eq!(index.reader().news_since(start + 1), News::Keys(vec![key(2)]));
    let start = index.reader().news_position();
    (1..RING as u64).for_each(|_| index.add_news(key(3)));
    assert_eq!(
        index.reader().news_since(start),
        News::Keys(vec![key(3); RING - 1])
    );
    index.add_news(key(4));
    assert_eq!(index.reader().news_since(start), News::Overrun);
}

#[test]
fn others_cannot_write_the_index() {
    let (file, _index) = create(64, SLOTS).unwrap();
    assert!(Mapping::read_write(&file, PAGE_SIZE).is_err());
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let again = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    assert!(Mapping::read_write(&again, PAGE_SIZE).is_err());
    assert!(Mapping::read_only(&again, PAGE_SIZE).is_ok());
}

#[test]
fn a_slot_beyond_what_the_file_has_room_for_is_not_entered() {
    let (file, mut index) = create(64, 8).unwrap();
    assert_eq!(index.insert_slot(hash(1), slot(8)), Placed::Refused);
    assert_eq!(index.insert_slot(hash(1), slot(7)), Placed::New);
    assert_eq!(index.reader().slot_of(hash(1)), Some(slot(7)));
    assert!(!index.remove_slot(slot(8)) && index.hash_of(slot(8)).is_none());
    let (_next_file, mut next) = create(64, 16).unwrap();
    index.retire_into(&mut next);
    assert_eq!(next.insert_slot(hash(2), slot(15)), Placed::New);
    assert_eq!(next.reader().slot_of(hash(1)), Some(slot(7)));
    // A file that announces more than it has.
    index.reader().map.words()[layout::WORD_SLOTS].store(1 << 20, crate::sync::Ordering::Relaxed);
    let map = Mapping::read_only(&file, file_len(64, 8)).unwrap();
    assert!(matches!(
        IndexReader::new(map),
        Err(IndexError::Truncated { slots: 0x10_0000, .. })
    ));
}

#[test]
fn foreign_files_are_refused() {
    let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, file_len(64, SLOTS) as u64).unwrap();
    let map = Mapping::read_only(&file, file_len(64, SLOTS)).unwrap();
    assert!(matches!(IndexReader::new(map), Err(IndexError::Foreign { .. })));
    let map = Mapping::read_only(&file, PAGE_SIZE).unwrap();
    assert!(matches!(IndexReader::new(map), Err(IndexError::Truncated { .. })));
}
