//! Which fleet a command is about.

use crate::file::name_in;
use crate::kept;
use crate::plan::Plan;
use crate::state::{Directory, Locked, PREFIX, State, directories};
use std::io::ErrorKind;
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
        let path = |path: &Path| {
            let path = path.to_string_lossy();
            // What begins with a dash would be taken for an option.
            match path.starts_with('-') {
                true => quoted(&format!("./{path}")),
                false => quoted(&path),
            }
        };
        let directory = self.runtime_dir.as_deref();
        let directory = directory.map_or(String::new(), |folder| format!(" --runtime-dir {}", path(folder)));
        format!("vmm-dedup fleet {command} {}{directory}", path(&self.file))
    }

    /// What the file says, but for what a fleet that is up keeps of what it was started with; and what is to be told of that.
    pub(crate) fn plan(&self, state: &State) -> Result<(Plan, Vec<String>), Failure> {
        let mut plan = Plan::read(&self.file, &vmm_dedup_host::runtime::folder()?, &state.scale)?;
        let again = format!("`{}`, then `{}`", self.command("down"), self.command("up"));
        let told = kept::keep(&mut plan, state, &again)?;
        Ok((plan, told))
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

    /// The fleet's name: of the one that was started from this file and is up, whatever the file says now; else as the file
    /// says. So a file that has gone, that somebody is editing, or that has another `name` since keeps nobody from ending it.
    pub(crate) fn name(&self) -> Result<String, Failure> {
        self.up()
            .map_or_else(|| name_in(&self.file), |(_, state)| Ok(state.fleet))
    }

    /// The fleet that was started from this file and is up, or the one in the directory that is named.
    fn up(&self) -> Option<(PathBuf, State)> {
        let file = self.file().ok()?;
        let directories = match &self.runtime_dir {
            Some(path) => vec![path.clone()],
            None => directories(&vmm_dedup_host::runtime::folder().ok()?),
        };
        let named = self.runtime_dir.is_some();
        let up = directories.into_iter().filter_map(|path| {
            let state = Directory::new(path.clone()).state().ok()??;
            (named || state.file.as_ref() == Some(&file)).then_some((path, state))
        });
        // If one file was given several directories: the one with the name that it has now.
        let said = name_in(&self.file).ok();
        up.min_by_key(|(_, state)| Some(&state.fleet) != said.as_ref())
    }

    /// The file itself, whatever name it was given by, also if it has gone.
    pub(crate) fn file(&self) -> Result<PathBuf, Failure> {
        let said = |e| Failure::new(format!("cannot read the fleet file {}: {e}", self.file.display()));
        let folder = match self.file.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        match (std::fs::canonicalize(&self.file), self.file.file_name()) {
            (Err(e), Some(name)) if e.kind() == ErrorKind::NotFound => {
                Ok(std::fs::canonicalize(folder).map_err(said)?.join(name))
            }
            (file, _) => file.map_err(said),
        }
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
        let path = match (&self.runtime_dir, self.up()) {
            (Some(path), _) => std::path::absolute(path).map_err(Failure::from_error)?,
            (None, Some((path, _))) => path,
            (None, None) => {
                let name = name_in(&self.file)?;
                vmm_dedup_host::runtime::folder()?.join(format!("{PREFIX}{name}"))
            }
        };
        Ok(Directory::new(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_takes_a_file_for_a_file() {
        let at = At {
            file: "-f.toml".into(),
            runtime_dir: Some("-my run".into()),
        };
        assert_eq!(
            at.command("up"),
            "vmm-dedup fleet up ./-f.toml --runtime-dir './-my run'"
        );
    }

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
