//! The runtime folder: where stores listen and are listed, and where fleets keep what they have started.

use crate::failure::Failure;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Where it is for root.
pub const OF_ROOT: &str = "/run/vmm-dedup";
/// Names another one.
pub const VARIABLE: &str = "VMM_DEDUP_RUNTIME_DIR";

/// The folder of this user: as the variable says, else root's, else that of the user's session.
///
/// # Errors
/// A [`Failure`] for a user without a session.
pub fn folder() -> Result<PathBuf, Failure> {
    if let Some(named) = named() {
        return Ok(named);
    }
    if rustix::process::geteuid().is_root() {
        return Ok(OF_ROOT.into());
    }
    of_session().ok_or_else(|| {
        Failure::usage(format!(
            "XDG_RUNTIME_DIR is not set: set it, or name a folder with {VARIABLE} or --runtime-dir"
        ))
    })
}

/// Why nobody can tell what is in a runtime folder, if it is there and may not be looked into. `what`: those that are looked for.
#[must_use]
pub fn unreadable(folder: &Path, what: &str) -> Option<Failure> {
    let error = std::fs::read_dir(folder).err()?;
    let is_there = !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
    is_there.then(|| {
        let wrong = format!("cannot look for {what} in {}: {error}", folder.display());
        Failure::advised(&wrong, ": ", "run this as the user who runs them there")
    })
}

/// The folders in which this user may find stores: the own one and root's.
#[must_use]
pub fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = folder().ok().into_iter().collect();
    if named().is_none() && !folders.iter().any(|folder| folder == Path::new(OF_ROOT)) {
        folders.push(OF_ROOT.into());
    }
    folders
}

fn named() -> Option<PathBuf> {
    let named = std::env::var_os(VARIABLE).filter(|value| !value.is_empty())?;
    std::path::absolute(named).ok()
}

fn of_session() -> Option<PathBuf> {
    let session = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty())?;
    Some(Path::new(&session).join("vmm-dedup"))
}
