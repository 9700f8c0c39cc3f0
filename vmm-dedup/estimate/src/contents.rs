//! Which pages are equal: one record a page, sorted by content.

use crate::error::{Error, MOST_MEMORIES};
use crate::memory::Memory;
use crate::report::{Amount, Input, Report, Total};
use crate::sample::{Sample, Unit};
use crate::scan::{Reading, scan};
use std::collections::HashSet;
use twox_hash::XxHash3_64;
use vmm_dedup_protocol::PAGE_SIZE;

/// A page that is not zero. In this order the pages of a sampling unit are together, and in it those of a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Record {
    unit: Unit,
    content: u64,
    memory: u32,
}

/// What a thread of the scan has found.
struct Found {
    zero: Vec<u64>,
    read: Vec<u64>,
    records: Vec<Record>,
}

/// Names of contents; equal pages have equal names.
pub(crate) fn content(page: &[u8]) -> u64 {
    XxHash3_64::oneshot(page)
}

/// Whether a page is zero: 64 bytes at a time, most pages are told by the first.
#[inline]
pub(crate) fn is_zero(page: &[u8]) -> bool {
    page.chunks_exact(64)
        .all(|line| line.iter().fold(0, |sum, byte| sum | byte) == 0)
}

/// Tells how much sharing all that is equal would free.
///
/// # Errors
/// If a memory cannot be read (any more), or there are too many.
pub fn estimate(memories: &[Memory], sample: Sample, reading: &Reading<'_>) -> Result<Report, Error> {
    let survey = Survey::take(memories, sample, reading)?;
    Ok(survey.report(memories))
}

/// Everything that one scan has found, in order.
pub(crate) struct Survey {
    sample: Sample,
    zero: Vec<u64>,
    read: Vec<u64>,
    records: Vec<Record>,
}

impl Survey {
    pub(crate) fn take(memories: &[Memory], sample: Sample, reading: &Reading<'_>) -> Result<Self, Error> {
        if memories.len() > MOST_MEMORIES {
            return Err(Error::TooMany(memories.len()));
        }
        let nothing = || Found {
            zero: vec![0; memories.len()],
            read: vec![0; memories.len()],
            records: Vec::new(),
        };
        let found = scan(memories, reading, nothing, |found, place, page| {
            found.read[place.memory as usize] += 1;
            if is_zero(page) {
                found.zero[place.memory as usize] += 1;
            } else if let Some(unit) = sample.unit(page) {
                found.records.push(Record {
                    unit,
                    content: content(page),
                    memory: place.memory,
                });
            }
        })?;
        let sum = |part: fn(&Found) -> &Vec<u64>| {
            let numbers = 0..memories.len();
            numbers
                .map(|i| found.iter().map(|thread| part(thread)[i]).sum())
                .collect()
        };
        let (zero, read) = (sum(|found| &found.zero), sum(|found| &found.read));
        let mut records: Vec<Record> = found.into_iter().flat_map(|thread| thread.records).collect();
        records.sort_unstable();
        Ok(Self {
            sample,
            zero,
            read,
            records,
        })
    }

    /// Contents that one page alone has.
    pub(crate) fn unique(&self) -> HashSet<u64> {
        let contents = self
            .records
            .chunk_by(|a, b| (a.unit, a.content) == (b.unit, b.content));
        contents
            .filter(|pages| pages.len() == 1)
            .map(|pages| pages[0].content)
            .collect()
    }

    pub(crate) fn report(&self, memories: &[Memory]) -> Report {
        let count = memories.len();
        let tally = self.tally(count);
        let amount = |what| tally.amount(what, self.sample);
        let inputs = memories.iter().enumerate().map(|(i, memory)| Input {
            name: memory.name().to_owned(),
            kind: memory.kind(),
            pages: self.read[i],
            absent: memory.absent(),
            merged_already: memory.shared(),
            zero: self.zero[i],
            inside: amount(What::Inside(i)),
            shared: amount(What::Shared(i)),
            unique: amount(What::Unique(i)),
            alone: amount(What::Pair(i, i)),
        });
        let pair = |i: usize, j: usize| amount(What::Pair(i.min(j), i.max(j)));
        let zero = self.zero.iter().sum();
        let duplicates = amount(What::Duplicates);
        Report {
            one_in: self.sample.one_in(),
            page_bytes: PAGE_SIZE,
            inputs: inputs.collect(),
            pairs: (0..count)
                .map(|i| (0..count).map(|j| pair(i, j)).collect())
                .collect(),
            total: Total {
                pages: self.read.iter().sum(),
                zero,
                duplicates,
                saved: Amount {
                    pages: duplicates.pages + zero,
                    error: duplicates.error,
                },
            },
            near: None,
            pack: None,
        }
    }

    fn tally(&self, count: usize) -> Tally {
        let mut tally = Tally::new(count);
        for unit in self.records.chunk_by(|a, b| a.unit == b.unit) {
            for content in unit.chunk_by(|a, b| a.content == b.content) {
                tally.add_content(content);
            }
            tally.close(unit[0].unit);
        }
        tally
    }
}

/// Numbers that are added up, over contents.
#[derive(Clone, Copy)]
enum What {
    /// Pages beyond the first of a content.
    Duplicates,
    Inside(usize),
    Shared(usize),
    Unique(usize),
    /// Two memories, the lower first; or one and itself.
    Pair(usize, usize),
}

/// Sums over sampled units, and of their squares, of all numbers.
struct Tally {
    memories: usize,
    certain: Vec<u64>,
    sums: Vec<u64>,
    squares: Vec<u64>,
    /// The unit that is being added up, and which of its numbers are not 0.
    open: Vec<u64>,
    touched: Vec<usize>,
}

impl Tally {
    fn new(memories: usize) -> Self {
        let zeros = || vec![0; 1 + 3 * memories + memories * memories];
        Self {
            memories,
            certain: zeros(),
            sums: zeros(),
            squares: zeros(),
            open: zeros(),
            touched: Vec::new(),
        }
    }

    fn index(&self, what: What) -> usize {
        let n = self.memories;
        match what {
            What::Duplicates => 0,
            What::Inside(i) => 1 + i,
            What::Shared(i) => 1 + n + i,
            What::Unique(i) => 1 + 2 * n + i,
            What::Pair(i, j) => 1 + 3 * n + i * n + j,
        }
    }

    fn add(&mut self, what: What, pages: usize) {
        if pages == 0 {
            return;
        }
        let index = self.index(what);
        if self.open[index] == 0 {
            self.touched.push(index);
        }
        self.open[index] += pages as u64;
    }

    /// Adds the pages of one content, which are ordered by memory.
    fn add_content(&mut self, pages: &[Record]) {
        self.add(What::Duplicates, pages.len() - 1);
        let holders: Vec<(usize, usize)> = pages
            .chunk_by(|a, b| a.memory == b.memory)
            .map(|pages| (pages[0].memory as usize, pages.len()))
            .collect();
        for (n, &(memory, count)) in holders.iter().enumerate() {
            let what = match (holders.len(), count) {
                (1, 1) => What::Unique(memory),
                (1, _) => What::Inside(memory),
                _ => What::Shared(memory),
            };
            self.add(what, count);
            self.add(What::Pair(memory, memory), count - 1);
            for &(other, _) in &holders[n + 1..] {
                self.add(What::Pair(memory, other), 1);
            }
        }
    }

    fn close(&mut self, unit: Unit) {
        for index in self.touched.drain(..) {
            let number = std::mem::take(&mut self.open[index]);
            if unit == Unit::CERTAIN {
                self.certain[index] += number;
            } else {
                self.sums[index] += number;
                self.squares[index] = self.squares[index].saturating_add(number.saturating_mul(number));
            }
        }
    }

    fn amount(&self, what: What, sample: Sample) -> Amount {
        let index = self.index(what);
        let (pages, error) = sample.expand(self.sums[index], self.squares[index]);
        Amount {
            pages: pages + self.certain[index],
            error,
        }
    }
}
