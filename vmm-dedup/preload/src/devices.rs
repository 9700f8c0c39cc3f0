//! Devices that have guest memory pinned (VFIO, iommufd, vDPA): when they get it, and when they have gone.
//!
//! A device gets memory by an ioctl on a file, which waits until everything is anonymous memory. Nothing tells when it lets go: that
//! may be an ioctl, or the end of the last of several files. So the supervisor's thread looks once a second whether the process has
//! any file of such devices open, or mapped, also one that the engine drives a device of its own by. Memory is shared again when there
//! is none. What cannot be looked at may be one.
//!
//! # Why memory may be shared again
//!
//! - A device that has gone is one whose files this process has closed. If the kernel has memory pinned for it all the same (another
//!   process has a file; a group of VFIO's holds its container), it refuses to move those pages, one by one. What the kernel has
//!   copied is not shared again by what open files tell, from then on ([`pin_while`](vmm_dedup::Supervisor::pin_while)).
//! - A device that gets memory while the look goes on has an open file meanwhile, and is counted: the look is in vain then. One
//!   that gets memory later finds no pin, and waits for a new one.
//! - vhost-scsi takes memory without a trace, and a file of it that another process has would do so unseen: a VMM that had one
//!   is not deduplicated any more.
#![allow(unsafe_code)] // statx(2)

use crate::manager::{self, tell};
use crate::watch::{DeviceFile, watch};
use std::ffi::CString;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A device is about to get memory by a file.
pub(crate) fn pins(fd: RawFd) {
    if is_known(fd) {
        return;
    }
    // By the supervisor: this thread may not be allowed to.
    let supervisor = manager::supervisor();
    let kind = supervisor.and_then(|supervisor| supervisor.with_service(move |_| Kind::of(fd)));
    tell(|supervisor| supervisor.pin_while(move || has(fd, kind.as_ref())));
    // Not before: another thread's device must not get memory while it is given back.
    let known = &mut watch().devices;
    known.retain(|file| file.fd != fd);
    known.push(DeviceFile { fd, times: 0 });
}

/// Whether memory is pinned for this file already. It is about to be used, so no look under way may end that.
fn is_known(fd: RawFd) -> bool {
    let known = &mut watch().devices;
    let file = known.iter_mut().find(|file| file.fd == fd);
    file.map(|file| file.times += 1).is_some()
}

/// Whether there may be a device that got memory by a file of this kind, once as this descriptor.
fn has(fd: RawFd, kind: Option<&Option<Kind>>) -> bool {
    let times = |files: &[DeviceFile]| files.iter().find(|file| file.fd == fd).map(|file| file.times);
    let before = times(&watch().devices);
    // Whatever the file is.
    let Some(Some(kind)) = kind else { return true };
    if is_open(kind).unwrap_or(true) {
        return true;
    }
    let known = &mut watch().devices;
    if times(known) != before {
        return true;
    }
    known.retain(|file| file.fd != fd);
    false
}

/// What a file is: for devices their number, which all files of a kind have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Device(u32, u32),
    File(u32, u32, u64),
}

impl Kind {
    /// `None`: nobody can tell, as of files that have no inode of their own and are not known by their name.
    fn of(fd: RawFd) -> Option<Self> {
        let path = PathBuf::from(format!("/proc/self/fd/{fd}"));
        let name = fs::read_link(&path).ok()?;
        match is_shared_inode(&name) && !is_device(&name) {
            true => None,
            false => Self::at(&path).ok(),
        }
    }

    /// By what the kernel knows: the server of a file system is not waited for.
    fn at(path: &Path) -> io::Result<Self> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: all-zero is a valid statx, which the kernel fills.
        let mut file: libc::statx = unsafe { std::mem::zeroed() };
        let wanted = libc::STATX_TYPE | libc::STATX_INO;
        // SAFETY: a path that ends with 0, and room for the answer.
        let failed = unsafe {
            libc::statx(
                libc::AT_FDCWD,
                path.as_ptr(),
                libc::AT_STATX_DONT_SYNC,
                wanted,
                &raw mut file,
            )
        };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(match u32::from(file.stx_mode) & libc::S_IFMT {
            libc::S_IFCHR => Self::Device(file.stx_rdev_major, file.stx_rdev_minor),
            _ => Self::File(file.stx_dev_major, file.stx_dev_minor, file.stx_ino),
        })
    }
}

/// Whether the process has a file of a kind open, or any file of devices that pin memory; or has one of the latter mapped.
fn is_open(kind: &Kind) -> Option<bool> {
    let mut listed = false;
    for entry in fs::read_dir("/proc/self/fd").ok()? {
        let path = entry.ok()?.path();
        listed = true;
        let name = match fs::read_link(&path) {
            Ok(name) => name,
            // It was closed meanwhile: maybe the folder that is being read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => return None,
        };
        if is_device(&name) {
            return Some(true);
        }
        if is_shared_inode(&name) {
            continue;
        }
        match Kind::at(&path) {
            Ok(found) if found == *kind => return Some(true),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => return None,
        }
    }
    let maps = fs::read("/proc/self/maps").ok()?;
    let mapped = |line: &str| {
        line.splitn(6, ' ')
            .last()
            .map(|name| is_device(Path::new(name.trim())))
    };
    let maps = String::from_utf8_lossy(&maps);
    let is_mapped = maps.lines().filter_map(mapped).any(|device| device);
    // Where the main thread has ended the kernel lists nothing.
    (listed && !maps.is_empty()).then_some(is_mapped)
}

/// Whether many files of all kinds share an inode with this one.
fn is_shared_inode(name: &Path) -> bool {
    name.as_os_str().as_bytes().starts_with(b"anon_inode:")
}

/// Names of files that have memory pinned, or hold one that has. (KVM's own file for VFIO, which VMMs keep, holds groups only for
/// as long as it is told to.)
fn is_device(name: &Path) -> bool {
    const BEGINNINGS: [&str; 5] = [
        "/dev/vfio/",
        "/dev/iommu",
        "/dev/vhost-vdpa",
        "anon_inode:[vfio",
        "anon_inode:[iommufd",
    ];
    let name = name.to_string_lossy();
    BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    #[test]
    fn files_of_devices_are_known_by_their_names() {
        for name in [
            "/dev/vfio/vfio",
            "/dev/vfio/12",
            "/dev/vfio/devices/vfio0",
            "/dev/iommu",
            "/dev/vhost-vdpa-0",
            "anon_inode:[vfio-device]",
            "anon_inode:[iommufd-pgfault]",
        ] {
            assert!(is_device(Path::new(name)), "{name}");
        }
        for name in [
            "/dev/kvm",
            "anon_inode:kvm-vfio",
            "/images/vfio.img",
            "",
            "[heap]",
        ] {
            assert!(!is_device(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn a_file_is_open_until_its_last_descriptor_is_closed() {
        let file = tempfile::tempfile().expect("a file");
        let kind = Kind::of(file.as_raw_fd()).expect("a kind");
        let other = file.try_clone().expect("a descriptor");
        drop(file);
        assert_eq!(is_open(&kind), Some(true));
        drop(other);
        assert_eq!(is_open(&kind), Some(false));
    }

    #[test]
    fn files_without_an_inode_of_their_own_are_not_taken_for_each_other() {
        // SAFETY: no arguments that could be wrong.
        let [one, other] = [(); 2].map(|()| unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) });
        assert_eq!((Kind::of(one), Kind::of(other)), (None, None));
        let path = PathBuf::from(format!("/proc/self/fd/{one}"));
        let kind = Kind::at(&path).expect("a kind");
        // SAFETY: both are ours.
        unsafe { libc::close(one) };
        assert_eq!(is_open(&kind), Some(false));
        // SAFETY: as before.
        unsafe { libc::close(other) };
    }

    #[test]
    fn any_file_of_a_device_is_of_its_kind() {
        let kind = Kind::of(File::open("/dev/full").expect("it is there").as_raw_fd());
        let other = File::open("/dev/full").expect("it is there");
        assert_eq!(Kind::of(other.as_raw_fd()), kind);
        assert_eq!(is_open(&kind.expect("a kind")), Some(true));
    }
}
