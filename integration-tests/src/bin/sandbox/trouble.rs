//! Calls that fail under the filters.

use crate::guest::{Guest, PAGES, PATIENCE, range, twins};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Call, Config, Error, Injection, Lease, Times, refusal};
use vmm_dedup_integration_tests::memory::Pages;

impl Guest {
    /// Calls fail in the middle, and leave holes in memory, or do not tell what was written; what is packed is broken; and threads
    /// die.
    pub(crate) fn has_trouble(&mut self) {
        let kernel = Breaks::Kernel {
            heal_stall_us: 1_000_000,
            heal_without_fork: true,
        };
        let fails = |call, times| Injection::begin(call, libc::ENOMEM, times);
        let every_second = |call| vec![fails(call, Times::Every(2))];
        for call in [Call::MapAnonymous, Call::MapSegment, Call::Remap] {
            // Only the scanning thread makes holes here: who touches the hole of another one dies.
            self.lives_in_trouble(kernel, || {
                vec![Injection::leaving_holes(call, libc::ENOMEM, Times::Every(2))]
            });
            self.lives_in_trouble(Breaks::managed(64, 0), || every_second(call));
        }
        for breaks in [Breaks::managed(64, 0), kernel] {
            self.lives_in_trouble(breaks, || every_second(Call::PagemapScan));
        }
        // A writer cannot be served, and his page cannot be left to the kernel by ending its protection either.
        self.lives_in_trouble(Breaks::managed(64, 0), || {
            [Call::Remap, Call::WriteProtect]
                .map(|call| fails(call, Times::Always))
                .into()
        });
        self.packs_in_trouble();
        self.packs_in_broken_memory();
        self.packs_without_memory();
        self.dies();
    }

    /// A VM whose memory is written, and given back, while something fails, and whatever else by that.
    fn lives_in_trouble(&mut self, breaks: Breaks, begin: impl Fn() -> Vec<Injection>) {
        let pages = twins();
        self.attach(Config {
            breaks,
            ..Config::default()
        });
        self.add(range(&pages, 0, PAGES));
        self.shares();
        let trouble = begin();
        let (supervisor, all) = (&self.supervisor, range(&pages, 0, PAGES).addresses());
        let start = Instant::now();
        while !trouble.iter().all(|trouble| trouble.failed() > 0) {
            assert!(start.elapsed() < PATIENCE, "nothing has failed");
            (0..PAGES / 2)
                .step_by(8)
                .for_each(|page| write_by_the_kernel(&pages, page));
            std::thread::sleep(Duration::from_millis(50));
            let _ = supervisor.lend(all.clone(), Lease::UntilTakenBack);
            supervisor.take_back(all.clone());
            let _ = supervisor.pin();
            supervisor.unpin();
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = supervisor.detach(true);
        drop(trouble);
    }

    /// Packed pages are touched, and the kernel says of their places that they are not registered.
    fn packs_in_trouble(&mut self) {
        let pages = self.packed();
        let trouble = Injection::begin(Call::Copy, libc::EINVAL, Times::Every(2));
        assert!((0..PAGES).all(|page| pages.load(page, 7) == page as u64 + 1));
        assert!(trouble.failed() > 0, "nothing has failed");
        drop(trouble);
        self.supervisor.detach(true).expect("it ends");
    }

    /// What is packed cannot be rebuilt, neither for who touches it nor when it is to be given back: there is a memory error in its
    /// place. Nobody reads those pages here but by the kernel, which says so.
    fn packs_in_broken_memory(&mut self) {
        let pages = self.packed();
        let broken = |s: &vmm_dedup::ServiceStats| s.packing.broken_total;
        let stats = || self.supervisor.stats().unwrap_or_default();
        self.supervisor.pause();
        assert!(scribble(&hidden_memory()) > 0, "nothing is packed");
        touch_by_the_kernel(&pages, 0..PAGES / 2);
        self.supervisor.resume();
        self.wait("a broken page", |s| broken(s) > 0);
        let touched = broken(&stats());
        let _ = self
            .supervisor
            .lend(range(&pages, 0, PAGES).addresses(), Lease::UntilTakenBack);
        self.wait("more of them", |s| broken(s) > touched);
        let _ = self.supervisor.detach(true);
    }
}

impl Guest {
    /// The host has no memory for what is packed: neither when a part of the VM's memory goes, nor when it is refused, nor when it ends.
    fn packs_without_memory(&mut self) {
        let pages = self.packed();
        let lack = Injection::begin(Call::Copy, libc::ENOMEM, Times::Always);
        let gone = range(&pages, 0, PAGES / 4).addresses();
        self.supervisor.remove_range(gone).expect("it goes");
        let refused = self.supervisor.refuse(refusal::confidential());
        assert!(matches!(refused, Err(Error::NotUnmerged(_))), "{refused:?}");
        self.supervisor.detach(false).expect("it ends");
        assert!(lack.failed() > 0, "nothing has failed");
        pages.renew();
    }
}

/// Lets the kernel write a page, which waits with that while there is a hole in its place.
fn write_by_the_kernel(pages: &Pages, page: usize) {
    let zeros = std::fs::File::open("/dev/zero").expect("it is there");
    // SAFETY: the kernel checks the address; a word of a page that is only reached by volatile accesses.
    while unsafe { libc::pread(zeros.as_raw_fd(), pages.address(page) as *mut _, 8, 0) } != 8 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lets the kernel read pages, which for each that is a memory error only says so.
fn touch_by_the_kernel(pages: &Pages, touched: std::ops::Range<usize>) {
    let file = tempfile::tempfile().expect("a file");
    for page in touched {
        // SAFETY: the kernel checks the address, and takes 8 bytes.
        unsafe { libc::pwrite(file.as_raw_fd(), pages.address(page) as *const _, 8, 0) };
    }
}

/// Memory of the engine's that holds what guests hold, and of which nobody waits for a page: it is nobody else's, in no core dump and in no
/// child.
fn hidden_memory() -> Vec<std::ops::Range<usize>> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("procfs");
    let (mut place, mut hidden) = (0..0, Vec::new());
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if first == "VmFlags:" {
            let flags: Vec<&str> = words.collect();
            let has = |flag| flags.contains(&flag);
            let waited_for = has("um") || has("uw");
            if has("dd") && has("dc") && has("wr") && !has("sh") && !waited_for {
                hidden.push(place.clone());
            }
        } else if let Some((start, end)) = first.split_once('-') {
            let parse = |address| usize::from_str_radix(address, 16);
            if let (Ok(start), Ok(end)) = (parse(start), parse(end)) {
                place = start..end;
            }
        }
    }
    hidden
}

/// Writes something else over memory; how much of it there is.
fn scribble(memory: &[std::ops::Range<usize>]) -> usize {
    for range in memory {
        // SAFETY: mapped, and nobody uses it while the service rests: what is packed there is broken, which is what is wanted.
        unsafe { std::ptr::write_bytes(range.start as *mut u8, 0xff, range.len()) };
    }
    memory.len()
}
