//! The machine: processes on cores, caches and memory.
//!
//! Modules, from the bottom: `state` (the parts, translation, lines), `os` (what the operating system does: mapping, fork,
//! copy-on-write, promotion), `access` (what instructions do), `scan` (computing on overlays).

mod access;
mod os;
mod scan;
mod state;

pub use os::Promotion;
pub use scan::Scan;
pub use state::{Contents, Machine, MachineError};
