//! Packages from the Debian mirror that this machine is set up with: kernels and a userland. They are fetched by apt
//! with directories of its own, once, and unpacked; nothing is installed, and root is not needed.

use crate::Failure;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// The package that depends on the current kernel for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";
/// What guests run, besides what these depend on.
const USERLAND: [&str; 4] = ["busybox-static", "nginx-light", "redis-server", "python3-minimal"];
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Disk space that packages, what is in them and images take.
const DISK_BYTES: u64 = 1 << 30;

/// A release of Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Release {
    /// Linux 6.1: too old for dedup, which has to refuse it.
    Bookworm,
    /// Linux 6.12.
    Trixie,
    /// Linux 6.12 for Bookworm, with headers whose programs run there and on what came later.
    BookwormBackports,
    /// QEMU 11 for Trixie.
    TrixieBackports,
}

impl Release {
    fn name(self) -> &'static str {
        match self {
            Release::Bookworm => "bookworm",
            Release::Trixie => "trixie",
            Release::BookwormBackports => "bookworm-backports",
            Release::TrixieBackports => "trixie-backports",
        }
    }

    /// The release that it adds to.
    fn base(self) -> Option<Self> {
        match self {
            Release::Bookworm | Release::Trixie => None,
            Release::BookwormBackports => Some(Release::Bookworm),
            Release::TrixieBackports => Some(Release::Trixie),
        }
    }
}

/// An unpacked kernel.
#[derive(Debug)]
pub struct Kernel {
    root: PathBuf,
}

/// An unpacked userland.
#[derive(Debug)]
pub struct Userland {
    root: PathBuf,
}

impl Kernel {
    /// Fetches a release's kernel into a folder of `cache`, unless it is there.
    ///
    /// # Errors
    /// If apt or the network are missing, or a package is not what it should be.
    pub fn fetch(cache: &Path, release: Release) -> Result<Self, Failure> {
        let folder = cache.join(format!("kernel-{}", release.name()));
        let root = unpacked(&folder, || {
            let apt = Apt::update(cache, release)?;
            apt.download(
                &folder.join("packages"),
                &[apt.stands_for(KERNEL, "linux-image-")?],
            )
        })?;
        Ok(Self { root })
    }

    /// The kernel, a bzImage.
    ///
    /// # Errors
    /// If the package has none.
    pub fn image(&self) -> Result<PathBuf, Failure> {
        image_in(&self.root)
    }

    /// A module, such as `kvm.ko`, uncompressed; `None` if the kernel has it built in.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn module(&self, name: &str) -> Result<Option<Vec<u8>>, Failure> {
        let Some(path) = find(&self.root, name) else {
            return Ok(None);
        };
        if path.extension().is_some_and(|extension| extension == "xz") {
            return output(Command::new("xz").args(["-d", "-c"]).arg(&path)).map(Some);
        }
        fs::read(&path).map(Some).map_err(|e| Failure::file(&path, e))
    }
}

impl Userland {
    /// Fetches the userland into a folder of `cache`, unless it is there.
    ///
    /// # Errors
    /// As [`Kernel::fetch`].
    pub fn fetch(cache: &Path) -> Result<Self, Failure> {
        let folder = cache.join("userland");
        let root = unpacked(&folder, || {
            let apt = Apt::update(cache, Release::Trixie)?;
            apt.download_with_dependencies(&folder.join("packages"), &USERLAND)
        })?;
        Ok(Self { root })
    }

    /// Where it is unpacked: `usr`, `etc` and so on.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The static busybox.
    #[must_use]
    pub fn busybox(&self) -> PathBuf {
        self.root.join("usr/bin/busybox")
    }
}

/// A kernel with all modules, the headers to build more of them, and its sources, as they are in one release.
#[derive(Debug)]
pub struct WholeKernel {
    root: PathBuf,
}

impl WholeKernel {
    /// Fetches it into a folder of `cache`, unless it is there.
    ///
    /// # Errors
    /// As [`Kernel::fetch`].
    pub fn fetch(cache: &Path, release: Release) -> Result<Self, Failure> {
        let folder = cache.join(format!("whole-kernel-{}", release.name()));
        let root = unpacked(&folder, || {
            let apt = Apt::update(cache, release)?;
            let image = apt.stands_for("linux-image-amd64", "linux-image-")?;
            let headers = apt.stands_for("linux-headers-amd64", "linux-headers-")?;
            let common = apt.stands_for(&headers, "linux-headers-")?;
            let programs = apt.stands_for(&headers, "linux-kbuild-")?;
            let sources = apt.stands_for("linux-source", "linux-source-")?;
            apt.download(
                &folder.join("packages"),
                &[image, headers, common, programs, sources],
            )
        })?;
        Ok(Self { root })
    }

    /// Fetches one package with a kernel, of any version that the release still has, without headers and sources.
    ///
    /// # Errors
    /// As [`Kernel::fetch`]; the version may be gone, which counts as something that is missing here.
    pub fn fetch_image(cache: &Path, release: Release, package: &str) -> Result<Self, Failure> {
        let folder = cache.join(package);
        let root = unpacked(&folder, || {
            let apt = Apt::update(cache, release)?;
            let downloaded = apt.download(&folder.join("packages"), &[package.to_owned()]);
            downloaded.map_err(|e| Failure::missing(format!("{package} cannot be had: {e}")))
        })?;
        Ok(Self { root })
    }

    /// The kernel, a bzImage.
    ///
    /// # Errors
    /// If the package has none.
    pub fn image(&self) -> Result<PathBuf, Failure> {
        image_in(&self.root)
    }

    /// Where it is unpacked.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A module such as `idxd`, and where it stands.
    ///
    /// # Errors
    /// If there is none.
    pub fn module(&self, name: &str) -> Result<PathBuf, Failure> {
        let (one, other) = (format!("{name}.ko"), format!("{}.ko", name.replace('_', "-")));
        let found = find(&self.root.join("lib/modules"), &one)
            .or_else(|| find(&self.root.join("lib/modules"), &other))
            .or_else(|| find(&self.root.join("usr/lib/modules"), &one));
        found.ok_or_else(|| Failure::new(format!("the kernel has no module {name}")))
    }
}

/// Unpacked packages with all that they depend on.
#[derive(Debug)]
pub struct Packages {
    root: PathBuf,
}

impl Packages {
    /// Fetches packages into the folder `name` of `cache`, unless they are there.
    ///
    /// # Errors
    /// As [`Kernel::fetch`].
    pub fn fetch(cache: &Path, name: &str, release: Release, packages: &[&str]) -> Result<Self, Failure> {
        let folder = cache.join(name);
        let root = unpacked(&folder, || {
            let apt = Apt::update(cache, release)?;
            apt.download_with_dependencies(&folder.join("packages"), packages)
        })?;
        Ok(Self { root })
    }

    /// Where they are unpacked.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }
}

fn image_in(root: &Path) -> Result<PathBuf, Failure> {
    let boot = root.join("boot");
    let is_kernel = |path: &PathBuf| file_name(path).starts_with("vmlinuz-");
    let found = files(&boot).into_iter().find(is_kernel);
    found.ok_or_else(|| Failure::new(format!("no kernel in {}", boot.display())))
}

/// Lets `download` fill `folder/packages`, unpacks those into `folder/root`, and remembers that it is complete.
fn unpacked(folder: &Path, download: impl FnOnce() -> Result<(), Failure>) -> Result<PathBuf, Failure> {
    let (root, packages, complete) = (
        folder.join("root"),
        folder.join("packages"),
        folder.join("complete"),
    );
    // One at a time: what runs beside this waits, and finds it complete.
    static FETCHING: Mutex<()> = Mutex::new(());
    let _fetching = FETCHING.lock().unwrap_or_else(PoisonError::into_inner);
    if complete.exists() {
        return Ok(root);
    }
    // What an interrupted run left would be found twice.
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(packages.join("partial")).map_err(|e| Failure::file(&packages, e))?;
    need_disk(folder)?;
    download()?;
    for package in files(&packages)
        .iter()
        .filter(|path| path.extension().is_some_and(|e| e == "deb"))
    {
        output(Command::new("dpkg-deb").arg("-x").arg(package).arg(&root))?;
    }
    let _ = fs::remove_dir_all(&packages);
    fs::write(&complete, "").map_err(|e| Failure::file(&complete, e))?;
    Ok(root)
}

fn need_disk(folder: &Path) -> Result<(), Failure> {
    let space = rustix::fs::statvfs(folder).map_err(|e| Failure::file(folder, e))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free >= DISK_BYTES {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{} MiB are free in {}, {} needed: make room, or choose another --cache",
        free >> 20,
        folder.display(),
        DISK_BYTES >> 20
    )))
}

/// apt with the package lists of one release.
struct Apt {
    options: Vec<String>,
}

impl Apt {
    fn update(cache: &Path, release: Release) -> Result<Self, Failure> {
        let folder = cache.join(format!("apt-{}", release.name()));
        for part in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(folder.join(part)).map_err(|e| Failure::file(&folder, e))?;
        }
        let (sources, status) = (folder.join("sources.list"), folder.join("status"));
        let signed = if Path::new(KEYRING).exists() {
            format!("[signed-by={KEYRING}] ")
        } else {
            String::new()
        };
        let mirror = mirror()?;
        let releases = [release.base(), Some(release)].into_iter().flatten();
        let source: String = releases
            .map(|release| format!("deb {signed}{mirror} {} main\n", release.name()))
            .collect();
        fs::write(&sources, source).map_err(|e| Failure::file(&sources, e))?;
        // Nothing is installed as far as this apt knows: dependencies come along.
        fs::write(&status, "").map_err(|e| Failure::file(&status, e))?;
        let folder = folder.canonicalize().map_err(|e| Failure::file(&folder, e))?;
        let set = |key: &str, value: &str| format!("-o{key}={value}");
        let place = |key: &str, name: &str| format!("-o{key}={}", folder.join(name).display());
        let apt = Self {
            options: vec![
                place("Dir::Etc::sourcelist", "sources.list"),
                set("Dir::Etc::sourceparts", "-"),
                place("Dir::State", ""),
                place("Dir::State::lists", "lists"),
                place("Dir::State::status", "status"),
                place("Dir::Cache", ""),
                set("APT::Default-Release", release.name()),
                set("APT::Sandbox::User", "root"),
                set("APT::Architecture", "amd64"),
                set("Acquire::Languages", "none"),
                set("Acquire::Retries", "3"),
                // Descriptions of graphical programs; nobody looks at them here.
                set("Acquire::IndexTargets::deb::DEP-11::DefaultEnabled", "false"),
            ],
        };
        // Once for all that this process fetches from it.
        static UPDATED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
        let mut updated = UPDATED.lock().unwrap_or_else(PoisonError::into_inner);
        if !updated.contains(&folder) {
            output(apt.command("apt-get").args(["-q", "update", "--error-on=any"]))
                .map_err(|e| Failure::missing(format!("the package mirror cannot be used: {e}")))?;
            updated.push(folder);
        }
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options);
        command
    }

    /// The package of this prefix that another one depends on, such as a kernel's meta package.
    fn stands_for(&self, package: &str, prefix: &str) -> Result<String, Failure> {
        let text = output(self.command("apt-cache").args(["depends", package]))?;
        let text = String::from_utf8_lossy(&text);
        let mut depends = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends:"))
            .map(str::trim)
            .filter(|name| name.starts_with(prefix));
        let found = depends.next().map(str::to_owned);
        found.ok_or_else(|| Failure::new(format!("{package} depends on no {prefix}*")))
    }

    fn download(&self, to: &Path, packages: &[String]) -> Result<(), Failure> {
        output(
            self.command("apt-get")
                .args(["-q", "download"])
                .args(packages)
                .current_dir(to),
        )
        .map(drop)
    }

    fn download_with_dependencies(&self, to: &Path, packages: &[&str]) -> Result<(), Failure> {
        let to = to.canonicalize().map_err(|e| Failure::file(to, e))?;
        let mut command = self.command("apt-get");
        command.arg(format!("-oDir::Cache::archives={}", to.display()));
        command.args([
            "-q",
            "-y",
            "--download-only",
            "--no-install-recommends",
            "install",
        ]);
        output(command.args(packages)).map(drop)
    }
}

/// Where this machine gets Debian from.
fn mirror() -> Result<String, Failure> {
    let targets = "$(SITE) $(RELEASE) $(COMPONENT)";
    let missing = |e: Failure| Failure::missing(format!("packages come from apt, which is missing: {e}"));
    let text =
        output(Command::new("apt-get").args(["indextargets", "--format", targets])).map_err(missing)?;
    let text = String::from_utf8_lossy(&text);
    let debian =
        fs::read_to_string("/etc/os-release").is_ok_and(|text| text.lines().any(|l| l == "ID=debian"));
    // bookworm-security and the like are elsewhere.
    let site = text
        .lines()
        .find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
            [site, release, "main"] if debian && !release.contains('-') => Some(site.to_owned()),
            _ => None,
        });
    site.ok_or_else(|| Failure::missing("apt on this machine knows no Debian mirror: run this on Debian"))
}

pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>, Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output();
    let output =
        output.map_err(|e| Failure::missing(format!("{program} cannot be run ({e}): install it")))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::new(format!("{program} failed: {}", text.trim())))
}

/// A file by its name, or its name and `.xz`, anywhere below a folder.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    files(folder).into_iter().find_map(|path| {
        if path.is_dir() && !path.is_symlink() {
            find(&path, name)
        } else {
            (file_name(&path).trim_end_matches(".xz") == name).then_some(path)
        }
    })
}

pub(crate) fn file_name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// What is in a folder, in order.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}
