//! Windows over memory of the test's own.

use super::*;
use crate::sys::inject::{Injection, Times};
use crate::sys::pagemap::Pagemap;
use crate::sys::vma::{self, Anonymous};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vmm_dedup_trouble::{UsedUp, Watchdog};

const PAGES: usize = 16;

/// "Guest" memory that is tracked, with a number in each page.
struct Guest {
    uffd: Arc<Uffd>,
    area: Anonymous,
}

impl Guest {
    /// `None`, said aloud, where there is no userfaultfd.
    fn new() -> Option<Self> {
        let Ok(uffd) = Uffd::tracker() else {
            assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
            eprintln!("SKIPPED: no userfaultfd");
            return None;
        };
        let guest = Self {
            uffd: Arc::new(uffd),
            area: Anonymous::new(PAGES).unwrap(),
        };
        (0..PAGES).for_each(|n| guest.word(n).store(n as u64, Ordering::Relaxed));
        guest
            .uffd
            .register(guest.area.base(), bytes(PAGES), Mode::Wp)
            .unwrap();
        Some(guest)
    }

    #[allow(unsafe_code)] // a word of the test's own memory
    fn word(&self, page: usize) -> &AtomicU64 {
        // SAFETY: mapped, aligned, and only ever used as this.
        unsafe { &*((self.area.base() + bytes(page)) as *const AtomicU64) }
    }

    fn open(&self, scratch: &mut Scratch, pages: Range<usize>) -> Window<'_> {
        let place = scratch.place(PAGES);
        Window::open(&self.uffd, self.area.base(), place, &PageSet::of([pages])).unwrap()
    }

    /// Every page is where it was, and nothing waits: reading would hang else.
    fn is_whole(&self) -> bool {
        (0..PAGES).all(|page| self.word(page).load(Ordering::Relaxed) == page as u64)
    }
}

#[test]
fn what_is_away_goes_back_when_a_window_is_dropped() {
    let Some(guest) = Guest::new() else { return };
    let mut scratch = Scratch::new(guest.uffd.clone()).unwrap();
    let mut window = guest.open(&mut scratch, 0..PAGES);
    window.take(0..PAGES);
    assert_eq!(window.became(0..PAGES), [Taken::Yes; PAGES]);
    assert_eq!(window.away().len(), PAGES);
    window.put_back(3..5);
    assert_eq!(window.away().len(), PAGES - 2);
    drop(window);
    assert!(guest.is_whole());
}

/// Whether the kernel says of a page that it was written since it was protected.
fn was_written(guest: &Guest, page: usize) -> bool {
    let mut pagemap = Pagemap::open().unwrap();
    let address = guest.area.base() + bytes(page);
    let mut written = false;
    let note = |_| written = true;
    pagemap.written(address..address + PAGE_SIZE, note).unwrap();
    written
}

#[test]
fn what_was_armed_and_stayed_counts_as_written() {
    let Some(guest) = Guest::new() else { return };
    let protect = || {
        guest
            .uffd
            .write_protect(guest.area.base(), bytes(PAGES), true)
            .unwrap();
    };
    protect();
    let mut scratch = Scratch::new(guest.uffd.clone()).unwrap();
    assert!(!was_written(&guest, 5));
    let mut window = guest.open(&mut scratch, 2..9);
    window.take(2..4);
    guest.word(5).store(5, Ordering::Relaxed);
    drop(window);
    assert!((2..9).all(|page| was_written(&guest, page)) && guest.is_whole());
    assert!(!was_written(&guest, 1) && !was_written(&guest, 9));
    // And is tracked as before.
    protect();
    assert!(!was_written(&guest, 5));
    guest.word(5).store(5, Ordering::Relaxed);
    assert!(was_written(&guest, 5));
}

#[test]
fn where_the_mark_of_unwritten_pages_cannot_be_taken_off_they_are_not_tracked_until_the_next_pass() {
    let Some(guest) = Guest::new() else { return };
    let (base, all) = (guest.area.base(), bytes(PAGES));
    guest.uffd.write_protect(base, all, true).unwrap();
    let mut scratch = Scratch::new(guest.uffd.clone()).unwrap();
    let window = guest.open(&mut scratch, 2..9);
    let injection = Injection::begin(Call::WriteProtect, libc::EAGAIN, Times::Always);
    drop(window);
    assert!(injection.failed() > 0);
    drop(injection);
    let for_the_next_pass = guest.uffd.take_untracked();
    assert!(
        for_the_next_pass
            .into_iter()
            .eq(std::iter::once(base + bytes(2)..base + bytes(9)))
    );
    // Which does this.
    guest.uffd.register(base + bytes(2), bytes(7), Mode::Wp).unwrap();
    assert!((2..9).all(|page| was_written(&guest, page)) && guest.is_whole());
    assert!(!was_written(&guest, 1) && !was_written(&guest, 9));
}

#[test]
fn a_panic_leaves_the_guest_whole() {
    let Some(guest) = Guest::new() else { return };
    let mut scratch = Scratch::new(guest.uffd.clone()).unwrap();
    let reader_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let died = catch_unwind(AssertUnwindSafe(|| {
            let mut window = guest.open(&mut scratch, 2..9);
            window.take(2..9);
            // A "vCPU" that waits for a page which is away.
            scope.spawn(|| {
                assert_eq!(guest.word(4).load(Ordering::Relaxed), 4);
                reader_done.store(true, Ordering::Release);
            });
            while !window.somebody_waits() {
                std::thread::yield_now();
            }
            panic!("while pages are away");
        }));
        assert!(died.is_err());
    });
    assert!(reader_done.load(Ordering::Acquire) && guest.is_whole());
}

#[test]
fn zeros_and_replacements_do_not_go_back() {
    let Some(guest) = Guest::new() else { return };
    guest.word(5).store(0, Ordering::Relaxed);
    let mut scratch = Scratch::new(guest.uffd.clone()).unwrap();
    let mut window = guest.open(&mut scratch, 4..8);
    window.take(4..8);
    window.put_zeros(5..6).unwrap();
    window.leave_empty(6..7);
    assert_eq!(window.away().runs().collect::<Vec<_>>(), [4..5, 7..8]);
    window.close();
    let read = [4, 5, 6, 7].map(|page| guest.word(page).load(Ordering::Relaxed));
    assert_eq!(read, [4, 0, 0, 7]);
}

#[test]
fn a_window_that_cannot_be_armed_changes_nothing() {
    let Some(guest) = Guest::new() else { return };
    let mut scratch = Scratch::new(guest.uffd.clone()).unwrap();
    let place = scratch.place(PAGES);
    let other = Uffd::tracker().unwrap();
    guest
        .uffd
        .unregister(guest.area.base() + bytes(8), bytes(2))
        .unwrap();
    other
        .register(guest.area.base() + bytes(8), bytes(2), Mode::Wp)
        .unwrap();
    let pages = PageSet::of([0..2, 8..9]);
    assert!(matches!(
        Window::open(&guest.uffd, guest.area.base(), place, &pages),
        Err(Error::Register { .. })
    ));
    assert!(guest.is_whole());
}

/// The kernel arms the first of two mappings, and then lacks one more for splitting the second.
#[test]
fn a_window_that_was_armed_in_part_leaves_nothing_armed() {
    let Some(guest) = Guest::new() else { return };
    let mut scratch = Scratch::new(guest.uffd.clone()).unwrap();
    let place = scratch.place(PAGES);
    let (start, half) = (guest.area.base(), bytes(PAGES / 2));
    vma::advise_again(&(start..start + half), libc::MADV_DONTDUMP);
    // Before: a thread needs mappings.
    let _watchdog = Watchdog::start(Duration::from_secs(60), || ());
    let used_up = match UsedUp::begin() {
        Ok(used_up) => used_up,
        Err(reason) => return eprintln!("SKIPPED: {reason}"),
    };
    let pages = PageSet::of(std::iter::once(0..PAGES / 2 + 2));
    let opened = Window::open(&guest.uffd, start, place, &pages);
    let refused =
        matches!(&opened, Err(Error::Register { source, .. }) if source.raw_os_error() == Some(libc::ENOMEM));
    drop(opened);
    drop(used_up);
    assert!(refused, "the kernel had a mapping left");
    assert!(guest.is_whole());
    vma::discard_own(start + bytes(2), PAGE_SIZE).unwrap();
    assert_eq!(guest.word(2).load(Ordering::Relaxed), 0, "nobody waits there");
}

/// Bytes of page tables of this process.
fn page_tables() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmPTE:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn taking_pages_needs_no_memory_for_page_tables() {
    let Some(guest) = Guest::new() else { return };
    let mut scratch = Scratch::new(guest.uffd.clone()).unwrap();
    // The last places of scratch memory, 4 MiB behind its first ones, which have a table of their own.
    for _ in 1..2 * MAX_WINDOW / PAGES {
        scratch.place(PAGES);
    }
    let before = page_tables();
    let mut window = guest.open(&mut scratch, 0..PAGES);
    window.take(0..PAGES);
    assert_eq!(window.became(0..PAGES), [Taken::Yes; PAGES]);
    let taken = page_tables();
    window.close();
    assert_eq!(taken, before);
}
