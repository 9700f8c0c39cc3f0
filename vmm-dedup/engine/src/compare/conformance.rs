//! What every backend must do, as a suite that each one's tests run: [`check`].
//!
//! The oracle is the order of the pages' bytes. Each case fills an [`Arena`] and asks the backend that the caller makes
//! for it (a device is given the arena's file then).

use super::{Answer, Arena, Backend, Error, PageId};
use std::cmp::Ordering;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering as Memory};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords, bytes_of};
use vmm_dedup_protocol::tree::{TreeReader, TreeWriter, words};

/// Makes a backend that can read the pages of an arena, and no others.
pub type Make<'a> = &'a mut dyn FnMut(&Arena) -> Box<dyn Backend>;

/// Runs the whole suite.
///
/// # Panics
/// If the backend does not conform.
pub fn check(make: Make<'_>) {
    every_byte_counts(make);
    a_page_equals_itself(make);
    zero_pages_are_equal(make);
    equal_pages_have_equal_keys(make);
    missing_pages_are_faults(make);
    a_bad_item_leaves_the_others_alone(make);
    empty_questions_have_no_answers(make);
    trees_of_all_sizes_are_searched(make);
    searches_follow_a_tree_that_changes(make);
    searches_race_with_the_trees_writer(make);
    trees_of_nonsense_end(make);
    sets_of_all_sizes_are_searched(make);
    torn_pages_have_answers(make);
    accounts_grow(make);
}

/// Numbers without order that look random.
fn mix(n: u64) -> u64 {
    let n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

fn page(seed: u64) -> PageWords {
    std::array::from_fn(|word| mix(seed * PAGE_WORDS as u64 + word as u64))
}

fn set_byte(page: &mut PageWords, at: usize, byte: u8) {
    let mut bytes = page[at / 8].to_ne_bytes();
    bytes[at % 8] = byte;
    page[at / 8] = u64::from_ne_bytes(bytes);
}

fn ids(pages: std::ops::Range<u64>) -> Vec<PageId> {
    pages.map(PageId).collect()
}

fn arena(pages: &[PageWords]) -> Arena {
    let arena = Arena::new(pages.len()).expect("an arena can be made");
    for (at, page) in pages.iter().enumerate() {
        arena.write(at, page);
    }
    arena
}

/// Less, equal and greater, decided by each byte of each line.
fn every_byte_counts(make: Make<'_>) {
    let arena = arena(&[page(1), page(1)]);
    let mut backend = make(&arena);
    for at in 0..PAGE_WORDS * 8 {
        let mut greater = page(1);
        // The byte that differs, and one behind it that would decide the other way.
        let byte = bytes_of(&greater)[at];
        let (low, high) = if byte == 255 { (254, 255) } else { (byte, byte + 1) };
        let mut less = greater;
        set_byte(&mut greater, at, high);
        set_byte(&mut less, at, low);
        if at + 1 < PAGE_WORDS * 8 {
            set_byte(&mut greater, at + 1, 0);
            set_byte(&mut less, at + 1, 255);
        }
        arena.write(0, &less);
        arena.write(1, &greater);
        let answers = backend.compare(
            &arena,
            &[
                (PageId(0), PageId(1)),
                (PageId(1), PageId(0)),
                (PageId(1), PageId(1)),
            ],
        );
        let expected = [Ok(Ordering::Less), Ok(Ordering::Greater), Ok(Ordering::Equal)];
        assert_eq!(answers, expected, "byte {at}");
    }
}

fn a_page_equals_itself(make: Make<'_>) {
    let arena = arena(&[page(1), page(1)]);
    let mut backend = make(&arena);
    let pairs = [(PageId(0), PageId(0)), (PageId(0), PageId(1))];
    assert_eq!(
        backend.compare(&arena, &pairs),
        [Ok(Ordering::Equal), Ok(Ordering::Equal)]
    );
    assert_eq!(backend.among(&arena, PageId(0), &[PageId(0)]), Ok(Some(0)));
}

fn zero_pages_are_equal(make: Make<'_>) {
    let arena = arena(&[[0; PAGE_WORDS], [0; PAGE_WORDS], page(1)]);
    let mut backend = make(&arena);
    let pairs = [(PageId(0), PageId(1)), (PageId(0), PageId(2))];
    assert_eq!(
        backend.compare(&arena, &pairs),
        [Ok(Ordering::Equal), Ok(Ordering::Less)]
    );
    let keys = backend.keys(&arena, &ids(0..2));
    assert_eq!(keys[0], keys[1]);
}

fn equal_pages_have_equal_keys(make: Make<'_>) {
    const KINDS: u64 = 16;
    let contents: Vec<PageWords> = (0..2 * KINDS).map(|n| page(n % KINDS)).collect();
    let arena = arena(&contents);
    let mut backend = make(&arena);
    let keys = backend.keys(&arena, &ids(0..2 * KINDS));
    assert_eq!(keys[..16], keys[16..]);
    assert!(keys.iter().all(Result::is_ok), "{keys:?}");
    let distinct: std::collections::HashSet<_> = keys.into_iter().flatten().collect();
    assert!(distinct.len() > 12, "keys tell random pages apart, mostly");
}

/// A page number that no arena has.
const MISSING: PageId = PageId(1 << 30);
/// One that does not even fit a physical address.
const IMPOSSIBLE: PageId = PageId(u64::MAX);

fn missing_pages_are_faults(make: Make<'_>) {
    let arena = arena(&[page(1), page(2)]);
    let mut backend = make(&arena);
    for missing in [PageId(2), MISSING, IMPOSSIBLE] {
        let fault = || Error::Fault(missing);
        assert_eq!(backend.keys(&arena, &[missing]), [Err(fault())]);
        let pairs = [(PageId(0), missing), (missing, PageId(0))];
        assert_eq!(backend.compare(&arena, &pairs), [Err(fault()), Err(fault())]);
        assert_eq!(backend.among(&arena, missing, &[PageId(0)]), Err(fault()));
        assert_eq!(
            backend.among(&arena, PageId(0), &[PageId(1), missing]),
            Err(fault())
        );
        let tree = tree_of(&[page(1), page(2)], &[0]);
        let twins = backend.search(&arena, TreeReader::new(&tree), &[missing]);
        assert_eq!(twins, [Err(fault())]);
    }
}

fn a_bad_item_leaves_the_others_alone(make: Make<'_>) {
    let contents = [page(1), page(2), page(2)];
    let arena = arena(&contents);
    let mut backend = make(&arena);
    let keys = backend.keys(&arena, &[PageId(1), MISSING, PageId(2)]);
    assert!(keys[0].is_ok() && keys[0] == keys[2], "{keys:?}");
    let tree = tree_of(&contents, &[0, 1]);
    let twins = backend.search(&arena, TreeReader::new(&tree), &[MISSING, PageId(2), IMPOSSIBLE]);
    let expected = [
        Err(Error::Fault(MISSING)),
        Ok(Some(PageId(1))),
        Err(Error::Fault(IMPOSSIBLE)),
    ];
    assert_eq!(twins, expected);
}

fn empty_questions_have_no_answers(make: Make<'_>) {
    let arena = arena(&[page(1)]);
    let mut backend = make(&arena);
    assert!(backend.keys(&arena, &[]).is_empty());
    assert!(backend.compare(&arena, &[]).is_empty());
    assert_eq!(backend.among(&arena, PageId(0), &[]), Ok(None));
    let empty: Vec<AtomicU64> = tree_of(&[page(1)], &[]);
    assert!(backend.search(&arena, TreeReader::new(&empty), &[]).is_empty());
    let twins = backend.search(&arena, TreeReader::new(&empty), &[PageId(0)]);
    assert_eq!(twins, [Ok(None)]);
}

/// A tree of the pages at these places.
fn tree_of(contents: &[PageWords], nodes: &[u32]) -> Vec<AtomicU64> {
    let words: Vec<AtomicU64> = (0..words(contents.len())).map(|_| AtomicU64::new(0)).collect();
    insert(&words, contents, nodes);
    words
}

fn insert(words: &[AtomicU64], contents: &[PageWords], nodes: &[u32]) {
    let mut writer = TreeWriter::new(words);
    for node in nodes {
        let page = bytes_of(&contents[*node as usize]);
        writer.insert(*node, |other| page.cmp(bytes_of(&contents[other as usize])));
    }
}

/// Pages that share long prefixes, so that searches have to read them, and some of which are equal.
fn contents(pages: u64) -> Vec<PageWords> {
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

/// What a linear search finds.
fn reference(contents: &[PageWords], nodes: &[u32], candidate: u64) -> Answer<Option<PageId>> {
    let candidate = usize::try_from(candidate).expect("a page of the arena");
    let twin = nodes
        .iter()
        .find(|node| contents[**node as usize] == contents[candidate]);
    Ok(twin.map(|node| PageId::of_node(*node)))
}

/// Trees around the sizes of one and two tables (31 and 1,023 nodes), searched for what they have and have not.
fn trees_of_all_sizes_are_searched(make: Make<'_>) {
    for nodes in [1u32, 2, 3, 30, 31, 32, 33, 64, 100, 500, 1023, 1100] {
        let pages = u64::from(nodes) * 3;
        let contents = contents(pages);
        let arena = arena(&contents);
        let mut backend = make(&arena);
        let nodes: Vec<u32> = (0..nodes).collect();
        let tree = tree_of(&contents, &nodes);
        let twins = backend.search(&arena, TreeReader::new(&tree), &ids(0..pages));
        for (candidate, twin) in (0..).zip(twins) {
            let expected = reference(&contents, &nodes, candidate);
            assert_eq!(twin, expected, "{} nodes, candidate {candidate}", nodes.len());
        }
    }
}

/// A backend may keep what it has loaded of a tree, but not what has changed since.
fn searches_follow_a_tree_that_changes(make: Make<'_>) {
    let contents = contents(400);
    let arena = arena(&contents);
    let mut backend = make(&arena);
    let tree = tree_of(&contents, &[]);
    let mut nodes: Vec<u32> = Vec::new();
    for step in 0..20u32 {
        let new: Vec<u32> = (step * 10..step * 10 + 10).collect();
        insert(&tree, &contents, &new);
        nodes.extend(&new);
        if step % 3 == 2 {
            let gone = nodes.remove(usize::try_from(mix(step.into())).unwrap_or(0) % nodes.len());
            let page = bytes_of(&contents[gone as usize]);
            let compare = |other: u32| page.cmp(bytes_of(&contents[other as usize]));
            assert!(TreeWriter::new(&tree).remove(gone, compare));
        }
        let twins = backend.search(&arena, TreeReader::new(&tree), &ids(0..400));
        for (candidate, twin) in (0..).zip(twins) {
            assert_eq!(twin, reference(&contents, &nodes, candidate), "step {step}");
        }
    }
}

/// What a search must say, however the tree is while it is read: nothing, a page that is gone, or a twin.
fn assert_harmless(twin: &Answer<Option<PageId>>, contents: &[PageWords], candidate: usize) {
    match twin {
        Ok(None) | Err(Error::Fault(_)) => {}
        Ok(Some(page)) => {
            let page = usize::try_from(page.0).expect("a page of the arena");
            assert_eq!(contents[page], contents[candidate], "candidate {candidate}");
        }
        Err(error) => panic!("candidate {candidate}: {error}"),
    }
}

/// The store does not wait for those who search its tree.
fn searches_race_with_the_trees_writer(make: Make<'_>) {
    let contents = contents(600);
    let arena = arena(&contents);
    let mut backend = make(&arena);
    let nodes: Vec<u32> = (0..300).collect();
    let tree = tree_of(&contents, &nodes);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for step in 0.. {
                if done.load(Memory::Acquire) {
                    break;
                }
                let node = u32::try_from(mix(step) % 300).expect("below 300");
                let page = bytes_of(&contents[node as usize]);
                let compare = |other: u32| page.cmp(bytes_of(&contents[other as usize]));
                TreeWriter::new(&tree).remove(node, compare);
                TreeWriter::new(&tree).insert(node, compare);
            }
        });
        for _ in 0..30 {
            let twins = backend.search(&arena, TreeReader::new(&tree), &ids(0..600));
            for (candidate, twin) in twins.iter().enumerate() {
                assert_harmless(twin, &contents, candidate);
            }
        }
        done.store(true, Memory::Release);
    });
}

/// Words without sense in the place of a tree: circles, missing pages, wrong heights.
fn trees_of_nonsense_end(make: Make<'_>) {
    const PAGES: u64 = 64;
    let contents = contents(PAGES);
    let arena = arena(&contents);
    let mut backend = make(&arena);
    for seed in 0..40 {
        // Links of 27 bits each: small ones, that name pages there are, or any.
        let any = if seed % 2 == 0 {
            u64::MAX
        } else {
            (0x3f << 27) | 0x3f
        };
        let word = |at: u64| AtomicU64::new(mix(seed << 32 | at) & any);
        let tree: Vec<AtomicU64> = (0..=PAGES).map(word).collect();
        tree[0].store((seed % PAGES + 1) | ((seed + 1) << 27), Memory::Release);
        let twins = backend.search(&arena, TreeReader::new(&tree), &ids(0..PAGES));
        for (candidate, twin) in twins.iter().enumerate() {
            assert_harmless(twin, &contents, candidate);
        }
    }
}

fn sets_of_all_sizes_are_searched(make: Make<'_>) {
    let contents = contents(200);
    let arena = arena(&contents);
    let mut backend = make(&arena);
    for len in [1, 2, 30, 31, 32, 62, 63, 98] {
        let set = ids(1..1 + len);
        // Page 100 equals page 0, page 100 + n equals page n.
        for candidate in [100, 101, 100 + len, 101 + len] {
            let twin = backend.among(&arena, PageId(candidate), &set);
            let expected = set.iter().position(|page| page.0 + 100 == candidate);
            assert_eq!(twin, Ok(expected), "{len} pages, candidate {candidate}");
        }
    }
    let twins = [PageId(150), PageId(50), PageId(150)];
    assert_eq!(
        backend.among(&arena, PageId(50), &twins),
        Ok(Some(0)),
        "the first of several"
    );
}

/// Candidates that change all the time: any answer will do, as long as there is one.
fn torn_pages_have_answers(make: Make<'_>) {
    const PAGES: u64 = 64;
    let contents = contents(PAGES);
    let arena = arena(&contents);
    let mut backend = make(&arena);
    let nodes: Vec<u32> = (0..32).collect();
    let tree = tree_of(&contents, &nodes);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut round = 0;
            while !done.load(Memory::Acquire) {
                round += 1;
                arena.write(40, &page(round % 2));
            }
        });
        for _ in 0..200 {
            assert_eq!(backend.keys(&arena, &[PageId(40)]).len(), 1);
            let pairs = [(PageId(40), PageId(1)), (PageId(1), PageId(40))];
            assert!(backend.compare(&arena, &pairs).iter().all(Result::is_ok));
            let twins = backend.search(&arena, TreeReader::new(&tree), &[PageId(40), PageId(33)]);
            assert!(twins[0].is_ok());
            assert_eq!(twins[1], Ok(Some(PageId(1))), "the others' answers are right");
        }
        done.store(true, Memory::Release);
    });
}

fn accounts_grow(make: Make<'_>) {
    let arena = arena(&contents(8));
    let mut backend = make(&arena);
    let before = backend.account();
    backend.keys(&arena, &ids(0..8));
    let keyed = backend.account();
    backend.compare(&arena, &[(PageId(0), PageId(4))]);
    let compared = backend.account();
    assert_eq!((keyed.pages - before.pages, compared.pages - keyed.pages), (8, 1));
    assert!(keyed.bytes > before.bytes && compared.bytes > keyed.bytes);
    assert_eq!(compared.comparisons, keyed.comparisons + 1);
    assert!(compared.wall_ns > before.wall_ns);
}
