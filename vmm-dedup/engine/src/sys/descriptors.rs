//! The files that this process has open, one by one.
#![allow(unsafe_code)] // descriptors that others own

use crate::error::Error;
use rustix::fs::{Mode, OFlags, RawDir, fstat};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{OwnedFd, RawFd};
use std::path::PathBuf;

/// Numbers without a descriptor that are asked for; if there are more, descriptors are listed, each of which costs more.
const MOST_GAPS: i64 = 64;

/// /proc/self/fd.
#[derive(Debug)]
pub(super) struct Descriptors(OwnedFd);

impl Descriptors {
    pub(super) fn open() -> Result<Self, Error> {
        let path = "/proc/self/fd";
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| Error::Proc(path, e.into()))?;
        Ok(Self(folder))
    }

    /// Judges all descriptors; what judges says whether one is open, or why it is enough.
    pub(super) fn each<E: From<Error>>(
        &self,
        mut judge: impl FnMut(RawFd) -> Result<bool, E>,
    ) -> Result<(), E> {
        // Since Linux 6.2 the size of this folder is the number of descriptors.
        let open = fstat(&self.0).map_or(0, |stat| stat.st_size);
        let (mut seen, mut next) = (0, 0);
        while seen < open && i64::from(next) - seen < MOST_GAPS {
            seen += i64::from(judge(next)?);
            next += 1;
        }
        if seen < open {
            for fd in self.list()?.into_iter().filter(|fd| *fd >= next) {
                judge(fd)?;
            }
        }
        Ok(())
    }

    fn list(&self) -> Result<Vec<RawFd>, Error> {
        let failed = |e: rustix::io::Errno| Error::Proc("/proc/self/fd", e.into());
        rustix::fs::seek(&self.0, rustix::fs::SeekFrom::Start(0)).map_err(failed)?;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut entries = RawDir::new(&self.0, &mut buffer);
        let mut found = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(failed)?;
            found.extend(
                entry
                    .file_name()
                    .to_str()
                    .ok()
                    .and_then(|name| name.parse::<RawFd>().ok()),
            );
        }
        Ok(found)
    }
}

/// The flags of a descriptor (F_GETFL); `None` if it is not open.
pub(super) fn flags(fd: RawFd) -> Option<i32> {
    // SAFETY: asking for flags has no effect; the descriptor may be closed meanwhile, which the kernel tells.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    (flags >= 0).then_some(flags)
}

pub(super) fn stat(fd: RawFd) -> Option<libc::stat> {
    // SAFETY: all-zero is a valid stat, which the kernel fills.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: stat is exclusive; the descriptor may be closed meanwhile, which the kernel tells.
    (unsafe { libc::fstat(fd, &mut stat) } == 0).then_some(stat)
}

/// The number of the file system that a file is on.
pub(super) fn file_system(fd: RawFd) -> Option<i64> {
    // SAFETY: all-zero is a valid statfs, which the kernel fills.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: as in stat().
    (unsafe { libc::fstatfs(fd, &mut stat) } == 0).then_some(stat.f_type)
}

/// Where a descriptor leads to.
pub(super) fn link(fd: RawFd) -> PathBuf {
    fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default()
}

/// What the kernel tells of it.
pub(super) fn info(fd: RawFd) -> Option<String> {
    fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()
}

/// Whether the kernel decrypts what a socket receives: straight into the pages of whoever receives it.
pub(super) fn is_tls(fd: RawFd) -> bool {
    let mut name = [0u8; 16];
    let mut len: libc::socklen_t = 16;
    // SAFETY: so many bytes that are ours alone; the descriptor may be closed meanwhile, which the kernel tells.
    let asked = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_TCP,
            libc::TCP_ULP,
            name.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    asked == 0 && name.starts_with(b"tls")
}
