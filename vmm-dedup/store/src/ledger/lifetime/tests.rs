use super::*;
use crate::ledger::slots::SlotState::{Free, Live};
use proptest::prelude::*;
use std::time::Instant;

const SLOTS: u32 = 10;
const MEMBERS: usize = 4;
const FOLLOWERS: u32 = 2;

fn slot(n: u32) -> Slot {
    Slot::try_new(n).unwrap()
}

/// What a member may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connected,
    Orphan,
    Leaving,
}

/// A lifetime in which anything may happen that the store does, in any order.
struct World {
    lifetime: Lifetime,
    members: Vec<(MemberId, Phase)>,
    joined: u16,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Publish,
    PublishSeries,
    Reference,
    Drop,
    Relocate,
    RelocateToTwin,
    RelocateSeries,
    OrphanSome,
    LeaveSome,
    Reclaim,
}

impl Step {
    const ALL: [Self; 10] = [
        Self::Publish,
        Self::PublishSeries,
        Self::Reference,
        Self::Drop,
        Self::Relocate,
        Self::RelocateToTwin,
        Self::RelocateSeries,
        Self::OrphanSome,
        Self::LeaveSome,
        Self::Reclaim,
    ];
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            lifetime: Lifetime::new(1),
            members: Vec::new(),
            joined: 0,
        };
        (0..MEMBERS).for_each(|_| world.join());
        world
    }

    fn join(&mut self) {
        self.joined += 1;
        let id = MemberId(self.joined);
        self.lifetime.join(id, u32::from(id.0 % 2));
        self.members.push((id, Phase::Connected));
    }

    fn is_free(&self, slot: Slot) -> bool {
        self.lifetime.slots().state(slot) == Free
    }

    fn are_free(&self, first: u32) -> bool {
        let last = first + FOLLOWERS;
        last < SLOTS && (first..=last).all(|n| self.is_free(slot(n)))
    }

    /// Whether a page is here and nowhere else.
    fn is_home(&self, slot: Slot) -> bool {
        matches!(self.lifetime.slots().state(slot), Live(_)) && self.lifetime.moved_to(slot).is_none()
    }

    fn is_in_series(&self, n: u32) -> bool {
        (0..=n).any(|first| {
            self.lifetime
                .followers(slot(first))
                .is_some_and(|followers| n <= first + followers)
        })
    }

    /// Does it, if it can be done.
    fn step(&mut self, step: Step, at: usize, (from, to): (u32, u32), n: u32) {
        let (id, phase) = self.members[at];
        let connected = phase == Phase::Connected;
        let (a, b) = (slot(from), slot(to));
        match step {
            Step::Publish if connected && self.is_free(a) => self.lifetime.publish(id, a),
            Step::PublishSeries if connected && self.are_free(from) => {
                let followers: Vec<Slot> = (1..=FOLLOWERS).map(|n| slot(from + n)).collect();
                self.lifetime.publish_series(id, a, &followers);
            }
            Step::Reference if connected && !self.is_free(a) => {
                self.lifetime.apply(id, a, n.cast_signed()).unwrap();
            }
            Step::Drop if connected => {
                let held = self.lifetime.references(id).unwrap().held(a);
                self.lifetime.apply(id, a, -held.min(n).cast_signed()).unwrap();
            }
            Step::Relocate if self.is_home(a) && !self.is_in_series(from) && self.is_free(b) => {
                self.lifetime.relocate(a, b, true);
            }
            Step::RelocateToTwin
                if a != b && self.is_home(a) && self.is_home(b) && !self.is_in_series(from) =>
            {
                self.lifetime.relocate_to_twin(a, b).unwrap();
            }
            Step::RelocateSeries if self.lifetime.followers(a).is_some() && self.are_free(to) => {
                self.lifetime.relocate_series(a, b);
            }
            Step::OrphanSome if phase != Phase::Leaving => {
                self.members[at].1 = Phase::Orphan;
                self.lifetime.orphan_some(id);
            }
            Step::LeaveSome => {
                self.members[at].1 = Phase::Leaving;
                if !self.lifetime.leave_some(id) {
                    self.members.remove(at);
                    self.join();
                }
            }
            Step::Reclaim => {
                self.lifetime.advance();
                let current = self.lifetime.epochs().current();
                for (id, phase) in &self.members {
                    if *phase == Phase::Connected {
                        self.lifetime.acknowledge(*id, current).unwrap();
                    }
                }
                self.lifetime.reclaim();
            }
            _ => {}
        }
        self.lifetime.take_changes();
    }

    /// What the lifetime tells without counting: pages that only orphans reference, and references of others.
    fn counted_anew(&self) -> (u64, u64) {
        let (mut alone, mut claimed) = (0, 0);
        for page in (0..SLOTS).map(slot) {
            let (mut of_orphans, mut of_others) = (0, 0);
            for held in (0..SLOTS).map(slot) {
                let here = self.lifetime.moved_to(held).unwrap_or(held) == page;
                for (id, _) in self.members.iter().filter(|_| here) {
                    let n = u64::from(self.lifetime.references(*id).unwrap().held(held));
                    match self.lifetime.orphans.counts(*id, held) {
                        true => of_orphans += n,
                        false => of_others += n,
                    }
                }
            }
            alone += u64::from(of_orphans > 0 && of_others == 0);
            claimed += of_others;
        }
        (alone, claimed)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn what_orphans_alone_reference_is_kept_as_it_would_be_counted(
        steps in proptest::collection::vec(
            (proptest::sample::select(&Step::ALL[..]), 0..MEMBERS, (0..SLOTS, 0..SLOTS), 1u32..3),
            0..120,
        )
    ) {
        let mut world = World::new();
        for (step, at, slots, n) in steps {
            world.step(step, at, slots, n);
            let kept = (world.lifetime.held_by_orphans_alone(), world.lifetime.claimed());
            prop_assert_eq!(kept, world.counted_anew(), "after {:?} {} {:?}", step, at, slots);
        }
    }
}

/// An observer asks once for each VM.
#[test]
fn who_asks_what_orphans_alone_reference_waits_for_no_count() {
    const PAGES: u32 = 50_000;
    let (mut lifetime, lost) = (Lifetime::new(1), MemberId(1));
    lifetime.join(lost, 0);
    (0..PAGES).for_each(|n| lifetime.publish(lost, slot(n)));
    let begun = Instant::now();
    while lifetime.orphan_some(lost) {}
    let (counting, begun) = (begun.elapsed(), Instant::now());
    for _ in 0..1000 {
        assert_eq!(
            std::hint::black_box(&lifetime).held_by_orphans_alone(),
            u64::from(PAGES)
        );
    }
    assert!(
        begun.elapsed() < counting,
        "each answer walks: {:?}",
        begun.elapsed()
    );
}
