//! Pages that are swapped out: they are not merged, since comparing one would read it in while its window is open, with a
//! guest that waits. Whoever wants to know whether a page is swapped out asks here.
//!
//! They are merged once the guest has used them. What memory is short of is said in the log: at once when something is new, else
//! once a minute.

use crate::memory::layout::{Memory, Page};
use crate::sys::late_log;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::pagemap::Pagemap;
use crate::sys::shortage::{self, Swap};
use crate::window::PageSet;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Least time between two lines that say the same.
const TOLD_PERIOD: Duration = Duration::from_secs(60);
/// Least time between two looks at what memory is short of.
const LOOK_PERIOD: Duration = Duration::from_millis(250);

/// What the log was told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Told {
    swapped: bool,
    full: bool,
    high: bool,
}

impl Told {
    /// Whether this says something that `before` did not.
    fn adds_to(self, before: Self) -> bool {
        (self.swapped && !before.swapped) || (self.full && !before.full) || (self.high && !before.high)
    }
}

/// Knows which pages are swapped out, and says so.
#[derive(Debug)]
pub(crate) struct Swapped {
    /// The host's swap at the last look; `None`: nothing tells, so that pages may be in some.
    swap: Option<Swap>,
    /// Merges put off, and how often memory.high was met, when the log was told last.
    put_off: u64,
    high: u64,
    /// What the log was told since then.
    told: Told,
    told_at: Option<Instant>,
    looked_at: Option<Instant>,
}

impl Swapped {
    pub(crate) fn new() -> Self {
        Self {
            swap: None,
            put_off: 0,
            high: shortage::memory_high_met(),
            told: Told::default(),
            told_at: None,
            looked_at: None,
        }
    }

    /// Looks whether pages can be swapped out. To be called before some are asked about.
    pub(crate) fn look(&mut self) {
        self.swap = Swap::of_host();
    }

    /// Which of some pages are swapped out, counted from the first; all, if nothing tells. They are neighbours in one region, within
    /// 2 MiB.
    pub(crate) fn out(&self, pagemap: &mut Pagemap, memory: &Memory, pages: &Range<Page>) -> PageSet {
        if pages.is_empty() || self.swap.is_some_and(|swap| !swap.exists()) {
            return PageSet::default();
        }
        let addresses = memory.addresses(pages);
        let page = |address: usize| (address - addresses.start) / PAGE_SIZE;
        match pagemap.swapped(addresses.clone()) {
            Ok(found) => PageSet::of(found.into_iter().map(|part| page(part.start)..page(part.end))),
            Err(_) => PageSet::of(std::iter::once(0..pages.len())),
        }
    }

    /// Says in the log what memory is short of, if it is time. `put_off`: merges put off so far since their pages were swapped
    /// out.
    pub(crate) fn tell(&mut self, put_off: u64) {
        if self.looked_at.is_none_or(|at| at.elapsed() >= LOOK_PERIOD) {
            self.looked_at = Some(Instant::now());
            let high = shortage::memory_high_met();
            self.line(put_off, high).into_iter().for_each(late_log::say);
        }
    }

    fn line(&mut self, put_off: u64, high: u64) -> Option<String> {
        let swap = self.swap.unwrap_or_default();
        let (more, met) = (
            put_off.saturating_sub(self.put_off),
            high.saturating_sub(self.high),
        );
        let now = Told {
            swapped: more > 0,
            full: more > 0 && swap.is_full(),
            high: met > 0,
        };
        let again = self.told_at.is_none_or(|at| at.elapsed() >= TOLD_PERIOD);
        let before = if again { Told::default() } else { self.told };
        if !now.adds_to(before) {
            return None;
        }
        let mut what = Vec::new();
        if now.swapped {
            what.push(format!(
                "merges put off since their pages are swapped out: {more}"
            ));
        }
        if now.full {
            what.push(format!("swap is full ({} of {} KiB)", swap.used_kib, swap.kib));
        }
        if now.high {
            what.push(format!(
                "times that memory.high of this VMM's cgroups was met: {met}"
            ));
        }
        self.told = Told {
            swapped: before.swapped || now.swapped,
            full: before.full || now.full,
            high: before.high || now.high,
        };
        (self.put_off, self.high, self.told_at) = (put_off, high, Some(Instant::now()));
        Some(format!("memory is short: {}", what.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swapped(used_kib: u64) -> Swapped {
        Swapped {
            swap: Some(Swap { kib: 1000, used_kib }),
            high: 5,
            ..Swapped::new()
        }
    }

    #[test]
    fn what_is_new_is_said_at_once_and_the_rest_once_a_minute() {
        let mut swapped = swapped(10);
        assert_eq!(swapped.line(0, 5), None);
        let line = |text: &str| Some(format!("memory is short: {text}"));
        let put_off = "merges put off since their pages are swapped out: 3";
        assert_eq!(swapped.line(3, 5), line(put_off));
        assert_eq!(swapped.line(900, 5), None);
        swapped.swap = Some(Swap {
            kib: 1000,
            used_kib: 1000,
        });
        let put_off = "merges put off since their pages are swapped out: 997";
        let full = "swap is full (1000 of 1000 KiB)";
        assert_eq!(swapped.line(1000, 5), line(&format!("{put_off}; {full}")));
        let high = "times that memory.high of this VMM's cgroups was met: 2";
        assert_eq!(swapped.line(1000, 7), line(high));
        assert_eq!(swapped.line(2000, 9), None);
        swapped.told_at = Instant::now().checked_sub(TOLD_PERIOD);
        let put_off = "merges put off since their pages are swapped out: 1001";
        assert_eq!(swapped.line(2001, 7), line(&format!("{put_off}; {full}")));
    }

    #[test]
    fn full_swap_alone_is_no_news() {
        assert_eq!(swapped(1000).line(0, 5), None);
    }

    #[test]
    fn without_swap_no_page_is_out() {
        let memory = Memory::made_up(&[0x20_0000..0x40_0000, 0x80_0000..0xa0_0000]);
        let mut pagemap = Pagemap::open().unwrap();
        let mut swapped = swapped(0);
        swapped.swap = Some(Swap::default());
        assert!(swapped.out(&mut pagemap, &memory, &(0..512)).is_empty());
    }
}
