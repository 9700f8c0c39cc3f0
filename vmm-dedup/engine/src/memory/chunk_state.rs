//! What the scanner remembers of each 2 MiB.

use crate::memory::thp_state::{Folds, HugeState, Use};

/// State of a chunk, 56 bytes for 512 pages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ChunkState {
    /// Something may have happened here since the last visit.
    pub(crate) pending: bool,
    /// Parts in which the kernel may have copied shared pages since that was looked for, of [`PARTS`].
    unchecked: u8,
    /// The part that is looked at next, if not all are.
    part: u8,
    /// Somebody who knows says that what shared pages held was replaced: the kernel has copied them.
    overwritten: bool,
    /// Mapped by one huge page at the last visit. Such a chunk is never write-protected.
    pub(crate) huge: bool,
    /// The pages' keys were taken while the chunk was huge, so that none is protected yet.
    pub(crate) unarmed: bool,
    /// Lent to somebody else: not looked at, see [`crate::scan::hotplug`].
    pub(crate) lent: bool,
    /// Time changes what sharing its pages is worth, see [`crate::memory::worth`].
    pub(crate) ticking: bool,
    /// It was built by the service, in a mapping of its own.
    own_mapping: bool,
    /// When a huge page's keys are looked at.
    looks: HugeLooks,
    /// What is known of a huge page's twins.
    pub(crate) twins: Twins,
    /// When pages are looked at that the kernel had copied.
    copies: CopyLooks,
    /// Boundaries between mappings.
    pub(crate) fragments: u16,
    /// How long pages with twins wait.
    deferral: Deferral,
    /// What the policy for mixed pages knows.
    pub(crate) thp: HugeState,
}

const _: () = assert!(size_of::<ChunkState>() <= 56);

/// When the keys of a huge page are looked at.
#[derive(Clone, Copy, Debug, Default)]
struct HugeLooks {
    /// Passes between two looks.
    patience: u8,
    /// Passes left until the next.
    rest: u8,
}

/// What is known of the twins of a huge page's parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Twins {
    /// Pages with a known twin.
    pub(crate) known: u16,
    /// They are enough to split the huge page.
    pub(crate) split: bool,
    /// How often somebody waited for the huge page while it was away to be merged as one, since it last changed.
    pub(crate) contended: u8,
}

/// How long pages with twins wait for their chunk to quiesce.
#[derive(Clone, Copy, Debug, Default)]
struct Deferral {
    /// The pass in which they are to be merged; 0: there are none.
    until: u32,
    /// The pass in which they may be deferred no longer.
    latest: u32,
}

/// When pages that the kernel had copied are looked at.
#[derive(Clone, Copy, Debug, Default)]
struct CopyLooks {
    /// Passes between two looks; 0: there are no such pages.
    patience: u8,
    /// Passes left until the next.
    rest: u8,
}

/// Parts of a chunk that are looked at for pages that the kernel copied one by one, a pass each.
pub(crate) const PARTS: u8 = 16;
/// Longest time between two looks at a huge page that does not change, in passes.
const MAX_PATIENCE: u8 = 64;
/// Passes for which nothing new must have come to a chunk before its scattered twins are merged. By then a page without a
/// twin has had a chance to find one.
const CALM_PASSES: u32 = 3;
/// Longest time that a page with a twin waits for that.
const MOST_DEFERRED_PASSES: u32 = 8;
/// Fragments that a visit in every pass is worth.
const FRAGMENTS_PER_PASS: u16 = 32;
/// Longest time between two visits of a fragmented chunk, in passes.
pub(crate) const MAX_PERIOD: u64 = 16;

impl ChunkState {
    /// Memory that was never looked at.
    pub(crate) fn new() -> Self {
        Self {
            pending: true,
            ..Self::default()
        }
    }

    /// Passes from one visit to the next: what walking the chunk costs the kernel goes with its mappings, so
    /// fragmented ones are visited less often, up to every [`MAX_PERIOD`]th pass.
    pub(crate) fn period(&self) -> u64 {
        u64::from(self.fragments / FRAGMENTS_PER_PASS)
            .next_power_of_two()
            .min(MAX_PERIOD)
    }

    /// Anything may have been written for the first time, or copied by the kernel.
    pub(super) fn note_faults(&mut self) {
        (self.pending, self.unchecked) = (true, PARTS);
    }

    /// Whether the kernel may have copied pages since all of the chunk was looked at. It counts as looked at from now on.
    pub(super) fn take_unchecked(&mut self) -> bool {
        std::mem::take(&mut self.unchecked) > 0
    }

    /// The same for the next of its parts, which this is.
    pub(super) fn take_unchecked_part(&mut self) -> Option<u8> {
        self.unchecked = self.unchecked.checked_sub(1)?;
        let part = self.part;
        self.part = (part + 1) % PARTS;
        Some(part)
    }

    /// Shared pages were overwritten: who looks for copies need not wait for the chunk's turn.
    pub(super) fn note_overwritten(&mut self) {
        self.overwritten = true;
    }

    /// Whether pages were overwritten since all of the chunk was looked at for copies. It counts as looked at from now on.
    pub(super) fn take_overwritten(&mut self) -> bool {
        let overwritten = std::mem::take(&mut self.overwritten);
        if overwritten {
            self.unchecked = 0;
        }
        overwritten
    }

    /// Defers the merging of pages, until nothing new has come for some passes.
    pub(super) fn defer(&mut self, pass: u64) {
        if self.deferral.until == 0 {
            let now = u32::try_from(pass).unwrap_or(u32::MAX);
            self.deferral = Deferral {
                until: now.saturating_add(CALM_PASSES),
                latest: now.saturating_add(MOST_DEFERRED_PASSES),
            };
        }
    }

    /// Something new has come: what was deferred waits on.
    pub(super) fn note_activity(&mut self, pass: u64) {
        let Deferral { until, latest } = &mut self.deferral;
        if *until != 0 {
            let now = u32::try_from(pass).unwrap_or(u32::MAX);
            *until = now.saturating_add(CALM_PASSES).min(*latest);
        }
    }

    /// Whether what was deferred is to be merged in this pass.
    pub(crate) fn is_quiesced(&self, pass: u64) -> bool {
        self.deferral.until != 0 && pass >= self.deferral.until.into()
    }

    /// The end of a pass: what was deferred until now has been merged.
    pub(super) fn end_pass(&mut self, pass: u64) {
        if self.is_quiesced(pass) {
            self.deferral.until = 0;
        }
    }

    /// The store was lost, and with it what it knew.
    pub(super) fn forget_store(&mut self) {
        (self.pending, self.looks) = (true, HugeLooks::default());
        self.twins = Twins::default();
    }

    /// The chunk is lent to somebody else: nothing is known of it but how it is mapped.
    pub(super) fn lend(&mut self) {
        *self = Self {
            lent: true,
            own_mapping: self.own_mapping,
            ticking: self.ticking,
            fragments: self.fragments,
            ..Self::default()
        };
    }

    /// It came back.
    pub(super) fn take_back(&mut self) {
        (self.lent, self.pending) = (false, true);
    }

    /// Other pages belong to the chunk than those that were watched.
    pub(super) fn forget_watching(&mut self) {
        self.thp = HugeState::default();
        self.twins = Twins::default();
    }

    /// A visit found one huge page.
    pub(super) fn found_huge(&mut self) {
        (self.huge, self.pending, self.thp.ours) = (true, false, false);
    }

    /// A visit found small pages; whether none of them is protected yet.
    pub(super) fn found_small(&mut self) -> bool {
        let was_huge = std::mem::take(&mut self.huge);
        if was_huge {
            self.twins = Twins::default();
        }
        std::mem::take(&mut self.unarmed) || was_huge
    }

    /// The service built a huge page of the chunk's small ones.
    pub(super) fn note_collapsed(&mut self) {
        (self.huge, self.unarmed, self.looks.patience) = (true, false, 0);
        self.twins = Twins::default();
        self.thp.rebuilt();
        self.look_again();
    }

    /// Whether this is the first time that copies made by the service lie in the chunk's place.
    pub(super) fn begin_own_mapping(&mut self) -> bool {
        self.pending = true;
        !std::mem::replace(&mut self.own_mapping, true)
    }

    /// The chunk's huge page was zero, and there is none any more.
    pub(super) fn note_zero(&mut self) {
        (self.huge, self.pending, self.looks) = (false, true, HugeLooks::default());
        self.thp.samples = 0;
    }

    /// The chunk's huge page was split: it is tracked from now on.
    pub(super) fn note_split(&mut self) {
        (self.huge, self.unarmed, self.pending) = (false, true, true);
        self.looks = HugeLooks::default();
        self.twins = Twins::default();
        self.thp.split_by_us();
    }

    /// The huge page was taken to be merged, and stayed one. Whether it is worth it will be asked again.
    pub(super) fn stayed_huge(&mut self) {
        (self.twins.split, self.twins.known) = (false, 0);
        self.look_again();
    }

    /// Somebody waited for the huge page while it was away.
    pub(super) fn note_contended(&mut self) {
        self.twins.contended = self.twins.contended.saturating_add(1);
        self.thp.note_use(Use::AT_ONCE);
    }

    /// Whether the keys of a huge page are to be read in this pass.
    pub(super) fn look_due(&mut self) -> bool {
        let due = self.looks.rest == 0;
        self.looks.rest = self.looks.rest.saturating_sub(1);
        due
    }

    /// Notes a look at a huge page's keys, of which these folds were taken; returns whether they were the same last time. Twins
    /// are counted anew.
    pub(super) fn looked(&mut self, folds: &Folds) -> bool {
        let HugeLooks { patience, rest } = &mut self.looks;
        let same = self.thp.remember(folds) && *patience > 0;
        if !same {
            self.thp.forget_sampling();
            self.twins.contended = 0;
        }
        *patience = if same {
            (*patience * 2).min(MAX_PATIENCE)
        } else {
            1
        };
        *rest = *patience - 1;
        self.twins.known = 0;
        same
    }

    /// The kernel copied a shared page, or one that it had copied is another one than it was: it is looked at in the next pass,
    /// and if it stands still in the one after.
    pub(super) fn look_at_copies_soon(&mut self) {
        self.look_at_copies_within(1);
    }

    /// The same in so many passes at the latest.
    pub(super) fn look_at_copies_within(&mut self, passes: u32) {
        let passes = u8::try_from(passes).unwrap_or(u8::MAX);
        let sooner = |now: u8| if now == 0 { passes } else { now.min(passes) };
        let copies = &mut self.copies;
        (copies.patience, copies.rest) = (sooner(copies.patience), sooner(copies.rest));
    }

    /// Whether pages that the kernel had copied are to be looked at in this pass. Memory that is lent is left alone.
    pub(super) fn copies_due(&mut self) -> bool {
        self.copies.rest = self.copies.rest.saturating_sub(1);
        self.copies.patience > 0 && self.copies.rest == 0 && !self.lent
    }

    /// They were looked at, and are to be looked at once more, ever later if nothing happens.
    pub(super) fn looked_at_copies(&mut self, any: bool) {
        let patience = if any {
            (self.copies.patience.saturating_mul(2)).min(MAX_PATIENCE)
        } else {
            0
        };
        self.copies = CopyLooks {
            patience,
            rest: patience,
        };
    }

    /// Lets the next pass look at the whole huge page.
    pub(super) fn look_again(&mut self) {
        self.looks.rest = 0;
        self.thp.forget_sampling();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unchanged_huge_page_is_looked_at_ever_less() {
        let mut chunk = ChunkState::default();
        let looks: Vec<u32> = (0..40)
            .filter(|_| {
                chunk.look_due() && {
                    chunk.looked(&[Some(7); 4]);
                    true
                }
            })
            .collect();
        assert_eq!(looks, [0, 1, 3, 7, 15, 31]);
    }

    #[test]
    fn a_changed_one_is_looked_at_again_at_once() {
        let mut chunk = ChunkState::default();
        assert!(!chunk.looked(&[Some(7); 4]) && chunk.looked(&[Some(7); 4]) && !chunk.looked(&[Some(8); 4]));
        assert!(chunk.look_due());
    }

    #[test]
    fn copies_are_looked_at_ever_less_until_something_happens() {
        let mut chunk = ChunkState::default();
        assert!(!chunk.copies_due());
        chunk.look_at_copies_soon();
        let looks = |chunk: &mut ChunkState| -> Vec<u32> {
            let look = |_: &u32| {
                chunk.copies_due() && {
                    chunk.looked_at_copies(true);
                    true
                }
            };
            (0..40).filter(look).collect()
        };
        assert_eq!(looks(&mut chunk), [0, 2, 6, 14, 30]);
        chunk.look_at_copies_within(8);
        assert_eq!(looks(&mut chunk)[0], 7);
        chunk.looked_at_copies(false);
        assert_eq!(looks(&mut chunk), [0; 0]);
    }

    #[test]
    fn a_chunk_quiesces_when_calm_and_is_not_put_off_for_ever() {
        let mut chunk = ChunkState::default();
        chunk.note_activity(1);
        assert!(!chunk.is_quiesced(100));
        chunk.defer(1);
        chunk.defer(3);
        assert!(!chunk.is_quiesced(3) && chunk.is_quiesced(4));
        let quiesced = (3..).find(|pass| {
            chunk.note_activity(*pass);
            chunk.is_quiesced(*pass)
        });
        assert_eq!(quiesced, Some(9));
    }

    #[test]
    fn after_faults_each_part_is_looked_at_once_or_all_at_once() {
        let mut chunk = ChunkState::default();
        assert!(!chunk.take_unchecked() && chunk.take_unchecked_part().is_none());
        chunk.note_faults();
        let mut parts: Vec<u8> = (0..3).filter_map(|_| chunk.take_unchecked_part()).collect();
        assert_eq!(parts, [0, 1, 2]);
        chunk.note_faults();
        parts = (0..40).filter_map(|_| chunk.take_unchecked_part()).collect();
        parts.sort_unstable();
        assert!(parts.into_iter().eq(0..PARTS));
        chunk.note_faults();
        assert!(chunk.take_unchecked_part().is_some() && chunk.take_unchecked());
        assert!(chunk.take_unchecked_part().is_none());
    }

    #[test]
    fn what_was_overwritten_is_looked_at_once_and_counts_for_what_was_faulted() {
        let mut chunk = ChunkState::default();
        assert!(!chunk.take_overwritten());
        chunk.note_faults();
        chunk.note_overwritten();
        assert!(chunk.take_overwritten() && !chunk.take_overwritten() && !chunk.take_unchecked());
    }

    #[test]
    fn fragments_lengthen_the_period() {
        let period = |fragments| {
            ChunkState {
                fragments,
                ..ChunkState::default()
            }
            .period()
        };
        assert_eq!([0, 31, 64, 512, 1024].map(period), [1, 1, 2, 16, 16]);
    }
}
