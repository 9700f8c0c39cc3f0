//! Verifying a window's pages by whatever there is: an engine that settings name, else the CPU. Both are asked through [`Verify`].
//! The CPU's type is known where it is asked, and it is not doubted, so this costs what a bare loop does
//! (`examples/verify_cost.rs`).
//!
//! # What a wrong engine can do
//!
//! The pages are away from the guest, so each answer has to be there soon, and right.
//!
//! - *Equal* is checked by the CPU before it counts, unless the operator trusts the engine. So what is mapped was compared
//!   by the CPU, or by whom the operator named.
//! - *Different* is believed; if that is wrong it costs the saving. If the engine tells where, that byte is looked at. If it
//!   cannot, the CPU compares the first such pair of each window, so that an engine that is often wrong is found out.
//! - No answer within the patience, two answers to one pair, answers to pairs that were not asked, a wrong answer to either
//!   check: the engine failed. The CPU compares what is left of the window, and all that was not proved.
//! - An engine that failed is kept, unused, until [`Verifier::detach`]: dropping it may take long, and pages are away.

use super::{Answer, Compared, Cpu, Engine, Error, KeyKind, Limits, Pair, PairAnswer, Verify, With};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::key::Salt;
use vmm_dedup_protocol::stats::DeviceWork;

/// Pairs that the CPU compares before it is asked again whether somebody waits: some ten microseconds.
const BLOCK: usize = 16;
/// Longest time to wait for an engine before that is asked again.
const SLICE: Duration = Duration::from_micros(20);

/// Compares pairs of pages. Without another engine it asks the CPU.
#[derive(Debug)]
pub struct Verifier {
    cpu: Cpu,
    engine: Option<Attached>,
    failed: Option<(Attached, Error)>,
    trusted: bool,
    patience: Duration,
    /// The number of the next pair: no two pairs have the same, so that late answers show.
    next: u64,
    answered: u64,
}

struct Attached {
    engine: Box<dyn Verify>,
    name: &'static str,
    limits: Limits,
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Attached").field(&self.name).finish()
    }
}

/// What an engine says of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    /// The engine was not asked, or has not answered.
    Nothing,
    /// The engine could not read it.
    Unread,
    /// It says so.
    Equal,
    /// It says so.
    Different,
    /// It was right about a byte that differs.
    Differs,
}

/// How asking an engine ended.
enum Asked {
    ToTheEnd,
    CalledOff,
    Failed(Error),
}

impl Verifier {
    /// The CPU, for now. `patience` is how long an engine may take for all pairs of a call of [`Self::verify`]; what a
    /// `trusted` engine calls equal is not compared again.
    #[must_use]
    pub fn new(trusted: bool, patience: Duration) -> Self {
        Self {
            // It is asked for no keys.
            cpu: Cpu::new(KeyKind::Lines(Salt(0))),
            engine: None,
            failed: None,
            trusted,
            patience,
            next: 0,
            answered: 0,
        }
    }

    /// Asks this engine from now on.
    ///
    /// # Errors
    /// If it takes no pairs.
    pub fn attach(&mut self, engine: Box<dyn Verify>) -> Answer<()> {
        let (name, limits) = (engine.name(), engine.limits());
        if limits.at_once == 0 {
            return Err(Error::Device(format!("{name} takes no pairs")));
        }
        self.engine = Some(Attached { engine, name, limits });
        Ok(())
    }

    /// Lets go of the engine, if there is one. Not to be called while pages are away.
    pub fn detach(&mut self) {
        (self.engine, self.failed) = (None, None);
    }

    /// Whether an engine is asked.
    #[must_use]
    pub fn has_engine(&self) -> bool {
        self.engine.is_some()
    }

    /// The engine, to give it files.
    pub fn engine(&mut self) -> Option<&mut dyn Engine> {
        self.engine
            .as_mut()
            .map(|attached| &mut *attached.engine as &mut dyn Engine)
    }

    /// Why the engine was given up, if it was. It is kept, unused, until [`Self::detach`].
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.failed.as_ref().map(|(_, error)| error.clone())
    }

    /// Pairs that engines have answered.
    #[must_use]
    pub fn answered(&self) -> u64 {
        self.answered
    }

    /// CPU time of threads of the engine's own, ns.
    #[must_use]
    pub fn helper_cpu_ns(&self) -> u64 {
        self.attached()
            .map(|attached| attached.engine.helper_cpu_ns())
            .sum()
    }

    /// What the engine's device was given to do.
    #[must_use]
    pub fn device_work(&self) -> DeviceWork {
        let works = self.attached().map(|attached| attached.engine.device_work());
        works.fold(DeviceWork::default(), |all, work| all.and(&work))
    }

    /// The engine, also one that failed.
    fn attached(&self) -> impl Iterator<Item = &Attached> {
        self.engine.iter().chain(self.failed.iter().map(|(a, _)| a))
    }

    /// Compares pairs, each of which stands for something of the caller's, and names those that differ. `go_on` is asked
    /// again and again, also before the first pair; once it says no this returns `false`, soon and with pairs left.
    #[inline]
    pub fn verify<'p, T>(
        &mut self,
        pairs: impl Iterator<Item = (Pair<'p>, T)>,
        different: impl FnMut(&mut T),
        go_on: impl FnMut() -> bool,
    ) -> bool {
        if self.engine.is_none() {
            at_once(&mut self.cpu, pairs, different, go_on)
        } else {
            let (pairs, whose): (Vec<Pair<'p>>, Vec<T>) = pairs.unzip();
            self.by_engine(&pairs, whose, different, go_on)
        }
    }

    #[cold]
    fn by_engine<T>(
        &mut self,
        pairs: &[Pair<'_>],
        whose: Vec<T>,
        mut different: impl FnMut(&mut T),
        mut go_on: impl FnMut() -> bool,
    ) -> bool {
        let mut said = vec![Said::Nothing; pairs.len()];
        match self.ask(pairs, &mut said, &mut go_on) {
            Asked::ToTheEnd => {}
            Asked::CalledOff => return false,
            Asked::Failed(error) => self.fail(error),
        }
        if let Some(first) = said.iter().position(|said| *said == Said::Different) {
            if pairs[first].equal() {
                self.fail(Error::Device(
                    "it calls pages different that are equal".to_owned(),
                ));
            } else {
                said[first] = Said::Differs;
            }
        }
        let mut compared = 0usize;
        for ((pair, said), mut whose) in pairs.iter().zip(said).zip(whose) {
            let believed = self.engine.is_some();
            let equal = match said {
                Said::Differs => false,
                Said::Equal if believed && self.trusted => true,
                Said::Different if believed => false,
                _ => {
                    if compared.is_multiple_of(BLOCK) && !go_on() {
                        return false;
                    }
                    compared += 1;
                    pair.equal()
                }
            };
            if !equal {
                different(&mut whose);
                if said == Said::Equal {
                    self.fail(Error::Device("it calls pages equal that differ".to_owned()));
                }
            }
        }
        true
    }

    /// Asks the engine about all pairs that it can compare.
    fn ask(&mut self, pairs: &[Pair<'_>], said: &mut [Said], go_on: &mut dyn FnMut() -> bool) -> Asked {
        let Some(attached) = &mut self.engine else {
            return Asked::ToTheEnd;
        };
        let Limits { at_once, zeros } = attached.limits;
        let can = |pair: &Pair<'_>| zeros || !matches!(pair.with, With::Zeros);
        let asked = (pairs.iter().copied().zip(0..)).filter(|(pair, _)| can(pair));
        let (pairs, places): (Vec<Pair<'_>>, Vec<usize>) = asked.unzip();
        if pairs.is_empty() {
            return Asked::ToTheEnd;
        }
        let first = self.next;
        self.next += pairs.len() as u64;
        let deadline = Instant::now() + self.patience;
        let mut answers = Vec::with_capacity(pairs.len());
        let mut flight = Flight {
            engine: &mut *attached.engine,
            pairs,
            first,
            submitted: 0,
            open: 0,
            done: false,
        };
        loop {
            if !go_on() {
                return Asked::CalledOff;
            }
            let polled = flight.submit(at_once).and_then(|wait| {
                flight.engine.poll(wait, &mut answers)?;
                answers.drain(..).try_for_each(|answer| {
                    let at = flight.take(&answer)?;
                    self.answered += 1;
                    note(&mut said[places[at]], &flight.pairs[at], answer.answer)
                })
            });
            if let Err(error) = polled {
                return Asked::Failed(error);
            }
            if flight.submitted == flight.pairs.len() && flight.open == 0 {
                flight.done = true;
                return Asked::ToTheEnd;
            }
            if Instant::now() >= deadline {
                let (patience, left) = (self.patience, flight.pairs.len() - flight.submitted);
                let missing = flight.open + left;
                return Asked::Failed(Error::Device(format!(
                    "{missing} answers are missing after {patience:?}"
                )));
            }
        }
    }

    /// The CPU alone, from now on, for this reason.
    pub(crate) fn fail(&mut self, error: Error) {
        if let Some(attached) = self.engine.take() {
            self.failed = Some((attached, error));
        }
    }
}

/// Asks an engine that answers at once, and is believed: the CPU.
#[inline]
fn at_once<'p, T>(
    cpu: &mut impl Verify,
    mut pairs: impl Iterator<Item = (Pair<'p>, T)>,
    mut different: impl FnMut(&mut T),
    mut go_on: impl FnMut() -> bool,
) -> bool {
    let mut left = 0;
    pairs
        .try_for_each(|(pair, mut whose)| {
            if left == 0 {
                if !go_on() {
                    return ControlFlow::Break(());
                }
                left = BLOCK;
            }
            left -= 1;
            // What has no answer is not equal, as far as anybody knows.
            if cpu.compare_now(&pair) != Some(Compared::Equal) {
                different(&mut whose);
            }
            ControlFlow::Continue(())
        })
        .is_continue()
}

/// Notes an answer, the first one to this pair.
fn note(said: &mut Said, pair: &Pair<'_>, answer: Answer<Compared>) -> Answer<()> {
    if *said != Said::Nothing {
        return Err(Error::Device("it answers a pair twice".to_owned()));
    }
    *said = match answer {
        Ok(Compared::Equal) => Said::Equal,
        Ok(Compared::Different(Some(offset))) if !pair.differs_at(offset) => {
            let text = format!("it calls pages different at byte {offset}, where they are equal");
            return Err(Error::Device(text));
        }
        Ok(Compared::Different(Some(_))) => Said::Differs,
        Ok(Compared::Different(None)) => Said::Different,
        Err(error @ Error::Device(_)) => return Err(error),
        Err(Error::Fault(_) | Error::Address(_)) => Said::Unread,
    };
    Ok(())
}

/// Pairs on their way through an engine. Whatever ends the question, the engine has none of them after that.
struct Flight<'e, 'p> {
    engine: &'e mut dyn Verify,
    pairs: Vec<Pair<'p>>,
    /// The number of the first pair.
    first: u64,
    submitted: usize,
    /// Those without an answer.
    open: usize,
    /// Each has its answer, and no other answer came.
    done: bool,
}

impl Flight<'_, '_> {
    /// Submits the next pairs, if there are any. Returns how long to wait for answers then.
    #[allow(unsafe_code)] // the engine reads the pages beyond the call
    fn submit(&mut self, at_once: usize) -> Answer<Duration> {
        let left = &self.pairs[self.submitted..];
        if left.is_empty() {
            return Ok(SLICE);
        }
        let batch = &left[..left.len().min(at_once)];
        let number = self.first + self.submitted as u64;
        // SAFETY: the pairs' pages are stable for longer than this value lives, and when it is dropped each pair has its
        // answer, or all were aborted.
        let taken = unsafe { self.engine.submit(number, batch) }?;
        if taken > batch.len() {
            return Err(Error::Device(format!("it took {taken} of {} pairs", batch.len())));
        }
        self.open += taken;
        self.submitted += taken;
        let more = taken > 0 && taken < left.len();
        Ok(if more { Duration::ZERO } else { SLICE })
    }

    /// The place of the pair that an answer is for.
    fn take(&mut self, answer: &PairAnswer) -> Answer<usize> {
        let number = answer.number;
        let at = number
            .checked_sub(self.first)
            .and_then(|at| usize::try_from(at).ok());
        let at = at.filter(|at| *at < self.submitted);
        let at =
            at.ok_or_else(|| Error::Device(format!("it answers pair {number}, which it was not asked")))?;
        self.open = self.open.saturating_sub(1);
        Ok(at)
    }
}

impl Drop for Flight<'_, '_> {
    fn drop(&mut self) {
        if !self.done {
            self.engine.abort();
        }
    }
}

#[cfg(test)]
mod tests;
