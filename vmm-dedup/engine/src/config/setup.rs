//! Which store, and how: all that a VMM has to be told.

use crate::compare::Engines;
use crate::config::Config;
use crate::error::Error;
use std::path::PathBuf;

/// The key of [`Setup::store`].
pub(super) const STORE: &str = "store";

/// A store, and settings of a service on it.
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
    /// How the service works.
    pub config: Config,
}

impl Setup {
    /// Checks everything that can be checked without the store, early.
    ///
    /// # Errors
    /// Those of [`Config::check`]; [`Error::Config`] without a store.
    pub fn check(&self, engines: &Engines) -> Result<(), Error> {
        if self.store.as_os_str().is_empty() {
            return Err(Error::Config {
                field: STORE,
                value: "empty".into(),
                rule: "it must be the path of a store's socket",
            });
        }
        self.config.check(engines)
    }
}
