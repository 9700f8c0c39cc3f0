//! The map against an oracle: the states alone, from which references, keys and mappings are counted anew.

use super::*;
use crate::memory::hint::Hint;
use crate::memory::page_state::Orphan;
use crate::memory::thp_state::{Asked, Use};
use crate::merge::admission::{Admission, Facts, Obstacle, Terms, Verdict};
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

/// What the engine may do with a page, or with the chunk around it.
#[derive(Clone, Copy, Debug)]
enum Step {
    Written(bool),
    KeyInHuge(u64),
    Sight(u64),
    Repeat,
    Changed,
    KeyAnew,
    Defer(Option<u32>),
    GiveUp(u32),
    Share(u32, bool),
    Follow(u32),
    Bridge(u32),
    Carry(u32),
    Zero,
    Pack,
    NotMerged(NotMerged),
    Copied,
    KeyCopy(u64),
    Say(Hint),
    See(bool),
    Read,
    ForgetCopy,
    CopyMayBePinned,
    Broken,
    Private,
    Forget,
    LoseStore,
    /// The memory goes, and other memory comes in its place.
    Replug,
    Chunk(ChunkStep),
}

/// What the engine may do with a chunk, or with what it knows of all.
#[derive(Clone, Copy, Debug)]
enum ChunkStep {
    Visit(bool),
    Split,
    Collapsed,
    OwnMapping,
    Zero,
    Look,
    Released,
    /// What has no effect on any page.
    Rest,
}

fn hints() -> impl Strategy<Value = Hint> {
    let all = vec![Hint::NONE, Hint::NEVER, Hint::FREE, Hint::SOON, Hint::WORTH];
    proptest::sample::select(all)
}

fn steps() -> impl Strategy<Value = Step> {
    let why = prop_oneof![
        Just(NotMerged::Pinned),
        Just(NotMerged::Stayed),
        Just(NotMerged::Returned)
    ];
    let of_chunks = prop_oneof![
        any::<bool>().prop_map(ChunkStep::Visit),
        Just(ChunkStep::Split),
        Just(ChunkStep::Collapsed),
        Just(ChunkStep::OwnMapping),
        Just(ChunkStep::Zero),
        Just(ChunkStep::Look),
        Just(ChunkStep::Released),
        Just(ChunkStep::Rest),
    ];
    let of_pages = prop_oneof![
        3 => any::<bool>().prop_map(Step::Written),
        1 => (0u64..9).prop_map(Step::KeyInHuge),
        4 => (0u64..9).prop_map(Step::Sight),
        1 => Just(Step::Repeat),
        1 => Just(Step::Changed),
        1 => Just(Step::KeyAnew),
        1 => proptest::option::of(0u32..40).prop_map(Step::Defer),
        1 => (0u32..40).prop_map(Step::GiveUp),
        6 => (0u32..40, any::<bool>()).prop_map(|(slot, counted)| Step::Share(slot, counted)),
        2 => (0u32..40).prop_map(Step::Follow),
        2 => (0u32..40).prop_map(Step::Bridge),
        2 => (0u32..40).prop_map(Step::Carry),
        1 => Just(Step::Zero),
        3 => Just(Step::Pack),
        1 => why.prop_map(Step::NotMerged),
        2 => Just(Step::Copied),
        1 => (0u64..9).prop_map(Step::KeyCopy),
        2 => hints().prop_map(Step::Say),
        1 => any::<bool>().prop_map(Step::See),
        1 => Just(Step::Read),
    ];
    let others = prop_oneof![
        1 => Just(Step::ForgetCopy),
        1 => Just(Step::CopyMayBePinned),
        1 => Just(Step::Broken),
        2 => Just(Step::Private),
        1 => Just(Step::Forget),
        1 => Just(Step::LoseStore),
        1 => Just(Step::Replug),
        4 => of_chunks.prop_map(Step::Chunk),
    ];
    prop_oneof![30 => of_pages, 12 => others]
}

fn may_be_shared(backing: Backing) -> bool {
    backing == Backing::Private || backing.is_copied()
}

/// What others know: the store, of what it was told, and the kernel, of what it maps.
#[derive(Debug, Default)]
struct Others {
    /// References that the store counts.
    references: HashMap<u32, i64>,
    /// Keys that were withdrawn in the last step.
    withdrawn: Vec<u64>,
    /// Mappings that pages' states do not show.
    own_mappings: i64,
}

impl Others {
    /// The store publishes a page, and counts a reference for it.
    fn publish(&mut self, slot: u32) {
        *self.references.entry(slot).or_default() += 1;
    }

    /// Tells the store all there is to tell.
    fn tell(&mut self, map: &mut PageMap) {
        self.withdrawn.clear();
        while !map.outbox().is_empty() {
            let told = map.next_message();
            for delta in told.refs {
                *self.references.entry(delta.slot).or_default() += i64::from(delta.delta);
            }
            self.withdrawn.extend(told.withdrawals);
        }
        map.tell_refs_only();
        map.forget_outbox(); // of which nothing is left
    }
}

/// Plays a step, if the engine could: a stage looks at the state before it acts.
fn play(map: &mut PageMap, others: &mut Others, page: Page, step: Step) {
    let state = map.state(page);
    let may = |next| state.may_become(next);
    match step {
        Step::Written(protected) => {
            map.note_written(page, protected);
        }
        Step::Say(hint) => {
            map.say(page, hint);
            let withheld = hint.has(Hint::NEVER) || map.is_withheld(page);
            assert!(!withheld || map.known(page).candidate().is_none());
        }
        Step::See(written) => map.see(page, written),
        Step::Read => {
            map.note_read(page);
            assert!(!map.keys_at_once(page) || !map.is_withheld(page));
        }
        Step::KeyInHuge(n) => {
            map.forget_reads(map.chunk_of(page));
            assert!(!map.hint(page).has(Hint::READ));
            map.key_in_huge(page, key(n));
        }
        Step::Sight(n) => map.sight(page, key(n), 1),
        Step::Repeat => {
            if let Some(key) = state.known.candidate() {
                map.withdraw_sightings(&[(page, key)]);
                map.sight(page, key, 1);
                map.note_ambiguous(key);
            }
        }
        Step::Changed if map.private_candidate(page).is_some() => map.candidate_changed(page),
        Step::KeyAnew => map.key_anew(page),
        Step::Defer(published) => {
            published.into_iter().for_each(|n| others.publish(n));
            map.defer(page, published.map(slot));
        }
        Step::GiveUp(n) => {
            others.publish(n);
            map.give_up_published(Some(slot(n)));
            // And one that is held for a page, and given up again.
            map.note_held(slot(n));
            map.give_up_published(Some(slot(n)));
        }
        Step::Share(n, counted) if may_be_shared(state.backing) => {
            let reference = if counted {
                others.publish(n);
                Reference::Counted
            } else {
                Reference::New
            };
            map.share(page, slot(n), reference);
        }
        Step::Follow(n) if matches!(state.backing, Backing::Slot(from) if from != slot(n)) => {
            map.follow(page, slot(n));
        }
        Step::Bridge(n) if map.private_candidate(page).is_some() => map.bridge(page, slot(n)),
        Step::Carry(n) if matches!(state.backing, Backing::CopiedOnWrite(_)) => map.carry(page, slot(n)),
        Step::Zero if may(PageState::unkeyed(Backing::Zero)) => map.zero(page),
        Step::Pack => match state.backing {
            Backing::Private => {
                map.watch_for_cold();
                assert!(!map.stood_still(page) || map.private_candidate(page).is_some());
                map.pack(page);
            }
            Backing::Packed => map.unpack(page),
            _ => {}
        },
        Step::NotMerged(why) => map.not_merged(page, why, 1),
        Step::Copied if state.backing.maps_a_slot() => map.copied_by_kernel(page),
        Step::KeyCopy(n) if state.backing.is_copied() => map.key_copy(page, Some(key(n))),
        Step::ForgetCopy if state.backing.is_copied() => map.forget_copy(page),
        Step::CopyMayBePinned if state.backing.is_copied() => map.copy_may_be_pinned(page, 1),
        Step::Broken if state.backing.maps_a_slot() => map.broken_by_service(page),
        Step::Private if state.backing == Backing::Zero => map.fill(page),
        Step::Private if may(PageState::UNTRACKED) => map.made_private(page),
        Step::Forget => map.forget(page..page + 1),
        Step::LoseStore => {
            map.orphan_all();
            others.references.clear();
        }
        Step::Replug => {
            let before = map.memory().clone();
            let address = before.address(page);
            map.unsay(page..page + 1);
            map.forget(page..page + 1);
            map.set_memory(Arc::new(before.without(&(address..address + bytes(1)))));
            map.set_memory(before);
        }
        Step::Chunk(step) => play_chunk(map, others, map.chunk_of(page), step),
        _ => {}
    }
    others.tell(map);
}

fn play_chunk(map: &mut PageMap, others: &mut Others, chunk: usize, step: ChunkStep) {
    match step {
        ChunkStep::Visit(true) => map.found_huge(chunk),
        ChunkStep::Visit(false) => {
            map.found_small(chunk);
            map.end_visit(chunk, true);
        }
        ChunkStep::Split => map.note_split(chunk),
        ChunkStep::Collapsed => map.note_collapsed(chunk),
        ChunkStep::OwnMapping => {
            let before = map.vmas();
            map.note_own_mapping(chunk);
            others.own_mappings += map.vmas() - before;
        }
        ChunkStep::Zero => {
            let mut pages = map.chunk_at(chunk).pages.clone();
            if pages.all(|page| matches!(map.backing(page), Backing::Private | Backing::Zero)) {
                map.note_huge_zero(chunk);
            }
        }
        ChunkStep::Look => {
            if map.look_due(chunk) {
                map.looked(chunk, &[Some(7); 4]);
                map.look_again(chunk);
            }
            map.note_twins(chunk, 3, true);
            map.note_contended(chunk);
            map.stayed_huge(chunk);
            map.note_repeated(chunk, 0, 9);
            map.note_asked(chunk, Asked::Sample);
            map.ask_about_all(chunk, true);
            map.note_use(chunk, Use::AT_ONCE);
            map.sample_due(chunk);
            map.take_breaks(chunk);
            map.delay_rebuild(chunk, 1);
            map.rebuild_waits(chunk, true);
        }
        ChunkStep::Released => {
            map.lend(chunk);
            map.take_back(chunk);
        }
        ChunkStep::Rest => {
            map.note_faults();
            map.take_unchecked_part(chunk);
            map.take_unchecked(chunk);
            map.take_overwritten(chunk);
            let any = map.copies_due(chunk);
            map.looked_at_copies(chunk, any);
            map.defer_chunk(chunk, 1);
            map.end_pass(9);
            map.set_pays_after(16);
            map.let_time_pass(8);
            map.requeue(map.chunk_at(chunk).pages.start);
            map.requeue_chunk(chunk);
            map.requeue_all();
            map.count_repetition();
            // As many as were estimated.
            map.set_vmas(usize::try_from(map.vmas()).unwrap());
            map.no_vma_is_left(1);
            map.asks_for_vmas_again(9);
        }
    }
}

/// Whoever adds a transition has it played here.
#[test]
fn every_transition_is_played() {
    let memory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/memory");
    let parts = std::fs::read_dir(memory.join("page_map")).unwrap();
    let parts = parts.map(|part| part.unwrap().path());
    let files = parts.filter(|part| !part.ends_with("tests.rs"));
    let sources: Vec<String> = files
        .chain([memory.join("page_map.rs")])
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect();
    let functions = sources
        .iter()
        .flat_map(|source| source.split("pub(crate) fn ").skip(1));
    let transitions: Vec<&str> = functions
        .filter_map(|function| function.split_once('('))
        .filter(|(_, rest)| rest.trim_start().starts_with("&mut self"))
        .map(|(name, _)| name)
        .collect();
    let tests = include_str!("tests.rs");
    let played = &tests[tests.find("impl Others").unwrap()..tests.find("fn every_transition").unwrap()];
    let left_out = transitions
        .iter()
        .filter(|name| !played.contains(&format!("map.{name}(")));
    assert_eq!(Vec::from_iter(left_out), Vec::<&&str>::new());
    assert!(transitions.len() > 40, "{transitions:?}");
}

impl PageMap {
    /// As if so many boundaries had been counted in a chunk.
    pub(crate) fn set_fragments(&mut self, chunk: usize, fragments: u16) {
        self.chunks[chunk].fragments = fragments;
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
        let (mut map, mut others) = (map(), Others::default());
        for (page, step) in steps {
            play(&mut map, &mut others, page, step);
            let mut held: HashMap<u32, i64> = HashMap::new();
            for page in 0..PAGES {
                if let Backing::Slot(slot) = map.backing(page) {
                    *held.entry(slot.number()).or_default() += 1;
                }
            }
            others.references.retain(|_, count| *count != 0);
            prop_assert_eq!(&others.references, &held);
        }
    }

    /// A sighting stands until it is withdrawn or its page found a slot.
    #[test]
    fn every_key_that_ends_unshared_is_withdrawn(steps in proptest::collection::vec((0..PAGES, steps()), 0..120)) {
        let (mut map, mut others) = (map(), Others::default());
        for (page, step) in steps {
            let before: Vec<PageState> = (0..PAGES).map(|page| map.state(page)).collect();
            let lost = matches!(step, Step::LoseStore);
            play(&mut map, &mut others, page, step);
            // Withdrawn to be repeated.
            let repeated = matches!(step, Step::Repeat).then(|| before[page as usize].known.candidate());
            let mut expected: Vec<u64> = repeated.flatten().map(Key::raw).into_iter().collect();
            for (page, old) in (0..PAGES).zip(before) {
                let (now, key) = (map.state(page), old.known.candidate());
                let found = matches!(now.backing, Backing::Slot(_));
                expected.extend(key.filter(|_| now.known != old.known && !found && !lost).map(Key::raw));
            }
            prop_assert_eq!(&others.withdrawn, &expected);
        }
    }

    /// The estimate of mappings and the chunks' fragments are what counting them anew gives.
    #[test]
    fn mappings_are_counted_as_they_come_and_go(steps in proptest::collection::vec((0..PAGES, steps()), 0..120)) {
        let (mut map, mut others) = (map(), Others::default());
        for (page, step) in steps {
            play(&mut map, &mut others, page, step);
            prop_assert_eq!(map.vmas(), boundaries(&map, 0..PAGES) + others.own_mappings);
            for (at, chunk) in map.memory().chunks().iter().enumerate() {
                let fragments = boundaries(&map, chunk.pages.clone());
                prop_assert_eq!(i64::from(map.chunk(at).fragments), fragments);
            }
        }
    }

    /// Memory that goes and comes is counted as if all were counted anew.
    #[test]
    fn mappings_follow_memory_that_comes_and_goes(
        steps in proptest::collection::vec((0..PAGES, steps()), 0..60),
        gone in (0..PAGES, 0..PAGES),
    ) {
        let (mut map, mut others) = (map(), Others::default());
        steps.into_iter().for_each(|(page, step)| play(&mut map, &mut others, page, step));
        let before = map.memory().clone();
        let (first, last) = (gone.0.min(gone.1), gone.0.max(gone.1));
        let addresses = before.address(first)..before.address(last) + bytes(1);
        let less = Arc::new(before.without(&addresses));
        before.within(&addresses).into_iter().for_each(|pages| map.forget(pages));
        for memory in [less, before] {
            map.set_memory(memory);
            prop_assert_eq!(map.vmas(), boundaries(&map, 0..PAGES) + others.own_mappings);
            for (at, chunk) in map.memory().chunks().iter().enumerate() {
                let fragments = boundaries(&map, chunk.pages.clone());
                prop_assert_eq!(i64::from(map.chunk(at).fragments), fragments);
            }
        }
    }

    /// Mappings are never underrated, although the slot at a copied page's place is only known from its neighbours.
    #[test]
    fn copies_hide_no_mapping(steps in proptest::collection::vec((0..PAGES, steps()), 0..120)) {
        let (mut map, mut others) = (map(), Others::default());
        let mut places: Vec<Option<Slot>> = vec![None; PAGES as usize];
        for (page, step) in steps {
            if matches!(step, Step::LoseStore) {
                continue;
            }
            play(&mut map, &mut others, page, step);
            let place = &mut places[page as usize];
            *place = match (map.backing(page), step) {
                (Backing::Slot(slot), _) => Some(slot),
                (Backing::CopiedOnWrite(_), Step::Bridge(n)) if place.is_none() => Some(slot(n)),
                (Backing::CopiedOnWrite(_), Step::Carry(n)) => Some(slot(n)),
                (Backing::CopiedOnWrite(_), _) => *place,
                _ => None,
            };
            let follows = |a: Option<Slot>, b: Option<Slot>| match (a, b) {
                (Some(a), Some(b)) => a.checked_add_in_segment(1) == Some(b),
                (a, b) => a.is_none() && b.is_none(),
            };
            let apart = |page: &Page| {
                let at = *page as usize;
                // What is packed is the packer's to register, and lies in a mapping of its own.
                let packed = |page: Page| map.backing(page) == Backing::Packed;
                let follow = follows(places[at], places[at + 1]) && packed(*page) == packed(*page + 1);
                map.memory().adjacent(*page) && !follow
            };
            let mappings = (0..PAGES - 1).filter(apart).fold(0, |n, _| n + 1);
            let counted = map.vmas() - others.own_mappings;
            prop_assert!(counted >= mappings, "{counted} < {mappings}");
            if map.counts().copied == 0 {
                prop_assert_eq!(counted, mappings);
            }
        }
    }

    /// Whoever must be looked at again is: private memory of which nothing is known lies in a chunk that is pending, once it
    /// was merged, returned or changed.
    #[test]
    fn what_came_back_is_visited_again(steps in proptest::collection::vec((0..PAGES, steps()), 0..60)) {
        let (mut map, mut others) = (map(), Others::default());
        for (page, step) in steps {
            (0..map.chunks().len()).for_each(|chunk| map.end_visit(chunk, false));
            let before = map.backing(page);
            play(&mut map, &mut others, page, step);
            let forgotten = matches!(step, Step::Forget | Step::Replug); // whoever forgets memory knows what becomes of it
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
fn chunks_that_stay_are_not_counted_anew() {
    let mut map = map();
    map.set_fragments(0, 77);
    let apart = map.memory().address(16)..map.memory().address(18);
    let memory = Arc::new(map.memory().without(&apart));
    map.set_memory(memory);
    let fragments: Vec<u16> = map.chunks().iter().map(|chunk| chunk.fragments).collect();
    assert_eq!(fragments, [77, 0, 0, 0]);
}

#[test]
fn a_refusal_of_the_kernel_holds_for_a_while() {
    let mut map = map();
    map.share(3, slot(5), Reference::New);
    map.no_vma_is_left(10);
    assert_eq!((map.vmas_max(), map.has_vmas_for(1)), (2, false));
    map.made_private(3);
    assert!(map.has_vmas_for(2) && !map.has_vmas_for(3));
    let asks: Vec<u64> = (10..200).filter(|pass| map.asks_for_vmas_again(*pass)).collect();
    assert_eq!((asks, map.vmas_max()), (vec![12], 1000));
    // Refused again soon, and then for good.
    let mut asks = Vec::new();
    for pass in 76..4000 {
        if map.asks_for_vmas_again(pass) || pass == 76 {
            map.no_vma_is_left(pass);
            asks.push(pass);
        }
    }
    assert_eq!(asks, [76, 78, 82, 90, 106, 138, 202, 330, 586, 1098, 2122, 3146]);
}

#[test]
fn a_huge_page_of_zeros_leaves_an_empty_place() {
    let start = 4 * HUGE_SIZE;
    let memory = Arc::new(Memory::made_up(std::slice::from_ref(&(start..start + HUGE_SIZE))));
    let mut map = PageMap::new(memory, 1000, 0);
    map.found_huge(0);
    (0..9).for_each(|page| map.sight(page, key(7), 1));
    map.note_huge_zero(0);
    assert_eq!(
        (map.counts().zero, map.counts().candidates),
        (CHUNK_PAGES as u64, 0)
    );
    assert_eq!(map.next_message().withdrawals, [7; 9]);
    assert!(!map.chunk(0).huge && map.chunk(0).pending);
}

#[test]
fn a_dummy_backing_takes_its_place_among_the_others() {
    let mut map = map();
    let page = PageState::unkeyed(Backing::Dummy(77));
    map.set(3, page);
    assert_eq!((map.state(3), map.counts().dummy, map.vmas()), (page, 1, 0));
    // Who looks for pages to merge, asks whether one may be, or gives up what a lost store had, has not heard of it, and is right.
    let admission = Admission {
        map: &map,
        terms: Terms::default(),
    };
    let verdicts = [Some(slot(5)), None].map(|slot| admission.may_merge(3, slot, Facts::default()));
    assert_eq!(verdicts, [Verdict::Refuse(Obstacle::Changed); 2]);
    assert_eq!(
        admission.may_merge(4, Some(slot(5)), Facts::default()),
        Verdict::Merge
    );
    map.orphan_all();
    assert_eq!(map.state(3), page);
    assert!(map.backing(3).is_kept_elsewhere() && map.backing(3).stays_where_it_is());
    assert!(!map.backing(3).in_file_mapping() && !map.backing(3).is_anonymous());
    map.made_private(3);
    assert_eq!((map.state(3), map.counts().dummy), (PageState::UNTRACKED, 0));
}

#[test]
fn a_page_that_is_broken_again_and_again_is_left_alone_and_its_neighbours_are_not() {
    let mut map = map();
    map.set_pays_after(16);
    (0..6).for_each(|page| map.share(page, slot(30 + page), Reference::New));
    let mut shared = Vec::new();
    for pass in 0..200 {
        if map.backing(2) == Backing::Private && !map.is_paused(2) {
            map.share(2, slot(32), Reference::New);
            shared.push(pass);
        }
        if map.backing(2) != Backing::Private && shared.last().is_none_or(|since| since + 3 <= pass) {
            map.broken_by_service(2);
        }
        map.let_time_pass(pass);
    }
    assert_eq!((map.early_breaks(), map.paused()), (shared.len() as u64 + 1, 1));
    let pauses: Vec<u64> = shared.windows(2).map(|two| two[1] - two[0]).collect();
    assert!(
        pauses.windows(2).all(|two| two[1] > two[0] + two[0] / 2),
        "{pauses:?}"
    );
    assert!(
        (0..6)
            .filter(|page| *page != 2)
            .all(|page| !map.is_paused(page) && map.backing(page).maps_a_slot())
    );
    // Memory that took its place is not what it was.
    map.forget(2..3);
    assert_eq!(map.paused(), 0);
}

#[test]
fn a_chunk_is_looked_at_when_a_pause_has_ended_wherever_it_was_meanwhile() {
    let mut map = map();
    map.set_pays_after(16);
    map.share(2, slot(30), Reference::New);
    map.copied_by_kernel(2);
    assert!(map.is_paused(2) && map.copies_due(0));
    map.looked_at_copies(0, false);
    map.end_visit(0, false);
    map.lend(0);
    (0..16).for_each(|pass| map.let_time_pass(pass));
    map.take_back(0);
    assert!(!map.is_paused(2) && map.copies_due(0) && map.chunk(0).pending && !map.chunk(0).ticking);
}

#[test]
fn nothing_is_left_alone_if_that_is_wanted() {
    let mut map = map();
    map.set_pays_after(0);
    map.share(2, slot(30), Reference::New);
    map.broken_by_service(2);
    assert_eq!(
        (map.is_paused(2), map.early_breaks(), map.chunk(0).ticking),
        (false, 0, false)
    );
}
