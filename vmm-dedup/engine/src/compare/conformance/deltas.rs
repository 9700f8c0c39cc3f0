//! What every engine that makes deltas does: [`check`].

use super::pages::{IMPOSSIBLE, MISSING, arena, page};
use crate::compare::{Arena, Delta, Deltas, Error, PageId};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};

/// Makes an engine that can read the pages of an arena, and no others.
type Make<'a> = &'a mut dyn FnMut(&Arena) -> Box<dyn Deltas>;

/// Runs the suite.
///
/// # Panics
/// If the engine does not conform.
pub fn check(make: Make<'_>) {
    deltas_are_the_words_that_differ(make);
    what_is_missing_is_a_fault_and_leaves_the_others_alone(make);
}

/// A page with this many words that are not the other's, spread over it.
fn changed(base: &PageWords, words: usize) -> PageWords {
    let mut page = *base;
    (0..words).for_each(|n| page[(n * PAGE_WORDS / words.max(1) + n % 7) % PAGE_WORDS] ^= 1 << (n % 64));
    page
}

fn deltas_are_the_words_that_differ(make: Make<'_>) {
    let sizes = [
        0, 1, 2, 7, 8, 9, 63, 64, 100, 200, 407, 408, 409, 410, 500, PAGE_WORDS,
    ];
    let base = page(1);
    let mut contents = vec![base];
    // More pages than an engine takes at once.
    contents.extend((0..8).flat_map(|_| sizes.map(|size| changed(&base, size))));
    let arena = arena(&contents);
    let mut engine = make(&arena);
    let pairs: Vec<(PageId, PageId)> = (1..contents.len() as u64)
        .map(|n| (PageId(0), PageId(n)))
        .collect();
    for most in [0, 8, 100, PAGE_WORDS] {
        let answers = engine.create_deltas(&arena, &pairs, most);
        assert_eq!(answers.len(), pairs.len());
        let mut made: Vec<(usize, Delta)> = Vec::new();
        for (at, answer) in answers.into_iter().enumerate() {
            let expected = Delta::between(&base, &contents[at + 1]);
            let expected = Some(expected).filter(|delta| delta.len() <= most);
            assert_eq!(answer, Ok(expected.clone()), "page {at}, at most {most}");
            made.extend(expected.map(|delta| (at, delta)));
        }
        let of: Vec<(PageId, &Delta)> = made.iter().map(|(_, delta)| (PageId(0), delta)).collect();
        let applied = engine.apply_deltas(&arena, &of);
        assert_eq!(applied.len(), of.len());
        for ((at, _), page) in made.iter().zip(applied) {
            assert_eq!(*page.expect("a page"), contents[at + 1], "page {at}");
        }
    }
    assert!(engine.create_deltas(&arena, &[], 9).is_empty() && engine.apply_deltas(&arena, &[]).is_empty());
}

fn what_is_missing_is_a_fault_and_leaves_the_others_alone(make: Make<'_>) {
    let contents = [page(1), changed(&page(1), 5)];
    let arena = arena(&contents);
    let mut engine = make(&arena);
    let (there, other) = (PageId(0), PageId(1));
    let delta = Delta::between(&contents[0], &contents[1]);
    for missing in [MISSING, IMPOSSIBLE] {
        let pairs = [(there, other), (missing, other), (there, missing), (there, other)];
        let answers = engine.create_deltas(&arena, &pairs, 100);
        let good = Ok(Some(delta.clone()));
        let fault = Err(Error::Fault(missing));
        assert_eq!(answers, [good.clone(), fault.clone(), fault, good]);
        let applied = engine.apply_deltas(&arena, &[(missing, &delta), (there, &delta)]);
        assert_eq!(applied[0], Err(Error::Fault(missing)));
        assert_eq!(applied[1].as_deref(), Ok(&contents[1]));
    }
}
