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
//! | io_uring with registered buffers | for as long as they are registered, and while a request with one is under way, which may last longer |
//! | io_uring with registered files, which are not among the open ones | while a read is under way |
//! | VFIO, vDPA, iommufd, any device that is not in the list below; AF_XDP, RDS | for as long as they like |
//! | RDMA | the same, also for reading, without a fault |
//! | a regular file on a file system that is not in the list below: FUSE and 9p may pin without having been asked for direct I/O | while a read is under way |
//! | TCP sockets whose TLS the kernel does; /dev/fuse; /proc/PID/mem, open for writing | while data comes in: plain references |
//! | other regular files, pipes (vmsplice takes references for reading), other sockets (zero copy reads), eventfds and the like | no |
//! | KVM | pages of guests that run guests (Linux 6.13 and later) |
//! | /dev/net/tun, vhost-net, vhost-vsock; terminals; /dev/null and its neighbours | no: they copy |
//!
//! # What else tells
//!
//! What pins need not be asked of files where something else tells of pins ([`Told`]).
//!
//! - *The kernel's count* tells of everything that is pinned now. A ring with nothing registered may still have a request under way
//!   that pins a buffer, or may have memory of other kinds pinned (rings and buffers of the process's own memory): so without the
//!   count any ring counts.
//! - *A fork* tells of pins, and neither of plain references nor of what RDMA pins for reading after it.
//!
//! # While pages are frozen
//!
//! A file system whose server does not answer, or waits for one of the pages, must not be asked anything. So a look while pages are
//! frozen ([`Pinners::look_again`]) knows regular files from the look before, by device and number, which a file keeps for as long
//! as it is open; one that it does not know may pin. And it ends when its time is over.
//!
//! What cannot be seen:
//!
//! - *Guests that run guests*, and files that the VMM keeps elsewhere (a ring of which another process has the only descriptor). So
//!   the VMM has to say that there are none: [`DedupService::vouch_for_pins`](crate::service::DedupService::vouch_for_pins).
//! - *A file that was closed while its I/O goes on*, as for [`direct_io`](mod@crate::sys::direct_io).
//! - *Other processes* that write this one's memory (a debugger: process_vm_writev). They pin for the moment of the copy. The
//!   kernel's [count](mod@crate::sys::pin_count) of pinned pages tells of them.
#![allow(unsafe_code)] // getsockopt, statx

use crate::error::Error;
use crate::sys::descriptors::{self, Descriptors, file_system, info, is_tls, link};
use crate::sys::direct_io::{BTRFS, DirectIo, EXT4, OVERLAYFS, TMPFS, XFS, layers};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

const PROC: i64 = 0x9fa0;

/// File systems whose reads copy, unless the file is open for direct I/O; overlayfs is what its layers are. Source: Linux,
/// include/uapi/linux/magic.h.
const FILE_SYSTEMS: [i64; 20] = [
    EXT4,
    XFS,
    BTRFS,
    TMPFS,
    PROC,
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

/// Sockets whose memory stays their own, or is only read.
const DOMAINS: [i32; 6] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
    libc::AF_PACKET,
    libc::AF_VSOCK,
];

/// Source: as for [`DEVICES`].
const DEV_FUSE: (u32, u32) = (10, 229);
/// Major number of RDMA's devices for processes.
const RDMA: u32 = 231;

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
    File { fd: RawFd, what: String, holds: Holds },
    /// There are too many files to look at in the time that there is.
    TooMany,
    /// Nobody can tell.
    Unknown(String),
}

/// How pages are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// Pinned for writing.
    Pins,
    /// In a way that no fork tells of.
    Unseen,
}

/// What tells of pins besides files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// Nothing does.
    Nothing,
    /// No page of the host is pinned, as the kernel counts.
    Count,
    /// A fork tells what is pinned.
    Fork,
}

impl std::fmt::Display for Pinner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { fd, what, .. } => write!(f, "descriptor {fd} is {what}"),
            Self::TooMany => f.write_str("there are too many open files to look at while pages are frozen"),
            Self::Unknown(why) => f.write_str(why),
        }
    }
}

impl From<Error> for Pinner {
    fn from(error: Error) -> Self {
        Self::Unknown(error.to_string())
    }
}

/// Says that nobody in this process has pages pinned that were frozen before it was asked, but those of whom something else tells.
#[derive(Debug)]
pub(crate) struct NobodyPins(());

/// What reads of a regular file do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reads {
    Copy,
    /// They copy, unless the file is open for direct I/O.
    CopyUnlessDirect,
    /// The file is a process's memory: writes to it are.
    WriteMemory,
}

/// Device and number of a regular file.
type Identity = (u32, u32, u64);

/// Looks for those who can.
#[derive(Debug)]
pub(crate) struct Pinners {
    descriptors: Arc<Descriptors>,
    /// Regular files that were open at the last look.
    known: HashMap<Identity, Reads>,
}

/// One look at all open files.
struct Look<'a> {
    known: &'a HashMap<Identity, Reads>,
    /// Regular files that were met.
    met: HashMap<Identity, Reads>,
    told: Told,
    /// Pages are frozen until then.
    frozen: Option<Instant>,
}

impl Pinners {
    pub(crate) fn new(files: &DirectIo) -> Self {
        Self {
            descriptors: files.descriptors(),
            known: HashMap::new(),
        }
    }

    /// Looks at all open files, before pages are frozen.
    ///
    /// # Errors
    /// The first that may have pages pinned.
    pub(crate) fn look(&mut self, told: Told) -> Result<(), Pinner> {
        let (looked, met) = self.look_at_all(told, None);
        if looked.is_ok() {
            // A file that is still open is still the same.
            self.known = met;
        }
        looked
    }

    /// Looks at all open files while pages are frozen, at the latest until then. Nobody of this process has pages pinned then, but
    /// those of whom something else tells.
    ///
    /// # Errors
    /// The first that may have pages pinned; that nothing is known of a file; that there are too many.
    pub(crate) fn look_again(&self, told: Told, until: Instant) -> Result<NobodyPins, Pinner> {
        self.look_at_all(told, Some(until)).0.map(|()| NobodyPins(()))
    }

    fn look_at_all(
        &self,
        told: Told,
        frozen: Option<Instant>,
    ) -> (Result<(), Pinner>, HashMap<Identity, Reads>) {
        let mut look = Look {
            known: &self.known,
            met: HashMap::new(),
            told,
            frozen,
        };
        let looked = self.descriptors.each(|fd| look.judge(fd));
        (looked, look.met)
    }
}

impl Look<'_> {
    /// Whether a descriptor is open. Fails if it can pin.
    fn judge(&mut self, fd: RawFd) -> Result<bool, Pinner> {
        if self.frozen.is_some_and(|until| Instant::now() > until) {
            return Err(Pinner::TooMany);
        }
        let Some(flags) = descriptors::flags(fd) else {
            return Ok(false);
        };
        if flags & libc::O_PATH != 0 {
            return Ok(true);
        }
        let Some(stat) = identify(fd) else {
            return Ok(false);
        };
        let pins = |what: String| Some((Holds::Pins, what));
        let found = match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::RegularFile => self.judge_file(fd, flags, &stat)?,
            FileType::Directory | FileType::Fifo | FileType::Symlink => None,
            FileType::BlockDevice => pins("a block device".to_owned()),
            FileType::Socket => judge_socket(fd),
            FileType::CharacterDevice => judge_device(fd, &stat),
            _ => judge_nameless(fd, self.told).and_then(pins),
        };
        match found {
            Some((holds, what)) if holds == Holds::Unseen || self.told != Told::Fork => {
                Err(Pinner::File { fd, what, holds })
            }
            _ => Ok(true),
        }
    }

    fn judge_file(&mut self, fd: RawFd, flags: i32, stat: &Statx) -> Result<Option<(Holds, String)>, Pinner> {
        let file = (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino);
        let reads = match self.known.get(&file) {
            Some(reads) => Some(*reads),
            None if self.frozen.is_some() => {
                let why = format!("descriptor {fd} was opened just now");
                return Err(Pinner::Unknown(why));
            }
            None => reads(fd),
        };
        self.met.extend(reads.map(|reads| (file, reads)));
        let pins = |what: &str| Some((Holds::Pins, what.to_owned()));
        Ok(match reads {
            Some(Reads::CopyUnlessDirect) if flags & libc::O_DIRECT != 0 => pins("open for direct I/O"),
            Some(Reads::WriteMemory) if flags & libc::O_ACCMODE != libc::O_RDONLY => {
                Some((Holds::Unseen, "a process's memory, open for writing".to_owned()))
            }
            Some(_) => None,
            None => pins("on a file system that may pin"),
        })
    }
}

/// What reads of a regular file do; `None` if they may pin.
fn reads(fd: RawFd) -> Option<Reads> {
    match file_system(fd) {
        // Or closed meanwhile.
        Some(TMPFS) | None => Some(Reads::Copy),
        Some(PROC) if link(fd).file_name().is_some_and(|name| name == "mem") => Some(Reads::WriteMemory),
        Some(OVERLAYFS) => {
            let known = |layers: Vec<i64>| layers.iter().all(|layer| FILE_SYSTEMS.contains(layer));
            layers(fd).is_some_and(known).then_some(Reads::CopyUnlessDirect)
        }
        Some(magic) => FILE_SYSTEMS.contains(&magic).then_some(Reads::CopyUnlessDirect),
    }
}

/// What kind of file a descriptor is, and which; no server of a file system is asked. `None`: it is not open.
fn identify(fd: RawFd) -> Option<Statx> {
    // SAFETY: used for one call only; the descriptor may be closed meanwhile, which the kernel tells.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(fd, "", flags, StatxFlags::TYPE | StatxFlags::INO).ok()
}

fn judge_socket(fd: RawFd) -> Option<(Holds, String)> {
    let domain = domain(fd);
    match domain.is_some_and(|domain| DOMAINS.contains(&domain)) {
        false => Some((
            Holds::Pins,
            format!("a socket of domain {}", domain.unwrap_or(-1)),
        )),
        true => is_tls(fd).then(|| (Holds::Unseen, "a socket whose TLS the kernel does".to_owned())),
    }
}

fn judge_device(fd: RawFd, stat: &Statx) -> Option<(Holds, String)> {
    let (major, minor) = (stat.stx_rdev_major, stat.stx_rdev_minor);
    let known = |(a, b): &(u32, Option<u32>)| *a == major && b.is_none_or(|b| b == minor);
    if DEVICES.iter().any(known) {
        return None;
    }
    let link = link(fd);
    let holds = match () {
        () if link.ends_with("userfaultfd") => return None,
        () if (major, minor) == DEV_FUSE || major == RDMA => Holds::Unseen,
        () if link.starts_with("/dev/infiniband") => Holds::Unseen,
        () => Holds::Pins,
    };
    Some((holds, format!("the device {} ({major}:{minor})", link.display())))
}

/// What a file without a name is, if it can pin.
fn judge_nameless(fd: RawFd, told: Told) -> Option<String> {
    let link = link(fd).display().to_string();
    let name = link.strip_prefix("anon_inode:").unwrap_or(&link);
    if name == "[io_uring]" {
        return match told {
            Told::Nothing => Some("an io_uring".to_owned()),
            Told::Count => judge_ring(fd),
            Told::Fork => None,
        };
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

    fn judge(fd: RawFd, told: Told) -> Result<bool, Pinner> {
        let known = HashMap::new();
        let mut look = Look {
            known: &known,
            met: HashMap::new(),
            told,
            frozen: None,
        };
        look.judge(fd)
    }

    fn pins(fd: &OwnedFd) -> bool {
        judge(fd.as_raw_fd(), Told::Count).is_err()
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
            assert_eq!(judge(fd.as_raw_fd(), Told::Nothing), Ok(true));
        }
        assert_eq!(judge(1_000_000, Told::Nothing), Ok(false));
    }

    #[test]
    fn direct_io_and_unknown_devices_may_pin() {
        let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let path = folder.path().join("disk").to_str().unwrap().to_owned();
        match open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT) {
            Ok(direct) => {
                assert!(pins(&direct));
                assert!(pinners().look(Told::Count).is_err());
                assert_eq!(judge(direct.as_raw_fd(), Told::Fork), Ok(true));
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
    fn no_fork_tells_of_who_writes_a_process_s_memory() {
        let reads = open("/proc/self/mem", OFlags::RDONLY).unwrap();
        assert_eq!(judge(reads.as_raw_fd(), Told::Nothing), Ok(true));
        let mut fuse = vec![open("/proc/self/mem", OFlags::RDWR).unwrap()];
        fuse.extend(open("/dev/fuse", OFlags::RDWR));
        for fd in fuse {
            let refused = judge(fd.as_raw_fd(), Told::Fork);
            assert!(
                matches!(
                    refused,
                    Err(Pinner::File {
                        holds: Holds::Unseen,
                        ..
                    })
                ),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn while_pages_are_frozen_files_are_known_from_before_and_there_is_no_time_for_many() {
        let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let path = folder.path().join("disk").to_str().unwrap().to_owned();
        let file = open(&path, OFlags::RDWR | OFlags::CREATE).unwrap();
        let later = Instant::now() + std::time::Duration::from_secs(3600);
        let known = HashMap::new();
        let mut frozen = Look {
            known: &known,
            met: HashMap::new(),
            told: Told::Fork,
            frozen: Some(later),
        };
        assert!(matches!(frozen.judge(file.as_raw_fd()), Err(Pinner::Unknown(_))));
        let mut before = Look {
            frozen: None,
            ..frozen
        };
        assert_eq!(before.judge(file.as_raw_fd()), Ok(true));
        let met = before.met;
        let mut frozen = Look {
            known: &met,
            met: HashMap::new(),
            told: Told::Fork,
            frozen: Some(later),
        };
        assert_eq!(frozen.judge(file.as_raw_fd()), Ok(true));
        let too_late = pinners().look_again(Told::Fork, Instant::now());
        assert_eq!(too_late.unwrap_err(), Pinner::TooMany);
    }

    #[test]
    fn a_ring_tells_what_is_registered() {
        let info = "pos:\t0\nSqMask:\t0x3\nUserFiles:\t0\nUserBufs:\t2\n    0: 0x7f/4096\nPollList:\n";
        assert_eq!(registered(info), Some((0, 2)));
        assert_eq!(registered("pos:\t0\n"), None);
    }
}
