use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

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
    Mark(u64, u32),
    Unmark(u64),
    Insert(u64),
    Remove(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let n = 0u64..100;
    let step = prop_oneof![
        (n.clone(), 0u32..5).prop_map(|(k, c)| Step::Mark(k, c)),
        n.clone().prop_map(Step::Unmark),
        n.clone().prop_map(Step::Insert),
        n.prop_map(Step::Remove),
    ];
    proptest::collection::vec(step, 0..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn behaves_like_two_maps(steps in steps()) {
        let (_file, mut index) = create(300).unwrap();
        let (mut marks, mut slots) = (HashMap::new(), HashMap::new());
        for step in steps {
            match step {
                Step::Mark(k, c) => {
                    let expected = match marks.insert(k, c) {
                        None => Placed::New,
                        Some(_) => Placed::Replaced,
                    };
                    prop_assert_eq!(index.set_mark(key(k), c), expected);
                }
                Step::Unmark(k) => {
                    prop_assert_eq!(index.remove_mark(key(k)), marks.remove(&k).is_some());
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
        prop_assert_eq!(index.used(), marks.len() + slots.len());
        let (_next_file, mut next) = create(600).unwrap();
        index.retire_into(&mut next);
        prop_assert!(index.reader().retired());
        for k in 0..100 {
            prop_assert_eq!(index.mark_count(key(k)), marks.get(&k).copied());
            let unused = marks.get(&k).is_none_or(|c| *c == 0);
            prop_assert_eq!(next.reader().is_marked(key(k)), !unused);
            for index in [&index, &next] {
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
    let (_file, mut index) = create(1 << 16).unwrap();
    let keys = keys_of_one_home(6000);
    let placed: Vec<Placed> = keys.iter().map(|key| index.set_mark(*key, 7)).collect();
    let new = placed.iter().filter(|p| **p == Placed::New).count();
    assert_eq!((new, index.used()), (MAX_DISTANCE + 1, new));
    for (key, placed) in keys.iter().zip(&placed) {
        let there = *placed == Placed::New;
        assert_eq!(index.mark_count(*key).is_some(), there);
        assert_eq!(index.reader().is_marked(*key), there);
    }
    assert!(!index.admits(keys[0]));
    assert_eq!(index.set_mark(keys[0], 8), Placed::Replaced);
    let (_next_file, mut next) = create(1 << 15).unwrap();
    assert_eq!(index.retire_into(&mut next), new);
    let removed = keys.iter().filter(|key| index.remove_mark(**key)).count();
    assert_eq!((removed, index.used()), (new, 0));
    assert_eq!(index.set_mark(keys[5999], 0), Placed::New);
}

#[test]
fn news_are_delivered_until_the_ring_laps() {
    let (_file, index) = create(64).unwrap();
    let start = index.reader().news_position();
    index.announce(key(1));
    index.announce(key(2));
    assert_eq!(index.reader().news_since(start), News::Keys(vec![key(1), key(2)]));
    assert_eq!(index.reader().news_since(start + 1), News::Keys(vec![key(2)]));
    (0..RING as u64).for_each(|_| index.announce(key(3)));
    assert_eq!(index.reader().news_since(start), News::Overrun);
}

#[test]
fn others_cannot_write_the_index() {
    let (file, _index) = create(64).unwrap();
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
fn foreign_files_are_refused() {
    let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, file_len(64) as u64).unwrap();
    let map = Mapping::read_only(&file, file_len(64)).unwrap();
    assert!(matches!(IndexReader::new(map), Err(IndexError::Foreign { .. })));
    let map = Mapping::read_only(&file, PAGE_SIZE).unwrap();
    assert!(matches!(IndexReader::new(map), Err(IndexError::Truncated { .. })));
}
