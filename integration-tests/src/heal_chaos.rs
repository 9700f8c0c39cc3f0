//! Copies that are merged again while everybody writes them: threads, direct reads, reads into registered buffers, and
//! process_vm_writev. Each puts back what the slot holds, so that the page soon can be merged once more.
#![allow(unsafe_code)] // writes raw pages

use crate::direct_io::open_direct;
use crate::memory::Pages;
use crate::random::Random;
use crate::store::StoreThread;
use io_uring::{IoUring, opcode, types};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, DedupService, ServiceStats};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::stats::Histogram;
use vmm_dedup_trouble::Pager;

const PAGES: usize = 2048;
/// Who writes: each has every so manieth page.
const WRITERS: usize = 4;
/// Parts of a writer's pages that are written in turn, and for how long. The others rest, and are merged.
const PHASES: usize = 8;
const PHASE: Duration = Duration::from_millis(30);
/// Of so many buffers one is held until its page rests, and is to be left alone because it is pinned.
const HELD: u64 = 128;
/// The word that is written.
const WORD: usize = 8;
/// What direct reads bring instead, and a page's number.
const OTHER: u64 = 0xd1d1_0000;

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Copies merged again.
    pub heals: u64,
    /// Copies left alone because they may have been pinned, and because somebody waited.
    pub pinned: u64,
    /// See [`Self::pinned`].
    pub wanted: u64,
    /// Writes by threads and from outside, each checked.
    pub writes: u64,
    /// Direct reads, half of them into registered buffers.
    pub reads: u64,
    /// Bytes of pages that went through pipes.
    pub spliced: u64,
    /// Children that were stopped or killed.
    pub killed: u64,
    /// Copies left alone because nothing told whether they were pinned.
    pub untold: u64,
    /// Words that were not what was written last.
    pub wrong: u64,
    /// How long writers may have waited.
    pub stall: Histogram,
}

/// What happens besides.
#[derive(Clone, Copy, Debug, Default)]
pub struct Besides {
    /// The pages are paged out all the time. Whoever calls holds swap.
    pub swap: bool,
    /// The process's children are stopped and killed as soon as they are seen.
    pub kills: bool,
}

/// Between two words of how far it is.
const PROGRESS: Duration = Duration::from_secs(10);
/// How long no copy may be merged. (Whoever was refused tries again after 4,096 passes at most, which are seconds.)
const PATIENCE: Duration = Duration::from_secs(120);

/// Pages paged out in one call, at most.
const MOST_OUT: usize = 32;
/// Between two calls of the pager's. Without it each page leaves ten times a second, and rests too seldom to be merged: 130 merges
/// of copies a second instead of 2,500.
const BREATH: Duration = Duration::from_micros(200);

/// Who may have pages pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Pins {
    /// Direct reads and registered buffers: forks tell.
    Devices,
    /// Nobody for longer than a system call (process_vm_writev): the kernel's count of pinned pages tells, without forks.
    Calls,
}

struct Fire<'a> {
    pages: &'a Pages,
    stop: AtomicBool,
    start: Instant,
    writes: AtomicU64,
    reads: AtomicU64,
    spliced: AtomicU64,
    wrong: AtomicU64,
}

/// Merges copies until so many were (or somebody lost a write, or it is over).
///
/// # Panics
/// If something does not work that has nothing to do with it; if no copy is merged for [`PATIENCE`].
#[must_use]
pub fn chaos(heals: u64, over: impl Fn() -> bool, pins: Pins, besides: Besides) -> Outcome {
    vmm_dedup::share_whatever_it_costs(true);
    let store = StoreThread::start();
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let (pages, twins) = (Pages::map(PAGES), Pages::map(PAGES));
    for page in 0..PAGES {
        pages.fill(page, id(page));
        twins.fill(page, id(page));
    }
    let file = (pins == Pins::Devices).then(|| make_file(folder.path()));
    let config = |name: &str| Config {
        name: name.into(),
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        breaks: Breaks::Kernel {
            heal_stall_us: if pins == Pins::Calls { 0 } else { 50_000 },
            heal_without_fork: false,
        },
        ..Config::default()
    };
    let twin = twins
        .serve(&store.socket(), config("twin"))
        .expect("dedup starts");
    let service = pages
        .serve(&store.socket(), config("fire"))
        .expect("dedup starts");
    twin.vouch_for_pins();
    service.vouch_for_pins();
    let shared = |service: &DedupService| service.pass().expect("passes run").pages_mapped == PAGES as u64;
    while !(over() || shared(&twin) & shared(&service)) {}
    let fire = Fire {
        pages: &pages,
        stop: AtomicBool::new(false),
        start: Instant::now(),
        writes: AtomicU64::new(0),
        reads: AtomicU64::new(0),
        spliced: AtomicU64::new(0),
        wrong: AtomicU64::new(0),
    };
    let (stats, killed) = std::thread::scope(|scope| {
        let fire = &fire;
        let memory = pages.address(0)..pages.address(0) + PAGES * PAGE_SIZE;
        let _pager = besides
            .swap
            .then(|| Pager::start(1, MOST_OUT, BREATH, move || vec![memory.clone()]));
        let killed = besides.kills.then(|| scope.spawn(|| fire.kill_children()));
        scope.spawn(|| fire.write_and_splice(0));
        scope.spawn(|| fire.write_from_outside(1));
        match &file {
            Some(file) => {
                scope.spawn(|| fire.read_directly(2, file));
                scope.spawn(|| fire.read_into_buffers(3, file));
            }
            None => {
                scope.spawn(|| fire.write_and_splice(2));
                scope.spawn(|| fire.write_and_splice(3));
            }
        }
        let mut stats = ServiceStats::default();
        let done = |stats: &ServiceStats| {
            stats.heals_total >= heals || fire.wrong.load(Ordering::Relaxed) > 0 || over()
        };
        let (mut shown, mut moved) = (Instant::now(), Instant::now());
        while !done(&stats) {
            let before = stats.heals_total;
            stats = service.pass().expect("passes run");
            if stats.heals_total > before {
                moved = Instant::now();
            } else if moved.elapsed() > PATIENCE {
                // Else the threads would not end, and nobody would hear of it.
                fire.stop.store(true, Ordering::Release);
                panic!(
                    "no copy was merged for {} s, after {before}: {}",
                    PATIENCE.as_secs(),
                    why_none(&service, &stats)
                );
            }
            if shown.elapsed() > PROGRESS {
                shown = Instant::now();
                let seconds = fire.start.elapsed().as_secs();
                eprintln!("{} heals of {heals} after {seconds} s", stats.heals_total);
                if moved.elapsed() > PROGRESS {
                    eprintln!(
                        "none for {} s: {}",
                        moved.elapsed().as_secs(),
                        why_none(&service, &stats)
                    );
                }
            }
            if stats.passes_total.is_multiple_of(64) {
                twin.pass().expect("passes run");
            }
        }
        fire.stop.store(true, Ordering::Release);
        let killed = killed.map_or(0, |killer| killer.join().expect("the killer ends"));
        (stats, killed)
    });
    let stayed = (0..PAGES).filter(|page| !pages.holds(*page, id(*page)));
    let wrong = fire.wrong.into_inner() + stayed.fold(0, |n, _| n + 1);
    service.stop(true).expect("dedup stops");
    twin.stop(false).expect("dedup stops");
    Outcome {
        heals: stats.heals_total,
        pinned: stats.heal_pinned_total,
        wanted: stats.heal_contended_total,
        untold: stats.heal_failed_total,
        killed,
        writes: fire.writes.into_inner(),
        reads: fire.reads.into_inner(),
        spliced: fire.spliced.into_inner(),
        wrong,
        stall: stats.heal,
    }
}

/// What a service that merges no copies says of that.
fn why_none(service: &DedupService, stats: &ServiceStats) -> String {
    match service.explain(None) {
        Ok((explanation, says)) => {
            let classes = explanation.classes().into_iter().filter(|(_, pages)| *pages > 0);
            format!("{says:?}; pages: {:?}; {stats:?}", Vec::from_iter(classes))
        }
        Err(error) => format!("it does not say why: {error}"),
    }
}

fn id(page: usize) -> u64 {
    page as u64 + 1
}

/// Two pages for each: what its slot holds, and the same with another word.
fn make_file(folder: &Path) -> OwnedFd {
    let path = folder.join("data");
    let mut file = std::fs::File::create(&path).expect("a file");
    let page = Pages::map(1);
    for number in 0..PAGES {
        page.fill(0, id(number));
        for other in [None, Some(OTHER + number as u64)] {
            other.into_iter().for_each(|word| page.store(0, WORD, word));
            let bytes: Vec<u8> = (0..PAGE_SIZE / 8)
                .flat_map(|word| page.load(0, word).to_ne_bytes())
                .collect();
            file.write_all(&bytes).expect("the file is written");
        }
    }
    file.sync_all().expect("the file is on disk");
    open_direct(&path)
}

/// Processes that threads of this one have forked.
fn children() -> Vec<i32> {
    let threads = std::fs::read_dir("/proc/self/task").expect("threads").flatten();
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| {
            list.split_whitespace()
                .map(|pid| pid.parse().ok())
                .collect::<Vec<_>>()
        })
        .flatten()
        .collect()
}

impl Fire<'_> {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Acquire)
    }

    /// A page of a writer's that is not at rest.
    fn page(&self, writer: usize, random: &mut Random) -> usize {
        let phase =
            usize::try_from(self.start.elapsed().as_millis() / PHASE.as_millis()).expect("a time") % PHASES;
        let part = PAGES / WRITERS / PHASES;
        let place = usize::try_from(random.next()).expect("31 bits") % part * PHASES + phase;
        place * WRITERS + writer
    }

    fn normal(&self, page: usize) -> u64 {
        self.pages.expected(id(page), WORD)
    }

    /// Whether a page has this word now, and for a while.
    fn check(&self, page: usize, word: u64, times: u64, what: &str) {
        for _ in 0..=times {
            let found = self.pages.load(page, WORD);
            if found != word {
                eprintln!("{what}: page {page} has {found:x} instead of {word:x}");
                self.wrong.fetch_add(1, Ordering::Relaxed);
                self.stop.store(true, Ordering::Release);
                return;
            }
        }
    }

    /// A thread as a vCPU: writes, and hands pages to pipes.
    fn write_and_splice(&self, writer: usize) {
        let (mut random, mut n) = (Random(writer as u64 + 1), 0u64);
        let (mut out, into) = std::io::pipe().expect("a pipe");
        let mut bytes = vec![0u8; PAGE_SIZE];
        while self.goes_on() {
            let page = self.page(writer, &mut random);
            self.check(page, self.normal(page), 0, "before writing");
            n += 1;
            self.pages.store(page, WORD, n);
            self.check(page, n, random.next() % 200, "written");
            self.pages.store(page, WORD, self.normal(page));
            self.writes.fetch_add(2, Ordering::Relaxed);
            if n.is_multiple_of(32) {
                let whole = libc::iovec {
                    iov_base: self.pages.address(page) as *mut _,
                    iov_len: PAGE_SIZE,
                };
                // SAFETY: a page of our own, which the pipe only reads.
                let spliced = unsafe { libc::vmsplice(into.as_raw_fd(), &whole, 1, 0) };
                assert_eq!(spliced, PAGE_SIZE.cast_signed());
                out.read_exact(&mut bytes).expect("the pipe has a page");
                let word = bytes[WORD * 8..WORD * 8 + 8].try_into().expect("8 bytes");
                let word = u64::from_ne_bytes(word);
                if word != self.normal(page) {
                    eprintln!("spliced: page {page} has {word:x}");
                    self.wrong.fetch_add(1, Ordering::Relaxed);
                }
                self.spliced.fetch_add(PAGE_SIZE as u64, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Stops and kills children of this process; how many.
    fn kill_children(&self) -> u64 {
        let mut killed = 0;
        while self.goes_on() {
            for child in children() {
                // SAFETY: no memory is given.
                let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) };
                let Some(pidfd) = i32::try_from(pidfd).ok().filter(|fd| *fd >= 0) else {
                    continue;
                };
                // SAFETY: a fresh descriptor that nobody else owns.
                let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
                // It may have ended, and its number may be another process's.
                if children().contains(&child) {
                    let signal = if killed % 2 == 0 {
                        libc::SIGKILL
                    } else {
                        libc::SIGSTOP
                    };
                    // SAFETY: no memory is given.
                    let sent = unsafe {
                        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, 0, 0)
                    };
                    killed += u64::from(sent == 0);
                }
            }
        }
        killed
    }

    /// As a debugger would.
    fn write_from_outside(&self, writer: usize) {
        let mut random = Random(writer as u64 + 1);
        while self.goes_on() {
            let page = self.page(writer, &mut random);
            for word in [random.next(), self.normal(page)] {
                let mut bytes = word.to_ne_bytes();
                let from = libc::iovec {
                    iov_base: bytes.as_mut_ptr().cast(),
                    iov_len: 8,
                };
                let to = libc::iovec {
                    iov_base: (self.pages.address(page) + WORD * 8) as *mut _,
                    iov_len: 8,
                };
                let call = Instant::now();
                // SAFETY: a word of our own memory.
                let written = unsafe { libc::process_vm_writev(libc::getpid(), &from, 1, &to, 1, 0) };
                assert_eq!(written, 8, "{}", std::io::Error::last_os_error());
                let took = call.elapsed();
                self.check(page, word, 20, &format!("process_vm_writev, in {took:?}"));
                self.writes.fetch_add(1, Ordering::Relaxed);
            }
            if random.next().is_multiple_of(16) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// What the file has for a page.
    fn in_file(&self, page: usize, other: bool) -> (i64, u64) {
        let offset = i64::try_from((page * 2 + usize::from(other)) * PAGE_SIZE).expect("a small file");
        let word = if other {
            OTHER + page as u64
        } else {
            self.normal(page)
        };
        (offset, word)
    }

    fn read_directly(&self, writer: usize, file: &OwnedFd) {
        let mut random = Random(writer as u64 + 1);
        while self.goes_on() {
            let page = self.page(writer, &mut random);
            for other in [true, false] {
                let (offset, word) = self.in_file(page, other);
                let to = self.pages.address(page) as *mut libc::c_void;
                // SAFETY: a page of our own.
                let got = unsafe { libc::pread(file.as_raw_fd(), to, PAGE_SIZE, offset) };
                assert_eq!(
                    got,
                    PAGE_SIZE.cast_signed(),
                    "{}",
                    std::io::Error::last_os_error()
                );
                self.check(page, word, 0, "direct read");
                self.reads.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn read_into_buffers(&self, writer: usize, file: &OwnedFd) {
        let mut random = Random(writer as u64 + 1);
        let mut ring = IoUring::new(4).expect("io_uring");
        for n in 1u64.. {
            if !self.goes_on() {
                break;
            }
            let page = self.page(writer, &mut random);
            let buffer = libc::iovec {
                iov_base: self.pages.address(page) as *mut _,
                iov_len: PAGE_SIZE,
            };
            // SAFETY: the page is never unmapped, and only accessed through raw pointers.
            unsafe { ring.submitter().register_buffers(&[buffer]) }.expect("buffers are registered");
            if n.is_multiple_of(HELD) {
                std::thread::sleep(2 * PHASE);
            }
            for other in [true, false] {
                // Pinned for a moment before, so that pins are met that do nothing.
                std::thread::sleep(Duration::from_micros(random.next() % 300));
                let (offset, word) = self.in_file(page, other);
                let to = self.pages.address(page) as *mut u8;
                #[allow(clippy::cast_possible_truncation)] // a page
                let read = opcode::ReadFixed::new(types::Fd(file.as_raw_fd()), to, PAGE_SIZE as u32, 0)
                    .offset(offset.cast_unsigned())
                    .build();
                // SAFETY: the buffer is registered and stays mapped.
                unsafe { ring.submission().push(&read) }.expect("the ring has room");
                ring.submit_and_wait(1).expect("reads are done");
                let done: Vec<i32> = ring.completion().map(|done| done.result()).collect();
                assert_eq!(done, [4096]);
                self.check(page, word, 0, "fixed buffer");
                self.reads.fetch_add(1, Ordering::Relaxed);
            }
            ring.submitter()
                .unregister_buffers()
                .expect("buffers are unregistered");
        }
    }
}
