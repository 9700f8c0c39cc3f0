//! Merging that is suspended because something may write guest memory by plain references.

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Opens what passes for a device whose kernel part takes plain references to guest memory; `None`, said aloud, where there is
/// no such thing.
#[must_use]
pub fn open_what_suspends(folder: &Path) -> Option<File> {
    const KVM: (u32, u32) = (10, 232);
    let path = folder.join("vhost-scsi");
    let device = rustix::fs::makedev(KVM.0, KVM.1);
    let made = rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, Mode::RUSR, device);
    let opened = made
        .map_err(std::io::Error::from)
        .and_then(|()| File::open(&path));
    opened.inspect_err(|error| eprintln!("SKIPPED: {error}")).ok()
}

/// Opens a file for direct I/O (O_DIRECT) that its flags show to be in the way of merging: it lies on an overlayfs whose layers
/// nobody else in this process sees. `None`, said aloud, where there is no such thing.
///
/// # Panics
/// If there is no thread.
#[must_use]
pub fn open_what_suspends_at_a_glance(folder: &Path) -> Option<File> {
    let open = || open_on_hidden_layers(folder);
    let opened = std::thread::scope(|scope| scope.spawn(open).join().expect("it returns"));
    opened.inspect_err(|error| eprintln!("SKIPPED: {error}")).ok()
}

/// To be called in a thread of its own, which sees other mounts from here on.
#[allow(unsafe_code)] // unshare
fn open_on_hidden_layers(folder: &Path) -> io::Result<File> {
    // SAFETY: only mounts and the working directory are this thread's own afterwards.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let path = |name: &str| folder.join(name);
    for name in ["lower", "upper", "work", "all"] {
        std::fs::create_dir(path(name))?;
    }
    std::fs::write(path("lower").join("disk"), [0; 4096])?;
    let options = ["lowerdir=", "lower", ",upperdir=", "upper", ",workdir=", "work"];
    let options = options.chunks(2).flat_map(|pair| {
        let place = path(pair[1]);
        [pair[0].as_bytes().to_vec(), place.as_os_str().as_bytes().to_vec()].concat()
    });
    let options = CString::new(options.collect::<Vec<u8>>())?;
    mount(
        "overlay",
        path("all"),
        "overlay",
        MountFlags::empty(),
        options.as_c_str(),
    )?;
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path("all").join("disk"), flags, Mode::empty())?.into())
}
