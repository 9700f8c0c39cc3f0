//! Pages kept ready for copy-on-write, so that breaking needs no memory at the moment when there may be none.

use crate::page_size::{PAGE_SIZE, bytes};
use crate::sys::proc;
use crate::sys::vma::Anonymous;
use std::collections::VecDeque;

/// Pages allocated at a time.
const BLOCK: usize = 64;

/// Populated anonymous pages, handed out one by one.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    blocks: VecDeque<Anonymous>,
    pub(crate) pages: usize,
    pub(crate) target: usize,
    floor_bytes: u64,
}

impl Reserve {
    /// An empty reserve; [`Self::refill`] fills it.
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

    pub(crate) fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Address of a populated page, which the caller owns from now on.
    pub(crate) fn take(&mut self) -> Option<usize> {
        while self.blocks.front()?.pages() == 0 {
            self.blocks.pop_front();
        }
        self.pages -= 1;
        Some(self.blocks.front_mut()?.take_front(1))
    }

    /// Allocates up to the target, as long as the host keeps more than the floor.
    pub(crate) fn refill(&mut self) {
        while self.pages < self.target {
            let block = BLOCK.min(self.target - self.pages);
            let needed = self.floor_bytes.saturating_add(bytes(block) as u64);
            if proc::mem_available().is_none_or(|available| available < needed) {
                return;
            }
            match Anonymous::new(block).and_then(|area| area.populate().map(|()| area)) {
                Ok(area) => self.blocks.push_back(area),
                Err(error) => {
                    return log::warn!("the copy-on-write reserve stays at {}: {error}", self.pages);
                }
            }
            self.pages += block;
        }
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
        reserve.refill();
        let pages: HashSet<usize> = std::iter::from_fn(|| reserve.take()).collect();
        assert_eq!(pages.len(), 100);
        assert!(reserve.is_empty() && reserve.take().is_none());
        pages
            .into_iter()
            .for_each(|p| crate::sys::vma::unmap(p, PAGE_SIZE));
    }

    #[test]
    fn the_floor_stops_refilling() {
        let mut reserve = Reserve::new(100, u64::MAX);
        reserve.refill();
        assert!(reserve.is_empty());
    }
}
