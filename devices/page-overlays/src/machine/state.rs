//! The machine's parts, and what the rest of it is built of: translation, and loads and stores of lines.

use crate::account::{Account, EventCounters, MemoryInUse, TlbCounters};
use crate::address::{AddressError, LineAddress, Page, Pid};
use crate::config::{Config, ConfigError, ObitsFetch};
use crate::hierarchy::Hierarchy;
use crate::obits::OBitVector;
use crate::pipeline::{Issue, Pipeline};
use crate::processes::Processes;
use crate::sizes::{LINE_BYTES, LINES, LineBytes, PAGE_BYTES, index, number};
use crate::tlb::{OverlayUse, Tlb, Translation};

/// What cannot be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MachineError {
    /// Such a machine cannot be.
    #[error("the machine's parameters")]
    Config(#[from] ConfigError),
    /// Such an address cannot be.
    #[error("an address")]
    Address(#[from] AddressError),
    /// There is no such core.
    #[error("there is no core {core}: the machine has {cores}")]
    Core {
        /// The core that was asked for.
        core: usize,
        /// How many there are.
        cores: usize,
    },
    /// Nothing is mapped there.
    #[error("process {pid} has no page at {address:#x}: map it first")]
    NotMapped {
        /// The process.
        pid: u16,
        /// The virtual address.
        address: u64,
    },
    /// Something is mapped there already.
    #[error("process {pid} has a page at {address:#x} already")]
    Mapped {
        /// The process.
        pid: u16,
        /// The virtual address.
        address: u64,
    },
    /// An access of no byte, or of two lines.
    #[error("{bytes} bytes at {address:#x} are not within one line of 64 bytes")]
    NotInLine {
        /// The virtual address.
        address: u64,
        /// Bytes.
        bytes: usize,
    },
    /// A page whose overlay holds no metadata.
    #[error("the page at {address:#x} of process {pid} has no metadata: map it with it")]
    NoMetadata {
        /// The process.
        pid: u16,
        /// The virtual address.
        address: u64,
    },
    /// A commit into a frame that others map.
    #[error("{owners} pages share the frame at {address:#x} of process {pid}: copy and commit, or discard")]
    Shared {
        /// The process.
        pid: u16,
        /// The virtual address.
        address: u64,
        /// How many pages map the frame. 0: it is the frame of zeros.
        owners: u32,
    },
    /// A page whose overlay holds no versions of its lines.
    #[error("the page at {address:#x} of process {pid} has no overlay to promote")]
    NoOverlay {
        /// The process.
        pid: u16,
        /// The virtual address.
        address: u64,
    },
    /// A fork into a process that has pages.
    #[error("process {0} has pages: a child begins without")]
    Child(u16),
}

/// What newly mapped pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Pages of zeros that the process owns.
    Own,
    /// All of them are the one page of zeros; what is written is copied, or goes to overlays (section 5.2).
    Zeros,
    /// Pages of zeros that the process owns, with metadata in their overlays (section 5.3.4).
    WithMetadata,
}

#[derive(Debug)]
pub(super) struct Core {
    pub(super) pipeline: Pipeline,
    pub(super) tlb: Tlb,
}

/// A machine with processes.
#[derive(Debug)]
pub struct Machine {
    pub(super) config: Config,
    pub(super) cores: Vec<Core>,
    pub(super) hierarchy: Hierarchy,
    pub(super) processes: Processes,
    pub(super) events: EventCounters,
}

/// Where an access goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) page: Page,
    /// The line in the page.
    pub(super) line: usize,
    /// The first byte in the line.
    pub(super) at: usize,
}

impl Machine {
    /// A machine without processes.
    ///
    /// # Errors
    /// [`MachineError::Config`] if its parameters cannot be.
    pub fn try_new(config: Config) -> Result<Self, MachineError> {
        config.validate()?;
        let core = |_| Core {
            pipeline: Pipeline::new(config.core),
            tlb: Tlb::new(config.tlb),
        };
        Ok(Self {
            cores: (0..config.cores).map(core).collect(),
            hierarchy: Hierarchy::new(&config),
            processes: Processes::default(),
            events: EventCounters::default(),
            config,
        })
    }

    /// The counters; of core `core` those of its time.
    ///
    /// # Errors
    /// [`MachineError::Core`] if there is no such core.
    pub fn account(&self, core: usize) -> Result<Account, MachineError> {
        self.check_core(core)?;
        let [l1, l2, l3] = self.hierarchy.counters();
        let tlb = self.cores.iter().map(|core| core.tlb.counters);
        Ok(Account {
            core: self.cores[core].pipeline.counters(),
            tlb: tlb.fold(TlbCounters::default(), |sum, one| TlbCounters {
                l1_hits: sum.l1_hits + one.l1_hits,
                l2_hits: sum.l2_hits + one.l2_hits,
                misses: sum.misses + one.misses,
                obits_wait_cycles: sum.obits_wait_cycles + one.obits_wait_cycles,
                bits_set_by_messages: sum.bits_set_by_messages + one.bits_set_by_messages,
            }),
            l1,
            l2,
            l3,
            prefetch: self.hierarchy.prefetches,
            dram: self.hierarchy.controller.dram.counters,
            omt: self.hierarchy.controller.counters,
            store: self.hierarchy.controller.store.counters,
            events: self.events,
        })
    }

    /// Memory in use. Dirty lines in caches take none yet: [`Machine::flush`] lets them have theirs.
    pub fn memory_in_use(&mut self) -> MemoryInUse {
        MemoryInUse {
            pages: self.processes.bytes(),
            ..self.hierarchy.controller.overlay_memory()
        }
    }

    /// Writes all dirty lines to memory. The cores wait until it has them.
    pub fn flush(&mut self) {
        let now = self
            .cores
            .iter()
            .map(|core| core.pipeline.now())
            .max()
            .unwrap_or(0);
        let done = self.hierarchy.flush(now);
        for core in &mut self.cores {
            core.pipeline.rest(done);
        }
    }

    /// Instructions that access no memory.
    ///
    /// # Errors
    /// [`MachineError::Core`] if there is no such core.
    pub fn compute(&mut self, core: usize, instructions: u64) -> Result<(), MachineError> {
        self.check_core(core)?;
        self.cores[core].pipeline.compute(instructions);
        Ok(())
    }

    /// Waits until all that a core has begun is done.
    ///
    /// # Errors
    /// [`MachineError::Core`] if there is no such core.
    pub fn settle(&mut self, core: usize) -> Result<(), MachineError> {
        self.check_core(core)?;
        self.cores[core].pipeline.settle();
        Ok(())
    }

    pub(super) fn check_core(&self, core: usize) -> Result<(), MachineError> {
        let cores = self.cores.len();
        if core < cores {
            Ok(())
        } else {
            Err(MachineError::Core { core, cores })
        }
    }

    /// Where an access of `bytes` bytes goes.
    pub(super) fn place(
        &self,
        core: usize,
        pid: Pid,
        address: u64,
        bytes: usize,
    ) -> Result<Place, MachineError> {
        self.check_core(core)?;
        let at = index(address % number(LINE_BYTES));
        if bytes == 0 || at + bytes > LINE_BYTES {
            return Err(MachineError::NotInLine { address, bytes });
        }
        let page = Page::of(pid, address)?;
        if self.processes.get(page).is_none() {
            return Err(MachineError::NotMapped {
                pid: pid.get(),
                address,
            });
        }
        let line = index(address % number(PAGE_BYTES)) / LINE_BYTES;
        Ok(Place { page, line, at })
    }

    /// A page's translation, and when it is there. The page is mapped.
    pub(super) fn translate(&mut self, core: usize, page: Page, now: u64) -> (Translation, u64) {
        if let Some((translation, cycles)) = self.cores[core].tlb.look_up(page) {
            return (translation, now + cycles);
        }
        let mapping = self.processes.get(page).expect("the page is mapped");
        let walked = now + self.config.tlb.miss_cycles;
        let (obits, ready) = if mapping.overlay == OverlayUse::None {
            (OBitVector::EMPTY, walked)
        } else {
            let asked = match self.config.tlb.obits {
                ObitsFetch::AfterWalk => walked,
                ObitsFetch::WithWalk => now,
            };
            let (obits, ready) = self.hierarchy.controller.obits(page, asked);
            (obits, ready.max(walked))
        };
        let translation = Translation {
            frame: mapping.frame,
            shared: mapping.shared,
            overlay: mapping.overlay,
            obits,
        };
        let tlb = &mut self.cores[core].tlb;
        tlb.counters.obits_wait_cycles += ready - walked;
        tlb.insert(page, translation);
        (translation, ready)
    }

    /// Loads a line whose address is known, as an instruction of its own.
    pub(super) fn load_line(&mut self, core: usize, address: LineAddress) -> LineBytes {
        let start = self.cores[core].pipeline.access(Issue::Free);
        let (bytes, done) = self.hierarchy.read(core, address, start);
        self.cores[core].pipeline.load(done);
        bytes
    }

    /// Stores a line whose address is known, as an instruction of its own.
    pub(super) fn store_line(&mut self, core: usize, address: LineAddress, bytes: &LineBytes) {
        let start = self.cores[core].pipeline.access(Issue::Free);
        let done = self.hierarchy.write(core, address, 0, bytes, start);
        self.cores[core].pipeline.store(start, done);
    }

    /// An overlaying read-exclusive message (section 4.3.3), sent at `now`: all TLBs and the OMT learn that a line is in the
    /// overlay. Returns when it has arrived.
    pub(super) fn overlaying_read_exclusive(&mut self, page: Page, line: usize, now: u64) -> u64 {
        let arrives = now + self.hierarchy.message_cycles();
        for core in &mut self.cores {
            core.tlb.overlaying(page, line);
        }
        self.hierarchy.controller.overlaying(page, line, arrives);
        arrives
    }

    /// Drops an overlay: its lines in the caches, its bits in all TLBs and the OMT, and its segment.
    pub(super) fn clear_overlay(&mut self, page: Page, now: u64) {
        if self.hierarchy.controller.known_obits(page).is_empty() {
            return;
        }
        for line in 0..LINES {
            self.hierarchy.drop_line(LineAddress::overlay(page, line));
        }
        for core in &mut self.cores {
            core.tlb.remove(page);
        }
        self.hierarchy.controller.clear(page, now);
    }
}
