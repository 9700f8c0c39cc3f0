//! A kernel with its modules, and a static busybox, from the distribution that the machine runs. Downloaded once
//! into a cache directory and unpacked there; nothing is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A package that depends on the current kernel for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";
const BUSYBOX: &str = "busybox-static";
/// In the order in which they are loaded; what the kernel has built in is missing, which is fine.
const MODULES: [&str; 3] = ["irqbypass.ko", "kvm.ko", "kvm-amd.ko"];

/// Unpacked packages.
pub(crate) struct Debian {
    root: PathBuf,
}

impl Debian {
    /// Downloads and unpacks, unless that was done before.
    pub(crate) fn fetch(cache: &Path) -> Result<Debian, String> {
        let debian = Debian {
            root: cache.join("root"),
        };
        if debian.kernel().is_ok() && debian.busybox().exists() {
            return Ok(debian);
        }
        let packages = cache.join("packages");
        // What an interrupted run left would be found twice.
        let _ = fs::remove_dir_all(&packages);
        fs::create_dir_all(&packages).map_err(|error| format!("{}: {error}", packages.display()))?;
        let kernel = kernel_package()?;
        run(Command::new("apt-get")
            .args(["download", &kernel, BUSYBOX])
            .current_dir(&packages))?;
        for package in files(&packages) {
            run(Command::new("dpkg-deb").arg("-x").arg(package).arg(&debian.root))?;
        }
        for module in debian.modules()? {
            if module.extension().is_some_and(|extension| extension == "xz") {
                run(Command::new("xz").args(["-d", "-f"]).arg(module))?;
            }
        }
        debian.kernel()?;
        Ok(debian)
    }

    /// The kernel, a bzImage.
    pub(crate) fn kernel(&self) -> Result<PathBuf, String> {
        let is_kernel = |path: &PathBuf| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
        };
        let boot = self.root.join("boot");
        files(&boot)
            .into_iter()
            .find(is_kernel)
            .ok_or_else(|| format!("no kernel in {}", boot.display()))
    }

    /// A static busybox.
    pub(crate) fn busybox(&self) -> PathBuf {
        ["bin/busybox", "usr/bin/busybox"]
            .map(|place| self.root.join(place))
            .into_iter()
            .find(|path| path.exists())
            .unwrap_or_else(|| self.root.join("bin/busybox"))
    }

    /// The modules that KVM on AMD-V needs.
    pub(crate) fn modules(&self) -> Result<Vec<PathBuf>, String> {
        let mut found = Vec::new();
        for place in ["lib/modules", "usr/lib/modules"] {
            find(&self.root.join(place), &mut found);
        }
        if found.iter().any(|path| file_name(path).starts_with("kvm-amd.ko")) {
            Ok(found)
        } else {
            Err(format!("no kvm-amd.ko under {}", self.root.display()))
        }
    }
}

fn find(directory: &Path, found: &mut Vec<PathBuf>) {
    for path in files(directory) {
        if path.is_dir() {
            find(&path, found);
        } else if MODULES
            .iter()
            .any(|module| file_name(&path).trim_end_matches(".xz") == *module)
        {
            found.push(path);
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn files(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}

/// The package that the meta package stands for.
fn kernel_package() -> Result<String, String> {
    let text = run(Command::new("apt-cache").args(["depends", KERNEL]))?;
    let mut words = text
        .split_whitespace()
        .skip_while(|word| *word != "Depends:")
        .skip(1);
    words
        .next()
        .map(str::to_owned)
        .ok_or_else(|| format!("apt does not know {KERNEL}: run apt-get update"))
}

fn run(command: &mut Command) -> Result<String, String> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?} cannot be run ({error})"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!(
            "{command:?} failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ))
    }
}
