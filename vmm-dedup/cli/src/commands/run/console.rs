//! The guest's serial console: what it writes goes to standard output, and to who listens line by line.

use std::io::{self, Write};
use vmm_dedup_host::output;

/// Lines of a guest that never ends one are not kept beyond this.
const LONGEST_LINE: usize = 4096;

/// Takes each whole line.
pub(super) type Listener = Box<dyn FnMut(&str) + Send>;

/// Where a guest writes. What standard output does not take is lost, and noted in [`output`]: the guest goes on.
pub(super) struct Console {
    line: Vec<u8>,
    listener: Option<Listener>,
}

impl Console {
    pub(super) fn new(listener: Option<Listener>) -> Self {
        Self {
            line: Vec::new(),
            listener,
        }
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        output::bytes(bytes);
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
        let mut console = Console::new(Some(Box::new(move |line: &str| {
            listener.lock().unwrap().push(line.to_owned());
        })));
        for part in ["on", "e\r\ntwo\nth", "ree"] {
            console.write_all(part.as_bytes()).unwrap();
        }
        assert_eq!(*heard.lock().unwrap(), ["one", "two"]);
    }
}
