//! Which store, and how: all that a VMM has to be told.

use crate::compare::Engines;
use crate::config::{AgentSocket, Config};
use crate::error::Error;
use std::path::PathBuf;

/// The key of [`Setup::store`].
pub(super) const STORE: &str = "store";

/// A store, and settings of a service on it.
///
/// Programs build it by [`Self::new`] and [`Self::with`]. Fields may be added in any version, here and in [`Config`]: whoever writes a
/// literal ends it in `..Setup::new(store)` or `..Config::default()`. (So these are not `non_exhaustive`, which forbids that.)
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "settings",
    derive(serde::Serialize, serde::Deserialize),
    serde(
        try_from = "serde_json::Map<String, serde_json::Value>",
        into = "serde_json::Map<String, serde_json::Value>"
    )
)]
pub struct Setup {
    /// The store's socket.
    pub store: PathBuf,
    /// Where the guest's agent is heard, if it is.
    pub agent: Option<AgentSocket>,
    /// How the service works.
    pub config: Config,
}

impl Setup {
    /// On a store's socket, with all defaults.
    #[must_use]
    pub fn new(store: impl Into<PathBuf>) -> Self {
        Self {
            store: store.into(),
            ..Self::default()
        }
    }

    /// The same with other settings: `Setup::new(store).with(|config| config.cpu_percent = 10)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// The same with the guest's agent heard there.
    #[must_use]
    pub fn with_agent(self, agent: AgentSocket) -> Self {
        Self {
            agent: Some(agent),
            ..self
        }
    }

    /// Checks everything that can be checked without the store, early.
    ///
    /// # Errors
    /// Those of [`Self::validate`] and [`Config::check_engines`].
    pub fn check(&self, engines: &Engines) -> Result<(), Error> {
        self.validate()?;
        self.config.check_engines(engines)
    }

    /// Checks the values, as reading a line or a table does.
    ///
    /// # Errors
    /// Those of [`Config::validate`]; [`Error::Config`] without a store, and for an agent where the crate is built without its
    /// feature `agent`.
    pub fn validate(&self) -> Result<(), Error> {
        if self.store.as_os_str().is_empty() {
            return Err(Error::Config {
                field: STORE,
                value: "empty".into(),
                rule: "it must be the path of a store's socket",
            });
        }
        #[cfg(not(feature = "agent"))]
        if let Some(agent) = &self.agent {
            return Err(crate::config::unheard(agent));
        }
        self.config.validate()
    }
}
