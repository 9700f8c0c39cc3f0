//! Nearly equal pages: what is left after equal ones are shared, 64-byte line by line.
//!
//! The *queries* are pages whose content no other page has, or a sample of them. Every page is held against them:
//! a line of it that stands at the same place in a query makes the two candidates, and candidates are compared
//! whole. (Difference Engine, OSDI'08, finds candidates by hashes of parts as well; page overlays, ISCA'15, are why
//! the place counts.) Lines that many queries have at the same place name no candidates, so what is found is a
//! lower bound.

pub use crate::report::Near;

use crate::contents::{Survey, content, is_zero};
use crate::error::Error;
use crate::memory::Memory;
use crate::report::Report;
use crate::sample::Sample;
use crate::scan::{Place, Reading, scan};
use std::collections::HashMap;
use twox_hash::XxHash3_64;
use vmm_dedup_protocol::PAGE_SIZE;

/// Bytes of a line: a cache line.
const LINE: usize = 64;
const LINES: usize = PAGE_SIZE / LINE;
/// Equal lines that make two pages nearly equal.
const ENOUGH: u8 = 48;
/// Queries that are held against all pages, at most.
const MOST_QUERIES: u64 = 1 << 14;
/// Queries that a line at a place may name.
const MOST_NAMED: usize = 8;

/// As [`crate::estimate`], and looks for nearly equal pages, which takes two more scans.
///
/// # Errors
/// As [`crate::estimate`].
pub fn estimate_with_near(
    memories: &[Memory],
    sample: Sample,
    reading: &Reading<'_>,
) -> Result<Report, Error> {
    let survey = Survey::take(memories, sample, reading)?;
    let mut report = survey.report(memories);
    let unique = survey.unique();
    drop(survey);
    let one_in = (unique.len() as u64).div_ceil(MOST_QUERIES).max(1);
    let is_query = |page: &[u8]| {
        let content = content(page);
        content.is_multiple_of(one_in) && unique.contains(&content)
    };
    let queries = Queries::gather(memories, reading, is_query)?;
    let nearest = queries.hold_against_all(memories, reading)?;
    let unique_pages = report.inputs.iter().map(|input| input.unique.pages).sum();
    report.near = Some(queries.judge(&nearest, unique_pages, memories.len()));
    Ok(report)
}

/// Hashes of a page's lines; 0 for a line of zeros.
type Lines = [u32; LINES];

#[allow(clippy::cast_possible_truncation)] // half of a hash is a hash
fn lines_of(page: &[u8]) -> Lines {
    let mut lines = [0; LINES];
    for (hash, line) in lines.iter_mut().zip(page.chunks_exact(LINE)) {
        if !is_zero(line) {
            *hash = (XxHash3_64::oneshot(line) as u32).max(1);
        }
    }
    lines
}

#[allow(clippy::cast_possible_truncation)] // at most 64
fn equal_lines(a: &Lines, b: &Lines) -> u8 {
    a.iter().zip(b).filter(|(a, b)| a == b).count() as u8
}

/// A line at its place, if it is not zero.
fn placed(lines: &Lines) -> impl Iterator<Item = u64> + '_ {
    let numbered = lines.iter().zip(0u64..);
    numbered
        .filter(|(hash, _)| **hash != 0)
        .map(|(hash, place)| place << 32 | u64::from(*hash))
}

struct Query {
    place: Place,
    lines: Lines,
}

struct Queries {
    queries: Vec<Query>,
    /// Which queries have a line at a place.
    named: HashMap<u64, Vec<u32>>,
}

/// The nearest page seen so far of each query: equal lines, and the memory it is in.
type Nearest = Vec<(u8, u32)>;

impl Queries {
    fn gather(
        memories: &[Memory],
        reading: &Reading<'_>,
        is_query: impl Fn(&[u8]) -> bool + Sync,
    ) -> Result<Self, Error> {
        let found = scan(
            memories,
            reading,
            Vec::new,
            |found: &mut Vec<Query>, place, page| {
                if !is_zero(page) && is_query(page) {
                    let lines = lines_of(page);
                    found.push(Query { place, lines });
                }
            },
        )?;
        let queries: Vec<Query> = found.into_iter().flatten().collect();
        let mut named: HashMap<u64, Vec<u32>> = HashMap::new();
        for (query, number) in queries.iter().zip(0..) {
            for line in placed(&query.lines) {
                let queries = named.entry(line).or_default();
                if queries.len() <= MOST_NAMED {
                    queries.push(number);
                }
            }
        }
        named.retain(|_, queries| queries.len() <= MOST_NAMED);
        Ok(Self { queries, named })
    }

    fn hold_against_all(&self, memories: &[Memory], reading: &Reading<'_>) -> Result<Nearest, Error> {
        struct State {
            nearest: Nearest,
            /// The page that a query was last compared with.
            compared: Vec<u64>,
            pages: u64,
        }
        let state = || State {
            nearest: vec![(0, 0); self.queries.len()],
            compared: vec![0; self.queries.len()],
            pages: 0,
        };
        let states = scan(memories, reading, state, |state, place, page| {
            if is_zero(page) {
                return;
            }
            state.pages += 1;
            let lines = lines_of(page);
            for number in placed(&lines).filter_map(|line| self.named.get(&line)).flatten() {
                let (number, query) = (*number as usize, &self.queries[*number as usize]);
                if state.compared[number] == state.pages || query.place == place {
                    continue;
                }
                state.compared[number] = state.pages;
                let found = (equal_lines(&query.lines, &lines), place.memory);
                if found.0 > state.nearest[number].0 {
                    state.nearest[number] = found;
                }
            }
        })?;
        let mut nearest = vec![(0, 0); self.queries.len()];
        for state in states {
            for (best, found) in nearest.iter_mut().zip(state.nearest) {
                if found.0 > best.0 {
                    *best = found;
                }
            }
        }
        Ok(nearest)
    }

    #[allow(clippy::cast_precision_loss)] // ratios
    fn judge(&self, nearest: &Nearest, unique: u64, memories: usize) -> Near {
        let queries = self.queries.len() as u64;
        let mut pairs = vec![vec![0; memories]; memories];
        let (mut near, mut equal) = (0u64, 0u64);
        for (query, (lines, memory)) in self.queries.iter().zip(nearest) {
            if *lines >= ENOUGH {
                near += 1;
                equal += u64::from(*lines);
                pairs[query.place.memory as usize][*memory as usize] += 1;
            }
        }
        let near_zero = self
            .queries
            .iter()
            .filter(|q| equal_lines(&q.lines, &[0; LINES]) >= ENOUGH);
        let ratio = near as f64 / queries.max(1) as f64;
        let error = match queries < unique {
            true => 1.96 * (ratio * (1.0 - ratio) / queries.max(1) as f64).sqrt(),
            false => 0.0,
        };
        Near {
            queries,
            unique,
            enough_lines: ENOUGH,
            near,
            near_zero: near_zero.count() as u64,
            near_ratio: ratio,
            near_ratio_error: error,
            equal_lines: equal,
            pairs,
        }
    }
}
