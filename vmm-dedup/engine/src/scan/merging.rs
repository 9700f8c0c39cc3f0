//! Who merges for a pass, and what it has planned.

use crate::config::Config;
use crate::merge::admission::Terms;
use crate::merge::bridged_runs::Deferred;
use crate::merge::healer::Healer;
use crate::merge::merger::Merger;
use crate::merge::plan::{Plan, WindowSize};
use crate::merge::swapped::Swapped;
use crate::merge::verify_engine::VerifyEngine;

/// Who merges, and what is to be merged.
#[derive(Debug)]
pub(crate) struct Merging {
    pub(super) merger: Merger,
    pub(super) healer: Healer,
    /// Which pages are swapped out, as of the last plan.
    pub(super) swapped: Swapped,
    pub(super) deferred: Deferred,
    /// Of the last plan.
    pub(super) terms: Terms,
    pub(super) plan: Plan,
    pub(super) window_size: WindowSize,
}

impl Merging {
    pub(super) fn new(config: &Config, verify_engine: VerifyEngine, healer: Healer) -> Self {
        Self {
            merger: Merger::new(verify_engine),
            healer,
            swapped: Swapped::new(),
            deferred: Deferred::default(),
            terms: Terms::default(),
            plan: Plan::default(),
            window_size: WindowSize::new(config.stop_target_us),
        }
    }

    /// What verifies.
    pub(super) fn verify_engine(&mut self) -> &mut VerifyEngine {
        &mut self.merger.verify_engine
    }

    /// The store was lost, and with it everything that maps its slots.
    pub(super) fn forget_store(&mut self) {
        self.merger.verify_engine.forget_store();
        self.plan = Plan::default();
        self.deferred = Deferred::default();
    }
}
