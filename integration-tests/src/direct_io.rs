//! Direct I/O into pages under merging: the data of a read whose page was pinned must arrive.
#![allow(unsafe_code)] // reads into raw pages

use crate::huge::HUGE_PAGES;
use crate::memory::Pages;
use crate::store::StoreThread;
use io_uring::{IoUring, opcode, types};
use rustix::fs::{Mode, OFlags};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, DedupService, Policy, ServiceStats};
use vmm_dedup_protocol::PAGE_SIZE;

/// Pages that reads go into.
const TARGETS: usize = 64;
/// Pages with the same content as those before a read, so that there is a twin to merge with.
const TWINS: usize = 64;
/// Pages of the file, each recognisable.
const FILE_PAGES: u64 = 256;
/// Content of the targets before a read; 0 is the zero page.
const BEFORE: [u64; 2] = [0, 77];
const FILE_ID: u64 = 1000;
/// Longest time to wait, after the last read, for a huge page to be built.
const PATIENCE: Duration = Duration::from_secs(120);

/// Pins the first pages, until [`unpin`].
///
/// # Panics
/// If the kernel does not let us.
#[must_use]
pub fn pin(pages: &Pages, count: usize) -> IoUring {
    let ring = IoUring::new(8).expect("io_uring");
    register(&ring, pages, 0..count);
    ring
}

/// Ends it. (Closing the ring ends it as well, but some time later.)
///
/// # Panics
/// If the kernel does not let us.
pub fn unpin(ring: &IoUring) {
    let done = ring.submitter().unregister_buffers();
    done.expect("buffers are unregistered");
}

fn register(ring: &IoUring, pages: &Pages, which: impl Iterator<Item = usize>) {
    let buffer = |page: usize| libc::iovec {
        iov_base: pages.address(page) as *mut _,
        iov_len: PAGE_SIZE,
    };
    let buffers: Vec<libc::iovec> = which.map(buffer).collect();
    // SAFETY: the pages are never unmapped, and only accessed through raw pointers.
    unsafe { ring.submitter().register_buffers(&buffers) }.expect("buffers are registered");
}

/// What happened.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Reads done, each of a page.
    pub reads: u64,
    /// The service's account.
    pub stats: ServiceStats,
}

/// How pages are read.
enum Reader {
    Direct(OwnedFd),
    Uring { ring: Box<IoUring>, file: OwnedFd },
}

/// What the pages lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Small pages.
    Small,
    /// Huge pages with many twins, which are split and built again all the time: a thread reads all of them, and rests,
    /// in turn.
    Huge,
}

impl Backing {
    /// Pages from one target, or twin, to the next.
    fn stride(self) -> usize {
        match self {
            Backing::Small => 1,
            Backing::Huge => HUGE_PAGES / TARGETS,
        }
    }

    fn map(self) -> Pages {
        let count = (TARGETS + TWINS) * self.stride();
        match self {
            Backing::Small => Pages::map(count),
            Backing::Huge => {
                // And as many again, with the same pages between others than the targets.
                let pages = Pages::map_huge(2 * count);
                (0..pages.count()).for_each(|page| pages.fill(page, self.between(page)));
                pages
            }
        }
    }

    /// What a page holds that is no target and no twin.
    fn between(self, page: usize) -> u64 {
        let half = (TARGETS + TWINS) * self.stride();
        let own = page.is_multiple_of(self.stride());
        FILE_ID * 2 + if own { page } else { page % half } as u64
    }

    fn target(self, number: usize) -> usize {
        number * self.stride()
    }
}

/// Reads `reads` pages with O_DIRECT.
///
/// # Panics
/// If any read's data is not where it belongs.
#[must_use]
pub fn direct(reads: u64, backing: Backing) -> Outcome {
    run(reads, backing, Reader::Direct)
}

/// Reads `reads` pages through io_uring into registered (pinned) buffers.
///
/// # Panics
/// If any read's data is not where it belongs.
#[must_use]
pub fn uring(reads: u64, backing: Backing) -> Outcome {
    run(reads, backing, |file| Reader::Uring {
        ring: Box::new(IoUring::new(128).expect("io_uring")),
        file,
    })
}

fn run(reads: u64, backing: Backing, reader: impl FnOnce(OwnedFd) -> Reader) -> Outcome {
    let store = StoreThread::start();
    // Not in /tmp, which may be a tmpfs without O_DIRECT.
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let mut reader = reader(make_file(folder.path()));
    let pages = backing.map();
    let config = Config {
        name: "direct".into(),
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        huge_policy: match backing {
            Backing::Small => Policy::Ksm,
            Backing::Huge => Policy::Smartmd,
        },
        monitor_interval_ms: 20,
        monitor_window_us: 1000,
        breaks: Breaks::Managed {
            reserve_pages: 1024,
            floor_bytes: 256 << 20,
        },
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    let stop = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        scope.spawn(|| merge_all_the_time(&service, &stop));
        if backing == Backing::Huge {
            scope.spawn(|| use_and_rest(&pages, &stop));
        }
        let start = Instant::now();
        let mut done = 0;
        let mut round = 0u64;
        let enough = || {
            let stats = service.stats();
            backing == Backing::Small || (stats.huge_splits_total > 0 && stats.huge_rebuilt_total > 0)
        };
        while done < reads || !enough() {
            done += one_round(&pages, backing, &mut reader, round);
            round += 1;
            let late = done >= reads && start.elapsed() > PATIENCE;
            assert!(!late, "nothing was built again in time: {:?}", service.stats());
        }
        stop.store(true, Ordering::Release);
        done
    });
    let stats = service.stop(true).expect("dedup stops");
    if backing == Backing::Huge {
        let others = (0..pages.count()).filter(|page| {
            let number = page / backing.stride();
            !page.is_multiple_of(backing.stride()) || number >= TARGETS + TWINS
        });
        for page in others {
            let id = backing.between(page);
            assert!(
                pages.holds(page, id),
                "page {page} changed although nobody wrote it"
            );
        }
    }
    Outcome { reads: done, stats }
}

fn merge_all_the_time(service: &DedupService, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        service.pass().expect("passes run");
    }
}

/// Makes huge pages hot and cold in turn.
fn use_and_rest(pages: &Pages, stop: &AtomicBool) {
    let start = Instant::now();
    let mut n = 1usize;
    while !stop.load(Ordering::Acquire) {
        if (start.elapsed().as_millis() / 300).is_multiple_of(2) {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        }
        for _ in 0..1000 {
            n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            std::hint::black_box(pages.load((n >> 32) % pages.count(), 0));
        }
    }
}

/// Fills the targets with what others hold as well, gives the service a moment to take them, and reads into them.
fn one_round(pages: &Pages, backing: Backing, reader: &mut Reader, round: u64) -> u64 {
    let before = BEFORE[usize::from(round % 2 == 1)];
    (0..TARGETS + TWINS).for_each(|n| pages.fill(backing.target(n), before));
    let pinned_early = round % 4 < 2;
    if pinned_early {
        reader.pin(pages, backing);
    }
    // From nothing to a few passes: the read should meet every stage of a merge.
    std::thread::sleep(std::time::Duration::from_micros(round * 37 % 1500));
    if !pinned_early {
        reader.pin(pages, backing);
    }
    reader.read(pages, backing, round);
    reader.unpin();
    for target in 0..TARGETS {
        let id = FILE_ID + file_page(round, target);
        assert!(
            pages.holds(backing.target(target), id),
            "round {round}: the read into page {target} was lost"
        );
    }
    for twin in TARGETS..TARGETS + TWINS {
        assert!(
            pages.holds(backing.target(twin), before),
            "round {round}: page {twin} changed although nobody wrote it"
        );
    }
    TARGETS as u64
}

fn file_page(round: u64, target: usize) -> u64 {
    (round * 31 + target as u64) % FILE_PAGES
}

fn make_file(folder: &Path) -> OwnedFd {
    let path = folder.join("data");
    let content = Pages::map(1);
    let mut file = std::fs::File::create(&path).expect("a file");
    for page in 0..FILE_PAGES {
        content.fill(0, FILE_ID + page);
        let bytes: Vec<u8> = (0..PAGE_SIZE / 8)
            .flat_map(|word| content.load(0, word).to_ne_bytes())
            .collect();
        file.write_all(&bytes).expect("the file is written");
    }
    file.sync_all().expect("the file is on disk");
    rustix::fs::open(
        &path,
        OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .expect("O_DIRECT")
}

impl Reader {
    /// Registers the targets as fixed buffers, which pins them.
    fn pin(&mut self, pages: &Pages, backing: Backing) {
        if let Reader::Uring { ring, .. } = self {
            register(ring, pages, (0..TARGETS).map(|n| backing.target(n)));
        }
    }

    fn unpin(&mut self) {
        if let Reader::Uring { ring, .. } = self {
            unpin(ring);
        }
    }

    fn read(&mut self, pages: &Pages, backing: Backing, round: u64) {
        match self {
            Reader::Direct(file) => {
                for target in 0..TARGETS {
                    let offset = file_page(round, target) * PAGE_SIZE as u64;
                    let to = pages.address(backing.target(target)) as *mut libc::c_void;
                    // SAFETY: a page of our mapping, which no reference points into.
                    let got = unsafe { libc::pread(file.as_raw_fd(), to, PAGE_SIZE, offset.cast_signed()) };
                    assert_eq!(
                        got,
                        PAGE_SIZE.cast_signed(),
                        "{}",
                        std::io::Error::last_os_error()
                    );
                }
            }
            Reader::Uring { ring, file } => {
                for target in 0..TARGETS {
                    let to = pages.address(backing.target(target)) as *mut u8;
                    let fd = types::Fd(file.as_raw_fd());
                    #[allow(clippy::cast_possible_truncation)] // TARGETS and PAGE_SIZE are small
                    let read = opcode::ReadFixed::new(fd, to, PAGE_SIZE as u32, target as u16)
                        .offset(file_page(round, target) * PAGE_SIZE as u64)
                        .build();
                    // SAFETY: the buffer is registered and stays mapped.
                    unsafe { ring.submission().push(&read) }.expect("the ring has room");
                }
                ring.submit_and_wait(TARGETS).expect("reads are done");
                let mut done = 0;
                for completion in ring.completion() {
                    assert_eq!(usize::try_from(completion.result()), Ok(PAGE_SIZE));
                    done += 1;
                }
                assert_eq!(done, TARGETS);
            }
        }
    }
}
