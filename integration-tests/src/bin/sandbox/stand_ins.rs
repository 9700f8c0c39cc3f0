//! What few hosts have, or have free.

use std::path::{Path, PathBuf};

/// Puts files in the place of DAMON's and of the bitmap of idle pages, which few kernels have, or have free: what is written there
/// changes nothing, and is read again. So no memory is ever used.
pub(crate) fn for_the_kernel(folder: &Path) -> std::io::Result<()> {
    use rustix::mount::{
        MountFlags, MountPropagationFlags, mount, mount_bind, mount_bind_recursive, mount_change,
    };
    use std::fs::{create_dir_all, write};
    const MM: &str = "/sys/kernel/mm";
    // SAFETY: there is no other thread yet.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("tmpfs", folder, "tmpfs", MountFlags::empty(), None)?;
    // Everything else stays as it is.
    let entries = std::fs::read_dir(MM)?.flatten();
    let is_other =
        |name: &std::ffi::OsStr| !["damon", "page_idle"].iter().any(|stands_in| name == *stands_in);
    for entry in entries.filter(|entry| is_other(&entry.file_name()) && entry.path().is_dir()) {
        let place = folder.join(entry.file_name());
        create_dir_all(&place)?;
        mount_bind(entry.path(), &place)?;
    }
    create_dir_all(folder.join("page_idle"))?;
    write(folder.join("page_idle/bitmap"), "")?;
    let damon = folder.join("damon/admin/kdamonds");
    let context = damon.join("0/contexts/0");
    for name in ["intervals", "nr_regions"] {
        create_dir_all(context.join("monitoring_attrs").join(name))?;
    }
    create_dir_all(context.join("targets/0/regions/0"))?;
    for name in ["sz", "nr_accesses", "age"] {
        create_dir_all(context.join("schemes/0/access_pattern").join(name))?;
    }
    let region = context.join("schemes/0/tried_regions/0");
    create_dir_all(&region)?;
    for (name, number) in [("start", 0), ("end", u64::MAX >> 1), ("nr_accesses", 1)] {
        write(region.join(name), number.to_string())?;
    }
    write(damon.join("0/pid"), std::process::id().to_string())?;
    write(damon.join("nr_kdamonds"), "0")?;
    Ok(mount_bind_recursive(folder, MM)?)
}

/// Mounts an overlayfs, where the kernel has that and lets us.
pub(crate) fn disks_on_overlay(folder: &Path) -> Option<PathBuf> {
    use rustix::mount::{MountFlags, mount};
    let [lower, upper, work, disks] = ["lower", "upper", "work", "disks"].map(|name| folder.join(name));
    for place in [&lower, &upper, &work, &disks] {
        std::fs::create_dir(place).ok()?;
    }
    let layers = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.display(),
        upper.display(),
        work.display()
    );
    let layers = std::ffi::CString::new(layers).ok()?;
    mount(
        "overlay",
        &disks,
        "overlay",
        MountFlags::empty(),
        Some(layers.as_c_str()),
    )
    .ok()?;
    Some(disks)
}

pub(crate) fn unmount(folder: &Path) {
    for place in [Path::new("/sys/kernel/mm"), &folder.join("disks"), folder] {
        let _ = rustix::mount::unmount(place, rustix::mount::UnmountFlags::DETACH);
    }
}
