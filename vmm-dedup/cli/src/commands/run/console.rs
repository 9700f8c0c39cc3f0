//! The guest's serial console: what it writes goes to standard output, or to a file that does not grow for ever, and to who listens
//! line by line.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use vmm_dedup_host::{Failure, note, output};

/// Bytes of a log after which the next one is begun.
const MOST: u64 = 1 << 20;

/// Lines of a guest that never ends one are not kept beyond this.
const LONGEST_LINE: usize = 4096;

/// Takes each whole line.
pub(super) type Listener = Box<dyn FnMut(&str) + Send>;

/// A file of which there are two: when it is full it gets another name, in the place of the one before, and is begun anew.
pub(super) struct Log {
    path: PathBuf,
    file: File,
    len: u64,
    /// What is lost has been told of.
    told: bool,
}

impl Log {
    /// Goes on with what is there.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let opened =
            Self::append(path).map_err(|e| format!("cannot write the serial log {}: {e}", path.display()));
        opened.map_err(Failure::new)
    }

    fn append(path: &Path) -> io::Result<Self> {
        let file = File::options().append(true).create(true).open(path)?;
        Ok(Self {
            path: path.to_owned(),
            len: file.metadata()?.len(),
            file,
            told: false,
        })
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Err(error) = self.try_write(bytes)
            && !std::mem::replace(&mut self.told, true)
        {
            note!(
                "what the guest writes to its serial port is lost: cannot write {}: {error}",
                self.path.display()
            );
        }
    }

    fn try_write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.len >= MOST {
            let mut last = self.path.clone().into_os_string();
            last.push(".1");
            std::fs::rename(&self.path, last)?;
            *self = Self::append(&self.path)?;
        }
        self.file.write_all(bytes)?;
        self.len += bytes.len() as u64;
        Ok(())
    }
}

/// Where a guest writes. What is not taken there is lost, and told of: the guest goes on.
pub(super) struct Console {
    log: Option<Log>,
    line: Vec<u8>,
    listener: Option<Listener>,
}

impl Console {
    /// No log: on standard output.
    pub(super) fn new(log: Option<Log>, listener: Option<Listener>) -> Self {
        Self {
            log,
            line: Vec::new(),
            listener,
        }
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.log {
            None => output::bytes(bytes),
            Some(log) => log.write(bytes),
        }
        let Some(listener) = &mut self.listener else {
            return Ok(bytes.len());
        };
        for byte in bytes {
            match byte {
                b'\n' => {
                    listener(String::from_utf8_lossy(&self.line).trim_end());
                    self.line.clear();
                }
                byte if self.line.len() < LONGEST_LINE => self.line.push(*byte),
                _ => {}
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn lines_are_heard_whole_however_they_come() {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let listener = heard.clone();
        let mut console = Console::new(
            None,
            Some(Box::new(move |line: &str| {
                listener.lock().unwrap().push(line.to_owned());
            })),
        );
        for part in ["on", "e\r\ntwo\nth", "ree"] {
            console.write_all(part.as_bytes()).unwrap();
        }
        assert_eq!(*heard.lock().unwrap(), ["one", "two"]);
    }

    #[test]
    fn a_log_is_begun_anew_and_the_last_one_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial.log");
        let mut console = Console::new(Some(Log::open(&path).unwrap()), None);
        let part = vec![b'x'; usize::try_from(MOST / 4).unwrap()];
        for round in 1..=3 {
            (0..4).for_each(|_| console.write_all(&part).unwrap());
            console.write_all(format!("{round}\n").as_bytes()).unwrap();
        }
        drop(console);
        let mut again = Console::new(Some(Log::open(&path).unwrap()), None);
        again.write_all(b"end").unwrap();

        let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(text("serial.log"), "3\nend");
        let last = text("serial.log.1");
        assert_eq!((last.len() as u64, &last[..2]), (MOST + 2, "2\n"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
