//! `fleet`: many VMs from one file.
//!
//! A [`file::FleetFile`] is expanded to a [`plan::Plan`]: each VM by itself. `up` looks at all that could fail
//! ([`check`]), then starts stores ([`stores`]) and VMMs ([`vmm`]), some at a time, and drives their APIs until the VMs
//! run. Each process is written down in the runtime directory ([`state`]), by number and start time ([`process`]), before
//! it executes its program, so that `down` ends those and no others, also after an `up` that was killed. If anything fails
//! in `up`, what was started is stopped.
//!
//! Nothing of the fleet command stays in memory: VMs and stores are processes on their own, and `status` and `down` ask
//! them and the kernel. A store that has gone is started again by the next `up`.

mod check;
mod cloud_hypervisor;
mod down;
mod file;
mod log;
mod machine;
mod placeholder;
mod plan;
mod process;
mod program;
mod qemu;
mod reference;
mod state;
mod status;
mod stores;
mod up;
mod vmm;

use clap::{Args, Subcommand};
use std::path::PathBuf;
use vmm_dedup_host::Failure;

/// Run many VMs from one TOML file, with dedup inside each VMM.
///
/// `up` starts the stores that do not run yet, then the VMs: under cloud-hypervisor (on PATH, or CLOUD_HYPERVISOR), the
/// reference VMM or QEMU. VMs go on in the background; `status` shows them, `down` ends them. The file is described in
/// docs/fleet.md; the smallest is:
///
///   [[vm]]
///   name = "web"
///   count = 8
///   kernel = "vmlinux"
#[derive(Subcommand, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) enum Fleet {
    /// Start all VMs of a file; if one cannot start, none is left running.
    ///
    /// For a fleet that is up: starts stores that have gone again.
    Up(UpArgs),
    /// Show VMs, stores and savings. Exit code 1 if a VM does not run or a store is gone.
    Status(StatusArgs),
    /// End all VMs of a file and the stores that `up` started, and remove their files. May be repeated.
    Down(DownArgs),
}

#[derive(Args, Debug)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    at: At,
}

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    at: At,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct DownArgs {
    #[command(flatten)]
    at: At,
    /// Seconds that guests get to shut down by themselves once their power button is pressed (0: not pressed). The
    /// reference VMM has none.
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    grace: u64,
}

/// Which fleet.
#[derive(Args, Debug)]
struct At {
    /// The fleet file (TOML).
    file: PathBuf,
    /// Directory of state, logs and sockets [default: fleet-NAME in /run/vmm-dedup, or in $XDG_RUNTIME_DIR/vmm-dedup]
    #[arg(long, value_name = "DIRECTORY")]
    runtime_dir: Option<PathBuf>,
}

impl At {
    fn plan(&self) -> Result<plan::Plan, Failure> {
        plan::Plan::read(&self.file, &state::run_folder()?)
    }

    fn name(&self) -> Result<String, Failure> {
        file::name_in(&self.file)
    }

    /// The file itself, whatever name it was given by.
    fn file(&self) -> Result<PathBuf, Failure> {
        std::fs::canonicalize(&self.file)
            .map_err(|e| Failure::new(format!("cannot read the fleet file {}: {e}", self.file.display())))
    }

    /// Fails if the fleet that is up is another file's, of the same name. Who names the directory means that fleet.
    fn check(&self, state: &state::State) -> Result<(), Failure> {
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

    fn directory(&self) -> Result<state::Directory, Failure> {
        let path = match &self.runtime_dir {
            Some(path) => std::path::absolute(path).map_err(Failure::from_error)?,
            None => state::run_folder()?.join(format!("fleet-{}", self.name()?)),
        };
        Ok(state::Directory::new(path))
    }
}

/// Runs the command.
pub(crate) fn run(fleet: &Fleet) -> Result<(), Failure> {
    match fleet {
        Fleet::Up(args) => up::run(args),
        Fleet::Status(args) => status::run(args),
        Fleet::Down(args) => down::run(args),
    }
}

/// Runs a future, and the local tasks that it spawns, to its end.
fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::from_error)?;
    tokio::task::LocalSet::new().block_on(&runtime, work)
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
        let state = state::State {
            fleet: "fleet".into(),
            file: Some(at("a", None).file().unwrap()),
            ..state::State::default()
        };
        for same in ["a", "b/../a"] {
            at(same, None).check(&state).unwrap();
        }
        let error = at("b", None).check(&state).unwrap_err().to_string();
        assert!(error.contains("a/fleet.toml: name that file"), "{error}");
        at("b", Some("/somewhere")).check(&state).unwrap();
    }
}
