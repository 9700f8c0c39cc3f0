//! Merging that is suspended because something may write guest memory by plain references.

use rustix::fs::{CWD, FileType, Mode};
use std::fs::File;
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
