//! What a guest does.

use std::fmt;

/// What a guest does; its init reads it from the kernel command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Workload {
    /// Nothing, at a shell.
    Idle,
    /// nginx serves the files of the system, and they are fetched.
    Web,
    /// redis is written and read.
    Db,
    /// Python builds, sorts and throws away.
    Python,
    /// Files are rewritten and their checksums kept.
    Writer,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Workload::Idle => "idle",
            Workload::Web => "web",
            Workload::Db => "db",
            Workload::Python => "python",
            Workload::Writer => "writer",
        })
    }
}
