//! What benches do with a service of our own.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use vmm_dedup::{Breaks, Config, DedupService, ServiceStats};
use vmm_dedup_host::Failure;

/// State of a service that has lost its store: a number of `vmm_dedup_protocol::stats::STATES`.
const WITHOUT_STORE: u64 = 3;

/// Who copies a shared page when the guest writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Breaker {
    /// The kernel.
    Kernel,
    /// The service, from a reserve.
    Managed,
}

impl Breaker {
    /// As a service has it unless it is told otherwise.
    pub(crate) fn usual() -> Self {
        match Config::default().breaks {
            Breaks::Kernel { .. } => Self::Kernel,
            Breaks::Managed { .. } => Self::Managed,
        }
    }

    /// As it is written in arguments.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Managed => "managed",
        }
    }

    /// The setting; a reserve is one that small benches do not use up.
    pub(crate) fn breaks(self) -> Breaks {
        match self {
            Self::Kernel => Breaks::KERNEL,
            Self::Managed => Breaks::managed(4096, 256 << 20),
        }
    }
}

/// Runs one pass; fails without a store, since nothing would be measured.
pub(crate) fn pass(service: &DedupService) -> Result<ServiceStats, Failure> {
    let stats = service.pass().map_err(Failure::from_error)?;
    if stats.state == WITHOUT_STORE {
        return Err(Failure::new("the store went away during the measurement"));
    }
    Ok(stats)
}
