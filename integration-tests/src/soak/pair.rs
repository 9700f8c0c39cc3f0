//! Two VMs with the same memory in a process of its own, of which one has a disk for direct I/O.
#![allow(unsafe_code)] // direct I/O from and to raw pages

use crate::memory::Pages;
use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, DedupService};
use vmm_dedup_protocol::PAGE_SIZE;

/// Pages of each.
const PAGES: usize = 4096;
/// Pages of an extent. Every second one is replaced in one of four rounds.
const EXTENT: usize = 64;
/// The last pages of the first VM, which the disk is read into.
const BUFFER: usize = 64;
/// How long sharing is waited for in a round.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a round was like.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round {
    /// Of what both have in common, what is shared.
    pub shared: f64,
    /// Pages read and written directly so far, each compared.
    pub direct: u64,
    /// Of them, and of all pages at the end, those that were wrong.
    pub wrong: u64,
    /// It is over, and all pages were compared.
    pub done: bool,
}

impl Round {
    /// From a line of the process.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(line).ok()?;
        Some(Self {
            shared: value["shared"].as_f64()?,
            direct: value["direct"].as_u64()?,
            wrong: value["wrong"].as_u64()?,
            done: value["done"].as_bool()?,
        })
    }

    fn line(self) -> String {
        let Self {
            shared,
            direct,
            wrong,
            done,
        } = self;
        json!({ "shared": shared, "direct": direct, "wrong": wrong, "done": done }).to_string()
    }
}

struct Disk<'a> {
    pages: &'a Pages,
    file: OwnedFd,
    stop: AtomicBool,
    direct: AtomicU64,
    wrong: AtomicU64,
}

/// Goes on, with a line for each round, until nothing more can be read from standard input.
///
/// # Panics
/// If something does not work that has nothing to do with it.
pub fn run(store: &Path) {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let vms = [Pages::map(PAGES), Pages::map(PAGES)];
    let mut ids: Vec<u64> = (1..=PAGES as u64).collect();
    vms.iter()
        .for_each(|vm| (0..PAGES).for_each(|page| vm.fill(page, ids[page])));
    let services = [0, 1].map(|n| serve(&vms[n], store, n));
    let disk = Disk {
        pages: &vms[0],
        file: create_direct(&folder.path().join("disk")),
        stop: AtomicBool::new(false),
        direct: AtomicU64::new(0),
        wrong: AtomicU64::new(0),
    };
    let ended = AtomicBool::new(false);
    let tell = |shared, done| {
        let round = Round {
            shared,
            direct: disk.direct.load(Ordering::Relaxed),
            wrong: disk.wrong.load(Ordering::Relaxed),
            done,
        };
        let mut out = std::io::stdout().lock();
        // Who does not listen any more has ended.
        let _ = writeln!(out, "{}", round.line());
    };
    std::thread::scope(|scope| {
        scope.spawn(|| disk.use_it());
        scope.spawn(|| {
            let mut line = String::new();
            while std::io::stdin()
                .lock()
                .read_line(&mut line)
                .is_ok_and(|read| read > 0)
            {}
            ended.store(true, Ordering::Release);
        });
        for round in 1u64.. {
            tell(wait_until_shared(&services, &ended), false);
            if ended.load(Ordering::Acquire) {
                break;
            }
            let replaced = |page: &usize| (*page / EXTENT % 8) as u64 == 2 * (round % 4) + 1;
            for page in (0..PAGES - BUFFER).filter(replaced) {
                ids[page] = round << 32 | page as u64;
                vms.iter().for_each(|vm| vm.fill(page, ids[page]));
            }
        }
        disk.stop.store(true, Ordering::Release);
    });
    let wrong = |vm: &Pages| {
        let wrong = (0..PAGES - BUFFER).filter(|page| !vm.holds(*page, ids[*page]));
        wrong.fold(0, |n, _| n + 1)
    };
    let shared_wrong: u64 = vms.iter().map(wrong).sum();
    let stop = |service: DedupService| service.stop(true).expect("dedup stops");
    services.into_iter().for_each(|service| _ = stop(service));
    let private_wrong: u64 = vms.iter().map(wrong).sum();
    disk.wrong
        .fetch_add(shared_wrong + private_wrong, Ordering::Relaxed);
    tell(1.0, true);
}

fn serve(pages: &Pages, store: &Path, number: usize) -> DedupService {
    let config = Config {
        name: format!("pair-{number}"),
        pass_period_ms: 100,
        cpu_percent: 50,
        // The open disk keeps the way without forks closed.
        breaks: Breaks::Kernel {
            heal_stall_us: 50_000,
            heal_without_fork: false,
        },
        ..Config::default()
    };
    let service = pages.serve(store, config).expect("dedup starts");
    service.vouch_for_pins();
    service
}

/// What is shared of what is common, at the most until all of it is.
fn wait_until_shared(services: &[DedupService; 2], ended: &AtomicBool) -> f64 {
    let start = Instant::now();
    let common = (2 * (PAGES - BUFFER)) as f64;
    let mut most: f64 = 0.0;
    while start.elapsed() < PATIENCE && !ended.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(100));
        let mapped = services.iter().map(|service| service.stats().pages_mapped);
        // The buffer may be shared as well, by chance.
        most = most.max((mapped.sum::<u64>() as f64 / common).min(1.0));
        // Breaks are noticed late: what was just written still counts as shared at first.
        if most >= 0.99 && start.elapsed() > Duration::from_secs(3) {
            break;
        }
        if start.elapsed() < Duration::from_secs(2) {
            most = 0.0;
        }
    }
    most
}

fn create_direct(path: &Path) -> OwnedFd {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).expect("O_DIRECT")
}

impl Disk<'_> {
    /// Writes pages that stay as they are to the disk, and reads them into the buffer.
    fn use_it(&self) {
        let buffer = PAGES - BUFFER;
        for n in 0usize.. {
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let first = n % (buffer / (2 * EXTENT)) * 2 * EXTENT;
            let bytes = BUFFER * PAGE_SIZE;
            let (from, to) = (self.pages.address(first), self.pages.address(buffer));
            // SAFETY: an extent of our own pages, which the kernel reads.
            let written = unsafe { libc::pwrite(self.file.as_raw_fd(), from as *const _, bytes, 0) };
            assert_eq!(
                written,
                bytes.cast_signed(),
                "{}",
                std::io::Error::last_os_error()
            );
            // SAFETY: as many of our own pages, which nobody else writes or refers to.
            let read = unsafe { libc::pread(self.file.as_raw_fd(), to as *mut _, bytes, 0) };
            assert_eq!(read, bytes.cast_signed(), "{}", std::io::Error::last_os_error());
            let is_wrong = |at: &usize| !self.pages.holds(buffer + at, (first + at) as u64 + 1);
            let wrong = (0..BUFFER).filter(is_wrong).fold(0, |n, _| n + 1);
            self.wrong.fetch_add(wrong, Ordering::Relaxed);
            self.direct.fetch_add(2 * BUFFER as u64, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

const _: () = assert!(BUFFER == EXTENT && PAGES.is_multiple_of(8 * EXTENT));
