//! Direct I/O of this process: whether the kernel shows the pages that it works on as pinned.
//!
//! UFFDIO_MOVE refuses a pinned page, so direct I/O that pins its pages meets merging safely. Some file systems take
//! plain references instead, which nothing tells from none: a read that is under way would be lost with the page that
//! merging replaces. So only what is known to pin is let pass; everything else is refused by name:
//!
//! - block devices, ext4, XFS and btrfs map direct I/O to bios, whose pages are pinned (since Linux 6.5);
//! - tmpfs copies (O_DIRECT is accepted there since Linux 6.6 and means nothing);
//! - FUSE pins since Linux 6.9. Before, a server may ask for direct I/O on a file that was not opened for it, which nothing
//!   shows: then every file of FUSE counts;
//! - overlayfs hands the I/O on, so its layers count, where they can be found ([`layers`]).
//!
//! A file opened for direct I/O is seen by its flags (F_GETFL), whoever opened it and however this process got it. What
//! cannot be seen is a file that was closed while its I/O goes on; VMMs wait for what they have to tell the guest before they
//! close a file. Files that are registered with an io_uring stay open when their descriptors are closed, and the kernel does not
//! tell what they were opened for: such a ring is refused.
//!
//! Three others take plain references to the memory that they bring data into, so an open descriptor counts as use: vhost-scsi,
//! whatever lies behind it; a socket whose TLS the kernel does; and /dev/fuse, from which a server reads requests.
#![allow(unsafe_code)] // descriptors that others own

use crate::error::Error;
use crate::sys::descriptors::{
    self, Descriptors, file_system, has_tls, identify, info, is_ring, link, registered,
};
use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, statx};
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

pub(super) const EXT4: i64 = 0xef53;
pub(super) const XFS: i64 = 0x5846_5342;
pub(super) const BTRFS: i64 = 0x9123_683e;
pub(super) const TMPFS: i64 = 0x0102_1994;
const FUSE: i64 = 0x6573_5546;
pub(super) const OVERLAYFS: i64 = 0x794c_7630;

/// Major number of small devices of all kinds, vhost-scsi among them.
const MISC: u32 = 10;
/// /dev/fuse among them. Source: Linux, Documentation/admin-guide/devices.txt.
const FUSE_SERVER: u32 = 229;
/// How long a look holds between two windows, which are often shorter than a look takes. (Whoever opens a file right behind a look
/// is not seen either. What leaves no gap is to be told: `direct_io_opened`.)
const GLANCE_HOLDS: Duration = Duration::from_millis(5);
/// How long a look holds for what flags do not tell, while memory is replaced.
const LOOK_HOLDS: Duration = Duration::from_millis(100);
/// How long a look may be put off while nothing is replaced, so that whoever watches is told.
const LOOK_PERIOD: Duration = Duration::from_secs(10);
/// How long the kernel is asked what is registered with an io_uring that is in use.
const RING_IN_USE: Duration = Duration::from_millis(20);
/// Files of overlayfs remembered.
const MOST_PASSED: usize = 64;

/// The files that this process has open, looked at again and again.
#[derive(Debug)]
pub(crate) struct DirectIo {
    descriptors: Arc<Descriptors>,
    /// Linux 6.9 or later.
    fuse_pins: bool,
    /// Files of overlayfs that were let pass, by device and number: to find out takes long.
    passed: Vec<(u32, u32, u64)>,
    /// What was found when it was last looked.
    refused: Option<String>,
    /// When it was last looked or glanced.
    looked: Instant,
    /// Whether this pass has to look yet, before it replaces memory.
    is_due: bool,
    /// When it was last looked.
    looked_at_all: Instant,
}

impl DirectIo {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Self {
            descriptors: Arc::new(Descriptors::open()?),
            fuse_pins: fuse_pins(),
            passed: Vec::new(),
            refused: None,
            looked: Instant::now(),
            is_due: true,
            looked_at_all: Instant::now(),
        })
    }

    /// Why guest memory must not be replaced now, as of the last look.
    pub(crate) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// A pass begins. Its first glance is a look, so one that replaces no memory asks of no file. What has refused is looked at now,
    /// since it may have gone, and so is everything that was not looked at for [`LOOK_PERIOD`]. Returns whether merging may go on.
    pub(crate) fn begin_pass(&mut self) -> bool {
        self.is_due = true;
        if self.refused.is_some() || self.looked_at_all.elapsed() >= LOOK_PERIOD {
            return self.look().is_ok();
        }
        true
    }

    /// Looks at every file that this process has open; fails if one must not meet merging.
    pub(crate) fn look(&mut self) -> Result<(), Error> {
        let descriptors = self.descriptors.clone();
        let found = descriptors.each(|fd| {
            self.judge_flags(fd)?;
            self.judge_others(fd)
        });
        self.note(&found);
        (self.is_due, self.looked_at_all) = (false, self.looked);
        found
    }

    /// Looks at less cost (a system call a file), as it can be done before every batch of merges: asks files for their flags
    /// only, and not at all if a look has refused. It does not see what is not told by flags: vhost-scsi, sockets with TLS,
    /// /dev/fuse, files that are registered with an io_uring, and FUSE before Linux 6.9. So the first of a pass is a look, and so is
    /// the first after each [`LOOK_HOLDS`]. Returns whether merging may go on.
    pub(crate) fn glance(&mut self) -> bool {
        if self.is_due || self.looked_at_all.elapsed() >= LOOK_HOLDS {
            return self.look().is_ok();
        }
        if self.refused.is_none() {
            let descriptors = self.descriptors.clone();
            let found = descriptors.each(|fd| self.judge_flags(fd));
            self.note(&found);
        }
        self.refused.is_none()
    }

    /// As [`Self::glance`], to be called before each window of many: what was seen less than [`GLANCE_HOLDS`] ago is not asked
    /// again.
    pub(crate) fn glance_again(&mut self) -> bool {
        if !self.is_due && self.looked.elapsed() < GLANCE_HOLDS {
            return self.refused.is_none();
        }
        self.glance()
    }

    fn note(&mut self, found: &Result<(), Error>) {
        self.looked = Instant::now();
        let refused = found.as_ref().err().map(Error::to_string);
        match (&self.refused, &refused) {
            (None, Some(why)) => log::warn!("merging is suspended: {why}"),
            (Some(_), None) => log::info!("merging goes on: no file is open any more that was in its way"),
            _ => {}
        }
        self.refused = refused;
    }

    /// Fails if a descriptor is for direct I/O that may go wrong.
    fn judge_flags(&mut self, fd: RawFd) -> Result<(), Error> {
        let judged = self.judge_direct(fd).unwrap_or_else(|error| Err(untold(&error)));
        judged.map_err(|filesystem| Error::UnpinnedDirectIo { fd, filesystem })
    }

    /// Says what direct I/O goes to that may go wrong.
    fn judge_direct(&mut self, fd: RawFd) -> io::Result<Result<(), String>> {
        // (The flag has no meaning together with O_PATH, which allows no I/O.)
        let direct = |flags: i32| flags & (libc::O_DIRECT | libc::O_PATH) == libc::O_DIRECT;
        if !descriptors::flags(fd)?.is_some_and(direct) {
            return Ok(Ok(()));
        }
        let Some(stat) = identify(fd)? else {
            return Ok(Ok(()));
        };
        Ok(match FileType::from_raw_mode(stat.stx_mode.into()) {
            // A pipe with this flag has messages instead of a stream.
            FileType::BlockDevice | FileType::Directory | FileType::Fifo | FileType::Socket => Ok(()),
            FileType::RegularFile => self.judge_file(fd, &stat)?,
            _ => Err("a character device".into()),
        })
    }

    /// Fails for what flags do not tell.
    fn judge_others(&self, fd: RawFd) -> Result<(), Error> {
        let found = self.find_others(fd).unwrap_or_else(|error| Some(untold(&error)));
        match found {
            Some(filesystem) => Err(Error::UnpinnedDirectIo { fd, filesystem }),
            None => Ok(()),
        }
    }

    /// Says what a file is that takes plain references.
    fn find_others(&self, fd: RawFd) -> io::Result<Option<String>> {
        let Some(stat) = identify(fd)? else {
            return Ok(None);
        };
        let device = (stat.stx_rdev_major, stat.stx_rdev_minor);
        let found = match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::CharacterDevice if device == (MISC, FUSE_SERVER) => {
                Some("/dev/fuse (a server's requests)")
            }
            FileType::CharacterDevice if device.0 == MISC => {
                let link = link(fd)?.unwrap_or_default();
                // Its node may have been removed since.
                let is_it = link.ends_with("vhost-scsi") || link.ends_with("vhost-scsi (deleted)");
                is_it.then_some("vhost-scsi")
            }
            FileType::Socket => has_tls(fd)?.then_some("a socket whose TLS the kernel does"),
            // Descriptors without a file of their own have no type.
            FileType::Unknown if is_ring(fd)? => match registered(fd, RING_IN_USE) {
                Some((0, _)) => None,
                Some(_) => Some("a file that is registered with an io_uring"),
                None => Some("what an io_uring may have registered, of which the kernel does not tell now"),
            },
            FileType::RegularFile if !self.fuse_pins => {
                (file_system(fd)? == Some(FUSE)).then_some("FUSE (before Linux 6.9)")
            }
            _ => None,
        };
        Ok(found.map(str::to_owned))
    }

    /// Says what is not known to pin.
    fn judge_file(&mut self, fd: RawFd, stat: &Statx) -> io::Result<Result<(), String>> {
        let file = (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino);
        Ok(match file_system(fd)? {
            // Closed meanwhile.
            None => Ok(()),
            Some(OVERLAYFS) if self.passed.contains(&file) => Ok(()),
            Some(OVERLAYFS) => match layers(fd) {
                None => Err("overlayfs (with layers that are not visible here)".into()),
                Some(layers) => match layers.into_iter().find(|layer| !pins(*layer, self.fuse_pins)) {
                    Some(layer) => Err(format!("overlayfs on {}", name_of(layer))),
                    None => {
                        self.passed.truncate(MOST_PASSED - 1);
                        self.passed.insert(0, file);
                        Ok(())
                    }
                },
            },
            Some(magic) if pins(magic, self.fuse_pins) => Ok(()),
            Some(magic) => Err(mount(fd).map_or_else(|| name_of(magic), |mount| mount.kind)),
        })
    }
}

/// Whether direct I/O of a file system pins its pages, or copies. What is not known to takes plain references.
pub(super) fn pins(file_system: i64, fuse_pins: bool) -> bool {
    match file_system {
        EXT4 | XFS | BTRFS | TMPFS => true,
        FUSE => fuse_pins,
        _ => false,
    }
}

/// Whether FUSE pins: Linux 6.9 or later.
pub(super) fn fuse_pins() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    version(&release) >= (6, 9)
}

/// A file that the kernel does not tell of.
fn untold(error: &io::Error) -> String {
    format!("a file that cannot be looked at ({error})")
}

/// Major and minor number of a kernel's release; 0 where it does not begin with any.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// For messages where the mount does not tell.
fn name_of(magic: i64) -> String {
    let known = [
        (0x6969, "NFS"),
        (0x00c3_6400, "Ceph"),
        (0x0102_1997, "9p"),
        (0xff53_4d42, "CIFS"),
        (0xfe53_4d42, "SMB2"),
        (FUSE, "FUSE"),
        (OVERLAYFS, "overlayfs"),
    ];
    let name = known.iter().find(|(number, _)| *number == magic);
    name.map_or_else(
        || format!("a file system of type {magic:#x}"),
        |(_, name)| (*name).into(),
    )
}

fn file_system_at(path: &Path) -> Option<i64> {
    rustix::fs::statfs(path).ok().map(|stat| stat.f_type)
}

/// What is mounted where a file is.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    place: PathBuf,
    kind: String,
    options: String,
}

fn mount(fd: RawFd) -> Option<Mount> {
    let info = info(fd)?;
    let number = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?;
    // The mounts that this thread sees, by which paths are found.
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").ok()?;
    mounts.lines().find_map(|line| parse_mount(line, number.trim()))
}

/// A line of mountinfo, if it is the mount of this number. Source: proc_pid_mountinfo(5).
fn parse_mount(line: &str, number: &str) -> Option<Mount> {
    let (mount, rest) = line.split_once(" - ")?;
    let mut fields = mount.split(' ');
    (fields.next()? == number).then_some(())?;
    let root = fields.nth(2)?;
    let place = fields.next()?;
    let (kind, rest) = rest.split_once(' ')?;
    let (_source, options) = rest.split_once(' ')?;
    // A part of a file system, mounted: its layers' paths begin elsewhere.
    let options = if root == "/" { options } else { "" };
    Some(Mount {
        place: unescape(place).into(),
        kind: kind.into(),
        options: unescape(options),
    })
}

/// Blanks and the like are written in octal.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let byte = part
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (byte, part.get(3..)) {
            (Some(byte), Some(rest)) => {
                plain.push(char::from(byte));
                plain.push_str(rest);
            }
            _ => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

/// The file systems that a file of an overlayfs is or may come to be on: that of the layer that it is found in, and that of
/// the upper one, where it goes when it is written. `None` if the layers are not visible here. They are found by their
/// paths, which may lead elsewhere in this process's view; so the file that is found must be the very one.
pub(super) fn layers(fd: RawFd) -> Option<Vec<i64>> {
    let mount = mount(fd)?;
    // SAFETY: used for one call only; if the descriptor was closed the kernel tells, or tells of another file, which is not
    // found then.
    let file = statx(
        unsafe { BorrowedFd::borrow_raw(fd) },
        "",
        AtFlags::EMPTY_PATH,
        IDENTITY,
    )
    .ok()?;
    let path = link(fd).ok()??;
    let path = path.strip_prefix(&mount.place).ok()?;
    let (upper, lower) = layer_folders(&mount.options)?;
    let is_upper = |folder: &&PathBuf| is_same_file(&folder.join(path), &file, false);
    let is_lower = |folder: &&PathBuf| is_same_file(&folder.join(path), &file, true);
    let holding = upper
        .iter()
        .find(is_upper)
        .or_else(|| lower.iter().find(is_lower))?;
    let both = std::iter::once(holding).chain(&upper);
    both.map(|folder| file_system_at(folder)).collect()
}

/// Upper and lower layers, as the mount's options tell them. Names with a colon or a comma are not understood. `None` if a
/// file's data may be elsewhere than the file.
fn layer_folders(options: &str) -> Option<(Option<PathBuf>, Vec<PathBuf>)> {
    let (mut upper, mut lower) = (None, Vec::new());
    for option in options.split(',') {
        match option.split_once('=') {
            Some(("upperdir", folder)) => upper = Some(folder.into()),
            Some(("lowerdir" | "lowerdir+", folders)) => lower.extend(folders.split(':').map(PathBuf::from)),
            Some(("metacopy", "on") | ("datadir+", _)) => return None,
            _ => {}
        }
    }
    Some((upper, lower))
}

/// What tells a file from all others of its file system, and never changes.
const IDENTITY: StatxFlags = StatxFlags::INO.union(StatxFlags::BTIME).union(StatxFlags::TYPE);

/// Whether there is the file that an overlayfs shows as this. It shows a device of its own, and a number that may have the
/// layer's in its upper bits; a file that was copied to the upper layer shows the number of the one that it was copied from.
fn is_same_file(path: &Path, shown: &Statx, with_number: bool) -> bool {
    const LAYER_BITS: u32 = 8;
    let Ok(found) = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, IDENTITY) else {
        return false;
    };
    let birth = |stat: &Statx| (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec);
    let known = |stat: &Statx| stat.stx_mask & IDENTITY.bits() == IDENTITY.bits();
    path.is_absolute()
        && known(&found)
        && known(shown)
        && found.stx_mode == shown.stx_mode
        && (!with_number || found.stx_ino << LAYER_BITS == shown.stx_ino << LAYER_BITS)
        && birth(&found) == birth(shown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};
    use std::fs::File;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    const HOUR: Duration = Duration::from_secs(3600);

    fn direct_io(fuse_pins: bool) -> DirectIo {
        DirectIo {
            fuse_pins,
            ..DirectIo::new().unwrap()
        }
    }

    /// What one test opens all others see.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A folder on a disk: /tmp may be memory.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap()
    }

    fn open_direct(path: &Path) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
    }

    #[test]
    fn what_pins_is_let_pass_and_nothing_else() {
        assert!(
            [EXT4, XFS, BTRFS, TMPFS]
                .into_iter()
                .all(|magic| pins(magic, false))
        );
        // NFS, Ceph, 9p, CIFS, SMB2, Lustre, GPFS, ZFS, squashfs.
        let others = [
            0x6969,
            0x00c3_6400,
            0x0102_1997,
            0xff53_4d42,
            0xfe53_4d42,
            0x0bd0_0bd0,
            0x4750_4653,
            0x2fc1_2fc1,
            0x7371_7368,
        ];
        assert!(others.into_iter().all(|magic| !pins(magic, true)));
        assert!(!pins(FUSE, false) && pins(FUSE, true));
        assert_eq!(name_of(0x6969), "NFS");
        assert_eq!(name_of(0x0bd0_0bd0), "a file system of type 0xbd00bd0");
    }

    #[test]
    fn releases_are_compared_by_their_numbers() {
        assert!(version("6.9.0-rc1") >= (6, 9) && version("6.12.43+deb13-amd64") >= (6, 9));
        assert!(version("6.8.0-45-generic") < (6, 9) && version("6.8") < (6, 9) && version("") < (6, 9));
    }

    #[test]
    fn a_mount_is_found_by_its_number() {
        let line = r"1042 30 0:77 / /var/lib/a\040disk rw,relatime shared:1 master:2 - overlay overlay rw,lowerdir=/l1:/l2,upperdir=/u,workdir=/w";
        let mount = parse_mount(line, "1042").unwrap();
        assert_eq!(mount.place, Path::new("/var/lib/a disk"));
        assert_eq!(mount.kind, "overlay");
        let (upper, lower) = layer_folders(&mount.options).unwrap();
        assert_eq!(upper.as_deref(), Some(Path::new("/u")));
        assert_eq!(lower, [Path::new("/l1"), Path::new("/l2")]);
        assert_eq!(parse_mount(line, "104"), None);
        assert_eq!(layer_folders("lowerdir=/l,metacopy=on"), None);
    }

    #[test]
    fn files_on_a_local_disk_and_pipes_of_messages_are_let_pass() {
        let _alone = alone();
        let folder = folder();
        let _pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::DIRECT).unwrap();
        let Ok(_file) = open_direct(&folder.path().join("disk")) else {
            return eprintln!("SKIPPED: no O_DIRECT in {}", folder.path().display());
        };
        let mut direct_io = direct_io(true);
        match (direct_io.look(), direct_io.glance()) {
            (Err(refused), _) => eprintln!("SKIPPED: {refused}"),
            (Ok(()), glance) => assert!(glance),
        }
    }

    /// What passes for vhost-scsi: KVM's device, which anybody may open here who may open it at all.
    fn what_only_a_look_sees(folder: &Path) -> io::Result<File> {
        let (path, kvm) = (folder.join("vhost-scsi"), rustix::fs::makedev(MISC, 232));
        rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, Mode::RUSR, kvm)?;
        File::open(&path)
    }

    #[test]
    fn a_pass_looks_before_it_replaces_memory_and_else_not() {
        let _alone = alone();
        let folder = folder();
        let mut direct_io = direct_io(true);
        if let Err(refused) = direct_io.look() {
            return eprintln!("SKIPPED: {refused}");
        }
        let looked = direct_io.looked_at_all;
        assert!(direct_io.begin_pass() && direct_io.begin_pass());
        assert_eq!(direct_io.looked_at_all, looked, "a look for nothing");
        let file = match what_only_a_look_sees(folder.path()) {
            Ok(file) => file,
            Err(error) => return eprintln!("SKIPPED: {error}"),
        };
        // However short a time ago the last look was.
        assert!(!direct_io.glance_again() && direct_io.refused().is_some());
        assert!(!direct_io.begin_pass() && !direct_io.glance());
        drop(file);
        // It goes on by itself, and with the first glance of the pass that one looks no more, for as long as the look holds.
        assert!(direct_io.begin_pass() && direct_io.glance());
        direct_io.looked_at_all += HOUR;
        let looked = direct_io.looked_at_all;
        assert!(direct_io.glance() && direct_io.glance_again());
        let place = folder.path().join("vhost-scsi");
        fs::remove_file(&place).unwrap();
        let file = what_only_a_look_sees(folder.path()).unwrap();
        assert!(direct_io.glance());
        assert_eq!(direct_io.looked_at_all, looked);
        // And when it holds no more, the same pass looks again.
        direct_io.looked_at_all = Instant::now() - LOOK_HOLDS;
        assert!(!direct_io.glance() && direct_io.refused().is_some());
        drop(file);
        assert!(direct_io.begin_pass() && direct_io.glance());
        // Whoever watches is told in time, though nothing is replaced.
        fs::remove_file(&place).unwrap();
        let file = what_only_a_look_sees(folder.path()).unwrap();
        fs::remove_file(&place).unwrap();
        direct_io.looked_at_all = Instant::now() - LOOK_PERIOD;
        assert!(!direct_io.begin_pass());
        drop(file);
    }

    /// In a thread that sees mounts of its own.
    fn with_own_mounts(work: impl FnOnce() + Send + 'static) {
        let run = || {
            // SAFETY: only what this thread sees of the file system changes.
            let own = unsafe { libc::unshare(libc::CLONE_FS | libc::CLONE_NEWNS) };
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            if own < 0 || mount_change("/", private).is_err() {
                return eprintln!("SKIPPED: no right to mount");
            }
            work();
        };
        std::thread::spawn(run).join().unwrap();
    }

    #[test]
    fn an_overlayfs_is_what_its_layers_are_as_far_as_they_can_be_seen() {
        let _alone = alone();
        with_own_mounts(|| {
            let folder = folder();
            let at = |name: &str| folder.path().join(name);
            ["upper", "lower", "work", "all"]
                .iter()
                .for_each(|name| fs::create_dir(at(name)).unwrap());
            fs::write(at("lower/disk"), "disk").unwrap();
            let layer = |name: &str| at(name).to_str().unwrap().to_owned();
            let options = format!(
                "lowerdir={},upperdir={},workdir={}",
                layer("lower"),
                layer("upper"),
                layer("work")
            );
            let options = std::ffi::CString::new(options).unwrap();
            if let Err(error) = mount("overlay", at("all"), "overlay", MountFlags::empty(), &*options) {
                return eprintln!("SKIPPED: no overlayfs here: {error}");
            }
            let below = file_system_at(&at("upper")).unwrap();
            let mut direct_io = direct_io(true);
            let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
            let lower = rustix::fs::open(at("all/disk"), flags, Mode::empty()).unwrap();
            let verdict = direct_io.look();
            assert_eq!(verdict.is_ok(), pins(below, direct_io.fuse_pins), "{verdict:?}");
            drop(lower);
            for name in ["all/disk", "all/new"] {
                let file = open_direct(&at(name)).unwrap();
                assert_eq!(
                    direct_io.look().is_ok(),
                    pins(below, direct_io.fuse_pins),
                    "{name}"
                );
                drop(file);
            }
            // Another folder at the same path: whatever is there, it is not the layer.
            let file = open_direct(&at("all/disk")).unwrap();
            mount("tmpfs", at("upper"), "tmpfs", MountFlags::empty(), None).unwrap();
            mount("tmpfs", at("lower"), "tmpfs", MountFlags::empty(), None).unwrap();
            // Times of birth have the resolution of the kernel's clock tick.
            std::thread::sleep(std::time::Duration::from_millis(20));
            File::create(at("upper/disk")).unwrap();
            let mut direct_io = self::direct_io(true);
            assert!(!direct_io.glance());
            assert!(direct_io.refused().unwrap().contains("overlayfs"));
            assert!(direct_io.look().unwrap_err().to_string().contains("overlayfs"));
            // However high its number is.
            let high = rustix::io::fcntl_dupfd_cloexec(file.as_fd(), 700);
            if high.is_ok() {
                drop(file);
                assert!(!self::direct_io(true).glance());
            }
            drop(high);
            // A glance only ever finds that it must end.
            assert!(!direct_io.glance() && direct_io.look().is_ok() && direct_io.glance());
            for name in ["upper", "lower", "all"] {
                unmount(at(name), UnmountFlags::DETACH).unwrap();
            }
        });
    }
}
