//! Slots that move all the time while their pages are used: read, written and restored by threads, written to a file by direct
//! I/O, and kept in pipes meanwhile.
#![allow(unsafe_code)] // uses raw pages

use crate::memory::Pages;
use crate::store::StoreThread;
use rustix::fs::{Mode, OFlags};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vmm_dedup::{Breaks, Config, DedupService};
use vmm_dedup_protocol::PAGE_SIZE;

const PAGES: usize = 16384;
/// Pages that are replaced together; as many that stay lie between two such extents.
const EXTENT: usize = 16;
/// Of the extents that are replaced, one in so many at a time.
const SHARE: usize = 6;
/// Who uses pages that stay: each has every so manieth.
const USERS: usize = 4;
/// The word that is written.
const WORD: usize = 8;
/// Pages that one direct write takes, and that a pipe keeps at a time.
const TOGETHER: usize = 16;

/// Breaks by the kernel, and copies that forks heal: the file for direct I/O keeps the other way closed.
pub const KERNEL: Breaks = Breaks::Kernel {
    heal_stall_us: 50_000,
    heal_without_fork: false,
};
/// Breaks by the service.
pub const MANAGED: Breaks = Breaks::managed(1024, 0);

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Slots that the store moved.
    pub moves: u64,
    /// Segments that went.
    pub retired: u64,
    /// Writes by threads, each checked.
    pub writes: u64,
    /// Pages that direct writes brought to a file, each checked.
    pub direct: u64,
    /// Pages that pipes kept, each checked.
    pub kept: u64,
    /// Words that were not what they had to be.
    pub wrong: u64,
}

/// Two VMs with the same pages.
struct Fire {
    vms: [Pages; 2],
    stop: AtomicBool,
    writes: AtomicU64,
    direct: AtomicU64,
    kept: AtomicU64,
    wrong: AtomicU64,
}

/// Replaces pages around those in use until so many slots have moved and a segment has gone (or a byte is wrong, or it is over).
///
/// # Panics
/// If something does not work that has nothing to do with it.
#[must_use]
pub fn chaos(moves: u64, over: impl Fn() -> bool, breaks: Breaks) -> Outcome {
    vmm_dedup::share_whatever_it_costs(true);
    let store = StoreThread::with_metrics();
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let file = create_direct(&folder.path().join("data"));
    let fire = Fire {
        vms: [Pages::map(PAGES), Pages::map(PAGES)],
        stop: AtomicBool::new(false),
        writes: AtomicU64::new(0),
        direct: AtomicU64::new(0),
        kept: AtomicU64::new(0),
        wrong: AtomicU64::new(0),
    };
    let mut ids: Vec<u64> = (1..=PAGES as u64).collect();
    for vm in &fire.vms {
        (0..PAGES).for_each(|page| vm.fill(page, ids[page]));
    }
    let start_on = |n: usize| {
        let config = Config {
            name: format!("fire-{n}"),
            cpu_percent: 100,
            pass_period_ms: 3_600_000,
            breaks,
            ..Config::default()
        };
        let service = fire.vms[n].serve(&store.socket(), config);
        service.expect("dedup starts")
    };
    let services = [start_on(0), start_on(1)];
    let pass = || {
        services
            .each_ref()
            .map(|service| service.pass().expect("passes run"))
    };
    while !over() && pass().iter().any(|stats| stats.pages_mapped < PAGES as u64) {}
    std::thread::scope(|scope| {
        let (fire, file) = (&fire, &file);
        scope.spawn(|| fire.write(0, 0));
        scope.spawn(|| fire.write(1, 1));
        scope.spawn(|| fire.write_directly(0, 2, file));
        scope.spawn(|| fire.keep(1, 3));
        for round in 1u64.. {
            let chosen =
                |page: &usize| is_replaced(*page) && hash(round, *page / EXTENT).is_multiple_of(SHARE as u64);
            for page in (0..PAGES).filter(chosen) {
                ids[page] = (round << 32) | page as u64;
                fire.vms.iter().for_each(|vm| vm.fill(page, ids[page]));
            }
            // Enough for what the kernel copied to be found, keyed twice, published and mapped.
            (0..40).for_each(|_| _ = pass());
            let ends = fire.wrong.load(Ordering::Relaxed) > 0 || over();
            // A service looks every other second at most whether it still maps a segment that went.
            let done = store.metric("moved_total") >= moves && store.metric("segments_retired_total") > 0;
            if ends || done {
                break;
            }
        }
        fire.stop.store(true, Ordering::Release);
    });
    let mut wrong = fire.wrong.load(Ordering::Relaxed);
    let (moves, retired) = (
        store.metric("moved_total"),
        store.metric("segments_retired_total"),
    );
    let count_wrong = || {
        let wrong = |vm: &Pages| {
            (0..PAGES)
                .filter(|page| !vm.holds(*page, ids[*page]))
                .fold(0, |n, _| n + 1)
        };
        fire.vms.iter().map(wrong).sum::<u64>()
    };
    wrong += count_wrong();
    let stop = |service: DedupService| service.stop(true).expect("dedup stops");
    services.into_iter().for_each(|service| _ = stop(service));
    wrong += count_wrong();
    fire.vms.iter().for_each(Pages::renew);
    Outcome {
        moves,
        retired,
        writes: fire.writes.into_inner(),
        direct: fire.direct.into_inner(),
        kept: fire.kept.into_inner(),
        wrong,
    }
}

fn is_replaced(page: usize) -> bool {
    page / EXTENT % 2 == 1
}

/// A number that is random enough (the finaliser of splitmix64).
fn hash(a: u64, b: usize) -> u64 {
    let mut n = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b as u64;
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// A file for direct I/O, both ways.
fn create_direct(path: &Path) -> OwnedFd {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).expect("O_DIRECT")
}

impl Fire {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Acquire)
    }

    fn is_wrong(&self, what: &str, page: usize) {
        eprintln!("{what}: page {page} is wrong");
        self.wrong.fetch_add(1, Ordering::Relaxed);
        self.stop.store(true, Ordering::Release);
    }

    /// Pages that stay, in turn, of one user.
    fn page(user: usize, n: u64) -> usize {
        let all = PAGES / 2 / USERS;
        let place = usize::try_from(hash(n, user)).expect("64 bits") % all * USERS + user;
        place / EXTENT * 2 * EXTENT + place % EXTENT
    }

    fn normal(&self, vm: usize, page: usize) -> u64 {
        self.vms[vm].expected(page as u64 + 1, WORD)
    }

    /// A thread as a vCPU: reads pages, and sometimes writes and restores one.
    fn write(&self, vm: usize, user: usize) {
        for n in 0u64.. {
            if !self.goes_on() {
                return;
            }
            let page = Self::page(user, n);
            if !self.vms[vm].holds(page, page as u64 + 1) {
                self.is_wrong("at rest", page);
            }
            if n.is_multiple_of(8) {
                self.vms[vm].store(page, WORD, n);
                if self.vms[vm].load(page, WORD) != n {
                    self.is_wrong("written", page);
                }
                self.vms[vm].store(page, WORD, self.normal(vm, page));
                self.writes.fetch_add(2, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(500));
            }
        }
    }

    /// What pages of a VM's consist of.
    fn parts(&self, vm: usize, pages: &[usize]) -> Vec<libc::iovec> {
        let part = |page: &usize| libc::iovec {
            iov_base: self.vms[vm].address(*page) as *mut _,
            iov_len: PAGE_SIZE,
        };
        pages.iter().map(part).collect()
    }

    /// Writes pages to a file, reads that, and compares.
    fn write_directly(&self, vm: usize, user: usize, file: &OwnedFd) {
        let bounce = Pages::map(TOGETHER);
        let every = |n: u64| -> Vec<usize> {
            let numbers = (0..TOGETHER as u64).map(|k| n * TOGETHER as u64 + k);
            numbers.map(|n| Self::page(user, n)).collect()
        };
        for n in 0u64.. {
            if !self.goes_on() {
                return;
            }
            let pages = every(n);
            let parts = self.parts(vm, &pages);
            let count = i32::try_from(TOGETHER).expect("small");
            // SAFETY: the parts are whole pages of our own, which the kernel only reads.
            let written = unsafe { libc::pwritev(file.as_raw_fd(), parts.as_ptr(), count, 0) };
            let all = (TOGETHER * PAGE_SIZE).cast_signed();
            assert_eq!(written, all, "{}", std::io::Error::last_os_error());
            let to = bounce.address(0) as *mut libc::c_void;
            // SAFETY: memory of our own, of so many pages.
            let read = unsafe { libc::pread(file.as_raw_fd(), to, TOGETHER * PAGE_SIZE, 0) };
            assert_eq!(read, all, "{}", std::io::Error::last_os_error());
            for (at, page) in pages.iter().enumerate() {
                if !bounce.holds(at, *page as u64 + 1) {
                    self.is_wrong("direct write", *page);
                }
            }
            self.direct.fetch_add(TOGETHER as u64, Ordering::Relaxed);
        }
    }

    /// Keeps pages in a pipe for a while: the pipe refers to the pages that were there, which may be of a file that goes.
    fn keep(&self, vm: usize, user: usize) {
        let (mut out, into) = std::io::pipe().expect("a pipe");
        let mut bytes = vec![0u8; PAGE_SIZE];
        for n in 0u64.. {
            if !self.goes_on() {
                return;
            }
            let number = |k: u64| Self::page(user, n * TOGETHER as u64 + k);
            let pages: Vec<usize> = (0..TOGETHER as u64).map(number).collect();
            let parts = self.parts(vm, &pages);
            // SAFETY: the parts are whole pages of our own, which the pipe only reads.
            let kept = unsafe { libc::vmsplice(into.as_raw_fd(), parts.as_ptr(), parts.len(), 0) };
            assert_eq!(kept, (TOGETHER * PAGE_SIZE).cast_signed());
            std::thread::sleep(Duration::from_millis(hash(n, 7) % 3000));
            for page in pages {
                out.read_exact(&mut bytes).expect("the pipe has a page");
                let words = bytes.chunks_exact(8).enumerate();
                let right = |(word, found): (usize, &[u8])| {
                    found == self.vms[vm].expected(page as u64 + 1, word).to_ne_bytes()
                };
                if !words.into_iter().all(right) {
                    self.is_wrong("kept in a pipe", page);
                }
                self.kept.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
