//! What benches do with a service of our own: by a supervisor, as a VMM has one.
#![allow(unsafe_code)] // the service works on an area's addresses

use crate::content::Area;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vmm_dedup::{AgentSocket, Breaks, Config, Engines, HostRange, Options, ServiceStats, Setup, Supervisor};
use vmm_dedup_host::Failure;
use vmm_dedup_refvmm::GuestMemory;

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
            Breaks::Managed { .. } => Self::Managed,
            _ => Self::Kernel,
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

/// Nothing pins memory unseen: there is no guest that could run guests, and no ring.
pub(crate) fn vouched() -> Options {
    Options {
        vouch_for_pins: true,
        ..Options::default()
    }
}

/// With these engines to choose from.
pub(crate) fn with_engines(engines: Engines) -> Options {
    Options {
        engines,
        ..Options::default()
    }
}

/// Memory under a service. Dropped it is left as it is: what is shared stays shared.
pub(crate) struct Served(Supervisor);

impl Served {
    /// Begins on an area.
    pub(crate) fn area(area: &Area, store: &Path, config: Config, options: Options) -> Result<Self, Failure> {
        Self::area_with_agent(area, store, config, options, None)
    }

    /// The same, with an agent that is heard there. The area is the guest's memory from its first frame on.
    pub(crate) fn area_with_agent(
        area: &Area,
        store: &Path,
        config: Config,
        options: Options,
        agent: Option<AgentSocket>,
    ) -> Result<Self, Failure> {
        let range = HostRange::try_new(area.address(), area.len()).map_err(Failure::from_error)?;
        let range = range.at_guest_address(0);
        Self::begin(store, config, options, agent, |supervisor| {
            // SAFETY: the area stays mapped for the process's lifetime and is only accessed through raw pointers.
            unsafe { supervisor.add_range(range) };
            Ok(())
        })
    }

    /// Begins on a guest's memory.
    pub(crate) fn guest(
        memory: Arc<GuestMemory>,
        store: &Path,
        config: Config,
        options: Options,
    ) -> Result<Self, Failure> {
        Self::begin(store, config, options, None, |supervisor| {
            supervisor.add_memory(memory)
        })
    }

    fn begin(
        store: &Path,
        config: Config,
        options: Options,
        agent: Option<AgentSocket>,
        add: impl FnOnce(&Supervisor) -> Result<(), vmm_dedup::Error>,
    ) -> Result<Self, Failure> {
        let options = Options {
            // It starts when it is told to, all at once.
            settle: Duration::from_secs(60),
            ..options
        };
        let setup = Setup {
            store: store.to_owned(),
            agent,
            config,
        };
        let served = Supervisor::serving(options, setup, add);
        served.map(Self).map_err(Failure::from_error)
    }

    /// Runs one pass; fails without a store, since nothing would be measured.
    pub(crate) fn pass(&self) -> Result<ServiceStats, Failure> {
        let stats = self.0.pass().map_err(Failure::from_error)?;
        if stats.state == WITHOUT_STORE {
            return Err(Failure::new("the store went away during the measurement"));
        }
        Ok(stats)
    }

    /// The account as of the last pass.
    pub(crate) fn stats(&self) -> ServiceStats {
        self.0.stats().unwrap_or_default()
    }

    /// Ends the service, with or without making everything private first.
    pub(crate) fn stop(self, unmerge: bool) -> Result<(), Failure> {
        self.0.detach(unmerge).map(drop).map_err(Failure::from_error)
    }
}
