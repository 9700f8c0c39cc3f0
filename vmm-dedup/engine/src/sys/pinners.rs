//! Whether anybody in this process can have pages of guest memory pinned for writing.
//!
//! A page in a mapping of a store file that the kernel has copied cannot be asked whether it is pinned. But whoever pins pages does
//! it through a file. So if no open file can, and the pages are frozen before it is asked (so that nobody pins them after),
//! nobody has them pinned. What is not known not to pin, does.
//!
//! | file | pins pages for writing |
//! | --- | --- |
//! | a regular file that is open for direct I/O; not on tmpfs, which copies | while a read is under way |
//! | a block device, however it is open | while a read is under way; ioctls pin as well |
//! | io_uring with registered buffers | for as long as they are registered |
//! | io_uring with registered files, which are not among the open ones | while a read is under way |
//! | VFIO, vDPA, iommufd, RDMA, any device that is not in the list below; AF_XDP, RDS | for as long as they like |
//! | a regular file on a file system that is not in the list below: FUSE and 9p may pin without having been asked for direct I/O | while a read is under way |
//! | TCP sockets whose TLS the kernel does | while data comes in: plain references |
//! | other regular files, pipes (vmsplice takes references for reading), other sockets (zero copy reads), eventfds and the like | no |
//! | KVM | pages of guests that run guests (Linux 6.13 and later) |
//! | /dev/net/tun, vhost-net, vhost-vsock; terminals; /dev/null and its neighbours | no: they copy |
//!
//! What cannot be seen:
//!
//! - *Guests that run guests*, and files that the VMM keeps elsewhere (a ring of which another process has the only descriptor). So
//!   the VMM has to say that there are none: [`DedupService::vouch_for_pins`](crate::service::DedupService::vouch_for_pins).
//! - *A file that was closed while its I/O goes on*, as for [`direct_io`](mod@crate::sys::direct_io).
//! - *Other processes* that write this one's memory (a debugger: process_vm_writev). They pin for the moment of the copy. The
//!   kernel's [count](mod@crate::sys::pin_count) of pinned pages tells of them.
#![allow(unsafe_code)] // getsockopt

use crate::error::Error;
use crate::sys::descriptors::{self, Descriptors, file_system, info, is_tls, link, stat};
use crate::sys::direct_io::{BTRFS, DirectIo, EXT4, OVERLAYFS, TMPFS, XFS, layers};
use rustix::fs::FileType;
use std::os::fd::RawFd;
use std::sync::Arc;

/// File systems whose reads copy, unless the file is open for direct I/O; overlayfs is what its layers are. Source: Linux,
/// include/uapi/linux/magic.h.
const FILE_SYSTEMS: [i64; 20] = [
    EXT4,
    XFS,
    BTRFS,
    TMPFS,
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6367_7270, // cgroup2
    0x0027_e0eb, // cgroup
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x8584_58f6, // ramfs
    0x9584_58f6, // hugetlbfs
    0x7371_7368, // squashfs
    0xe0f5_e1e2, // erofs
    0xf2f5_2010, // f2fs
    0x9660,      // iso9660
    0x4d44,      // vfat
    0x6e73_6673, // namespaces
    0x5049_4446, // pidfds
    0x5345_434d, // memfd_secret
];

/// Files of overlayfs remembered.
const MOST_PASSED: usize = 256;

/// Sockets whose memory stays their own, or is only read.
const DOMAINS: [i32; 6] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
    libc::AF_PACKET,
    libc::AF_VSOCK,
];

/// Character devices that copy: major and minor number (`None`: all). Source: Linux, Documentation/admin-guide/devices.txt.
const DEVICES: [(u32, Option<u32>); 16] = [
    (1, Some(3)),    // /dev/null
    (1, Some(5)),    // /dev/zero
    (1, Some(7)),    // /dev/full
    (1, Some(8)),    // /dev/random
    (1, Some(9)),    // /dev/urandom
    (4, None),       // terminals
    (5, None),       // /dev/tty, /dev/console, /dev/ptmx
    (10, Some(200)), // /dev/net/tun
    (10, Some(232)), // /dev/kvm
    (10, Some(238)), // /dev/vhost-net
    (10, Some(241)), // /dev/vhost-vsock
    (136, None),     // /dev/pts
    (137, None),
    (138, None),
    (139, None),
    (140, None),
];

/// Files without a name that copy, or have no memory to do with. (`[...]` at the end stands for anything.)
const NAMELESS: [&str; 16] = [
    "[eventfd]",
    "[eventpoll]",
    "[timerfd]",
    "[signalfd]",
    "inotify",
    "[fanotify]",
    "[pidfd]",
    "[userfaultfd]",
    "[landlock-ruleset]",
    "seccomp notify",
    "kvm-vm",
    "kvm-vcpu:*",
    "kvm-vcpu-stats:*",
    "kvm-vm-stats",
    "[kvm-stats]",
    "[perf_event]",
];

/// Tries to read what the kernel tells of a ring, which it does not while the ring is in use.
const TRIES: usize = 10;

/// Who may have pages pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Pinner {
    /// This file, of this kind.
    File { fd: RawFd, what: String },
    /// Nobody can tell.
    Unknown(String),
}

impl std::fmt::Display for Pinner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { fd, what } => write!(f, "descriptor {fd} is {what}"),
            Self::Unknown(why) => f.write_str(why),
        }
    }
}

impl From<Error> for Pinner {
    fn from(error: Error) -> Self {
        Self::Unknown(error.to_string())
    }
}

/// Says that nobody in this process has pages pinned that were frozen before it was asked.
#[derive(Debug)]
pub(crate) struct NobodyPins(());

/// Looks for those who can.
#[derive(Debug)]
pub(crate) struct Pinners {
    descriptors: Arc<Descriptors>,
    /// Files of overlayfs that were let pass, by device and number: to find out takes long.
    passed: Vec<(u64, u64)>,
}

impl Pinners {
    pub(crate) fn new(files: &DirectIo) -> Self {
        Self {
            descriptors: files.descriptors(),
            passed: Vec::new(),
        }
    }

    /// Looks at all open files. Nobody of this process has pages pinned then.
    ///
    /// # Errors
    /// The first that may have pages pinned.
    pub(crate) fn look(&mut self) -> Result<NobodyPins, Pinner> {
        let descriptors = self.descriptors.clone();
        descriptors.each(|fd| self.judge(fd))?;
        Ok(NobodyPins(()))
    }

    /// Whether the reads of a regular file copy.
    fn copies(&mut self, fd: RawFd, stat: &libc::stat) -> bool {
        let file = (stat.st_dev, stat.st_ino);
        match file_system(fd) {
            Some(OVERLAYFS) if self.passed.contains(&file) => true,
            Some(OVERLAYFS) => {
                let known = |layers: Vec<i64>| layers.iter().all(|layer| FILE_SYSTEMS.contains(layer));
                let copies = layers(fd).is_some_and(known);
                if copies {
                    self.passed.truncate(MOST_PASSED - 1);
                    self.passed.insert(0, file);
                }
                copies
            }
            // Closed meanwhile.
            None => true,
            Some(magic) => FILE_SYSTEMS.contains(&magic),
        }
    }

    /// Whether a descriptor is open. Fails if it can pin.
    fn judge(&mut self, fd: RawFd) -> Result<bool, Pinner> {
        let Some(flags) = descriptors::flags(fd) else {
            return Ok(false);
        };
        if flags & libc::O_PATH != 0 {
            return Ok(true);
        }
        let Some(stat) = stat(fd) else { return Ok(false) };
        let what = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if flags & libc::O_DIRECT != 0 => {
                let copies = file_system(fd) == Some(TMPFS);
                (!copies).then(|| "open for direct I/O".to_owned())
            }
            FileType::RegularFile => {
                let copies = self.copies(fd, &stat);
                (!copies).then(|| "on a file system that may pin".to_owned())
            }
            FileType::Directory | FileType::Fifo | FileType::Symlink => None,
            FileType::BlockDevice => Some("a block device".to_owned()),
            FileType::Socket => {
                let domain = domain(fd);
                let known = domain.is_some_and(|domain| DOMAINS.contains(&domain));
                match known {
                    false => Some(format!("a socket of domain {}", domain.unwrap_or(-1))),
                    true => is_tls(fd).then(|| "a socket whose TLS the kernel does".to_owned()),
                }
            }
            FileType::CharacterDevice => {
                let (major, minor) = (libc::major(stat.st_rdev), libc::minor(stat.st_rdev));
                let known = |(a, b): &(u32, Option<u32>)| *a == major && b.is_none_or(|b| b == minor);
                let known = DEVICES.iter().any(known) || link(fd).ends_with("userfaultfd");
                (!known).then(|| format!("the device {} ({major}:{minor})", link(fd).display()))
            }
            _ => judge_nameless(fd),
        };
        what.map_or(Ok(true), |what| Err(Pinner::File { fd, what }))
    }
}

/// What a file without a name is, if it can pin.
fn judge_nameless(fd: RawFd) -> Option<String> {
    let link = link(fd).display().to_string();
    let name = link.strip_prefix("anon_inode:").unwrap_or(&link);
    if name == "[io_uring]" {
        return judge_ring(fd);
    }
    let known = NAMELESS.iter().any(|known| match known.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == *known,
    });
    (!known).then(|| format!("{link}, of which nothing is known"))
}

fn judge_ring(fd: RawFd) -> Option<String> {
    for _ in 0..TRIES {
        let Some((files, buffers)) = info(fd).as_deref().and_then(registered) else {
            std::thread::yield_now();
            continue;
        };
        return match (files, buffers) {
            (0, 0) => None,
            (_, 0) => Some(format!("an io_uring with {files} registered files")),
            _ => Some(format!("an io_uring with {buffers} registered buffers")),
        };
    }
    Some("an io_uring of which the kernel does not tell what is registered".to_owned())
}

/// Files and buffers that are registered with a ring, as its fdinfo tells. Source: Linux, io_uring/fdinfo.c.
fn registered(info: &str) -> Option<(u64, u64)> {
    let number = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse::<u64>().ok()
    };
    Some((number("UserFiles:")?, number("UserBufs:")?))
}

fn domain(fd: RawFd) -> Option<i32> {
    let mut domain: i32 = 0;
    let mut len: libc::socklen_t = 4;
    // SAFETY: four bytes that are ours alone; the descriptor may be closed meanwhile, which the kernel tells.
    let asked = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &raw mut len,
        )
    };
    (asked == 0).then_some(domain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    fn open(path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
    }

    fn pinners() -> Pinners {
        Pinners::new(&DirectIo::new().unwrap())
    }

    fn pins(fd: &OwnedFd) -> bool {
        pinners().judge(fd.as_raw_fd()).is_err()
    }

    #[test]
    fn files_pipes_and_sockets_pin_nothing() {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::DIRECT).unwrap();
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        let plain = [
            open("/proc/self/status", OFlags::RDONLY).unwrap(),
            open("/dev/null", OFlags::RDWR).unwrap(),
            open("/proc", OFlags::RDONLY | OFlags::DIRECTORY).unwrap(),
            read,
            write,
            one.into(),
            other.into(),
            event,
        ];
        for fd in &plain {
            assert_eq!(pinners().judge(fd.as_raw_fd()), Ok(true));
        }
        assert_eq!(pinners().judge(1_000_000), Ok(false));
    }

    #[test]
    fn direct_io_and_unknown_devices_may_pin() {
        let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let path = folder.path().join("disk").to_str().unwrap().to_owned();
        match open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT) {
            Ok(direct) => {
                assert!(pins(&direct));
                assert!(pinners().look().is_err());
            }
            Err(error) => eprintln!("SKIPPED: no O_DIRECT in {path}: {error}"),
        }
        assert!(!pins(&open(&path, OFlags::RDWR | OFlags::CREATE).unwrap()));
        if let Ok(kmsg) = open("/dev/kmsg", OFlags::RDONLY) {
            assert!(pins(&kmsg), "a device that is not in the list");
        }
        // SAFETY: a new socket that nobody else owns.
        let xdp = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW, 0) };
        if xdp >= 0 {
            // SAFETY: as above.
            assert!(pins(&unsafe { OwnedFd::from_raw_fd(xdp) }));
        }
    }

    #[test]
    fn a_ring_tells_what_is_registered() {
        let info = "pos:\t0\nSqMask:\t0x3\nUserFiles:\t0\nUserBufs:\t2\n    0: 0x7f/4096\nPollList:\n";
        assert_eq!(registered(info), Some((0, 2)));
        assert_eq!(registered("pos:\t0\n"), None);
    }
}
