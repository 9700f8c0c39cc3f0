//! Payload guests under VMMs as they are, Cloud Hypervisor and QEMU, with the preload library.

mod api;
mod command;
pub mod library;
mod options;
mod process;
mod program;
mod qmp;
mod serial;

pub use options::Options;
pub use process::Vmm;
pub use program::Program;

use crate::vm::Verdict;
/// Whether a guest found everything as it must be.
///
/// # Panics
/// With what it found if not.
pub fn assert_clean(verdict: &Verdict) {
    assert!(
        verdict.ok && verdict.errors == 0 && verdict.pages > 0,
        "{verdict:?}"
    );
}
