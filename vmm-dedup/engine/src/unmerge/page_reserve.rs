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

    /// Address of a populated page, which the caller owns from now on.
    pub(crate) fn take(&mut self) -> Option<usize> {
        while self.blocks.front()?.pages() == 0 {
            self.blocks.pop_front();
        }
        self.pages -= 1;
        Some(self.blocks.front_mut()?.take_front(1))
    }

    /// Pages to be allocated next; `None` at the target, or if the host would keep less than the floor.
    pub(crate) fn wanted(&self) -> Option<usize> {
        let block = BLOCK.min(self.target.saturating_sub(self.pages));
        let needed = self.floor_bytes.saturating_add(bytes(block) as u64);
        let there = block > 0 && proc::mem_available().is_some_and(|available| available >= needed);
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

    #[test]
    fn pages_are_handed_out_once() {
        let mut reserve = Reserve::new(100, 0);
        while let Some(pages) = reserve.wanted() {
            reserve.push(Reserve::allocate(pages).unwrap());
        }
        let pages: HashSet<usize> = std::iter::from_fn(|| reserve.take()).collect();
        assert_eq!(pages.len(), 100);
        assert!(reserve.pages == 0 && reserve.take().is_none());
        pages
            .into_iter()
            .for_each(|p| crate::sys::vma::unmap(p, PAGE_SIZE));
    }

    #[test]
    fn the_floor_stops_refilling() {
        assert_eq!(Reserve::new(100, u64::MAX).wanted(), None);
    }
}
