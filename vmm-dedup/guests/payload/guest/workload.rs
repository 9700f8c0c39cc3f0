//! The work: reads and writes at the rate that was asked for, reports, and the proof at the end.

use core::fmt;

use crate::balloon::Balloon;
use crate::content::Random;
use crate::machine::{self, cycles};
use crate::memory::PAGE;
use crate::pages::{Latency, Pages};
use crate::params::{Params, Rewrite};
use crate::say;

/// Operations between two looks at the clock.
const BATCH: u64 = 64;
/// A halt shorter than this costs more than it saves.
const SHORTEST_NAP_US: u64 = 1000;
const LONGEST_NAP_US: u64 = 10_000;
/// A guest that was paused does not catch up on more than this.
const BACKLOG_MS: u64 = 100;
const QUIT: u8 = b'q';
const LEND: u8 = b'b';
const REPORT: u8 = b'f';

enum Phase {
    Scribble(u64),
    Restore(u64),
    Rest(u64),
}

struct Workload<'a> {
    params: &'a Params,
    pages: Pages,
    random: Random,
    phase: Phase,
    balloon: Option<Balloon>,
    writes: u64,
    reads: u64,
    restores: u64,
    rounds: u64,
}

/// Runs to the end; true if every page holds what it must.
pub fn run(params: &Params, pages: Pages) -> bool {
    let mut work = Workload {
        params,
        pages,
        random: Random::new(params.seed),
        phase: Phase::Scribble(0),
        balloon: None,
        writes: 0,
        reads: 0,
        restores: 0,
        rounds: 0,
    };
    let [files, private, zero, common] = work.pages.counts();
    say!(
        "ready pages={} files={files} private={private} zero={zero} common={common} ws={} tsc_khz={}",
        work.pages.total(),
        work.pages.working_set(),
        params.tsc_khz
    );
    work.work();
    work.prove()
}

impl Workload<'_> {
    fn work(&mut self) {
        let khz = self.params.tsc_khz;
        let start = cycles();
        let end = start + self.params.seconds * khz * 1000;
        let report = self.params.report_ms.max(1) * khz;
        let interval = (khz * 1000).checked_div(self.params.rate);
        let mut next_report = start + report;
        let mut next_step = start;
        loop {
            let now = cycles();
            if now >= end || (self.params.max_writes > 0 && self.writes >= self.params.max_writes) {
                break;
            }
            if now >= next_report {
                self.tick((now - start) / khz);
                next_report = now + report;
                match machine::read_serial() {
                    Some(QUIT) => break,
                    Some(LEND) => self.lend(false),
                    Some(REPORT) => self.lend(true),
                    _ => {}
                }
            }
            if let Phase::Rest(until) = self.phase {
                if now < until {
                    self.nap(until.min(next_report) - now);
                    continue;
                }
                self.phase = Phase::Scribble(0);
            }
            if self.pages.working_set() == 0 {
                self.nap(next_report.min(end) - now);
                continue;
            }
            let Some(interval) = interval else {
                (0..BATCH).for_each(|_| self.step());
                continue;
            };
            if next_step > now {
                self.nap(next_step - now);
                continue;
            }
            next_step = next_step.max(now.saturating_sub(BACKLOG_MS * khz));
            let mut done = 0;
            while next_step <= now && done < BATCH {
                self.step();
                next_step += interval;
                done += 1;
            }
        }
        self.tick((cycles() - start) / khz);
    }

    /// Gives the common pages to the host by way of the balloon (or, where it can, reports them as free), and takes
    /// them back.
    fn lend(&mut self, report: bool) {
        if self.balloon.is_none() {
            self.balloon = Balloon::find();
        }
        let Some(balloon) = self.balloon.as_mut().filter(|b| b.reporting || !report) else {
            say!("balloon pages=0 stale=0");
            return;
        };
        let common = self.pages.common();
        let addresses = || common.clone().map(|page| self.pages.physical(page));
        if report {
            for address in addresses() {
                balloon.report(address, PAGE as u32);
            }
        } else {
            balloon.inflate(addresses());
        }
        let stale = self.pages.stale_words(common.clone());
        if !report {
            balloon.deflate(addresses());
        }
        self.pages.refill(common.clone());
        say!("balloon pages={} stale={stale}", common.end - common.start);
    }

    /// Waits for about `time` cycles.
    fn nap(&self, time: u64) {
        if self.params.spin {
            machine::relax();
            return;
        }
        let us = time.saturating_mul(1000) / self.params.tsc_khz;
        machine::sleep_ns(us.clamp(SHORTEST_NAP_US, LONGEST_NAP_US) * 1000);
    }

    fn step(&mut self) {
        let set = self.pages.working_set();
        match (self.params.rewrite, &mut self.phase) {
            (_, Phase::Rest(_)) => return,
            (Rewrite::None, _) => {
                let page = self.pages.working_page(self.random.below(set));
                self.pages.write(page);
                self.writes += 1;
            }
            (Rewrite::Restore, Phase::Scribble(index)) => {
                let page = self.pages.working_page(*index);
                *index += 1;
                if *index == set {
                    self.phase = Phase::Restore(0);
                }
                self.pages.write(page);
                self.writes += 1;
            }
            (Rewrite::Restore, Phase::Restore(index)) => {
                let page = self.pages.working_page(*index);
                *index += 1;
                if *index == set {
                    self.rounds += 1;
                    self.phase = Phase::Rest(cycles() + self.params.rest_ms * self.params.tsc_khz);
                }
                self.restores += u64::from(self.pages.restore(page));
            }
        }
        for _ in 0..self.params.reads {
            let page = self.pages.working_page(self.random.below(set));
            self.pages.verify(page);
            self.reads += 1;
        }
    }

    fn tick(&mut self, ms: u64) {
        let longest = self
            .pages
            .read_latency
            .recent
            .max(self.pages.write_latency.recent);
        self.pages.read_latency.recent = 0;
        self.pages.write_latency.recent = 0;
        say!(
            "tick ms={ms} writes={} reads={} restores={} rounds={} errors={} max_cycles={longest}",
            self.writes,
            self.reads,
            self.restores,
            self.rounds,
            self.pages.errors
        );
    }

    fn prove(&mut self) -> bool {
        let (reads, writes) = (self.pages.read_latency, self.pages.write_latency);
        for page in 0..self.pages.total() {
            self.pages.verify(page);
        }
        let booked = self.pages.writes();
        say!(
            "latency kind=read max={} histogram={}",
            reads.max,
            Histogram(&reads)
        );
        say!(
            "latency kind=write max={} histogram={}",
            writes.max,
            Histogram(&writes)
        );
        say!(
            "verify pages={} errors={} writes={booked}",
            self.pages.total(),
            self.pages.errors
        );
        self.pages.errors == 0 && booked == self.writes
    }
}

/// `bit:count` for each bucket that is not empty, `-` if all are.
struct Histogram<'a>(&'a Latency);

impl fmt::Display for Histogram<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (bit, count) in self
            .0
            .histogram
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
        {
            write!(out, "{separator}{bit}:{count}")?;
            separator = ",";
        }
        if separator.is_empty() {
            out.write_str("-")
        } else {
            Ok(())
        }
    }
}
