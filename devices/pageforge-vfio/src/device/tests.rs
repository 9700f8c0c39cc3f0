use super::*;
use crate::Line;
use crate::window::{INFO_DUPLICATE, INFO_KEY_READY, INFO_SCANNED, INFO_VALID, Job, WINDOW_BYTES};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::mapping::staging_memfd;

/// Page n, below 100, is full of words n. Reading waits while the gate is shut.
#[derive(Default)]
struct Numbers {
    shut: AtomicBool,
    interrupts: [AtomicU64; 17],
}

impl Memory for &Numbers {
    fn line(&self, page: Ppn, _line: usize) -> Option<Line> {
        while self.shut.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        (page.number() < 100).then(|| [page.number().to_be(); 8])
    }
}

impl Board for Numbers {
    fn memory(&self) -> impl Memory {
        self
    }

    fn interrupt(&self, vector: usize) {
        self.interrupts[vector].fetch_add(1, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Numbers")
    }
}

/// A device with two modules.
struct Machine {
    device: Device<Numbers>,
    board: Arc<Numbers>,
    window: Arc<Mapping>,
}

fn machine() -> Machine {
    let window = Arc::new(staging_memfd(WINDOW_BYTES).unwrap().1);
    let board = Arc::new(Numbers::default());
    let device = Device::new(2, Arc::clone(&window), Arc::clone(&board)).unwrap();
    Machine {
        device,
        board,
        window,
    }
}

/// Waits until something is so.
fn wait(mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "it did not come to that"
        );
        std::thread::sleep(Duration::from_micros(100));
    }
}

impl Machine {
    fn read(&self, register: u32) -> u32 {
        let mut bytes = [0; 4];
        self.device.read(register.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn write(&self, register: u32, value: u32) {
        self.device.write(register.into(), &value.to_le_bytes());
    }

    /// Writes a module's operands and calls a function; returns why it was refused.
    fn call(&self, module: u32, operands: &[(u32, u32)], function: u32) -> u32 {
        self.write(reg::REFUSED, 0);
        let at = reg::MODULES + module * reg::MODULE_STRIDE;
        operands
            .iter()
            .for_each(|(register, value)| self.write(at + register, *value));
        self.write(at + reg::FUNCTION, function);
        self.read(reg::REFUSED)
    }

    fn insert_ppn(&self, module: u32, index: u32, page: u32, less: u32, more: u32) -> u32 {
        let operands = [
            (reg::PPN_LOW, page),
            (reg::PPN_HIGH, 0),
            (reg::INDEX, index),
            (reg::LESS, less),
            (reg::MORE, more),
        ];
        self.call(module, &operands, Function::InsertPpn as u32)
    }

    fn insert_pfe(&self, module: u32, page: u32, last_refill: u32) -> u32 {
        let operands = [
            (reg::PPN_LOW, page),
            (reg::LAST_REFILL, last_refill),
            (reg::PTR, 0),
        ];
        self.call(module, &operands, Function::InsertPfe as u32)
    }

    /// INFO and KEY.
    fn info(&self, module: u32) -> (u32, u32) {
        assert_eq!(self.call(module, &[], Function::GetPfeInfo as u32), 0);
        let at = reg::MODULES + module * reg::MODULE_STRIDE;
        (self.read(at + reg::INFO), self.read(at + reg::KEY))
    }

    fn run(&self, module: u32) -> (u32, u32) {
        self.write(reg::DOORBELL, 1 << module);
        wait(|| self.info(module).0 & INFO_BUSY == 0);
        self.info(module)
    }

    fn window(&self) -> Window<'_> {
        Window::new(self.window.words())
    }
}

fn ptr(info: u32) -> u32 {
    info >> 8 & 0xff
}

#[test]
fn the_registers_tell_what_the_device_is() {
    let machine = machine();
    let shape = [0, reg::SHAPE, reg::TABLES, reg::RING].map(|register| machine.read(register));
    assert_eq!(shape, [reg::MAGIC, 2 | 1 << 16, 7936, 1024]);
}

#[test]
fn the_five_functions_find_a_duplicate_by_polling() {
    let machine = machine();
    assert_eq!(machine.insert_ppn(1, 0, 50, 1, 2), 0);
    assert_eq!(machine.insert_ppn(1, 1, 20, 31, 32), 0);
    assert_eq!(machine.insert_ppn(1, 2, 70, 33, 34), 0);
    assert_eq!(machine.insert_pfe(1, 70, 0), 0);
    assert_eq!(machine.info(1).0, INFO_VALID);
    let (info, key) = machine.run(1);
    assert_eq!(
        info & 0xff,
        INFO_SCANNED | INFO_DUPLICATE | INFO_KEY_READY | INFO_VALID
    );
    let code = u32::from(crate::ecc::word_code(70u64.to_be()));
    assert_eq!((ptr(info), key), (2, code * 0x0101_0101));
    assert_eq!(machine.info(0), (0, 0), "the other module has nothing");
}

#[test]
fn a_refill_goes_on_with_the_same_candidate() {
    let machine = machine();
    machine.insert_ppn(0, 0, 50, 31, 32);
    machine.insert_pfe(0, 60, 0);
    let (info, _) = machine.run(0);
    assert_eq!((ptr(info), info & 7), (32, INFO_SCANNED));
    assert_eq!(machine.call(0, &[], Function::Clear as u32), 0);
    machine.insert_ppn(0, 0, 80, 40, 41);
    let operands = [(reg::LAST_REFILL, 1), (reg::PTR, 0)];
    assert_eq!(machine.call(0, &operands, Function::UpdatePfe as u32), 0);
    let (info, _) = machine.run(0);
    assert_eq!((ptr(info), info & 7), (40, INFO_SCANNED | INFO_KEY_READY));
}

#[test]
fn what_is_wrong_is_refused_and_says_why() {
    let machine = machine();
    assert_eq!(machine.insert_ppn(0, 31, 50, 31, 32), Refusal::Index as u32);
    assert_eq!(machine.insert_ppn(0, 0, 50, 256, 32), Refusal::Pointer as u32);
    assert_eq!(
        machine.insert_ppn(0, 0, 50, 31, u32::MAX),
        Refusal::Pointer as u32
    );
    let high = [
        (reg::INDEX, 0),
        (reg::LESS, 31),
        (reg::MORE, 32),
        (reg::PPN_HIGH, 0x100),
    ];
    assert_eq!(
        machine.call(0, &high, Function::InsertPpn as u32),
        Refusal::Ppn as u32
    );
    assert_eq!(
        machine.call(0, &[], Function::UpdatePfe as u32),
        Refusal::NoCandidate as u32
    );
    let offsets = [(reg::OFFSETS, 0x1000_0000)];
    let refused = machine.call(0, &offsets, Function::UpdateEccOffset as u32);
    assert_eq!(refused, Refusal::Offset as u32);
    assert_eq!(machine.call(0, &[], 7), Refusal::Function as u32);
    machine.write(reg::RING_TAIL, 1025);
    assert_eq!(machine.read(reg::REFUSED), Refusal::Ring as u32);
    assert_eq!(machine.read(reg::RING_TAIL), 0);
}

#[test]
fn offsets_choose_the_key() {
    let machine = machine();
    assert_eq!(
        machine.call(
            0,
            &[(reg::OFFSETS, 0x0f0e_0d0c)],
            Function::UpdateEccOffset as u32
        ),
        0
    );
    machine.insert_pfe(0, 7, 1);
    assert_eq!(machine.run(0).0 & INFO_KEY_READY, INFO_KEY_READY);
}

#[test]
fn a_busy_module_refuses_functions_and_says_so() {
    let machine = machine();
    machine.insert_ppn(0, 0, 50, 31, 32);
    machine.insert_pfe(0, 60, 0);
    machine.board.shut.store(true, Ordering::Release);
    machine.write(reg::DOORBELL, 1);
    assert_eq!(machine.insert_ppn(0, 1, 50, 31, 32), Refusal::Busy as u32);
    assert_eq!(machine.insert_pfe(0, 60, 0), Refusal::Busy as u32);
    assert_eq!(machine.info(0), (INFO_BUSY, 0));
    assert_eq!(
        machine.insert_ppn(1, 1, 50, 31, 32),
        0,
        "the other module is free"
    );
    machine.board.shut.store(false, Ordering::Release);
    wait(|| machine.info(0).0 & INFO_BUSY == 0);
    assert_eq!(ptr(machine.info(0).0), 32);
}

#[test]
fn scanned_raises_the_modules_interrupt_if_it_is_enabled() {
    let machine = machine();
    let raised = |vector: usize| machine.board.interrupts[vector].load(Ordering::Acquire);
    machine.insert_pfe(1, 7, 0);
    machine.run(1);
    assert_eq!((machine.read(reg::INTERRUPTS), raised(2)), (2, 0));
    machine.write(reg::INTERRUPTS, 2);
    machine.write(reg::ENABLE, 2);
    machine.insert_pfe(1, 7, 0);
    machine.run(1);
    wait(|| raised(2) == 1);
    assert_eq!(machine.read(reg::INTERRUPTS), 2);
}

#[test]
fn one_doorbell_starts_all_jobs_of_the_ring() {
    let machine = machine();
    let entry = OtherPage {
        ppn: Ppn::try_new(50).unwrap(),
        less: Pointer::new(31),
        more: Pointer::new(32),
    };
    machine.window().set_entry(9, EntryIndex::ROOT, Some(entry));
    for number in 0..100 {
        let candidate = Candidate {
            ppn: Ppn::try_new(number.into()).unwrap(),
            last_refill: false,
            ptr: Pointer::ROOT,
        };
        machine.window().set_job(number, &Job { candidate, table: 9 });
    }
    machine.write(reg::ENABLE, reg::RING_BIT);
    machine.write(reg::RING_TAIL, 100);
    wait(|| machine.board.interrupts[0].load(Ordering::Acquire) == 1);
    assert_eq!(machine.window().head(), 100);
    let ends = |numbers: std::ops::Range<u32>| {
        let ends = numbers.map(|number| machine.window().outcome(number).ptr.bits());
        ends.collect::<std::collections::HashSet<_>>()
    };
    assert_eq!((ends(0..50), ends(51..100)), ([31].into(), [32].into()));
    assert!(machine.window().outcome(50).duplicate);
    assert_eq!(machine.read(reg::ACCOUNT), 100);
}

#[test]
fn a_reset_forgets_everything_even_while_busy() {
    let machine = machine();
    machine.insert_pfe(0, 60, 1);
    machine.board.shut.store(true, Ordering::Release);
    machine.write(reg::DOORBELL, 1);
    machine.write(reg::RESET, 1);
    assert_eq!(machine.info(0), (0, 0));
    machine.board.shut.store(false, Ordering::Release);
    // The worker comes back with a module that nobody wants any more.
    machine.insert_pfe(1, 7, 1);
    machine.run(1);
    assert_eq!(machine.info(0), (0, 0));
    assert_eq!(machine.read(reg::INTERRUPTS), 2);
    assert_eq!(
        machine.read(reg::ACCOUNT),
        1,
        "only what came after the reset counts"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any accesses in any order; afterwards the device still does its work.
    #[test]
    fn any_access_leaves_a_device_that_works(
        accesses in proptest::collection::vec(
            (any::<bool>(), prop_oneof![0..0x500u64, any::<u64>()], 0..20usize, any::<u64>()), 0..200),
        words in proptest::collection::vec((0..WINDOW_BYTES / 8, any::<u64>()), 0..50),
    ) {
        let machine = machine();
        for (at, word) in words {
            machine.window.words()[at].store(word, Ordering::Relaxed);
        }
        for (write, offset, len, value) in accesses {
            let mut data: Vec<u8> = value.to_le_bytes().into_iter().cycle().take(len).collect();
            if write {
                machine.device.write(offset, &data);
            } else {
                machine.device.read(offset, &mut data);
            }
        }
        machine.write(reg::RESET, 1);
        machine.insert_ppn(0, 0, 50, 31, 32);
        machine.insert_pfe(0, 50, 0);
        prop_assert_eq!(machine.run(0).0 & INFO_DUPLICATE, INFO_DUPLICATE);
    }
}
