use super::*;
use crate::compare::conformance::doubles::{Double, Faults};
use crate::compare::{Account, Cpu, KeyKind, PageId, StablePage};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords, Salt};

/// More than any answer of a double takes, on a busy machine.
const PATIENT: Duration = Duration::from_secs(10);
/// Less than a lost answer takes.
const IMPATIENT: Duration = Duration::from_millis(5);

fn cpu() -> Cpu {
    Cpu::new(KeyKind::Lines(Salt(7)))
}

fn double(faults: Faults) -> Box<dyn Verify> {
    Box::new(Double::new(cpu(), faults))
}

fn verifier(engine: Box<dyn Verify>, trusted: bool, patience: Duration) -> Verifier {
    let mut verifier = Verifier::new(trusted, patience);
    verifier.attach(engine).unwrap();
    verifier
}

/// Pages of which n and m are equal if n % 8 == m % 8; page 0 is zero.
fn pages() -> Vec<PageWords> {
    let page = |n: u64| {
        let mut page = [n % 8; PAGE_WORDS];
        page[usize::try_from(n % 8).unwrap() * 60] += 1000 * u64::from(!n.is_multiple_of(8));
        page
    };
    (0..16).map(page).collect()
}

/// What a page is compared with: none is the page of zeros.
type Asked = (usize, Option<usize>);

fn pair<'p>(pages: &'p [PageWords], (taken, with): Asked) -> Pair<'p> {
    Pair {
        taken: StablePage::from(&pages[taken]),
        with: with.map_or(With::Zeros, |slot| With::Slot {
            id: PageId(slot as u64),
            page: StablePage::from(&pages[slot]),
        }),
    }
}

/// Which pairs are said to be different; `None` if it was called off.
fn differing(
    verifier: &mut Verifier,
    pages: &[PageWords],
    asked: &[Asked],
    go_on: impl FnMut() -> bool,
) -> Option<Vec<bool>> {
    let mut different = vec![false; asked.len()];
    let pairs = asked.iter().map(|asked| pair(pages, *asked)).zip(&mut different);
    verifier
        .verify(pairs, |different| **different = true, go_on)
        .then_some(different)
}

fn truth(asked: &[Asked]) -> Vec<bool> {
    let differs = |(taken, with): &Asked| taken % 8 != with.unwrap_or(0) % 8;
    asked.iter().map(differs).collect()
}

fn many() -> Vec<Asked> {
    (0..300usize)
        .map(|n| (n * 7 % 16, (n % 5 > 0).then_some(n * n % 16)))
        .collect()
}

fn asked() -> impl Strategy<Value = Vec<Asked>> {
    let one = (0..16usize, proptest::option::weighted(0.8, 0..16usize));
    proptest::collection::vec(one, 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However bad an engine is, what the CPU finds different is never taken for equal. That pages are different it may be
    /// believed, and nothing else.
    #[test]
    fn nothing_different_passes_for_equal(
        asked in asked(),
        lost in prop_oneof![Just(0), 0..300u64],
        lies in prop_oneof![Just(0), 0..300u64],
        twice in prop_oneof![Just(0), 0..20u64],
        strays in prop_oneof![Just(0), 0..20u64],
        faults in prop_oneof![Just(0), 0..300u64],
        dies_after in proptest::option::of(0..300u64),
        reorder: bool,
        seed: u64,
    ) {
        let latency = Duration::from_micros(seed % 200);
        let faults = Faults { latency, reorder, lost, lies, twice, strays, faults, dies_after, seed };
        let pages = pages();
        let mut verifier = verifier(double(faults), false, IMPATIENT);
        let found = differing(&mut verifier, &pages, &asked, || true).expect("nobody calls it off");
        for ((found, truly), asked) in found.into_iter().zip(truth(&asked)).zip(&asked) {
            prop_assert!(found || !truly, "{asked:?} is different");
            prop_assert!(truly || !found || lies > 0, "{asked:?} is equal");
        }
        // With what is left, the CPU if need be, the next window is verified as well.
        if verifier.failure().is_some() {
            verifier.detach();
            prop_assert_eq!(differing(&mut verifier, &pages, &asked, || true), Some(truth(&asked)));
        }
    }

    /// An engine that is only slow, or that cannot read some pages, is right; also if it is trusted.
    #[test]
    fn a_slow_engine_is_believed(
        asked in asked(), faults in 0..300u64, reorder: bool, trusted: bool, seed: u64, micros in 0..300u64,
    ) {
        let latency = Duration::from_micros(micros);
        let faults = Faults { latency, reorder, faults, seed, ..Faults::default() };
        let mut verifier = verifier(double(faults), trusted, PATIENT);
        let found = differing(&mut verifier, &pages(), &asked, || true);
        prop_assert_eq!(found, Some(truth(&asked)));
        prop_assert_eq!(verifier.failure(), None);
        prop_assert_eq!(verifier.answered(), asked.len() as u64);
    }
}

#[test]
fn each_fault_ends_the_use_of_an_engine_and_is_named() {
    let good = Faults::default();
    for (faults, says) in [
        (Faults { lost: 100, ..good }, "answers are missing after 5ms"),
        (Faults { lies: 100, ..good }, "it calls pages"),
        (Faults { twice: 100, ..good }, "twice"),
        (Faults { strays: 100, ..good }, "not asked"),
        (
            Faults {
                dies_after: Some(50),
                ..good
            },
            "the double died",
        ),
    ] {
        let mut verifier = verifier(double(faults), false, IMPATIENT);
        let asked = many();
        let found = differing(&mut verifier, &pages(), &asked, || true).unwrap();
        let missed = found
            .iter()
            .zip(truth(&asked))
            .filter(|(found, truly)| *truly && !**found);
        assert_eq!(missed.count(), 0, "{faults:?}");
        let error = verifier.failure().expect("it failed").to_string();
        assert!(error.contains(says), "{faults:?}: {error}");
        assert!(!verifier.has_engine());
    }
}

/// The CPU is asked as any engine would be that answers at once; one that does not answer is not believed.
#[test]
fn what_answers_at_once_is_asked_through_the_trait() {
    let (pages, asked) = (pages(), many());
    for (compared, found) in [
        (Some(Compared::Equal), false),
        (Some(Compared::Different(None)), true),
        (None, true),
    ] {
        let mut different = vec![false; asked.len()];
        let pairs = asked.iter().map(|asked| pair(&pages, *asked)).zip(&mut different);
        let done = at_once(
            &mut AtOnce(cpu(), compared),
            pairs,
            |different| **different = true,
            || true,
        );
        assert!(done);
        assert_eq!(different, vec![found; asked.len()], "{compared:?}");
    }
}

/// Says this of all pairs at once, and answers no batch.
struct AtOnce(Cpu, Option<Compared>);

impl Engine for AtOnce {
    fn name(&self) -> &'static str {
        "at-once"
    }

    fn account(&self) -> Account {
        self.0.account()
    }
}

#[allow(unsafe_code)] // the trait's submit() is unsafe
impl Verify for AtOnce {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    unsafe fn submit(&mut self, _first: u64, _pairs: &[Pair<'_>]) -> Answer<usize> {
        Ok(0)
    }

    fn compare_now(&mut self, _pair: &Pair<'_>) -> Option<Compared> {
        self.1
    }

    fn poll(&mut self, _wait: Duration, _answers: &mut Vec<PairAnswer>) -> Answer<()> {
        Ok(())
    }

    fn abort(&mut self) {}
}

/// Says the same of all pairs.
struct Always(Cpu, Compared);

impl Engine for Always {
    fn name(&self) -> &'static str {
        "always"
    }

    fn account(&self) -> Account {
        self.0.account()
    }
}

#[allow(unsafe_code)] // the trait's submit() is unsafe
impl Verify for Always {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    unsafe fn submit(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize> {
        // SAFETY: as promised by the caller.
        unsafe { self.0.submit(first, pairs) }
    }

    fn poll(&mut self, wait: Duration, answers: &mut Vec<PairAnswer>) -> Answer<()> {
        let before = answers.len();
        self.0.poll(wait, answers)?;
        answers[before..]
            .iter_mut()
            .for_each(|answer| answer.answer = Ok(self.1));
        Ok(())
    }

    fn abort(&mut self) {
        self.0.abort();
    }
}

fn always(compared: Compared, trusted: bool) -> Verifier {
    verifier(Box::new(Always(cpu(), compared)), trusted, PATIENT)
}

#[test]
fn only_a_trusted_engine_can_call_different_pages_equal() {
    let asked = many();
    let mut doubted = always(Compared::Equal, false);
    assert_eq!(
        differing(&mut doubted, &pages(), &asked, || true),
        Some(truth(&asked))
    );
    let error = doubted.failure().unwrap().to_string();
    assert!(error.contains("pages equal that differ"), "{error}");
    let mut trusted = always(Compared::Equal, true);
    let nothing = Some(vec![false; asked.len()]);
    assert_eq!(differing(&mut trusted, &pages(), &asked, || true), nothing);
    assert_eq!(trusted.failure(), None);
}

#[test]
fn who_calls_equal_pages_different_is_found_out_at_the_first_test() {
    let asked: Vec<Asked> = (0..8).map(|page| (page, Some(page + 8))).collect();
    for (answer, says) in [
        (Compared::Different(None), "pages different that are equal"),
        (
            Compared::Different(Some(0)),
            "different at byte 0, where they are equal",
        ),
        (Compared::Different(Some(u16::MAX)), "different at byte 65535"),
    ] {
        for trusted in [false, true] {
            let mut verifier = always(answer, trusted);
            assert_eq!(
                differing(&mut verifier, &pages(), &asked, || true),
                Some(vec![false; 8])
            );
            let error = verifier.failure().unwrap().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
    // What differs indeed is not found out, and does no harm.
    let mut right = always(Compared::Different(None), false);
    let asked: Vec<Asked> = (0..8).map(|page| (page, Some((page + 1) % 8))).collect();
    assert_eq!(
        differing(&mut right, &pages(), &asked, || true),
        Some(vec![true; 8])
    );
    assert_eq!(right.failure(), None);
}

#[test]
fn a_trusted_engine_that_fails_is_not_believed_any_more() {
    let faults = Faults {
        lies: 300,
        dies_after: Some(250),
        ..Faults::default()
    };
    let mut verifier = verifier(double(faults), true, PATIENT);
    let asked = many();
    let found = differing(&mut verifier, &pages(), &asked, || true).unwrap();
    assert!(verifier.failure().is_some());
    let missed = found
        .iter()
        .zip(truth(&asked))
        .filter(|(found, truly)| *truly && !**found);
    assert_eq!(missed.count(), 0);
}

#[test]
fn what_is_called_off_is_aborted_and_the_engine_stays() {
    let faults = Faults {
        latency: Duration::from_secs(3600),
        ..Faults::default()
    };
    for times in [0, 1, 7] {
        let mut verifier = verifier(double(faults), false, PATIENT);
        let mut left = times;
        let start = Instant::now();
        let found = differing(&mut verifier, &pages(), &many(), || {
            left -= 1;
            left >= 0
        });
        assert_eq!(found, None);
        assert!(start.elapsed() < PATIENT);
        assert!(verifier.has_engine() && verifier.failure().is_none());
    }
}

#[test]
fn the_cpu_asks_every_sixteen_pages() {
    let mut verifier = Verifier::new(false, PATIENT);
    let (pages, asked) = (pages(), many());
    let mut times = 0;
    let found = differing(&mut verifier, &pages, &asked, || {
        times += 1;
        true
    });
    assert_eq!((found, times), (Some(truth(&asked)), 300_usize.div_ceil(16)));
    let mut left = 2;
    let mut different = vec![false; asked.len()];
    let pairs = asked.iter().map(|asked| pair(&pages, *asked)).zip(&mut different);
    let done = verifier.verify(
        pairs,
        |different| **different = true,
        || {
            left -= 1;
            left >= 0
        },
    );
    assert!(!done);
    assert_eq!(different[..32], truth(&asked)[..32]);
    assert!(different[32..].iter().all(|different| !different));
}

/// Counts its pairs and aborts, and takes few at once. Knows no zeros.
struct Narrow {
    cpu: Cpu,
    open: Arc<AtomicUsize>,
    aborts: Arc<AtomicUsize>,
}

impl Engine for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }

    fn account(&self) -> Account {
        self.cpu.account()
    }
}

#[allow(unsafe_code)] // the trait's submit() is unsafe
impl Verify for Narrow {
    fn limits(&self) -> Limits {
        Limits {
            at_once: 5,
            zeros: false,
        }
    }

    unsafe fn submit(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize> {
        assert!(pairs.len() <= 5);
        assert!(pairs.iter().all(|pair| !matches!(pair.with, With::Zeros)));
        let room = 7 - self.open.load(Ordering::Relaxed);
        let taken = &pairs[..pairs.len().min(room)];
        self.open.fetch_add(taken.len(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { self.cpu.submit(first, taken) }
    }

    fn poll(&mut self, wait: Duration, answers: &mut Vec<PairAnswer>) -> Answer<()> {
        let before = answers.len();
        self.cpu.poll(wait, answers)?;
        self.open.fetch_sub(answers.len() - before, Ordering::Relaxed);
        Ok(())
    }

    fn abort(&mut self) {
        self.cpu.abort();
        self.open.store(0, Ordering::Relaxed);
        self.aborts.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn an_engine_is_asked_within_its_limits_and_has_no_page_in_the_end() {
    let (open, aborts) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let engine = || Narrow {
        cpu: cpu(),
        open: open.clone(),
        aborts: aborts.clone(),
    };
    let mut verifier = verifier(Box::new(engine()), true, PATIENT);
    let asked = many();
    let slots = asked.iter().filter(|(_, with)| with.is_some()).count();
    assert_eq!(
        differing(&mut verifier, &pages(), &asked, || true),
        Some(truth(&asked))
    );
    assert_eq!(verifier.answered(), slots as u64);
    assert_eq!(
        (open.load(Ordering::Relaxed), aborts.load(Ordering::Relaxed)),
        (0, 0)
    );

    let mut left = 3;
    assert_eq!(
        differing(&mut verifier, &pages(), &asked, || {
            left -= 1;
            left >= 0
        }),
        None
    );
    assert_eq!(
        (open.load(Ordering::Relaxed), aborts.load(Ordering::Relaxed)),
        (0, 1)
    );

    let mut left = 3;
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        differing(&mut verifier, &pages(), &asked, || {
            left -= 1;
            assert!(left >= 0, "the caller panics");
            true
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(
        (open.load(Ordering::Relaxed), aborts.load(Ordering::Relaxed)),
        (0, 2)
    );
}
