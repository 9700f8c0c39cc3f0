//! A core's time (table 2): single issue, out of order within a window of 64 instructions.
//!
//! An instruction enters the window each cycle; it can only if the one 64 before it has left, and they leave in order. A
//! load leaves when its line is there. A store leaves when its address is translated, and then waits for its line in the
//! store buffer. An access may wait for the load before it (an index, a pointer). A trap waits for all that is in the
//! window.

use crate::account::CoreCounters;
use crate::config::CoreConfig;
use crate::sizes::number;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// When an access may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Issue {
    /// As soon as it is in the window.
    Free,
    /// When the load before it has its data: the address depends on it.
    AfterLoad,
}

/// A core's window and store buffer.
#[derive(Debug)]
pub(crate) struct Pipeline {
    window: u64,
    store_buffer: usize,
    /// The cycle in which the next instruction enters.
    next: u64,
    entered: u64,
    /// Which instructions have not left, and when they can, oldest first. All others leave at once.
    waiting: VecDeque<(u64, u64)>,
    /// When stores have their lines.
    stores: BinaryHeap<Reverse<u64>>,
    last_load: u64,
    counters: CoreCounters,
}

impl Pipeline {
    pub(crate) fn new(config: CoreConfig) -> Self {
        Self {
            window: number(config.window),
            store_buffer: config.store_buffer,
            next: 0,
            entered: 0,
            waiting: VecDeque::with_capacity(config.window),
            stores: BinaryHeap::with_capacity(config.store_buffer),
            last_load: 0,
            counters: CoreCounters::default(),
        }
    }

    /// The cycle in which the next instruction enters.
    pub(crate) fn now(&self) -> u64 {
        self.next
    }

    /// The counters, with the cycles until now.
    pub(crate) fn counters(&self) -> CoreCounters {
        CoreCounters {
            cycles: self.next,
            instructions: self.entered,
            ..self.counters
        }
    }

    /// Instructions that access no memory.
    pub(crate) fn compute(&mut self, mut instructions: u64) {
        while let Some((oldest, done)) = self.waiting.front().copied() {
            let free = oldest + self.window - self.entered;
            if instructions <= free {
                break;
            }
            self.advance(free);
            instructions -= free;
            self.counters.window_stall_cycles += done.saturating_sub(self.next);
            self.next = self.next.max(done);
            self.waiting.pop_front();
        }
        self.advance(instructions);
    }

    fn advance(&mut self, instructions: u64) {
        self.entered += instructions;
        self.next += instructions;
    }

    /// An access enters the window; returns when it begins.
    pub(crate) fn access(&mut self, issue: Issue) -> u64 {
        self.compute(1);
        let entered = self.next - 1;
        match issue {
            Issue::Free => entered,
            Issue::AfterLoad => entered.max(self.last_load),
        }
    }

    /// The access was a load, and has its data at `done`.
    pub(crate) fn load(&mut self, done: u64) {
        self.last_load = done;
        self.leaves(done);
    }

    /// The access was a store: translated then, and done then.
    pub(crate) fn store(&mut self, translated: u64, done: u64) {
        self.leaves(translated);
        while self.stores.peek().is_some_and(|Reverse(done)| *done <= self.next) {
            self.stores.pop();
        }
        if self.stores.len() == self.store_buffer
            && let Some(Reverse(oldest)) = self.stores.pop()
        {
            self.counters.store_stall_cycles += oldest.saturating_sub(self.next);
            self.next = self.next.max(oldest);
        }
        self.stores.push(Reverse(done));
    }

    fn leaves(&mut self, done: u64) {
        if done > self.next {
            self.waiting.push_back((self.entered - 1, done));
        }
    }

    /// Waits for all that is in the window, and then as long as a trap takes.
    pub(crate) fn trap(&mut self, cycles: u64) {
        self.settle();
        self.next += cycles;
        self.counters.trap_cycles += cycles;
    }

    /// Does nothing until a moment.
    pub(crate) fn rest(&mut self, until: u64) {
        self.settle();
        self.next = self.next.max(until);
    }

    /// Waits for all that is in the window.
    pub(crate) fn settle(&mut self) {
        for (_, done) in self.waiting.drain(..) {
            self.counters.window_stall_cycles += done.saturating_sub(self.next);
            self.next = self.next.max(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, OnWrite};

    fn pipeline() -> Pipeline {
        Pipeline::new(Config::table_2(OnWrite::Copy).core)
    }

    #[test]
    fn a_load_stops_the_window_64_instructions_later() {
        let mut core = pipeline();
        let start = core.access(Issue::Free);
        core.load(start + 1000);
        core.compute(63);
        assert_eq!(core.now(), 64);
        core.compute(1);
        assert_eq!(core.now(), 1001);
        assert_eq!(core.counters().window_stall_cycles, 936);
    }

    #[test]
    fn independent_loads_overlap_and_dependent_ones_do_not() {
        let mut free = pipeline();
        let mut chained = pipeline();
        for _ in 0..10 {
            let start = free.access(Issue::Free);
            free.load(start + 200);
            let start = chained.access(Issue::AfterLoad);
            chained.load(start + 200);
        }
        free.settle();
        chained.settle();
        assert_eq!((free.now(), chained.now()), (209, 2000));
    }

    #[test]
    fn stores_wait_outside_the_window_until_the_buffer_is_full() {
        let mut core = pipeline();
        for _ in 0..32 {
            let start = core.access(Issue::Free);
            core.store(start, start + 500);
        }
        core.compute(68);
        assert_eq!(core.now(), 100);
        let start = core.access(Issue::Free);
        core.store(start, start + 500);
        assert_eq!(core.now(), 500);
    }

    #[test]
    fn a_trap_waits_for_the_window() {
        let mut core = pipeline();
        let start = core.access(Issue::Free);
        core.load(start + 300);
        core.trap(1000);
        assert_eq!(core.now(), 1300);
    }
}
