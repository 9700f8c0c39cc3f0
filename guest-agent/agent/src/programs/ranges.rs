//! The ranges that a process has marked.

use std::ops::Range;
use vmm_dedup_agent_wire::message::Mark;
use vmm_dedup_hints::{Mark as Said, Request, Status};

/// Ranges of one process.
const MOST_RANGES: usize = 256;
/// Where addresses of programs end, as pages.
const END: u64 = 1 << (56 - 12);

/// Ranges of pages, none over another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<(Mark, Range<u64>)>);

impl Ranges {
    /// The same with what is asked for; what was said of those pages before is gone.
    ///
    /// # Errors
    /// The status to reply.
    pub fn marked(&self, request: Request) -> Result<Self, Status> {
        let end = request.address.checked_add(request.length).ok_or(Status::Range)?;
        let pages = request.address >> 12..end.div_ceil(4096);
        if request.length == 0 || pages.end > END {
            return Err(Status::Range);
        }
        let mut ranges: Vec<(Mark, Range<u64>)> = Vec::with_capacity(self.0.len() + 2);
        for (mark, range) in &self.0 {
            let before = range.start..range.end.min(pages.start);
            let after = range.start.max(pages.end)..range.end;
            let rest = [before, after].into_iter().filter(|range| !range.is_empty());
            ranges.extend(rest.map(|range| (*mark, range)));
        }
        let mark = match request.mark {
            Said::Worth => Some(Mark::Worth),
            Said::Never => Some(Mark::Never),
            Said::Soon => Some(Mark::Soon),
            Said::Nothing => None,
        };
        ranges.extend(mark.map(|mark| (mark, pages)));
        match ranges.len() {
            ..=MOST_RANGES => Ok(Self(ranges)),
            _ => Err(Status::TooMuch),
        }
    }

    /// Marks and pages.
    pub fn iter(&self) -> impl Iterator<Item = (Mark, Range<u64>)> {
        self.0.iter().cloned()
    }

    /// How many pages are marked.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.0.iter().map(|(_, range)| range.end - range.start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(ranges: &Ranges, mark: Said, address: u64, length: u64) -> Result<Ranges, Status> {
        ranges.marked(Request {
            mark,
            address,
            length,
        })
    }

    #[test]
    fn what_is_said_last_counts_for_every_page_that_is_touched() {
        let ranges = ask(&Ranges::default(), Said::Worth, 0x1000, 10 * 4096).unwrap();
        let ranges = ask(&ranges, Said::Never, 0x3001, 4096).unwrap();
        let expected = [(Mark::Worth, 1..3), (Mark::Worth, 5..11), (Mark::Never, 3..5)];
        assert_eq!(ranges.iter().collect::<Vec<_>>(), expected);
        let ranges = ask(&ranges, Said::Nothing, 0, 5 << 12).unwrap();
        assert_eq!(ranges.pages(), 6);
    }

    #[test]
    fn ranges_that_there_cannot_be_are_refused() {
        let none = Ranges::default();
        for (address, length) in [(0x1000, 0), (u64::MAX, 2), (1 << 56, 1), (0, u64::MAX)] {
            assert_eq!(
                ask(&none, Said::Never, address, length),
                Err(Status::Range),
                "{address:#x}"
            );
        }
        let many = (0..MOST_RANGES as u64).try_fold(none, |ranges, n| ask(&ranges, Said::Soon, n << 14, 1));
        assert_eq!(ask(&many.unwrap(), Said::Soon, 1 << 40, 1), Err(Status::TooMuch));
    }
}
