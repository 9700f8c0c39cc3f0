//! What a guest's process is told, a line each, and what it answers.

use super::files::List;
use super::pattern::Kind;
use crate::service::Breaker;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What a guest is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) kind: Kind,
    pub(super) thp: bool,
    pub(super) mib: u32,
    /// Its number, from 0.
    pub(super) guest: usize,
    pub(super) files: List,
}

/// An order.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Fill the memory. The first order. The answer is [`Done`].
    Fill(Plan),
    /// Let KSM merge the memory. [`Done`].
    LetKsmMerge,
    /// Start a service. [`Done`].
    Serve { store: PathBuf, breaks: Breaker },
    /// Begin or end passes beside what else is ordered. [`Done`].
    PassAllTheTime(bool),
    /// Write what the next round replaces: nanoseconds for each page.
    Write,
    /// Run a pass: [`Passed`].
    Pass,
    /// Tell what the kernel and the service say: [`Looked`].
    Look,
    /// Count the pages that do not hold what they should.
    Check,
}

/// It is done.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Done;

/// After a pass: what stands still when there is nothing left to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Passed {
    /// All that only grows by work: pages merged and published, huge pages split and built.
    pub(super) work: u64,
    /// Pages that map the store, as far as the service knows.
    pub(super) mapped: u64,
}

/// What there is at the end of a round.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Looked {
    /// Pages that map the store: the kernel's word, from its lists of mappings and pages.
    pub(super) mapped: u64,
    /// Pages that the service replaced by the zero page.
    pub(super) zero: u64,
    /// Mappings of the process beyond those it had before.
    pub(super) vmas: u64,
    /// Pages that stay private in mappings of the store.
    pub(super) broken: u64,
}
