//! Initial RAM disks: of guests (L2), and of the host that they run on (L1).

use crate::archive::Archive;
use crate::debian::{Kernel, Userland, file_name, files, output};
use crate::{Failure, elf};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs of a guest; the libraries that they need come along.
const PROGRAMS: [&str; 6] = [
    "usr/bin/busybox",
    "usr/sbin/nginx",
    "usr/bin/redis-check-rdb",
    "usr/bin/redis-cli",
    "usr/bin/redis-benchmark",
    "usr/bin/python3.13",
];
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const PYTHON: &str = "usr/lib/python3.13";
/// Everything is below /usr, as in Debian.
const LINKS: [(&str, &str); 5] = [
    ("bin", "usr/bin"),
    ("sbin", "usr/sbin"),
    ("lib", "usr/lib"),
    ("lib64", "usr/lib64"),
    ("usr/bin/redis-server", "redis-check-rdb"),
];
/// Modules of L1, in the order in which they are loaded; those of the other vendor's CPU do not load.
const MODULES: [&str; 14] = [
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_console",
    "irqbypass",
    "kvm",
    "kvm-amd",
    "kvm-intel",
    "vfio",
    "vfio_iommu_type1",
    "vfio-pci-core",
    "vfio-pci",
];
/// More of them, for QEMU's vsock.
const VSOCK_MODULES: [&str; 5] = [
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vhost_iotlb",
    "vhost",
    "vhost_vsock",
];
/// Modules of guests that have a disk and an agent.
const AGENTS_MODULES: [&str; 4] = [
    "virtio_blk",
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport",
];
/// Emulated, a guest's CPU is so slow that an agent's usual share of it is nothing.
const AGENTS_SETTINGS: &str = "share = 0.2\ninterval_seconds = 1\ntemperature = \"off\"\n";

/// A guest's initial RAM disk: its whole system. All guests have the same.
///
/// # Errors
/// If a package lacks what should be in it.
pub fn guest(userland: &Userland) -> Result<Vec<u8>, Failure> {
    guest_with(userland, &[])
}

/// The same with more files: where they are put, whether they are programs, what is in them.
///
/// # Errors
/// As [`guest`].
pub fn guest_with(userland: &Userland, more: &[(String, bool, Vec<u8>)]) -> Result<Vec<u8>, Failure> {
    let root = userland.root();
    let mut archive = base(&fs_read(&userland.busybox())?, include_str!("../guest/init.sh"));
    for (name, target) in LINKS {
        archive.symlink(name, target);
    }
    let mut programs: Vec<PathBuf> = PROGRAMS.iter().map(PathBuf::from).collect();
    programs.extend(libraries(root, &programs)?);
    for file in &programs {
        add(&mut archive, root, file)?;
    }
    add_folder(&mut archive, root, Path::new(PYTHON))?;
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n");
    archive.file("etc/group", 0o644, b"root:x:0:\n");
    archive.file(
        "etc/guest/nginx.conf",
        0o644,
        include_bytes!("../guest/nginx.conf"),
    );
    archive.file("etc/guest/work.py", 0o644, include_bytes!("../guest/work.py"));
    // What a guest verifies at its end.
    let sums = output(Command::new("sha256sum").args(&programs).current_dir(root))?;
    let sums = String::from_utf8_lossy(&sums).replace("  usr/", "  /usr/");
    archive.file("etc/guest/sums", 0o644, sums.as_bytes());
    for (name, program, content) in more {
        archive.file(name, if *program { 0o755 } else { 0o644 }, content);
    }
    Ok(archive.finish())
}

/// What a guest needs that has a disk and an agent, for [`guest_with`]. `programs`: where the agent and its example are.
///
/// # Errors
/// If one of them is missing.
pub fn agents_files(kernel: &Kernel, programs: &Path) -> Result<Vec<(String, bool, Vec<u8>)>, Failure> {
    let mut files = Vec::new();
    for (name, path) in [
        ("vmm-dedup-agent", "vmm-dedup-agent"),
        ("secret", "examples/secret"),
    ] {
        let path = programs.join(path);
        if !path.is_file() {
            return Err(Failure::missing(format!(
                "{} is missing: cargo build --profile agent --target x86_64-unknown-linux-musl -p vmm-dedup-agent, and the same with \
                 -p vmm-dedup-hints --example secret",
                path.display()
            )));
        }
        files.push((format!("usr/bin/{name}"), true, fs_read(&path)?));
    }
    for name in AGENTS_MODULES.map(|name| format!("{name}.ko")) {
        if let Some(module) = kernel.module(&name)? {
            files.push((format!("modules/{name}"), false, module));
        }
    }
    files.push(("etc/vmm-dedup-agent.toml".into(), false, AGENTS_SETTINGS.into()));
    Ok(files)
}

/// What L1's initial RAM disk holds beside its kernel's modules.
#[derive(Debug)]
pub struct Contents<'a> {
    /// A static busybox.
    pub busybox: PathBuf,
    /// Programs of this machine, which are put into /bin with the libraries that they need.
    pub programs: Vec<PathBuf>,
    /// Other files, and where they are put.
    pub files: Vec<(&'a str, Vec<u8>)>,
    /// Files and folders of this machine that are put where they are here.
    pub trees: Vec<PathBuf>,
    /// What is played.
    pub scenario: String,
    /// Guests have a vsock.
    pub vsock: bool,
    /// More for the kernel command line of guests.
    pub guest_arguments: &'static str,
}

/// L1's initial RAM disk.
///
/// # Errors
/// If a file cannot be read.
pub fn host(kernel: &Kernel, contents: &Contents<'_>) -> Result<Vec<u8>, Failure> {
    let mut modules = MODULES.to_vec();
    if contents.vsock {
        modules.extend(VSOCK_MODULES);
    }
    let init = include_str!("../guest/host-init.sh")
        .replace("@modules@", &modules.join(" "))
        .replace("@scenario@", &contents.scenario)
        .replace("@guest_arguments@", contents.guest_arguments);
    let mut archive = base(&fs_read(&contents.busybox)?, &init);
    archive.directory("modules");
    for name in modules {
        let name = format!("{name}.ko");
        if let Some(module) = kernel.module(&name)? {
            archive.file(&format!("modules/{name}"), 0o644, &module);
        }
    }
    let mut libraries = BTreeSet::new();
    for program in &contents.programs {
        archive.file(&format!("bin/{}", file_name(program)), 0o755, &fs_read(program)?);
        libraries.extend(linked_here(program)?);
    }
    for library in libraries {
        let name = library.to_string_lossy().trim_start_matches('/').to_owned();
        archive.file(&name, 0o755, &fs_read(&library)?);
    }
    for (name, content) in &contents.files {
        archive.file(name, 0o644, content);
    }
    for tree in &contents.trees {
        add_folder(
            &mut archive,
            Path::new("/"),
            tree.strip_prefix("/").unwrap_or(tree),
        )?;
    }
    Ok(archive.finish())
}

/// What every system here begins with.
pub(crate) fn base(busybox: &[u8], init: &str) -> Archive {
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.console("dev/console");
    archive.file("init", 0o755, init.as_bytes());
    // Outside /usr/bin, since that may be reached by a link.
    archive.file("busybox", 0o755, busybox);
    archive
}

/// The libraries in an unpacked root that programs in it need, directly or not.
pub(crate) fn libraries(root: &Path, programs: &[PathBuf]) -> Result<BTreeSet<PathBuf>, Failure> {
    let mut found = BTreeSet::new();
    let mut open = programs.to_vec();
    while let Some(file) = open.pop() {
        for name in elf::needs(&root.join(&file))? {
            let library = match name.strip_prefix('/') {
                // The loader, by way of a link to a directory that LINKS has.
                Some(path) => PathBuf::from("usr").join(path),
                None => Path::new(LIBRARIES).join(name),
            };
            if found.insert(library.clone()) {
                open.push(library);
            }
        }
    }
    Ok(found)
}

/// The libraries of this machine that a program is linked with, and its loader.
pub(crate) fn linked_here(program: &Path) -> Result<Vec<PathBuf>, Failure> {
    let text = output(Command::new("ldd").arg(program))?;
    let text = String::from_utf8_lossy(&text);
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(words.map(PathBuf::from).collect())
}

/// Adds a file of a root at its place; links are followed.
pub(crate) fn add(archive: &mut Archive, root: &Path, file: &Path) -> Result<(), Failure> {
    let path = root.join(file);
    let metadata = fs::metadata(&path).map_err(|e| Failure::file(&path, e))?;
    let mode = metadata.permissions().mode() & 0o777;
    archive.file(&file.to_string_lossy(), mode, &fs_read(&path)?);
    Ok(())
}

/// Adds a file, or a folder with all that is in it.
fn add_folder(archive: &mut Archive, root: &Path, folder: &Path) -> Result<(), Failure> {
    let path = root.join(folder);
    if !path.is_dir() {
        return add(archive, root, folder);
    }
    // Links to files that only an installation makes lead nowhere.
    for entry in files(&path).into_iter().filter(|path| path.exists()) {
        add_folder(archive, root, &folder.join(file_name(&entry)))?;
    }
    Ok(())
}

fn fs_read(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|e| Failure::file(path, e))
}
