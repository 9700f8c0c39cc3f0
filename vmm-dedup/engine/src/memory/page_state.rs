//! What the engine knows of a guest page: where its bytes are, and what is known of its content. 8 bytes a page.
//!
//! ```text
//!  known:   Nothing -> WriteProtected -> Candidate        backing:  Private -> Slot -> CopiedOnWrite  (the kernel copied it)
//!              |         | ^      \                                   | ^        `---> Private        (the service copied it)
//!              |         v |       `-> Pinned                         | `-- Zero
//!              |       Volatile                                       `-> CopiedOnWrite               (an exception in a run)
//!              `-> KeyedInHuge                             Slot -> OrphanedSlot (the store was lost) -> Private -> ...
//! ```
//!
//! What is *known* concerns memory that may be merged: private memory, and slots of a store that is gone. Where a page is
//! backed otherwise it rests, and nothing but [`Known::Nothing`] goes with it.

use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

/// Where a page's bytes are. Another way to keep a page is one variant more: here, where it is packed and classified, in
/// [`Counts`](super::page_table::Counts), and in what `explain` calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// The guest's own anonymous memory, or none yet.
    Private,
    /// The service made it the zero page.
    Zero,
    /// It maps this slot.
    Slot(Slot),
    /// Anonymous, but inside a mapping of the store, where this slot would be seen: copied by the kernel after it was
    /// shared, or an exception in a run ([`bridged_runs`](mod@crate::merge::bridged_runs)). It may be pinned for a DMA, which
    /// nothing tells, so it must not be merged (docs/design/unmerging.md).
    CopiedOnWrite(Slot),
    /// It maps a slot of a store that is gone.
    OrphanedSlot(Orphan),
    /// As [`Backing::CopiedOnWrite`], in a mapping of a store that is gone.
    OrphanedCopy(Orphan),
    /// Another way to keep a page, which shows what one takes.
    #[cfg(test)]
    Dummy(u32),
}

/// A page's place in a mapping of a store that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Orphan {
    /// A mapping begins at this page: it is not the one that the page before lies in.
    pub(crate) begins: bool,
}

/// What is known of a page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Never seen populated, or not looked at since.
    Nothing,
    /// Write-protected since the last look, not read yet: to be keyed if it stays unwritten.
    WriteProtected,
    /// Write-protected, and found written again at the last look: too busy to be keyed.
    Volatile,
    /// Pinned, or shared with another process, when it was to be merged: left alone until a pass.
    Pinned(Retry),
    /// In a huge page: keyed, but not reported to the store.
    KeyedInHuge(Key),
    /// Reported to the store by this key, and no twin known.
    Candidate(Key),
}

/// State of a guest page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageState {
    pub(crate) backing: Backing,
    pub(crate) known: Known,
}

/// When a pinned page is tried again. The pause between tries doubles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Retry {
    /// The pass, modulo 2^32.
    due: u32,
    /// Logarithm of the pause before it.
    pause: u8,
}

/// The first pause and the longest, as logarithms of passes: 8 and 512.
const PAUSES: std::ops::RangeInclusive<u8> = 3..=9;

impl Retry {
    /// After a failure in `pass` of a page of which `known` is known.
    pub(crate) fn after(known: Known, pass: u64) -> Self {
        let pause = match known {
            Known::Pinned(retry) => (retry.pause + 1).min(*PAUSES.end()),
            _ => *PAUSES.start(),
        };
        let due = low(pass).wrapping_add(1 << pause);
        Self { due, pause }
    }

    /// Whether the time has come.
    pub(crate) fn is_due(self, pass: u64) -> bool {
        low(pass).wrapping_sub(self.due) < 1 << 31
    }
}

#[allow(clippy::cast_possible_truncation)] // compared modulo 2^32
fn low(pass: u64) -> u32 {
    pass as u32
}

const BACKING_SHIFT: u32 = 61;
const KNOWN_SHIFT: u32 = 58;
/// Beside a key: a mapping of a lost store begins here.
const BEGINS: u64 = 1 << 57;
const PAYLOAD: u64 = (1 << KNOWN_SHIFT) - 1;
const CANDIDATE: u64 = 5;

impl Backing {
    /// Number and payload.
    fn pack(self) -> (u64, u64) {
        let begins = |orphan: Orphan| if orphan.begins { BEGINS } else { 0 };
        match self {
            Backing::Private => (0, 0),
            Backing::Zero => (1, 0),
            Backing::Slot(slot) => (2, slot.number().into()),
            Backing::CopiedOnWrite(slot) => (3, slot.number().into()),
            Backing::OrphanedSlot(orphan) => (4, begins(orphan)),
            Backing::OrphanedCopy(orphan) => (5, begins(orphan)),
            #[cfg(test)]
            Backing::Dummy(payload) => (6, payload.into()),
        }
    }

    #[allow(clippy::cast_possible_truncation)] // payloads were made by pack()
    fn unpack(number: u64, payload: u64) -> Self {
        let slot = Slot::try_new(payload as u32);
        let orphan = Orphan {
            begins: payload & BEGINS != 0,
        };
        match (number, slot) {
            (1, _) => Backing::Zero,
            (2, Some(slot)) => Backing::Slot(slot),
            (3, Some(slot)) => Backing::CopiedOnWrite(slot),
            (4, _) => Backing::OrphanedSlot(orphan),
            (5, _) => Backing::OrphanedCopy(orphan),
            #[cfg(test)]
            (6, _) => Backing::Dummy(payload as u32),
            _ => Backing::Private,
        }
    }

    /// Whether the page's address lies in a mapping of a store file.
    pub(crate) fn in_file_mapping(self) -> bool {
        self.maps_a_slot() || self.is_copied()
    }

    /// Whether the page maps a slot, of this store or of one that is gone.
    pub(crate) fn maps_a_slot(self) -> bool {
        matches!(self, Backing::Slot(_) | Backing::OrphanedSlot(_))
    }

    /// Whether the page is anonymous memory in a mapping of a store file.
    pub(crate) fn is_copied(self) -> bool {
        matches!(self, Backing::CopiedOnWrite(_) | Backing::OrphanedCopy(_))
    }

    /// The slot at the page's place in a mapping of the store, whether or not it is what the page shows.
    pub(crate) fn place(self) -> Option<Slot> {
        match self {
            Backing::Slot(slot) | Backing::CopiedOnWrite(slot) => Some(slot),
            _ => None,
        }
    }

    /// Whether a page with this backing lies in the same mapping as the page before it, which has `before`.
    pub(crate) fn continues(self, before: Backing) -> bool {
        match (before.place(), self.place(), self) {
            (Some(a), Some(b), _) => a.checked_add_in_segment(1) == Some(b),
            (None, None, Backing::OrphanedSlot(here) | Backing::OrphanedCopy(here)) => {
                before.in_file_mapping() && !here.begins
            }
            (None, None, _) => !before.in_file_mapping(),
            _ => false,
        }
    }

    /// What becomes of it when the store is lost. `begins`: a mapping begins here.
    pub(crate) fn orphaned(self, begins: bool) -> Self {
        match self {
            Backing::Slot(_) => Backing::OrphanedSlot(Orphan { begins }),
            Backing::CopiedOnWrite(_) => Backing::OrphanedCopy(Orphan { begins }),
            other => other,
        }
    }

    /// What becomes of a page that maps a slot when the kernel copies it for a writer.
    pub(crate) fn copied(self) -> Self {
        match self {
            Backing::Slot(slot) => Backing::CopiedOnWrite(slot),
            Backing::OrphanedSlot(orphan) => Backing::OrphanedCopy(orphan),
            other => other,
        }
    }

    /// Whether `self -> next` is a step of the diagram above.
    fn may_become(self, next: Backing) -> bool {
        use Backing::{CopiedOnWrite, OrphanedCopy, OrphanedSlot, Private, Slot, Zero};
        match (self, next) {
            (a, b) if a == b => true,
            // Never again: see CopiedOnWrite.
            (CopiedOnWrite(_) | OrphanedCopy(_), _) => {
                matches!((self, next), (CopiedOnWrite(_), OrphanedCopy(_)))
            }
            // The service copied it, or it is written for the first time.
            (_, Private) => true,
            (Private | Zero, Zero) | (Private, Slot(_) | CopiedOnWrite(_)) => true,
            (Slot(_), OrphanedSlot(_)) => true,
            #[cfg(test)]
            (Private, Backing::Dummy(_)) => true,
            (Slot(_) | OrphanedSlot(_), next) => next == self.copied(),
            _ => false,
        }
    }
}

impl Known {
    fn pack(self) -> (u64, u64) {
        match self {
            Known::Nothing => (0, 0),
            Known::WriteProtected => (1, 0),
            Known::Volatile => (2, 0),
            Known::Pinned(Retry { due, pause }) => (3, u64::from(due) | u64::from(pause) << 32),
            Known::KeyedInHuge(key) => (4, key.raw()),
            Known::Candidate(key) => (CANDIDATE, key.raw()),
        }
    }

    #[allow(clippy::cast_possible_truncation)] // payloads were made by pack()
    fn unpack(number: u64, payload: u64) -> Self {
        let key = Key::try_new(payload & !BEGINS);
        match (number, key) {
            (1, _) => Known::WriteProtected,
            (2, _) => Known::Volatile,
            (3, _) => Known::Pinned(Retry {
                due: payload as u32,
                pause: (payload >> 32) as u8,
            }),
            (4, Some(key)) => Known::KeyedInHuge(key),
            (CANDIDATE, Some(key)) => Known::Candidate(key),
            _ => Known::Nothing,
        }
    }

    /// The key last reported to the store.
    pub(crate) fn candidate(self) -> Option<Key> {
        match self {
            Known::Candidate(key) => Some(key),
            _ => None,
        }
    }

    /// Whether `self -> next` is a step of the diagram above, of memory that stays what it is.
    fn may_become(self, next: Known) -> bool {
        use Known::{Candidate, KeyedInHuge, Nothing, Pinned, Volatile, WriteProtected};
        match (self, next) {
            (a, b) if a == b => true,
            (_, Nothing) => true,
            (Nothing | WriteProtected | Volatile | KeyedInHuge(_), KeyedInHuge(_)) => true,
            // Too busy is what was protected before.
            (from, Volatile) => from == WriteProtected,
            (_, WriteProtected | Pinned(_)) => true,
            (_, Candidate(_)) => true,
            _ => false,
        }
    }
}

impl PageState {
    /// Private memory of which nothing is known.
    pub(crate) const UNTRACKED: Self = Self::resting(Backing::Private);

    /// A page of which nothing more is known than where it is.
    pub(crate) const fn resting(backing: Backing) -> Self {
        Self {
            backing,
            known: Known::Nothing,
        }
    }

    /// Private memory of which this is known.
    pub(crate) const fn private(known: Known) -> Self {
        Self {
            backing: Backing::Private,
            known,
        }
    }

    /// Packs into a word. At most one of both has a payload, but for [`BEGINS`].
    pub(super) fn encode(self) -> u64 {
        let ((backing, place), (known, content)) = (self.backing.pack(), self.known.pack());
        debug_assert!(place == 0 || content == 0 || place == BEGINS, "{self:?}");
        backing << BACKING_SHIFT | known << KNOWN_SHIFT | place | content
    }

    pub(super) fn decode(word: u64) -> Self {
        let payload = word & PAYLOAD;
        Self {
            backing: Backing::unpack(word >> BACKING_SHIFT, payload),
            known: Known::unpack(word >> KNOWN_SHIFT & 7, payload),
        }
    }

    /// The key in a word, if it is a candidate's: the hot loop over all pages asks.
    pub(super) fn candidate_key(word: u64) -> Option<u64> {
        (word >> KNOWN_SHIFT & 7 == CANDIDATE).then_some(word & PAYLOAD & !BEGINS)
    }

    /// The key of private content, which counts for the repetition rate.
    pub(super) fn counted_key(self) -> Option<Key> {
        match (self.backing, self.known) {
            (Backing::Private, Known::KeyedInHuge(key) | Known::Candidate(key)) => Some(key),
            _ => None,
        }
    }

    /// Whether the page waits to be keyed as soon as it proves unwritten.
    pub(crate) fn awaits_key(self) -> bool {
        match self.backing {
            Backing::Private => matches!(self.known, Known::WriteProtected | Known::Volatile),
            Backing::OrphanedSlot(_) => self.known == Known::Nothing,
            _ => false,
        }
    }

    /// Whether `self -> next` is a step of the diagrams above.
    pub(crate) fn may_become(self, next: PageState) -> bool {
        let known = match next.backing {
            Backing::Private if self.backing == Backing::Private => self.known.may_become(next.known),
            // Was the zero page until it was written, or keyed in a huge page.
            Backing::Private if self.backing == Backing::Zero => {
                matches!(
                    next.known,
                    Known::Nothing | Known::WriteProtected | Known::KeyedInHuge(_) | Known::Pinned(_)
                )
            }
            Backing::OrphanedSlot(_) if self.backing == next.backing => {
                matches!(next.known, Known::Nothing | Known::Candidate(_))
            }
            _ => next.known == Known::Nothing,
        };
        known && self.backing.may_become(next.backing)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(in crate::memory) fn states() -> impl Strategy<Value = PageState> {
        let key = || (0u64..1 << 48).prop_map(|k| Key::try_new(k).unwrap());
        let slot = || (0u32..1 << 26).prop_map(|s| Slot::try_new(s).unwrap());
        let orphan = || any::<bool>().prop_map(|begins| Orphan { begins });
        prop_oneof![
            Just(PageState::UNTRACKED),
            Just(PageState::private(Known::WriteProtected)),
            Just(PageState::private(Known::Volatile)),
            (any::<u32>(), PAUSES)
                .prop_map(|(due, pause)| PageState::private(Known::Pinned(Retry { due, pause }))),
            key().prop_map(|key| PageState::private(Known::KeyedInHuge(key))),
            key().prop_map(|key| PageState::private(Known::Candidate(key))),
            Just(PageState::resting(Backing::Zero)),
            slot().prop_map(|slot| PageState::resting(Backing::Slot(slot))),
            slot().prop_map(|slot| PageState::resting(Backing::CopiedOnWrite(slot))),
            orphan().prop_map(|orphan| PageState::resting(Backing::OrphanedSlot(orphan))),
            (orphan(), key()).prop_map(|(orphan, key)| PageState {
                backing: Backing::OrphanedSlot(orphan),
                known: Known::Candidate(key),
            }),
            orphan().prop_map(|orphan| PageState::resting(Backing::OrphanedCopy(orphan))),
            any::<u32>().prop_map(|payload| PageState::resting(Backing::Dummy(payload))),
        ]
    }

    proptest! {
        #[test]
        fn a_state_survives_its_word(state in states()) {
            prop_assert_eq!(PageState::decode(state.encode()), state);
            prop_assert_eq!(
                PageState::candidate_key(state.encode()),
                state.known.candidate().map(Key::raw)
            );
        }

        /// The rule that protects a DMA: what is anonymous in a mapping of the store is never merged.
        #[test]
        fn copied_pages_stay_copied(state in states(), next in states()) {
            if state.backing.is_copied() && state.may_become(next) {
                prop_assert!(next.backing.is_copied() && next.known == Known::Nothing);
            }
        }
    }

    #[test]
    fn a_pinned_page_is_tried_ever_less_often() {
        let mut known = Known::WriteProtected;
        let mut tries = Vec::new();
        for pass in u64::from(u32::MAX) - 20.. {
            match known {
                Known::Pinned(retry) if !retry.is_due(pass) => continue,
                _ => tries.push(pass + 20 - u64::from(u32::MAX)),
            }
            known = Known::Pinned(Retry::after(known, pass));
            if tries.len() == 10 {
                break;
            }
        }
        assert_eq!(tries, [0, 8, 24, 56, 120, 248, 504, 1016, 1528, 2040]);
    }

    #[test]
    fn neighbours_lie_in_one_mapping_or_not() {
        let slot = |n| Slot::try_new(n).unwrap();
        let orphan = |begins| Backing::OrphanedSlot(Orphan { begins });
        let (shared, next) = (Backing::Slot(slot(7)), Backing::CopiedOnWrite(slot(8)));
        assert!(next.continues(shared) && !shared.continues(next));
        assert!(Backing::Zero.continues(Backing::Private) && !shared.continues(Backing::Private));
        assert!(!Backing::Private.continues(shared) && !Backing::Private.continues(orphan(false)));
        assert!(orphan(false).continues(orphan(true)) && !orphan(true).continues(orphan(false)));
        assert!(!orphan(false).continues(shared) && !shared.continues(orphan(true)));
    }
}
