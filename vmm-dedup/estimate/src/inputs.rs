//! Which memories are examined, and how many threads read them.

use crate::error::Error;
use crate::memory::Memory;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// What to examine: processes and files, each of one VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[cfg_attr(
    feature = "clap",
    command(group(clap::ArgGroup::new("memories").args(["pids", "files"]).required(true).multiple(true)))
)]
pub struct Inputs {
    /// Process of a VMM; several with commas or by repeating.
    #[cfg_attr(
        feature = "clap",
        arg(long = "pid", value_name = "PID", value_delimiter = ',')
    )]
    pub pids: Vec<u32>,
    /// Memory dumps, snapshot directories or raw images.
    #[cfg_attr(feature = "clap", arg(value_name = "FILE"))]
    pub files: Vec<PathBuf>,
    /// Threads that read [default: one for each CPU].
    #[cfg_attr(feature = "clap", arg(long, value_parser = clap::value_parser!(u16).range(1..=1024)))]
    pub threads: Option<u16>,
}

impl Inputs {
    /// Opens all of them: the processes, then the files.
    ///
    /// # Errors
    /// [`Error`] of the first that cannot be examined.
    pub fn open(&self) -> Result<Vec<Memory>, Error> {
        let mut named = BTreeSet::new();
        if let Some(pid) = self.pids.iter().find(|pid| !named.insert(**pid)) {
            return Err(Error::Twice { pid: *pid });
        }
        let processes = self.pids.iter().map(|pid| Memory::of_process(*pid));
        let files = self.files.iter().map(|path| Memory::of_file(path));
        processes.chain(files).collect()
    }

    /// How many threads read: as given, else one for each CPU.
    #[must_use]
    pub fn threads(&self) -> usize {
        let cpus = || std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.map_or_else(cpus, usize::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_no_twin_of_itself() {
        let pid = std::process::id();
        let of = |pids: &[u32]| Inputs {
            pids: pids.to_vec(),
            ..Inputs::default()
        };
        assert_eq!(of(&[pid]).open().map(|all| all.len()).ok(), Some(1));
        let twice = of(&[1, pid, pid]).open().map(|all| all.len());
        assert!(matches!(twice, Err(Error::Twice { pid: named }) if named == pid));
    }
}
