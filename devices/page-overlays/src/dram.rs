//! DRAM and its scheduler (table 2): when lines come and go. What they hold is [`crate::memory`]'s.
//!
//! Rows stay open. Writes wait in a buffer; when it is full all of them drain, those of an open row first, and reads wait
//! for the end of that. A read takes the first gap between the uses of its bank, and on the bus, that is long enough: so one
//! that is asked for a later time does not hold up an earlier one. (That a gap's use may close the row of the one behind it
//! is left out.)

use crate::account::DramCounters;
use crate::config::DramConfig;
use std::collections::VecDeque;

/// What a bank was or will be used for.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// `None`: for nothing so far.
    row: Option<u64>,
    /// From when on, in cycles.
    start: u64,
    /// From when on another column may be accessed.
    column_at: u64,
    /// From when on the row may be closed.
    close_at: u64,
}

/// A bank: its uses, in order of their starts. The first one is older than all that requests ask for.
#[derive(Debug)]
struct Bank(VecDeque<Use>);

/// Times on the bus that are taken, in order.
#[derive(Debug, Default)]
struct Bus {
    taken: VecDeque<(u64, u64)>,
    newest: u64,
}

/// Cycles after which a use of the bus or a bank is forgotten: requests come no later than that behind the newest.
const MEMORY: u64 = 20_000;

impl Bus {
    /// Takes the first time from `at` on that is `length` long; returns its start.
    fn take(&mut self, at: u64, length: u64) -> u64 {
        self.newest = self.newest.max(at);
        while self
            .taken
            .front()
            .is_some_and(|(_, end)| end + MEMORY < self.newest)
        {
            self.taken.pop_front();
        }
        let after = self.taken.iter().rev().take_while(|(_, end)| *end > at).count();
        let mut place = self.taken.len() - after;
        let mut start = at;
        while let Some((taken, end)) = self.taken.get(place) {
            if start + length <= *taken {
                break;
            }
            start = *end;
            place += 1;
        }
        self.taken.insert(place, (start, start + length));
        start
    }
}

/// The memory behind one channel.
#[derive(Debug)]
pub(crate) struct Dram {
    config: DramConfig,
    banks: Vec<Bank>,
    bus: Bus,
    /// Addresses of lines that wait to be written.
    writes: Vec<u64>,
    /// The end of the last drain.
    drained_at: u64,
    pub(crate) counters: DramCounters,
}

impl Dram {
    pub(crate) fn new(config: DramConfig) -> Self {
        Self {
            banks: (0..config.banks)
                .map(|_| Bank(VecDeque::from([Use::default()])))
                .collect(),
            bus: Bus::default(),
            writes: Vec::with_capacity(config.write_buffer),
            drained_at: 0,
            counters: DramCounters::default(),
            config,
        }
    }

    /// Reads the line at an address of main memory; returns when its last byte is there.
    pub(crate) fn read(&mut self, address: u64, now: u64) -> u64 {
        if self.writes.contains(&address) {
            self.counters.forwarded += 1;
            return now + self.config.cycles_per_clock;
        }
        let done = self.access(address, now.max(self.drained_at), self.config.cas, 0);
        self.counters.reads += 1;
        self.counters.read_cycles += done - now;
        done
    }

    /// Writes the line at an address of main memory, some time.
    pub(crate) fn write(&mut self, address: u64, now: u64) {
        if !self.writes.contains(&address) {
            self.writes.push(address);
        }
        if self.writes.len() >= self.config.write_buffer {
            self.drain(now);
        }
    }

    /// Writes all that waits; returns when the last transfer has ended.
    pub(crate) fn finish(&mut self, now: u64) -> u64 {
        if !self.writes.is_empty() {
            self.drain(now);
        }
        self.bus.taken.back().map_or(now, |(_, end)| now.max(*end))
    }

    fn clocks(&self, clocks: u64) -> u64 {
        clocks * self.config.cycles_per_clock
    }

    /// The bank (as an index) and the row of an address.
    fn place(&self, address: u64) -> (usize, u64) {
        let rows = address / self.config.row_bytes;
        let bank = rows % self.config.banks;
        (crate::sizes::index(bank), rows / self.config.banks)
    }

    fn drain(&mut self, now: u64) {
        self.counters.drains += 1;
        let now = now.max(self.drained_at);
        let mut writes = std::mem::take(&mut self.writes);
        writes.sort_by_key(|address| {
            let (bank, row) = self.place(*address);
            let open = self.banks[bank].0.back().and_then(|last| last.row);
            (open != Some(row), bank, row)
        });
        let mut end = now;
        for address in writes.drain(..) {
            let done = self.access(address, now, self.config.cwl, self.config.wr);
            self.counters.writes += 1;
            end = end.max(done);
        }
        self.writes = writes;
        self.drained_at = end;
    }

    /// Accesses a column; returns when its data has left the bus. `latency` is what lies between, `recovery` what lies
    /// between the data and the closing of the row, both in clocks.
    fn access(&mut self, address: u64, now: u64, latency: u64, recovery: u64) -> u64 {
        let (bank, row) = self.place(address);
        let (latency, burst) = (self.clocks(latency), self.clocks(self.config.burst));
        let (precharge, open) = (self.clocks(self.config.rp), self.clocks(self.config.rcd));
        let uses = &mut self.banks[bank].0;
        while uses.get(1).is_some_and(|second| second.start + MEMORY < now) {
            uses.pop_front();
        }
        let later = uses.iter().rev().take_while(|other| other.start > now).count();
        let mut place = (uses.len() - later).max(1);
        // Behind the use before it, if it ends before the next one starts; else behind that.
        let (start, column) = loop {
            let before = uses[place - 1];
            let (start, column) = if before.row == Some(row) {
                let column = now.max(before.column_at);
                (column, column)
            } else if before.row.is_some() {
                let start = now.max(before.close_at);
                (start, start + precharge + open)
            } else {
                (now, now + open)
            };
            match uses.get(place) {
                Some(next) if column + burst > next.start => place += 1,
                _ => break (start, column),
            }
        };
        let before = uses[place - 1];
        match before.row {
            Some(other) if other == row => self.counters.row_hits += 1,
            Some(_) => self.counters.row_conflicts += 1,
            None => self.counters.row_closed += 1,
        }
        let data = self.bus.take(column + latency, burst);
        let opened = if before.row == Some(row) {
            before.close_at
        } else {
            column - open + self.clocks(self.config.ras)
        };
        let done = data + burst;
        let new = Use {
            row: Some(row),
            start,
            column_at: data - latency + burst,
            close_at: opened.max(if recovery > 0 {
                done + self.clocks(recovery)
            } else {
                0
            }),
        };
        self.banks[bank].0.insert(place, new);
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, OnWrite};

    fn dram() -> Dram {
        Dram::new(Config::table_2(OnWrite::Copy).dram)
    }

    #[test]
    fn a_row_is_opened_used_and_closed() {
        let mut dram = dram();
        // 7 clocks to open, 7 to the data, 4 of data, at 5 cycles each.
        assert_eq!(dram.read(0, 1000), 1090);
        assert_eq!(dram.read(64, 2000), 2055);
        // The same bank, another row.
        assert_eq!(dram.read(8 * 8192, 3000), 3125);
        let counters = dram.counters;
        assert_eq!(
            (counters.row_closed, counters.row_hits, counters.row_conflicts),
            (1, 1, 1)
        );
    }

    #[test]
    fn transfers_share_the_bus() {
        let mut dram = dram();
        let ends: Vec<u64> = (0..4).map(|bank| dram.read(bank * 8192, 0)).collect();
        assert_eq!(ends, [90, 110, 130, 150]);
    }

    #[test]
    fn a_later_request_leaves_a_gap_for_an_earlier_one() {
        let mut dram = dram();
        assert_eq!(dram.read(0, 5000), 5090);
        assert_eq!(dram.read(8192, 0), 90);
        // The same bank, and another row.
        assert_eq!(dram.read(8 * 8192, 1000), 1090);
        assert_eq!(dram.read(64, 6000), 6055);
    }

    #[test]
    fn reads_wait_for_a_full_write_buffer() {
        let mut dram = dram();
        for line in 0..64 {
            dram.write(line * 64, 0);
        }
        assert_eq!((dram.counters.writes, dram.counters.drains), (64, 1));
        // 64 bursts of 20 cycles, and the first's 65 until its data.
        assert!(dram.read(8192, 0) >= 64 * 20 + 65);
    }

    #[test]
    fn what_waits_to_be_written_is_read_from_the_buffer() {
        let mut dram = dram();
        dram.write(64, 0);
        assert_eq!(dram.read(64, 10), 15);
        assert_eq!(dram.counters.forwarded, 1);
    }
}
