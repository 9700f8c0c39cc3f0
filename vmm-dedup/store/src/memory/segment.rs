//! The file of one segment.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use vmm_dedup_protocol::mapping::{Mapping, sealed_memfd};
use vmm_dedup_protocol::{SEGMENT_BYTES, SEGMENT_FILE_BYTES, SEGMENT_NAME};

/// A second descriptor of the same file that cannot be written through.
pub(super) fn read_only(file: &OwnedFd) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    Ok(rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// A sealed memfd, and the only writable mapping of it that there will ever be.
#[derive(Debug)]
pub(super) struct SegmentFile {
    pub(super) map: Mapping,
    /// Opened read-only, for services.
    pub(super) file: Arc<OwnedFd>,
}

impl SegmentFile {
    pub(super) fn new() -> io::Result<Self> {
        let (file, map) = sealed_memfd(SEGMENT_NAME, SEGMENT_FILE_BYTES)?;
        map.advise_huge(SEGMENT_BYTES);
        Ok(Self {
            file: Arc::new(read_only(&file)?),
            map,
        })
    }

    /// What its pages cost, in use or not.
    pub(super) fn resident_bytes(&self) -> u64 {
        resident_bytes(&self.file)
    }
}

/// What the pages of a file in memory cost.
pub(super) fn resident_bytes(file: &OwnedFd) -> u64 {
    let blocks = rustix::fs::fstat(file).map_or(0, |stat| stat.st_blocks);
    u64::try_from(blocks).unwrap_or(0) * 512
}
