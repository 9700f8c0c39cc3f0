//! What can go wrong with a device in another process.

use std::io;
use std::path::PathBuf;
use vmm_dedup::compare::Error;
use vmm_dedup_pageforge_registers as reg;

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The protocol failed.
    #[error("no vfio-user device listens at {path}: start a PageForge device there")]
    Client {
        /// Where it was looked for.
        path: PathBuf,
        /// What went wrong.
        source: vfio_user::Error,
    },
    /// Somebody listens there who does not speak.
    #[error("the device at {0} does not answer: restart it")]
    Silent(PathBuf),
    /// It is another device, or another version of this one.
    #[error(
        "the device is not a PageForge of layout {}: driver and device must be of one release",
        reg::LAYOUT
    )]
    Foreign,
    /// Its window could be taken away, which would kill who reads it.
    #[error("the device's window is a file that can shrink: it must be a memfd that is sealed against that")]
    Unsealed,
    /// It stopped answering while it was set up.
    #[error(transparent)]
    Device(#[from] Error),
    /// The kernel says no.
    #[error("the device cannot be set up")]
    Io(#[from] io::Error),
}

/// The device has failed.
pub(super) fn failed(error: impl std::fmt::Display) -> Error {
    Error::Device(error.to_string())
}
