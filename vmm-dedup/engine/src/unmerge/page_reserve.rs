//! Pages kept ready for copy-on-write, so that breaking needs no memory at the moment when there may be none.

use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::proc;
use crate::sys::vma::Anonymous;
use std::collections::VecDeque;
use std::io;

/// Pages allocated at a time.
const BLOCK: usize = 64;

/// Populated anonymous pages, handed out one by one.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    blocks: VecDeque<Anonymous>,
    pub(crate) pages: usize,
    pub(crate) target: usize,
    pub(crate) floor_bytes: u64,
}

impl Reserve {
    /// An empty reserve, to be filled with [`Self::push`].
    pub(crate) fn new(target: usize, floor_bytes: u64) -> Self {
        Self {
            target,
            floor_bytes,
            ..Self::default()
        }
    }

    /// Size and target without the pages.
    pub(crate) fn figures(&self) -> Self {
        Self {
            blocks: VecDeque::new(),
            pages: self.pages,
            ..*self
        }
    }

    pub(crate) fn set_target(&mut self, target: usize, floor_bytes: u64) {
        (self.target, self.floor_bytes) = (target, floor_bytes);
    }

    /// Takes consecutive populated pages, `most` or as many as there are next to each other: their address and number. The
    /// caller owns them from now on.
    pub(crate) fn take(&mut self, most: usize) -> Option<(usize, usize)> {
        while self.blocks.front()?.pages() == 0 {
            self.blocks.pop_front();
        }
        let block = self.blocks.front_mut()?;
        let pages = most.min(block.pages());
        self.pages -= pages;
        Some((block.take_front(pages), pages))
    }

    /// Pages to be allocated next; `None` at the target, or if the host would keep less than the floor.
    pub(crate) fn wanted(&self) -> Option<usize> {
        // Whole blocks, so that consecutive pages can be had; a small reserve is filled by halves.
        let missing = self.target.saturating_sub(self.pages);
        let block = BLOCK.min(self.target.div_ceil(2)).max(1);
        let needed = self.floor_bytes.saturating_add(bytes(block) as u64);
        let there = missing >= block && proc::mem_available().is_some_and(|available| available >= needed);
        there.then_some(block)
    }

    /// Allocates pages for [`Self::push`].
    pub(crate) fn allocate(pages: usize) -> io::Result<Anonymous> {
        let area = Anonymous::new(pages)?;
        area.populate()?;
        Ok(area)
    }

    /// Takes over allocated pages.
    pub(crate) fn push(&mut self, block: Anonymous) {
        self.pages += block.pages();
        self.blocks.push_back(block);
    }
}

const _: () = assert!(BLOCK * PAGE_SIZE <= 1 << 20);

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn filled(target: usize) -> Reserve {
        let mut reserve = Reserve::new(target, 0);
        while let Some(pages) = reserve.wanted() {
            reserve.push(Reserve::allocate(pages).unwrap());
        }
        reserve
    }

    #[test]
    fn pages_are_handed_out_once() {
        let mut reserve = filled(128);
        assert_eq!(reserve.pages, 128);
        let mut pages = HashSet::new();
        while let Some((start, len)) = reserve.take(40) {
            pages.extend((start..start + bytes(len)).step_by(PAGE_SIZE));
        }
        assert_eq!(pages.len(), 128);
        assert!(reserve.pages == 0 && reserve.take(1).is_none());
        pages
            .into_iter()
            .for_each(|p| crate::sys::vma::unmap(p, PAGE_SIZE));
    }

    #[test]
    fn it_is_filled_by_blocks_and_what_is_left_of_one_is_handed_out() {
        let mut reserve = filled(160);
        assert_eq!(reserve.pages, 128);
        let taken = [60, 60, 64].map(|most| reserve.take(most).unwrap());
        assert_eq!(taken.map(|(_, pages)| pages), [60, 4, 64]);
        taken
            .into_iter()
            .for_each(|(start, len)| crate::sys::vma::unmap(start, bytes(len)));
        assert_eq!(
            [1, 2, 3, 16].map(|target| Reserve::new(target, 0).wanted()),
            [1, 1, 2, 8].map(Some)
        );
    }

    #[test]
    fn the_floor_stops_refilling() {
        assert_eq!(Reserve::new(100, u64::MAX).wanted(), None);
    }
}
