//! What an estimate says.

use crate::packing::Packing;
use serde::Serialize;

/// A number of pages, perhaps estimated from a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Amount {
    /// The number, or the estimate of it.
    pub pages: u64,
    /// Half the width of its 95 % interval; 0 if it is exact.
    pub error: u64,
}

/// One memory. `zero`, `inside`, `shared` and `unique` add up to `pages`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Input {
    /// The file's or the program's name.
    pub name: String,
    /// `process`, `ELF core`, `snapshot` or `raw`.
    pub kind: &'static str,
    /// Pages read.
    pub pages: u64,
    /// Pages left out because nothing is there: holes of a file, addresses never populated or swapped out.
    pub absent: u64,
    /// Pages of a process left out because others map them as well: the zero page, pages merged already.
    pub merged_already: u64,
    /// Zero pages.
    pub zero: u64,
    /// Pages whose content is in this memory more than once, and in no other.
    pub inside: Amount,
    /// Pages whose content other memories have as well.
    pub shared: Amount,
    /// Pages whose content is nowhere else.
    pub unique: Amount,
    /// What sharing within this memory alone would free, beside zero pages.
    pub alone: Amount,
}

/// All memories together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Total {
    /// Pages read.
    pub pages: u64,
    /// Zero pages, all of which the kernel's one zero page can replace.
    pub zero: u64,
    /// Pages beyond the first of each content that is not zero: what sharing would free.
    pub duplicates: Amount,
    /// Pages that sharing would free: `zero` and `duplicates`.
    pub saved: Amount,
}

/// The whole estimate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// One content in so many was looked at; 1: all, and every number is exact.
    pub one_in: u64,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Every memory, in the order given.
    pub inputs: Vec<Input>,
    /// `pairs[i][j]`: contents (not zero) that memories `i` and `j` have in common, which is what sharing between
    /// the two frees beyond sharing within each. The diagonal is what sharing within one frees.
    pub pairs: Vec<Vec<Amount>>,
    /// All together.
    pub total: Total,
    /// Nearly equal pages, if they were looked for.
    pub near: Option<Near>,
    /// What packing would save beyond, if it was tried.
    pub pack: Option<Packing>,
}

/// What sharing of nearly equal pages could find.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Near {
    /// Pages of unique content that were held against all others.
    pub queries: u64,
    /// Pages of unique content; `queries` are all of them or a sample.
    pub unique: u64,
    /// Equal lines, of 64, from which pages count as nearly equal.
    pub enough_lines: u8,
    /// Queries nearly equal to another page.
    pub near: u64,
    /// Queries nearly equal to the zero page, whatever else they resemble.
    pub near_zero: u64,
    /// `near / queries`, and half the width of its 95 % interval (0 if all unique pages were queries).
    pub near_ratio: f64,
    /// See `near_ratio`.
    pub near_ratio_error: f64,
    /// Lines of the near queries that their nearest page has at the same place.
    pub equal_lines: u64,
    /// `pairs[i][j]`: queries of memory `i` whose nearest page, nearly equal, is in memory `j`.
    pub pairs: Vec<Vec<u64>>,
}
