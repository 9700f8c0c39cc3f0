//! `fleet logs`: what VMMs, guests and stores wrote, and write.

use crate::at::At;
use crate::choice::choose;
use crate::log;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use vmm_dedup_host::{Failure, note, output, say};

/// How often logs are looked at.
const LOOK: Duration = Duration::from_millis(200);
/// Most bytes of a log that are shown at a time: a guest may write without end.
const MOST: u64 = 1 << 20;
/// Longest line, in bytes; what is longer is shown as several.
const LONGEST: usize = 1 << 16;

/// Which logs, and how much of them.
#[derive(Clone, Copy, Debug)]
pub struct Which {
    /// What guests write to their serial ports, instead of what VMMs write.
    pub serial: bool,
    /// Also what stores write.
    pub stores: bool,
    /// Lines from the end of each.
    pub lines: usize,
    /// Go on until ^C, or until nobody reads any more.
    pub follow: bool,
}

/// Shows logs of VMs, each line with its VM's name if they are several. No names: of all VMs.
///
/// # Errors
/// A [`Failure`] if the fleet is not up, or a name is wrong.
pub fn logs(at: &At, names: &[String], which: Which) -> Result<(), Failure> {
    let directory = at.directory()?;
    let state = directory.state()?.ok_or_else(|| {
        let name = at.name().unwrap_or_default();
        Failure::new(format!(
            "fleet {name} is not up: start it with `{}`",
            at.command("up")
        ))
    })?;
    at.check(&state)?;
    let mut files: Vec<(String, PathBuf)> = Vec::new();
    for name in choose(names, &state.names(), &state)? {
        if let Some(missing) = state.missing.get(&name) {
            note!("{name} does not run ({})", missing.why);
        }
        let vm = directory.vm(&name);
        files.push((name, if which.serial { vm.serial() } else { vm.log() }));
    }
    if which.stores {
        let logs = state.stores.iter().map(|store| {
            let log = directory.store_log(&store.domain);
            (format!("store {}", store.domain), log)
        });
        files.extend(logs);
    }
    let named = files.len() > 1;
    let mut tails = Vec::new();
    let mut shown = 0;
    for (name, path) in files {
        // What comes between the two is shown twice rather than not at all.
        let tail = Tail::from_end(path);
        let prefix = if named { format!("{name}: ") } else { String::new() };
        let lines = log::tail(&tail.path, which.lines);
        lines.iter().for_each(|line| say!("{prefix}{line}"));
        shown += lines.len();
        tails.push((prefix, tail));
    }
    if shown == 0 && which.lines > 0 {
        note!("{}", nothing(at, which.serial));
    }
    if !which.follow {
        return Ok(());
    }
    loop {
        for (prefix, tail) in &mut tails {
            tail.lines().iter().for_each(|line| say!("{prefix}{line}"));
        }
        output::outcome()?;
        if reader_goes_within(LOOK) {
            return Err(Failure::reader_gone());
        }
    }
}

/// Says that the logs are there and empty, and where else to look.
fn nothing(at: &At, serial: bool) -> String {
    let (who, other, option) = match serial {
        true => ("guests", "their VMMs", ""),
        false => ("VMMs", "guests", " --serial"),
    };
    format!(
        "these {who} wrote nothing so far; `{}{option}` shows what {other} write",
        at.command("logs")
    )
}

/// Waits; whether whoever reads standard output, or its terminal, has gone meanwhile. A write would tell as well, but a log may
/// be quiet for days.
fn reader_goes_within(time: Duration) -> bool {
    let begun = Instant::now();
    let stdout = std::io::stdout();
    let mut output = [PollFd::new(&stdout, PollFlags::empty())];
    loop {
        let left = time.saturating_sub(begun.elapsed());
        let limit = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut output, Some(&limit)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(Errno::INTR) => {}
            Err(_) => {
                std::thread::sleep(left);
                return false;
            }
        }
    }
}

/// A log that is followed, also when its VM is started anew and with it the log.
struct Tail {
    path: PathBuf,
    /// Open until another file has its path: so no other file gets its number.
    file: Option<File>,
    /// As far as it was read.
    end: u64,
    /// The beginning of a line.
    rest: Vec<u8>,
}

impl Tail {
    /// Of what comes from now on.
    fn from_end(path: PathBuf) -> Self {
        let file = log::open(&path).ok();
        let len = |file: &File| file.metadata().map_or(0, |metadata| metadata.len());
        Self {
            end: file.as_ref().map_or(0, len),
            path,
            file,
            rest: Vec::new(),
        }
    }

    /// The lines that have come.
    fn lines(&mut self) -> Vec<String> {
        let (mut shown, mut new) = (Vec::new(), self.read());
        // All of the last log comes before the next one.
        if new.is_empty()
            && let Some(next) = self.next()
        {
            if !self.rest.is_empty() {
                self.rest.push(b'\n');
                shown = lines(&mut self.rest);
            }
            (self.file, self.end) = (Some(next), 0);
            new = self.read();
        }
        self.rest.extend(new);
        shown.extend(lines(&mut self.rest));
        shown
    }

    /// What has come since, as much as is read at a time; a file that has become shorter was begun anew, and what it was is beside it.
    fn read(&mut self) -> Vec<u8> {
        let mut new = Vec::new();
        let Some(file) = &mut self.file else { return new };
        let read = |file: &mut File, start: u64, most: u64, to: &mut Vec<u8>| {
            let begun = file.seek(SeekFrom::Start(start));
            // What cannot be read now is read at the next look.
            begun.and_then(|_| file.take(most).read_to_end(to)).unwrap_or(0) as u64
        };
        if file.metadata().is_ok_and(|file| file.len() < self.end) {
            // All of it: it goes with the next one.
            if let Ok(mut last) = log::open(&log::last_of(&self.path)) {
                read(&mut last, self.end, u64::MAX, &mut new);
            }
            self.end = 0;
        }
        self.end += read(file, self.end, MOST, &mut new);
        new
    }

    /// The file that has the log's path now, if it is another one.
    fn next(&self) -> Option<File> {
        let next = log::open(&self.path).ok()?;
        let which = |file: &File| file.metadata().ok().map(|file| (file.dev(), file.ino()));
        (self.file.as_ref().and_then(which) != which(&next)).then_some(next)
    }
}

/// Takes the lines that are complete, or too long, and leaves the beginning of the next one.
fn lines(rest: &mut Vec<u8>) -> Vec<String> {
    let (mut lines, mut begin) = (Vec::new(), 0);
    loop {
        let left = &rest[begin..];
        let line = &left[..left.len().min(LONGEST)];
        let len = match line.iter().position(|byte| *byte == b'\n') {
            Some(at) => at + 1,
            None if line.len() == LONGEST => LONGEST,
            None => break,
        };
        lines.push(log::plain(&String::from_utf8_lossy(&left[..len])));
        begin += len;
    }
    rest.drain(..begin);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_taken_as_they_end() {
        let mut rest = b"one\r\ntwo \x1b[2J\n\nthr".to_vec();
        assert_eq!(lines(&mut rest), ["one", "two ?[2J", ""]);
        rest.extend(b"ee\n");
        assert_eq!(lines(&mut rest), ["three"]);
        assert!(rest.is_empty());
    }

    #[test]
    fn a_line_without_an_end_is_not_kept() {
        let mut rest = vec![b'x'; 3 * LONGEST + 7];
        let shown = lines(&mut rest);
        assert_eq!(shown.iter().map(String::len).collect::<Vec<_>>(), [LONGEST; 3]);
        assert_eq!(rest.len(), 7);
    }

    /// A log of the next start that is as long as the last one, between two looks.
    #[test]
    fn a_log_that_is_begun_anew_is_shown_from_its_beginning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vmm.log");
        let mut tail = Tail::from_end(path.clone());
        assert!(tail.lines().is_empty());
        std::fs::write(&path, "first\n").unwrap();
        assert_eq!(tail.lines(), ["first"]);
        let mut old = File::options().append(true).open(&path).unwrap();
        std::io::Write::write_all(&mut old, b"last words").unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "as long as it is").unwrap();
        assert_eq!(old.metadata().unwrap().len(), path.metadata().unwrap().len());

        assert!(tail.lines().is_empty());
        assert_eq!(tail.lines(), ["last words"]);
        std::fs::write(&path, "as long as it is\n").unwrap();
        assert_eq!(tail.lines(), ["as long as it is"]);
        // One that was emptied in place, after it was copied with what nobody has seen yet.
        std::fs::write(log::last_of(&path), "as long as it is\nand more\n").unwrap();
        std::fs::write(&path, "short\n").unwrap();
        assert_eq!(tail.lines(), ["and more", "short"]);
        // In its place a VM's user may have put a way to what root alone may read.
        let (last, secret) = (log::last_of(&path), folder.path().join("secret"));
        std::fs::write(&secret, "as long as it is\nsecret\n").unwrap();
        std::fs::remove_file(&last).unwrap();
        std::os::unix::fs::symlink(&secret, &last).unwrap();
        std::fs::write(&path, "a\n").unwrap();
        assert_eq!(tail.lines(), ["a"]);
    }

    /// Lines of one byte each, as many as one look reads: taken one by one from the front they took minutes.
    #[test]
    fn many_short_lines_are_taken_in_one_go() {
        let mut rest = b"\n".repeat(usize::try_from(MOST).unwrap());
        let begun = std::time::Instant::now();
        assert_eq!(lines(&mut rest).len() as u64, MOST);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}
