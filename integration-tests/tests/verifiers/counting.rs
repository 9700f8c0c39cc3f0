//! A verifier of somebody else's: all that there is to one. It is used by its registration, and nothing else knows it.
#![allow(unsafe_code)] // the trait's submit() is unsafe

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use vmm_dedup::compare::{Account, Answer, Engine, Limits, Pair, PairAnswer, Verify};

/// Compares byte by byte, answers the last pair first, and counts.
#[derive(Debug, Default)]
pub(crate) struct Counting {
    compared: Arc<AtomicU64>,
    answers: Vec<PairAnswer>,
}

impl Counting {
    pub(crate) fn new(compared: Arc<AtomicU64>) -> Self {
        let answers = Vec::new();
        Self { compared, answers }
    }
}

impl Engine for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn account(&self) -> Account {
        let compared = self.compared.load(Ordering::Relaxed);
        Account {
            pages: compared,
            comparisons: compared,
            bytes: compared * 8192,
            ..Account::default()
        }
    }
}

impl Verify for Counting {
    fn limits(&self) -> Limits {
        Limits {
            at_once: 100,
            zeros: true,
        }
    }

    unsafe fn submit(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize> {
        for (at, pair) in pairs.iter().enumerate() {
            self.compared.fetch_add(1, Ordering::Relaxed);
            let number = first + at as u64;
            let answer = Ok(pair.compare());
            self.answers.push(PairAnswer { number, answer });
        }
        Ok(pairs.len())
    }

    fn poll(&mut self, _: Duration, answers: &mut Vec<PairAnswer>) -> Answer<()> {
        answers.extend(self.answers.drain(..).rev());
        Ok(())
    }

    fn abort(&mut self) {
        self.answers.clear();
    }
}
