//! The driver: PageForge as an engine of the service, wherever the device is. [`PageForgeEngine`] makes keys and searches,
//! [`PageForgeVerifier`] verifies; each drives a device of its own.
//!
//! A search goes down the tree five levels at a time, as in section 3.4: a table holds a node and four levels below it,
//! in breadth-first order, and the way out of the table tells with which node the next one begins. Here candidates
//! go in batches: first all through the table of the root, then each through its next one, and so on. A table that was
//! loaded once stays in the device's window and is used until the tree changes, so that most jobs cost the driver two
//! words written and one read. Subtrees of up to three levels, which are many and used seldom, are loaded for each job.
//!
//! What is found here is a proposal, which is verified once the page was taken from the guest.

mod courier;
mod failure;
mod in_process;
mod jobs;
mod port;
mod tables;
mod verifier;
mod vfio_user;

pub use failure::ConnectError;
pub use in_process::InProcess;
pub use port::Port;
pub use verifier::PageForgeVerifier;
pub use vfio_user::VfioUser;

use crate::scan_table::{EntryIndex, OTHER_PAGES, OtherPage, Pointer, Ppn, RunError};
use crate::window::{Info, Job, JobError, RING};
use jobs::{NOWHERE, job, ppn_of};
use std::os::fd::BorrowedFd;
use tables::Tables;
use vmm_dedup::compare::{
    Account, Answer, Engine, Error, Keys, Meanwhile, PageId, Pages, Searched, Stopwatch, TreeSearch,
};
use vmm_dedup_protocol::tree::{MAX_STEPS, Node, TreeReader};

/// Levels of a tree that a table holds.
const TABLE_LEVELS: u32 = 5;
/// Rounds after which a search gives up: each goes down a table.
const MAX_ROUNDS: usize = MAX_STEPS / TABLE_LEVELS as usize + 1;

/// PageForge behind a port: keys, and searches in trees and sets.
#[derive(Debug)]
pub struct PageForgeEngine<P> {
    port: P,
    tables: Tables,
    own: Account,
}

/// A candidate on its way down a tree.
#[derive(Clone, Copy, Debug)]
struct Walk {
    /// Its place among the questions.
    question: usize,
    candidate: Ppn,
    /// The node that its next table begins with.
    node: Node,
    table: u32,
}

impl<P: Port> PageForgeEngine<P> {
    /// Drives the device behind this port, which nobody else may do.
    pub fn new(port: P) -> Self {
        Self {
            port,
            tables: Tables::default(),
            own: Account::default(),
        }
    }

    /// The device, for its account in cycles.
    pub fn port(&mut self) -> &mut P {
        &mut self.port
    }

    /// Runs a job for each page, in batches of as many as the ring holds.
    fn ask(
        &mut self,
        pages: &dyn Pages,
        of: &[PageId],
        prepare: impl Fn(&PageId) -> Answer<Job>,
    ) -> Vec<Answer<Info>> {
        let mut answers = Vec::with_capacity(of.len());
        for batch in of.chunks(RING) {
            let jobs: Vec<Answer<Job>> = batch.iter().map(&prepare).collect();
            let good: Vec<Job> = jobs.iter().flatten().copied().collect();
            let mut outcomes = self.port.run(pages, &good).map(Vec::into_iter);
            answers.extend(jobs.into_iter().map(|job| match (job, &mut outcomes) {
                (Err(error), _) => Err(error),
                (Ok(_), Err(error)) => Err(error.clone()),
                (Ok(_), Ok(outcomes)) => outcomes.next().ok_or_else(missing_outcome),
            }));
        }
        answers
    }

    /// One batch of candidates, at most as many as the ring holds, on their way down.
    fn descend(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        mut walks: Vec<Walk>,
        keyed: bool,
        answers: &mut [Answer<Searched>],
    ) {
        for _ in 0..MAX_ROUNDS {
            if walks.is_empty() {
                return;
            }
            self.tables.expect(tree, walks.len());
            for (place, walk) in (0..).zip(&mut walks) {
                walk.table = self.tables.load(self.port.window(), tree, walk.node, place);
            }
            let jobs: Vec<Job> = walks
                .iter()
                .map(|walk| {
                    // The key is ready when the table that the search ends in is done.
                    let last_refill = keyed && tree.levels(walk.node) <= TABLE_LEVELS;
                    job(walk.candidate, walk.table, 0, last_refill)
                })
                .collect();
            let outcomes = match self.port.run(pages, &jobs) {
                Ok(outcomes) => outcomes,
                Err(error) => {
                    walks
                        .iter()
                        .for_each(|walk| answers[walk.question] = Err(error.clone()));
                    return;
                }
            };
            let mut rest = Vec::with_capacity(walks.len());
            for (walk, info) in walks.into_iter().zip(outcomes) {
                match self.step(tree, &walk, &info) {
                    Ok(Step::Down(node)) => rest.push(Walk { node, ..walk }),
                    Ok(Step::End(twin)) => {
                        answers[walk.question] = Ok(Searched {
                            twin: twin.map(PageId::of_node),
                            key: info.hash_key.map(|key| key.raw().into()),
                        });
                    }
                    Err(error) => answers[walk.question] = Err(error),
                }
            }
            walks = rest;
        }
    }

    fn step(&self, tree: TreeReader<'_>, walk: &Walk, info: &Info) -> Answer<Step> {
        let other = |ptr| self.tables.node(walk.table, ptr).map(PageId::of_node);
        check(info, walk.candidate, other)?;
        Ok(if info.duplicate {
            Step::End(self.tables.node(walk.table, info.ptr))
        } else {
            let below = self.tables.way_out(tree, walk.table, info.ptr);
            below.map_or(Step::End(None), Step::Down)
        })
    }
}

/// What a candidate does after a table.
enum Step {
    Down(Node),
    End(Option<Node>),
}

fn missing_outcome() -> Error {
    Error::Device("it did not answer all jobs".to_owned())
}

/// Turns what went wrong with a job into an error; `other` says which page an entry is.
fn check(info: &Info, candidate: Ppn, other: impl FnOnce(Pointer) -> Option<PageId>) -> Answer<()> {
    match info.error {
        None => Ok(()),
        Some(JobError::Run(RunError::CandidateFault)) => Err(Error::Fault(PageId(candidate.number()))),
        Some(JobError::Run(RunError::OtherFault)) => match other(info.ptr) {
            Some(page) => Err(Error::Fault(page)),
            None => Err(Error::Device(RunError::OtherFault.to_string())),
        },
        Some(error) => Err(Error::Device(error.to_string())),
    }
}

impl<P: Port> Engine for PageForgeEngine<P> {
    fn name(&self) -> &'static str {
        self.port.name()
    }

    fn map(&mut self, first: PageId, pages: usize, file: BorrowedFd<'_>) -> Answer<()> {
        self.port.map(first, pages, file)
    }

    fn unmap(&mut self, first: PageId, pages: usize) -> Answer<()> {
        self.port.unmap(first, pages)
    }

    fn helper_cpu_ns(&self) -> u64 {
        self.port.helper_cpu_ns()
    }

    fn account(&self) -> Account {
        self.port.add_account(self.own)
    }
}

impl<P: Port> Keys for PageForgeEngine<P> {
    /// The device's ECC keys: a candidate with Last Refill and nothing to be compared with.
    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>> {
        let watch = Stopwatch::start();
        self.own.pages += of.len() as u64;
        let infos = self.ask(pages, of, |page| Ok(job(ppn_of(*page)?, 0, NOWHERE, true)));
        let key = |(page, info): (&PageId, Answer<Info>)| {
            let info = info?;
            check(&info, ppn_of(*page)?, |_| None)?;
            info.hash_key
                .map(|key| key.raw().into())
                .ok_or_else(missing_outcome)
        };
        let keys = of.iter().zip(infos).map(key).collect();
        watch.stop(&mut self.own);
        keys
    }
}

impl<P: Port> TreeSearch for PageForgeEngine<P> {
    fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>> {
        let searched = self.search_tree(pages, tree, candidates, false).into_iter();
        searched.map(|one| one.map(|one| one.twin)).collect()
    }

    /// The device makes the key while it compares (section 3.3).
    fn search_keyed(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
        _meanwhile: &mut Meanwhile<'_>,
    ) -> Vec<Answer<Searched>> {
        self.search_tree(pages, tree, candidates, true)
    }

    /// The arbitrary-set mode of section 4.2: Less and More of each entry both name the next one.
    fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>> {
        let watch = Stopwatch::start();
        self.own.pages += 1;
        let table = self.tables.of_job(0);
        let mut answer = Ok(None);
        for (refill, part) in set.chunks(OTHER_PAGES).enumerate() {
            answer = self.among_part(pages, candidate, part, table);
            if let Ok(Some(at)) = &mut answer {
                *at += refill * OTHER_PAGES;
            }
            if answer != Ok(None) {
                break;
            }
        }
        watch.stop(&mut self.own);
        answer
    }
}

impl<P: Port> PageForgeEngine<P> {
    fn search_tree(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
        keyed: bool,
    ) -> Vec<Answer<Searched>> {
        let watch = Stopwatch::start();
        self.own.pages += candidates.len() as u64;
        let mut answers = Vec::with_capacity(candidates.len());
        for batch in candidates.chunks(RING) {
            let first = answers.len();
            let mut walks = Vec::with_capacity(batch.len());
            for (place, page) in batch.iter().enumerate() {
                let walk = |(candidate, node)| Walk {
                    question: first + place,
                    candidate,
                    node,
                    table: 0,
                };
                let ppn = ppn_of(*page);
                walks.extend(ppn.clone().ok().zip(tree.root()).map(walk));
                answers.push(ppn.map(|_| Searched::default()));
            }
            self.descend(pages, tree, walks, keyed, &mut answers);
        }
        watch.stop(&mut self.own);
        answers
    }

    fn among_part(
        &mut self,
        pages: &dyn Pages,
        candidate: PageId,
        part: &[PageId],
        table: u32,
    ) -> Answer<Option<usize>> {
        let candidate = ppn_of(candidate)?;
        // A page number that no address has ends the set: what comes before it is compared first.
        let valid = part.iter().map_while(|page| ppn_of(*page).ok());
        let mut entries = [None; OTHER_PAGES];
        let mut len = 0;
        for ((ppn, next), entry) in valid.zip(1..).zip(&mut entries) {
            let next = Pointer::new(next);
            *entry = Some(OtherPage {
                ppn,
                less: next,
                more: next,
            });
            len += 1;
        }
        for (index, entry) in EntryIndex::all().zip(entries) {
            self.port.window().set_entry(table, index, entry);
        }
        let outcomes = self.port.run(pages, &[job(candidate, table, 0, false)])?;
        let info = outcomes.first().ok_or_else(missing_outcome)?;
        let entry = |ptr: Pointer| ptr.entry().map(EntryIndex::number);
        check(info, candidate, |ptr| part.get(entry(ptr)?).copied())?;
        match part.get(len) {
            _ if info.duplicate => Ok(entry(info.ptr)),
            Some(impossible) => Err(Error::Fault(*impossible)),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests;
