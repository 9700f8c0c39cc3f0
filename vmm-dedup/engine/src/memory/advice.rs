//! What the VMM advised for guest memory, for good: whether it may get huge pages, whether core dumps and children may have
//! it. Memory that the engine puts into the place of the guest's must be advised the same.

use crate::error::Error;
use crate::sys::proc::{self, Advised};
use crate::sys::vma;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Lasting advice for a range of guest memory, as it was when the range was added.
#[derive(Debug)]
pub(crate) struct Advice {
    /// Parts of the range for which anything was advised, in order.
    parts: Vec<Advised>,
    /// No child is to have any of it, whatever was advised.
    kept: AtomicBool,
}

impl Advice {
    /// What holds for a range of this process's memory.
    pub(crate) fn of(range: &Range<usize>) -> Result<Self, Error> {
        let mut parts: Vec<Advised> = Vec::new();
        for (part, advice) in proc::advice_of(range)? {
            match parts.last_mut() {
                Some((last, same)) if last.end == part.start && *same == advice => last.end = part.end,
                _ => parts.push((part, advice)),
            }
        }
        parts.retain(|(_, advice)| !advice.is_empty());
        Ok(Self {
            parts,
            kept: AtomicBool::new(false),
        })
    }

    /// From now on no child is to have what takes its place; whether that is new.
    pub(crate) fn keep_from_children(&self) -> bool {
        !self.kept.swap(true, Ordering::Relaxed)
    }

    /// Nothing was advised.
    #[cfg(test)]
    pub(super) fn none() -> Self {
        Self {
            parts: Vec::new(),
            kept: AtomicBool::new(false),
        }
    }

    /// Gives anonymous memory at `place` the advice of the guest memory whose place it has or will get.
    pub(crate) fn give(&self, range: &Range<usize>, place: usize) {
        for (part, advice) in self.within(range) {
            let at = place + (part.start - range.start);
            advice
                .iter()
                .for_each(|a| vma::advise_again(&(at..at + part.len()), *a));
        }
        if self.kept.load(Ordering::Relaxed) {
            vma::advise_again(&(place..place + range.len()), libc::MADV_DONTFORK);
        }
    }

    /// Gives mappings of the store in a range what keeps guest pages out of core dumps and children. Anonymous memory
    /// between them has it already. (A child in which the range should be wiped gets none: the kernel wipes anonymous memory
    /// only.)
    pub(crate) fn give_mapped(&self, range: &Range<usize>) {
        let kept = self.kept.load(Ordering::Relaxed);
        if kept {
            vma::advise_again(range, libc::MADV_DONTFORK);
        }
        for (part, advice) in self.within(range) {
            let has = |wanted: &[i32]| advice.iter().any(|a| wanted.contains(a));
            if !kept && has(&[libc::MADV_DONTFORK, libc::MADV_WIPEONFORK]) {
                vma::advise_again(&part, libc::MADV_DONTFORK);
            }
            if has(&[libc::MADV_DONTDUMP]) {
                vma::advise_again(&part, libc::MADV_DONTDUMP);
            }
        }
    }

    fn within(&self, range: &Range<usize>) -> impl Iterator<Item = (Range<usize>, &[i32])> {
        let parts = self.parts.iter().map(|(part, advice)| {
            let part = part.start.max(range.start)..part.end.min(range.end);
            (part, advice.as_slice())
        });
        parts.filter(|(part, _)| !part.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::page_size::bytes;
    use crate::sys::vma::Anonymous;

    fn advice_of(area: &Anonymous) -> Vec<Advised> {
        let parts = Advice::of(&(area.base()..area.base() + bytes(area.pages())))
            .unwrap()
            .parts;
        let offset = |part: Range<usize>| part.start - area.base()..part.end - area.base();
        parts
            .into_iter()
            .map(|(part, advice)| (offset(part), advice))
            .collect()
    }

    #[test]
    fn each_part_gets_what_was_advised_for_it() {
        let (guest, fresh) = (Anonymous::new(16).unwrap(), Anonymous::new(16).unwrap());
        let at = |page| guest.base() + bytes(page);
        vma::advise_again(&(at(4)..at(12)), libc::MADV_DONTDUMP);
        vma::advise_again(&(at(8)..at(16)), libc::MADV_DONTFORK);
        let parts = [
            (bytes(4)..bytes(8), vec![libc::MADV_DONTDUMP]),
            (
                bytes(8)..bytes(12),
                vec![libc::MADV_DONTDUMP, libc::MADV_DONTFORK],
            ),
            (bytes(12)..bytes(16), vec![libc::MADV_DONTFORK]),
        ];
        assert_eq!(advice_of(&guest), parts);
        let advice = Advice::of(&(at(0)..at(16))).unwrap();
        advice.give(&(at(0)..at(16)), fresh.base());
        assert_eq!(advice_of(&fresh), parts);
    }

    #[test]
    fn mappings_in_place_of_wiped_memory_are_kept_from_children() {
        let guest = Anonymous::new(4).unwrap();
        let range = guest.base()..guest.base() + bytes(4);
        vma::advise_again(&range, libc::MADV_WIPEONFORK);
        Advice::of(&range).unwrap().give_mapped(&range);
        let both = vec![libc::MADV_DONTFORK, libc::MADV_WIPEONFORK];
        assert_eq!(advice_of(&guest), [(0..bytes(4), both)]);
    }
}
