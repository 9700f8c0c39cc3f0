//! What every engine that searches does: [`check`].

use super::pages::{IMPOSSIBLE, MISSING, arena, contents, ids, insert, mix, page, set_byte, tree_of};
use crate::compare::{Answer, Arena, Error, Meanwhile, PageId, TreeSearch};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering as Memory};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords, bytes_of};
use vmm_dedup_protocol::tree::{TreeReader, TreeWriter, words};

/// Makes an engine that can read the pages of an arena, and no others.
type Make<'a> = &'a mut dyn FnMut(&Arena) -> Box<dyn TreeSearch>;

/// Runs the suite.
///
/// # Panics
/// If the engine does not conform.
pub fn check(make: Make<'_>) {
    the_order_is_decided_by_every_byte(make);
    a_page_is_its_own_twin(make);
    missing_pages_are_faults(make);
    a_bad_item_leaves_the_others_alone(make);
    empty_questions_have_no_answers(make);
    trees_of_all_sizes_are_searched(make);
    keys_made_on_the_way_are_those_of_the_engine(make);
    pages_of_the_next_question_may_come_meanwhile(make);
    searches_follow_a_tree_that_changes(make);
    searches_race_with_the_trees_writer(make);
    trees_of_nonsense_end(make);
    sets_of_all_sizes_are_searched(make);
    torn_pages_have_answers(make);
    accounts_grow(make);
}

/// A root and two children, of which each byte in turn decides who is less: a search finds a child only by the right order.
fn the_order_is_decided_by_every_byte(make: Make<'_>) {
    let arena = arena(&[page(1); 6]);
    let mut engine = make(&arena);
    let tree: Vec<AtomicU64> = (0..words(3)).map(|_| AtomicU64::new(0)).collect();
    for at in 0..PAGE_WORDS * 8 {
        let (mut less, mut root, mut greater) = (page(1), page(1), page(1));
        // A byte behind the one that differs would decide the other way.
        for (page, byte, behind) in [(&mut less, 10, 255), (&mut root, 11, 128), (&mut greater, 12, 0)] {
            set_byte(page, at, byte);
            if at + 1 < PAGE_WORDS * 8 {
                set_byte(page, at + 1, behind);
            }
        }
        let contents = [root, less, greater];
        for (at, content) in contents.iter().enumerate() {
            arena.write(at, content);
            arena.write(at + 3, content);
        }
        TreeWriter::new(&tree).clear();
        insert(&tree, &contents, &[0, 1, 2]);
        let twins = engine.search(&arena, TreeReader::new(&tree), &ids(3..6));
        let expected = [0, 1, 2].map(|twin| Ok(Some(PageId(twin))));
        assert_eq!(twins, expected, "byte {at}");
        assert_eq!(
            engine.among(&arena, PageId(5), &ids(0..3)),
            Ok(Some(2)),
            "byte {at}"
        );
    }
}

fn a_page_is_its_own_twin(make: Make<'_>) {
    let arena = arena(&[page(1), page(2)]);
    let mut engine = make(&arena);
    assert_eq!(engine.among(&arena, PageId(0), &[PageId(0)]), Ok(Some(0)));
    let tree = tree_of(&[page(1), page(2)], &[1, 0]);
    let twins = engine.search(&arena, TreeReader::new(&tree), &ids(0..2));
    assert_eq!(twins, [Ok(Some(PageId(0))), Ok(Some(PageId(1)))]);
}

fn missing_pages_are_faults(make: Make<'_>) {
    let arena = arena(&[page(1), page(2)]);
    let mut engine = make(&arena);
    for missing in [PageId(2), MISSING, IMPOSSIBLE] {
        let fault = || Error::Fault(missing);
        assert_eq!(engine.among(&arena, missing, &[PageId(0)]), Err(fault()));
        assert_eq!(
            engine.among(&arena, PageId(0), &[PageId(1), missing]),
            Err(fault())
        );
        let tree = tree_of(&[page(1), page(2)], &[0]);
        let twins = engine.search(&arena, TreeReader::new(&tree), &[missing]);
        assert_eq!(twins, [Err(fault())]);
    }
}

fn a_bad_item_leaves_the_others_alone(make: Make<'_>) {
    let contents = [page(1), page(2), page(2)];
    let arena = arena(&contents);
    let mut engine = make(&arena);
    let tree = tree_of(&contents, &[0, 1]);
    let twins = engine.search(&arena, TreeReader::new(&tree), &[MISSING, PageId(2), IMPOSSIBLE]);
    let expected = [
        Err(Error::Fault(MISSING)),
        Ok(Some(PageId(1))),
        Err(Error::Fault(IMPOSSIBLE)),
    ];
    assert_eq!(twins, expected);
}

fn empty_questions_have_no_answers(make: Make<'_>) {
    let arena = arena(&[page(1)]);
    let mut engine = make(&arena);
    assert_eq!(engine.among(&arena, PageId(0), &[]), Ok(None));
    let empty: Vec<AtomicU64> = tree_of(&[page(1)], &[]);
    assert!(engine.search(&arena, TreeReader::new(&empty), &[]).is_empty());
    let twins = engine.search(&arena, TreeReader::new(&empty), &[PageId(0)]);
    assert_eq!(twins, [Ok(None)]);
}

/// What a search among all pages finds: for each candidate, the first node with its content.
fn reference<'c>(
    contents: &'c [PageWords],
    nodes: &[u32],
) -> impl Fn(u64) -> Answer<Option<PageId>> + use<'c> {
    let mut first: HashMap<&[u64], PageId> = HashMap::with_capacity(nodes.len());
    for node in nodes {
        let content = &contents[*node as usize][..];
        first.entry(content).or_insert(PageId::of_node(*node));
    }
    move |candidate| {
        let candidate = usize::try_from(candidate).expect("a page of the arena");
        Ok(first.get(&contents[candidate][..]).copied())
    }
}

/// Trees around the sizes of one and two tables (31 and 1,023 nodes), searched for what they have and have not.
fn trees_of_all_sizes_are_searched(make: Make<'_>) {
    for nodes in [1u32, 2, 3, 30, 31, 32, 33, 64, 100, 500, 1023, 1100] {
        let pages = u64::from(nodes) * 3;
        let contents = contents(pages);
        let arena = arena(&contents);
        let mut engine = make(&arena);
        let nodes: Vec<u32> = (0..nodes).collect();
        let tree = tree_of(&contents, &nodes);
        let twins = engine.search(&arena, TreeReader::new(&tree), &ids(0..pages));
        let reference = reference(&contents, &nodes);
        for (candidate, twin) in (0..).zip(twins) {
            assert_eq!(
                twin,
                reference(candidate),
                "{} nodes, candidate {candidate}",
                nodes.len()
            );
        }
    }
}

/// A key that comes with a search is the one that the engine makes of the page alone; pages with a twin need none.
fn keys_made_on_the_way_are_those_of_the_engine(make: Make<'_>) {
    const PAGES: u64 = 300;
    let contents = contents(PAGES);
    let arena = arena(&contents);
    let mut engine = make(&arena);
    let nodes: Vec<u32> = (0..100).collect();
    let tree = tree_of(&contents, &nodes);
    let nothing = &mut Meanwhile::nothing();
    let searched = engine.search_keyed(&arena, TreeReader::new(&tree), &ids(0..PAGES), nothing);
    let keys = engine.keys(&arena, &ids(0..PAGES));
    assert_eq!(searched.len(), keys.len());
    let reference = reference(&contents, &nodes);
    for (candidate, (searched, key)) in (0..).zip(searched.into_iter().zip(keys)) {
        let searched = searched.expect("the page is there");
        assert_eq!(Ok(searched.twin), reference(candidate));
        assert!(
            searched.key.is_none() || searched.key == key.ok(),
            "candidate {candidate}"
        );
    }
}

/// What the caller does while the engine waits is done once, and may be to write the pages that are searched for next.
fn pages_of_the_next_question_may_come_meanwhile(make: Make<'_>) {
    let contents = contents(100);
    let arena = arena(&contents);
    (50..100).for_each(|at| arena.write(at, &page(1 << 40)));
    let mut engine = make(&arena);
    let nodes: Vec<u32> = (0..50).collect();
    let tree = tree_of(&contents, &nodes);
    let mut done = 0;
    let mut work = || {
        done += 1;
        (50..100).for_each(|at: usize| arena.write(at, &contents[at]));
    };
    let meanwhile = &mut Meanwhile::new(&mut work);
    let mut searched = engine.search_keyed(&arena, TreeReader::new(&tree), &ids(0..50), meanwhile);
    meanwhile.run();
    assert!(meanwhile.is_done());
    let nothing = &mut Meanwhile::nothing();
    searched.extend(engine.search_keyed(&arena, TreeReader::new(&tree), &ids(50..100), nothing));
    assert_eq!(done, 1);
    let reference = reference(&contents, &nodes);
    for (candidate, searched) in (0..).zip(searched) {
        assert_eq!(
            searched.map(|one| one.twin),
            reference(candidate),
            "candidate {candidate}"
        );
    }
}

/// An engine may keep what it has loaded of a tree, but not what has changed since.
fn searches_follow_a_tree_that_changes(make: Make<'_>) {
    let contents = contents(400);
    let arena = arena(&contents);
    let mut engine = make(&arena);
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
        let twins = engine.search(&arena, TreeReader::new(&tree), &ids(0..400));
        let reference = reference(&contents, &nodes);
        for (candidate, twin) in (0..).zip(twins) {
            assert_eq!(twin, reference(candidate), "step {step}");
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
    let mut engine = make(&arena);
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
            let twins = engine.search(&arena, TreeReader::new(&tree), &ids(0..600));
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
    let mut engine = make(&arena);
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
        let twins = engine.search(&arena, TreeReader::new(&tree), &ids(0..PAGES));
        for (candidate, twin) in twins.iter().enumerate() {
            assert_harmless(twin, &contents, candidate);
        }
    }
}

fn sets_of_all_sizes_are_searched(make: Make<'_>) {
    let contents = contents(200);
    let arena = arena(&contents);
    let mut engine = make(&arena);
    for len in [1, 2, 30, 31, 32, 62, 63, 98] {
        let set = ids(1..1 + len);
        // Page 100 equals page 0, page 100 + n equals page n.
        for candidate in [100, 101, 100 + len, 101 + len] {
            let twin = engine.among(&arena, PageId(candidate), &set);
            let expected = set.iter().position(|page| page.0 + 100 == candidate);
            assert_eq!(twin, Ok(expected), "{len} pages, candidate {candidate}");
        }
    }
    let twins = [PageId(150), PageId(50), PageId(150)];
    assert_eq!(
        engine.among(&arena, PageId(50), &twins),
        Ok(Some(0)),
        "the first of several"
    );
}

/// Candidates that change all the time: any answer will do, as long as there is one.
fn torn_pages_have_answers(make: Make<'_>) {
    const PAGES: u64 = 64;
    let contents = contents(PAGES);
    let arena = arena(&contents);
    let mut engine = make(&arena);
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
            let twins = engine.search(&arena, TreeReader::new(&tree), &[PageId(40), PageId(33)]);
            assert!(twins[0].is_ok());
            assert_eq!(twins[1], Ok(Some(PageId(1))), "the others' answers are right");
        }
        done.store(true, Memory::Release);
    });
}

fn accounts_grow(make: Make<'_>) {
    let arena = arena(&contents(8));
    let mut engine = make(&arena);
    let before = engine.account();
    assert_eq!(engine.among(&arena, PageId(0), &[PageId(4)]), Ok(Some(0)));
    let after = engine.account();
    assert_eq!(
        (after.pages, after.comparisons),
        (before.pages + 1, before.comparisons + 1)
    );
    assert!(after.bytes > before.bytes && after.wall_ns > before.wall_ns);
}
