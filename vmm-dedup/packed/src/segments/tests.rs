//! Segments held against a map of what was put.

use super::*;
use crate::class::Class;
use crate::conformance::random;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::HashMap;

const SIZE: usize = 4096;

fn small(most_segments: u64) -> Segments<Heap> {
    let size = SegmentBytes::try_new(SIZE).unwrap();
    Segments::new(Heap::new(most_segments * SIZE as u64), size)
}

fn bytes(seed: u64, length: usize) -> Vec<u8> {
    random(seed)[..length].to_vec()
}

/// What must be in segments.
#[derive(Default)]
struct Oracle {
    cells: HashMap<Owner, (Place, Vec<u8>)>,
}

impl Oracle {
    fn hold_against(&self, segments: &Segments<Heap>) {
        let mut ranges = Vec::new();
        for (owner, (place, bytes)) in &self.cells {
            assert_eq!(segments.get(*place), Ok(bytes.as_slice()));
            assert_eq!(segments.owner(*place), Ok(*owner));
            let start = place.raw() as usize * place::UNIT;
            let end = start + Class::holding(bytes.len()).unwrap().bytes();
            assert_eq!(start / SIZE, (end - 1) / SIZE, "a cell lies in two segments");
            ranges.push((start, end));
        }
        ranges.sort_unstable();
        assert!(
            ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0),
            "cells overlap"
        );

        let accounts = segments.accounts();
        let of = |part: fn(&(usize, usize)) -> usize| ranges.iter().map(part).sum::<usize>() as u64;
        let mut numbers: Vec<usize> = ranges.iter().map(|(start, _)| start / SIZE).collect();
        numbers.dedup();
        let payload: usize = self.cells.values().map(|(_, bytes)| bytes.len()).sum();
        assert_eq!(accounts.cells, self.cells.len() as u64);
        assert_eq!(accounts.payload_bytes, payload as u64);
        assert_eq!(accounts.class_bytes, of(|(start, end)| end - start));
        assert_eq!(accounts.segments, numbers.len() as u64);
        assert_eq!(accounts.bytes, (numbers.len() * SIZE) as u64);
        assert_eq!(
            accounts.gap_bytes() + accounts.class_bytes,
            accounts.fragmentation_bytes() + accounts.payload_bytes
        );
        assert!(accounts.metadata_bytes >= accounts.cells * CELL_METADATA_BYTES as u64);
    }

    fn follow(&mut self, moved: Move) {
        let cell = self.cells.get_mut(&moved.owner).unwrap();
        assert_eq!(cell.0, moved.from);
        cell.0 = moved.to;
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put(usize),
    Free(usize),
    Compact(u64),
    Limit(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..=Class::MOST_BYTES + 40).prop_map(Step::Put),
        3 => (0..400usize).prop_map(Step::Put),
        6 => any::<usize>().prop_map(Step::Free),
        1 => (0..20_000u64).prop_map(Step::Compact),
        1 => (0..12u64).prop_map(Step::Limit),
    ]
}

proptest! {
    #[test]
    fn what_was_put_stays_until_it_is_freed(steps in vec(step(), 1..120)) {
        let (mut segments, mut oracle) = (small(8), Oracle::default());
        for (step, number) in steps.into_iter().zip(0u32..) {
            match step {
                Step::Put(length) => {
                    let (owner, bytes) = (Owner(number), bytes(number.into(), length.min(4096)));
                    let before = segments.accounts();
                    match segments.put(&bytes, owner) {
                        Ok(place) => {
                            oracle.cells.insert(owner, (place, bytes));
                        }
                        Err(PutError::TooLong { length }) => prop_assert!(length > Class::MOST_BYTES),
                        Err(error) => {
                            // Refused for memory: at the limit, and no byte of the account has changed.
                            let most = segments.source_mut().most_bytes;
                            prop_assert!(before.bytes + SIZE as u64 > most, "{}", error);
                            prop_assert_eq!(segments.accounts().refused, before.refused + 1);
                        }
                    }
                }
                Step::Free(which) => {
                    let mut owners: Vec<Owner> = oracle.cells.keys().copied().collect();
                    owners.sort_unstable();
                    if let Some(owner) = owners.get(which % owners.len().max(1)) {
                        let (place, _) = oracle.cells.remove(owner).unwrap();
                        prop_assert_eq!(segments.free(place), Ok(()));
                        prop_assert_eq!(segments.free(place), Err(NoCell(place)));
                    }
                }
                Step::Compact(most_bytes) => {
                    let before = segments.accounts();
                    let compacted = segments.compact(most_bytes, &mut |moved| oracle.follow(moved));
                    let after = segments.accounts();
                    prop_assert_eq!(after.segments + compacted.released, before.segments);
                    prop_assert_eq!(after.moves - before.moves, compacted.moves);
                    prop_assert_eq!(after.moved_bytes - before.moved_bytes, compacted.moved_bytes);
                }
                Step::Limit(most) => segments.source_mut().most_bytes = most * SIZE as u64,
            }
            oracle.hold_against(&segments);
        }
    }
}

#[test]
fn holes_are_used_before_new_memory() {
    let mut segments = small(2);
    let places: Vec<Place> = (0..8)
        .map(|n| segments.put(&bytes(n, 456), Owner(0)).unwrap())
        .collect();
    segments.free(places[3]).unwrap();

    let place = segments.put(&bytes(9, 450), Owner(9));

    assert_eq!(place, Ok(places[3]));
    assert_eq!(segments.accounts().segments, 1);
}

#[test]
fn without_memory_a_page_is_refused_and_nothing_is_lost() {
    let mut segments = small(1);
    let place = segments.put(&bytes(1, 4000), Owner(1)).unwrap();

    let refused = segments.put(&bytes(2, 4000), Owner(2));

    assert_eq!(refused, Err(PutError::NoMemory { segment_bytes: SIZE }));
    assert_eq!(segments.get(place), Ok(bytes(1, 4000).as_slice()));
    segments.free(place).unwrap();
    assert!(segments.put(&bytes(2, 4000), Owner(2)).is_ok());
}

#[test]
fn the_last_cell_takes_its_segment_along() {
    let mut segments = small(1);
    let place = segments.put(&[1], Owner(1)).unwrap();
    segments.free(place).unwrap();
    let accounts = segments.accounts();
    assert_eq!(
        (accounts.segments, accounts.bytes, accounts.payload_bytes),
        (0, 0, 0)
    );
}

#[test]
fn numbers_of_segments_that_went_are_used_again() {
    let mut segments = small(4);
    let churn = |segments: &mut Segments<Heap>| {
        let places: Vec<Place> = (0..4)
            .map(|n| segments.put(&bytes(n, 4000), Owner(0)).unwrap())
            .collect();
        for place in places {
            assert!(place.raw() < 4 * 512, "{place:?}");
            segments.free(place).unwrap();
        }
    };
    churn(&mut segments);
    let metadata = segments.accounts().metadata_bytes;
    for _ in 0..100 {
        churn(&mut segments);
    }
    assert_eq!(segments.accounts().metadata_bytes, metadata);
}

#[test]
fn compaction_leaves_no_more_segments_than_needed() {
    // Eight cells of 456 and more bytes fill a segment; three of four go.
    let mut segments = small(100);
    let mut places: HashMap<Owner, Place> = HashMap::new();
    for n in 0..400u32 {
        let place = segments.put(&bytes(n.into(), 456), Owner(n)).unwrap();
        places.insert(Owner(n), place);
    }
    for n in (0..400).filter(|n| n % 4 != 0) {
        segments.free(places.remove(&Owner(n)).unwrap()).unwrap();
    }
    assert_eq!(segments.accounts().segments, 50);

    let compacted = segments.compact(u64::MAX, &mut |moved| {
        assert_eq!(places.insert(moved.owner, moved.to), Some(moved.from));
    });

    // 100 cells, eight in a segment.
    assert_eq!((segments.accounts().segments, compacted.released), (13, 37));
    for (owner, place) in places {
        assert_eq!(segments.get(place), Ok(bytes(owner.0.into(), 456).as_slice()));
    }
}

#[test]
fn places_that_never_were_are_refused() {
    let mut segments = small(1);
    let place = segments.put(&[7; 100], Owner(1)).unwrap();
    for raw in [place.raw() + 1, 600, u32::MAX] {
        let wrong = Place::of_raw(raw);
        assert_eq!(segments.get(wrong), Err(NoCell(wrong)));
        assert_eq!(segments.free(wrong), Err(NoCell(wrong)));
    }
}
