use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

mod churn;

fn slot(n: u32) -> Slot {
    Slot::try_new(n).unwrap()
}

/// As the store does it: a segment is made when the others have no room, and scraps are taken when none can be made.
fn allocate(allocator: &mut Allocator, n: u32, purpose: Purpose) -> Option<Run> {
    allocator.allocate_run(n, purpose, 8).or_else(|| {
        if let Some(number) = allocator.next_segment(purpose) {
            allocator.add_segment(number, purpose);
        }
        allocator.allocate_run(n, purpose, 1)
    })
}

fn run(allocator: &mut Allocator, n: u32) -> Option<(u32, u32)> {
    allocate(allocator, n, Purpose::New).map(|run| (run.first.number(), run.len))
}

fn huge(allocator: &mut Allocator) -> Option<u32> {
    allocator
        .allocate_huge_page(Purpose::New)
        .map(|run| run.first.number())
}

fn give_back(allocator: &mut Allocator, slots: impl IntoIterator<Item = u32>) {
    slots.into_iter().for_each(|n| _ = allocator.give_back(slot(n)));
}

fn bury(allocator: &mut Allocator, slots: impl IntoIterator<Item = u32>) {
    slots.into_iter().for_each(|n| _ = allocator.bury(slot(n)));
}

#[test]
fn runs_are_consecutive_and_fill_what_nobody_has_seen() {
    let mut allocator = Allocator::new(MAX_SLOTS, false);
    assert_eq!(run(&mut allocator, 100), Some((0, 100)));
    assert_eq!(run(&mut allocator, 500), Some((100, 500)));
    give_back(&mut allocator, 10..74);
    assert_eq!(run(&mut allocator, 64), Some((10, 64)));
    give_back(&mut allocator, 10..73);
    assert_eq!(run(&mut allocator, 64), Some((600, 64)));
}

#[test]
fn a_dead_slot_is_not_taken_again() {
    let mut allocator = Allocator::new(MAX_SLOTS, false);
    assert_eq!(run(&mut allocator, 100), Some((0, 100)));
    bury(&mut allocator, 10..74);
    assert_eq!(run(&mut allocator, 64), Some((100, 64)));
    let staying = Tally { used: 100, dead: 64 };
    assert_eq!(allocator.counts().staying, staying);
    allocator.revive(slot(10));
    assert!(allocator.is_used(slot(10)) && !allocator.is_used(slot(11)));
}

#[test]
fn a_full_store_says_so_and_falls_back_to_shorter_runs_before() {
    let mut allocator = Allocator::new(10, false);
    assert_eq!(run(&mut allocator, 7), Some((0, 7)));
    assert_eq!(
        (run(&mut allocator, 7), allocator.is_full()),
        (Some((7, 3)), true)
    );
    assert_eq!(run(&mut allocator, 1), None);
    give_back(&mut allocator, [4]);
    assert!(!allocator.is_full());
    assert_eq!(run(&mut allocator, 7), Some((4, 1)));
    bury(&mut allocator, [4]);
    assert_eq!((run(&mut allocator, 1), allocator.is_full()), (None, true));
}

#[test]
fn a_full_store_is_emptied_of_what_is_dead() {
    let mut allocator = Allocator::new(100, false);
    run(&mut allocator, 100);
    bury(&mut allocator, 0..2);
    assert_eq!(allocator.begin_evacuation(), None, "two are not worth it");
    bury(&mut allocator, 2..10);
    assert_eq!(allocator.begin_evacuation(), Some(0));
    assert_eq!(allocator.begin_evacuation(), None);
    assert_eq!(
        allocate(&mut allocator, 90, Purpose::Survivors),
        Some(Run::new(1, 0, 90)),
        "beyond the limit while it lasts"
    );
    bury(&mut allocator, 10..100);
    assert!(!allocator.is_full());
}

#[test]
fn the_segment_with_most_used_slots_is_filled_first() {
    let mut allocator = Allocator::new(MAX_SLOTS, false);
    assert_eq!(
        run(&mut allocator, SLOTS_PER_SEGMENT),
        Some((0, SLOTS_PER_SEGMENT))
    );
    assert_eq!(run(&mut allocator, 100), Some((SLOTS_PER_SEGMENT, 100)));
    give_back(&mut allocator, 50..SLOTS_PER_SEGMENT);
    assert_eq!(run(&mut allocator, 10), Some((SLOTS_PER_SEGMENT + 100, 10)));
}

#[test]
fn a_run_is_not_cut_into_scraps_while_a_segment_can_be_made() {
    let mut allocator = Allocator::new(MAX_SLOTS, false);
    run(&mut allocator, SLOTS_PER_SEGMENT);
    give_back(&mut allocator, (0..1000).step_by(5));
    assert_eq!(run(&mut allocator, 20), Some((SLOTS_PER_SEGMENT, 20)));
    assert_eq!(run(&mut allocator, 1), Some((0, 1)));
}

#[test]
fn huge_pages_lie_as_such_and_are_never_cut() {
    let mut allocator = Allocator::new(3 * HUGE + 511, false);
    assert_eq!(run(&mut allocator, 1), Some((0, 1)));
    assert_eq!(huge(&mut allocator), Some(512));
    assert_eq!(run(&mut allocator, 100), Some((1, 100)));
    assert_eq!(huge(&mut allocator), Some(1024));
    assert_eq!(run(&mut allocator, 600), Some((1536, 600)));
    assert_eq!(huge(&mut allocator), None, "322 slots are left");
    give_back(&mut allocator, 512..1024);
    assert_eq!(huge(&mut allocator), Some(512));
}

#[test]
fn a_huge_page_is_small_until_it_is_collapsed_and_none_once_a_slot_went() {
    let mut allocator = Allocator::new(MAX_SLOTS, false);
    run(&mut allocator, 1);
    let run = allocator.allocate_huge_page(Purpose::New).unwrap();
    assert_eq!(allocator.small_huge_page(slot(1022)), None);
    assert_eq!(allocator.small_huge_page(slot(1023)), Some(run));
    allocator.note_collapsed(&run);
    assert_eq!(allocator.small_huge_page(slot(1023)), None);
    allocator.bury(slot(600));
    assert_eq!(allocator.small_huge_page(slot(1023)), None);
}

#[test]
fn a_segment_without_a_live_slot_goes_and_its_number_returns_when_it_is_released() {
    let mut allocator = Allocator::new(MAX_SLOTS, false);
    assert_eq!(
        run(&mut allocator, SLOTS_PER_SEGMENT),
        Some((0, SLOTS_PER_SEGMENT))
    );
    assert_eq!(run(&mut allocator, 1), Some((SLOTS_PER_SEGMENT, 1)));
    bury(&mut allocator, 1..SLOTS_PER_SEGMENT);
    assert_eq!(allocator.bury(slot(0)), Some(0));
    assert_eq!(allocator.retire_idle(), None);
    assert_eq!(allocator.next_segment(Purpose::New), Some(2));
    allocator.revive(slot(7));
    assert_eq!(allocator.bury(slot(7)), None, "it went already");
    allocator.release(0);
    assert_eq!(allocator.next_segment(Purpose::New), Some(0));
    run(&mut allocator, SLOTS_PER_SEGMENT - 1);
    assert_eq!(run(&mut allocator, 9), Some((0, 9)));
    assert_eq!(allocator.counts().segments_retired_total, 1);
}

#[test]
fn a_segment_that_takes_pages_goes_only_when_it_is_asked_for() {
    let mut allocator = Allocator::new(MAX_SLOTS, false);
    run(&mut allocator, 1);
    assert_eq!(allocator.bury(slot(0)), None);
    assert_eq!(run(&mut allocator, 1), Some((1, 1)));
    assert_eq!((allocator.retire_idle(), allocator.bury(slot(1))), (None, None));
    assert_eq!(
        (allocator.retire_idle(), allocator.retire_idle()),
        (Some(0), None)
    );
    assert_eq!(allocator.counts().staying, Tally::default());
}

#[test]
fn pieces_keep_short_holes_and_huge_pages() {
    let mut allocator = Allocator::new(MAX_SLOTS, false);
    run(&mut allocator, 100);
    let whole = allocator.allocate_huge_page(Purpose::New).unwrap();
    give_back(&mut allocator, 10..13);
    bury(&mut allocator, (0..3).chain(20..24).chain(30..90));
    let pieces = |most| {
        let (mut from, mut pieces) = (0, Vec::new());
        while let Some(piece) = allocator.next_piece(0, from, most) {
            let start = piece.run.first.number();
            from = start + piece.run.len;
            pieces.push((start..from, piece.huge_page));
        }
        pieces
    };
    let huge = whole.first.number()..whole.first.number() + HUGE;
    assert_eq!(
        pieces(512),
        [
            (3..20, false),
            (24..30, false),
            (90..100, false),
            (huge.clone(), true)
        ]
    );
    assert_eq!(
        pieces(9),
        [
            (3..10, false),
            (13..20, false),
            (24..30, false),
            (90..99, false),
            (99..100, false),
            (huge, true)
        ]
    );
}

#[test]
fn a_dead_slot_keeps_its_place_beside_a_long_run_only() {
    let mut allocator = Allocator::new(MAX_SLOTS, false);
    run(&mut allocator, 160);
    // In use between them: 16, 15 and 4, 31, 15, 32, 38 in a row.
    bury(&mut allocator, [16, 32, 37, 69, 85, 86, 119, 120, 121]);
    let (mut from, mut pieces) = (0, Vec::new());
    while let Some(piece) = allocator.next_piece(0, from, 512) {
        let start = piece.run.first.number();
        from = start + piece.run.len;
        pieces.push(start..from);
    }
    assert_eq!(pieces, [0..32, 33..119, 122..160]);
}

#[derive(Clone, Debug)]
enum Step {
    Run(u32, bool),
    HugePage(bool),
    /// Gives back every so-manieth of the used slots, which were not in the index.
    GiveBack(u32, u32),
    /// Nobody references every so-manieth of the used slots any more.
    Bury(u32, u32),
    /// Every so-manieth of the dead slots is referenced again.
    Revive(u32, u32),
    Evacuate,
    RetireIdle,
    /// Releases what was retired.
    Release,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let every = (1u32..40, 0u32..40);
    let step = prop_oneof![
        6 => (1u32..2000, any::<bool>()).prop_map(|(n, survivors)| Step::Run(n, survivors)),
        2 => any::<bool>().prop_map(Step::HugePage),
        1 => every.clone().prop_map(|(every, from)| Step::GiveBack(every, from)),
        4 => every.clone().prop_map(|(every, from)| Step::Bury(every, from)),
        1 => every.prop_map(|(every, from)| Step::Revive(every + 30, from)),
        2 => Just(Step::Evacuate),
        1 => Just(Step::RetireIdle),
        2 => Just(Step::Release),
    ];
    proptest::collection::vec(step, 0..80)
}

/// What is known of a slot of the file that its segment has now. Others were never taken.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    Used,
    /// It was given back, and nobody had known of it.
    Unread,
    Dead,
}

/// The rule, kept by hand.
#[derive(Default)]
struct Oracle {
    slots: HashMap<u32, Known>,
    leaving: Vec<u32>,
    retired: Vec<u32>,
}

impl Oracle {
    /// Slots are about to be written.
    fn write(&mut self, run: Run) -> Result<(), TestCaseError> {
        prop_assert!(!self.leaving.contains(&run.first.segment()));
        prop_assert!(!self.retired.contains(&run.first.segment()));
        for slot in run.slots() {
            let before = self.slots.insert(slot.number(), Known::Used);
            prop_assert!(
                matches!(before, None | Some(Known::Unread)),
                "{slot} is written over {before:?}"
            );
        }
        Ok(())
    }

    /// A slot ceased to be used, and its segment may have been retired.
    fn cease(&mut self, slot: u32, known: Known, retired: Option<u32>) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.slots.insert(slot, known), Some(Known::Used));
        let number = slot / SLOTS_PER_SEGMENT;
        let of_segment = |slot: &u32| slot / SLOTS_PER_SEGMENT == number;
        let mut slots = self.slots.iter();
        let used = slots.any(|(slot, known)| of_segment(slot) && *known == Known::Used);
        let taken = self
            .slots
            .iter()
            .filter(|(slot, known)| of_segment(slot) && **known != Known::Unread);
        let takes_pages = taken.count() < SLOTS_PER_SEGMENT as usize && !self.leaving.contains(&number);
        prop_assert_eq!(retired, (!used && !takes_pages).then_some(number));
        retired.into_iter().for_each(|number| self.retire(number));
        Ok(())
    }

    fn retire(&mut self, number: u32) {
        self.slots.retain(|slot, _| slot / SLOTS_PER_SEGMENT != number);
        self.leaving.retain(|leaving| *leaving != number);
        self.retired.push(number);
    }

    fn every(&self, is: Known, every: u32, from: u32) -> Vec<u32> {
        let all = self.slots.iter();
        let some = all.filter(|(slot, known)| **known == is && (*slot / 5 + from).is_multiple_of(every));
        some.map(|(slot, _)| *slot).collect()
    }

    fn tally(&self, leaving: bool) -> Tally {
        let count = |is: Known| {
            let all = self.slots.iter();
            let some = all.filter(|(slot, known)| {
                **known == is && self.leaving.contains(&(*slot / SLOTS_PER_SEGMENT)) == leaving
            });
            some.count() as u64
        };
        Tally {
            used: count(Known::Used),
            dead: count(Known::Dead),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn what_was_readable_is_never_rewritten_in_its_file(
        steps in steps(),
        max_slots in prop_oneof![Just(5000u32), Just(3 * SLOTS_PER_SEGMENT + 2000)],
    ) {
        let (mut allocator, mut oracle) = (Allocator::new(max_slots, false), Oracle::default());
        let purpose = |survivors| if survivors { Purpose::Survivors } else { Purpose::New };
        for step in steps {
            match step {
                Step::Run(n, survivors) => match allocate(&mut allocator, n, purpose(survivors)) {
                    Some(run) => {
                        prop_assert!(run.len <= n);
                        oracle.write(run)?;
                    }
                    None => prop_assert!(allocator.is_full()),
                },
                Step::HugePage(survivors) => {
                    if let Some(run) = allocator.allocate_huge_page(purpose(survivors)) {
                        prop_assert!(run.len == HUGE && run.first.begins_huge_page());
                        oracle.write(run)?;
                    }
                }
                Step::GiveBack(every, from) => for n in oracle.every(Known::Used, every, from) {
                    oracle.cease(n, Known::Unread, allocator.give_back(slot(n)))?;
                },
                Step::Bury(every, from) => for n in oracle.every(Known::Used, every, from) {
                    oracle.cease(n, Known::Dead, allocator.bury(slot(n)))?;
                },
                Step::Revive(every, from) => for n in oracle.every(Known::Dead, every, from) {
                    allocator.revive(slot(n));
                    oracle.slots.insert(n, Known::Used);
                },
                Step::Evacuate => if let Some(number) = allocator.begin_evacuation() {
                    prop_assert!(!oracle.leaving.contains(&number));
                    oracle.leaving.push(number);
                    let dead = oracle.every(Known::Dead, 1, 0);
                    prop_assert!(dead.iter().any(|slot| slot / SLOTS_PER_SEGMENT == number));
                } else {
                    let Tally { used, dead } = allocator.counts().staying;
                    prop_assert!(dead <= used / IN_USE_PER_DEAD + SLACK);
                },
                Step::RetireIdle => while let Some(number) = allocator.retire_idle() {
                    let mut slots = oracle.slots.iter();
                    let used = |(slot, known): (&u32, &Known)| {
                        slot / SLOTS_PER_SEGMENT == number && *known == Known::Used
                    };
                    prop_assert!(!slots.any(used));
                    oracle.retire(number);
                },
                Step::Release => oracle.retired.drain(..).for_each(|number| allocator.release(number)),
            }
            prop_assert_eq!(allocator.counts().staying, oracle.tally(false));
            prop_assert_eq!(allocator.counts().leaving, oracle.tally(true));
            prop_assert_eq!(allocator.counts().segments_leaving, oracle.leaving.len() as u64);
        }
    }
}

#[test]
fn slots_at_random_are_taken_once_each_and_near_to_each_other() {
    let mut allocator = Allocator::new(MAX_SLOTS, true);
    let mut taken = Vec::new();
    for _ in 0..6000 {
        if allocator.lacks_choice(Purpose::New) {
            let number = allocator.next_segment(Purpose::New).unwrap();
            allocator.add_segment(number, Purpose::New);
        }
        let run = allocator.allocate_run(8, Purpose::New, 8).unwrap();
        assert_eq!(run.len, 1);
        // Those that were passed by come, sooner or later.
        assert!(u64::from(run.first.number()) < taken.len() as u64 + 16 * CHOICE);
        taken.push(run.first.number());
    }
    let neighbours = taken.windows(2).filter(|two| two[1] == two[0] + 1).count();
    assert!(neighbours < 60, "{neighbours}");
    assert_eq!(allocator.counts().staying.used, 6000);
    give_back(&mut allocator, taken[..100].iter().copied());
    taken.sort_unstable();
    taken.dedup();
    assert_eq!(taken.len(), 6000);
    assert_eq!(allocator.counts().staying.used, 5900);
}
