//! The device's account in cycles of the paper's machine (table 2), from which come the figures of its table 5 and
//! figure 11. Nothing here is measured on the machine that runs the model: it counts what the hardware would take.

use crate::scan_table::Ppn;

/// The paper's clock, in cycles a second.
pub const FREQUENCY_HZ: f64 = 2e9;

/// Who answers a request for a line (section 3.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A cache, over the on-chip network.
    Cache,
    /// The memory of the device's own controller.
    Dram,
    /// The memory of the other controller, over the on-chip network.
    Network,
}

/// Which of the two pages a line belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The candidate.
    Candidate,
    /// One of the Other Pages.
    Other,
}

/// Cycles that a request for a line takes, and where the model assumes lines to be.
///
/// The candidate has just been put where it is by a core, so its lines are in the shared cache, and stay there: the
/// device reads them anew for each comparison but brings none into a cache itself. The other pages are in memory, every
/// second one behind the other controller, as pages are interleaved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// A line from a cache: the round trip to the L3 (table 2).
    pub cache: u64,
    /// A line from memory. The paper does not give it: 50 ns, as for DDR at 1 GHz with the row to be opened first.
    pub dram: u64,
    /// A line from the other controller's memory: as [`Self::dram`], and one more round trip over the bus.
    pub network: u64,
    /// Comparing two lines that have arrived.
    pub compare: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            cache: 20,
            dram: 100,
            network: 120,
            compare: 1,
        }
    }
}

impl Costs {
    /// Where a line of this page is assumed to be.
    pub fn source(role: Role, page: Ppn) -> Source {
        match (role, page.number() % 2) {
            (Role::Candidate, _) => Source::Cache,
            (Role::Other, 0) => Source::Dram,
            (Role::Other, _) => Source::Network,
        }
    }

    /// Cycles from the request to the answer.
    pub fn latency(&self, source: Source) -> u64 {
        match source {
            Source::Cache => self.cache,
            Source::Dram => self.dram,
            Source::Network => self.network,
        }
    }
}

/// What a device has done. All counts are totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Tables processed.
    pub tables: u64,
    /// Pages compared with candidates.
    pub comparisons: u64,
    /// Lines from caches.
    pub cache_lines: u64,
    /// Lines from the device's own memory controller.
    pub dram_lines: u64,
    /// Lines from the other memory controller.
    pub network_lines: u64,
    /// Lines, of all these, that were read only to complete a hash key.
    pub key_lines: u64,
    /// Hash keys completed.
    pub keys: u64,
    /// Cycles spent on tables.
    pub cycles: u64,
    /// Sum of the squares of the tables' cycles, saturating.
    pub cycles_squared: u64,
}

impl Account {
    /// Notes a line read.
    pub(crate) fn line(&mut self, source: Source) {
        match source {
            Source::Cache => self.cache_lines += 1,
            Source::Dram => self.dram_lines += 1,
            Source::Network => self.network_lines += 1,
        }
    }

    /// Notes a table processed.
    pub(crate) fn table(&mut self, cycles: u64) {
        self.tables += 1;
        self.cycles += cycles;
        self.cycles_squared = self.cycles_squared.saturating_add(cycles.saturating_mul(cycles));
    }

    /// Adds another account.
    pub fn add(&mut self, other: &Self) {
        self.tables += other.tables;
        self.comparisons += other.comparisons;
        self.cache_lines += other.cache_lines;
        self.dram_lines += other.dram_lines;
        self.network_lines += other.network_lines;
        self.key_lines += other.key_lines;
        self.keys += other.keys;
        self.cycles += other.cycles;
        self.cycles_squared = self.cycles_squared.saturating_add(other.cycles_squared);
    }

    /// What was done since an earlier state of this account.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            tables: self.tables - before.tables,
            comparisons: self.comparisons - before.comparisons,
            cache_lines: self.cache_lines - before.cache_lines,
            dram_lines: self.dram_lines - before.dram_lines,
            network_lines: self.network_lines - before.network_lines,
            key_lines: self.key_lines - before.key_lines,
            keys: self.keys - before.keys,
            cycles: self.cycles - before.cycles,
            cycles_squared: self.cycles_squared - before.cycles_squared,
        }
    }

    /// Lines read.
    pub fn lines(&self) -> u64 {
        self.cache_lines + self.dram_lines + self.network_lines
    }

    /// Cycles for a table, on average: the paper's table 5, "processing the Scan table". 0 without a table.
    #[allow(clippy::cast_precision_loss)] // a statistic
    pub fn mean_cycles(&self) -> f64 {
        self.cycles as f64 / (self.tables.max(1)) as f64
    }

    /// Standard deviation of the cycles for a table. (The paper's is that between applications.)
    #[allow(clippy::cast_precision_loss)] // a statistic
    pub fn deviation_cycles(&self) -> f64 {
        let squares = self.cycles_squared as f64 / (self.tables.max(1)) as f64;
        (squares - self.mean_cycles().powi(2)).max(0.0).sqrt()
    }

    /// Bytes a second from memory (not from caches) while the device works: the paper's figure 11. 0 without cycles.
    #[allow(clippy::cast_precision_loss)] // a statistic
    pub fn bandwidth(&self) -> f64 {
        let bytes = (self.dram_lines + self.network_lines) as f64 * crate::memory::LINE_BYTES as f64;
        bytes * FREQUENCY_HZ / self.cycles.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_tables() {
        let mut account = Account::default();
        account.table(1000);
        account.table(3000);
        assert_eq!(
            (account.mean_cycles(), account.deviation_cycles()),
            (2000.0, 1000.0)
        );
    }

    #[test]
    fn an_empty_account_has_zeros() {
        let account = Account::default();
        let figures = [
            account.mean_cycles(),
            account.deviation_cycles(),
            account.bandwidth(),
        ];
        assert_eq!(figures, [0.0; 3]);
    }

    #[test]
    fn bandwidth_counts_lines_from_memory_only() {
        let mut account = Account::default();
        account.line(Source::Cache);
        account.line(Source::Dram);
        account.line(Source::Network);
        account.table(200);
        // 128 bytes in 100 ns.
        assert!((account.bandwidth() - 1.28e9).abs() < 1.0);
    }
}
