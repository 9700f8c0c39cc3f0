//! VMMs that are installed.

use std::path::PathBuf;
use std::process::Command;

/// A VMM that is installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// Cloud Hypervisor.
    CloudHypervisor(PathBuf),
    /// QEMU.
    Qemu(PathBuf),
    /// Cloud Hypervisor with the service in it (docs/cloud-hypervisor.md).
    Embedded(PathBuf),
}

impl Program {
    /// Cloud Hypervisor: what the variable CLOUD_HYPERVISOR names, or else is on the PATH.
    #[must_use]
    pub fn cloud_hypervisor() -> Option<Self> {
        let named = std::env::var_os("CLOUD_HYPERVISOR").map(PathBuf::from);
        named
            .or_else(|| find("cloud-hypervisor"))
            .map(Program::CloudHypervisor)
    }

    /// A Cloud Hypervisor that has the service in it: what the variable CLOUD_HYPERVISOR_DEDUP names.
    #[must_use]
    pub fn embedded() -> Option<Self> {
        let named = std::env::var_os("CLOUD_HYPERVISOR_DEDUP").map(PathBuf::from);
        named.map(Program::Embedded)
    }

    /// QEMU from the PATH.
    #[must_use]
    pub fn qemu() -> Option<Self> {
        find("qemu-system-x86_64").map(Program::Qemu)
    }
}

/// A program on the PATH that can be run.
fn find(name: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&paths)
        .map(|folder| folder.join(name))
        .find(|p| p.is_file())?;
    Command::new(&found)
        .arg("--version")
        .output()
        .is_ok()
        .then_some(found)
}
