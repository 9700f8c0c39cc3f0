//! Whether anybody in this process can have pages of guest memory pinned for writing.
//!
//! A page in a mapping of a store file that the kernel has copied cannot be asked whether it is pinned. But whoever pins pages does
//! it through a file. So if no open file can, and the pages are frozen before it is asked (so that nobody pins them after),
//! nobody has them pinned. What is not known not to pin, does.
//!
//! | file | pins pages for writing |
//! | --- | --- |
//! | a regular file that is open for direct I/O; not on tmpfs, which copies | while a read is under way; plain references on a file system that is not known to pin ([`direct_io`](mod@crate::sys::direct_io)) |
//! | a block device, however it is open | while a read is under way; ioctls pin as well |
//! | io_uring with registered buffers | for as long as they are registered, and while a request with one is under way, which may last longer |
//! | io_uring with registered files, which are not among the open ones | while a read is under way |
//! | VFIO, vDPA, iommufd, any device that is not in the list below; AF_XDP, RDS | for as long as they like |
//! | RDMA | the same, also for reading, without a fault |
//! | a regular file on a file system that is not in the list below: FUSE and 9p may hold pages without having been asked for direct I/O | while a read is under way; FUSE pins since Linux 6.9, the others take plain references |
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

use crate::error::Error;
use crate::sys::asker::{Asker, NoAnswer};
use crate::sys::descriptors::{self, Descriptors, domain, file_system, has_tls, identify, link, registered};
use crate::sys::direct_io::{self, BTRFS, EXT4, OVERLAYFS, TMPFS, XFS, layers};
use rustix::fs::{FileType, Statx};
use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

const PROC: i64 = 0x9fa0;
/// Reads copy from the page cache.
const NFS: i64 = 0x6969;

/// File systems whose reads copy, unless the file is open for direct I/O; overlayfs is what its layers are. Source: Linux,
/// include/uapi/linux/magic.h.
const FILE_SYSTEMS: [i64; 21] = [
    EXT4,
    XFS,
    BTRFS,
    TMPFS,
    PROC,
    NFS,
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

/// How long it is tried to read what the kernel tells of a ring, which it does not while somebody submits or registers; and while
/// pages are frozen, for which he may wait.
const RING_IN_USE: Duration = Duration::from_millis(20);
const RING_IN_USE_FROZEN: Duration = Duration::from_millis(1);

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
    /// They copy, unless the file is open for direct I/O, which holds pages so.
    CopyUnlessDirect(Holds),
    /// The file is a process's memory: writes to it are.
    WriteMemory,
    /// They may hold pages so, whatever the file is open for.
    MayHold(Holds),
}

/// Device and number of a regular file; without the number: of all files of the device.
type Identity = (u32, u32, Option<u64>);

/// What was found at a descriptor: how it holds pages, and what it is. `None`: it holds none.
type Found = Option<(Holds, String)>;

/// Looks for those who can.
#[derive(Debug)]
pub(crate) struct Pinners {
    fuse_pins: bool,
    /// Opened before anything restricts that; the thread has it once it was started.
    descriptors: Option<Descriptors>,
    /// Or why there is none.
    looker: Result<Asker<Question, Result<(), Pinner>>, String>,
}

/// What tells of pins besides, until when pages are frozen, and whether file systems are asked anew what they are.
#[derive(Clone, Copy, Debug)]
struct Question {
    told: Told,
    frozen: Option<Instant>,
    anew: bool,
}

/// What the thread looks with.
#[derive(Debug)]
struct Looker {
    fuse_pins: bool,
    descriptors: Descriptors,
    /// Regular files that were open at the last look, and devices whose files are all alike.
    known: HashMap<Identity, Reads>,
}

/// One look at all open files.
struct Look<'a> {
    /// Linux 6.9 or later.
    fuse_pins: bool,
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
            fuse_pins: direct_io::fuse_pins(),
            descriptors: Some(Descriptors::open()?),
            looker: Err("nobody looks at open files".to_owned()),
        })
    }

    /// Starts the thread that looks. To be called once, where the service's threads start: a thread that starts when the process has
    /// no mapping left ends the process.
    pub(crate) fn start(&mut self) {
        let Some(descriptors) = self.descriptors.take() else {
            return;
        };
        let mut looker = Looker {
            fuse_pins: self.fuse_pins,
            descriptors,
            known: HashMap::new(),
        };
        self.looker = Asker::start(move |question| looker.look(question))
            .map_err(|e| format!("no thread to look at open files: {e}"));
    }

    /// Looks at all open files, before pages are frozen for so much time, half of which is for looking again.
    ///
    /// # Errors
    /// The first that may have pages pinned, or why none is known; that looking again would take too long.
    pub(crate) fn look(&mut self, told: Told, time: Duration) -> Result<(), Pinner> {
        // The first asks every file system what it is: another one may have the number of one that was unmounted. The second asks
        // none, as the one while pages are frozen does not.
        for anew in [true, false] {
            let clock = Instant::now();
            let frozen = None;
            self.ask(Question { told, frozen, anew }, PATIENCE)?;
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
        let question = Question {
            told,
            frozen: Some(until),
            anew: false,
        };
        self.ask(question, left).map(|()| NobodyPins(()))
    }

    fn ask(&mut self, question: Question, within: Duration) -> Result<(), Pinner> {
        let looker = self.looker.as_mut();
        let looker = looker.map_err(|why| Pinner::Unknown(why.clone()))?;
        looker.ask(question, within).unwrap_or_else(|none| {
            Err(match none {
                NoAnswer::Late => Pinner::TooSlow,
                NoAnswer::Ended => {
                    Pinner::Unknown("the thread that looks at open files has ended".to_owned())
                }
            })
        })
    }
}

impl Looker {
    fn look(&mut self, question: Question) -> Result<(), Pinner> {
        let Question { told, frozen, anew } = question;
        if anew {
            self.known.clear();
        }
        let mut look = Look {
            fuse_pins: self.fuse_pins,
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
            _ => judge_nameless(fd, self.told, self.ring_patience()).map_err(untold),
        }
    }

    /// How long a ring may be in use.
    fn ring_patience(&self) -> Duration {
        self.frozen.map_or(RING_IN_USE, |until| {
            let left = until.saturating_duration_since(Instant::now());
            RING_IN_USE_FROZEN.min(left / 2)
        })
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
                let Some((reads, alike)) = reads(fd, self.fuse_pins).map_err(untold)? else {
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
        Ok(match reads {
            Reads::CopyUnlessDirect(holds) if flags & libc::O_DIRECT != 0 => {
                Some((holds, "open for direct I/O".to_owned()))
            }
            Reads::WriteMemory if flags & libc::O_ACCMODE != libc::O_RDONLY => {
                Some((Holds::Unseen, "a process's memory, open for writing".to_owned()))
            }
            Reads::MayHold(holds) => Some((holds, "on a file system that may pin".to_owned())),
            Reads::Copy | Reads::CopyUnlessDirect(_) | Reads::WriteMemory => None,
        })
    }
}

/// What reads of a regular file do, and whether those of all files of its device do; `None` if it is not open.
fn reads(fd: RawFd, fuse_pins: bool) -> io::Result<Option<(Reads, bool)>> {
    let Some(magic) = file_system(fd)? else {
        return Ok(None);
    };
    let on = |file_systems: &[i64]| {
        let pins = |magic: &i64| direct_io::pins(*magic, fuse_pins);
        let holds = if file_systems.iter().all(pins) {
            Holds::Pins
        } else {
            Holds::Unseen
        };
        if file_systems.iter().all(|magic| FILE_SYSTEMS.contains(magic)) {
            Reads::CopyUnlessDirect(holds)
        } else {
            Reads::MayHold(holds)
        }
    };
    Ok(Some(match magic {
        TMPFS => (Reads::Copy, true),
        PROC => match link(fd)? {
            Some(link) if link.file_name().is_some_and(|name| name == "mem") => (Reads::WriteMemory, false),
            Some(_) => (Reads::Copy, false),
            None => return Ok(None),
        },
        OVERLAYFS => (
            layers(fd).map_or(Reads::MayHold(Holds::Unseen), |layers| on(&layers)),
            false,
        ),
        magic => (on(&[magic]), true),
    }))
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

fn judge_nameless(fd: RawFd, told: Told, patience: Duration) -> io::Result<Found> {
    let Some(link) = link(fd)? else {
        return Ok(None);
    };
    let link = link.display().to_string();
    let name = link.strip_prefix("anon_inode:").unwrap_or(&link);
    if name == "[io_uring]" {
        return Ok(match told {
            Told::Nothing => Some((Holds::Pins, "an io_uring".to_owned())),
            Told::Count | Told::Fork => judge_ring(fd, patience),
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
fn judge_ring(fd: RawFd, patience: Duration) -> Found {
    match registered(fd, patience) {
        Some((0, 0)) => None,
        Some((0, buffers)) => Some((
            Holds::Pins,
            format!("an io_uring with {buffers} registered buffers"),
        )),
        Some((files, _)) => Some((
            Holds::Unseen,
            format!("an io_uring with {files} registered files"),
        )),
        None => Some((
            Holds::Unseen,
            "an io_uring of which the kernel does not tell what is registered".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests;
