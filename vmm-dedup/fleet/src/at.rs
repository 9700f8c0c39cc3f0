//! Which fleet a command is about.

use crate::file::name_in;
use crate::plan::Plan;
use crate::state::{Directory, Locked, State};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use vmm_dedup_host::Failure;
use vmm_dedup_host::units::quoted;

/// Which fleet.
#[derive(Clone, Debug)]
pub struct At {
    /// The fleet file (TOML).
    pub file: PathBuf,
    /// Directory of state, logs and sockets; `None`: `fleet-NAME` in /run/vmm-dedup, or in that folder of the user.
    pub runtime_dir: Option<PathBuf>,
}

impl At {
    /// A command on this fleet, to be pasted into a shell.
    pub(crate) fn command(&self, command: &str) -> String {
        let path = |path: &Path| quoted(&path.to_string_lossy());
        let directory = self.runtime_dir.as_deref();
        let directory = directory.map_or(String::new(), |folder| format!(" --runtime-dir {}", path(folder)));
        format!("vmm-dedup fleet {command} {}{directory}", path(&self.file))
    }

    /// What the file says; `scale`: how many VMs entries have instead of what it says.
    pub(crate) fn plan(&self, scale: &BTreeMap<String, u32>) -> Result<Plan, Failure> {
        Plan::read(&self.file, &vmm_dedup_host::runtime::folder()?, scale)
    }

    /// The fleet's directory, locked, and its state; fails if it is not up, or another file's.
    pub(crate) fn running(&self) -> Result<(Locked, State), Failure> {
        let not_up = || {
            let name = self.name().unwrap_or_default();
            Failure::new(format!(
                "fleet {name} is not up: start it with `{}`",
                self.command("up")
            ))
        };
        let locked = self.directory()?.lock()?.ok_or_else(not_up)?;
        let state = locked.state()?.ok_or_else(not_up)?;
        self.check(&state)?;
        Ok((locked, state))
    }

    pub(crate) fn name(&self) -> Result<String, Failure> {
        name_in(&self.file)
    }

    /// The file itself, whatever name it was given by.
    pub(crate) fn file(&self) -> Result<PathBuf, Failure> {
        std::fs::canonicalize(&self.file)
            .map_err(|e| Failure::new(format!("cannot read the fleet file {}: {e}", self.file.display())))
    }

    /// Fails if the fleet that is up is another file's, of the same name. Who names the directory means that fleet.
    pub(crate) fn check(&self, state: &State) -> Result<(), Failure> {
        let own = self.file()?;
        match &state.file {
            Some(other) if self.runtime_dir.is_none() && *other != own => Err(Failure::new(format!(
                "the fleet {} that is up was started from {}: name that file, or its directory with --runtime-dir; \
                 to have both fleets, set another `name` in {}",
                state.fleet,
                other.display(),
                own.display()
            ))),
            _ => Ok(()),
        }
    }

    pub(crate) fn directory(&self) -> Result<Directory, Failure> {
        let path = match &self.runtime_dir {
            Some(path) => std::path::absolute(path).map_err(Failure::from_error)?,
            None => vmm_dedup_host::runtime::folder()?.join(format!("fleet-{}", self.name()?)),
        };
        Ok(Directory::new(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fleet_of_the_same_name_from_another_file_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        for place in ["a", "b"] {
            std::fs::create_dir(folder.path().join(place)).unwrap();
            std::fs::write(folder.path().join(place).join("fleet.toml"), "").unwrap();
        }
        let at = |place: &str, runtime_dir: Option<&str>| At {
            file: folder.path().join(place).join("fleet.toml"),
            runtime_dir: runtime_dir.map(Into::into),
        };
        let state = State {
            fleet: "fleet".into(),
            file: Some(at("a", None).file().unwrap()),
            ..State::default()
        };
        for same in ["a", "b/../a"] {
            at(same, None).check(&state).unwrap();
        }
        let error = at("b", None).check(&state).unwrap_err().to_string();
        assert!(error.contains("a/fleet.toml: name that file"), "{error}");
        at("b", Some("/somewhere")).check(&state).unwrap();
    }
}
