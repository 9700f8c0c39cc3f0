//! What the engine knows of a guest page: where its bytes are, and what is known of its content. 8 bytes a page, one of which
//! is for [`Worth`](super::worth::Worth).
//!
//! ```text
//!  known:   Nothing -> WriteProtected -> Candidate        backing:  Private -> Slot -> CopiedOnWrite  (the kernel copied it)
//!              |         | ^      \                                   | ^        `---> Private        (the service copied it)
//!              |         v |       `-> Pinned                         | `-- Zero
//!              |       Volatile                                       `-> CopiedOnWrite               (an exception in a run)
//!              `-> Keyed                                   CopiedOnWrite -> Slot, Zero                (healed)
//!                                                      CopiedOnWrite -> Private                   (moved out)
//!                                                          Slot -> another Slot                        (the page has moved)
//!                                                          Slot -> OrphanedSlot (the store was lost) -> Private -> ...
//!                                                          Private -> Packed -> Private
//! ```
//!
//! What is *known* concerns memory that may be merged: private memory, copies in mappings of a store, and slots of a store that
//! is gone. Where a page is backed otherwise nothing but [`Known::Nothing`] goes with it.

use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

/// Where a page's bytes are. Another way to keep a page is one variant more: in this file, which answers what may be done with such
/// a page (where an answer has no default that is safe, the compiler asks for it); in [`PageMap`](super::page_map::PageMap), which has the steps that lead to it and from it; and where it is kept.
/// What `explain` calls it follows from [`Backing::registrar`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// The guest's own anonymous memory, or none yet.
    Private,
    /// The service made it the zero page.
    Zero,
    /// It maps this slot.
    Slot(Slot),
    /// Anonymous, but inside a mapping of the store: copied by the kernel after it was shared, or an exception in a run
    /// ([`bridged_runs`](mod@crate::merge::bridged_runs)). It may be pinned for a DMA, and it cannot be taken. It is merged where
    /// that can be ruled out ([`healer`](mod@crate::merge::healer)).
    CopiedOnWrite(Edges),
    /// It maps a slot of a store that is gone.
    OrphanedSlot(Orphan),
    /// As [`Backing::CopiedOnWrite`], in a mapping of a store that is gone.
    OrphanedCopy(Orphan),
    /// Its place is registered for missing pages with the userfaultfd of packed pages ([`pack`](mod@crate::pack)). Its bytes are
    /// kept there; or it was touched, and is back: that the scanning thread is told later.
    Packed,
    /// Another way to keep a page, which shows what one takes.
    #[cfg(test)]
    Dummy(u32),
}

/// Whose userfaultfd a page's place is registered with, while it is with any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Registrar {
    /// It tracks writes.
    Tracker,
    /// It breaks sharing.
    Breaker,
    /// It keeps the page, and brings it back for whoever touches it or asks.
    Packer,
}

/// A copied page's place in its mapping. (Which slot would be seen there, its neighbours tell: beside a key there is no room.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Edges {
    /// The mapping begins at this page, as far as is known.
    pub(crate) begins: bool,
    /// The mapping ends behind this page, as far as is known.
    pub(crate) ends: bool,
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
    /// Pinned, or shared with another process, when it was to be merged, or nothing told that it is not: left alone until a
    /// pass.
    Pinned(PinnedUntil),
    /// Keyed, but not reported to the store: it lies in a huge page, or is a copy in a mapping of the store, whose writes
    /// nobody tracks, so that it is looked at once more.
    Keyed(Key),
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
pub(crate) struct PinnedUntil {
    /// The pass, modulo 2^32.
    due: u32,
    /// Logarithm of the pause before it.
    pause: u8,
}

/// The first pause and the longest, as logarithms of passes: 8 and 512.
const PAUSES: std::ops::RangeInclusive<u8> = 3..=9;

impl PinnedUntil {
    /// After a failure in `pass` of a page of which `known` is known.
    pub(crate) fn after(known: Known, pass: u64) -> Self {
        let pause = match known {
            Known::Pinned(retry) => (retry.pause + 1).min(*PAUSES.end()),
            _ => *PAUSES.start(),
        };
        let due = low(pass).wrapping_add(1 << pause);
        Self { due, pause }
    }

    /// Passes from the failure on.
    pub(crate) fn pause(self) -> u32 {
        1 << self.pause
    }

    /// Whether pauses get no longer.
    pub(crate) fn is_longest(self) -> bool {
        self.pause == *PAUSES.end()
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
/// Words differ by the bits from [`KNOWN_SHIFT`] on in so many ways, most of which no state has.
pub(super) const KINDS: usize = 1 << (64 - KNOWN_SHIFT);
/// Beside a key: a mapping begins here, or ends behind it.
const BEGINS: u64 = 1 << 57;
const ENDS: u64 = 1 << 56;
/// The byte between a key, or a slot, and the bits above.
pub(super) const WORTH_SHIFT: u32 = 48;
pub(super) const WORTH: u64 = 0xff << WORTH_SHIFT;
const PAYLOAD: u64 = ((1 << KNOWN_SHIFT) - 1) & !WORTH;
const WRITE_PROTECTED: u64 = 1;
const VOLATILE: u64 = 2;
const PINNED: u64 = 3;
const CANDIDATE: u64 = 5;
const PRIVATE: u64 = 0;
const SLOT: u64 = 2;
const ORPHANED_SLOT: u64 = 4;
const ORPHANED_COPY: u64 = 5;
/// Backings whose addresses lie in mappings of store files.
const IN_FILE: std::ops::RangeInclusive<u64> = SLOT..=ORPHANED_COPY;

impl Backing {
    /// Number and payload.
    fn encode(self) -> (u64, u64) {
        let begins = |orphan: Orphan| if orphan.begins { BEGINS } else { 0 };
        let edges = |edges: Edges| (u64::from(edges.begins) * BEGINS) | (u64::from(edges.ends) * ENDS);
        match self {
            Backing::Private => (PRIVATE, 0),
            Backing::Zero => (1, 0),
            Backing::Slot(slot) => (SLOT, slot.number().into()),
            Backing::CopiedOnWrite(place) => (3, edges(place)),
            Backing::OrphanedSlot(orphan) => (ORPHANED_SLOT, begins(orphan)),
            Backing::OrphanedCopy(orphan) => (ORPHANED_COPY, begins(orphan)),
            Backing::Packed => (6, 0),
            #[cfg(test)]
            Backing::Dummy(payload) => (7, payload.into()),
        }
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // payloads were made by encode()
    fn decode(number: u64, payload: u64) -> Self {
        let slot = Slot::try_new(payload as u32);
        let orphan = Orphan {
            begins: payload & BEGINS != 0,
        };
        let edges = Edges {
            begins: payload & BEGINS != 0,
            ends: payload & ENDS != 0,
        };
        match (number, slot) {
            (1, _) => Backing::Zero,
            (SLOT, Some(slot)) => Backing::Slot(slot),
            (3, _) => Backing::CopiedOnWrite(edges),
            (ORPHANED_SLOT, _) => Backing::OrphanedSlot(orphan),
            (ORPHANED_COPY, _) => Backing::OrphanedCopy(orphan),
            (6, _) => Backing::Packed,
            #[cfg(test)]
            (7, _) => Backing::Dummy(payload as u32),
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

    /// Whose its place is to register.
    pub(crate) fn registrar(self) -> Registrar {
        match self {
            Backing::Private | Backing::Zero => Registrar::Tracker,
            Backing::Slot(_)
            | Backing::CopiedOnWrite(_)
            | Backing::OrphanedSlot(_)
            | Backing::OrphanedCopy(_) => Registrar::Breaker,
            Backing::Packed => Registrar::Packer,
            #[cfg(test)]
            Backing::Dummy(_) => Registrar::Packer,
        }
    }

    /// Whether a page with this backing may be merged, as far as the backing tells: with a slot, or (`None`) with the zero page. A lost
    /// store's page is made private first.
    pub(crate) fn may_be_merged(self, slot: Option<Slot>) -> bool {
        match self {
            Backing::Private | Backing::OrphanedSlot(_) => true,
            Backing::CopiedOnWrite(_) | Backing::OrphanedCopy(_) => true,
            Backing::Zero => slot.is_none(),
            Backing::Slot(_) | Backing::Packed => false,
            #[cfg(test)]
            Backing::Dummy(_) => false,
        }
    }

    /// Whether the packer has to bring the page back before anybody can do anything with it.
    pub(crate) fn is_with_packer(self) -> bool {
        self.registrar() == Registrar::Packer
    }

    /// Whether its bytes are anonymous memory in a mapping of the VMM's own, or none yet: then its place may be taken as it is.
    pub(crate) fn is_anonymous(self) -> bool {
        self.registrar() == Registrar::Tracker
    }

    /// Whether nobody can get the page from its place by taking or copying it: it may be pinned there, or is not there.
    pub(crate) fn stays_where_it_is(self) -> bool {
        self.is_copied() || self.is_with_packer()
    }

    /// Whether its bytes are not memory of the guest's: they are a slot's, or packed.
    pub(crate) fn is_kept_elsewhere(self) -> bool {
        self.maps_a_slot() || self.is_with_packer()
    }

    /// Whether a page with this backing lies in the same mapping as the page before it, which has `before`.
    pub(crate) fn continues(self, before: Backing) -> bool {
        use Backing::{CopiedOnWrite, OrphanedCopy, OrphanedSlot, Packed, Slot};
        match (before, self) {
            (Packed, _) | (_, Packed) => before == self,
            (Slot(a), Slot(b)) => a.checked_add_in_segment(1) == Some(b),
            (Slot(_), CopiedOnWrite(here)) => !here.begins,
            (CopiedOnWrite(there), Slot(_)) => !there.ends,
            (CopiedOnWrite(there), CopiedOnWrite(here)) => !there.ends && !here.begins,
            (OrphanedSlot(_) | OrphanedCopy(_), OrphanedSlot(here) | OrphanedCopy(here)) => !here.begins,
            (a, b) => !a.in_file_mapping() && !b.in_file_mapping(),
        }
    }

    /// What becomes of it when the store is lost. `begins`: a mapping begins here.
    pub(crate) fn orphaned(self, begins: bool) -> Self {
        match self {
            Backing::Slot(_) => Backing::OrphanedSlot(Orphan { begins }),
            Backing::CopiedOnWrite(_) => Backing::OrphanedCopy(Orphan { begins }),
            Backing::Private
            | Backing::Zero
            | Backing::OrphanedSlot(_)
            | Backing::OrphanedCopy(_)
            | Backing::Packed => self,
            #[cfg(test)]
            Backing::Dummy(_) => self,
        }
    }

    /// What becomes of a page that maps a slot when the kernel copies it for a writer. `edges`: of its place.
    pub(crate) fn copied(self, edges: Edges) -> Self {
        match self {
            Backing::Slot(_) => Backing::CopiedOnWrite(edges),
            Backing::OrphanedSlot(orphan) => Backing::OrphanedCopy(orphan),
            other => other,
        }
    }

    /// Whether a page that becomes `next` stays at its place in the same mapping.
    pub(crate) fn keeps_place(self, next: Backing) -> bool {
        use Backing::{CopiedOnWrite, OrphanedCopy, OrphanedSlot, Slot};
        matches!(
            (self, next),
            (Slot(_), CopiedOnWrite(_) | OrphanedSlot(_))
                | (OrphanedSlot(_) | CopiedOnWrite(_), OrphanedCopy(_))
        )
    }

    /// Whether `self -> next` is a step of the diagram above.
    fn may_become(self, next: Backing) -> bool {
        use Backing::{CopiedOnWrite, OrphanedCopy, OrphanedSlot, Packed, Private, Slot, Zero};
        match (self, next) {
            (a, b) if a == b => true,
            // Only its place is known better, or it moved along with its neighbours.
            (CopiedOnWrite(_), CopiedOnWrite(_) | OrphanedCopy(_)) => true,
            // Healed, or moved out.
            (CopiedOnWrite(_) | OrphanedCopy(_), next) => matches!(next, Slot(_) | Zero | Private),
            // The service copied it, or it is written for the first time.
            (_, Private) => true,
            (Private | Zero, Zero) | (Private, Slot(_) | CopiedOnWrite(_) | Packed) => true,
            (Slot(_), Slot(_) | OrphanedSlot(_) | CopiedOnWrite(_)) => true,
            (OrphanedSlot(orphan), next) => next == OrphanedCopy(orphan),
            #[cfg(test)]
            (Private, Backing::Dummy(_)) => true,
            _ => false,
        }
    }
}

impl Known {
    fn encode(self) -> (u64, u64) {
        match self {
            Known::Nothing => (0, 0),
            Known::WriteProtected => (WRITE_PROTECTED, 0),
            Known::Volatile => (VOLATILE, 0),
            Known::Pinned(PinnedUntil { due, pause }) => (PINNED, u64::from(due) | u64::from(pause) << 32),
            Known::Keyed(key) => (4, key.raw()),
            Known::Candidate(key) => (CANDIDATE, key.raw()),
        }
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // payloads were made by encode()
    fn decode(number: u64, payload: u64) -> Self {
        let key = Key::try_new(payload & !(BEGINS | ENDS));
        match (number, key) {
            (WRITE_PROTECTED, _) => Known::WriteProtected,
            (VOLATILE, _) => Known::Volatile,
            (PINNED, _) => Known::Pinned(PinnedUntil {
                due: payload as u32,
                pause: (payload >> 32) as u8,
            }),
            (4, Some(key)) => Known::Keyed(key),
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
        use Known::{Candidate, Keyed, Nothing, Pinned, Volatile, WriteProtected};
        match (self, next) {
            (a, b) if a == b => true,
            (_, Nothing) => true,
            (Nothing | WriteProtected | Volatile | Keyed(_), Keyed(_)) => true,
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
    pub(crate) const UNTRACKED: Self = Self::unkeyed(Backing::Private);

    /// A page of which nothing more is known than where it is.
    pub(crate) const fn unkeyed(backing: Backing) -> Self {
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

    /// Packs into a word. At most one of both has a payload, but for [`BEGINS`] and [`ENDS`].
    #[inline]
    pub(super) fn encode(self) -> u64 {
        let ((backing, place), (known, content)) = (self.backing.encode(), self.known.encode());
        debug_assert!(place & !(BEGINS | ENDS) == 0 || content == 0, "{self:?}");
        debug_assert!((place | content) & !PAYLOAD == 0, "{self:?}");
        backing << BACKING_SHIFT | known << KNOWN_SHIFT | place | content
    }

    #[inline]
    pub(super) fn decode(word: u64) -> Self {
        let payload = word & PAYLOAD;
        Self {
            backing: Backing::decode(word >> BACKING_SHIFT, payload),
            known: Known::decode(word >> KNOWN_SHIFT & 7, payload),
        }
    }

    /// What a word tells beside payload and worth, in `0..KINDS`.
    #[inline]
    pub(super) fn kind(word: u64) -> usize {
        (word >> KNOWN_SHIFT) as usize
    }

    /// A state of each kind, in order. (For a kind that no state has it is one of another kind.)
    pub(super) fn of_each_kind() -> impl Iterator<Item = Self> {
        (0..KINDS as u64).map(|kind| Self::decode(kind << KNOWN_SHIFT))
    }

    /// The slot in a word, if it is of a page that maps one: the loop over all pages asks.
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // payloads were made by encode()
    pub(super) fn slot(word: u64) -> Option<Slot> {
        (word >> BACKING_SHIFT == SLOT)
            .then(|| Slot::try_new((word & PAYLOAD) as u32))
            .flatten()
    }

    /// Whether the page of a word, if it was not written, neither waits to be keyed nor for its next try: the loop over all pages
    /// asks, and most are settled.
    pub(super) fn is_settled(word: u64) -> bool {
        match word >> BACKING_SHIFT {
            PRIVATE => !matches!(word >> KNOWN_SHIFT & 7, WRITE_PROTECTED | VOLATILE | PINNED),
            backing => backing != ORPHANED_SLOT,
        }
    }

    /// [`Backing::in_file_mapping`] of a word.
    #[inline]
    pub(super) fn in_file_mapping(word: u64) -> bool {
        IN_FILE.contains(&(word >> BACKING_SHIFT))
    }

    /// The key in a word, if it is a candidate's: the hot loop over all pages asks.
    pub(super) fn candidate_key(word: u64) -> Option<u64> {
        (word >> KNOWN_SHIFT & 7 == CANDIDATE).then_some(word & PAYLOAD & !(BEGINS | ENDS))
    }

    /// The key of private content, which counts for the repetition rate.
    pub(super) fn counted_key(self) -> Option<Key> {
        match (self.backing, self.known) {
            (Backing::Private, Known::Keyed(key) | Known::Candidate(key)) => Some(key),
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
                    Known::Nothing | Known::WriteProtected | Known::Keyed(_) | Known::Pinned(_)
                )
            }
            Backing::OrphanedSlot(_) if self.backing == next.backing => {
                matches!(next.known, Known::Nothing | Known::Candidate(_))
            }
            _ if self.backing.is_copied() && next.backing.is_copied() => {
                !matches!(next.known, Known::WriteProtected | Known::Volatile)
            }
            _ => next.known == Known::Nothing,
        };
        known && self.backing.may_become(next.backing)
    }
}

/// Number of pages in each state, kept by [`PageTable`](super::page_table::PageTable).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) write_protected: u64,
    pub(crate) volatile: u64,
    pub(crate) pinned: u64,
    pub(crate) candidates: u64,
    pub(crate) slots: u64,
    pub(crate) zero: u64,
    pub(crate) copied: u64,
    pub(crate) orphaned: u64,
    /// As far as the scanning thread has heard.
    pub(crate) packed: u64,
    #[cfg(test)]
    pub(crate) dummy: u64,
}

impl Counts {
    /// Where a page in this state is counted, if it is.
    pub(super) fn of(&mut self, state: PageState) -> Option<&mut u64> {
        match state.backing {
            Backing::Private => match state.known {
                Known::Nothing | Known::Keyed(_) => None,
                Known::WriteProtected => Some(&mut self.write_protected),
                Known::Volatile => Some(&mut self.volatile),
                Known::Pinned(_) => Some(&mut self.pinned),
                Known::Candidate(_) => Some(&mut self.candidates),
            },
            Backing::Slot(_) => Some(&mut self.slots),
            Backing::Zero => Some(&mut self.zero),
            Backing::CopiedOnWrite(_) | Backing::OrphanedCopy(_) => Some(&mut self.copied),
            Backing::OrphanedSlot(_) => Some(&mut self.orphaned),
            Backing::Packed => Some(&mut self.packed),
            #[cfg(test)]
            Backing::Dummy(_) => Some(&mut self.dummy),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn edges() -> impl Strategy<Value = Edges> {
        (any::<bool>(), any::<bool>()).prop_map(|(begins, ends)| Edges { begins, ends })
    }

    fn known_of_copies() -> impl Strategy<Value = Known> {
        let key = || (0u64..1 << 48).prop_map(|k| Key::try_new(k).unwrap());
        prop_oneof![
            Just(Known::Nothing),
            key().prop_map(Known::Keyed),
            key().prop_map(Known::Candidate),
            (any::<u32>(), PAUSES).prop_map(|(due, pause)| Known::Pinned(PinnedUntil { due, pause })),
        ]
    }

    pub(in crate::memory) fn states() -> impl Strategy<Value = PageState> {
        let key = || (0u64..1 << 48).prop_map(|k| Key::try_new(k).unwrap());
        let slot = || (0u32..1 << 26).prop_map(|s| Slot::try_new(s).unwrap());
        let orphan = || any::<bool>().prop_map(|begins| Orphan { begins });
        prop_oneof![
            Just(PageState::UNTRACKED),
            Just(PageState::private(Known::WriteProtected)),
            Just(PageState::private(Known::Volatile)),
            (any::<u32>(), PAUSES)
                .prop_map(|(due, pause)| PageState::private(Known::Pinned(PinnedUntil { due, pause }))),
            key().prop_map(|key| PageState::private(Known::Keyed(key))),
            key().prop_map(|key| PageState::private(Known::Candidate(key))),
            Just(PageState::unkeyed(Backing::Zero)),
            slot().prop_map(|slot| PageState::unkeyed(Backing::Slot(slot))),
            (edges(), known_of_copies()).prop_map(|(edges, known)| PageState {
                backing: Backing::CopiedOnWrite(edges),
                known,
            }),
            orphan().prop_map(|orphan| PageState::unkeyed(Backing::OrphanedSlot(orphan))),
            (orphan(), key()).prop_map(|(orphan, key)| PageState {
                backing: Backing::OrphanedSlot(orphan),
                known: Known::Candidate(key),
            }),
            (orphan(), known_of_copies()).prop_map(|(orphan, known)| PageState {
                backing: Backing::OrphanedCopy(orphan),
                known,
            }),
            Just(PageState::unkeyed(Backing::Packed)),
            any::<u32>().prop_map(|payload| PageState::unkeyed(Backing::Dummy(payload))),
        ]
    }

    proptest! {
        #[test]
        fn a_state_survives_its_word(state in states()) {
            prop_assert_eq!(PageState::decode(state.encode()), state);
            let slot = match state.backing {
                Backing::Slot(slot) => Some(slot),
                _ => None,
            };
            prop_assert_eq!(PageState::slot(state.encode()), slot);
            prop_assert_eq!(PageState::in_file_mapping(state.encode()), state.backing.in_file_mapping());
            prop_assert_eq!(
                PageState::candidate_key(state.encode()),
                state.known.candidate().map(Key::raw)
            );
            let tried_again = state.backing == Backing::Private && matches!(state.known, Known::Pinned(_));
            let settled = !state.awaits_key() && !tried_again;
            // Orphaned slots that have their key are not told apart here.
            let orphan = matches!(state.backing, Backing::OrphanedSlot(_));
            prop_assert_eq!(PageState::is_settled(state.encode()), settled && !orphan);
            prop_assert_eq!(PageState::is_settled(state.encode() | WORTH), settled && !orphan);
        }

        /// What is anonymous in a mapping of the store stays there, or is replaced as a whole: it cannot be taken. Nothing is
        /// known of what takes its place.
        #[test]
        fn copied_pages_are_healed_or_stay(state in states(), next in states()) {
            if state.backing.is_copied() && state.may_become(next) {
                let healed = matches!(next, PageState { backing: Backing::Slot(_) | Backing::Zero | Backing::Private, known: Known::Nothing });
                prop_assert!(next.backing.is_copied() || healed);
            }
        }
    }

    proptest! {
        /// What is packed has no bytes at its place: nothing but their return makes another page of it.
        #[test]
        fn packed_pages_were_private_and_become_private_again(state in states()) {
            let packed = PageState::unkeyed(Backing::Packed);
            if state != packed {
                prop_assert_eq!(state.may_become(packed), state.backing == Backing::Private);
                let back = state.backing == Backing::Private && state.known == Known::Nothing;
                prop_assert_eq!(packed.may_become(state), back);
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
            known = Known::Pinned(PinnedUntil::after(known, pass));
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
        let copy = |begins, ends| Backing::CopiedOnWrite(Edges { begins, ends });
        let (shared, within) = (Backing::Slot(slot(7)), copy(false, false));
        assert!(within.continues(shared) && shared.continues(within) && within.continues(within));
        assert!(!copy(true, false).continues(shared) && !shared.continues(copy(false, true)));
        assert!(!within.continues(Backing::Private) && !Backing::Private.continues(within));
        assert!(Backing::Zero.continues(Backing::Private) && !shared.continues(Backing::Private));
        assert!(!Backing::Private.continues(shared) && !Backing::Private.continues(orphan(false)));
        assert!(orphan(false).continues(orphan(true)) && !orphan(true).continues(orphan(false)));
        assert!(!orphan(false).continues(shared) && !shared.continues(orphan(true)));
        let packed = Backing::Packed;
        assert!(packed.continues(packed));
        for other in [Backing::Private, Backing::Zero, shared, within, orphan(false)] {
            assert!(!packed.continues(other) && !other.continues(packed));
        }
    }
}
