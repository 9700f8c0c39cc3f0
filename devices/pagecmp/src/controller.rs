//! The memory controller's side: aggregating what the chips send (section III.D, read as the crate's text says), and
//! both ways to compare.

use crate::chip::{Summary, summarize};
use crate::cost::Account;
use crate::page::{CHIPS, Page};
use std::cmp::Ordering;

/// The order of two pages from what their chips sent.
pub fn aggregate(summaries: &[Summary; CHIPS]) -> Ordering {
    let different = summaries.iter().filter(|summary| !summary.f1());
    // The first of several with the lowest `ind`: min_by_key keeps it.
    match different.min_by_key(|summary| summary.ind()) {
        None => Ordering::Equal,
        Some(summary) if summary.f2() => Ordering::Greater,
        Some(_) => Ordering::Less,
    }
}

/// Compares two pages in memory.
pub fn compare(p: &Page, q: &Page, account: &mut Account) -> Ordering {
    account.in_memory();
    aggregate(&std::array::from_fn(|chip| summarize(p, q, chip)))
}

/// PageCmp-Hybrid (section III.E): the CPU compares the first line, and the chips compare only if that is equal.
pub fn compare_hybrid(p: &Page, q: &Page, account: &mut Account) -> Ordering {
    account.first_line();
    let first = p[..CHIPS].iter().zip(&q[..CHIPS]).find(|(p, q)| p != q);
    match first {
        Some((p, q)) => p.to_ne_bytes().cmp(&q.to_ne_bytes()),
        None => compare(p, q, account),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_WORDS;
    use proptest::prelude::*;

    fn bytes(page: &Page) -> Vec<u8> {
        page.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// Both comparators.
    fn both(p: &Page, q: &Page) -> [Ordering; 2] {
        let mut account = Account::default();
        [compare(p, q, &mut account), compare_hybrid(p, q, &mut account)]
    }

    /// Section III.D to the letter, over summaries made as section III.B says.
    fn to_the_letter(summaries: &[Summary; CHIPS]) -> Ordering {
        let target = summaries
            .iter()
            .filter(|summary| summary.f1())
            .max_by_key(|summary| summary.ind());
        match target {
            None => Ordering::Equal,
            Some(summary) if summary.f2() => Ordering::Greater,
            Some(_) => Ordering::Less,
        }
    }

    #[test]
    fn section_d_to_the_letter_tells_equal_pages_apart() {
        let summaries = std::array::from_fn(|chip| summarize(&[7; PAGE_WORDS], &[7; PAGE_WORDS], chip));
        assert_ne!(to_the_letter(&summaries), Ordering::Equal);
        assert_eq!(aggregate(&summaries), Ordering::Equal);
    }

    #[test]
    fn an_earlier_line_outvotes_a_later_one_in_an_earlier_chip() {
        let (mut p, q) = ([5; PAGE_WORDS], [5; PAGE_WORDS]);
        (p[8 + 7], p[16]) = (0, 9); // line 1, chip 7: smaller; line 2, chip 0: greater
        assert_eq!(both(&p, &q), [Ordering::Less; 2]);
    }

    #[test]
    fn in_one_line_the_first_chip_decides() {
        let (mut p, q) = ([5; PAGE_WORDS], [5; PAGE_WORDS]);
        (p[8], p[9]) = (0, 9);
        assert_eq!(both(&p, &q), [Ordering::Less; 2]);
    }

    #[test]
    fn in_a_word_the_first_byte_decides() {
        let (mut p, mut q) = ([0; PAGE_WORDS], [0; PAGE_WORDS]);
        p[511] = u64::from_ne_bytes([0, 2, 0, 0, 0, 0, 0, 1]);
        q[511] = u64::from_ne_bytes([0, 1, 0, 0, 0, 0, 0, 2]);
        assert_eq!(both(&p, &q), [Ordering::Greater; 2]);
    }

    #[test]
    fn every_byte_of_a_page_is_compared() {
        for at in 0..PAGE_WORDS * 8 {
            let (mut p, q) = ([0; PAGE_WORDS], [0; PAGE_WORDS]);
            let mut word = [0; 8];
            word[at % 8] = 1;
            p[at / 8] = u64::from_ne_bytes(word);
            assert_eq!(both(&p, &q), [Ordering::Greater; 2], "byte {at}");
            assert_eq!(both(&q, &p), [Ordering::Less; 2], "byte {at}");
        }
    }

    /// A page that is zero but for some bytes of a small alphabet.
    fn any_page() -> impl Strategy<Value = Page> {
        proptest::collection::vec((0..PAGE_WORDS, 0..8u32, 0..3u64), 0..4).prop_map(|changes| {
            let mut page = [0; PAGE_WORDS];
            changes
                .into_iter()
                .for_each(|(at, byte, value)| page[at] |= value << (byte * 8));
            page
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_result_is_memcmps(p in any_page(), q in any_page()) {
            prop_assert_eq!(both(&p, &q), [bytes(&p).cmp(&bytes(&q)); 2]);
        }
    }
}
