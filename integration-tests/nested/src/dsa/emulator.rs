//! QEMU 11, which attaches devices over vfio-user, with a plugin for MOVDIR64B.

use crate::Failure;
use crate::debian::{Packages, Release, files, output};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PLUGIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/qemu-plugin/movdir64b.c");
const LOADER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";

/// An unpacked QEMU, which runs with the libraries that it came with.
pub(super) struct Emulator {
    loader: PathBuf,
    libraries: String,
    root: PathBuf,
    plugin: PathBuf,
}

impl Emulator {
    /// Fetches it into the cache, unless it is there, and compiles the plugin into `folder`.
    pub(super) fn fetch(cache: &Path, folder: &Path) -> Result<Self, Failure> {
        let packages = Packages::fetch(
            cache,
            "qemu",
            Release::TrixieBackports,
            &["qemu-system-x86", "seabios"],
        )?;
        let root = packages
            .root()
            .canonicalize()
            .map_err(|e| Failure::file(cache, e))?;
        // QEMU looks for its files from the folder of the program that it takes itself for, which is its loader.
        let loader = root.join("usr/bin/qemu-loader");
        if !loader.exists() {
            fs::copy(root.join(LOADER), &loader).map_err(|e| Failure::file(&loader, e))?;
        }
        let mut folders = BTreeSet::new();
        library_folders(&root.join("usr/lib/x86_64-linux-gnu"), &mut folders);
        let libraries: Vec<String> = folders.iter().map(|path| path.display().to_string()).collect();
        let plugin = folder.join("movdir64b.so");
        output(
            Command::new("cc")
                .args(["-std=c11", "-O2", "-fPIC", "-shared", "-o"])
                .arg(&plugin)
                .arg(PLUGIN),
        )?;
        Ok(Self {
            loader,
            libraries: libraries.join(":"),
            root,
            plugin,
        })
    }

    /// A machine to be started, with memory that devices of other processes can map. The IOMMU, if one is named, stands
    /// before them.
    pub(super) fn machine(&self, kernel: &Path, initrd: &Path, mib: u64, iommu: Option<&str>) -> Command {
        let mut command = Command::new(&self.loader);
        command.arg("--library-path").arg(&self.libraries);
        command.arg(self.root.join("usr/bin/qemu-system-x86_64"));
        for folder in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(self.root.join(folder));
        }
        command.arg("-plugin").arg(&self.plugin);
        command.args(["-machine", "q35,memory-backend=mem,mem-merge=off"]);
        command.args(["-accel", "tcg,thread=multi", "-smp", "2"]);
        command.args(["-cpu", "qemu64,+movdir64b,x-force-features=on"]);
        command.arg("-m").arg(mib.to_string());
        command
            .arg("-object")
            .arg(format!("memory-backend-memfd,id=mem,size={mib}M,share=on"));
        if let Some(iommu) = iommu {
            command.arg("-device").arg(iommu);
        }
        command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
        command.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

/// Folders with libraries in them.
fn library_folders(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for path in files(folder) {
        if path.is_dir() && !path.is_symlink() {
            library_folders(&path, found);
        } else if path.to_string_lossy().contains(".so") {
            found.insert(folder.to_owned());
        }
    }
}
