//! Settings of a service: one definition for TOML files, for JSON, for one line ([`Setup`]) and for programs.

mod agent;
mod settings;
mod setup;
#[cfg(feature = "settings")]
mod text;

pub use agent::AgentSocket;
#[cfg(not(feature = "agent"))]
pub(crate) use agent::unheard;
pub(crate) use settings::INDEX;
pub use settings::{Breaks, Config, Pack, Policy, Sampling, UseSource, Verification};
pub use setup::Setup;
