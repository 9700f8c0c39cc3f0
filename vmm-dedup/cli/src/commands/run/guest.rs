//! What `run` boots: a kernel, or the built-in test guest if this command has it (the feature `demo`).

use clap::Args;
use std::path::PathBuf;
use vmm_dedup_refvmm::Image;

/// A kernel with its command line.
#[cfg(not(feature = "demo"))]
#[derive(Args, Debug)]
pub(crate) struct Guest {
    /// Linux kernel or PVH image.
    #[arg(long)]
    kernel: PathBuf,
    /// Kernel command line.
    #[arg(long, default_value = "console=ttyS0")]
    cmdline: String,
}

#[cfg(not(feature = "demo"))]
impl Guest {
    /// The image and its command line.
    pub(crate) fn boot(&self) -> (Image, String) {
        (Image::Path(self.kernel.clone()), self.cmdline.clone())
    }
}

/// A kernel with its command line, or the built-in test guest.
#[cfg(feature = "demo")]
#[derive(Args, Debug)]
pub(crate) struct Guest {
    /// Linux kernel or PVH image.
    #[arg(long, conflicts_with = "payload", required_unless_present = "payload")]
    kernel: Option<PathBuf>,
    /// Run the built-in test guest with these parameters, e.g. "private_mib=16 seconds=10".
    #[arg(long, value_name = "PARAMETERS", num_args = 0..=1, default_missing_value = "")]
    payload: Option<String>,
    /// Kernel command line.
    #[arg(long, default_value = "console=ttyS0", conflicts_with = "payload")]
    cmdline: String,
}

#[cfg(feature = "demo")]
impl Guest {
    /// The image and its command line.
    pub(crate) fn boot(&self) -> (Image, String) {
        if let Some(path) = &self.kernel {
            return (Image::Path(path.clone()), self.cmdline.clone());
        }
        // The guest measures time by its TSC, whose frequency KVM knows only once there is a vCPU.
        let khz = vmm_dedup_payload::measure_tsc_khz();
        let parameters = self.payload.as_deref().unwrap_or_default();
        let cmdline = format!("{parameters} tsc_khz={khz}").trim().to_owned();
        (Image::Bytes(vmm_dedup_payload::ELF), cmdline)
    }
}
