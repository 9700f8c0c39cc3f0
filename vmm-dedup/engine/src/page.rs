//! What the engine knows of a guest page: one enum, 8 bytes, transitions checked in one function.

use vmm_dedup_protocol::Slot;
use vmm_dedup_protocol::key::Key;

/// State of a guest page.
///
/// ```text
/// Untracked -> Armed -> Candidate -> Shared -> Private         (the kernel copied it: for good)
///                 |         |   |       `----> Untracked       (the service copied it: managed break, unmerge)
///                 |         |   `-> Private                    (an exception in a run: for good)
///                 |         `-> Zero -> Armed
///                 `-> Zero            Shared -> Foreign (the store was lost) -> Candidate ...
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Never seen populated, or not looked at since.
    Untracked,
    /// Write-protected since the last look, not read yet: to be keyed if it stays unwritten.
    Armed,
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
    /// shared, or an exception in a run ([`crate::stretch`]). It may be pinned for a DMA, which nothing tells, so it
    /// must not be merged (docs/design.md, "Breaking"). `None`: a place in a store that is gone.
    Private(Option<Slot>),
    /// Maps a slot of a store that is gone, and has no key yet.
    Foreign,
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

    /// Whether the page maps a slot, of this store or of one that is gone.
    pub(crate) fn maps_a_slot(self) -> bool {
        self.in_file_mapping() && !matches!(self, State::Private(_))
    }

    /// Whether the page waits to be keyed as soon as it proves unwritten.
    pub(crate) fn awaits_key(self) -> bool {
        matches!(self, State::Armed | State::Foreign)
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
            (Untracked | Zero, Armed) => true,
            (Candidate { foreign: false, .. }, Armed) => true,
            (Armed, Candidate { foreign: false, .. }) => true,
            (Candidate { foreign: a, .. }, Candidate { foreign: b, .. }) => a == b,
            (Foreign, Candidate { foreign: true, .. }) => true,
            (Candidate { foreign: true, .. }, Foreign) => true,
            (Untracked | Armed | Candidate { foreign: false, .. }, Shared(_) | Zero) => true,
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
    pub(crate) waiting: u64,
    pub(crate) candidates: u64,
    pub(crate) shared: u64,
    pub(crate) zero: u64,
    pub(crate) private: u64,
    pub(crate) foreign: u64,
}

impl Counts {
    fn of(&mut self, state: State) -> Option<&mut u64> {
        match state {
            State::Untracked => None,
            State::Armed => Some(&mut self.waiting),
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
}

impl Table {
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            words: vec![0; pages],
            counts: Counts::default(),
        }
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
        if let Some(n) = self.counts.of(old) {
            *n -= 1;
        }
        if let Some(n) = self.counts.of(next) {
            *n += 1;
        }
        self.words[page as usize] = next.encode();
        old
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn bytes(&self) -> usize {
        self.words.len() * 8
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
            (key, any::<bool>()).prop_map(|(key, foreign)| State::Candidate { key, foreign }),
            (0u32..1 << 26).prop_map(|s| State::Shared(Slot::try_new(s).unwrap())),
            Just(State::Zero),
            proptest::option::of(0u32..1 << 26).prop_map(|s| State::Private(s.and_then(Slot::try_new))),
            Just(State::Foreign),
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

        /// The rule that protects a DMA: what is private in a mapping of the store is never merged.
        #[test]
        fn private_pages_stay_private(place in proptest::option::of(0u32..1 << 26), next in states()) {
            let private = State::Private(place.and_then(Slot::try_new));
            prop_assert_eq!(private.may_become(next), next == private);
        }
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
