//! Libraries to preload, and the guest agent.

use std::path::PathBuf;
use std::sync::OnceLock;

/// Path of the preload library: what the variable VMM_DEDUP_PRELOAD names, or else built here, once.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn path() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    let named = || std::env::var_os("VMM_DEDUP_PRELOAD").map(PathBuf::from);
    PATH.get_or_init(|| named().unwrap_or_else(|| vmm_dedup_built::library("vmm-dedup-preload")))
        .clone()
}

/// Path of the library that stands in for KVM's nested state.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn nested_state() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| vmm_dedup_built::library("vmm-dedup-nested-state"))
        .clone()
}

/// Path of the guest agent's program, linked as this machine's programs are.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn agent() -> PathBuf {
    vmm_dedup_built::package("vmm-dedup-agent");
    vmm_dedup_built::profile().join("vmm-dedup-agent")
}
