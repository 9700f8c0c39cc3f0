//! The guest's serial line: the VMM's standard input and output, or a socket. (Cloud Hypervisor reads its standard input
//! only if it is a terminal.)

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use vmm_dedup_payload::Console;

/// How long to wait for the VMM's end of a socket.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the test types into.
pub(super) enum Line {
    Child(ChildStdin),
    Socket(Arc<Mutex<Option<UnixStream>>>),
}

impl Line {
    /// Takes over the child's standard input and output.
    pub(super) fn to_child(child: &mut Child, mut console: Console) -> Self {
        let mut output = child.stdout.take().expect("it is piped");
        std::thread::spawn(move || std::io::copy(&mut output, &mut console));
        Line::Child(child.stdin.take().expect("it is piped"))
    }

    /// Connects to a socket as soon as there is one, and again whenever it was closed: a VM that is rebooted may get
    /// another one.
    pub(super) fn to_socket(path: &Path, console: Console) -> Self {
        let stream = Arc::new(Mutex::new(None));
        let (there, path) = (Arc::downgrade(&stream), path.to_owned());
        std::thread::spawn(move || listen(&there, &path, console));
        Line::Socket(stream)
    }

    /// Types a character.
    pub(super) fn write(&mut self, character: u8) {
        let start = Instant::now();
        loop {
            let written = match self {
                Line::Child(input) => input.write_all(&[character]).and_then(|()| input.flush()),
                Line::Socket(stream) => {
                    let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
                    let none = || std::io::ErrorKind::NotConnected.into();
                    stream
                        .as_mut()
                        .map_or_else(|| Err(none()), |s| s.write_all(&[character]))
                }
            };
            match written {
                Ok(()) => return,
                Err(error) => assert!(start.elapsed() < PATIENCE, "the serial line is closed: {error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Until the line is dropped.
fn listen(line: &Weak<Mutex<Option<UnixStream>>>, path: &PathBuf, mut console: Console) {
    while let Some(line) = line.upgrade() {
        if let Ok(mut stream) = UnixStream::connect(path) {
            *line.lock().unwrap_or_else(PoisonError::into_inner) = stream.try_clone().ok();
            drop(line);
            let _ = std::io::copy(&mut stream, &mut console);
            continue;
        }
        drop(line);
        std::thread::sleep(Duration::from_millis(10));
    }
}
