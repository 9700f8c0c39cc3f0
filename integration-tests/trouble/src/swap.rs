//! Swap for as long as a test runs.
//!
//! The machine's own swap is used if it has some. Else a zram device that nobody uses gets a size, or a file on a loop
//! device, and the kernel is told to swap there. Both take memory or disk only for what is swapped out. Or the swap is one
//! that makes trouble: a small one, one whose disk is full, one that is not to be read any more.
//!
//! One process at a time (a locked file says whose turn it is). What is on is written into that file, so that whoever comes
//! next can put off what a process left behind that was killed.
#![allow(unsafe_code)] // swapon, swapoff

use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of swap, more than any test pages out.
const SIZE: u64 = 1 << 30;
/// How long a test waits for its turn.
const PATIENCE: Duration = Duration::from_secs(600);
const PAGE: usize = 4096;
const ZRAM_CONTROL: &str = "/sys/class/zram-control/";

/// Swap, off again when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Swap(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// `None`: the machine's own, or off by now.
    ours: Option<Device>,
    /// Behind a loop device.
    file: Option<File>,
    /// Locked for as long as this lives; tells what to put off.
    lock: File,
}

/// A device that we swap to.
#[derive(Debug)]
enum Device {
    Zram {
        path: PathBuf,
        /// Made by us, and to be removed.
        added: bool,
    },
    /// The kernel detaches it from its file as soon as nobody swaps there.
    Loop(PathBuf),
}

impl Swap {
    /// Waits for its turn and puts swap on.
    ///
    /// # Errors
    /// Why there can be none.
    pub fn on() -> Result<Self, String> {
        let mut lock = turn()?;
        let made = match present() {
            true => None,
            false => Some(make(&mut lock, SIZE)?),
        };
        Self::of(lock, made, true)
    }

    /// The same, of so many bytes, and none besides.
    ///
    /// # Errors
    /// As [`Self::on`]; the machine has swap of its own.
    pub fn of_size(size: u64) -> Result<Self, String> {
        let mut lock = turn()?;
        none_present()?;
        let made = make(&mut lock, size)?;
        Self::of(lock, Some(made), true)
    }

    /// Swap on a device that has room for so many bytes of it only: writing more fails. (A zram device with a limit. A loop
    /// device on a full disk fails as well, but then Linux 6.18 itself loses pages now and then, with no userfaultfd
    /// anywhere: they read as zeros.)
    ///
    /// # Errors
    /// As [`Self::of_size`].
    pub fn that_fails(room: u64) -> Result<Self, String> {
        let mut lock = turn()?;
        none_present()?;
        let device = make_zram(&mut lock, SIZE)?;
        let limit = zram_setting(device.path(), "mem_limit");
        let limited = fs::write(&limit, room.to_string()).map_err(|e| format!("{}: {e}", limit.display()));
        let swap = Self::of(lock, Some((device, None)), false)?;
        limited.map(|()| swap)
    }

    /// Swap in a file, which [`Self::break_it`] breaks.
    ///
    /// # Errors
    /// As [`Self::of_size`].
    pub fn in_file() -> Result<Self, String> {
        let mut lock = turn()?;
        none_present()?;
        let made = make_loop(&mut lock, SIZE, &build_folder()?)?;
        Self::of(lock, Some(made), true)
    }

    fn of(lock: File, made: Option<(Device, Option<File>)>, check: bool) -> Result<Self, String> {
        let (ours, file) = made.map_or((None, None), |(device, file)| (Some(device), file));
        let swap = Self(Arc::new(Mutex::new(State { ours, file, lock })));
        // A container may forbid this memory to be swapped out.
        if check && !a_page_goes_out() {
            return Err("the kernel does not page memory of this process out".into());
        }
        Ok(swap)
    }

    /// From now on nothing that was swapped out to the file can be read: whoever touches it gets SIGBUS.
    ///
    /// # Errors
    /// There is no file; those of ftruncate().
    pub fn break_it(&self) -> io::Result<()> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let file = state.file.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        file.set_len(PAGE as u64)
    }

    /// Writes to the device that failed so far, as a zram device counts them.
    ///
    /// # Panics
    /// If this is no such device.
    #[must_use]
    pub fn failed_writes(&self) -> u64 {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let device = state.ours.as_ref().expect("a device of ours");
        // Failed reads, failed writes. Source: Linux, Documentation/admin-guide/blockdev/zram.rst.
        let figures = fs::read_to_string(zram_setting(device.path(), "io_stat")).expect("zram counts");
        let failed = figures.split_ascii_whitespace().nth(1);
        failed.and_then(|count| count.parse().ok()).expect("a count")
    }

    /// Puts it off now, as a test must that is about to end the process.
    pub fn off(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).off();
    }
}

impl State {
    fn off(&mut self) {
        if let Some(device) = self.ours.take() {
            match device.off() {
                Ok(()) => note(&mut self.lock, ""),
                Err(error) => eprintln!("cannot put {} off: {error}", device.path().display()),
            }
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.off();
    }
}

impl Device {
    fn path(&self) -> &Path {
        match self {
            Device::Zram { path, .. } | Device::Loop(path) => path,
        }
    }

    fn off(&self) -> io::Result<()> {
        let path = c_path(self.path());
        // SAFETY: a path that ends with 0.
        if unsafe { libc::swapoff(path.as_ptr().cast()) } < 0 {
            let error = io::Error::last_os_error();
            // Not on: left by a process that was killed between two steps.
            if error.raw_os_error() != Some(libc::EINVAL) {
                return Err(error);
            }
        }
        match self {
            Device::Zram { path, added } => {
                fs::write(zram_setting(path, "reset"), "1")?;
                let number = path.to_string_lossy().trim_start_matches("/dev/zram").to_owned();
                if *added {
                    fs::write(ZRAM_CONTROL.to_owned() + "hot_remove", number)?;
                }
                Ok(())
            }
            Device::Loop(_) => Ok(()),
        }
    }
}

/// Waits for our turn, and puts off what was left by a process that was killed.
fn turn() -> Result<File, String> {
    let mut lock = locked()?;
    put_off_what_was_left(&mut lock);
    Ok(lock)
}

fn none_present() -> Result<(), String> {
    match present() {
        true => Err("the machine has swap of its own".into()),
        false => Ok(()),
    }
}

/// Runs a command; what it says on standard output.
fn run(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let out = command.output().map_err(|e| format!("{name}: {e}"))?;
    if !out.status.success() {
        let reason = String::from_utf8_lossy(&out.stderr).trim().to_owned();
        return Err(format!("{name}: {reason}"));
    }
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// The file whose lock says whose turn it is.
fn locked() -> Result<File, String> {
    let path = std::env::temp_dir().join("vmm-dedup-swap.lock");
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path);
    let file = file.map_err(|e| format!("{}: {e}", path.display()))?;
    let start = Instant::now();
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if start.elapsed() > PATIENCE {
            return Err(format!("{} is locked by another test: {error}", path.display()));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(file)
}

fn note(lock: &mut File, what: &str) {
    let noted = lock
        .set_len(0)
        .and_then(|()| lock.seek(SeekFrom::Start(0)))
        .and_then(|_| lock.write_all(what.as_bytes()));
    if let Err(error) = noted {
        eprintln!("cannot note what swap is on: {error}");
    }
}

fn put_off_what_was_left(lock: &mut File) {
    let mut text = String::new();
    let _ = lock
        .seek(SeekFrom::Start(0))
        .and_then(|_| lock.read_to_string(&mut text));
    let device = match text.split_once(' ') {
        Some((kind @ ("zram" | "zram-added"), path)) => Device::Zram {
            path: path.into(),
            added: kind == "zram-added",
        },
        Some(("loop", path)) => Device::Loop(path.into()),
        _ => return,
    };
    match device.off() {
        Ok(()) => note(lock, ""),
        Err(error) => eprintln!("cannot put off {}: {error}", device.path().display()),
    }
}

/// Whether the machine has swap on.
fn present() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}

fn make(lock: &mut File, size: u64) -> Result<(Device, Option<File>), String> {
    let zram = match make_zram(lock, size) {
        Ok(device) => return Ok((device, None)),
        Err(reason) => reason,
    };
    build_folder()
        .and_then(|folder| make_loop(lock, size, &folder))
        .map_err(|file| format!("zram: {zram}; a file on a loop device: {file}"))
}

fn make_zram(lock: &mut File, size: u64) -> Result<Device, String> {
    let unused = (0..16)
        .map(|n| PathBuf::from(format!("/dev/zram{n}")))
        .find(|path| {
            fs::read_to_string(zram_setting(path, "disksize")).is_ok_and(|size| size.trim() == "0")
                && path.exists()
        });
    let (path, added) = match unused {
        Some(path) => (path, false),
        None => {
            // Reading makes a device.
            let number = fs::read_to_string(ZRAM_CONTROL.to_owned() + "hot_add");
            let number = number.map_err(|e| format!("no device: {e}"))?;
            (PathBuf::from(format!("/dev/zram{}", number.trim())), true)
        }
    };
    let kind = if added { "zram-added" } else { "zram" };
    note(lock, &format!("{kind} {}", path.display()));
    let device = Device::Zram { path, added };
    let done = fs::write(zram_setting(device.path(), "disksize"), size.to_string())
        .and_then(|()| write_header(device.path(), size))
        .and_then(|()| swap_on(device.path()));
    done.map_err(|error| {
        let _ = device.off();
        format!("{}: {error}", device.path().display())
    })?;
    Ok(device)
}

/// Where the build goes: /tmp may be memory.
fn build_folder() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    program.parent().map(Path::to_owned).ok_or("no folder".into())
}

fn make_loop(lock: &mut File, size: u64, folder: &Path) -> Result<(Device, Option<File>), String> {
    let file = tempfile::NamedTempFile::new_in(folder).map_err(|e| e.to_string())?;
    file.as_file().set_len(size).map_err(|e| e.to_string())?;
    let path = run(Command::new("losetup")
        .args(["--find", "--show"])
        .arg(file.path()))?;
    let path = PathBuf::from(path);
    note(lock, &format!("loop {}", path.display()));
    let on = write_header(&path, size).and_then(|()| swap_on(&path));
    // From here on it is detached once nobody swaps there. The file has no name any more, but the loop device has it.
    let _ = Command::new("losetup").arg("--detach").arg(&path).status();
    on.map(|()| (Device::Loop(path), Some(file.into_file())))
        .map_err(|e| e.to_string())
}

/// What mkswap(8) writes. Source: union swap_header, include/linux/swap.h.
fn write_header(path: &Path, size: u64) -> io::Result<()> {
    let device = OpenOptions::new().write(true).open(path)?;
    let mut header = [0u8; PAGE];
    let last_page = u32::try_from(size / PAGE as u64 - 1).expect("few pages");
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
    header[PAGE - 10..].copy_from_slice(b"SWAPSPACE2");
    device.write_all_at(&header, 0)?;
    device.sync_all()
}

fn swap_on(path: &Path) -> io::Result<()> {
    let path = c_path(path);
    // SAFETY: a path that ends with 0.
    if unsafe { libc::swapon(path.as_ptr().cast(), 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn zram_setting(device: &Path, setting: &str) -> PathBuf {
    let name = device.file_name().unwrap_or_default();
    Path::new("/sys/block").join(name).join(setting)
}

fn c_path(path: &Path) -> Vec<u8> {
    let mut bytes = path.as_os_str().as_bytes().to_vec();
    bytes.push(0);
    bytes
}

/// Pages a page of ours out and looks whether it went.
fn a_page_goes_out() -> bool {
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, prot, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return false;
    }
    let swapped = || {
        let mut entry = [0u8; 8];
        let offset = (at as usize / PAGE * 8) as u64;
        let read = File::open("/proc/self/pagemap").and_then(|file| file.read_exact_at(&mut entry, offset));
        read.is_ok() && u64::from_ne_bytes(entry) >> 62 & 1 == 1
    };
    // The page may be in use for a moment (it was just added to a list of this CPU's).
    let gone = (0..50).any(|_| {
        // SAFETY: the page is ours alone; the advice changes no content.
        unsafe {
            at.cast::<u64>().write_volatile(1);
            libc::madvise(at, PAGE, libc::MADV_PAGEOUT);
        }
        std::thread::sleep(Duration::from_millis(2));
        swapped()
    });
    // SAFETY: nothing refers to it any more.
    unsafe { libc::munmap(at, PAGE) };
    gone
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swaps() -> String {
        fs::read_to_string("/proc/swaps").unwrap()
    }

    #[test]
    fn it_is_off_again_afterwards_also_after_a_panic() {
        let before = swaps();
        let swap = crate::swap_or_skip!();
        assert!(present());
        let panicked = std::thread::spawn(move || {
            let _swap = swap;
            panic!("on purpose");
        });
        assert!(panicked.join().is_err());
        assert_eq!(swaps(), before);
    }

    #[test]
    fn a_loop_device_does_where_there_is_no_zram() {
        let Ok(mut lock) = locked() else {
            return eprintln!("SKIPPED: another test has swap");
        };
        let before = swaps();
        match build_folder().and_then(|folder| make_loop(&mut lock, SIZE, &folder)) {
            Ok((device, _)) => {
                assert!(present());
                device.off().unwrap();
                note(&mut lock, "");
            }
            Err(reason) => eprintln!("SKIPPED: {reason}"),
        }
        assert_eq!(swaps(), before);
    }

    #[test]
    fn what_a_killed_process_left_is_put_off() {
        let before = swaps();
        let swap = crate::swap_or_skip!();
        if swaps() == before {
            return eprintln!("SKIPPED: the machine has swap of its own");
        }
        // The lock goes with the file, and the device stays on: as if killed.
        let left = {
            let mut state = swap.0.lock().unwrap();
            state.lock = tempfile::tempfile().unwrap();
            state.ours.take()
        };
        assert!(left.is_some() && present());
        let next = Swap::on().unwrap();
        assert!(present());
        drop(next);
        assert_eq!(swaps(), before);
    }
}
