//! Engines that do what real ones do on bad days: [`Double`].
#![allow(unsafe_code)] // the trait's submit() is unsafe

use super::pages::mix;
use crate::compare::{
    Account, Answer, Compared, DeviceWork, Engine, Error, Keys, Limits, Meanwhile, PageId, Pages, Pair,
    PairAnswer, Searched, TreeSearch, Verify,
};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use vmm_dedup_protocol::tree::TreeReader;

/// What a [`Double`] adds to an engine. With the default it adds nothing.
///
/// Rates are of 1,024 answers. The first two conform.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// How long each answer to a pair is held back; searches and keys take that much longer.
    pub latency: Duration,
    /// Whether answers to pairs come in another order.
    pub reorder: bool,
    /// Answers that never come.
    pub lost: u64,
    /// Answers that are wrong: equal for different and the other way, keys and twins of something else.
    pub lies: u64,
    /// Answers to pairs that come twice.
    pub twice: u64,
    /// Answers to pairs that were not asked.
    pub strays: u64,
    /// Pairs that cannot be read.
    pub faults: u64,
    /// Answers after which the device is dead.
    pub dies_after: Option<u64>,
    /// Seed of all that is left to chance.
    pub seed: u64,
}

/// An engine with faults.
#[derive(Debug)]
pub struct Double<E> {
    engine: E,
    faults: Faults,
    rolls: u64,
    answered: u64,
    /// Answers that are held back, and until when.
    held: VecDeque<(Instant, PairAnswer)>,
}

impl<E> Double<E> {
    /// An engine as it is, with faults.
    pub fn new(engine: E, faults: Faults) -> Self {
        Self {
            engine,
            faults,
            rolls: 0,
            answered: 0,
            held: VecDeque::new(),
        }
    }

    fn random(&mut self) -> u64 {
        self.rolls += 1;
        mix(self.faults.seed ^ self.rolls << 20)
    }

    fn happens(&mut self, rate: u64) -> bool {
        self.random() % 1024 < rate
    }

    /// Counts so many answers.
    fn live(&mut self, answers: usize) -> Answer<()> {
        self.answered += answers as u64;
        match self.faults.dies_after {
            Some(last) if self.answered > last => Err(Error::Device("the double died".to_owned())),
            _ => Ok(()),
        }
    }

    /// What becomes of answers in a list.
    fn spoil<T>(&mut self, answers: Vec<Answer<T>>, lie: impl Fn(u64, T) -> T) -> Vec<Answer<T>> {
        std::thread::sleep(self.faults.latency);
        if let Err(dead) = self.live(answers.len()) {
            return answers.iter().map(|_| Err(dead.clone())).collect();
        }
        let (lost, lies) = (self.faults.lost, self.faults.lies);
        let mut spoilt = Vec::with_capacity(answers.len());
        for answer in answers {
            if !self.happens(lost) {
                let random = self.random();
                let lying = self.happens(lies);
                spoilt.push(answer.map(|right| if lying { lie(random, right) } else { right }));
            }
        }
        spoilt
    }
}

impl<E: Engine> Engine for Double<E> {
    fn name(&self) -> &'static str {
        "double"
    }

    fn map(&mut self, first: PageId, pages: usize, file: BorrowedFd<'_>) -> Answer<()> {
        self.live(0)?;
        self.engine.map(first, pages, file)
    }

    fn unmap(&mut self, first: PageId, pages: usize) -> Answer<()> {
        self.live(0)?;
        self.engine.unmap(first, pages)
    }

    fn device_work(&self) -> DeviceWork {
        self.engine.device_work()
    }

    fn account(&self) -> Account {
        self.engine.account()
    }
}

impl<E: Keys> Keys for Double<E> {
    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>> {
        let keys = self.engine.keys(pages, of);
        self.spoil(keys, |random, _| random)
    }
}

impl<E: TreeSearch> TreeSearch for Double<E> {
    fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>> {
        let twins = self.engine.search(pages, tree, candidates);
        self.spoil(twins, |random, _| Some(PageId(random % 64)))
    }

    fn search_keyed(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
        meanwhile: &mut Meanwhile<'_>,
    ) -> Vec<Answer<Searched>> {
        let searched = self.engine.search_keyed(pages, tree, candidates, meanwhile);
        self.spoil(searched, |random, _| Searched {
            twin: Some(PageId(random % 64)),
            key: Some(random),
        })
    }

    fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>> {
        self.live(1)?;
        let lies = self.faults.lies;
        if self.happens(lies) {
            return Ok(Some(set.len()));
        }
        self.engine.among(pages, candidate, set)
    }
}

impl<E: Verify> Verify for Double<E> {
    fn limits(&self) -> Limits {
        self.engine.limits()
    }

    unsafe fn submit(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize> {
        self.live(0)?;
        // SAFETY: the caller's promise goes on; abort() and poll() do.
        unsafe { self.engine.submit(first, pairs) }
    }

    fn poll(&mut self, wait: Duration, answers: &mut Vec<PairAnswer>) -> Answer<()> {
        let Faults {
            latency,
            reorder,
            lost,
            lies,
            twice,
            strays,
            faults,
            ..
        } = self.faults;
        let mut fresh = Vec::new();
        self.engine.poll(Duration::ZERO, &mut fresh)?;
        self.live(fresh.len())?;
        let ready = Instant::now() + latency;
        for mut answer in fresh {
            if self.happens(lies) {
                answer.answer = answer.answer.map(|right| match right {
                    Compared::Equal => Compared::Different(None),
                    Compared::Different(_) => Compared::Equal,
                });
            }
            if self.happens(faults) {
                answer.answer = Err(Error::Fault(PageId(answer.number)));
            }
            if self.happens(twice) {
                self.held.push_back((ready, answer.clone()));
            }
            if self.happens(strays) {
                let stray = answer.number.wrapping_sub(self.random() % 100_000 + 1000);
                self.held.push_back((
                    ready,
                    PairAnswer {
                        number: stray,
                        ..answer.clone()
                    },
                ));
            }
            if !self.happens(lost) {
                self.held.push_back((ready, answer));
            }
        }
        if reorder {
            for at in 0..self.held.len() {
                let other = usize::try_from(self.random() >> 32).unwrap_or(0) % self.held.len();
                self.held.swap(at, other);
            }
        }
        let now = Instant::now();
        let due = |(ready, _): &(Instant, PairAnswer)| *ready <= now;
        let before = answers.len();
        let (due, held) = std::mem::take(&mut self.held).into_iter().partition(due);
        self.held = held;
        answers.extend(VecDeque::into_iter(due).map(|(_, answer)| answer));
        if answers.len() == before {
            std::thread::sleep(wait);
        }
        Ok(())
    }

    fn abort(&mut self) {
        self.held.clear();
        self.engine.abort();
    }
}
