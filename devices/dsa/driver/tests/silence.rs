//! A completion that never comes: the device is asked, what it has is aborted, then it is reset, then it is given up.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::compare::{Arena, Engine, Keys, PageId};
use vmm_dedup_dsa::{
    DsaEngine, InProcess, Options, QueueLimits, Reach, Registers, SetupError, Trouble, Wanted, WorkQueue,
    abort,
};
use vmm_dedup_dsa_abi::registers::{CMD, CMDSTS, SoftwareError};
use vmm_dedup_dsa_abi::{Command, CommandError, Descriptor, DeviceAddress, Status};
use vmm_dedup_dsa_model::{Faults, Shape, Timing};
use vmm_dedup_protocol::key::PAGE_WORDS;

const PAGES: usize = 64;
const LIMIT: Duration = Duration::from_millis(30);
/// Each of 65,536: no record is ever written.
const ALL: u32 = 65_536;

/// The model, which counts how it was helped, tells of an error, and cannot abort if it is told not to.
struct Watched {
    model: InProcess,
    error: Option<u8>,
    can_abort: bool,
    helped: Arc<Helped>,
}

#[derive(Default)]
struct Helped {
    aborts: AtomicUsize,
    resets: AtomicUsize,
}

impl Helped {
    fn counts(&self) -> (usize, usize) {
        (
            self.aborts.load(Ordering::Relaxed),
            self.resets.load(Ordering::Relaxed),
        )
    }
}

impl WorkQueue for Watched {
    fn name(&self) -> &str {
        "wq7.3"
    }

    fn limits(&self) -> QueueLimits {
        self.model.limits()
    }

    fn uses_process_addresses(&self) -> bool {
        self.model.uses_process_addresses()
    }

    fn submit(&mut self, descriptor: &Descriptor) -> Result<bool, Trouble> {
        self.model.submit(descriptor)
    }

    fn relax(&mut self, status: &AtomicU64) {
        self.model.relax(status);
    }

    fn trouble(&mut self) -> Option<Trouble> {
        let address = 0x7000;
        self.error.map(|error| Trouble::Software { error, address })
    }

    fn abort(&mut self) -> bool {
        self.helped.aborts.fetch_add(1, Ordering::Relaxed);
        self.can_abort && self.model.abort()
    }

    fn reset(&mut self) -> Result<(), Trouble> {
        self.helped.resets.fetch_add(1, Ordering::Relaxed);
        self.model.reset()
    }

    fn map(
        &mut self,
        at: DeviceAddress,
        bytes: usize,
        file: BorrowedFd<'_>,
        writable: bool,
    ) -> Result<(), Trouble> {
        self.model.map(at, bytes, file, writable)
    }

    fn unmap(&mut self, at: DeviceAddress, bytes: usize) -> Result<(), Trouble> {
        self.model.unmap(at, bytes)
    }

    fn borrowed_cpu_ns(&self) -> u64 {
        self.model.borrowed_cpu_ns()
    }
}

fn arena() -> Arena {
    let arena = Arena::new(PAGES).unwrap();
    (0..PAGES).for_each(|page| arena.write(page, &[page as u64; PAGE_WORDS]));
    arena
}

/// An engine of one such device, each page a descriptor of its own.
fn engine(arena: &Arena, faults: Faults, error: Option<u8>, can_abort: bool) -> (DsaEngine, Arc<Helped>) {
    let shape = Shape::sapphire_rapids();
    let model = InProcess::new(shape, Timing::NONE, faults, Reach::Mapped, Wanted::default()).unwrap();
    let helped = Arc::new(Helped::default());
    let queue = Watched {
        model,
        error,
        can_abort,
        helped: helped.clone(),
    };
    let options = Options {
        batch: 1,
        time_limit: LIMIT,
        ..Options::default()
    };
    let mut engine = DsaEngine::new(vec![Box::new(queue)], options).unwrap();
    engine.map(PageId(0), arena.pages(), arena.file()).unwrap();
    (engine, helped)
}

fn ids() -> Vec<PageId> {
    (0..PAGES as u64).map(PageId).collect()
}

/// The keys that a good device makes.
fn right(arena: &Arena) -> Vec<u64> {
    let (mut good, helped) = engine(arena, Faults::default(), None, true);
    let keys = good.keys(arena, &ids());
    assert_eq!(helped.counts(), (0, 0));
    keys.into_iter().map(Result::unwrap).collect()
}

/// The keys, how it was helped, and what the next call says.
fn keys(faults: Faults, error: Option<u8>, can_abort: bool) -> ((usize, usize), Option<String>) {
    let arena = arena();
    let (mut engine, helped) = engine(&arena, faults, error, can_abort);
    let keys = engine.keys(&arena, &ids());
    let keys: Vec<u64> = keys.into_iter().map(Result::unwrap).collect();
    assert_eq!(keys, right(&arena));
    let next = engine.keys(&arena, &ids()).swap_remove(0);
    (helped.counts(), next.err().map(|error| error.to_string()))
}

fn one_lost() -> Faults {
    Faults {
        loses: Some(5),
        ..Faults::default()
    }
}

fn all_lost() -> Faults {
    Faults {
        lost: ALL,
        ..Faults::default()
    }
}

#[test]
fn what_is_silent_is_aborted_and_submitted_again() {
    assert_eq!(keys(one_lost(), None, true), ((1, 0), None));
}

#[test]
fn a_device_that_cannot_abort_is_reset() {
    assert_eq!(keys(one_lost(), None, false), ((1, 1), None));
}

#[test]
fn one_that_stays_silent_is_aborted_once_reset_twice_and_given_up() {
    let start = Instant::now();
    let (helped, next) = keys(all_lost(), None, true);
    assert_eq!(helped, (1, 2));
    let next = next.unwrap();
    assert!(
        next.contains("wq7.3") && next.contains("does not answer"),
        "{next}"
    );
    // Four times the limit, and time for a busy machine.
    assert!(start.elapsed() < LIMIT * 4 + Duration::from_secs(5));
}

#[test]
fn what_the_device_says_decides_what_is_done() {
    let full = keys(one_lost(), Some(SoftwareError::QUEUE_FULL), true);
    assert_eq!(full, ((1, 0), None));
    let disabled = keys(one_lost(), Some(SoftwareError::QUEUE_DISABLED), true);
    assert_eq!(disabled, ((0, 1), None));
    let (helped, next) = keys(all_lost(), Some(Status::Opcode as u8), true);
    assert_eq!(helped, (0, 0));
    let next = next.unwrap();
    assert!(
        next.contains("0x10 at 0x7000") && next.contains("op_config"),
        "{next}"
    );
}

/// Registers of which one reads as it is told, and which note the command that was given.
struct Fixed(u64, u32);

impl Registers for Fixed {
    fn read(&mut self, offset: u64) -> u64 {
        if offset == CMDSTS { self.0 } else { 0 }
    }

    fn write(&mut self, offset: u64, value: u32) {
        assert_eq!(offset, CMD);
        self.1 = value;
    }
}

#[test]
fn an_abort_that_the_device_refuses_or_never_ends_is_an_error() {
    let mut good = Fixed(0, 0);
    assert_eq!(abort(&mut good), Ok(()));
    // Command 9 in bits 24:20, queue 0 in the mask.
    assert_eq!(good.1, 9 << 20 | 1);
    let refused = SetupError::Refused {
        command: Command::AbortQueue,
        error: CommandError::Hardware,
    };
    assert_eq!(abort(&mut Fixed(CommandError::Hardware as u64, 0)), Err(refused));
    let hangs = SetupError::Hangs(Command::AbortQueue);
    assert_eq!(abort(&mut Fixed(1 << 31, 0)), Err(hangs));
}
