//! How a VMM is to be started.

use std::path::{Path, PathBuf};

/// How to start a VMM.
#[derive(Clone, Debug)]
pub struct Options {
    /// The VM's name.
    pub name: String,
    /// Guest memory, MiB.
    pub memory_mib: u64,
    /// More memory that can be plugged in, MiB.
    pub hotplug_mib: u64,
    /// Added to `--memory` of Cloud Hypervisor, e.g. `,shared=on`.
    pub memory_options: String,
    /// More arguments.
    pub arguments: Vec<String>,
    /// Where to find the store; `None` starts the VMM without the library.
    pub store: Option<PathBuf>,
    /// A library that is preloaded behind ours.
    pub behind: Option<PathBuf>,
    /// The file of VMM_DEDUP_CONFIG.
    pub config: String,
    /// Restores the VM of this name from this snapshot, instead of booting one.
    pub restore: Option<(String, PathBuf)>,
    /// Waits for the VM of this name, which another VMM sends ([`super::Vmm::migrate_to`]), instead of booting one.
    pub receive: Option<String>,
}

impl Options {
    /// A VM of 48 MiB that is deduplicated without delay.
    #[must_use]
    pub fn new(name: &str, store: &Path) -> Self {
        Self {
            name: name.into(),
            memory_mib: 48,
            hotplug_mib: 0,
            memory_options: String::new(),
            arguments: Vec::new(),
            store: Some(store.into()),
            behind: None,
            // What is shared does not depend on what is used.
            config: "pass_period_ms = 50\ncpu_percent = 80\nhuge_policy = \"ksm\"\n".into(),
            restore: None,
            receive: None,
        }
    }
}
