//! Admitted > merged: which requests go into one window, or into one batch of copies.

use crate::lookup::request::{MergeRequest, Role};
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::page_state::Backing;
use crate::merge::run::{Open, Take, continues, runs_of};
use crate::sys::page_size::CHUNK_PAGES;
use crate::window::MAX_WINDOW;
use std::collections::VecDeque;
use std::ops::Range;

/// Most runs of a huge page that is taken as one.
const MOST_RUNS_AT_ONCE: usize = 8;
/// A huge page that was given back so often since somebody waited for it is merged while he waits.
const CONTENDED_TOO_OFTEN: u8 = 3;
/// Smallest merge window, and the one to begin with.
const MIN_WINDOW: usize = 4;
const FIRST_WINDOW: usize = 16;
/// Pages from the first to the last of a window.
#[allow(clippy::cast_possible_truncation)] // 512
const WINDOW_SPAN: Page = MAX_WINDOW as Page;

/// Requests that one window takes at most: more while windows stay below the stop target, fewer when they do not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowSize {
    most: usize,
    target_ns: u64,
}

impl WindowSize {
    /// For a stop target in microseconds.
    pub(crate) fn new(target_us: u64) -> Self {
        Self {
            most: FIRST_WINDOW,
            target_ns: target_us * 1000,
        }
    }

    /// Another stop target; windows grow or shrink to it.
    pub(crate) fn aim_at(&mut self, target_us: u64) {
        self.target_ns = target_us * 1000;
    }

    /// A window of so many requests has stopped somebody for so long at most.
    pub(crate) fn adapt(&mut self, requests: usize, stop_ns: u64) {
        if stop_ns > self.target_ns {
            self.most = (self.most * 3 / 4).max(MIN_WINDOW);
        } else if requests == self.most && stop_ns < self.target_ns * 3 / 4 {
            self.most = (self.most + self.most / 4 + 1).min(MAX_WINDOW);
        }
    }
}

/// What was admitted, and how much of that was merged.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// In page order.
    admitted: Vec<MergeRequest>,
    done: usize,
    /// The same for pages that the kernel copied; what was merged of these is not in it any more.
    copies: VecDeque<MergeRequest>,
}

impl Plan {
    /// Of requests in page order; `copies` are those whose pages the kernel copied.
    pub(crate) fn new(admitted: Vec<MergeRequest>, copies: Vec<MergeRequest>) -> Self {
        Self {
            admitted,
            done: 0,
            copies: copies.into(),
        }
    }

    /// The first page of the next window, and how it is taken.
    pub(crate) fn next(&self, map: &PageMap) -> Option<(Page, Take)> {
        let rest = &self.admitted[self.done..];
        let first = rest.first()?.page;
        let take = if is_whole_huge_page(map, rest) {
            let contended = map.chunk(map.chunk_of(first)).twins.contended;
            let give_back = contended < CONTENDED_TOO_OFTEN;
            Take::HugePage { give_back }
        } else {
            Take::Pages
        };
        Some((first, take))
    }

    /// The next window, which is not empty. If it is taken by pages its first one is in no huge page.
    pub(crate) fn window(&self, map: &PageMap, take: Take, size: WindowSize) -> Range<usize> {
        let rest = &self.admitted[self.done..];
        let len = match take {
            Take::HugePage { .. } => CHUNK_PAGES,
            Take::Pages => window_len(map, rest, size.most),
        };
        self.done..self.done + len
    }

    /// Who is in a window.
    pub(crate) fn requests(&self, window: &Range<usize>) -> &[MergeRequest] {
        &self.admitted[window.clone()]
    }

    /// Only these of the next window's requests are left: windows are cut anew.
    pub(crate) fn cut_anew(&mut self, window: Range<usize>, left: Vec<MergeRequest>) {
        self.admitted.splice(window, left);
    }

    /// The next window is merged, whatever comes of it.
    pub(crate) fn begin(&mut self, window: &Range<usize>) {
        self.done = window.end;
    }

    /// Which of a window's runs go on beside it.
    pub(crate) fn open(&self, map: &PageMap, window: &Range<usize>) -> Open {
        let all = &self.admitted;
        let goes_on = |at: usize| at > 0 && at < all.len() && continues(&all[at - 1], &all[at]);
        let came_about = |request: &MergeRequest| match map.backing(request.page) {
            Backing::Slot(slot) => request.slot == Some(slot),
            backing => backing.is_copied() && request.role == Role::Exception,
        };
        Open {
            start: goes_on(window.start) && came_about(&all[window.start - 1]),
            end: goes_on(window.end),
        }
    }

    /// The copies that are left, in page order.
    pub(crate) fn copies(&mut self) -> &[MergeRequest] {
        self.copies.make_contiguous()
    }

    /// Takes the next so many copies out: they are merged, whatever comes of it.
    pub(crate) fn begin_copies(&mut self, len: usize) -> Vec<MergeRequest> {
        self.copies.drain(..len).collect()
    }

    /// Takes out the copies that are none any more.
    pub(crate) fn take_changed_copies(&mut self, map: &PageMap) -> Vec<MergeRequest> {
        let all = std::mem::take(&mut self.copies).into_iter();
        let (copies, changed): (Vec<_>, Vec<_>) =
            all.partition(|request| map.backing(request.page).is_copied());
        self.copies = copies.into();
        changed
    }

    /// What was planned and not merged.
    pub(crate) fn left_over(mut self) -> Vec<MergeRequest> {
        let mut rest = self.admitted.split_off(self.done);
        rest.retain(|request| request.role != Role::Exception);
        rest.extend(self.copies);
        rest
    }
}

/// How many of the requests make one window: pages of a chunk, or of two that lie side by side.
fn window_len(map: &PageMap, requests: &[MergeRequest], most: usize) -> usize {
    let first = requests[0].page;
    let mut pages = map.chunk_at(map.chunk_of(first)).pages.clone();
    let mut goes_on = |at: &usize| {
        let page = requests[*at].page;
        if page - first >= WINDOW_SPAN {
            return false;
        }
        if pages.contains(&page) {
            return true;
        }
        let chunk = map.chunk_of(page);
        let last = pages.end - 1;
        pages = map.chunk_at(chunk).pages.clone();
        pages.start == last + 1 && map.memory().adjacent(last) && !map.chunk(chunk).huge
    };
    let most = requests.len().min(most);
    (1..most).find(|at| !goes_on(at)).unwrap_or(most)
}

/// Whether the first requests are all pages of a huge page, and few runs: then it is taken as one. Mapping many runs would
/// keep all of it away for too long.
fn is_whole_huge_page(map: &PageMap, requests: &[MergeRequest]) -> bool {
    let chunk = map.chunk_of(requests[0].page);
    let pages = &map.chunk_at(chunk).pages;
    let Some(all) = requests.get(..CHUNK_PAGES).filter(|_| map.chunk(chunk).huge) else {
        return false;
    };
    let whole = pages.len() == CHUNK_PAGES
        && all[0].page == pages.start
        && all[CHUNK_PAGES - 1].page + 1 == pages.end;
    whole && runs_of(all) <= MOST_RUNS_AT_ONCE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::layout::Memory;
    use crate::memory::page_map::Reference;
    use crate::sys::page_size::{HUGE_SIZE, bytes};
    use std::sync::Arc;
    use vmm_dedup_protocol::Slot;

    /// A chunk, half of one, and a region of a few pages.
    fn map() -> PageMap {
        let (all, apart) = (HUGE_SIZE..2 * HUGE_SIZE + bytes(256), 9 * HUGE_SIZE);
        let memory = Memory::made_up(&[all, apart..apart + bytes(8)]);
        PageMap::new(Arc::new(memory), 1000, 0)
    }

    fn twins(pages: impl IntoIterator<Item = Page>) -> Vec<MergeRequest> {
        let twin = |page| MergeRequest::twin_of(page, Slot::try_new(page + 1).unwrap());
        pages.into_iter().map(twin).collect()
    }

    /// The sizes of all windows.
    fn cut(map: &PageMap, plan: &mut Plan, most: usize) -> Vec<usize> {
        let size = WindowSize { most, target_ns: 0 };
        let mut sizes = Vec::new();
        while let Some((_, take)) = plan.next(map) {
            let window = plan.window(map, take, size);
            plan.begin(&window);
            sizes.push(window.len());
        }
        sizes
    }

    #[test]
    fn windows_lie_in_one_region_and_are_no_larger_than_asked() {
        let map = map();
        let all = || twins((0..10).chain([600]).chain(768..772));
        assert_eq!(cut(&map, &mut Plan::new(all(), Vec::new()), 4), [4, 4, 2, 1, 4]);
        assert_eq!(cut(&map, &mut Plan::new(all(), Vec::new()), 64), [10, 1, 4]);
    }

    #[test]
    fn a_huge_page_is_one_window_while_it_has_few_runs() {
        let mut map = map();
        map.found_huge(0);
        let whole = || twins(0..512);
        let plan = Plan::new(whole(), Vec::new());
        assert_eq!(plan.next(&map), Some((0, Take::HugePage { give_back: true })));
        let mut scattered = whole();
        scattered
            .iter_mut()
            .step_by(2)
            .for_each(|request| request.slot = None);
        let plan = Plan::new(scattered, Vec::new());
        assert_eq!(plan.next(&map), Some((0, Take::Pages)));
        assert_eq!(
            Plan::new(twins(0..511), Vec::new()).next(&map),
            Some((0, Take::Pages))
        );
    }

    #[test]
    fn what_was_not_begun_comes_back_but_exceptions() {
        let map = map();
        let mut requests = twins([1, 2, 3]);
        requests.insert(2, MergeRequest::exception(7, Slot::try_new(8).unwrap()));
        let copies = twins([500]);
        let mut plan = Plan::new(requests, copies.clone());
        let size = WindowSize {
            most: 2,
            target_ns: 0,
        };
        let window = plan.window(&map, Take::Pages, size);
        plan.cut_anew(window, twins([2]));
        let window = plan.window(&map, Take::Pages, WindowSize { most: 1, ..size });
        assert_eq!(plan.requests(&window), twins([2]));
        plan.begin(&window);
        let mut left = twins([3]);
        left.extend(copies);
        assert_eq!(plan.left_over(), left);
    }

    #[test]
    fn a_run_goes_on_beside_a_window_if_its_part_there_came_about() {
        let mut map = map();
        let mut plan = Plan::new(twins([1, 2, 3, 4]), Vec::new());
        let size = WindowSize {
            most: 2,
            target_ns: 0,
        };
        let first = plan.window(&map, Take::Pages, size);
        let open = plan.open(&map, &first);
        assert!(!open.start && open.end);
        plan.begin(&first);
        let second = plan.window(&map, Take::Pages, size);
        assert!(!plan.open(&map, &second).start, "nothing of it is shared");
        map.share(2, Slot::try_new(3).unwrap(), Reference::New);
        let open = plan.open(&map, &second);
        assert!(open.start && !open.end);
    }

    #[test]
    fn windows_grow_below_the_stop_target_and_shrink_above_it() {
        let mut size = WindowSize::new(100);
        size.adapt(FIRST_WINDOW, 10_000);
        assert_eq!(size.most, 21);
        size.adapt(5, 10_000);
        assert_eq!(size.most, 21, "it was not full");
        size.adapt(21, 90_000);
        assert_eq!(size.most, 21, "it is near the target");
        for _ in 0..20 {
            size.adapt(21, 200_000);
        }
        assert_eq!(size.most, MIN_WINDOW);
        for _ in 0..40 {
            size.adapt(size.most, 0);
        }
        assert_eq!(size.most, MAX_WINDOW);
        size.aim_at(10);
        size.adapt(MAX_WINDOW, 20_000);
        assert!(size.most < MAX_WINDOW, "another target");
    }
}
