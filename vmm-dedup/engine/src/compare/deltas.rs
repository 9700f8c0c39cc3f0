//! Deltas: the words in which a page differs from another one, for pages that are kept as another page and a difference.

use super::{Answer, Engine, PageId, Pages};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};

/// Bytes of an entry: a word's index, and its value.
pub const DELTA_ENTRY: usize = 10;

/// The words that make a page out of another one: entries of a 16-bit index and a 64-bit value, both little-endian, in the
/// order of their indices. It is the record that Intel DSA makes (its specification, "create delta record").
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta(Vec<u8>);

impl Delta {
    /// A record that came from somewhere; `None` unless it is made of entries whose indices ascend and lie in a page.
    #[must_use]
    pub fn try_new(record: Vec<u8>) -> Option<Self> {
        let delta = Self(record);
        let whole = delta.0.len().is_multiple_of(DELTA_ENTRY);
        let ascends = delta.entries().is_sorted_by(|(a, _), (b, _)| a < b);
        let within = delta.entries().all(|(index, _)| index < PAGE_WORDS);
        (whole && ascends && within).then_some(delta)
    }

    /// What makes `changed` out of `base`.
    #[must_use]
    pub fn between(base: &PageWords, changed: &PageWords) -> Self {
        let mut record = Vec::new();
        for (index, (base, changed)) in (0u16..).zip(base.iter().zip(changed)) {
            if base != changed {
                record.extend_from_slice(&index.to_le_bytes());
                record.extend_from_slice(&changed.to_ne_bytes());
            }
        }
        Self(record)
    }

    /// Index and value of each word.
    pub fn entries(&self) -> impl Iterator<Item = (usize, u64)> {
        self.0.chunks_exact(DELTA_ENTRY).map(|entry| {
            let index = u16::from_le_bytes([entry[0], entry[1]]);
            let value = u64::from_ne_bytes(std::array::from_fn(|byte| entry[2 + byte]));
            (index.into(), value)
        })
    }

    /// The entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len() / DELTA_ENTRY
    }

    /// Whether both pages are equal.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The record's bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Makes the changed page out of the base.
    pub fn apply(&self, page: &mut PageWords) {
        // Words beyond the page there are none: such a record is not made.
        for (index, value) in self.entries() {
            page[index % PAGE_WORDS] = value;
        }
    }
}

/// Makes and applies deltas.
///
/// Both are proposals, as all that engines say: who puts the result of [`Self::apply_deltas`] in the place of a page compares
/// it with that page first. Pages may be written meanwhile; then a delta is one of torn pages.
pub trait Deltas: Engine {
    /// What makes the second page of each pair out of the first, in the order of the questions; `None` if that takes more
    /// than `most` words.
    fn create_deltas(
        &mut self,
        pages: &dyn Pages,
        of: &[(PageId, PageId)],
        most: usize,
    ) -> Vec<Answer<Option<Delta>>>;

    /// What each page becomes by a delta; the page itself stays as it is.
    fn apply_deltas(&mut self, pages: &dyn Pages, of: &[(PageId, &Delta)]) -> Vec<Answer<Box<PageWords>>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delta_makes_one_page_out_of_another() {
        let (base, mut changed) = ([7; PAGE_WORDS], [7; PAGE_WORDS]);
        (changed[0], changed[300], changed[511]) = (1, u64::MAX, 3);
        let delta = Delta::between(&base, &changed);
        assert_eq!((delta.len(), delta.bytes().len()), (3, 30));
        assert_eq!(Delta::try_new(delta.bytes().to_vec()), Some(delta.clone()));
        let mut page = base;
        delta.apply(&mut page);
        assert_eq!(page, changed);
        assert!(Delta::between(&base, &base).is_empty());
    }

    #[test]
    fn records_that_are_none_are_refused() {
        let entry = |index: u16| [index.to_le_bytes().to_vec(), vec![0; 8]].concat();
        for record in [
            vec![0; 9],
            entry(512),
            entry(u16::MAX),
            [entry(3), entry(3)].concat(),
            [entry(3), entry(2)].concat(),
        ] {
            assert_eq!(Delta::try_new(record), None);
        }
        assert!(Delta::try_new([entry(2), entry(511)].concat()).is_some());
    }
}
