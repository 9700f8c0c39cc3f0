//! Devices that fail: nothing is lost, and what is wrong is said.

use std::cmp::Ordering;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use vmm_dedup::compare::{
    Answer, Arena, Compared, Engine, Error, Keys, Meanwhile, PageId, Pages, Pair, PairAnswer, StablePage,
    TreeSearch, Verifier, Verify, With,
};
use vmm_dedup_dsa::{
    DsaEngine, InProcess, Options, Reach, Registers, SetupError, Wanted, WorkQueue, bring_up,
};
use vmm_dedup_dsa_abi::config::Mode;
use vmm_dedup_dsa_abi::registers::{CMDSTS, GeneralCapability, QueueCapability};
use vmm_dedup_dsa_abi::{Command, Opcode};
use vmm_dedup_dsa_model::{Faults, Shape, Timing};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};
use vmm_dedup_protocol::tree::{TreeReader, TreeWriter, words};

const PAGES: usize = 300;

/// A page of its own for each number; every third is like the first.
fn content(page: usize) -> PageWords {
    let number = if page.is_multiple_of(3) { 0 } else { page as u64 };
    std::array::from_fn(|word| if word == PAGE_WORDS / 2 { number } else { 7 })
}

fn arena() -> Arena {
    let arena = Arena::new(PAGES).unwrap();
    (0..PAGES).for_each(|page| arena.write(page, &content(page)));
    arena
}

fn options() -> Options {
    Options {
        only_if_sooner: false,
        hybrid: false,
        batch: 32,
        time_limit: Duration::from_millis(100),
        ..Options::default()
    }
}

fn engine(faults: &[Faults], arena: &Arena) -> DsaEngine {
    let queue = |faults: &Faults| {
        let shape = Shape::sapphire_rapids();
        let queue = InProcess::new(shape, Timing::NONE, *faults, Reach::Mapped, Wanted::default()).unwrap();
        Box::new(queue) as Box<dyn WorkQueue>
    };
    let mut engine = DsaEngine::new(faults.iter().map(queue).collect(), options()).unwrap();
    engine.map(PageId(0), arena.pages(), arena.file()).unwrap();
    engine
}

fn ids() -> Vec<PageId> {
    (0..PAGES as u64).map(PageId).collect()
}

/// What the keys must be, by another implementation: bit by bit.
fn right_keys() -> Vec<Answer<u64>> {
    let crc = |page: usize| {
        let bytes = { content(page) }.into_iter().flat_map(u64::to_ne_bytes);
        let state = bytes.fold(u32::MAX, |state, byte| {
            (0..8).fold(state ^ u32::from(byte), |state, _| {
                (state >> 1) ^ if state & 1 != 0 { 0x82f6_3b78 } else { 0 }
            })
        });
        Ok(u64::from(!state))
    };
    (0..PAGES).map(crc).collect()
}

fn is_dead(answer: &Answer<u64>) -> bool {
    matches!(answer, Err(Error::Device(_)))
}

#[test]
fn keys_are_crc32c() {
    let arena = arena();
    let mut engine = engine(&[Faults::default()], &arena);
    assert_eq!(engine.keys(&arena, &ids()), right_keys());
    let (work, pages) = (engine.device_work(), ids().len() as u64);
    assert_eq!((work.requests, work.bytes), (pages, pages * 4096), "{work:?}");
    assert!(work.latency.count() > 0 && work.latency.count() <= pages);
    let wrong = work.errors().into_iter().chain(work.left_to_cpu());
    assert!(wrong.into_iter().all(|(_, count)| count == 0), "{work:?}");
}

#[test]
fn a_halted_device_is_reset_and_goes_on() {
    let arena = arena();
    for after in [1, 2, 40, 250] {
        let faults = Faults {
            halts_after: Some(after),
            ..Faults::default()
        };
        let mut engine = engine(&[faults], &arena);
        for _ in 0..2 {
            assert_eq!(engine.keys(&arena, &ids()), right_keys(), "after {after}");
        }
        assert_eq!(engine.device_work().resets, 1, "after {after}");
    }
}

#[test]
fn when_a_device_dies_the_cpu_ends_the_call_and_the_next_one_is_an_error() {
    let arena = arena();
    let dying = [
        Faults {
            halts_after: Some(100),
            halts_for_good: true,
            ..Faults::default()
        },
        Faults {
            lost: 65_536,
            ..Faults::default()
        },
    ];
    for faults in dying {
        let mut engine = engine(&[faults], &arena);
        assert_eq!(engine.keys(&arena, &ids()), right_keys());
        let work = engine.device_work();
        assert!(work.queues_lost == 1 && work.cpu_instead > 0, "{work:?}");
        let next = engine.keys(&arena, &ids());
        assert!(next.iter().all(is_dead), "{:?}", next[0]);
        assert!(engine.among(&arena, PageId(0), &[PageId(1), PageId(3)]).is_err());
    }
}

#[test]
fn another_queue_takes_over() {
    let arena = arena();
    let dying = Faults {
        halts_after: Some(50),
        halts_for_good: true,
        ..Faults::default()
    };
    let mut engine = engine(&[dying, Faults::default()], &arena);
    for _ in 0..3 {
        assert_eq!(engine.keys(&arena, &ids()), right_keys());
    }
    let work = engine.device_work();
    assert_eq!((work.queues_lost, work.cpu_instead), (1, 0), "{work:?}");
}

#[test]
fn records_that_are_lost_are_asked_for_again() {
    let arena = arena();
    // Some members of batches; a batch's own record is lost rarely, and costs a reset.
    let faults = Faults {
        lost: 1500,
        seed: 3,
        ..Faults::default()
    };
    let mut engine = engine(&[faults], &arena);
    assert_eq!(engine.keys(&arena, &ids()), right_keys());
    assert!(engine.device_work().again > 0, "{:?}", engine.device_work());
}

#[test]
fn a_queue_that_takes_nothing_is_given_up() {
    let arena = arena();
    let faults = Faults {
        retries: 65_536,
        ..Faults::default()
    };
    let wanted = Wanted {
        mode: Mode::Shared,
        ..Wanted::default()
    };
    let queue = InProcess::new(Shape::everything(), Timing::NONE, faults, Reach::Process, wanted).unwrap();
    let mut engine = DsaEngine::new(vec![Box::new(queue)], options()).unwrap();
    assert_eq!(engine.keys(&arena, &ids()), right_keys());
    let next = engine.keys(&arena, &ids()).swap_remove(0);
    assert!(next.unwrap_err().to_string().contains("takes nothing"));
    assert!(engine.device_work().full > 0);
}

/// Registers that always read the same.
struct Stuck(fn(u64) -> u64);

impl Registers for Stuck {
    fn read(&mut self, offset: u64) -> u64 {
        self.0(offset)
    }

    fn write(&mut self, _offset: u64, _value: u32) {}
}

#[test]
fn a_device_that_cannot_be_configured_says_why() {
    let set_up = |shape: Shape| {
        let wanted = Wanted::default();
        InProcess::new(shape, Timing::NONE, Faults::default(), Reach::Process, wanted).unwrap_err()
    };
    let mut fixed = Shape::sapphire_rapids();
    fixed.general.0 &= !GeneralCapability::CONFIGURABLE;
    assert_eq!(set_up(fixed), SetupError::Fixed);
    let mut shared = Shape::sapphire_rapids();
    shared.queues.0 &= !QueueCapability::DEDICATED;
    assert_eq!(set_up(shared), SetupError::Mode(Mode::Dedicated));
    let wanted = Wanted::default();
    assert_eq!(bring_up(&mut Stuck(|_| u64::MAX), wanted), Err(SetupError::Gone));
    // Its command status is active for ever.
    let mut hangs = Stuck(|offset| if offset == CMDSTS { 1 << 31 } else { 0 });
    let error = bring_up(&mut hangs, wanted).unwrap_err();
    assert_eq!(error, SetupError::Hangs(Command::ResetDevice));
    let mut refuses = Stuck(|offset| u64::from(offset == CMDSTS));
    let error = bring_up(&mut refuses, wanted).unwrap_err().to_string();
    assert!(error.starts_with("ResetDevice failed"), "{error}");
}

#[test]
fn a_queue_that_takes_no_page_is_refused_with_what_to_configure() {
    let shape = Shape::sapphire_rapids();
    let short = Shape {
        general: GeneralCapability::new(GeneralCapability::CONFIGURABLE, 11, 10),
        ..shape.clone()
    };
    let without_crc = Shape {
        operations: vec![Opcode::Batch, Opcode::Compare],
        ..shape
    };
    for (shape, text) in [
        (
            short,
            "cannot be used: an operation is of 2048 bytes at most, and a page has 4096: raise it",
        ),
        (
            without_crc,
            "cannot be used: it does no CrcGenerate: allow it (op_config)",
        ),
    ] {
        let queue = InProcess::new(
            shape,
            Timing::NONE,
            Faults::default(),
            Reach::Mapped,
            Wanted::default(),
        );
        let error = DsaEngine::new(vec![Box::new(queue.unwrap())], options()).err();
        let error = error.expect("it is refused").to_string();
        assert!(error.contains(text), "{error}");
    }
}

fn slot(arena: &Arena, page: usize) -> With<'_> {
    let id = PageId(page as u64);
    let address = std::ptr::from_ref(arena.view(id).unwrap()) as usize;
    #[allow(unsafe_code)] // pages by address
    // SAFETY: a page of the arena, which nobody writes any more.
    let page = unsafe { StablePage::at(address) };
    With::Slot { id, page }
}

/// A search of a tree of one page, which every third page is like.
#[test]
fn what_a_caller_has_to_do_is_done_while_the_device_compares() {
    let arena = arena();
    let (shape, faults) = (Shape::sapphire_rapids(), Faults::default());
    let queue = InProcess::new(
        shape,
        Timing::PUBLISHED,
        faults,
        Reach::Process,
        Wanted::default(),
    )
    .unwrap();
    let mut engine = DsaEngine::new(vec![Box::new(queue)], options()).unwrap();
    let tree: Vec<AtomicU64> = (0..words(1)).map(|_| AtomicU64::new(0)).collect();
    TreeWriter::new(&tree).insert(0, |_| Ordering::Equal);
    let mut times = 0;
    let mut work = || times += 1;
    let mut meanwhile = Meanwhile::new(&mut work);
    let searched = engine.search_keyed(&arena, TreeReader::new(&tree), &ids(), &mut meanwhile);
    assert!(meanwhile.is_done());
    assert_eq!(times, 1);
    for (page, searched) in searched.into_iter().enumerate() {
        let twin = page.is_multiple_of(3).then_some(PageId(0));
        assert_eq!(searched.map(|one| one.twin), Ok(twin), "{page}");
    }
}

/// Pairs of which every third is equal, through a verifier that does not trust. Returns what differs.
fn verify(verifier: &mut Verifier, arena: &Arena) -> Vec<usize> {
    let first = content(0);
    let taken = StablePage::from(&first);
    let pairs = (0..PAGES).map(|page| {
        let with = slot(arena, page);
        (Pair { taken, with }, page)
    });
    let mut different = Vec::new();
    assert!(verifier.verify(pairs, |page| different.push(*page), || true));
    different
}

#[test]
fn a_device_that_lies_is_found_out_and_believed_in_nothing() {
    let arena = arena();
    let right: Vec<usize> = (0..PAGES).filter(|page| page % 3 != 0).collect();
    for lies in [0, 3000, 65_536] {
        let faults = Faults {
            lies,
            seed: 9,
            ..Faults::default()
        };
        let mut verifier = Verifier::new(false, Duration::from_secs(20));
        verifier.attach(Box::new(engine(&[faults], &arena))).unwrap();
        assert_eq!(verify(&mut verifier, &arena), right, "lies: {lies}");
        assert_eq!(verifier.failure().is_some(), lies != 0, "lies: {lies}");
    }
}

#[test]
fn a_device_that_dies_while_it_verifies_leaves_the_rest_to_the_cpu() {
    let arena = arena();
    let right: Vec<usize> = (0..PAGES).filter(|page| page % 3 != 0).collect();
    let faults = Faults {
        halts_after: Some(100),
        halts_for_good: true,
        ..Faults::default()
    };
    let mut verifier = Verifier::new(true, Duration::from_secs(20));
    verifier.attach(Box::new(engine(&[faults], &arena))).unwrap();
    assert_eq!(verify(&mut verifier, &arena), right);
    let failure = verifier.failure().unwrap().to_string();
    assert!(failure.contains("halted"), "{failure}");
}

/// Aborted pairs end when they end, and their places come back.
#[test]
fn what_is_aborted_while_pages_are_missing_is_not_gone_on_with() {
    let arena = arena();
    let faults = Faults {
        page_faults: 30_000,
        seed: 4,
        ..Faults::default()
    };
    let mut engine = engine(&[faults], &arena);
    let same = content(0);
    let taken = StablePage::from(&same);
    let pair = Pair {
        taken,
        with: slot(&arena, 3),
    };
    let mut answers: Vec<PairAnswer> = Vec::new();
    for round in 0..200 {
        #[allow(unsafe_code)] // the trait's submit() is unsafe
        // SAFETY: the pages stay until the end of the test.
        let submitted = unsafe { engine.submit(round * 100, &[pair; 20]) }.unwrap();
        assert_eq!(submitted, 20, "round {round}");
        engine.abort();
        engine.poll(Duration::ZERO, &mut answers).unwrap();
    }
    assert_eq!(answers, []);
    let fair = Faults::default();
    drop(engine);
    let mut engine = self::engine(&[fair], &arena);
    #[allow(unsafe_code)] // the trait's submit() is unsafe
    // SAFETY: as above.
    let submitted = unsafe { engine.submit(1, &[pair]) }.unwrap();
    engine.poll(Duration::from_secs(1), &mut answers).unwrap();
    let equal = PairAnswer {
        number: 1,
        answer: Ok(Compared::Equal),
    };
    assert_eq!((submitted, answers), (1, vec![equal]));
}
