use super::*;
use crate::window::{WINDOW_BYTES, Window};
use crate::{Line, Memory, Ring, timing};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use vmm_dedup::compare::{Arena, Compared, Pair, PairAnswer, StablePage, Verify, With, conformance};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};
use vmm_dedup_protocol::mapping::Mapping;

#[test]
fn it_conforms_with_one_module() {
    let engine = || PageForgeEngine::new(InProcess::new(1));
    conformance::keys(&mut |_| Box::new(engine()));
    conformance::tree_search(&mut |_| Box::new(engine()));
    conformance::verify(&mut |_| Box::new(PageForgeVerifier::new(InProcess::new(1)).unwrap()));
}

#[test]
fn it_conforms_with_several_modules() {
    conformance::keys(&mut |_| Box::new(PageForgeEngine::new(InProcess::new(4))));
    conformance::tree_search(&mut |_| Box::new(PageForgeEngine::new(InProcess::new(4))));
    conformance::verify(&mut |_| Box::new(PageForgeVerifier::new(InProcess::new(4)).unwrap()));
}

#[test]
fn a_key_reads_256_bytes() {
    let arena = Arena::new(1).unwrap();
    let mut engine = PageForgeEngine::new(InProcess::new(1));
    engine.keys(&arena, &[PageId(0)]);
    assert_eq!(engine.account().bytes, 256);
}

#[test]
fn more_questions_than_the_ring_holds_are_answered() {
    let arena = Arena::new(2).unwrap();
    let mut engine = PageForgeEngine::new(InProcess::new(3));
    let pages = vec![PageId(1); RING * 2 + 7];
    let keys = engine.keys(&arena, &pages);
    assert_eq!(keys.len(), pages.len());
    assert!(keys.iter().all(|key| *key == keys[0] && key.is_ok()));
}

/// A device with memory of its own that does a few jobs whenever somebody looks, and none before.
struct Lazy {
    window: Vec<AtomicU64>,
    ring: Ring,
    tail: u32,
    at_once: u32,
    memory: Files,
}

/// Files by their first page.
#[derive(Default)]
struct Files(Vec<(u64, Mapping)>);

impl Memory for Files {
    fn line(&self, page: Ppn, line: usize) -> Option<Line> {
        let place = |(first, file): &(u64, Mapping)| {
            let at = usize::try_from(page.number().checked_sub(*first)?).ok()?;
            let words = file.words().get(at * PAGE_WORDS..(at + 1) * PAGE_WORDS)?;
            Some(std::array::from_fn(|word| {
                words[line * 8 + word].load(Ordering::Acquire)
            }))
        };
        self.0.iter().find_map(place)
    }
}

impl Lazy {
    fn new(at_once: u32) -> Self {
        Self {
            window: (0..WINDOW_BYTES / 8).map(|_| AtomicU64::new(0)).collect(),
            ring: Ring::new(1),
            tail: 0,
            at_once,
            memory: Files::default(),
        }
    }
}

impl Port for Lazy {
    fn name(&self) -> &'static str {
        "lazy"
    }

    fn window(&self) -> Window<'_> {
        Window::new(&self.window)
    }

    fn has_memory_of_its_own(&self) -> bool {
        true
    }

    fn begin(&mut self, _: &dyn Pages, jobs: &[Job]) -> Answer<u32> {
        let first = self.tail;
        for job in jobs {
            Window::new(&self.window).set_job(self.tail, job);
            self.tail = self.tail.wrapping_add(1);
        }
        assert!(
            self.tail.wrapping_sub(self.ring.head()) as usize <= RING,
            "the ring overflows"
        );
        Ok(first)
    }

    fn done(&mut self, _: u32, _: Duration) -> Answer<u32> {
        let left = self.tail.wrapping_sub(self.ring.head()).min(self.at_once);
        (0..left).for_each(|_| self.ring.step(Window::new(&self.window), &self.memory));
        Ok(self.ring.head())
    }

    fn account(&self) -> timing::Account {
        self.ring.account()
    }

    fn device_cpu_ns(&self) -> u64 {
        0
    }

    fn borrowed_cpu_ns(&self) -> u64 {
        0
    }

    fn map(&mut self, first: PageId, pages: usize, file: BorrowedFd<'_>) -> Answer<()> {
        let file = Mapping::read_only(file, pages * PAGE_SIZE).unwrap();
        self.memory.0.push((first.0, file));
        Ok(())
    }
}

fn lazy(at_once: u32, arena: &Arena) -> PageForgeVerifier<Lazy> {
    let mut verifier = PageForgeVerifier::new(Lazy::new(at_once)).unwrap();
    verifier.map(PageId(0), arena.pages(), arena.file()).unwrap();
    verifier
}

#[test]
fn a_device_that_takes_its_time_conforms() {
    for at_once in [1, 7, 5000] {
        conformance::verify(&mut |arena| Box::new(lazy(at_once, arena)));
    }
}

/// The slot's page with another word 5.
fn page(word: u64) -> PageWords {
    let mut page = [3; PAGE_WORDS];
    page[5] = word;
    page
}

#[allow(unsafe_code)] // the trait's submit() is unsafe
fn submit(verifier: &mut impl Verify, first: u64, taken: &[PageWords]) -> usize {
    let slot = page(3);
    let (id, page) = (PageId(0), StablePage::from(&slot));
    let with = With::Slot { id, page };
    let pairs: Vec<Pair<'_>> = taken
        .iter()
        .map(|taken| Pair {
            taken: StablePage::from(taken),
            with,
        })
        .collect();
    // SAFETY: this engine copies the pages within the call.
    unsafe { verifier.submit(first, &pairs) }.unwrap()
}

#[test]
fn a_full_ring_takes_no_pair_and_places_of_aborted_ones_come_back_when_they_are_done() {
    let arena = Arena::new(1).unwrap();
    arena.write(0, &page(3));
    let mut verifier = lazy(10, &arena);
    let equal = vec![page(3); RING + 50];
    assert_eq!(submit(&mut verifier, 0, &equal), RING);
    verifier.abort();
    assert_eq!(submit(&mut verifier, 5000, &[page(4)]), 0);
    let mut answers = Vec::new();
    verifier.poll(Duration::ZERO, &mut answers).unwrap();
    assert_eq!(answers, []);
    assert_eq!(submit(&mut verifier, 5000, &vec![page(4); 50]), 10);
    for _ in 0..=RING / 10 {
        verifier.poll(Duration::ZERO, &mut answers).unwrap();
    }
    let different = |number| PairAnswer {
        number,
        answer: Ok(Compared::Different(None)),
    };
    assert_eq!(answers, (5000..5010).map(different).collect::<Vec<_>>());
}
