//! The Scan Table (section 3.2) and the functions through which software uses it (table 1 of the paper).

use crate::{Error, HashKey};

/// Entries for pages that the candidate is compared with.
pub const OTHER_PAGES: usize = 31;

const PPN_BITS: u32 = 40;

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

/// An entry of the Other Pages. A pointer of `None` is one to an invalid entry: the search ends there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherPage {
    /// The page.
    pub ppn: Ppn,
    /// What to compare with next if the candidate is smaller.
    pub less: Option<EntryIndex>,
    /// What to compare with next if the candidate is greater.
    pub more: Option<EntryIndex>,
}

/// What software writes into the PFE entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The page to find a twin of.
    pub ppn: Ppn,
    /// L: this table is the last for this candidate, so the hash key must be completed.
    pub last_refill: bool,
    /// Where to start.
    pub ptr: EntryIndex,
}

/// What software reads from the PFE entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PfeInfo {
    /// The hash key, once H is set.
    pub hash_key: Option<HashKey>,
    /// The entry compared last (with D: the twin); `None` if the search ran off the table.
    pub ptr: Option<EntryIndex>,
    /// S: every comparison that was asked for is done.
    pub scanned: bool,
    /// D: a twin was found.
    pub duplicate: bool,
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
    Next(OtherPage),
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

    /// Invalidates all Other Pages, before another part of the tree is loaded.
    pub fn clear_others(&mut self) {
        self.others = [None; OTHER_PAGES];
    }

    /// `insert_PFE`: a new candidate, without hash key and results.
    pub fn insert_pfe(&mut self, candidate: Candidate) {
        let info = PfeInfo {
            hash_key: None,
            ptr: Some(candidate.ptr),
            scanned: false,
            duplicate: false,
        };
        self.pfe = Some(Pfe { candidate, info });
    }

    /// `update_PFE`: starts over at `ptr` with another set of pages; the candidate and its key stay.
    pub fn update_pfe(&mut self, last_refill: bool, ptr: EntryIndex) {
        if let Some(pfe) = &mut self.pfe {
            (pfe.candidate.last_refill, pfe.candidate.ptr) = (last_refill, ptr);
            (pfe.info.ptr, pfe.info.scanned, pfe.info.duplicate) = (Some(ptr), false, false);
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

    /// Device side: what to compare the candidate with now. Sets Scanned when `Ptr` names no valid entry.
    pub fn current(&mut self) -> Walk {
        let Some(pfe) = &mut self.pfe else {
            return Walk::Done;
        };
        if pfe.info.scanned {
            return Walk::Done;
        }
        match pfe.info.ptr.and_then(|ptr| self.others[ptr.number()]) {
            Some(page) => Walk::Next(page),
            None => {
                pfe.info.scanned = true;
                Walk::Done
            }
        }
    }

    /// Device side: takes the outcome of comparing with the [`Self::current`] page and moves `Ptr` on. Tables may be
    /// graphs with cycles, so it is the device that must bound its steps.
    pub fn advance(&mut self, compared: Compared) -> Walk {
        if let (Walk::Next(page), Some(pfe)) = (self.current(), &mut self.pfe) {
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
            (3, Some(1), Some(2)),
            (1, Some(3), Some(4)),
            (5, Some(5), None),
            (0, None, None),
            (2, None, None),
            (4, None, None),
        ];
        for (at, (page, less, more)) in nodes.into_iter().enumerate() {
            let entry = OtherPage {
                ppn: ppn(page),
                less: less.map(index),
                more: more.map(index),
            };
            table.insert_ppn(index(at), entry);
        }
        table.insert_pfe(Candidate {
            ppn: ppn(99),
            last_refill: false,
            ptr: EntryIndex::ROOT,
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
            (true, true, Some(index(5)))
        );
    }

    #[test]
    fn running_off_the_table_sets_scanned_only() {
        let mut table = figure_2();
        table.advance(Compared::Greater);
        assert_eq!(table.advance(Compared::Greater), Walk::Done);
        let info = table.pfe_info().unwrap();
        assert_eq!((info.scanned, info.duplicate, info.ptr), (true, false, None));
    }

    #[test]
    fn a_refill_keeps_candidate_and_key() {
        let mut table = figure_2();
        table.set_hash_key(HashKey::of_minikeys([1, 2, 3, 4]));
        table.advance(Compared::Equal);
        table.update_pfe(true, index(2));
        let info = table.pfe_info().unwrap();
        assert!(info.hash_key.is_some() && !info.scanned && !info.duplicate);
        assert_eq!(table.candidate().unwrap().ppn, ppn(99));
        assert!(table.candidate().unwrap().last_refill);
        assert!(matches!(table.current(), Walk::Next(page) if page.ppn == ppn(5)));
    }

    #[test]
    fn an_empty_table_is_done_at_once() {
        let mut table = figure_2();
        table.clear_others();
        assert_eq!(table.current(), Walk::Done);
        assert_eq!(ScanTable::default().current(), Walk::Done);
    }

    #[test]
    fn indices_and_pages_out_of_range_are_refused() {
        assert_eq!(EntryIndex::try_new(31), Err(Error::Index(31)));
        assert_eq!(Ppn::try_new(1 << 40), Err(Error::Ppn(1 << 40)));
    }
}
