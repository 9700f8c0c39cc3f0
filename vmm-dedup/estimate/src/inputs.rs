//! Which memories are examined, and how many threads read them.

use crate::error::Error;
use crate::memory::Memory;
use std::path::PathBuf;

/// What to examine: processes and files, each of one VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Inputs {
    /// Process of a VMM; several with commas or by repeating.
    #[cfg_attr(
        feature = "clap",
        arg(
            long = "pid",
            value_name = "PID",
            value_delimiter = ',',
            required_unless_present = "files"
        )
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
