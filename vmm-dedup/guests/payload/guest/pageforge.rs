//! Drives a PageForge on PCI through all that it does, and says whether the answers were right.
//!
//! What is right is worked out here, from the pages: which of them are equal, which is greater, and the hash key from the
//! definition of the error-correcting code.

use crate::machine;
use crate::memory::Memory;
use crate::bars::{Device, read32, read64, write32, write64};
use crate::say;
use vmm_dedup_pageforge_registers::{self as reg, Function, Refusal};

/// Vendor and device number.
const ID: u32 = 0x10f5_1af4;
const PAGE_WORDS: usize = 512;
/// Nodes of the tree, which has three levels; two candidates come behind them.
const TREE: usize = 7;
const TWIN: usize = TREE;
const STRANGER: usize = TREE + 1;
const PAGES: usize = TREE + 2;
/// The tree's node that the twin is a copy of: the left child of the root's right child.
const TWIN_OF: u32 = 5;

/// Bits of INFO.
const SCANNED: u32 = 1;
const DUPLICATE: u32 = 2;
const KEY_READY: u32 = 4;
const BUSY: u32 = 8;

/// The window's layout, as far as it is used: jobs of 4 words from word 512 on, tables of 32 from word 8192 on.
const JOBS: u32 = 512 * 8;
const TABLES: u32 = 8192 * 8;

/// Places in which a module is driven: each has registers of its own.
const POLLED: u32 = 0;
const INTERRUPTING: u32 = 1;

/// How long an answer may take: the host may be busy. In tries of a millisecond.
const TRIES: u32 = 60_000;

/// Checks the device; returns whether all was right.
pub fn check(memory: &mut Memory) -> bool {
    let Ok(words) = memory.take_words((PAGES * PAGE_WORDS) as u64) else {
        return report("memory", false, 0);
    };
    let Some(device) = Device::find(ID) else {
        return report("found", false, 0);
    };
    device.enable();
    let forge = Forge {
        registers: device.bar(0),
        window: device.bar(2),
        first_page: words.as_ptr() as u64 / 4096,
    };
    fill(words);
    let key = key_of(&words[TWIN * PAGE_WORDS..], [3, 9, 5, 12]);
    // All of them, although one may have failed.
    [
        report(
            "found",
            read32(forge.registers) == reg::MAGIC,
            device.read(0).into(),
        ),
        forge.finds_the_twin(key),
        forge.refills_for_the_stranger(key_of(&words[STRANGER * PAGE_WORDS..], [3, 9, 5, 12])),
        forge.takes_other_offsets(key_of(&words[TWIN * PAGE_WORDS..], [0, 1, 2, 15])),
        forge.tells_of_bad_pages(),
        forge.refuses_bad_entries(),
        forge.interrupts(&device, key),
        forge.runs_jobs_from_its_window(),
    ]
    .into_iter()
    .all(|right| right)
}

fn report(name: &str, right: bool, got: u64) -> bool {
    say!(
        "check name={name} status={} got={got}",
        if right { "ok" } else { "bad" }
    );
    right
}

/// Pages that differ only in word 300, which holds their rank in the order of content, highest byte first.
fn fill(words: &mut [u64]) {
    // Of the tree's nodes in breadth-first order; the twin; the stranger.
    let ranks = [4, 2, 6, 1, 3, 5, 7, 5, 8];
    for (page, rank) in words.chunks_exact_mut(PAGE_WORDS).zip(ranks) {
        for (at, word) in page.iter_mut().enumerate() {
            *word = (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        page[300] = u64::swap_bytes(rank);
    }
}

/// The key by the definition: for each offset the code of the line's first word.
fn key_of(page: &[u64], offsets: [usize; 4]) -> u32 {
    let code = |section: usize| code_of(page[(section * 16 + offsets[section]) * 8]);
    u32::from_le_bytes([code(0), code(1), code(2), code(3)])
}

/// (72,64) SECDED: the exclusive or of the numbers of the bits that are set, and the parity of all.
fn code_of(word: u64) -> u8 {
    let numbers = (3..72u8).filter(|number| !number.is_power_of_two());
    let set = numbers.enumerate().filter(|(bit, _)| word >> bit & 1 == 1);
    let check = set.fold(0, |sum, (_, number)| sum ^ number);
    let parity = (word.count_ones() + check.count_ones()) % 2;
    check | (parity as u8) << 7
}

struct Forge {
    registers: u32,
    window: u32,
    first_page: u64,
}

impl Forge {
    fn module(&self, module: u32, register: u32) -> u32 {
        self.registers + reg::MODULES + module * reg::MODULE_STRIDE + register
    }

    fn set(&self, module: u32, operands: &[(u32, u32)], function: Function) {
        for (register, value) in operands {
            write32(self.module(module, *register), *value);
        }
        write32(self.module(module, reg::FUNCTION), function as u32);
    }

    fn page(&self, page: usize) -> u64 {
        self.first_page + page as u64
    }

    fn insert_ppn(&self, module: u32, index: u32, page: u64, less: u32, more: u32) {
        let operands = [
            (reg::PPN_LOW, page as u32),
            (reg::PPN_HIGH, (page >> 32) as u32),
            (reg::INDEX, index),
            (reg::LESS, less),
            (reg::MORE, more),
        ];
        self.set(module, &operands, Function::InsertPpn);
    }

    fn insert_pfe(&self, module: u32, page: u64, last_refill: u32) {
        let operands = [
            (reg::PPN_LOW, page as u32),
            (reg::PPN_HIGH, (page >> 32) as u32),
            (reg::LAST_REFILL, last_refill),
            (reg::PTR, 0),
        ];
        self.set(module, &operands, Function::InsertPfe);
    }

    /// The whole tree in one table; ways out of it have the numbers from 31 on.
    fn insert_tree(&self, module: u32) {
        self.set(module, &[], Function::Clear);
        for node in 0..TREE as u32 {
            let child = |n: u32| if n < TREE as u32 { n } else { 24 + n };
            self.insert_ppn(
                module,
                node,
                self.page(node as usize),
                child(2 * node + 1),
                child(2 * node + 2),
            );
        }
    }

    /// INFO and KEY.
    fn info(&self, module: u32) -> (u32, u32) {
        self.set(module, &[], Function::GetPfeInfo);
        (
            read32(self.module(module, reg::INFO)),
            read32(self.module(module, reg::KEY)),
        )
    }

    fn trigger(&self, module: u32) {
        write32(self.registers + reg::DOORBELL, 1 << module);
    }

    /// Triggers a module and polls until Scanned is set.
    fn poll(&self, module: u32) -> (u32, u32) {
        self.trigger(module);
        for _ in 0..TRIES {
            let (info, key) = self.info(module);
            if info & SCANNED != 0 && info & BUSY == 0 {
                return (info, key);
            }
            machine::sleep_ns(1_000_000);
        }
        (0, 0)
    }

    fn finds_the_twin(&self, key: u32) -> bool {
        self.insert_tree(POLLED);
        self.insert_pfe(POLLED, self.page(TWIN), 0);
        let (info, got) = self.poll(POLLED);
        let flags = SCANNED | DUPLICATE | KEY_READY;
        report(
            "twin",
            info & 0xf == flags && info >> 8 & 0xff == TWIN_OF,
            info.into(),
        ) & report("key", got == key, got.into())
    }

    /// The stranger is greater than all; its key comes with the last refill only.
    fn refills_for_the_stranger(&self, key: u32) -> bool {
        self.insert_pfe(POLLED, self.page(STRANGER), 0);
        let (first, _) = self.poll(POLLED);
        let way_out = 24 + 2 * (TREE as u32 - 1) + 2;
        self.set(POLLED, &[], Function::Clear);
        self.insert_ppn(POLLED, 0, self.page(0), 40, 41);
        self.set(
            POLLED,
            &[(reg::LAST_REFILL, 1), (reg::PTR, 0)],
            Function::UpdatePfe,
        );
        let (last, got) = self.poll(POLLED);
        report(
            "stranger",
            first & 0xf == SCANNED && first >> 8 & 0xff == way_out,
            first.into(),
        ) & report(
            "refill",
            last & 0xf == SCANNED | KEY_READY && last >> 8 & 0xff == 41,
            last.into(),
        ) & report("refill-key", got == key, got.into())
    }

    fn takes_other_offsets(&self, key: u32) -> bool {
        self.set(POLLED, &[(reg::OFFSETS, 0x0f02_0100)], Function::UpdateEccOffset);
        self.set(POLLED, &[], Function::Clear);
        self.insert_pfe(POLLED, self.page(TWIN), 1);
        let (_, got) = self.poll(POLLED);
        report("offsets", got == key, got.into())
    }

    /// A page that no memory has: an error in INFO.
    fn tells_of_bad_pages(&self) -> bool {
        self.insert_ppn(POLLED, 0, 0xff_0000_0000, 31, 32);
        self.insert_pfe(POLLED, self.page(TWIN), 0);
        let (info, _) = self.poll(POLLED);
        report("bad-page", info & 0xf == SCANNED && info >> 16 == 2, info.into())
    }

    fn refuses_bad_entries(&self) -> bool {
        write32(self.registers + reg::REFUSED, 0);
        self.insert_ppn(POLLED, 31, self.page(0), 31, 32);
        let why = read32(self.registers + reg::REFUSED);
        report("bad-entry", why == Refusal::Index as u32, why.into())
    }

    fn interrupts(&self, device: &Device, key: u32) -> bool {
        if !device.use_msix(1 + INTERRUPTING) {
            return report("msix", false, 0);
        }
        write32(self.registers + reg::ENABLE, 1 << INTERRUPTING);
        self.insert_tree(INTERRUPTING);
        self.insert_pfe(INTERRUPTING, self.page(TWIN), 0);
        let before = machine::device_interrupts();
        self.trigger(INTERRUPTING);
        let mut tries = 0;
        while machine::device_interrupts() == before && tries < TRIES {
            machine::sleep_ns(1_000_000);
            tries += 1;
        }
        let raised = machine::device_interrupts() - before;
        let (info, got) = self.info(INTERRUPTING);
        report("msix", raised == 1, raised)
            & report(
                "msix-twin",
                info & DUPLICATE != 0 && info >> 8 & 0xff == TWIN_OF && got == key,
                info.into(),
            )
    }

    /// The tree as a table of the window, and a job for each of its pages: each is its own twin.
    fn runs_jobs_from_its_window(&self) -> bool {
        for node in 0..TREE as u64 {
            let (less, more) = (2 * node + 1, 2 * node + 2);
            let child = |n: u64| if n < TREE as u64 { n } else { 24 + n };
            let entry = 1 << 63 | child(more) << 48 | child(less) << 40 | self.page(node as usize);
            write64(self.window + TABLES + node as u32 * 8, entry);
        }
        for job in 0..TREE as u32 {
            write64(self.window + JOBS + job * 32, self.page(job as usize));
            write64(self.window + JOBS + job * 32 + 8, 0);
        }
        write32(self.registers + reg::RING_TAIL, TREE as u32);
        let mut tries = 0;
        while read64(self.window) != TREE as u64 && tries < TRIES {
            machine::sleep_ns(1_000_000);
            tries += 1;
        }
        let outcome = |job: u32| read64(self.window + JOBS + job * 32 + 16) as u32;
        let right = |job: u32| outcome(job) & 3 == SCANNED | DUPLICATE && outcome(job) >> 8 & 0xff == job;
        report("ring", (0..TREE as u32).all(right), read64(self.window))
    }
}
