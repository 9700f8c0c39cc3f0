//! The Scan Table (section 3.2) and the functions through which software uses it (table 1 of the paper).

use crate::error::Error;
use crate::hash_key::HashKey;
pub use crate::sizes::{OTHER_PAGES, PPN_BITS};

/// A physical page number, as the device sees addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ppn(u64);

impl Ppn {
    /// A page below 2^52 bytes.
    ///
    /// # Errors
    /// [`Error::Ppn`].
    pub fn try_new(number: u64) -> Result<Self, Error> {
        if number >> PPN_BITS == 0 {
            Ok(Self(number))
        } else {
            Err(Error::Ppn(number))
        }
    }

    /// The low bits of a word as a page number.
    pub(crate) fn truncated(word: u64) -> Self {
        Self(word & ((1 << PPN_BITS) - 1))
    }

    /// The page's number.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// Names one of the Other Pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryIndex(u8);

impl EntryIndex {
    /// Entry 0, where the comparison of a freshly filled table starts.
    pub const ROOT: Self = Self(0);

    /// All entries, in order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..).take(OTHER_PAGES).map(Self)
    }

    /// The entry with this number.
    ///
    /// # Errors
    /// [`Error::Index`] if it is not below [`OTHER_PAGES`].
    pub fn try_new(index: usize) -> Result<Self, Error> {
        match u8::try_from(index) {
            Ok(n) if index < OTHER_PAGES => Ok(Self(n)),
            _ => Err(Error::Index(index)),
        }
    }

    /// The entry's number.
    pub fn number(self) -> usize {
        usize::from(self.0)
    }
}

/// The value of `Ptr`, Less or More: the number of an entry, or one that no entry has.
///
/// The search ends where `Ptr` names no valid entry, and `Ptr` keeps its value. So software gives each way out of a
/// table a number of its own, from 31 on, and learns from `Ptr` which part of the tree to load next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer(u8);

impl Pointer {
    /// To entry 0.
    pub const ROOT: Self = Self::to(EntryIndex::ROOT);

    /// A pointer of these bits; any will do.
    pub const fn new(bits: u8) -> Self {
        Self(bits)
    }

    /// To an entry.
    pub const fn to(entry: EntryIndex) -> Self {
        Self(entry.0)
    }

    /// The pointer's bits.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// The entry that it names, if there can be one of that number.
    pub fn entry(self) -> Option<EntryIndex> {
        EntryIndex::try_new(usize::from(self.0)).ok()
    }
}

/// An entry of the Other Pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherPage {
    /// The page.
    pub ppn: Ppn,
    /// What to compare with next if the candidate is smaller.
    pub less: Pointer,
    /// What to compare with next if the candidate is greater.
    pub more: Pointer,
}

/// What software writes into the PFE entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The page to find a twin of.
    pub ppn: Ppn,
    /// L: this table is the last for this candidate, so the hash key must be completed.
    pub last_refill: bool,
    /// Where to start.
    pub ptr: Pointer,
}

/// What software reads from the PFE entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PfeInfo {
    /// The hash key, once H is set.
    pub hash_key: Option<HashKey>,
    /// With D: the twin's entry. With an error: the entry that it was found at. Else the invalid entry at which the
    /// search ended.
    pub ptr: Pointer,
    /// S: every comparison that was asked for is done, or an error ended them.
    pub scanned: bool,
    /// D: a twin was found.
    pub duplicate: bool,
    /// Why the comparisons ended early.
    pub error: Option<RunError>,
}

/// What ends the processing of a table. Scanned is set, Duplicate is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// The candidate's page number names no memory of the device's.
    #[error("the candidate cannot be read: map its page for the device first")]
    CandidateFault,
    /// That of the entry named by `Ptr` does not.
    #[error("one of the Other Pages cannot be read: map its page for the device first")]
    OtherFault,
    /// Less and More lead back to the entry named by `Ptr`, which was compared before.
    #[error("the Less and More pointers of the table form a loop")]
    Loop,
}

/// Outcome of comparing the candidate with another page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// The candidate's first different line is smaller.
    Less,
    /// All lines are equal.
    Equal,
    /// It is greater.
    Greater,
}

/// Whether the device has more to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walk {
    /// Compare with the page that `Ptr` names now.
    Next(EntryIndex, OtherPage),
    /// Scanned is set.
    Done,
}

#[derive(Clone, Copy, Debug)]
struct Pfe {
    candidate: Candidate,
    info: PfeInfo,
}

/// One PFE entry and 31 Other Pages.
#[derive(Clone, Debug, Default)]
pub struct ScanTable {
    pfe: Option<Pfe>,
    others: [Option<OtherPage>; OTHER_PAGES],
}

impl ScanTable {
    /// `insert_PPN`: fills an entry of the Other Pages.
    pub fn insert_ppn(&mut self, index: EntryIndex, page: OtherPage) {
        self.others[index.number()] = Some(page);
    }

    /// Replaces all Other Pages; `None` is an invalid entry.
    pub fn load(&mut self, others: [Option<OtherPage>; OTHER_PAGES]) {
        self.others = others;
    }

    /// `insert_PFE`: a new candidate, without hash key and results.
    pub fn insert_pfe(&mut self, candidate: Candidate) {
        let info = PfeInfo {
            hash_key: None,
            ptr: candidate.ptr,
            scanned: false,
            duplicate: false,
            error: None,
        };
        self.pfe = Some(Pfe { candidate, info });
    }

    /// `update_PFE`: starts over at `ptr` with another set of pages; the candidate and its key stay.
    pub fn update_pfe(&mut self, last_refill: bool, ptr: Pointer) {
        if let Some(pfe) = &mut self.pfe {
            (pfe.candidate.last_refill, pfe.candidate.ptr) = (last_refill, ptr);
            pfe.info = PfeInfo {
                hash_key: pfe.info.hash_key,
                ptr,
                scanned: false,
                duplicate: false,
                error: None,
            };
        }
    }

    /// `get_PFE_info`; `None` without a candidate.
    pub fn pfe_info(&self) -> Option<PfeInfo> {
        self.pfe.map(|pfe| pfe.info)
    }

    /// The candidate, as written last.
    pub fn candidate(&self) -> Option<Candidate> {
        self.pfe.map(|pfe| pfe.candidate)
    }

    /// Device side: the hash key is complete.
    pub fn set_hash_key(&mut self, key: HashKey) {
        if let Some(pfe) = &mut self.pfe {
            pfe.info.hash_key = Some(key);
        }
    }

    /// Device side: the comparisons end here.
    pub fn fail(&mut self, error: RunError) {
        if let Some(pfe) = &mut self.pfe {
            (pfe.info.scanned, pfe.info.duplicate, pfe.info.error) = (true, false, Some(error));
        }
    }

    /// Device side: what to compare the candidate with now. Sets Scanned when `Ptr` names no valid entry.
    pub fn current(&mut self) -> Walk {
        let Some(pfe) = &mut self.pfe else {
            return Walk::Done;
        };
        if pfe.info.scanned {
            return Walk::Done;
        }
        let entry = |index: EntryIndex| self.others[index.number()].map(|page| (index, page));
        match pfe.info.ptr.entry().and_then(entry) {
            Some((index, page)) => Walk::Next(index, page),
            None => {
                pfe.info.scanned = true;
                Walk::Done
            }
        }
    }

    /// Device side: takes the outcome of comparing with the [`Self::current`] page and moves `Ptr` on. Tables may be
    /// graphs with cycles, so it is the device that must bound its steps.
    pub fn advance(&mut self, compared: Compared) -> Walk {
        if let (Walk::Next(_, page), Some(pfe)) = (self.current(), &mut self.pfe) {
            match compared {
                Compared::Equal => (pfe.info.scanned, pfe.info.duplicate) = (true, true),
                Compared::Less => pfe.info.ptr = page.less,
                Compared::Greater => pfe.info.ptr = page.more,
            }
        }
        self.current()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(n: usize) -> EntryIndex {
        EntryIndex::try_new(n).unwrap()
    }

    fn ppn(n: u64) -> Ppn {
        Ppn::try_new(n).unwrap()
    }

    /// The six-page tree of the paper's figure 2: page 3 at the root, 1 and 5 below it, then 0, 2 and 4.
    fn figure_2() -> ScanTable {
        let mut table = ScanTable::default();
        let nodes = [
            (3, 1, 2),
            (1, 3, 4),
            (5, 5, 31),
            (0, 32, 33),
            (2, 34, 35),
            (4, 36, 37),
        ];
        for (at, (page, less, more)) in nodes.into_iter().enumerate() {
            let entry = OtherPage {
                ppn: ppn(page),
                less: Pointer::new(less),
                more: Pointer::new(more),
            };
            table.insert_ppn(index(at), entry);
        }
        table.insert_pfe(Candidate {
            ppn: ppn(99),
            last_refill: false,
            ptr: Pointer::ROOT,
        });
        table
    }

    #[test]
    fn a_twin_is_found_as_in_the_papers_example() {
        let mut table = figure_2();
        table.advance(Compared::Greater);
        table.advance(Compared::Less);
        assert_eq!(table.advance(Compared::Equal), Walk::Done);
        let info = table.pfe_info().unwrap();
        assert_eq!(
            (info.scanned, info.duplicate, info.ptr),
            (true, true, Pointer::new(5))
        );
    }

    #[test]
    fn running_off_the_table_sets_scanned_only() {
        let mut table = figure_2();
        table.advance(Compared::Greater);
        assert_eq!(table.advance(Compared::Greater), Walk::Done);
        let info = table.pfe_info().unwrap();
        assert_eq!(
            (info.scanned, info.duplicate, info.ptr),
            (true, false, Pointer::new(31))
        );
    }

    #[test]
    fn a_refill_keeps_candidate_and_key() {
        let mut table = figure_2();
        table.set_hash_key(HashKey::of_minikeys([1, 2, 3, 4]));
        table.advance(Compared::Equal);
        table.update_pfe(true, Pointer::new(2));
        let info = table.pfe_info().unwrap();
        assert!(info.hash_key.is_some() && !info.scanned && !info.duplicate);
        assert_eq!(table.candidate().unwrap().ppn, ppn(99));
        assert!(table.candidate().unwrap().last_refill);
        assert!(matches!(table.current(), Walk::Next(_, page) if page.ppn == ppn(5)));
    }

    #[test]
    fn an_empty_table_is_done_at_once() {
        let mut table = figure_2();
        table.load([None; OTHER_PAGES]);
        assert_eq!(table.current(), Walk::Done);
        assert_eq!(table.pfe_info().unwrap().ptr, Pointer::ROOT);
        assert_eq!(ScanTable::default().current(), Walk::Done);
    }

    #[test]
    fn indices_and_pages_out_of_range_are_refused() {
        assert_eq!(EntryIndex::try_new(31), Err(Error::Index(31)));
        assert_eq!(Ppn::try_new(1 << 40), Err(Error::Ppn(1 << 40)));
    }
}
