//! What each client's device is like.

use crate::spaces::Translate;
use std::sync::Arc;
use vmm_dedup_dsa_model::{Faults, Shape, Timing};

/// What each client's device is like.
#[derive(Clone, Debug)]
pub struct Device {
    /// What it can do.
    pub shape: Shape,
    /// How long that takes.
    pub timing: Timing,
    /// What goes wrong by chance.
    pub faults: Faults,
    /// Who translates addresses of address spaces.
    pub spaces: Option<Arc<dyn Translate>>,
}

impl Default for Device {
    /// Sapphire Rapids, with its published latency and bandwidth.
    fn default() -> Self {
        Self {
            shape: Shape::sapphire_rapids(),
            timing: Timing::PUBLISHED,
            faults: Faults::default(),
            spaces: None,
        }
    }
}
