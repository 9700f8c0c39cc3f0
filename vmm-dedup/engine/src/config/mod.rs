//! Settings of a service: one definition for TOML files, for JSON, for one line ([`Setup`]) and for programs.

mod agent;
#[cfg(feature = "settings")]
mod changes;
mod choices;
#[cfg(feature = "settings")]
mod kinds;
mod live;
mod settings;
mod setup;
#[cfg(feature = "settings")]
mod text;

pub use agent::AgentSocket;
#[cfg(not(feature = "agent"))]
pub(crate) use agent::unheard;
pub use choices::{Breaks, Policy, UseSource};
pub(crate) use settings::INDEX;
pub use settings::{Config, Pack, Sampling, Verification};
pub use setup::Setup;
