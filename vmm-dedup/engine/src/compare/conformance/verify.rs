//! What every engine that verifies does: [`check`].
#![allow(unsafe_code)] // engines read pages after the call that named them

use super::pages::{IMPOSSIBLE, MISSING, arena, contents, mix, page, set_byte};
use crate::compare::{
    Answer, Arena, Compared, Error, PageId, Pages, Pair, PairAnswer, StablePage, Verify, With,
};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};

/// Makes an engine that can read the pages of an arena, and no others.
type Make<'a> = &'a mut dyn FnMut(&Arena) -> Box<dyn Verify>;

/// By when a device has answered, or a call has returned, on a busy machine.
const SOON: Duration = Duration::from_secs(5);
/// A time that a call may take because it was told so.
const WAIT: Duration = Duration::from_millis(10);

/// Runs the suite.
///
/// # Panics
/// If the engine does not conform.
pub fn check(make: Make<'_>) {
    every_byte_counts(make);
    zeros_are_compared_with(make);
    each_pair_is_answered_once(make);
    a_bad_item_leaves_the_others_alone(make);
    nothing_to_do_is_nothing(make);
    what_was_aborted_is_forgotten(make);
    an_engine_is_dropped_with_pairs_in_flight(make);
    accounts_grow(make);
}

/// The arena's page, which nobody writes while there are pairs of it.
fn slot(arena: &Arena, id: PageId) -> With<'_> {
    let page = arena.view(id).expect("a page of the arena");
    // SAFETY: the cases write their arenas before they make pairs.
    let page = unsafe { StablePage::at(std::ptr::from_ref(page) as usize) };
    With::Slot { id, page }
}

fn pair<'a>(taken: &'a PageWords, with: With<'a>) -> Pair<'a> {
    let taken = StablePage::from(taken);
    Pair { taken, with }
}

/// Submits as many of the pairs as the engine takes, with numbers from `first` on.
fn submit(engine: &mut dyn Verify, first: u64, pairs: &[Pair<'_>]) -> usize {
    let at_once = engine.limits().at_once;
    let mut submitted = 0;
    while submitted < pairs.len() {
        let batch = &pairs[submitted..pairs.len().min(submitted + at_once)];
        // SAFETY: all callers poll the answers or abort before the pages go.
        let taken = unsafe { engine.submit(first + submitted as u64, batch) }.expect("the device works");
        assert!(taken <= batch.len());
        submitted += taken;
        if taken < batch.len() {
            break;
        }
    }
    submitted
}

/// Submits all pairs and waits for their answers, in the order of the pairs.
fn ask(engine: &mut dyn Verify, first: u64, pairs: &[Pair<'_>]) -> Vec<Answer<Compared>> {
    let start = Instant::now();
    let mut submitted = 0;
    let mut ordered: Vec<Option<Answer<Compared>>> = vec![None; pairs.len()];
    let (mut answers, mut answered) = (Vec::new(), 0);
    while answered < pairs.len() {
        let taken = submit(engine, first + submitted as u64, &pairs[submitted..]);
        assert!(
            taken > 0 || submitted == pairs.len() || answered < submitted,
            "it takes no pair although none is in flight"
        );
        submitted += taken;
        engine.poll(WAIT, &mut answers).expect("the device works");
        for PairAnswer { number, answer } in answers.drain(..) {
            let place = number.checked_sub(first).and_then(|n| usize::try_from(n).ok());
            let place = place.filter(|place| *place < submitted);
            let place = place.unwrap_or_else(|| panic!("an answer to {number}, which was not asked"));
            let before = ordered[place].replace(answer);
            assert_eq!(before, None, "two answers to {number}");
            answered += 1;
        }
        assert!(start.elapsed() < SOON, "{answered} of {} answers", pairs.len());
    }
    let answers: Vec<Answer<Compared>> = ordered.into_iter().flatten().collect();
    // What is answered at once is the same.
    for (pair, answer) in pairs.iter().zip(&answers) {
        let now = engine.compare_now(pair).map(|now| now == Compared::Equal);
        assert_eq!(
            now.unwrap_or(*answer == Ok(Compared::Equal)),
            *answer == Ok(Compared::Equal)
        );
    }
    answers
}

/// Whether an answer is that of pages whose first difference is there.
fn differs(answer: &Answer<Compared>, at: usize) -> bool {
    match answer {
        Ok(Compared::Different(Some(offset))) => usize::from(*offset) == at,
        Ok(Compared::Different(None)) => true,
        _ => false,
    }
}

/// The first byte that differs is told, if anything is; bytes behind it do not matter.
fn every_byte_counts(make: Make<'_>) {
    let arena = arena(&[page(1), page(2)]);
    let mut engine = make(&arena);
    let places: Vec<usize> = (0..PAGE_SIZE).collect();
    for places in places.chunks(256) {
        let changed = |at: &usize| {
            let mut content = page(1);
            let byte = content[at / 8].to_ne_bytes()[at % 8];
            set_byte(&mut content, *at, byte ^ (1 << (at % 8)));
            if at.is_multiple_of(3) && at + 1 < PAGE_SIZE {
                set_byte(&mut content, PAGE_SIZE - 1, 1);
            }
            content
        };
        let taken: Vec<PageWords> = places.iter().map(changed).collect();
        let same = page(1);
        let pairs: Vec<Pair<'_>> = taken
            .iter()
            .flat_map(|taken| {
                [
                    pair(taken, slot(&arena, PageId(0))),
                    pair(&same, slot(&arena, PageId(0))),
                ]
            })
            .collect();
        let answers = ask(&mut *engine, places[0] as u64 * 2, &pairs);
        for (at, answers) in places.iter().zip(answers.chunks(2)) {
            assert!(differs(&answers[0], *at), "byte {at}: {:?}", answers[0]);
            assert_eq!(answers[1], Ok(Compared::Equal), "byte {at}");
        }
    }
}

fn zeros_are_compared_with(make: Make<'_>) {
    let arena = arena(&[[0; PAGE_WORDS]]);
    let mut engine = make(&arena);
    let zeros = [0; PAGE_WORDS];
    assert_eq!(
        ask(&mut *engine, 0, &[pair(&zeros, slot(&arena, PageId(0)))]),
        [Ok(Compared::Equal)]
    );
    if !engine.limits().zeros {
        return;
    }
    let places: Vec<usize> = (0..PAGE_SIZE).step_by(61).chain([PAGE_SIZE - 1]).collect();
    let content = |at: &usize| {
        let mut content = zeros;
        set_byte(&mut content, *at, 0x80);
        content
    };
    let taken: Vec<PageWords> = places.iter().map(content).chain([zeros]).collect();
    let pairs: Vec<Pair<'_>> = taken.iter().map(|taken| pair(taken, With::Zeros)).collect();
    let mut answers = ask(&mut *engine, 0, &pairs);
    assert_eq!(answers.pop(), Some(Ok(Compared::Equal)));
    for (at, answer) in places.iter().zip(&answers) {
        assert!(differs(answer, *at), "byte {at}: {answer:?}");
    }
}

/// More pairs than an engine has room for, submitted as fast as it takes them, with numbers that begin anywhere.
fn each_pair_is_answered_once(make: Make<'_>) {
    const PAGES: u64 = 64;
    const PAIRS: u64 = 5000;
    let contents = contents(PAGES);
    let arena = arena(&contents);
    let mut engine = make(&arena);
    for first in [0, 7, 1 << 40, u64::MAX - PAIRS] {
        let chosen = |n: u64| (mix(n + first % 1000) % PAGES, mix(n + 1_000_000) % PAGES);
        let at = |n: u64| usize::try_from(n).expect("below the number of pages");
        let pairs: Vec<Pair<'_>> = (0..PAIRS)
            .map(chosen)
            .map(|(taken, other)| pair(&contents[at(taken)], slot(&arena, PageId(other))))
            .collect();
        let answers = ask(&mut *engine, first, &pairs);
        for (n, answer) in (0..).zip(answers) {
            let (taken, other) = chosen(n);
            let equal = taken % (PAGES / 2) == other % (PAGES / 2);
            assert_eq!(answer == Ok(Compared::Equal), equal, "pair {n}: {answer:?}");
            assert!(
                matches!(answer, Ok(Compared::Different(_))) || equal,
                "pair {n}: {answer:?}"
            );
        }
    }
}

/// An engine that knows slots by their numbers cannot read one that it was not given; one that reads this process's memory
/// can.
fn a_bad_item_leaves_the_others_alone(make: Make<'_>) {
    let arena = arena(&[page(1), page(2)]);
    let mut engine = make(&arena);
    let (same, other) = (page(1), page(3));
    for id in [MISSING, IMPOSSIBLE, PageId(2)] {
        let unknown = match slot(&arena, PageId(0)) {
            With::Slot { page, .. } => With::Slot { id, page },
            zeros @ With::Zeros => zeros,
        };
        let pairs = [
            pair(&same, slot(&arena, PageId(0))),
            pair(&same, unknown),
            pair(&other, slot(&arena, PageId(1))),
        ];
        let answers = ask(&mut *engine, 0, &pairs);
        assert_eq!(answers[0], Ok(Compared::Equal));
        assert!(matches!(answers[2], Ok(Compared::Different(_))), "{answers:?}");
        let right = [Ok(Compared::Equal), Err(Error::Fault(id))];
        assert!(right.contains(&answers[1]), "{answers:?}");
    }
}

fn nothing_to_do_is_nothing(make: Make<'_>) {
    let arena = arena(&[page(1)]);
    let mut engine = make(&arena);
    let start = Instant::now();
    let mut answers = Vec::new();
    assert!(engine.limits().at_once > 0);
    assert_eq!(submit(&mut *engine, 0, &[]), 0);
    engine
        .poll(Duration::ZERO, &mut answers)
        .expect("the device works");
    engine.poll(WAIT, &mut answers).expect("the device works");
    engine.abort();
    engine.abort();
    assert!(answers.is_empty() && start.elapsed() < SOON);
}

fn what_was_aborted_is_forgotten(make: Make<'_>) {
    let arena = arena(&[page(1), page(2)]);
    let mut engine = make(&arena);
    for round in 0..20 {
        let start = Instant::now();
        let (first, second) = (round * 1000, round * 1000 + 500);
        {
            // These pages are gone when the abort has returned.
            let taken: Vec<PageWords> = (0..100).map(|_| page(1)).collect();
            let pairs: Vec<Pair<'_>> = taken.iter().map(|t| pair(t, slot(&arena, PageId(0)))).collect();
            submit(&mut *engine, first, &pairs);
            if round % 2 == 1 {
                let mut some = Vec::new();
                engine.poll(Duration::ZERO, &mut some).expect("the device works");
            }
            engine.abort();
        }
        assert!(start.elapsed() < SOON);
        let (same, other) = (page(2), page(3));
        let taken = [&same, &other, &same, &other];
        let pairs = taken.map(|taken| pair(taken, slot(&arena, PageId(1))));
        let answers = ask(&mut *engine, second, &pairs);
        let equal = answers.iter().map(|answer| *answer == Ok(Compared::Equal));
        assert_eq!(
            equal.collect::<Vec<_>>(),
            [true, false, true, false],
            "{answers:?}"
        );
    }
}

fn an_engine_is_dropped_with_pairs_in_flight(make: Make<'_>) {
    let arena = arena(&[page(1)]);
    let taken: Vec<PageWords> = (0..100).map(|_| page(1)).collect();
    let pairs: Vec<Pair<'_>> = taken.iter().map(|t| pair(t, slot(&arena, PageId(0)))).collect();
    for _ in 0..5 {
        let mut engine = make(&arena);
        let start = Instant::now();
        submit(&mut *engine, 0, &pairs);
        drop(engine);
        assert!(start.elapsed() < SOON);
    }
}

fn accounts_grow(make: Make<'_>) {
    let arena = arena(&[page(1)]);
    let mut engine = make(&arena);
    let before = engine.account();
    let (same, other) = (page(1), page(2));
    let pairs = [&same, &other].map(|taken| pair(taken, slot(&arena, PageId(0))));
    ask(&mut *engine, 0, &pairs);
    let after = engine.account();
    assert_eq!(
        (after.pages - before.pages, after.comparisons - before.comparisons),
        (2, 2)
    );
    assert!(after.bytes > before.bytes);
}
