//! The model against an exact oracle: random operations, every byte that is read compared.
//!
//! `PAGE_OVERLAYS_OPERATIONS` sets how many operations each test does. Without it one does a million, and each of the
//! others a quarter of that.

mod oracle;

use oracle::{Name, Oracle};
use vmm_dedup_page_overlays::{
    Config, Contents, Dice, Issue, LINE_BYTES, Machine, MachineError, ObitsFetch, OnWrite, PAGE_BYTES, Pid,
    Promotion,
};

const MANY: u64 = 1_000_000;
const SOME: u64 = 250_000;
/// Processes that there may be; forks and exits keep changing which.
const PROCESSES: u64 = 6;
/// Pages that each process begins with, of each kind.
const PAGES: u64 = 24;

fn operations(unless_set: u64) -> u64 {
    let set = std::env::var("PAGE_OVERLAYS_OPERATIONS").ok();
    set.map_or(unless_set, |number| {
        number.parse().expect("a number of operations")
    })
}

fn pid(number: u16) -> Pid {
    Pid::try_new(number).unwrap()
}

/// A machine, the oracle, and chance.
struct Pair {
    machine: Machine,
    oracle: Oracle,
    dice: Dice,
    cores: u64,
}

impl Pair {
    fn new(config: Config, seed: u64) -> Self {
        let overlay = config.os.on_write == OnWrite::Overlay;
        let mut pair = Self {
            machine: Machine::try_new(config).unwrap(),
            oracle: Oracle::new(overlay, config.os.promote_at),
            dice: Dice::new(seed),
            cores: config.cores as u64,
        };
        pair.begin(1);
        pair
    }

    /// Maps a process's first pages, with gaps between them so that overlays have many leaves.
    fn begin(&mut self, process: u16) {
        let kinds = [Contents::Own, Contents::Zeros, Contents::WithMetadata];
        for (kind, contents) in (0u64..).zip(kinds) {
            for page in 0..PAGES {
                let number = (kind << 24) + page * (1 + kind * 300);
                self.machine
                    .map(pid(process), number * PAGE_BYTES as u64, 1, contents)
                    .unwrap();
                self.oracle.map((process, number), contents);
            }
        }
    }

    fn core(&mut self) -> usize {
        usize::try_from(self.dice.below(self.cores)).unwrap()
    }

    /// Any page; half of the time one of a few, so that several cores have the same lines in small caches.
    fn any_page(&mut self) -> Name {
        let names = self.oracle.names();
        let from = if self.dice.below(2) == 0 {
            4
        } else {
            names.len() as u64
        };
        names[usize::try_from(self.dice.below(from)).unwrap()]
    }

    /// An access within a line: where in the page, and how many bytes. Half of the time it is one of a few lines.
    fn any_bytes(&mut self) -> (usize, usize) {
        let from = if self.dice.below(2) == 0 { 3 } else { 64 };
        let line = usize::try_from(self.dice.below(from)).unwrap();
        let at = usize::try_from(self.dice.below(64)).unwrap();
        let bytes = 1 + usize::try_from(self.dice.below((LINE_BYTES - at) as u64)).unwrap();
        (line * LINE_BYTES + at, bytes)
    }

    fn issue(&mut self) -> Issue {
        if self.dice.below(4) == 0 {
            Issue::AfterLoad
        } else {
            Issue::Free
        }
    }

    fn read(&mut self, name: Name, at: usize, bytes: usize) {
        let mut read = [0; LINE_BYTES];
        let (core, issue) = (self.core(), self.issue());
        let address = name.1 * PAGE_BYTES as u64 + at as u64;
        self.machine
            .read(core, pid(name.0), address, &mut read[..bytes], issue)
            .unwrap();
        assert_eq!(
            &read[..bytes],
            self.oracle.read(name, at, bytes),
            "{name:?} at {at}"
        );
    }

    fn read_metadata(&mut self, name: Name, at: usize, bytes: usize) {
        let mut read = [0; LINE_BYTES];
        let (core, issue) = (self.core(), self.issue());
        let address = name.1 * PAGE_BYTES as u64 + at as u64;
        let done = self
            .machine
            .read_metadata(core, pid(name.0), address, &mut read[..bytes], issue);
        match self.oracle.read_metadata(name, at, bytes) {
            Some(expected) => assert_eq!((done, &read[..bytes]), (Ok(()), expected), "{name:?} at {at}"),
            None => assert!(matches!(done, Err(MachineError::NoMetadata { .. }))),
        }
    }

    fn write(&mut self, metadata: bool) {
        let name = self.any_page();
        let (at, bytes) = self.any_bytes();
        let data: Vec<u8> = (0..bytes).map(|_| self.dice.any().to_le_bytes()[0]).collect();
        let (core, issue) = (self.core(), self.issue());
        let address = name.1 * PAGE_BYTES as u64 + at as u64;
        if metadata {
            let done = self
                .machine
                .write_metadata(core, pid(name.0), address, &data, issue);
            assert_eq!(done.is_ok(), self.oracle.write_metadata(name, at, &data));
        } else {
            self.machine
                .write(core, pid(name.0), address, &data, issue)
                .unwrap();
            self.oracle.write(name, at, &data);
        }
    }

    fn promote(&mut self) {
        let name = self.any_page();
        let ways = [Promotion::CopyAndCommit, Promotion::Commit, Promotion::Discard];
        let how = ways[usize::try_from(self.dice.below(3)).unwrap()];
        let core = self.core();
        let done = self
            .machine
            .promote(core, pid(name.0), name.1 * PAGE_BYTES as u64, how);
        assert_eq!(
            done.is_ok(),
            self.oracle.promote(name, how),
            "{name:?} {how:?} {done:?}"
        );
    }

    /// A fork, an exit, or both; there is always a process.
    fn processes(&mut self) {
        let child = 1 + u16::try_from(self.dice.below(PROCESSES)).unwrap();
        let parent = self.any_page().0;
        if child == parent {
            return;
        }
        self.machine.exit(pid(child));
        self.oracle.exit(child);
        if self.dice.below(8) == 0 {
            self.begin(child);
        } else {
            let core = self.core();
            self.machine.fork(core, pid(parent), pid(child)).unwrap();
            self.oracle.fork(parent, child);
        }
    }

    fn step(&mut self) {
        match self.dice.below(10_000) {
            0..4500 => {
                let name = self.any_page();
                let (at, bytes) = self.any_bytes();
                self.read(name, at, bytes);
            }
            4500..8800 => self.write(false),
            8800..9200 => {
                let name = self.any_page();
                let (at, bytes) = self.any_bytes();
                self.read_metadata(name, at, bytes);
            }
            9200..9900 => self.write(true),
            9900..9980 => self.promote(),
            9980..9990 => self.processes(),
            9990..9995 => {
                let (core, process) = (self.core(), self.any_page().0);
                self.machine.speculate(core, pid(process)).unwrap();
                self.oracle.speculate(process);
            }
            _ => self.machine.flush(),
        }
    }

    /// Compares every line of every page.
    fn compare_all(&mut self) {
        for name in self.oracle.names() {
            for at in (0..PAGE_BYTES).step_by(LINE_BYTES) {
                self.read(name, at, LINE_BYTES);
                if self.oracle.has_metadata(name) {
                    self.read_metadata(name, at, LINE_BYTES);
                }
            }
        }
        let memory = self.machine.memory_in_use();
        assert_eq!(memory.overlay_lines, self.oracle.overlay_bytes());
        assert!(memory.segments <= memory.store);
    }

    fn run(mut self, operations: u64) -> Machine {
        let operations = self::operations(operations);
        for operation in 1..=operations {
            self.step();
            if operation.is_multiple_of(operations / 4) {
                self.compare_all();
            }
        }
        // Nothing is left of processes that ended.
        for process in 1..=u16::try_from(PROCESSES).unwrap() {
            self.machine.exit(pid(process));
        }
        self.machine.flush();
        let memory = self.machine.memory_in_use();
        assert_eq!(
            (memory.pages, memory.overlay_lines, memory.segments, memory.omt),
            (0, 0, 0, 0)
        );
        self.machine
    }
}

/// Everything is so small that lines, entries and translations go and come all the time.
fn small(on_write: OnWrite, cores: usize) -> Config {
    let mut config = Config::table_2(on_write);
    config.cores = cores;
    config.l1.bytes = 2 << 10;
    config.l2.bytes = 4 << 10;
    config.l3.bytes = 16 << 10;
    config.tlb.l1_entries = 8;
    config.tlb.l2_entries = 16;
    config.omt.entries = 4;
    config.omt.walks = 1;
    config.os.store_pages = 1;
    config
}

#[test]
fn table_2_holds_what_was_written() {
    let machine = Pair::new(Config::table_2(OnWrite::Overlay), 1).run(SOME);
    let account = machine.account(0).unwrap();
    assert!(account.events.overlaying_writes > 0 && account.store.migrations > 0);
}

#[test]
fn small_caches_on_four_cores_hold_what_was_written() {
    let machine = Pair::new(small(OnWrite::Overlay, 4), 2).run(MANY);
    let account = machine.account(0).unwrap();
    assert!(account.tlb.bits_set_by_messages > account.events.overlaying_writes);
    assert!(account.omt.metadata_writes > 0 && account.omt.metadata_reads > 0);
    assert!(account.store.migrations > 0 && account.store.splits > 0);
}

#[test]
fn overlays_that_become_pages_hold_what_was_written() {
    let mut config = small(OnWrite::Overlay, 2);
    config.os.promote_at = Some(20);
    config.tlb.obits = ObitsFetch::AfterWalk;
    let machine = Pair::new(config, 3).run(SOME);
    assert!(machine.account(0).unwrap().events.promotions > 0);
}

#[test]
fn copy_on_write_holds_what_was_written() {
    let machine = Pair::new(small(OnWrite::Copy, 3), 4).run(SOME);
    let events = machine.account(0).unwrap().events;
    assert!(events.pages_copied > 0 && events.faults > events.pages_copied);
}
