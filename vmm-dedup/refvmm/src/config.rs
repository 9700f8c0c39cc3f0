//! What to run.

use std::fmt;
use std::path::PathBuf;

use crate::error::Error;
use crate::layout;

/// A kernel image.
#[derive(Clone, Debug)]
pub enum Image {
    /// In a file.
    Path(PathBuf),
    /// In this program.
    Bytes(&'static [u8]),
}

impl fmt::Display for Image {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Image::Path(path) => write!(out, "{}", path.display()),
            Image::Bytes(_) => out.write_str("(built in)"),
        }
    }
}

/// Transparent huge pages for guest RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThpMode {
    /// What the host's `/sys/kernel/mm/transparent_hugepage/enabled` says.
    #[default]
    Default,
    /// `MADV_HUGEPAGE`.
    Always,
    /// `MADV_NOHUGEPAGE`.
    Never,
}

/// A virtual machine.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Guest RAM.
    pub memory_mib: u64,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// The kernel: an ELF image (PVH or Linux) or a bzImage.
    pub kernel: Image,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The kernel command line.
    pub cmdline: String,
    /// Huge pages.
    pub thp: ThpMode,
}

impl VmConfig {
    /// Checks what can be checked without opening a file or KVM.
    ///
    /// # Errors
    /// An [`Error`] that names the field and its limits.
    pub fn validate(&self) -> Result<(), Error> {
        if !(layout::MIN_MEMORY_MIB..=layout::MAX_MEMORY_MIB).contains(&self.memory_mib) {
            return Err(Error::MemorySize { mib: self.memory_mib });
        }
        if !(1..=layout::MAX_VCPUS).contains(&self.vcpus) {
            return Err(Error::VcpuCount { vcpus: self.vcpus });
        }
        if self.cmdline.len() >= layout::CMDLINE_SIZE
            || self.cmdline.contains('\0')
            || !self.cmdline.is_ascii()
        {
            return Err(Error::CommandLine {
                bytes: self.cmdline.len(),
            });
        }
        Ok(())
    }
}
