use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

const PAGE: usize = 4096;

/// Pages by number.
#[derive(Default)]
struct Pages(HashMap<u64, Vec<u8>>);

impl Memory for Pages {
    fn line(&self, page: Ppn, line: usize) -> Option<Line> {
        let bytes = &self.0.get(&page.number())?[line * 64..][..64];
        let word = |w: usize| u64::from_ne_bytes(bytes[w * 8..][..8].try_into().unwrap());
        Some(std::array::from_fn(word))
    }
}

impl Pages {
    fn with(mut self, number: u64, page: Vec<u8>) -> Self {
        self.0.insert(number, page);
        self
    }
}

const CANDIDATE: u64 = 1000;

fn ppn(number: u64) -> Ppn {
    Ppn::try_new(number).unwrap()
}

fn entry(page: u64, less: u8, more: u8) -> Option<OtherPage> {
    Some(OtherPage {
        ppn: ppn(page),
        less: Pointer::new(less),
        more: Pointer::new(more),
    })
}

/// A module with these Other Pages from entry 0 on, and the candidate, from entry 0.
fn module(others: &[Option<OtherPage>], last_refill: bool) -> Module {
    let mut table = [None; OTHER_PAGES];
    table[..others.len()].copy_from_slice(others);
    let mut module = Module::default();
    module.load(table);
    module.insert_pfe(Candidate {
        ppn: ppn(CANDIDATE),
        last_refill,
        ptr: Pointer::ROOT,
    });
    module
}

fn ran(mut module: Module, pages: &Pages) -> (PfeInfo, Account) {
    module.run(pages);
    (module.pfe_info().unwrap(), *module.account())
}

/// A page of zeros but for one byte.
fn page_with(at: usize, byte: u8) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    page[at] = byte;
    page
}

/// The key as the paper defines it, from the page's bytes.
fn reference_key(page: &[u8], offsets: [u8; KEY_LINES]) -> HashKey {
    let minikey = |section: usize| {
        let start = section * 1024 + usize::from(offsets[section]) * 64;
        ecc::word_code(u64::from_le_bytes(page[start..][..8].try_into().unwrap()))
    };
    HashKey::of_minikeys(std::array::from_fn(minikey))
}

#[test]
fn a_duplicate_sets_scanned_duplicate_and_key() {
    let pages = Pages::default()
        .with(CANDIDATE, page_with(4095, 1))
        .with(7, page_with(4095, 1));
    let (info, account) = ran(module(&[entry(7, 31, 32)], false), &pages);
    assert_eq!(
        (info.scanned, info.duplicate, info.ptr, info.error),
        (true, true, Pointer::ROOT, None)
    );
    assert_eq!(
        info.hash_key,
        Some(reference_key(&page_with(4095, 1), [3, 9, 5, 12]))
    );
    assert_eq!(
        (account.comparisons, account.lines(), account.key_lines),
        (1, 128, 0)
    );
}

#[test]
fn a_search_that_leaves_the_table_tells_where() {
    let pages = Pages::default()
        .with(CANDIDATE, page_with(64, 9))
        .with(2, page_with(64, 5))
        .with(3, page_with(64, 10));
    let (info, account) = ran(module(&[entry(2, 40, 1), entry(3, 41, 42)], false), &pages);
    assert_eq!((info.scanned, info.duplicate), (true, false));
    assert_eq!(info.ptr, Pointer::new(41));
    // Two lines of each page of two comparisons.
    assert_eq!((account.comparisons, account.lines()), (2, 8));
}

#[test]
fn the_key_waits_for_the_last_refill() {
    let pages = Pages::default()
        .with(CANDIDATE, page_with(0, 9))
        .with(2, page_with(0, 5));
    let mut module = module(&[entry(2, 31, 32)], false);
    module.run(&pages);
    assert_eq!(module.pfe_info().unwrap().hash_key, None);
    module.update_pfe(true, Pointer::ROOT);
    module.run(&pages);
    let key = reference_key(&page_with(0, 9), [3, 9, 5, 12]);
    assert_eq!(module.pfe_info().unwrap().hash_key, Some(key));
    assert_eq!(module.account().key_lines, 4);
}

#[test]
fn lines_that_were_compared_are_not_read_again_for_the_key() {
    // They differ in line 30, after two of the key's lines (3 and 25) have passed.
    let pages = Pages::default()
        .with(CANDIDATE, page_with(30 * 64, 9))
        .with(2, page_with(30 * 64, 5));
    let (info, account) = ran(module(&[entry(2, 31, 32)], true), &pages);
    assert_eq!(account.key_lines, 2);
    assert!(info.hash_key.is_some());
}

#[test]
fn offsets_choose_the_keys_lines() {
    let pages = Pages::default().with(CANDIDATE, (0..=255).cycle().take(PAGE).collect());
    let lines = [0, 1, 2, 15];
    let mut module = module(&[], true);
    module.update_ecc_offset(EccOffsets::try_new(lines).unwrap());
    module.run(&pages);
    let key = reference_key(&pages.0[&CANDIDATE], lines);
    assert_eq!(module.pfe_info().unwrap().hash_key, Some(key));
}

#[test]
fn a_candidate_that_cannot_be_read_is_an_error() {
    let pages = Pages::default().with(2, page_with(0, 5));
    let (info, _) = ran(module(&[entry(2, 31, 32)], false), &pages);
    assert_eq!(
        (info.scanned, info.duplicate, info.error),
        (true, false, Some(RunError::CandidateFault))
    );
}

#[test]
fn a_candidate_that_cannot_be_read_for_its_key_is_an_error() {
    let (info, _) = ran(module(&[], true), &Pages::default());
    assert_eq!((info.scanned, info.error), (true, Some(RunError::CandidateFault)));
}

#[test]
fn a_page_that_cannot_be_read_is_named_by_ptr() {
    let pages = Pages::default()
        .with(CANDIDATE, page_with(0, 9))
        .with(2, page_with(0, 5));
    let (info, _) = ran(module(&[entry(2, 31, 1), entry(3, 31, 31)], true), &pages);
    assert_eq!(
        (info.error, info.ptr),
        (Some(RunError::OtherFault), Pointer::new(1))
    );
}

#[test]
fn a_loop_is_an_error_and_ends() {
    let pages = Pages::default()
        .with(CANDIDATE, page_with(0, 9))
        .with(2, page_with(0, 5))
        .with(3, page_with(0, 5));
    let (info, account) = ran(module(&[entry(2, 31, 1), entry(3, 31, 0)], false), &pages);
    assert_eq!((info.error, info.ptr), (Some(RunError::Loop), Pointer::ROOT));
    assert_eq!(account.comparisons, 2);
}

#[test]
fn a_table_runs_once() {
    let pages = Pages::default()
        .with(CANDIDATE, page_with(0, 9))
        .with(2, page_with(0, 5));
    let mut module = module(&[entry(2, 31, 32)], false);
    module.run(&pages);
    let before = *module.account();
    module.run(&pages);
    assert_eq!(*module.account(), before);
}

#[test]
fn an_arbitrary_set_is_compared_one_by_one() {
    // Section 4.2: Less and More of each entry both name the next one.
    let mut pages = Pages::default().with(CANDIDATE, page_with(0, 9));
    let mut others = Vec::new();
    for n in 0..31u8 {
        let byte = if n == 30 { 9 } else { 100 + n };
        pages = pages.with(n.into(), page_with(0, byte));
        others.push(entry(n.into(), n + 1, n + 1));
    }
    let (info, account) = ran(module(&others, false), &pages);
    assert_eq!((info.duplicate, info.ptr), (true, Pointer::new(30)));
    assert_eq!(account.comparisons, 31);
}

#[test]
fn cycles_go_by_the_slower_of_two_lines() {
    let costs = Costs::default();
    let pages = Pages::default()
        .with(CANDIDATE, page_with(0, 9))
        .with(2, page_with(0, 5))
        .with(3, page_with(0, 5));
    let cycles = |page| ran(module(&[entry(page, 31, 32)], false), &pages).1.cycles;
    assert_eq!(cycles(2), costs.dram + costs.compare);
    assert_eq!(cycles(3), costs.network + costs.compare);
}

/// A page of a small alphabet, so that pages often agree for long.
fn any_page() -> impl Strategy<Value = Vec<u8>> {
    (proptest::collection::vec((0..PAGE, 0..3u8), 0..3)).prop_map(|bytes| {
        let mut page = vec![0; PAGE];
        bytes.into_iter().for_each(|(at, byte)| page[at] = byte);
        page
    })
}

/// Lays out a balanced tree of sorted pages from entry `at` on; returns the next free entry.
fn lay_out(sorted: &[u64], others: &mut [Option<OtherPage>; OTHER_PAGES], at: u8, exit: &mut u8) -> u8 {
    let (left, rest) = sorted.split_at(sorted.len() / 2);
    let mut next = at + 1;
    let mut child = |pages: &[u64], next: &mut u8| {
        if pages.is_empty() {
            *exit += 1;
            *exit - 1
        } else {
            let this = *next;
            *next = lay_out(pages, others, this, exit);
            this
        }
    };
    let less = child(left, &mut next);
    let more = child(&rest[1..], &mut next);
    others[usize::from(at)] = entry(rest[0], less, more);
    next
}

proptest! {
    #[test]
    fn a_comparison_is_that_of_memcmp(a in any_page(), b in any_page()) {
        let order = a.cmp(&b);
        let expected = match order {
            Ordering::Less => (false, 100),
            Ordering::Equal => (true, 0),
            Ordering::Greater => (false, 200),
        };
        let pages = Pages::default().with(CANDIDATE, a).with(1, b);
        let (info, _) = ran(module(&[entry(1, 100, 200)], false), &pages);
        prop_assert_eq!((info.duplicate, info.ptr.bits()), expected);
    }

    #[test]
    fn a_tree_is_searched_as_a_sorted_list_is(
        mut contents in proptest::collection::vec(any_page(), 1..=31),
        candidate in any_page(),
    ) {
        contents.sort();
        contents.dedup();
        let mut pages = Pages::default().with(CANDIDATE, candidate.clone());
        for (n, page) in contents.iter().enumerate() {
            pages = pages.with(n as u64, page.clone());
        }
        let sorted: Vec<u64> = (0..contents.len() as u64).collect();
        let mut others = [None; OTHER_PAGES];
        lay_out(&sorted, &mut others, 0, &mut 31);
        let (info, _) = ran(module(&others, true), &pages);
        let found = contents.binary_search(&candidate);
        prop_assert_eq!(info.duplicate, found.is_ok());
        if let Ok(at) = found {
            let twin = others[info.ptr.entry().unwrap().number()].unwrap();
            prop_assert_eq!(twin.ppn.number(), at as u64);
        } else {
            // The ways out of the tree are numbered in order, as the gaps between the pages are.
            prop_assert_eq!(usize::from(info.ptr.bits()), 31 + found.unwrap_err());
        }
        prop_assert_eq!(info.hash_key, Some(reference_key(&candidate, [3, 9, 5, 12])));
    }

    #[test]
    fn any_table_ends_with_scanned(
        entries in proptest::collection::vec(proptest::option::of((0..6u64, any::<u8>(), any::<u8>())), OTHER_PAGES),
        ptr: u8,
        last_refill: bool,
        contents in proptest::collection::vec(any_page(), 4),
    ) {
        let mut pages = Pages::default().with(CANDIDATE, contents[0].clone());
        for (n, page) in contents.into_iter().enumerate() {
            pages = pages.with(n as u64, page);
        }
        let mut module = Module::default();
        let mut others = [None; OTHER_PAGES];
        for (other, drawn) in others.iter_mut().zip(entries) {
            *other = drawn.and_then(|(page, less, more)| entry(page, less % 40, more % 40));
        }
        module.load(others);
        module.insert_pfe(Candidate { ppn: ppn(CANDIDATE), last_refill, ptr: Pointer::new(ptr) });
        module.run(&pages);
        let info = module.pfe_info().unwrap();
        prop_assert!(info.scanned && !(info.duplicate && info.error.is_some()));
        prop_assert!(module.account().comparisons <= 31);
        let complete = info.duplicate || last_refill && info.error.is_none();
        prop_assert!(!complete || info.hash_key.is_some());
    }
}
