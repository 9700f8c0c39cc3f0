use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

mod churn;

/// Every slot may be rewritten at once.
const AT_ONCE: Reuse = Reuse {
    quarantine: 0,
    spare_percent: 0,
};

fn slot(n: u32) -> Slot {
    Slot::try_new(n).unwrap()
}

/// As the store does it: a segment is made when the others have no free slot.
fn allocate(allocator: &mut Allocator, n: u32) -> Option<Run> {
    allocator.allocate_run(n).or_else(|| {
        let number = allocator.next_segment()?;
        allocator.add_segment(number);
        allocator.allocate_run(n)
    })
}

fn run(allocator: &mut Allocator, n: u32) -> Option<(u32, u32)> {
    allocate(allocator, n).map(|run| (run.first.number(), run.len))
}

fn huge(allocator: &mut Allocator) -> Option<u32> {
    allocator.allocate_huge_page().map(|run| run.first.number())
}

fn free(allocator: &mut Allocator, slots: impl IntoIterator<Item = u32>) {
    slots.into_iter().for_each(|n| _ = allocator.free(slot(n)));
}

#[test]
fn runs_are_consecutive_and_fill_holes_first() {
    let mut allocator = Allocator::new(MAX_SLOTS, AT_ONCE);
    assert_eq!(run(&mut allocator, 100), Some((0, 100)));
    assert_eq!(run(&mut allocator, 500), Some((100, 500)));
    free(&mut allocator, 10..74);
    assert_eq!(run(&mut allocator, 64), Some((10, 64)));
    free(&mut allocator, 10..73);
    assert_eq!(run(&mut allocator, 64), Some((600, 64)));
}

#[test]
fn a_full_store_says_so_and_falls_back_to_shorter_runs_before() {
    let mut allocator = Allocator::new(10, AT_ONCE);
    assert_eq!(run(&mut allocator, 7), Some((0, 7)));
    assert_eq!(
        (run(&mut allocator, 7), allocator.is_full()),
        (Some((7, 3)), true)
    );
    assert_eq!(run(&mut allocator, 1), None);
    free(&mut allocator, [4]);
    assert!(!allocator.is_full());
    assert_eq!(run(&mut allocator, 7), Some((4, 1)));
}

#[test]
fn the_segment_with_most_used_slots_is_filled_first() {
    let mut allocator = Allocator::new(MAX_SLOTS, AT_ONCE);
    assert_eq!(
        run(&mut allocator, SLOTS_PER_SEGMENT),
        Some((0, SLOTS_PER_SEGMENT))
    );
    assert_eq!(run(&mut allocator, 100), Some((SLOTS_PER_SEGMENT, 100)));
    free(&mut allocator, 50..SLOTS_PER_SEGMENT);
    assert_eq!(run(&mut allocator, 10), Some((SLOTS_PER_SEGMENT + 100, 10)));
}

#[test]
fn huge_pages_lie_as_such_and_are_never_cut() {
    let mut allocator = Allocator::new(3 * HUGE_PAGE_SLOTS + 511, AT_ONCE);
    assert_eq!(run(&mut allocator, 1), Some((0, 1)));
    assert_eq!(huge(&mut allocator), Some(512));
    assert_eq!(run(&mut allocator, 100), Some((1, 100)));
    assert_eq!(huge(&mut allocator), Some(1024));
    assert_eq!(
        huge(&mut allocator),
        None,
        "511 slots are left behind, 411 before"
    );
    free(&mut allocator, 512..1024);
    assert_eq!(huge(&mut allocator), Some(512));
}

#[test]
fn a_huge_page_is_small_until_it_is_collapsed_and_none_once_a_slot_went() {
    let mut allocator = Allocator::new(MAX_SLOTS, AT_ONCE);
    run(&mut allocator, 1);
    let run = allocator.allocate_huge_page().unwrap();
    assert_eq!(allocator.small_huge_page(slot(1022)), None);
    assert_eq!(allocator.small_huge_page(slot(1023)), Some(run));
    allocator.note_collapsed(&run);
    assert_eq!(allocator.small_huge_page(slot(1023)), None);
    allocator.cool(slot(600), 0);
    assert_eq!(allocator.small_huge_page(slot(1023)), None);
}

#[test]
fn an_empty_segment_goes_and_its_number_returns() {
    let mut allocator = Allocator::new(MAX_SLOTS, AT_ONCE);
    assert_eq!(
        run(&mut allocator, SLOTS_PER_SEGMENT),
        Some((0, SLOTS_PER_SEGMENT))
    );
    assert_eq!(run(&mut allocator, 1), Some((SLOTS_PER_SEGMENT, 1)));
    free(&mut allocator, 1..SLOTS_PER_SEGMENT);
    assert_eq!(allocator.free(slot(0)), Some(0));
    assert_eq!(run(&mut allocator, 2), Some((SLOTS_PER_SEGMENT + 1, 2)));
    let rest = SLOTS_PER_SEGMENT - 3;
    assert_eq!(run(&mut allocator, rest), Some((SLOTS_PER_SEGMENT + 3, rest)));
    assert_eq!(allocator.next_segment(), Some(0));
    assert_eq!(run(&mut allocator, 1), Some((0, 1)));
    assert_eq!(allocator.counts().segments_retired_total, 1);
}

#[test]
fn a_slot_is_not_given_again_before_the_quarantine_ends() {
    let reuse = Reuse {
        quarantine: 30,
        spare_percent: 0,
    };
    let mut allocator = Allocator::new(3, reuse);
    assert_eq!(run(&mut allocator, 3), Some((0, 3)));
    assert_eq!(allocator.cool(slot(1), 100), None);
    assert_eq!((run(&mut allocator, 1), allocator.counts().cooling), (None, 1));
    allocator.thaw(130);
    assert_eq!((run(&mut allocator, 1), allocator.is_full()), (None, true));
    allocator.thaw(131);
    assert_eq!(
        (run(&mut allocator, 1), allocator.counts().reused_total),
        (Some((1, 1)), 1)
    );
}

#[test]
fn slots_go_on_cooling_while_they_are_few() {
    let reuse = Reuse {
        quarantine: 30,
        spare_percent: 25,
    };
    let mut allocator = Allocator::new(MAX_SLOTS, reuse);
    assert_eq!(run(&mut allocator, 1000), Some((0, 1000)));
    (0..200).for_each(|n| _ = allocator.cool(slot(n), n));
    allocator.thaw(1_000_000);
    assert_eq!(allocator.counts().cooling, 200, "a quarter of 800 used ones");
    (200..280).for_each(|n| _ = allocator.cool(slot(n), n));
    allocator.thaw(1_000_000);
    assert_eq!(allocator.counts().cooling, 180, "a quarter of 720");
    assert_eq!(run(&mut allocator, 100), Some((0, 100)), "those that went first");
}

#[test]
fn a_store_that_gets_full_keeps_nothing_longer_than_the_quarantine() {
    let reuse = Reuse {
        quarantine: 30,
        spare_percent: 100,
    };
    let mut allocator = Allocator::new(1000, reuse);
    assert_eq!(run(&mut allocator, 1000), Some((0, 1000)));
    (0..100).for_each(|n| _ = allocator.cool(slot(n), 0));
    allocator.thaw(31);
    assert_eq!(
        allocator.counts().cooling,
        75,
        "three quarters of what is not used"
    );
    assert_eq!(run(&mut allocator, 100), Some((0, 25)));
    allocator.thaw(31);
    assert_eq!(allocator.counts().cooling, 56);
}

#[test]
fn a_quarantine_that_never_ends_leaves_retired_segments_only() {
    let reuse = Reuse {
        quarantine: Reuse::NEVER,
        spare_percent: 0,
    };
    let mut allocator = Allocator::new(2, reuse);
    assert_eq!(run(&mut allocator, 2), Some((0, 2)));
    assert_eq!(allocator.cool(slot(0), 0), None);
    allocator.thaw(Second::MAX);
    assert_eq!(run(&mut allocator, 1), None);
    assert_eq!(allocator.cool(slot(1), 0), Some(0));
    assert_eq!(run(&mut allocator, 2), Some((0, 2)));
    assert_eq!(allocator.counts().reused_total, 0);
}

#[derive(Clone, Debug)]
enum Step {
    Run(u32),
    HugePage,
    /// Gives back every so-manieth of the used slots, which were not in the index.
    Free(u32, u32),
    /// The same, for slots that were.
    Cool(u32, u32),
    Pass(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let every = (1u32..40, 0u32..40);
    let step = prop_oneof![
        6 => (1u32..2000).prop_map(Step::Run),
        2 => Just(Step::HugePage),
        1 => every.clone().prop_map(|(every, from)| Step::Free(every, from)),
        4 => every.prop_map(|(every, from)| Step::Cool(every, from)),
        4 => (0u32..12).prop_map(Step::Pass),
    ];
    proptest::collection::vec(step, 0..80)
}

/// What is known of a slot of the file that its segment has now. Others were never taken.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    Used,
    /// It was given back, and nobody had known of it.
    Unread,
    /// It was in the index until then.
    WasReadable(Second),
}

/// The rule, kept by hand.
struct Oracle {
    slots: HashMap<u32, Known>,
    now: Second,
    reuse: Reuse,
}

impl Oracle {
    /// Slots are about to be written.
    fn write(&mut self, run: Run) -> Result<(), TestCaseError> {
        for slot in run.slots() {
            let before = self.slots.insert(slot.number(), Known::Used);
            if let Some(Known::WasReadable(since)) = before {
                let cooled = self.now - since;
                prop_assert!(
                    cooled >= self.reuse.quarantine,
                    "{slot} was rewritten after {cooled} s"
                );
            }
            prop_assert_ne!(before, Some(Known::Used));
        }
        Ok(())
    }

    /// A slot was given back, and its segment may have been retired.
    fn give_back(&mut self, slot: u32, known: Known, retired: Option<u32>) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.slots.insert(slot, known), Some(Known::Used));
        let number = slot / SLOTS_PER_SEGMENT;
        let of_segment = |slot: &u32| slot / SLOTS_PER_SEGMENT == number;
        let used = self
            .slots
            .iter()
            .any(|(slot, known)| of_segment(slot) && *known == Known::Used);
        prop_assert_eq!(retired, (!used).then_some(number));
        if retired.is_some() {
            self.slots.retain(|slot, _| !of_segment(slot));
        }
        Ok(())
    }

    fn every(&self, every: u32, from: u32) -> Vec<u32> {
        let used = self
            .slots
            .iter()
            .filter(|(slot, known)| **known == Known::Used && (*slot / 5 + from).is_multiple_of(every));
        used.map(|(slot, _)| *slot).collect()
    }

    fn count(&self, is: impl Fn(&Known) -> bool) -> u64 {
        self.slots.values().filter(|known| is(known)).count() as u64
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn what_was_readable_is_not_rewritten_before_its_quarantine_ends(
        steps in steps(),
        quarantine in prop_oneof![Just(0), 1u32..30, Just(Reuse::NEVER)],
        spare_percent in prop_oneof![Just(0u32), Just(25), Just(100)],
        max_slots in prop_oneof![Just(5000u32), Just(SLOTS_PER_SEGMENT + 2000)],
    ) {
        let reuse = Reuse { quarantine, spare_percent };
        let mut allocator = Allocator::new(max_slots, reuse);
        let mut oracle = Oracle { slots: HashMap::new(), now: 0, reuse };
        for step in steps {
            match step {
                Step::Run(n) => match allocate(&mut allocator, n) {
                    Some(run) => {
                        prop_assert!(run.len <= n && run.first.number() + run.len <= max_slots);
                        oracle.write(run)?;
                    }
                    None => prop_assert!(allocator.is_full()),
                },
                Step::HugePage => if let Some(run) = allocator.allocate_huge_page() {
                    prop_assert!(run.len == HUGE_PAGE_SLOTS && run.first.begins_huge_page());
                    oracle.write(run)?;
                },
                Step::Free(every, from) => for n in oracle.every(every, from) {
                    oracle.give_back(n, Known::Unread, allocator.free(slot(n)))?;
                },
                Step::Cool(every, from) => for n in oracle.every(every, from) {
                    let retired = allocator.cool(slot(n), oracle.now);
                    oracle.give_back(n, Known::WasReadable(oracle.now), retired)?;
                },
                Step::Pass(seconds) => {
                    oracle.now += seconds;
                    allocator.thaw(oracle.now);
                    // No more is held back than the rule says.
                    let counts = allocator.counts();
                    let wanted = counts.used * u64::from(spare_percent) / 100;
                    let young = |known: &Known| {
                        matches!(known, Known::WasReadable(since) if oracle.now - since <= quarantine)
                    };
                    prop_assert!(counts.cooling <= wanted.max(oracle.count(young)));
                }
            }
            let counts = allocator.counts();
            prop_assert_eq!(counts.used, oracle.count(|known| *known == Known::Used));
            let readable = oracle.count(|known| matches!(known, Known::WasReadable(_)));
            prop_assert!(counts.cooling <= readable);
            prop_assert!(counts.used + counts.cooling + counts.reusable <= max_slots.into());
        }
    }
}
