//! The pages that the cases are about.

use crate::compare::{Arena, PageId};
use std::sync::atomic::AtomicU64;
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords, bytes_of};
use vmm_dedup_protocol::tree::{TreeWriter, words};

/// A page number that no arena has.
pub(super) const MISSING: PageId = PageId(1 << 30);
/// One that does not even fit a physical address.
pub(super) const IMPOSSIBLE: PageId = PageId(u64::MAX);

/// Numbers without order that look random.
pub(super) fn mix(n: u64) -> u64 {
    let n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

pub(super) fn page(seed: u64) -> PageWords {
    std::array::from_fn(|word| mix(seed * PAGE_WORDS as u64 + word as u64))
}

pub(super) fn set_byte(page: &mut PageWords, at: usize, byte: u8) {
    let mut bytes = page[at / 8].to_ne_bytes();
    bytes[at % 8] = byte;
    page[at / 8] = u64::from_ne_bytes(bytes);
}

pub(super) fn ids(pages: std::ops::Range<u64>) -> Vec<PageId> {
    pages.map(PageId).collect()
}

pub(super) fn arena(pages: &[PageWords]) -> Arena {
    let arena = Arena::new(pages.len()).expect("an arena can be made");
    for (at, page) in pages.iter().enumerate() {
        arena.write(at, page);
    }
    arena
}

/// A tree of the pages at these places.
pub(super) fn tree_of(contents: &[PageWords], nodes: &[u32]) -> Vec<AtomicU64> {
    let words: Vec<AtomicU64> = (0..words(contents.len())).map(|_| AtomicU64::new(0)).collect();
    insert(&words, contents, nodes);
    words
}

pub(super) fn insert(words: &[AtomicU64], contents: &[PageWords], nodes: &[u32]) {
    let mut writer = TreeWriter::new(words);
    for node in nodes {
        let page = bytes_of(&contents[*node as usize]);
        writer.insert(*node, |other| page.cmp(bytes_of(&contents[other as usize])));
    }
}

/// Pages that share long prefixes, so that comparing has to read them, and of which each has an equal one: page n and page
/// n plus half of all.
pub(super) fn contents(pages: u64) -> Vec<PageWords> {
    let content = |n: u64| {
        let kind = n % pages.div_ceil(2);
        let mut page = page(1);
        let at = usize::try_from(mix(kind) % 64).expect("below 64") * 8;
        page[at] = mix(kind + 1000);
        page[PAGE_WORDS - 1] = kind;
        page
    };
    (0..pages).map(content).collect()
}
