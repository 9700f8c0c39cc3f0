//! A fleet that churns for as long as one likes, and what must not change meanwhile.
//!
//! One process ([`fleet`]) has the store and payload guests, which write what they share, restore it and rest, and which come and
//! go. Another ([`pair`]) stands for two VMs with disks for direct I/O: what they have in common is replaced again and again.
//! After each round a [`Sample`] is taken. [`problems`] judges them: whether sharing decays, and whether the store, the
//! mappings or the memory of the processes grow.

pub mod fleet;
pub mod pair;

use serde_json::{Value, json};

/// What there is at the end of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Since the beginning.
    pub seconds: f64,
    /// Of what the guests have in common, what was shared while they rested: the guest that shared least.
    pub guests: f64,
    /// The same of the pair.
    pub pair: f64,
    /// Memory of the store, bytes.
    pub resident: u64,
    /// Of it, in use, bytes.
    pub in_use: u64,
    /// Mappings of both processes.
    pub mappings: u64,
    /// Anonymous memory of both processes, bytes.
    pub memory: u64,
}

impl Sample {
    /// For reports.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "seconds": self.seconds,
            "guests_shared": self.guests,
            "pair_shared": self.pair,
            "store_resident_bytes": self.resident,
            "store_in_use_bytes": self.in_use,
            "mappings": self.mappings,
            "memory_bytes": self.memory,
        })
    }
}

/// Least that must be shared, of what is common.
const SHARED: f64 = 0.9;
/// How much of its sharing the fleet may lose from the first third of the rounds to the last.
const KEPT: f64 = 0.95;
/// How much may be added to the figures of the first third, in tenths of them, and besides.
const GROWTH: u64 = 1;
const MORE_MAPPINGS: u64 = 500;
const MORE_MEMORY: u64 = 16 << 20;
/// What the store may have beyond what is in use: three twentieths, and room for files that are being left.
const STORE_SPARE: u64 = 48 << 20;

/// What is wrong with the samples of a run, as a sentence each.
#[must_use]
pub fn problems(samples: &[Sample]) -> Vec<String> {
    let third = samples.len() / 3;
    if third == 0 {
        return vec![format!(
            "{} rounds tell nothing: let it run for longer",
            samples.len()
        )];
    }
    let (first, last) = (&samples[..third], &samples[samples.len() - third..]);
    let mut problems = Vec::new();
    for (who, of) in [
        ("the guests", (|s: &Sample| s.guests) as fn(&Sample) -> f64),
        ("the pair with direct I/O", |s| s.pair),
    ] {
        let [before, after] = [first, last].map(|some| median(some.iter().map(of)));
        if after < SHARED || after < KEPT * before {
            problems.push(format!(
                "sharing decays: {who} shared {before:.3} of what is common, and then {after:.3}"
            ));
        }
    }
    // Between files that are filled and files that are emptied it goes up and down: the least tells.
    let spare = |sample: &Sample| sample.resident.saturating_sub(sample.in_use * 23 / 20);
    let spare = last.iter().map(spare).min().unwrap_or(0);
    if spare > STORE_SPARE {
        problems.push(format!("the store keeps {spare} bytes that nobody uses"));
    }
    for (what, of, more) in [
        (
            "mappings",
            (|s: &Sample| s.mappings) as fn(&Sample) -> u64,
            MORE_MAPPINGS,
        ),
        ("bytes of memory", |s| s.memory, MORE_MEMORY),
    ] {
        let before = first.iter().map(of).max().unwrap_or(0);
        let after = last.iter().map(of).min().unwrap_or(0);
        if after > before + before * GROWTH / 10 + more {
            problems.push(format!("the processes grow: {before} {what}, and then {after}"));
        }
    }
    problems
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WELL: Sample = Sample {
        seconds: 0.0,
        guests: 0.99,
        pair: 0.98,
        resident: 60 << 20,
        in_use: 40 << 20,
        mappings: 3000,
        memory: 200 << 20,
    };

    /// Twelve rounds, of which `change` changes each by its number.
    fn rounds(change: impl Fn(u64, &mut Sample)) -> Vec<Sample> {
        let round = |n| {
            let mut sample = WELL;
            change(n, &mut sample);
            sample
        };
        (0..12).map(round).collect()
    }

    #[test]
    fn a_fleet_that_stays_as_it_is_has_no_problem() {
        assert_eq!(problems(&rounds(|_, _| ())), Vec::<String>::new());
        // A round in which the machine was busy.
        assert_eq!(
            problems(&rounds(|n, sample| if n == 9 {
                sample.pair = 0.2
            })),
            Vec::<String>::new()
        );
    }

    #[test]
    fn each_kind_of_decay_and_growth_is_found() {
        let found = |change: fn(u64, &mut Sample), says: &str| {
            let problems = problems(&rounds(change));
            assert!(problems.len() == 1 && problems[0].contains(says), "{problems:?}");
        };
        found(
            |n, sample| sample.pair -= n as f64 / 50.0,
            "the pair with direct I/O shared 0.9",
        );
        found(|n, sample| sample.guests -= n as f64 / 50.0, "the guests shared");
        found(|n, sample| sample.resident += n << 23, "the store keeps");
        found(|n, sample| sample.mappings += n * 400, "mappings, and then");
        found(|n, sample| sample.memory += n << 23, "bytes of memory");
    }

    #[test]
    fn too_few_rounds_are_a_problem() {
        assert_eq!(problems(&[WELL; 2]).len(), 1);
    }
}
