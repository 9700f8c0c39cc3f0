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
        while let Some(at) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=at).collect();
            say!("{}{}", self.prefix, log::plain(&String::from_utf8_lossy(&line)));
        }
    }
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
