//! `fleet logs`: what VMMs, guests and stores wrote, and write.

use crate::at::At;
use crate::choice::choose;
use crate::log;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;
use vmm_dedup_host::{Failure, output, say};

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
    /// Go on until ^C.
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
    let all: Vec<&str> = state.vms.iter().map(|vm| vm.name.as_str()).collect();
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for name in choose(names, &all)? {
        let vm = directory.vm(&name);
        files.insert(name, if which.serial { vm.serial() } else { vm.log() });
    }
    if which.stores {
        for store in &state.stores {
            files.insert(
                format!("store {}", store.domain),
                directory.store_log(&store.domain),
            );
        }
    }
    let named = files.len() > 1;
    let mut tails = Vec::new();
    for (name, path) in files {
        // What comes between the two is shown twice rather than not at all.
        let end = path.metadata().map_or(0, |file| file.len());
        let prefix = if named { format!("{name}: ") } else { String::new() };
        log::tail(&path, which.lines)
            .iter()
            .for_each(|line| say!("{prefix}{line}"));
        tails.push(Tail {
            prefix,
            path,
            end,
            rest: Vec::new(),
        });
    }
    if !which.follow {
        return Ok(());
    }
    loop {
        tails.iter_mut().for_each(Tail::show);
        output::outcome()?;
        std::thread::sleep(LOOK);
    }
}

/// A log that is followed.
struct Tail {
    prefix: String,
    path: PathBuf,
    /// As far as it was read.
    end: u64,
    /// The beginning of a line.
    rest: Vec<u8>,
}

impl Tail {
    fn show(&mut self) {
        let Ok(new) = read(&self.path, &mut self.end) else {
            return;
        };
        self.rest.extend(new);
        for line in lines(&mut self.rest) {
            say!("{}{line}", self.prefix);
        }
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

/// What has come since; a file that has become shorter was begun anew.
fn read(path: &Path, end: &mut u64) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    if len < *end {
        *end = 0;
    }
    let mut new = Vec::new();
    file.seek(SeekFrom::Start(*end))?;
    file.take(MOST).read_to_end(&mut new)?;
    *end += new.len() as u64;
    Ok(new)
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

    /// Lines of one byte each, as many as one look reads: taken one by one from the front they took minutes.
    #[test]
    fn many_short_lines_are_taken_in_one_go() {
        let mut rest = b"\n".repeat(usize::try_from(MOST).unwrap());
        let begun = std::time::Instant::now();
        assert_eq!(lines(&mut rest).len() as u64, MOST);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}
