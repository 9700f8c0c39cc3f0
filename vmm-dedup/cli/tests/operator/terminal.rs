//! A pseudo-terminal of any size, and what it shows.

use crate::host::{Process, eventually};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A command in a terminal.
pub(crate) struct Terminal {
    pub(crate) process: Process,
    master: Option<OwnedFd>,
    gone: Arc<AtomicBool>,
    reader: JoinHandle<()>,
    seen: Arc<Mutex<Vec<u8>>>,
    size: (u16, u16),
}

impl Terminal {
    /// Starts a command in a terminal of so many columns and lines.
    pub(crate) fn open(mut command: Command, columns: u16, lines: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pty");
        grantpt(&master).expect("grantpt");
        unlockpt(&master).expect("unlockpt");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let name = name.into_string().expect("UTF-8");
        let size = Winsize {
            ws_row: lines,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&master, size).expect("a size");
        let slave = || {
            let terminal = OpenOptions::new().read(true).write(true).open(&name);
            terminal.expect("the terminal")
        };
        command
            .stdin(slave())
            .stdout(slave())
            .stderr(slave())
            .env("TERM", "xterm");
        let process = Process(command.spawn().expect("the command runs"));
        // The command would keep our descriptors of the terminal.
        drop(command);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let gone = Arc::new(AtomicBool::new(false));
        let (sink, mut output) = (
            seen.clone(),
            File::from(master.try_clone().expect("a descriptor")),
        );
        let has_gone = gone.clone();
        // It ends with the last descriptor of the terminal, or when that is to go.
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while !has_gone.load(Ordering::Relaxed) {
                let moment = Timespec {
                    tv_sec: 0,
                    tv_nsec: 20_000_000,
                };
                let ready = poll(&mut [PollFd::new(&output, PollFlags::IN)], Some(&moment));
                if ready.expect("poll") == 0 {
                    continue;
                }
                let Ok(n @ 1..) = output.read(&mut bytes) else {
                    return;
                };
                sink.lock().expect("a lock").extend_from_slice(&bytes[..n]);
            }
        });
        Self {
            process,
            master: Some(master),
            gone,
            reader,
            seen,
            size: (lines, columns),
        }
    }

    /// All that was written.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.seen.lock().expect("a lock").clone()
    }

    fn parsed(&self) -> vt100::Parser {
        let of = |size| NonZero::new(size).expect("a size");
        let mut parser = vt100::Parser::new(of(self.size.0), of(self.size.1), 0);
        parser.process(&self.bytes());
        parser
    }

    /// Whether a person sees where the cursor is.
    pub(crate) fn shows_cursor(&self) -> bool {
        !self.parsed().screen().hide_cursor()
    }

    /// The lines that a person sees.
    pub(crate) fn screen(&self) -> Vec<String> {
        let parser = self.parsed();
        let screen = parser.screen();
        screen
            .rows(0, self.size.1)
            .map(|row| row.trim_end().to_owned())
            .collect()
    }

    /// The screen, once a line of it has this.
    pub(crate) fn shows(&self, what: &str) -> Vec<String> {
        eventually(what, || {
            let screen = self.screen();
            screen.iter().any(|line| line.contains(what)).then_some(screen)
        })
    }

    pub(crate) fn types(&self, keys: &str) {
        let master = self.master.as_ref().expect("a terminal");
        let mut keyboard = File::from(master.try_clone().expect("a descriptor"));
        keyboard.write_all(keys.as_bytes()).expect("a key");
    }

    /// The terminal goes away, as when a connection breaks.
    pub(crate) fn hang_up(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
        self.master = None;
    }

    /// How it ends.
    pub(crate) fn end(&mut self) -> ExitStatus {
        eventually("it ends", || self.process.0.try_wait().expect("a status"))
    }
}

/// Runs a command to its end in a terminal so wide; all lines that it wrote, none of them wrapped.
pub(crate) fn lines_of(command: Command, columns: u16) -> (Vec<String>, Option<i32>) {
    let mut terminal = Terminal::open(command, columns, 24);
    let status = terminal.end();
    // What was written before the end is read when the machine has time for it.
    eventually("all is read", || terminal.reader.is_finished().then_some(()));
    let text = String::from_utf8(terminal.bytes()).expect("UTF-8");
    // A line of progress is wiped out again.
    let lasts = |line: &str| line.rsplit("\r\x1b[K").next().unwrap_or_default().to_owned();
    (
        text.lines()
            .map(|line| lasts(line.trim_end_matches('\r')))
            .collect(),
        status.code(),
    )
}
