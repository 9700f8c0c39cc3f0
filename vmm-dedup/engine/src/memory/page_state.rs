//! What the engine knows of a guest page: one enum, 8 bytes, transitions checked in one function.

use crate::memory::bitmap::Bits;
use crate::memory::key_filter::Filter;
use std::sync::Arc;
use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

/// State of a guest page.
///
/// ```text
/// Untracked -> Armed -> Candidate -> Shared -> Private         (the kernel copied it: for good)
///        |      | ^         |   |       `----> Untracked       (the service copied it: managed break, unmerge)
///        |      v |         |   `-> Private                    (an exception in a run: for good)
///        |   Volatile       `-> Zero -> Armed
///        `----> Seen -------'         Shared -> Foreign (the store was lost) -> Candidate ...
/// ```
/// What could not be taken since it was pinned becomes `Pinned`, and from there goes on like an armed page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Never seen populated, or not looked at since.
    Untracked,
    /// Write-protected since the last look, not read yet: to be keyed if it stays unwritten.
    Armed,
    /// Armed, and found written again at the last look: too busy to be keyed.
    Volatile,
    /// Pinned, or shared with another process, when it was to be merged: left alone until a pass.
    Pinned(Retry),
    /// In a huge page: keyed, but not reported to the store.
    Seen {
        /// Its line key.
        key: Key,
    },
    /// Keyed, and no twin known. `foreign`: it still maps a slot of a store that is gone.
    Candidate {
        /// The key last reported to the store.
        key: Key,
        /// See above.
        foreign: bool,
    },
    /// Maps a slot.
    Shared(Slot),
    /// The service put the zero page here.
    Zero,
    /// Anonymous, but inside a mapping of the store, where this slot would be seen: copied by the kernel after it was
    /// shared, or an exception in a run ([`crate::merge::bridged_runs`]). It may be pinned for a DMA, which nothing tells, so it
    /// must not be merged (docs/design.md, "Breaking"). `None`: a place in a store that is gone.
    Private(Option<Slot>),
    /// Maps a slot of a store that is gone, and has no key yet.
    Foreign,
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
    /// After a failure in `pass` of a page in `state`.
    pub(crate) fn after(state: State, pass: u64) -> Self {
        let pause = match state {
            State::Pinned(retry) => (retry.pause + 1).min(*PAUSES.end()),
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

const TAG_SHIFT: u32 = 60;
const FOREIGN_BIT: u64 = 1 << 48;

impl State {
    /// Packs into a word.
    fn encode(self) -> u64 {
        let (tag, payload) = match self {
            State::Untracked => (0, 0),
            State::Armed => (1, 0),
            State::Candidate { key, foreign } => (2, key.raw() | if foreign { FOREIGN_BIT } else { 0 }),
            State::Shared(slot) => (3, u64::from(slot.number())),
            State::Zero => (4, 0),
            State::Private(place) => (5, place.map_or(0, |slot| u64::from(slot.number()) + 1)),
            State::Foreign => (6, 0),
            State::Volatile => (7, 0),
            State::Pinned(Retry { due, pause }) => (8, u64::from(due) | u64::from(pause) << 32),
            State::Seen { key } => (9, key.raw()),
        };
        tag << TAG_SHIFT | payload
    }

    #[allow(clippy::cast_possible_truncation)] // payloads were made by encode()
    fn decode(word: u64) -> Self {
        let payload = word & ((1 << TAG_SHIFT) - 1);
        let decoded = match word >> TAG_SHIFT {
            1 => Some(State::Armed),
            2 => Key::try_new(payload & (FOREIGN_BIT - 1)).map(|key| State::Candidate {
                key,
                foreign: payload & FOREIGN_BIT != 0,
            }),
            3 => Slot::try_new(payload as u32).map(State::Shared),
            4 => Some(State::Zero),
            5 => Some(State::Private(
                payload.checked_sub(1).and_then(|slot| Slot::try_new(slot as u32)),
            )),
            6 => Some(State::Foreign),
            7 => Some(State::Volatile),
            8 => Some(State::Pinned(Retry {
                due: payload as u32,
                pause: (payload >> 32) as u8,
            })),
            9 => Key::try_new(payload).map(|key| State::Seen { key }),
            _ => Some(State::Untracked),
        };
        decoded.unwrap_or(State::Untracked)
    }

    /// Whether the page's address lies in a mapping of a store file.
    pub(crate) fn in_file_mapping(self) -> bool {
        matches!(
            self,
            State::Shared(_) | State::Private(_) | State::Foreign | State::Candidate { foreign: true, .. }
        )
    }

    /// The slot at the page's place in a mapping of the store, whether or not it is what the page shows.
    pub(crate) fn place(self) -> Option<Slot> {
        match self {
            State::Shared(slot) => Some(slot),
            State::Private(place) => place,
            _ => None,
        }
    }

    /// The key of private content, which counts for the repetition rate.
    fn counted_key(self) -> Option<Key> {
        match self {
            State::Seen { key } | State::Candidate { key, foreign: false } => Some(key),
            _ => None,
        }
    }

    /// Whether the page maps a slot, of this store or of one that is gone.
    pub(crate) fn maps_a_slot(self) -> bool {
        self.in_file_mapping() && !matches!(self, State::Private(_))
    }

    /// Whether the page waits to be keyed as soon as it proves unwritten.
    pub(crate) fn awaits_key(self) -> bool {
        matches!(self, State::Armed | State::Volatile | State::Foreign)
    }

    /// Whether `self -> next` is a step of the diagram above.
    pub(crate) fn may_become(self, next: State) -> bool {
        use State::*;
        match (self, next) {
            (a, b) if a == b => true,
            // Never again: see Private.
            (Private(_), _) => false,
            // Forgetting is always possible for private memory; for a mapped slot it means that we copied it.
            (_, Untracked) => true,
            (Untracked | Zero | Volatile | Pinned(_), Armed) => true,
            (Untracked | Zero | Armed | Volatile, Seen { .. }) => true,
            (Seen { .. }, Armed | Pinned(_) | Candidate { foreign: false, .. }) => true,
            (Seen { .. }, Seen { .. }) => true,
            (Candidate { foreign: false, .. }, Armed) => true,
            (Armed, Volatile) => true,
            (Armed | Volatile | Pinned(_), Candidate { foreign: false, .. }) => true,
            (Untracked | Armed | Volatile | Zero | Candidate { foreign: false, .. }, Pinned(_)) => true,
            (Pinned(_), Pinned(_)) => true,
            (Candidate { foreign: a, .. }, Candidate { foreign: b, .. }) => a == b,
            (Foreign, Candidate { foreign: true, .. }) => true,
            (Candidate { foreign: true, .. }, Foreign) => true,
            (
                Untracked | Armed | Seen { .. } | Volatile | Pinned(_) | Candidate { foreign: false, .. },
                Shared(_) | Zero,
            ) => true,
            (Shared(slot), Private(place)) => place == Some(slot),
            (Foreign | Candidate { foreign: true, .. }, Private(None)) => true,
            (Candidate { foreign: false, .. }, Private(Some(_))) => true,
            (Shared(_), Foreign) => true,
            _ => false,
        }
    }
}

/// Number of pages in each state, kept by [`Table`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) armed: u64,
    pub(crate) volatile: u64,
    pub(crate) pinned: u64,
    pub(crate) candidates: u64,
    pub(crate) shared: u64,
    pub(crate) zero: u64,
    pub(crate) private: u64,
    pub(crate) foreign: u64,
}

impl Counts {
    fn of(&mut self, state: State) -> Option<&mut u64> {
        match state {
            State::Untracked | State::Seen { .. } => None,
            State::Armed => Some(&mut self.armed),
            State::Volatile => Some(&mut self.volatile),
            State::Pinned(_) => Some(&mut self.pinned),
            State::Candidate { foreign: false, .. } => Some(&mut self.candidates),
            State::Shared(_) => Some(&mut self.shared),
            State::Zero => Some(&mut self.zero),
            State::Private(_) => Some(&mut self.private),
            State::Foreign | State::Candidate { foreign: true, .. } => Some(&mut self.foreign),
        }
    }
}

/// States of all pages of a service: 8 bytes a page, in one allocation.
#[derive(Debug)]
pub(crate) struct Table {
    words: Vec<u64>,
    counts: Counts,
    /// Pages whose addresses lie in mappings of store files, for [`crate::unmerge::discard`].
    in_file: Arc<Bits>,
    /// How often the keys of [`State::Seen`] and [`State::Candidate`] occur, once there are huge pages.
    repetition: Option<Filter>,
}

impl Table {
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            words: vec![0; pages],
            counts: Counts::default(),
            in_file: Arc::new(Bits::new(pages)),
            repetition: None,
        }
    }

    /// Makes room for pages numbered up to `end`.
    pub(crate) fn grow(&mut self, end: usize) {
        if end > self.words.len() {
            self.words.resize(end, 0);
            self.in_file = Arc::new(self.in_file.resized(end));
            self.repetition = None; // counted anew, for the new size, when the next huge page is looked at
        }
    }

    pub(crate) fn in_file(&self) -> Arc<Bits> {
        self.in_file.clone()
    }

    /// From now on counts how often keys occur. Guests without huge pages do not pay for it.
    pub(crate) fn count_repetition(&mut self) {
        if self.repetition.is_none() {
            let mut filter = Filter::new(self.words.len());
            let keys = self.words.iter().filter_map(|w| State::decode(*w).counted_key());
            keys.for_each(|key| filter.insert(key));
            self.repetition = Some(filter);
        }
    }

    /// How many pages have this key, at most; 0 if that is not counted.
    pub(crate) fn repetition(&self, key: Key) -> u64 {
        self.repetition.as_ref().map_or(0, |filter| filter.count(key))
    }

    pub(crate) fn get(&self, page: u32) -> State {
        State::decode(self.words[page as usize])
    }

    /// Makes a transition. A wrong one is a bug of the engine: it stops here rather than at a guest's memory.
    pub(crate) fn set(&mut self, page: u32, next: State) -> State {
        let old = self.get(page);
        assert!(
            old.may_become(next),
            "page {page} cannot go from {old:?} to {next:?}"
        );
        self.replace(page, old, next);
        old
    }

    /// Forgets a page whose memory is not what it was: unmapped, or replaced by fresh memory, which nobody has
    /// pinned.
    pub(crate) fn forget(&mut self, page: u32) -> State {
        let old = self.get(page);
        // What was never looked at holds no memory of the table yet.
        if old != State::Untracked {
            self.replace(page, old, State::Untracked);
        }
        old
    }

    fn replace(&mut self, page: u32, old: State, next: State) {
        if let Some(n) = self.counts.of(old) {
            *n -= 1;
        }
        if let Some(n) = self.counts.of(next) {
            *n += 1;
        }
        if let Some(filter) = &mut self.repetition {
            old.counted_key().into_iter().for_each(|key| filter.remove(key));
            next.counted_key().into_iter().for_each(|key| filter.insert(key));
        }
        self.words[page as usize] = next.encode();
        if old.in_file_mapping() != next.in_file_mapping() {
            self.in_file.set(page, next.in_file_mapping());
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn bytes(&self) -> usize {
        self.words.len() * 8 + self.repetition.as_ref().map_or(0, Filter::bytes)
    }

    /// Candidates whose key satisfies `pick`, in order. The hot loop over the whole table.
    pub(crate) fn candidates_with(&self, mut pick: impl FnMut(u64) -> bool) -> Vec<u32> {
        let key_of = |word: u64| (word >> TAG_SHIFT == 2).then_some(word & (FOREIGN_BIT - 1));
        let found = (0u32..)
            .zip(&self.words)
            .filter(|(_, w)| key_of(**w).is_some_and(&mut pick));
        found.map(|(page, _)| page).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn states() -> impl Strategy<Value = State> {
        let key = (0u64..1 << 48).prop_map(|k| Key::try_new(k).unwrap());
        prop_oneof![
            Just(State::Untracked),
            Just(State::Armed),
            (key.clone(), any::<bool>()).prop_map(|(key, foreign)| State::Candidate { key, foreign }),
            key.prop_map(|key| State::Seen { key }),
            (0u32..1 << 26).prop_map(|s| State::Shared(Slot::try_new(s).unwrap())),
            Just(State::Zero),
            proptest::option::of(0u32..1 << 26).prop_map(|s| State::Private(s.and_then(Slot::try_new))),
            Just(State::Foreign),
            Just(State::Volatile),
            (any::<u32>(), PAUSES).prop_map(|(due, pause)| State::Pinned(Retry { due, pause })),
        ]
    }

    proptest! {
        #[test]
        fn a_state_survives_its_word(state in states()) {
            prop_assert_eq!(State::decode(state.encode()), state);
        }

        #[test]
        fn counts_agree_with_the_table(steps in proptest::collection::vec((0u32..20, states()), 0..200)) {
            let mut table = Table::new(20);
            for (page, next) in steps {
                if table.get(page).may_become(next) {
                    table.set(page, next);
                }
            }
            let mut counts = Counts::default();
            (0..20).for_each(|page| if let Some(n) = counts.of(table.get(page)) { *n += 1 });
            prop_assert_eq!(table.counts(), counts);
        }

        /// The filter counts what the table holds, whenever counting began.
        #[test]
        fn repetition_is_never_underrated(
            steps in proptest::collection::vec((0u32..20, states()), 0..100),
            begin in 0usize..100,
        ) {
            let mut table = Table::new(20);
            for (n, (page, next)) in steps.into_iter().enumerate() {
                if n == begin {
                    table.count_repetition();
                }
                if table.get(page).may_become(next) {
                    table.set(page, next);
                }
            }
            table.count_repetition();
            let keys: Vec<Key> = (0..20).filter_map(|page| table.get(page).counted_key()).collect();
            for key in &keys {
                let same = keys.iter().filter(|k| *k == key).fold(0, |n, _| n + 1);
                prop_assert!(table.repetition(*key) >= same);
            }
        }

        /// The rule that protects a DMA: what is private in a mapping of the store is never merged.
        #[test]
        fn private_pages_stay_private(place in proptest::option::of(0u32..1 << 26), next in states()) {
            let private = State::Private(place.and_then(Slot::try_new));
            prop_assert_eq!(private.may_become(next), next == private);
        }
    }

    #[test]
    fn a_pinned_page_is_tried_ever_less_often() {
        let mut state = State::Armed;
        let mut tries = Vec::new();
        for pass in u64::from(u32::MAX) - 20.. {
            match state {
                State::Pinned(retry) if !retry.is_due(pass) => continue,
                _ => tries.push(pass + 20 - u64::from(u32::MAX)),
            }
            state = State::Pinned(Retry::after(state, pass));
            if tries.len() == 10 {
                break;
            }
        }
        assert_eq!(tries, [0, 8, 24, 56, 120, 248, 504, 1016, 1528, 2040]);
    }

    #[test]
    fn a_state_takes_eight_bytes() {
        assert_eq!(Table::new(1000).bytes(), 8000);
    }

    #[test]
    #[should_panic(expected = "cannot go from")]
    fn forbidden_steps_stop_the_engine() {
        let mut table = Table::new(1);
        table.set(0, State::Armed);
        table.set(0, State::Private(None));
    }
}
