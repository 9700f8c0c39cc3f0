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
/// In huge pages: places that are read into in turn, for so many rounds each; meanwhile the others are used or rest.
const STATIONS: usize = 4;
const ROUNDS_AT_STATION: u64 = 32;
/// How long one station is used at a time. It rests three times as long, in which it gets cold and is split.
const USE: Duration = Duration::from_millis(80);
/// Reads for each huge page split, and for each built again.
const READS_PER_CONVERSION: u64 = 320;
/// Memory wears out: where the kernel copied a page of a shared range itself, it is not built again. After so long without
/// a huge page split and one built again all of it is replaced.
const WORN: Duration = Duration::from_secs(40);

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
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Reads done, each of a page.
    pub reads: u64,
    /// Pages merged.
    pub merges: u64,
    /// Times that a page was not taken since it was pinned.
    pub pinned: u64,
    /// Pages taken that had changed, and put back.
    pub put_back: u64,
    /// Huge pages split.
    pub split: u64,
    /// Huge pages built again.
    pub rebuilt: u64,
}

impl Outcome {
    fn new(reads: u64, stats: &ServiceStats) -> Self {
        Self {
            reads,
            merges: stats.merges_total + stats.zero_merges_total,
            pinned: stats.refused_pinned_total,
            put_back: stats.mismatches_total,
            split: stats.huge_splits_total,
            rebuilt: stats.huge_rebuilt_total,
        }
    }

    fn add(&mut self, more: &Self) {
        self.reads += more.reads;
        self.merges += more.merges;
        self.pinned += more.pinned;
        self.put_back += more.put_back;
        self.split += more.split;
        self.rebuilt += more.rebuilt;
    }

    /// Huge pages that were split as well as built again.
    fn conversions(&self) -> u64 {
        self.split.min(self.rebuilt)
    }
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
    /// Huge pages with many twins, which are split and built again all the time: each is used for a while, then rests.
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

    fn stations(self) -> usize {
        match self {
            Backing::Small => 1,
            Backing::Huge => STATIONS,
        }
    }

    fn station_pages(self) -> usize {
        (TARGETS + TWINS) * self.stride()
    }

    fn map(self) -> Pages {
        let count = self.station_pages() * self.stations();
        match self {
            Backing::Small => Pages::map(count),
            Backing::Huge => {
                let pages = Pages::map_huge(count);
                (0..count).for_each(|page| pages.fill(page, self.between(page)));
                pages
            }
        }
    }

    /// What a page holds that is no target and no twin: the same in all stations.
    fn between(self, page: usize) -> u64 {
        FILE_ID * 2 + (page % self.station_pages()) as u64
    }

    fn station(self, round: u64) -> usize {
        usize::try_from(round / ROUNDS_AT_STATION).expect("a number of stations") % self.stations()
    }

    /// A target, or behind those a twin, of a round.
    fn place(self, round: u64, number: usize) -> usize {
        self.station(round) * self.station_pages() + number * self.stride()
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

fn run(reads: u64, backing: Backing, reader: fn(OwnedFd) -> Reader) -> Outcome {
    let conversions = match backing {
        Backing::Small => 0,
        Backing::Huge => reads / READS_PER_CONVERSION,
    };
    let mut done = Outcome::default();
    while done.reads < reads || done.conversions() < conversions {
        let (reads, conversions) = (
            reads.saturating_sub(done.reads),
            conversions.saturating_sub(done.conversions()),
        );
        let more = run_until_worn(reads, conversions, backing, reader);
        assert!(
            backing == Backing::Small || more.conversions() > 0,
            "no conversions: {more:?}"
        );
        done.add(&more);
    }
    done
}

fn run_until_worn(reads: u64, conversions: u64, backing: Backing, reader: fn(OwnedFd) -> Reader) -> Outcome {
    vmm_dedup::share_whatever_it_costs(true);
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
        sampling: vmm_dedup::Sampling {
            interval_ms: 20,
            window_us: 1000,
        },
        breaks: Breaks::managed(1024, 256 << 20),
        ..Config::default()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    let stop = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        scope.spawn(|| merge_all_the_time(&service, &stop));
        if backing == Backing::Huge {
            scope.spawn(|| use_and_rest(&pages, &stop));
        }
        let (mut done, mut round) = (0, 0);
        let (mut converted, mut since) = (0, Instant::now());
        let mut last = vec![None; backing.stations()];
        while done < reads || converted < conversions {
            // What was read here last is still there, whatever became of its pages meanwhile.
            let before = last[backing.station(round)].replace(round);
            before.iter().for_each(|round| check(&pages, backing, *round));
            done += one_round(&pages, backing, &mut reader, round);
            round += 1;
            let now = Outcome::new(done, &service.stats()).conversions();
            if now > converted || backing == Backing::Small {
                (converted, since) = (now, Instant::now());
            }
            if since.elapsed() > WORN {
                break;
            }
        }
        stop.store(true, Ordering::Release);
        last.iter()
            .flatten()
            .for_each(|round| check(&pages, backing, *round));
        done
    });
    let stats = service.stop(true).expect("dedup stops");
    let between = (0..pages.count()).filter(|page| !page.is_multiple_of(backing.stride()));
    for page in between {
        assert!(
            pages.holds(page, backing.between(page)),
            "page {page} changed although nobody wrote it"
        );
    }
    Outcome::new(done, &stats)
}

fn merge_all_the_time(service: &DedupService, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        service.pass().expect("passes run");
    }
}

/// Makes the stations hot in turn.
fn use_and_rest(pages: &Pages, stop: &AtomicBool) {
    let start = Instant::now();
    let mut n = 1usize;
    while !stop.load(Ordering::Acquire) {
        let slot = usize::try_from(start.elapsed().as_millis() / USE.as_millis()).expect("a time");
        let first = slot % STATIONS * Backing::Huge.station_pages();
        for _ in 0..1000 {
            n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = first + (n >> 32) % Backing::Huge.station_pages();
            std::hint::black_box(pages.load(page, 0));
        }
    }
}

/// What the targets of a round, and then their twins, hold before it.
fn before(round: u64) -> u64 {
    BEFORE[usize::from(round % 2 == 1)]
}

/// Fills the targets with what others hold as well, gives the service a moment to take them, and reads into them.
fn one_round(pages: &Pages, backing: Backing, reader: &mut Reader, round: u64) -> u64 {
    (0..TARGETS + TWINS).for_each(|n| pages.fill(backing.place(round, n), before(round)));
    let pinned_early = round % 4 < 2;
    if pinned_early {
        reader.pin(pages, backing, round);
    }
    // From nothing to a few passes: the read should meet every stage of a merge.
    std::thread::sleep(std::time::Duration::from_micros(round * 37 % 1500));
    if !pinned_early {
        reader.pin(pages, backing, round);
    }
    reader.read(pages, backing, round);
    reader.unpin();
    check(pages, backing, round);
    TARGETS as u64
}

fn check(pages: &Pages, backing: Backing, round: u64) {
    for target in 0..TARGETS {
        let id = FILE_ID + file_page(round, target);
        assert!(
            pages.holds(backing.place(round, target), id),
            "round {round}: the read into page {target} was lost"
        );
    }
    for twin in TARGETS..TARGETS + TWINS {
        assert!(
            pages.holds(backing.place(round, twin), before(round)),
            "round {round}: page {twin} changed although nobody wrote it"
        );
    }
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
    open_direct(&path)
}

/// Opens a file for direct reads.
pub(crate) fn open_direct(path: &Path) -> OwnedFd {
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).expect("O_DIRECT")
}

impl Reader {
    /// Registers the targets as fixed buffers, which pins them.
    fn pin(&mut self, pages: &Pages, backing: Backing, round: u64) {
        if let Reader::Uring { ring, .. } = self {
            register(ring, pages, (0..TARGETS).map(|n| backing.place(round, n)));
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
                    let to = pages.address(backing.place(round, target)) as *mut libc::c_void;
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
                    let to = pages.address(backing.place(round, target)) as *mut u8;
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
