//! All guests of one measurement, and the books of what they hold.

use super::files::Files;
use super::measured::Writes;
use super::orders::{Done, Order, Plan};
use super::pattern::{Kind, Pattern, common_pages, common_runs};
use crate::host;
use crate::worker::Conversation;
use serde::de::DeserializeOwned;
use vmm_dedup_host::{Failure, children};

/// What is measured with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup<'a> {
    pub(super) kind: Kind,
    pub(super) thp: bool,
    pub(super) mib: u32,
    pub(super) guests: usize,
    pub(super) rounds: u32,
    pub(super) files: &'a Files,
}

/// The guests.
pub(super) struct Fleet<'a> {
    guests: Vec<Conversation>,
    patterns: Vec<Pattern>,
    files: &'a Files,
    round: usize,
    /// Guests that write at a time: a core is left to the dedup side.
    writers: usize,
}

impl<'a> Fleet<'a> {
    /// Starts all guests, and waits until their memory is filled.
    pub(super) fn start(setup: &Setup<'a>) -> Result<Self, Failure> {
        let pages = (setup.mib as usize) << 8;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut fleet = Self {
            guests: Vec::new(),
            patterns: (0..setup.guests)
                .map(|guest| Pattern::new(setup.kind, guest, pages, setup.files))
                .collect(),
            files: setup.files,
            round: 0,
            writers: cores.saturating_sub(1).clamp(1, setup.guests),
        };
        for guest in 0..setup.guests {
            let mut command = children::command()?;
            command.args(["bench", "churn-guest"]);
            let mut process = Conversation::start(&mut command, format!("guest {guest}"))?;
            process.tell(&Order::Fill(Plan {
                kind: setup.kind,
                thp: setup.thp,
                mib: setup.mib,
                guest,
                files: setup.files.list().clone(),
            }))?;
            fleet.guests.push(process);
        }
        hear::<Done>(&mut fleet.guests)?;
        Ok(fleet)
    }

    /// Tells all guests the same; their answers.
    pub(super) fn all<T: DeserializeOwned>(&mut self, order: &Order) -> Result<Vec<T>, Failure> {
        tell(&mut self.guests, order)?;
        hear(&mut self.guests)
    }

    /// Pages that sharing can save.
    pub(super) fn common_pages(&self) -> u64 {
        common_pages(self.patterns.iter().take(self.guests.len()), self.files)
    }

    /// Stretches of the guests' memory in which what can be shared follows on.
    pub(super) fn common_runs(&self) -> u64 {
        common_runs(self.patterns.iter().take(self.guests.len()))
    }

    /// Lets all guests write what the next round replaces.
    pub(super) fn write(&mut self) -> Result<Writes, Failure> {
        self.round += 1;
        let mut times: Vec<u64> = Vec::new();
        for group in self.guests.chunks_mut(self.writers) {
            tell(group, &Order::Write)?;
            times.extend(hear::<Vec<u64>>(group)?.into_iter().flatten());
        }
        for pattern in &mut self.patterns {
            pattern.advance(self.round, self.files);
        }
        Ok(Writes::of(times))
    }

    /// CPU time of the services' threads so far, nanoseconds.
    pub(super) fn services_cpu_ns(&self) -> Result<u64, Failure> {
        let each = self
            .guests
            .iter()
            .map(|guest| host::cpu_ns(guest.pid(), "dedup-"));
        each.sum()
    }

    /// Fails if a page of any guest does not hold what was written to it.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        let wrong: u64 = self.all::<u64>(&Order::Check)?.iter().sum();
        if wrong > 0 {
            return Err(Failure::new(format!(
                "{wrong} pages do not hold what was written to them"
            )));
        }
        Ok(())
    }

    /// Ends all guests but the first, as VMs end.
    pub(super) fn end_all_but_one(&mut self) {
        self.guests.truncate(1);
    }
}

fn tell(guests: &mut [Conversation], order: &Order) -> Result<(), Failure> {
    guests.iter_mut().try_for_each(|guest| guest.tell(order))
}

fn hear<T: DeserializeOwned>(guests: &mut [Conversation]) -> Result<Vec<T>, Failure> {
    guests.iter_mut().map(Conversation::hear).collect()
}
