//! The map against an oracle: the states alone, from which references, keys and mappings are counted anew.

use super::*;
use crate::memory::page_state::Orphan;
use crate::sys::page_size::{CHUNK_PAGES, HUGE_SIZE, bytes};
use proptest::prelude::*;
use std::collections::HashMap;

/// Pages of the small memory: the end of one chunk, a whole one is too much for a test; the beginning of the next, and a
/// region of its own.
const PAGES: Page = 20;

fn memory() -> Arc<Memory> {
    let start = 7 * HUGE_SIZE - bytes(8);
    let apart = 90 * HUGE_SIZE;
    let memory = Memory::made_up(&[start..start + bytes(14), apart..apart + bytes(6)]);
    assert_eq!((memory.end(), memory.chunks().len()), (PAGES as usize, 3));
    Arc::new(memory)
}

fn map() -> PageMap {
    PageMap::new(memory(), 1000, 0)
}

fn slot(n: u32) -> Slot {
    Slot::try_new(n).unwrap()
}

fn key(n: u64) -> Key {
    Key::try_new(n).unwrap()
}

/// What the engine may do with a page.
#[derive(Clone, Copy, Debug)]
enum Step {
    Written(bool),
    KeyInHuge(u64),
    Sight(u64),
    Changed,
    Defer(Option<u32>),
    Share(u32, bool),
    Bridge(u32),
    Zero,
    NotMerged(NotMerged),
    Copied,
    KeyCopy(u64),
    CopyMayBePinned,
    Private,
    Forget,
    LoseStore,
    Split,
}

fn steps() -> impl Strategy<Value = Step> {
    let why = prop_oneof![
        Just(NotMerged::Pinned),
        Just(NotMerged::Stayed),
        Just(NotMerged::Returned)
    ];
    prop_oneof![
        3 => any::<bool>().prop_map(Step::Written),
        1 => (0u64..9).prop_map(Step::KeyInHuge),
        4 => (0u64..9).prop_map(Step::Sight),
        1 => Just(Step::Changed),
        1 => proptest::option::of(0u32..40).prop_map(Step::Defer),
        6 => (0u32..40, any::<bool>()).prop_map(|(slot, counted)| Step::Share(slot, counted)),
        2 => (0u32..40).prop_map(Step::Bridge),
        1 => Just(Step::Zero),
        1 => why.prop_map(Step::NotMerged),
        2 => Just(Step::Copied),
        1 => (0u64..9).prop_map(Step::KeyCopy),
        1 => Just(Step::CopyMayBePinned),
        2 => Just(Step::Private),
        1 => Just(Step::Forget),
        1 => Just(Step::LoseStore),
        1 => Just(Step::Split),
    ]
}

fn may_be_shared(backing: Backing) -> bool {
    backing == Backing::Private || backing.is_copied()
}

/// Plays a step, if the engine could: a stage looks at the state before it acts.
fn play(map: &mut PageMap, page: Page, step: Step) {
    let state = map.state(page);
    let may = |next| state.may_become(next);
    match step {
        Step::Written(protected) => {
            map.note_written(page, protected);
        }
        Step::KeyInHuge(n) => map.key_in_huge(page, key(n)),
        Step::Sight(n) => map.sight(page, key(n), 1),
        Step::Changed if map.private_candidate(page).is_some() => map.candidate_changed(page),
        Step::Defer(published) => map.defer(page, published.map(slot)),
        Step::Share(n, counted) if may_be_shared(state.backing) => {
            let reference = if counted {
                Reference::Counted
            } else {
                Reference::New
            };
            map.share(page, slot(n), reference);
        }
        Step::Bridge(n) if map.private_candidate(page).is_some() => map.bridge(page, slot(n)),
        Step::Zero if may(PageState::resting(Backing::Zero)) => map.zero(page),
        Step::NotMerged(why) => map.not_merged(page, why, 1),
        Step::Copied if state.backing.maps_a_slot() => map.copied_by_kernel(page),
        Step::KeyCopy(n) if state.backing.is_copied() => map.key_copy(page, Some(key(n))),
        Step::CopyMayBePinned if state.backing.is_copied() => map.copy_may_be_pinned(page, 1),
        Step::Private if may(PageState::UNTRACKED) => map.made_private(page),
        Step::Forget => map.forget(page..page + 1),
        Step::LoseStore => map.orphan_all(),
        Step::Split => {
            let chunk = map.chunk_of(page);
            map.note_split(chunk);
        }
        _ => {}
    }
}

/// Boundaries between mappings, counted by who would map what: an address in a file, or private memory.
fn boundaries(map: &PageMap, pages: Range<Page>) -> i64 {
    let pairs = pages.start.saturating_sub(1)..pages.end;
    let apart =
        |page: &Page| map.memory().adjacent(*page) && !map.backing(page + 1).continues(map.backing(*page));
    pairs.filter(apart).fold(0, |n, _| n + 1)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// References that the store was told of are those that pages hold, whatever happened. Published pages bring one along.
    #[test]
    fn references_balance(steps in proptest::collection::vec((0..PAGES, steps()), 0..120)) {
        let mut map = map();
        let mut told: HashMap<u32, i64> = HashMap::new();
        for (page, step) in steps {
            // The store counts a reference for a page that it has published.
            if let Step::Share(n, true) = step
                && may_be_shared(map.backing(page))
            {
                *told.entry(n).or_default() += 1;
            }
            if let Step::Defer(Some(n)) = step {
                *told.entry(n).or_default() += 1;
            }
            let lost = matches!(step, Step::LoseStore);
            play(&mut map, page, step);
            for delta in std::mem::take(&mut map.outbox.refs) {
                *told.entry(delta.slot).or_default() += i64::from(delta.delta);
            }
            if lost {
                told.clear();
            }
            let mut held: HashMap<u32, i64> = HashMap::new();
            for page in 0..PAGES {
                if let Backing::Slot(slot) = map.backing(page) {
                    *held.entry(slot.number()).or_default() += 1;
                }
            }
            told.retain(|_, count| *count != 0);
            prop_assert_eq!(&told, &held);
        }
    }

    /// A sighting stands until it is withdrawn or its page found a slot.
    #[test]
    fn every_key_that_ends_unshared_is_withdrawn(steps in proptest::collection::vec((0..PAGES, steps()), 0..120)) {
        let mut map = map();
        for (page, step) in steps {
            let before: Vec<PageState> = (0..PAGES).map(|page| map.state(page)).collect();
            let lost = matches!(step, Step::LoseStore);
            play(&mut map, page, step);
            let withdrawn = std::mem::take(&mut map.outbox.withdrawals);
            let mut expected = Vec::new();
            for (page, old) in (0..PAGES).zip(before) {
                let (now, key) = (map.state(page), old.known.candidate());
                let found = matches!(now.backing, Backing::Slot(_));
                expected.extend(key.filter(|_| now.known != old.known && !found && !lost).map(Key::raw));
            }
            prop_assert_eq!(withdrawn, expected);
        }
    }

    /// The estimate of mappings and the chunks' fragments are what counting them anew gives.
    #[test]
    fn mappings_are_counted_as_they_come_and_go(steps in proptest::collection::vec((0..PAGES, steps()), 0..120)) {
        let mut map = map();
        for (page, step) in steps {
            play(&mut map, page, step);
            prop_assert_eq!(map.vmas(), boundaries(&map, 0..PAGES));
            for (at, chunk) in map.memory().chunks().iter().enumerate() {
                let fragments = boundaries(&map, chunk.pages.clone());
                prop_assert_eq!(i64::from(map.chunk(at).fragments), fragments);
            }
        }
    }

    /// Mappings are never underrated, although the slot at a copied page's place is only known from its neighbours.
    #[test]
    fn copies_hide_no_mapping(steps in proptest::collection::vec((0..PAGES, steps()), 0..120)) {
        let mut map = map();
        let mut places: Vec<Option<Slot>> = vec![None; PAGES as usize];
        for (page, step) in steps {
            if matches!(step, Step::LoseStore) {
                continue;
            }
            play(&mut map, page, step);
            let place = &mut places[page as usize];
            *place = match (map.backing(page), step) {
                (Backing::Slot(slot), _) => Some(slot),
                (Backing::CopiedOnWrite(_), Step::Bridge(n)) if place.is_none() => Some(slot(n)),
                (Backing::CopiedOnWrite(_), _) => *place,
                _ => None,
            };
            let follows = |a: Option<Slot>, b: Option<Slot>| match (a, b) {
                (Some(a), Some(b)) => a.checked_add_in_segment(1) == Some(b),
                (a, b) => a.is_none() && b.is_none(),
            };
            let apart = |page: &Page| {
                let at = *page as usize;
                map.memory().adjacent(*page) && !follows(places[at], places[at + 1])
            };
            let mappings = (0..PAGES - 1).filter(apart).fold(0, |n, _| n + 1);
            prop_assert!(map.vmas() >= mappings, "{} < {mappings}", map.vmas());
            if map.counts().copied == 0 {
                prop_assert_eq!(map.vmas(), mappings);
            }
        }
    }

    /// Whoever must be looked at again is: private memory of which nothing is known lies in a chunk that is pending, once it
    /// was merged, returned or changed.
    #[test]
    fn what_came_back_is_visited_again(steps in proptest::collection::vec((0..PAGES, steps()), 0..60)) {
        let mut map = map();
        for (page, step) in steps {
            map.chunks_mut().for_each(|chunk| chunk.pending = false);
            let before = map.backing(page);
            play(&mut map, page, step);
            let forgotten = matches!(step, Step::Forget); // whoever forgets memory knows what becomes of it
            if before.maps_a_slot() && map.backing(page) == Backing::Private && !forgotten {
                prop_assert!(map.chunk(map.chunk_of(page)).pending);
            }
        }
    }
}

#[test]
fn a_lost_store_leaves_its_mappings_counted() {
    let mut map = map();
    (0..4).for_each(|page| map.share(page, slot(page), Reference::New));
    (4..8).for_each(|page| map.share(page, slot(30 - page), Reference::New));
    map.copied_by_kernel(2);
    let vmas = map.vmas();
    assert_eq!(vmas, 5); // a run, four scattered pages, and the rest behind them: five boundaries
    map.orphan_all();
    assert_eq!(map.vmas(), vmas);
    assert_eq!(map.backing(2), Backing::OrphanedCopy(Orphan { begins: false }));
    assert_eq!((map.counts().orphaned, map.counts().copied), (7, 1));
    (0..8)
        .filter(|page| *page != 2)
        .for_each(|page| map.made_private(page));
    assert_eq!(map.vmas(), 2);
}

#[test]
fn a_copy_that_gets_its_slot_back_joins_its_neighbours() {
    let mut map = map();
    (0..6).for_each(|page| map.share(page, slot(30 + page), Reference::New));
    let vmas = map.vmas();
    (1..5).for_each(|page| map.copied_by_kernel(page));
    assert_eq!(map.vmas(), vmas);
    map.share(2, slot(32), Reference::New);
    (3..5).for_each(|page| map.share(page, slot(30 + page), Reference::New));
    assert_eq!(map.vmas(), vmas);
    // Another slot is another mapping.
    map.share(1, slot(7), Reference::New);
    assert_eq!(map.vmas(), vmas + 2);
    assert_eq!(map.counts().copied, 0);
}

#[test]
fn exceptions_in_a_row_lie_in_the_mapping_around_them() {
    let mut map = map();
    map.share(0, slot(30), Reference::New);
    (1..4).for_each(|page| map.sight(page, key(page.into()), 1));
    (1..4).for_each(|page| map.bridge(page, slot(30 + page)));
    map.share(4, slot(34), Reference::New);
    assert_eq!(map.vmas(), 1);
}

#[test]
#[should_panic(expected = "cannot go from")]
fn forbidden_steps_stop_the_engine() {
    let mut map = map();
    map.share(0, slot(1), Reference::New);
    map.share(0, slot(2), Reference::New);
}

#[test]
fn memory_that_goes_takes_its_boundaries_along() {
    let mut map = map();
    (3..6).for_each(|page| map.share(page, slot(30 - page), Reference::New));
    let gone = map.memory().address(4)..map.memory().address(12);
    map.forget(4..12);
    assert_eq!(map.vmas(), 2);
    let memory = Arc::new(map.memory().without(&gone));
    map.set_memory(memory);
    assert_eq!(map.vmas(), 1);
    let fragments: Vec<u16> = map.chunks().iter().map(|chunk| chunk.fragments).collect();
    assert_eq!(fragments, [1, 0, 0]);
}

#[test]
fn a_huge_page_of_zeros_leaves_an_empty_place() {
    let start = 4 * HUGE_SIZE;
    let memory = Arc::new(Memory::made_up(std::slice::from_ref(&(start..start + HUGE_SIZE))));
    let mut map = PageMap::new(memory, 1000, 0);
    map.chunk_mut(0).huge = true;
    (0..9).for_each(|page| map.sight(page, key(7), 1));
    map.note_huge_zero(0);
    assert_eq!(
        (map.counts().zero, map.counts().candidates),
        (CHUNK_PAGES as u64, 0)
    );
    assert_eq!(map.outbox.withdrawals, [7; 9]);
    assert!(!map.chunk(0).huge && map.chunk(0).pending);
}

#[test]
fn a_dummy_backing_takes_its_place_among_the_others() {
    let mut map = map();
    let page = PageState::resting(Backing::Dummy(77));
    map.set(3, page);
    assert_eq!((map.state(3), map.counts().dummy, map.vmas()), (page, 1, 0));
    map.made_private(3);
    assert_eq!((map.state(3), map.counts().dummy), (PageState::UNTRACKED, 0));
}
