//! The guest's initial RAM disk: a kernel's modules, Intel's tools, and what is played.

use crate::Failure;
use crate::archive::Archive;
use crate::debian::{Packages, WholeKernel, file_name, output};
use crate::images::{add, base, libraries, linked_here};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is done with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Play {
    /// A work queue of the kernel's, and its own test of such queues.
    Dmatest,
    /// A work queue for programs, whose addresses the device uses, and Intel's test of such queues.
    Sva,
    /// The same, this project's driver: its conformance suites, and pages merged by the service.
    Driver,
    /// The same by VFIO, without Linux's driver.
    Vfio,
}

impl Play {
    /// QEMU's IOMMU, if one is needed.
    pub(super) fn iommu(self) -> Option<&'static str> {
        match self {
            Self::Dmatest => None,
            Self::Sva | Self::Driver => {
                Some("intel-iommu,scalable-mode=on,fsts=on,pasid-bits=20,device-iotlb=on,svm=on")
            }
            // QEMU has to be told of each page that the guest gives the device.
            Self::Vfio => Some("intel-iommu,caching-mode=on,device-iotlb=on"),
        }
    }

    /// More for the guest's kernel.
    pub(super) fn kernel_arguments(self) -> &'static str {
        match self {
            Self::Dmatest => "",
            Self::Sva | Self::Driver => "intel_iommu=on,sm_on iommu=pt",
            Self::Vfio => "intel_iommu=on",
        }
    }
}

impl fmt::Display for Play {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dmatest => "dmatest",
            Self::Sva => "sva",
            Self::Driver => "driver",
            Self::Vfio => "vfio",
        })
    }
}

impl Play {
    /// Modules, in the order in which they are loaded.
    fn modules(self) -> &'static [&'static str] {
        match self {
            Self::Dmatest | Self::Sva | Self::Driver => &["idxd_bus", "idxd"],
            Self::Vfio => &[
                "irqbypass",
                "vfio",
                "vfio_iommu_type1",
                "vfio_pci_core",
                "vfio_pci",
            ],
        }
    }
}

const PROGRAMS: [&str; 3] = [
    "usr/bin/busybox",
    "usr/bin/accel-config",
    "usr/libexec/accel-config/test/dsa_test",
];
/// Everything is below /usr, as in Debian's newer releases.
const LINKS: [(&str, &str); 4] = [
    ("bin", "usr/bin"),
    ("sbin", "usr/sbin"),
    ("lib", "usr/lib"),
    ("lib64", "usr/lib64"),
];

/// The whole system.
pub(super) fn guest(
    play: Play,
    kernel: &WholeKernel,
    tools: &Packages,
    dmatest: Option<&Path>,
    programs_of_ours: &[(&str, &Path)],
) -> Result<Vec<u8>, Failure> {
    let root = tools.root();
    merge_usr(root)?;
    let busybox = root.join("usr/bin/busybox");
    let busybox = fs::read(&busybox).map_err(|e| Failure::file(&busybox, e))?;
    let init = include_str!("../../guest/dsa-init.sh").replace("@modules@", &play.modules().join(" "));
    let mut archive = base(&busybox, &init);
    for (name, target) in LINKS {
        archive.symlink(name, target);
    }
    let mut programs: Vec<PathBuf> = PROGRAMS.iter().map(PathBuf::from).collect();
    programs.extend(libraries(root, &programs)?);
    for file in &programs {
        add(&mut archive, root, file)?;
    }
    for name in play.modules() {
        let path = kernel.module(name)?;
        add_module(&mut archive, name, &path)?;
    }
    if let Some(dmatest) = dmatest {
        add_module(&mut archive, "dmatest", dmatest)?;
    }
    for (name, program) in programs_of_ours {
        // With the libraries of this machine, in the places of those that the tools came with.
        for library in linked_here(program)? {
            let path = library.to_string_lossy();
            let below = path.trim_start_matches('/').trim_start_matches("usr/");
            let content = fs::read(&library).map_err(|e| Failure::file(&library, e))?;
            archive.file(&format!("usr/{below}"), 0o755, &content);
        }
        let content = fs::read(program).map_err(|e| Failure::file(program, e))?;
        archive.file(&format!("usr/bin/{name}"), 0o755, &content);
    }
    Ok(archive.finish())
}

fn add_module(archive: &mut Archive, name: &str, path: &Path) -> Result<(), Failure> {
    let content = if file_name(path).ends_with(".xz") {
        output(Command::new("xz").args(["-d", "-c"]).arg(path))?
    } else {
        fs::read(path).map_err(|e| Failure::file(path, e))?
    };
    archive.file(&format!("modules/{name}.ko"), 0o644, &content);
    Ok(())
}

/// Packages of Bookworm have files in /lib and /bin: they are moved below /usr, where the installed system has them.
fn merge_usr(root: &Path) -> Result<(), Failure> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        let from = root.join(name);
        if from.is_dir() && !from.is_symlink() {
            let to = root.join("usr").join(name);
            fs::create_dir_all(&to).map_err(|e| Failure::file(&to, e))?;
            output(Command::new("cp").arg("-a").arg(from.join(".")).arg(&to))?;
            fs::remove_dir_all(&from).map_err(|e| Failure::file(&from, e))?;
        }
    }
    Ok(())
}
