//! A guest that is made of files, and a service that listens to its agent.
#![allow(dead_code, unreachable_pub)] // each test binary uses its part

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vmm_dedup_agent_receiver::listen::{Connection, Listener};
use vmm_dedup_agent_receiver::receiver::{Limits, Receiver};
use vmm_dedup_agent_wire::PORT;
use vmm_dedup_agent_wire::frame::{BLOCK, Gfn};
use vmm_dedup_agent_wire::said::Kind;

pub const PATIENCE: Duration = Duration::from_secs(30);
/// Flags of kpageflags: a free page, and one of a file.
pub const FREE: u64 = 1 << 10;
pub const CLEAN: u64 = 1 << 3 | 1 << 5;
/// Blocks of the made-up guest.
pub const BLOCKS: u32 = 64;

/// A guest made of files.
pub struct MadeUp(pub TempDir);

impl MadeUp {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let last = u64::from(BLOCKS) * BLOCK as u64 * 4096 - 1;
        let memory = format!("00000000-{last:08x} : System RAM\n");
        std::fs::write(folder.path().join("iomem"), memory).unwrap();
        let guest = Self(folder);
        guest.put("kpageflags", |_| FREE);
        guest.put("kpagecount", |_| 0);
        guest
    }

    pub fn put(&self, file: &str, word: impl Fn(u64) -> u64) {
        let frames = u64::from(BLOCKS) * BLOCK as u64;
        let words: Vec<u8> = (0..frames).flat_map(|frame| word(frame).to_ne_bytes()).collect();
        std::fs::write(self.0.path().join(file), words).unwrap();
    }

    pub fn arguments(&self) -> [String; 2] {
        ["--proc".into(), self.0.path().display().to_string()]
    }
}

pub fn agent() -> Command {
    Command::new(env!("CARGO_BIN_EXE_vmm-dedup-agent"))
}

pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// A running agent; ended when dropped.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A service that listens where a VMM's vsock leads.
pub struct Service {
    pub folder: TempDir,
    pub listener: Listener,
    pub connection: Option<Connection>,
    pub receiver: Receiver,
    start: Instant,
}

impl Service {
    pub fn new(frames: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::hybrid(&folder.path().join("vsock"), PORT).unwrap();
        Self {
            folder,
            listener,
            connection: None,
            receiver: Receiver::new(frames, Limits::default(), Duration::ZERO),
            start: Instant::now(),
        }
    }

    pub fn settings(&self, more: &str) -> PathBuf {
        let path = self.folder.path().join("agent.toml");
        let folder = self.folder.path().display();
        let text = format!(
            "connect = \"unix:{folder}/vsock_{PORT}\"\nhints_socket = \"{folder}/hints\"\ntemperature = \"off\"\n\
             interval_seconds = 1\n{more}"
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    pub fn hints(&self) -> PathBuf {
        self.folder.path().join("hints")
    }

    /// Serves until something is so.
    pub fn until(&mut self, what: &str, is_so: impl Fn(&Receiver) -> bool) {
        let start = Instant::now();
        while !is_so(&self.receiver) {
            assert!(
                start.elapsed() < PATIENCE,
                "not in time: {what}; {:?}",
                self.receiver.tally()
            );
            self.turn();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn turn(&mut self) {
        let now = self.start.elapsed();
        if let Some(connection) = self.listener.accept().unwrap()
            && self.receiver.connected(now).is_ok()
        {
            self.connection = Some(connection);
        }
        let Some(connection) = &mut self.connection else {
            return;
        };
        let (mut out, mut buffer) = (Vec::new(), [0; 4096]);
        match connection.read(&mut buffer) {
            Ok(0) => {
                self.connection = None;
                self.receiver.disconnected(now);
                return;
            }
            Ok(read) => self.receiver.received(&buffer[..read], now, &mut out).unwrap(),
            Err(_) => self.receiver.tick(now, &mut out),
        }
        while let Some(withheld) = self.receiver.take_withheld() {
            self.receiver.in_force(&withheld, &mut out);
        }
        // Small, and read at once by who has not gone.
        if connection.write_all(&out).is_err() {
            self.connection = None;
            self.receiver.disconnected(now);
        }
    }
}

pub fn kind_at(receiver: &Receiver, frame: u64) -> Kind {
    receiver.said(Gfn::try_new(frame).unwrap()).kind()
}

/// Whether this process may see frames; says so if not.
pub fn sees_frames() -> bool {
    let mut word = [0; 8];
    let file = std::fs::File::open("/proc/kpageflags");
    let sees = file.and_then(|mut file| file.read_exact(&mut word)).is_ok();
    if !sees {
        eprintln!("SKIPPED: /proc/kpageflags cannot be read: that takes root, and a kernel that has it");
    }
    sees
}
