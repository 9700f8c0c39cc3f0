//! A VM of a plan.

use crate::file::Vmm;
use cloud_hypervisor_client::models::VmConfig;
use std::path::{Path, PathBuf};
use vmm_dedup::{AgentSocket, Config};

/// A VM.
#[derive(Clone, Debug, PartialEq)]
pub struct VmPlan {
    /// Its name, which no other VM of the fleet has.
    pub name: String,
    /// The name of its entry in the file.
    pub entry: String,
    /// Who runs it.
    pub vmm: Vmm,
    /// vCPUs.
    pub cpus: u8,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Kernel or PVH image.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initramfs: Option<PathBuf>,
    /// Kernel command line.
    pub cmdline: String,
    /// More arguments of the VMM.
    pub extra_args: Vec<String>,
    /// With Cloud Hypervisor: all of `vm.create` but the console and serial port.
    pub(crate) api: Option<Box<VmConfig>>,
    /// Who its VMM runs as: a user's name or number. `None`: as who starts it.
    pub user: Option<String>,
    /// More groups of that user, names or numbers.
    pub groups: Vec<String>,
    /// The trust domain; its store is used only with dedup.
    pub domain: String,
    /// `None`: the VMM runs by itself, without library and store.
    pub dedup: Option<Config>,
    /// Where the guest's agent is heard, if it is.
    pub agent: Option<AgentSocket>,
}

impl VmPlan {
    /// Paths of disk images, and whether the VM only reads them.
    pub fn disks(&self) -> impl Iterator<Item = (&Path, bool)> {
        let disks = self.api.iter().flat_map(|api| api.disks.iter().flatten());
        disks.filter_map(|d| Some((Path::new(d.path.as_ref()?), d.readonly.unwrap_or(false))))
    }

    /// The Unix socket behind its vsock device.
    #[must_use]
    pub fn vsock(&self) -> Option<&Path> {
        let vsock = self.api.as_ref()?.vsock.as_ref()?;
        Some(Path::new(&vsock.socket))
    }

    /// MAC addresses of its network devices.
    pub fn macs(&self) -> impl Iterator<Item = String> {
        let nets = self.api.iter().flat_map(|api| api.net.iter().flatten());
        nets.filter_map(|n| n.mac.as_ref().map(|mac| mac.to_ascii_lowercase()))
    }
}
