//! Logs of a fleet do not grow for ever: the runtime folder is memory on most hosts, and guests write what they like.
//!
//! Each fleet that is up has one process that looks at its logs. A log that has become longer than [`MOST`] is copied beside it and
//! emptied where it is, since whoever writes it has it open; everybody writes at its end. The process ends when the fleet's directory
//! has gone. Nothing hangs on it: if it is killed logs grow until the next `up`, and `status` says so.

use crate::log;
use crate::process::{self, Life};
use crate::state::{Locked, State};
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use vmm_dedup_host::Failure;

/// Bytes of a log after which it is begun anew. The reference VMM does that itself after half as many.
const MOST: u64 = 2 << 20;
/// How often logs are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Why nobody keeps a fleet's logs short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The process was never started, or has ended.
    Gone,
    /// The process, of this number, is stopped by a signal.
    Stopped(i32),
}

/// What is wrong with the process of a fleet, if something is.
pub(crate) fn fault(state: &State) -> Option<Fault> {
    let Some(keeper) = &state.log_keeper else {
        return Some(Fault::Gone);
    };
    match keeper.life() {
        Life::Running => None,
        Life::Stopped => Some(Fault::Stopped(keeper.pid)),
        Life::Ended(_) => Some(Fault::Gone),
    }
}

/// Starts the process of a fleet that has none, and notes it down.
pub(crate) fn start(directory: &Locked, state: &mut State) -> Result<(), Failure> {
    let mut command = Command::new(std::env::current_exe().map_err(Failure::from_error)?);
    command
        .args(["fleet", "keep-logs"])
        .arg(std::path::absolute(directory.path()).map_err(Failure::from_error)?)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .current_dir("/");
    let record = |process| {
        state.log_keeper = Some(process);
        directory.write(state)
    };
    let started = process::spawn(command, record, Failure::from_error);
    started
        .map(drop)
        .map_err(|failure| Failure::new(format!("logs of this fleet are not kept short: {failure}")))
}

/// Keeps the logs in a fleet's directory short, until that has gone.
///
/// # Errors
/// A [`Failure`] if there is no such directory.
pub fn keep_logs(directory: &Path) -> Result<(), Failure> {
    let there = File::open(directory).map_err(|e| {
        let path = directory.display();
        Failure::new(format!("cannot use {path}: {e}"))
    })?;
    while there.metadata().is_ok_and(|folder| folder.nlink() > 0) {
        // Not while a command is at work, which may be about to remove a log.
        if rustix::fs::flock(&there, FlockOperation::NonBlockingLockShared).is_ok() {
            for log in logs(directory) {
                // What cannot be done now is tried again.
                let _ = shorten(&log);
            }
            let _ = rustix::fs::flock(&there, FlockOperation::Unlock);
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// The logs of a fleet.
fn logs(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let of_vms = entries(&directory.join("vm"))
        .flat_map(|vm| ["vmm.log", "serial.log"].map(|log| vm.path().join(log)));
    let of_stores = entries(directory).filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        (name.starts_with("store-") && name.ends_with(".log")).then(|| entry.path())
    });
    of_vms.chain(of_stores)
}

/// Copies a log that is too long to where the last one was, and empties it.
fn shorten(path: &Path) -> io::Result<()> {
    // What it takes, not how long it is: whoever does not write at its end leaves a hole before what he writes.
    let taken = |file: fs::Metadata| file.blocks().saturating_mul(512);
    if fs::symlink_metadata(path).map_or(0, taken) <= MOST {
        return Ok(());
    }
    let mut file = open(path)?;
    let last = log::last_of(path);
    // Where there is no room for a copy, the room is needed.
    let copied = remove(&last).and_then(|()| copy(&mut file, &last));
    file.set_len(0)?;
    copied
}

/// Opens a log to empty it. It may be in the folder of a VM's user, who may have put anything there: only a file that is nowhere else
/// is one.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    match metadata.is_file() && metadata.nlink() == 1 {
        true => Ok(file),
        false => Err(io::Error::other("it is no file of this folder alone")),
    }
}

/// Copies the end of a file, with what comes meanwhile.
fn copy(file: &mut File, to: &Path) -> io::Result<()> {
    let start = file.metadata()?.len().saturating_sub(2 * MOST);
    file.seek(SeekFrom::Start(start))?;
    let fresh = to.with_extension("new");
    remove(&fresh)?;
    let mut options = OpenOptions::new();
    let copied = (options.write(true).create_new(true).mode(0o600).open(&fresh))
        .and_then(|mut copy| io::copy(&mut file.take(4 * MOST), &mut copy))
        .and_then(|_| fs::rename(&fresh, to));
    copied.or_else(|error| remove(&fresh).and(Err(error)))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_log_that_is_long_is_begun_anew_and_its_writer_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vmm.log");
        let mut writer = log::begin(&path).unwrap();
        writer.write_all(b"short\n").unwrap();
        shorten(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"short\n");
        for round in 0..3 {
            let line = format!("{round} {}\n", "x".repeat(1000));
            let lines = line.repeat(usize::try_from(MOST).unwrap() / line.len() + 10);
            writer.write_all(lines.as_bytes()).unwrap();

            shorten(&path).unwrap();
            writer.write_all(b"next\n").unwrap();

            assert_eq!(fs::read(&path).unwrap(), b"next\n");
            assert!(fs::read_to_string(log::last_of(&path)).unwrap().ends_with(&lines));
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
            assert_eq!(log::tail(&path, 2), [line.trim_end(), "next"]);
        }
    }

    #[test]
    fn a_log_with_a_hole_before_what_is_written_is_left_until_it_takes_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial.log");
        let mut writer = File::create(&path).unwrap();
        writer.seek(SeekFrom::Start(100 * MOST)).unwrap();
        writer.write_all(b"here\n").unwrap();
        shorten(&path).unwrap();
        assert!(!log::last_of(&path).exists());
        writer.write_all(&vec![b'y'; 2 << 20]).unwrap();
        shorten(&path).unwrap();
        assert!(fs::metadata(log::last_of(&path)).unwrap().blocks() <= 3 * MOST / 512);
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    }

    #[test]
    fn what_a_vms_user_has_put_in_the_place_of_a_log_leads_nowhere() {
        let folder = tempfile::tempdir().unwrap();
        let [path, victim] = ["vmm.log", "victim"].map(|name| folder.path().join(name));
        let long = vec![b'y'; 3 << 20];
        fs::write(&victim, &long).unwrap();
        fs::hard_link(&victim, &path).unwrap();
        shorten(&path).unwrap_err();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        // A link takes no room; nor is it opened.
        shorten(&path).unwrap();
        open(&path).unwrap_err();
        fs::remove_file(&path).unwrap();
        fs::write(&path, &long).unwrap();
        for name in ["vmm.log.1", "vmm.log.new"] {
            std::os::unix::fs::symlink(&victim, folder.path().join(name)).unwrap();
        }
        shorten(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        assert!(fs::symlink_metadata(log::last_of(&path)).unwrap().is_file());
        assert_eq!(fs::read(&victim).unwrap(), long);
    }

    #[test]
    fn all_logs_of_a_fleet_are_found_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("vm/web-0")).unwrap();
        for file in ["store-blue.log", "state.json", "store-blue.log.1"] {
            fs::write(folder.path().join(file), "").unwrap();
        }
        let found: Vec<PathBuf> = logs(folder.path()).collect();
        let expected = ["vm/web-0/vmm.log", "vm/web-0/serial.log", "store-blue.log"];
        assert_eq!(found, expected.map(|file| folder.path().join(file)));
    }
}
