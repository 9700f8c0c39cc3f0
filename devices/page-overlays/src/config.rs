//! The machine's parameters: the paper's table 2, and what the paper leaves open.

/// A parameter that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No cores, or too many.
    #[error("{0} cores: give 1 to 16")]
    Cores(usize),
    /// A cache or TLB whose sets are not a power of two.
    #[error("{0}: entries / ways is not a power of two")]
    Sets(&'static str),
    /// A structure without entries.
    #[error("{0} is zero: give at least 1")]
    Zero(&'static str),
}

/// What the operating system does with the first write to a page that others share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnWrite {
    /// Copies the page (copy-on-write).
    Copy,
    /// Lets hardware put the line into the page's overlay (overlay-on-write).
    Overlay,
}

/// When a TLB miss asks for the `OBitVector`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObitsFetch {
    /// After the walk of the page table, so that both times add up.
    AfterWalk,
    /// With the walk, so that the longer one counts: the overlay's address needs no translation.
    WithWalk,
}

/// How a cache picks what to evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The least recently used line.
    Lru,
    /// DRRIP, as the paper's reference 28 has it: two bits, set dueling, a tenth bit of selection.
    Drrip,
}

/// A core.
#[derive(Clone, Copy, Debug)]
pub struct CoreConfig {
    /// Instructions in the window (table 2: 64; single issue).
    pub window: usize,
    /// Stores that have left the window and wait for their line. Not in the paper.
    pub store_buffer: usize,
    /// Instructions that copy one line. Not in the paper: four loads and four stores of 16 bytes.
    pub copy_instructions: u64,
}

/// TLBs.
#[derive(Clone, Copy, Debug)]
pub struct TlbConfig {
    /// Entries of the first level (64).
    pub l1_entries: usize,
    /// Its ways (4).
    pub l1_ways: usize,
    /// Entries of the second level (1,024).
    pub l2_entries: usize,
    /// Its ways. Not in the paper.
    pub l2_ways: usize,
    /// Cycles of a hit in the second level (10).
    pub l2_cycles: u64,
    /// Cycles of a miss (1,000).
    pub miss_cycles: u64,
    /// When the `OBitVector` is asked for.
    pub obits: ObitsFetch,
}

/// A cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheConfig {
    /// Its size in bytes.
    pub bytes: usize,
    /// Its ways.
    pub ways: usize,
    /// Cycles after which a miss is known.
    pub tag_cycles: u64,
    /// Cycles of a hit. Of a serial lookup that is tag and data.
    pub hit_cycles: u64,
    /// What it evicts.
    pub policy: Policy,
}

/// The stream prefetcher.
#[derive(Clone, Copy, Debug)]
pub struct PrefetchConfig {
    /// Streams it follows (16). 0 switches it off.
    pub streams: usize,
    /// Lines fetched at a time (4).
    pub degree: i64,
    /// Lines ahead of the stream at most (24).
    pub distance: i64,
    /// Overlay lines that a computation on overlays fetches ahead (section 5.2 gives no number).
    pub overlay_lines: usize,
}

/// DRAM, in clocks of its bus.
#[derive(Clone, Copy, Debug)]
pub struct DramConfig {
    /// CPU cycles in a clock: 2.67 GHz and 533 MHz.
    pub cycles_per_clock: u64,
    /// Column access strobe to data.
    pub cas: u64,
    /// Column write to data.
    pub cwl: u64,
    /// Activation to column access.
    pub rcd: u64,
    /// Precharge.
    pub rp: u64,
    /// Activation to precharge.
    pub ras: u64,
    /// Last written byte to precharge.
    pub wr: u64,
    /// A burst of eight.
    pub burst: u64,
    /// Banks (8).
    pub banks: u64,
    /// Bytes of a row (8 KiB).
    pub row_bytes: u64,
    /// Entries of the write buffer (64).
    pub write_buffer: usize,
}

/// The OMT cache.
#[derive(Clone, Copy, Debug)]
pub struct OmtConfig {
    /// Entries (64).
    pub entries: usize,
    /// Cycles of a miss (1,000).
    pub miss_cycles: u64,
    /// Walks at a time. Not in the paper, which gives only their latency.
    pub walks: usize,
}

/// The operating system.
#[derive(Clone, Copy, Debug)]
pub struct OsConfig {
    /// What it does on a write to a shared page.
    pub on_write: OnWrite,
    /// Lines from which on an overlay is copied and committed. `None`: never.
    pub promote_at: Option<u32>,
    /// Cycles to enter and leave a page fault. Not in the paper.
    pub trap_cycles: u64,
    /// Cycles of a TLB shootdown. Not in the paper, which calls it expensive.
    pub shootdown_cycles: u64,
    /// Pages that the Overlay Memory Store gets at a time.
    pub store_pages: u64,
}

/// A machine.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Number of cores. Each has a TLB, an L1 and an L2; they share the L3.
    pub cores: usize,
    /// A core.
    pub core: CoreConfig,
    /// Its TLBs.
    pub tlb: TlbConfig,
    /// Its L1.
    pub l1: CacheConfig,
    /// Its L2.
    pub l2: CacheConfig,
    /// The L3.
    pub l3: CacheConfig,
    /// The prefetcher.
    pub prefetch: PrefetchConfig,
    /// DRAM.
    pub dram: DramConfig,
    /// The OMT cache.
    pub omt: OmtConfig,
    /// The operating system.
    pub os: OsConfig,
}

const KIB: usize = 1024;

impl Config {
    /// The paper's table 2. What the table leaves open:
    ///
    /// - a store buffer of 32; copies by 16 bytes; a second TLB level of 8 ways;
    /// - DDR3-1066 of 7-7-7 clocks;
    /// - OMT walks that do not wait for each other up to 16 at a time;
    /// - an `OBitVector` that is asked for when the walk of the page table begins;
    /// - 1,000 cycles for a trap and 2,670 (1 us) for a shootdown.
    pub fn table_2(on_write: OnWrite) -> Self {
        Self {
            cores: 1,
            core: CoreConfig {
                window: 64,
                store_buffer: 32,
                copy_instructions: 8,
            },
            tlb: TlbConfig {
                l1_entries: 64,
                l1_ways: 4,
                l2_entries: 1024,
                l2_ways: 8,
                l2_cycles: 10,
                miss_cycles: 1000,
                obits: ObitsFetch::WithWalk,
            },
            l1: CacheConfig {
                bytes: 64 * KIB,
                ways: 4,
                tag_cycles: 1,
                hit_cycles: 2,
                policy: Policy::Lru,
            },
            l2: CacheConfig {
                bytes: 512 * KIB,
                ways: 8,
                tag_cycles: 2,
                hit_cycles: 8,
                policy: Policy::Lru,
            },
            l3: CacheConfig {
                bytes: 2048 * KIB,
                ways: 16,
                tag_cycles: 10,
                hit_cycles: 34,
                policy: Policy::Drrip,
            },
            prefetch: PrefetchConfig {
                streams: 16,
                degree: 4,
                distance: 24,
                overlay_lines: 48,
            },
            dram: DramConfig {
                cycles_per_clock: 5,
                cas: 7,
                cwl: 6,
                rcd: 7,
                rp: 7,
                ras: 20,
                wr: 8,
                burst: 4,
                banks: 8,
                row_bytes: 8192,
                write_buffer: 64,
            },
            omt: OmtConfig {
                entries: 64,
                miss_cycles: 1000,
                walks: 16,
            },
            os: OsConfig {
                on_write,
                promote_at: None,
                trap_cycles: 1000,
                shootdown_cycles: 2670,
                store_pages: 64,
            },
        }
    }

    /// Checks that such a machine can be.
    ///
    /// # Errors
    /// [`ConfigError`] names what cannot be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !(1..=16).contains(&self.cores) {
            return Err(ConfigError::Cores(self.cores));
        }
        let numbers = [
            ("window", self.core.window),
            ("store buffer", self.core.store_buffer),
            ("write buffer", self.dram.write_buffer),
            ("OMT cache", self.omt.entries),
            ("OMT walks at a time", self.omt.walks),
            ("L1 ways", self.l1.ways),
            ("L2 ways", self.l2.ways),
            ("L3 ways", self.l3.ways),
            ("L1 TLB ways", self.tlb.l1_ways),
            ("L2 TLB ways", self.tlb.l2_ways),
        ];
        if let Some((name, _)) = numbers.iter().find(|(_, number)| *number == 0) {
            return Err(ConfigError::Zero(name));
        }
        let memory = [
            ("DRAM clock", self.dram.cycles_per_clock),
            ("DRAM banks", self.dram.banks),
            ("DRAM row", self.dram.row_bytes / 64),
            ("pages for the store", self.os.store_pages),
        ];
        if let Some((name, _)) = memory.iter().find(|(_, number)| *number == 0) {
            return Err(ConfigError::Zero(name));
        }
        let sets = [
            ("L1", self.l1.bytes / 64, self.l1.ways),
            ("L2", self.l2.bytes / 64, self.l2.ways),
            ("L3", self.l3.bytes / 64, self.l3.ways),
            ("L1 TLB", self.tlb.l1_entries, self.tlb.l1_ways),
            ("L2 TLB", self.tlb.l2_entries, self.tlb.l2_ways),
        ];
        let odd = |(_, entries, ways): &&(_, usize, usize)| !(entries / ways).is_power_of_two();
        match sets.iter().find(odd) {
            Some((name, ..)) => Err(ConfigError::Sets(name)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_2_can_be_built_and_nonsense_cannot() {
        let table = Config::table_2(OnWrite::Overlay);
        assert_eq!(table.validate(), Ok(()));
        let mut odd = table;
        odd.l2.ways = 7;
        assert_eq!(odd.validate(), Err(ConfigError::Sets("L2")));
        let mut none = table;
        none.omt.entries = 0;
        assert_eq!(none.validate(), Err(ConfigError::Zero("OMT cache")));
        assert_eq!(
            Config { cores: 0, ..table }.validate(),
            Err(ConfigError::Cores(0))
        );
    }
}
