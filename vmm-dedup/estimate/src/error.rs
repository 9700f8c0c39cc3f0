//! Why memory cannot be examined.

use std::io;
use std::path::PathBuf;

/// Most memories of one estimate; its table of pairs has that number squared.
pub(crate) const MOST_MEMORIES: usize = 1024;

/// What went wrong, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be opened or read.
    #[error("cannot read {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file is none of those that are understood.
    #[error("{path}: {problem}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// There is no such process, or it ended meanwhile.
    #[error("process {pid} is gone: give the process id of a running VMM")]
    Gone {
        /// The process.
        pid: u32,
    },
    /// The process may not be read.
    #[error("the memory of process {pid} cannot be read: {}", what_is_missing(rustix::process::geteuid().is_root()))]
    Denied {
        /// The process.
        pid: u32,
    },
    /// A process is named more than once: it would seem to have a twin for each page.
    #[error("process {pid} is named twice: name it once")]
    Twice {
        /// The process.
        pid: u32,
    },
    /// /proc says nothing useful, or reading failed in another way.
    #[error("the memory of process {pid} cannot be read")]
    Process {
        /// The process.
        pid: u32,
        /// The reason.
        source: io::Error,
    },
    /// The process has no memory that could be shared.
    #[error(
        "process {pid} has no private anonymous memory in use, the only kind that is shared: \
         a VMM must be started without shared=on and without hugepages"
    )]
    Nothing {
        /// The process.
        pid: u32,
    },
    /// The sampling rate makes no sense.
    #[error("{0} is no sampling rate: give 1, 2, 4, 8, ... 65536")]
    Sample(u64),
    /// Too many memories.
    #[error("{0} memories are too many: the table of pairs takes at most {max}", max = MOST_MEMORIES)]
    TooMany(usize),
    /// More memory than packing is tried on.
    #[error(
        "packing is tried on {most_mib} MiB at most, and there are {mib}: give fewer memories",
        mib = .pages / 256,
        most_mib = .most / 256
    )]
    TooManyToPack {
        /// Pages of all memories.
        pages: u64,
        /// The most.
        most: u64,
    },
    /// There is no memory for the tables that packing needs.
    #[error("there is no memory for the tables of {pages} pages: give fewer memories")]
    NoMemory {
        /// Pages without a twin.
        pages: usize,
    },
    /// A codec could not be made.
    #[error("the codecs cannot be made")]
    Codecs(#[from] vmm_dedup_packed::PackError),
}

/// Why a process may not be read.
fn what_is_missing(is_root: bool) -> &'static str {
    match is_root {
        true => "root may not here, as in a container without CAP_SYS_PTRACE: run this on the host itself",
        false => "run this as root, or as the process's user with CAP_SYS_PTRACE",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_told_to_become_what_he_is() {
        let texts = [true, false].map(what_is_missing);
        assert_eq!(texts.map(|text| text.contains("as root")), [false, true]);
        let error = Error::Denied { pid: 7 }.to_string();
        let mine = texts[usize::from(!rustix::process::geteuid().is_root())];
        assert!(error.ends_with(mine), "{error}");
    }
}
