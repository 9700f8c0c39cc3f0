//! Forwards in a segment's file, as store and services map it. (`vmm-dedup-protocol-loom` compiles the sources, too, without
//! files.)

use std::sync::atomic::Ordering;
use vmm_dedup_protocol::forward::{read, write};
use vmm_dedup_protocol::mapping::{Mapping, sealed_memfd};
use vmm_dedup_protocol::{PAGE_SIZE, SEGMENT_BYTES, SEGMENT_FILE_BYTES, SLOTS_PER_SEGMENT, Slot};

fn slot(number: u32) -> Slot {
    Slot::try_new(number).expect("a slot")
}

#[test]
fn a_forward_is_seen_through_the_file() {
    let (file, map) = sealed_memfd("forward", SEGMENT_FILE_BYTES).expect("a file");
    let view = Mapping::read_only(&file, SEGMENT_FILE_BYTES).expect("a mapping");
    let last = slot(2 * SLOTS_PER_SEGMENT - 1);
    assert_eq!(read(&view, last), None);
    write(&map, last, slot(0));
    assert_eq!((read(&view, last), read(&view, slot(0))), (Some(slot(0)), None));
    let pages = &map.words()[..SEGMENT_BYTES / 8];
    assert!(pages.iter().all(|word| word.load(Ordering::Relaxed) == 0));
}

#[test]
fn a_file_without_forwards_has_none() {
    let (file, _map) = sealed_memfd("forward", PAGE_SIZE).expect("a file");
    let view = Mapping::read_only(&file, PAGE_SIZE).expect("a mapping");
    assert_eq!(read(&view, Slot::FIRST), None);
}
