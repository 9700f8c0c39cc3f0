//! Which store, and how: all that a VMM has to be told.

use crate::compare::Engines;
use crate::config::agent::AGENT;
use crate::config::settings::check_path;
use crate::config::{AgentSocket, Config};
use crate::error::Error;
use std::path::{Path, PathBuf};

/// The key of [`Setup::store`].
pub(super) const STORE: &str = "store";

/// A store, and settings of a service on it.
///
/// All of it can be text, so paths are UTF-8. Those that are relative begin where the process is when they are used; [`Self::at`] says
/// where else.
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

    /// The same with all relative paths in this folder, for a process that may be elsewhere when they are used.
    #[must_use]
    pub fn at(mut self, folder: &Path) -> Self {
        let Config {
            search_socket,
            verify,
            ..
        } = &mut self.config;
        let agent = match &mut self.agent {
            Some(AgentSocket::Hybrid(socket)) => Some(socket),
            _ => None,
        };
        // Without a store there is none.
        let store = Some(&mut self.store).filter(|store| !store.as_os_str().is_empty());
        let paths = [store, search_socket.as_mut(), verify.socket.as_mut(), agent];
        paths
            .into_iter()
            .flatten()
            .for_each(|path| *path = folder.join(&*path));
        self
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
        self.check_paths()?;
        #[cfg(not(feature = "agent"))]
        if let Some(agent) = &self.agent {
            return Err(crate::config::unheard(agent));
        }
        self.config.validate()
    }

    pub(super) fn check_paths(&self) -> Result<(), Error> {
        check_path(STORE, &self.store)?;
        if let Some(AgentSocket::Hybrid(socket)) = &self.agent {
            check_path(AGENT, socket)?;
        }
        self.config.check_paths()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    /// A setup with one path at a time, by the field's name.
    fn with_path(field: &str, path: &Path) -> Setup {
        let mut setup = Setup::new("/s");
        match field {
            "store" => setup.store = path.into(),
            "agent" => setup.agent = Some(AgentSocket::Hybrid(path.into())),
            "search_socket" => setup.config.search_socket = Some(path.into()),
            _ => setup.config.verify.socket = Some(path.into()),
        }
        setup
    }

    const FIELDS: [&str; 4] = ["store", "agent", "search_socket", "verify.socket"];

    #[test]
    fn every_path_is_text() {
        let path = Path::new(OsStr::from_bytes(b"/run/\xff.sock"));
        for field in FIELDS {
            let error = with_path(field, path).validate().unwrap_err().to_string();
            assert!(error.starts_with(field) && error.contains("UTF-8"), "{error}");
        }
    }

    #[test]
    fn every_relative_path_is_in_the_folder_that_is_given() {
        let at = |field, path: &str| with_path(field, path.as_ref()).at("/folder".as_ref());
        for field in FIELDS {
            assert_eq!(at(field, "x"), with_path(field, "/folder/x".as_ref()), "{field}");
            assert_eq!(at(field, "/x"), with_path(field, "/x".as_ref()), "{field}");
        }
        assert_eq!(Setup::default().at("/folder".as_ref()), Setup::default());
    }
}
