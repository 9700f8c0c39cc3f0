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
//! - *A fork* tells of pins, and neither of plain references nor of what RDMA pins for reading after it. Files that are registered
//!   with a ring may be such that take plain references.
//!
//! # While pages are frozen
//!
//! A file system whose server does not answer, or waits for one of the pages, must not be waited for; nor whoever holds the lock of
//! a socket, and waits for one of the pages in the middle of receiving into it. So a thread of its own looks, and whoever holds pages
//! frozen waits for it until their time is over, and then lets them go. It asks no file system what it is meanwhile: a look while
//! pages are frozen ([`Pinners::look_again`]) knows file systems from the look before, by their devices; and files of overlayfs and
//! /proc, of which one is not as the other, by device and number, which a file keeps for as long as it is open. One that it does not
//! know may pin.
//!
//! What the kernel does not tell of a descriptor may pin. Only EBADF says that it is closed.
//!
//! What cannot be seen:
//!
//! - *Guests that run guests*, and files that the VMM keeps elsewhere (a ring of which another process has the only descriptor). So
//!   the VMM has to say that there are none: [`DedupService::vouch_for_pins`](crate::service::DedupService::vouch_for_pins).
//! - *A file that was closed while its I/O goes on*, or whose descriptor was moved to a smaller number in the middle of the look,
//!   as for [`direct_io`](mod@crate::sys::direct_io).
//! - *Other processes* that write this one's memory (a debugger: process_vm_writev). They pin for the moment of the copy. The
//!   kernel's [count](mod@crate::sys::pin_count) of pinned pages tells of them.
#![allow(unsafe_code)] // statx

use crate::error::Error;
use crate::sys::asker::{Asker, NoAnswer};
use crate::sys::descriptors::{self, Descriptors, domain, file_system, has_tls, info, link};
use crate::sys::direct_io::{BTRFS, EXT4, OVERLAYFS, TMPFS, XFS, layers};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};
use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

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

/// How long a look may take that nobody waits for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Who may have pages pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Pinner {
    /// This file, of this kind.
    File { fd: RawFd, what: String, holds: Holds },
    /// The files cannot be looked at in the time that there is: there are too many, or one is waited for.
    TooSlow,
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
            Self::TooSlow => f.write_str("the open files cannot be looked at in the time that there is"),
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
    MayPin,
}

/// Device and number of a regular file; without the number: of all files of the device.
type Identity = (u32, u32, Option<u64>);

/// How pages are held, and by what.
type Found = Option<(Holds, String)>;

/// Looks for those who can.
#[derive(Debug)]
pub(crate) struct Pinners {
    /// Opened before anything restricts that; the thread has it once there is one.
    descriptors: Option<Descriptors>,
    looker: Option<Asker<Question, Result<(), Pinner>>>,
}

/// What tells of pins besides, and until when pages are frozen.
type Question = (Told, Option<Instant>);

/// What the thread looks with.
#[derive(Debug)]
struct Looker {
    descriptors: Descriptors,
    /// Regular files that were open at the last look, and devices whose files are all alike.
    known: HashMap<Identity, Reads>,
}

/// One look at all open files.
struct Look<'a> {
    known: &'a HashMap<Identity, Reads>,
    /// What was met of these.
    met: HashMap<Identity, Reads>,
    told: Told,
    /// Pages are frozen until then.
    frozen: Option<Instant>,
}

impl Pinners {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Self {
            descriptors: Some(Descriptors::open()?),
            looker: None,
        })
    }

    /// Looks at all open files, before pages are frozen for so much time, half of which is for looking again.
    ///
    /// # Errors
    /// The first that may have pages pinned, or why none is known; that looking again would take too long.
    pub(crate) fn look(&mut self, told: Told, time: Duration) -> Result<(), Pinner> {
        // The second look asks no file system any more what it is, as the one while pages are frozen does not.
        for _ in 0..2 {
            let clock = Instant::now();
            self.ask((told, None), PATIENCE)?;
            if clock.elapsed() < time / 2 {
                return Ok(());
            }
        }
        Err(Pinner::TooSlow)
    }

    /// Looks at all open files while pages are frozen, at the latest until then. Nobody of this process has pages pinned then, but
    /// those of whom something else tells.
    ///
    /// # Errors
    /// The first that may have pages pinned; that nothing is known of a file; that it takes too long.
    pub(crate) fn look_again(&mut self, told: Told, until: Instant) -> Result<NobodyPins, Pinner> {
        let left = until.saturating_duration_since(Instant::now());
        self.ask((told, Some(until)), left).map(|()| NobodyPins(()))
    }

    fn ask(&mut self, question: Question, within: Duration) -> Result<(), Pinner> {
        let ended = || Pinner::Unknown("the thread that looks at open files has ended".to_owned());
        let looker = match &mut self.looker {
            Some(looker) => looker,
            none => {
                let mut looker = Looker {
                    descriptors: self.descriptors.take().ok_or_else(ended)?,
                    known: HashMap::new(),
                };
                let asker = Asker::start(move |question| looker.look(question));
                none.insert(
                    asker.map_err(|e| Pinner::Unknown(format!("no thread to look at open files: {e}")))?,
                )
            }
        };
        looker.ask(question, within).unwrap_or_else(|none| {
            Err(match none {
                NoAnswer::Late => Pinner::TooSlow,
                NoAnswer::Ended => ended(),
            })
        })
    }
}

impl Looker {
    fn look(&mut self, (told, frozen): Question) -> Result<(), Pinner> {
        let mut look = Look {
            known: &self.known,
            met: HashMap::new(),
            told,
            frozen,
        };
        self.descriptors.each(|fd| look.judge(fd))?;
        if frozen.is_none() {
            // A file that is still open is still the same.
            self.known = look.met;
        }
        Ok(())
    }
}

impl Look<'_> {
    /// Fails if a descriptor can pin, or nothing tells.
    fn judge(&mut self, fd: RawFd) -> Result<(), Pinner> {
        if self.frozen.is_some_and(|until| Instant::now() > until) {
            return Err(Pinner::TooSlow);
        }
        match self.find(fd)? {
            Some((holds, what)) if holds == Holds::Unseen || self.told != Told::Fork => {
                Err(Pinner::File { fd, what, holds })
            }
            _ => Ok(()),
        }
    }

    /// How pages can be held by a descriptor; nothing holds any by one that is closed.
    fn find(&mut self, fd: RawFd) -> Result<Found, Pinner> {
        let untold =
            |error: io::Error| Pinner::Unknown(format!("descriptor {fd} cannot be looked at: {error}"));
        let Some(flags) = descriptors::flags(fd).map_err(untold)? else {
            return Ok(None);
        };
        if flags & libc::O_PATH != 0 {
            return Ok(None);
        }
        let Some(stat) = identify(fd).map_err(untold)? else {
            return Ok(None);
        };
        match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::RegularFile => self.judge_file(fd, flags, &stat),
            FileType::Directory | FileType::Fifo | FileType::Symlink => Ok(None),
            FileType::BlockDevice => Ok(Some((Holds::Pins, "a block device".to_owned()))),
            FileType::Socket => judge_socket(fd).map_err(untold),
            FileType::CharacterDevice => judge_device(fd, &stat).map_err(untold),
            _ => judge_nameless(fd, self.told).map_err(untold),
        }
    }

    fn judge_file(&mut self, fd: RawFd, flags: i32, stat: &Statx) -> Result<Found, Pinner> {
        let (major, minor, _) = identity(stat);
        let like = [(major, minor, None), identity(stat)];
        let unknown = |why: String| Pinner::Unknown(format!("descriptor {fd} {why}"));
        let known = |file: &Identity| Some((*file, *self.known.get(file)?));
        let (like, reads) = match like.iter().find_map(known) {
            Some(known) => known,
            None if self.frozen.is_some() => return Err(unknown("was opened just now".to_owned())),
            None => {
                let untold = |error| unknown(format!("cannot be looked at: {error}"));
                let Some((reads, alike)) = reads(fd).map_err(untold)? else {
                    return Ok(None);
                };
                // What it is now may not be what it was.
                match identify(fd).map_err(untold)? {
                    Some(now) if identity(&now) == identity(stat) => (like[usize::from(!alike)], reads),
                    Some(_) => return Err(unknown("was opened just now".to_owned())),
                    None => return Ok(None),
                }
            }
        };
        self.met.insert(like, reads);
        let pins = |what: &str| Some((Holds::Pins, what.to_owned()));
        Ok(match reads {
            Reads::CopyUnlessDirect if flags & libc::O_DIRECT != 0 => pins("open for direct I/O"),
            Reads::WriteMemory if flags & libc::O_ACCMODE != libc::O_RDONLY => {
                Some((Holds::Unseen, "a process's memory, open for writing".to_owned()))
            }
            Reads::MayPin => pins("on a file system that may pin"),
            Reads::Copy | Reads::CopyUnlessDirect | Reads::WriteMemory => None,
        })
    }
}

/// What reads of a regular file do, and whether those of all files of its device do; `None` if it is not open.
fn reads(fd: RawFd) -> io::Result<Option<(Reads, bool)>> {
    let Some(magic) = file_system(fd)? else {
        return Ok(None);
    };
    let copies = |known: bool| {
        if known {
            Reads::CopyUnlessDirect
        } else {
            Reads::MayPin
        }
    };
    Ok(Some(match magic {
        TMPFS => (Reads::Copy, true),
        PROC => match link(fd)? {
            Some(link) if link.file_name().is_some_and(|name| name == "mem") => (Reads::WriteMemory, false),
            Some(_) => (Reads::CopyUnlessDirect, false),
            None => return Ok(None),
        },
        OVERLAYFS => {
            let known = |layers: Vec<i64>| layers.iter().all(|layer| FILE_SYSTEMS.contains(layer));
            (copies(layers(fd).is_some_and(known)), false)
        }
        magic => (copies(FILE_SYSTEMS.contains(&magic)), true),
    }))
}

/// What kind of file a descriptor is, and which. Most file systems ask no server for that. `None`: it is not open.
fn identify(fd: RawFd) -> io::Result<Option<Statx>> {
    // SAFETY: used for one call only; the descriptor may be closed meanwhile, which the kernel tells.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    match statx(fd, "", flags, StatxFlags::TYPE | StatxFlags::INO) {
        Ok(stat) => Ok(Some(stat)),
        Err(rustix::io::Errno::BADF) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn identity(stat: &Statx) -> Identity {
    (stat.stx_dev_major, stat.stx_dev_minor, Some(stat.stx_ino))
}

fn judge_socket(fd: RawFd) -> io::Result<Found> {
    let Some(domain) = domain(fd)? else {
        return Ok(None);
    };
    if !DOMAINS.contains(&domain) {
        return Ok(Some((Holds::Pins, format!("a socket of domain {domain}"))));
    }
    let tls = || (Holds::Unseen, "a socket whose TLS the kernel does".to_owned());
    Ok(has_tls(fd)?.then(tls))
}

fn judge_device(fd: RawFd, stat: &Statx) -> io::Result<Found> {
    let (major, minor) = (stat.stx_rdev_major, stat.stx_rdev_minor);
    let known = |(a, b): &(u32, Option<u32>)| *a == major && b.is_none_or(|b| b == minor);
    if DEVICES.iter().any(known) {
        return Ok(None);
    }
    let Some(link) = link(fd)? else {
        return Ok(None);
    };
    let holds = match () {
        () if link.ends_with("userfaultfd") => return Ok(None),
        () if (major, minor) == DEV_FUSE || major == RDMA => Holds::Unseen,
        () if link.starts_with("/dev/infiniband") => Holds::Unseen,
        () => Holds::Pins,
    };
    Ok(Some((
        holds,
        format!("the device {} ({major}:{minor})", link.display()),
    )))
}

fn judge_nameless(fd: RawFd, told: Told) -> io::Result<Found> {
    let Some(link) = link(fd)? else {
        return Ok(None);
    };
    let link = link.display().to_string();
    let name = link.strip_prefix("anon_inode:").unwrap_or(&link);
    if name == "[io_uring]" {
        return Ok(match told {
            Told::Nothing => Some((Holds::Pins, "an io_uring".to_owned())),
            Told::Count | Told::Fork => judge_ring(fd),
        });
    }
    let known = NAMELESS.iter().any(|known| match known.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == *known,
    });
    let unknown = || (Holds::Pins, format!("{link}, of which nothing is known"));
    Ok((!known).then(unknown))
}

/// Registered files are open, and not among the descriptors: they may be what takes plain references.
fn judge_ring(fd: RawFd) -> Found {
    for _ in 0..TRIES {
        let Some((files, buffers)) = info(fd).as_deref().and_then(registered) else {
            std::thread::yield_now();
            continue;
        };
        return match (files, buffers) {
            (0, 0) => None,
            (0, _) => Some((
                Holds::Pins,
                format!("an io_uring with {buffers} registered buffers"),
            )),
            _ => Some((
                Holds::Unseen,
                format!("an io_uring with {files} registered files"),
            )),
        };
    }
    let untold = "an io_uring of which the kernel does not tell what is registered";
    Some((Holds::Unseen, untold.to_owned()))
}

/// Files and buffers that are registered with a ring, as its fdinfo tells. Source: Linux, io_uring/fdinfo.c.
fn registered(info: &str) -> Option<(u64, u64)> {
    let number = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse::<u64>().ok()
    };
    Some((number("UserFiles:")?, number("UserBufs:")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::page_size::PAGE_SIZE;
    use crate::sys::uffd::{self, Uffd};
    use crate::sys::vma::Anonymous;
    use rustix::fs::{Mode, OFlags};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    fn open(path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
    }

    fn pinners() -> Pinners {
        Pinners::new().unwrap()
    }

    fn judge(fd: RawFd, told: Told) -> Result<(), Pinner> {
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
            assert_eq!(judge(fd.as_raw_fd(), Told::Nothing), Ok(()));
        }
        assert_eq!(judge(1_000_000, Told::Nothing), Ok(()));
    }

    #[test]
    fn direct_io_and_unknown_devices_may_pin() {
        let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let path = folder.path().join("disk").to_str().unwrap().to_owned();
        match open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT) {
            Ok(direct) => {
                assert!(pins(&direct));
                assert!(pinners().look(Told::Count, PATIENCE).is_err());
                assert_eq!(judge(direct.as_raw_fd(), Told::Fork), Ok(()));
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
        assert_eq!(judge(reads.as_raw_fd(), Told::Nothing), Ok(()));
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
        assert_eq!(before.judge(file.as_raw_fd()), Ok(()));
        let met = before.met;
        let mut frozen = Look {
            known: &met,
            met: HashMap::new(),
            told: Told::Fork,
            frozen: Some(later),
        };
        assert_eq!(frozen.judge(file.as_raw_fd()), Ok(()));
        let path = folder.path().join("another").to_str().unwrap().to_owned();
        let another = open(&path, OFlags::RDWR | OFlags::CREATE).unwrap();
        let of_overlayfs = file_system(another.as_raw_fd()).unwrap() == Some(OVERLAYFS);
        assert_eq!(frozen.judge(another.as_raw_fd()).is_err(), of_overlayfs);
        let too_late = pinners().look_again(Told::Fork, Instant::now());
        assert_eq!(too_late.unwrap_err(), Pinner::TooSlow);
        if pinners().look(Told::Fork, PATIENCE).is_ok() {
            assert_eq!(pinners().look(Told::Fork, Duration::ZERO), Err(Pinner::TooSlow));
        }
    }

    #[test]
    fn while_pages_are_frozen_a_fork_tells_of_a_file_that_may_pin_if_it_is_known() {
        let file = open("/proc/self/status", OFlags::RDONLY).unwrap();
        let stat = identify(file.as_raw_fd()).unwrap().unwrap();
        let known = HashMap::from([(identity(&stat), Reads::MayPin)]);
        for (told, refuses) in [(Told::Fork, false), (Told::Count, true), (Told::Nothing, true)] {
            let mut look = Look {
                known: &known,
                met: HashMap::new(),
                told,
                frozen: Some(Instant::now() + PATIENCE),
            };
            assert_eq!(look.judge(file.as_raw_fd()).is_err(), refuses, "{told:?}");
        }
    }

    /// Two ends of a connection by MPTCP, whose options are told by whoever has the socket's lock.
    fn mptcp() -> io::Result<(std::net::TcpStream, std::net::TcpStream)> {
        let socket = || {
            // SAFETY: no memory is given.
            let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP) };
            // SAFETY: a new socket that nobody else owns.
            (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
        };
        let socket = || socket().ok_or_else(io::Error::last_os_error);
        let (listener, one) = (socket()?, socket()?);
        rustix::net::listen(&listener, 1)?;
        let listener = std::net::TcpListener::from(listener);
        let port = listener.local_addr()?.port();
        let to = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, port);
        rustix::net::connect(&one, &to)?;
        Ok((one.into(), listener.accept()?.0))
    }

    #[test]
    fn who_receives_into_a_frozen_page_with_the_lock_of_his_socket_is_not_waited_for() {
        let Ok(uffd) = Uffd::breaker() else {
            assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
            return eprintln!("SKIPPED: no userfaultfd");
        };
        let (mut one, other) = match mptcp() {
            Ok(ends) => ends,
            Err(error) => return eprintln!("SKIPPED: no MPTCP: {error}"),
        };
        let area = Anonymous::new(1).unwrap();
        area.populate().unwrap();
        let (page, fd) = (area.base(), other.as_raw_fd());
        let frozen = |frozen| uffd.write_protect(page, PAGE_SIZE, frozen).unwrap();
        uffd.register(page, PAGE_SIZE, uffd::Mode::Wp).unwrap();
        frozen(true);
        let mut looker = Asker::start(|fd| judge(fd, Told::Fork)).unwrap();
        std::thread::scope(|scope| {
            // SAFETY: the page is mapped, and used for nothing else.
            let receives = scope.spawn(move || unsafe { libc::recv(fd, page as *mut libc::c_void, 8, 0) });
            io::Write::write_all(&mut one, &[7; 8]).unwrap();
            assert!(uffd.wait_for_fault(Duration::from_secs(10)));
            assert_eq!(looker.ask(fd, Duration::from_millis(20)), Err(NoAnswer::Late));
            frozen(false);
            crate::sys::relocate::wake(&uffd, &(page..page + PAGE_SIZE));
            assert_eq!(receives.join().unwrap(), 8);
        });
        while looker.ask(fd, PATIENCE) != Ok(Ok(())) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_ring_tells_what_is_registered() {
        let info = "pos:\t0\nSqMask:\t0x3\nUserFiles:\t0\nUserBufs:\t2\n    0: 0x7f/4096\nPollList:\n";
        assert_eq!(registered(info), Some((0, 2)));
        assert_eq!(registered("pos:\t0\n"), None);
    }
}
