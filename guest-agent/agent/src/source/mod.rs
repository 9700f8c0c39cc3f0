//! What the kernel says: files below /proc and /sys, or below folders that look like them, for tests.

pub mod damon;
pub mod frames;
pub mod idle;
pub mod layout;
pub mod pressure;

use std::io;
use std::path::PathBuf;

/// Where /proc and /sys are.
#[derive(Clone, Debug)]
pub struct Roots {
    /// /proc.
    pub proc: PathBuf,
    /// /sys.
    pub sys: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self {
            proc: "/proc".into(),
            sys: "/sys".into(),
        }
    }
}

/// What the agent cannot do, and what it takes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Lack {
    /// A file is not there.
    #[error("this kernel has no {file}: {what} are unknown")]
    Missing {
        /// The file.
        file: String,
        /// What it would tell.
        what: &'static str,
    },
    /// A right is missing.
    #[error("{file} cannot be read without {right}: {what} are unknown")]
    Right {
        /// The file.
        file: String,
        /// Which capability.
        right: &'static str,
        /// What it would tell.
        what: &'static str,
    },
    /// Something else.
    #[error("{file}: {error}: {what} are unknown")]
    Other {
        /// The file.
        file: String,
        /// What the kernel says.
        error: String,
        /// What it would tell.
        what: &'static str,
    },
    /// DAMON is not to be had.
    #[error("DAMON is not used: {0}")]
    Damon(String),
}

impl Lack {
    fn of(path: &std::path::Path, error: &io::Error, right: &'static str, what: &'static str) -> Self {
        let file = path.display().to_string();
        match error.kind() {
            io::ErrorKind::NotFound => Self::Missing { file, what },
            io::ErrorKind::PermissionDenied => Self::Right { file, right, what },
            _ => Self::Other {
                file,
                error: error.to_string(),
                what,
            },
        }
    }
}
