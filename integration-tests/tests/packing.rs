//! Pages that rest are packed by a service, and come back whatever happens to them: touched by guests, by system calls and devices,
//! given up, lent, removed, at the end of the service.
#![allow(unsafe_code)] // raw memory
#![allow(clippy::cast_possible_truncation)] // a few pages

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_dedup::{
    Breaks, Call, Config, DedupService, Error, HostRange, Injection, Observer, Options, Pack, Settings,
    Setup, Site, Status, Supervisor, Switch, Times, Watch, refusal,
};
use vmm_dedup_integration_tests::direct_io::{pin, unpin};
use vmm_dedup_integration_tests::memory::{Pages, flags_of};
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::vm::Guest;
use vmm_dedup_integration_tests::windows::{Heap, Windows};
use vmm_dedup_integration_tests::{need_kvm, need_userfaultfd};
use vmm_dedup_payload::{PayloadConfig, WorkingSet};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_refvmm::ThpMode;
use vmm_dedup_trouble::Watchdog;

#[global_allocator]
static HEAP: Heap = Heap;

const WORDS: usize = PAGE_SIZE / 8;
/// Pages of a guest: more than one chunk.
const PAGES: usize = 768;
/// The first so many have a twin each.
const TWINS: usize = 64;
const PATIENCE: Duration = Duration::from_secs(60);
/// A thread that waits for a page for ever cannot be ended otherwise.
const HANGS: Duration = Duration::from_secs(100);

fn config() -> Config {
    Config {
        pass_period_ms: 10,
        cpu_percent: 100,
        pack: Pack {
            on: true,
            idle_ms: 30,
            ..Pack::default()
        },
        ..Config::default()
    }
}

/// Content that packs well, another for each page and round; of twins the same.
fn content(page: usize, word: usize, round: u64) -> u64 {
    let number = if page < TWINS { page / 2 } else { page } as u64 + 1 + (round << 20);
    match word % 32 {
        5 => number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        9 => number ^ word as u64,
        _ => 0x2020,
    }
}

fn fill(pages: &Pages, which: Range<usize>, round: u64) {
    for page in which {
        (0..WORDS).for_each(|word| pages.store(page, word, content(page, word, round)));
    }
}

fn holds(pages: &Pages, page: usize, round: u64) -> bool {
    (0..WORDS).all(|word| pages.load(page, word) == content(page, word, round))
}

fn assert_hold(pages: &Pages, which: Range<usize>, round: u64) {
    which.for_each(|page| assert!(holds(pages, page, round), "page {page}"));
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn packed(service: &DedupService) -> usize {
    usize::try_from(service.stats().packing.pages).expect("few")
}

fn range(pages: &Pages, which: &Range<usize>) -> HostRange {
    HostRange::try_new(pages.address(which.start), which.len() * PAGE_SIZE).expect("aligned")
}

/// A guest all of whose pages without a twin are packed.
fn packed_guest(breaks: Breaks) -> (StoreThread, Pages, DedupService) {
    let store = StoreThread::start();
    let pages = Pages::map(PAGES);
    fill(&pages, 0..PAGES, 0);
    let config = Config { breaks, ..config() };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    wait_until("packing", || packed(&service) == PAGES - TWINS);
    (store, pages, service)
}

/// Nobody waits for a page of them, now or later: none is registered for missing pages.
fn assert_not_registered(pages: &Pages) {
    for flags in flags_of(pages) {
        assert!(!flags.contains(" um"), "{flags}");
    }
}

#[test]
fn pages_that_rest_and_have_no_twin_are_packed_and_come_back_when_they_are_touched() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (_store, pages, service) = packed_guest(Breaks::KERNEL);
    let stats = service.stats();
    assert_eq!(stats.pages_mapped as usize, TWINS);
    assert!(stats.packing.bytes > 0 && stats.packing.bytes < (PAGES * PAGE_SIZE) as u64 / 2);
    assert!(
        flags_of(&pages).iter().all(|flags| flags.contains(" dc")),
        "no child is to have it"
    );
    assert_hold(&pages, 0..PAGES, 0);
    let stats = service.pass().expect("a pass");
    assert_eq!(stats.packing.touched_total as usize, PAGES - TWINS);
    assert_eq!(stats.packing.early_total, stats.packing.touched_total);
    // They are packed again, later.
    wait_until("packing again", || packed(&service) == PAGES - TWINS);
    fill(&pages, 100..200, 1);
    wait_until("packing what is new", || packed(&service) == PAGES - TWINS);
    assert_hold(&pages, 0..100, 0);
    assert_hold(&pages, 100..200, 1);
    assert_hold(&pages, 200..PAGES, 0);
    service.stop(true).expect("it stops");
    assert_not_registered(&pages);
}

/// Who waits for a page must not wait for reclaim as well.
#[test]
fn memory_is_had_before_pages_that_are_packed_are_away() {
    need_userfaultfd!();
    let windows = Windows::watch();
    let (_store, pages, service) = packed_guest(Breaks::KERNEL);
    assert_hold(&pages, 0..PAGES, 0);
    service.stop(true).expect("it stops");
    let seen = windows.seen();
    assert!(seen.away > 0, "{seen:?}");
    assert!(seen.asking.is_empty(), "{:#?}", seen.asking);
}

#[test]
fn it_is_explained() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(PAGES);
    fill(&pages, 0..PAGES, 0);
    let service = pages
        .serve_at(&store.socket(), config(), 1 << 30)
        .expect("dedup starts");
    wait_until("packing", || packed(&service) == PAGES - TWINS);
    let (explanation, _) = service.explain(None).expect("it answers");
    assert_eq!(
        (explanation.packed as usize, explanation.shared as usize),
        (PAGES - TWINS, TWINS)
    );
}

#[test]
fn nothing_is_packed_unless_it_is_wanted() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(PAGES);
    fill(&pages, 0..PAGES, 0);
    let config = Config {
        pack: Pack::default(),
        ..config()
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    wait_until("sharing", || service.stats().pages_mapped as usize == TWINS);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(packed(&service), 0);
    assert_not_registered(&pages);
    let threads = std::fs::read_dir("/proc/self/task").expect("/proc is there");
    let names = threads.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    assert!(names.into_iter().all(|name| name.trim() != "dedup-pack"));
}

fn discard_packed_pages(breaks: Breaks) {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("a discard hangs"));
    let (_store, pages, service) = packed_guest(breaks);
    let discarder = service.discarder();
    // Packed, back, and shared ones.
    assert_hold(&pages, 300..310, 0);
    // SAFETY: the test's own memory, whose content is not needed any more.
    unsafe { discarder.discard(pages.address(0), 400 * PAGE_SIZE) }.expect("it is discarded");
    (0..400).for_each(|page| assert!((0..WORDS).all(|word| pages.load(page, word) == 0), "page {page}"));
    assert_hold(&pages, 400..PAGES, 0);
    fill(&pages, 0..400, 3);
    wait_until("packing again", || packed(&service) == PAGES - TWINS);
    assert_hold(&pages, 0..400, 3);
    assert_hold(&pages, 400..PAGES, 0);
    wait_until("packing again", || packed(&service) == PAGES - TWINS);
    service.stop(false).expect("it stops");
    // The discarder outlives the service.
    assert_hold(&pages, 400..PAGES, 0);
    // SAFETY: as above.
    unsafe { discarder.discard(pages.address(0), PAGES * PAGE_SIZE) }.expect("it is discarded");
    (0..PAGES).for_each(|page| assert_eq!(pages.load(page, 0), 0));
    assert_not_registered(&pages);
}

#[test]
fn discarded_pages_are_zeros_whether_they_were_packed_or_not() {
    discard_packed_pages(Breaks::KERNEL);
}

#[test]
fn discarded_pages_are_zeros_whether_they_were_packed_or_not_with_managed_breaks() {
    discard_packed_pages(Breaks::managed(256, 0));
}

#[test]
fn a_service_that_ends_brings_everything_back() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("an end hangs"));
    let ends: [fn(DedupService); 3] = [
        |service| _ = service.stop(false).expect("it stops"),
        |service| _ = service.stop(true).expect("it stops"),
        drop,
    ];
    for end in ends {
        let (store, pages, service) = packed_guest(Breaks::KERNEL);
        end(service);
        assert_not_registered(&pages);
        drop(store);
        assert_hold(&pages, 0..PAGES, 0);
    }
}

#[test]
fn switched_off_with_unmerge_nothing_is_packed_and_paused_it_is_served() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (_store, pages, service) = packed_guest(Breaks::KERNEL);
    service.pause();
    assert_hold(&pages, 100..200, 0);
    service.resume();
    wait_until("packing again", || packed(&service) == PAGES - TWINS);
    let switch = |switch| {
        let settings = Settings {
            switch: Some(switch),
            ..Settings::default()
        };
        service.set(settings).expect("it is set");
    };
    switch(Switch::OffUnmerge);
    assert_not_registered(&pages);
    assert_hold(&pages, 0..PAGES, 0);
    switch(Switch::On);
    wait_until("packing again", || packed(&service) == PAGES - TWINS);
    assert_hold(&pages, 0..PAGES, 0);
}

#[test]
fn memory_that_is_lent_or_removed_is_back_before() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (_store, pages, service) = packed_guest(Breaks::KERNEL);
    let (lent, gone) = (0..512, 512..640);
    service.release_range(range(&pages, &lent)).expect("it is lent");
    assert_eq!(packed(&service), PAGES - 512);
    // SAFETY: as for any memory of the test's; the service leaves it alone.
    let flags: Vec<String> = flags_of(&pages)
        .into_iter()
        .filter(|flags| flags.contains(" um"))
        .collect();
    assert!(!flags.is_empty(), "the others are packed still");
    fill(&pages, lent.clone(), 5);
    std::thread::sleep(Duration::from_millis(200));
    assert_hold(&pages, lent.clone(), 5);
    service.remove_range(range(&pages, &gone)).expect("it is removed");
    assert_eq!(packed(&service), PAGES - 640);
    fill(&pages, gone.clone(), 6);
    service.resume_range(range(&pages, &lent)).expect("it is back");
    wait_until("packing again", || packed(&service) == PAGES - TWINS - gone.len());
    assert_hold(&pages, lent, 5);
    assert_hold(&pages, gone, 6);
    assert_hold(&pages, 640..PAGES, 0);
    service.stop(true).expect("it stops");
    assert_not_registered(&pages);
}

/// Waiting for memory is for a while only where there is another way.
#[test]
fn memory_that_cannot_come_back_is_not_lent_and_is_lent_later() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (_store, pages, service) = packed_guest(Breaks::KERNEL);
    let lent = 0..512;
    let lack = Injection::begin(Call::Copy, libc::ENOMEM, Times::Always);
    let refused = service.release_range(range(&pages, &lent));
    assert!(
        matches!(refused, Err(Error::NotUnmerged(left)) if left as usize == 512 - TWINS),
        "{refused:?}"
    );
    drop(lack);
    service
        .release_range(range(&pages, &lent))
        .expect("there is memory again");
    service.resume_range(range(&pages, &lent)).expect("it is back");
    wait_until("packing again", || packed(&service) == PAGES - TWINS);
    assert_hold(&pages, 0..PAGES, 0);
    service.stop(true).expect("it stops");
    assert_not_registered(&pages);
}

#[test]
fn memory_is_taken_back_although_places_of_packed_pages_could_not_go_home() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (_store, pages, service) = packed_guest(Breaks::KERNEL);
    let lent = range(&pages, &(0..512));
    // Where the packer ends its registrations.
    let watch = Watch::begin();
    service.release_range(lent).expect("it is lent");
    let ends = |site: &Site| site.call == Call::Unregister && site.file.ends_with("pack/packer.rs");
    let site = watch.sites().into_keys().find(ends).expect("they end");
    drop(watch);
    service.resume_range(lent).expect("it is back");
    wait_until("packing again", || packed(&service) == PAGES - TWINS);
    let stay = Injection::at(site, libc::ENOMEM, Times::Always);
    let refused = service.release_range(lent);
    assert!(matches!(refused, Err(Error::NotUnmerged(_))), "{refused:?}");
    service.resume_range(lent).expect("it is back");
    drop(stay);
    // They go home, are tracked again, and pages may be written and packed.
    fill(&pages, 200..300, 1);
    wait_until("packing what is new", || packed(&service) == PAGES - TWINS);
    assert_hold(&pages, 0..200, 0);
    assert_hold(&pages, 200..300, 1);
    service.stop(true).expect("it stops");
    assert_not_registered(&pages);
}

/// A VM all of whose pages without a twin are packed, and its supervisor.
fn packed_vm(count: usize) -> (StoreThread, Pages, Supervisor) {
    let store = StoreThread::start();
    let pages = Pages::map(count);
    fill(&pages, 0..count, 0);
    let supervisor = Supervisor::spawn(Options::default()).expect("it starts");
    begin(&store, &pages, &supervisor);
    wait_until("packing", || packed_of(&supervisor) == count - TWINS);
    (store, pages, supervisor)
}

fn begin(store: &StoreThread, pages: &Pages, supervisor: &Supervisor) {
    let setup = Setup {
        store: store.socket(),
        config: config(),
        ..Setup::default()
    };
    supervisor.attach(setup).expect("it is attached");
    // SAFETY: memory of the test's own, which stays mapped.
    unsafe { supervisor.add_range(range(pages, &(0..pages.count()))) };
    supervisor.start().expect("it is served");
}

fn packed_of(supervisor: &Supervisor) -> usize {
    let packed = supervisor.stats().map_or(0, |stats| stats.packing.pages);
    usize::try_from(packed).expect("few")
}

/// Whether a page can be read; without touching it in this program.
fn readable(pages: &Pages, page: usize) -> bool {
    let file = tempfile::tempfile().expect("a file");
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: the kernel reads a page of the test's own, or says that it cannot.
    let written = unsafe { libc::write(fd, pages.address(page) as *const _, PAGE_SIZE) };
    usize::try_from(written) == Ok(PAGE_SIZE)
}

/// However long the host lacks memory: whoever unmaps memory does not need what was packed of it.
#[test]
fn memory_that_goes_does_not_wait_until_there_is_memory() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (store, pages, supervisor) = packed_vm(PAGES);
    let gone = 512..640;
    let lack = Injection::begin(Call::Copy, libc::ENOMEM, Times::Always);
    supervisor
        .remove_range(range(&pages, &gone).addresses())
        .expect("it may go");
    gone.clone()
        .for_each(|page| assert!(!readable(&pages, page), "page {page} has other bytes"));
    drop(lack);
    assert_hold(&pages, 0..512, 0);
    assert_hold(&pages, 640..PAGES, 0);
    supervisor.detach(true).expect("it ends");
    pages.renew();
    fill(&pages, 0..PAGES, 2);
    begin(&store, &pages, &supervisor);
    wait_until("packing again", || packed_of(&supervisor) == PAGES - TWINS);
    assert_hold(&pages, 0..PAGES, 2);
    supervisor.detach(true).expect("it ends");
    assert_not_registered(&pages);
}

#[test]
fn a_vm_is_refused_before_there_is_memory_for_what_was_packed_of_it() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (_store, pages, supervisor) = packed_vm(PAGES);
    let lack = Injection::begin(Call::Copy, libc::ENOMEM, Times::Always);
    let refused = supervisor.refuse(refusal::confidential());
    assert!(
        matches!(refused, Err(Error::NotUnmerged(left)) if left as usize == PAGES - TWINS),
        "{refused:?}"
    );
    assert_eq!(supervisor.status(), Status::Refused(refusal::confidential()));
    let reader = std::thread::spawn(move || assert_hold(&pages, 200..201, 0));
    std::thread::sleep(Duration::from_millis(300));
    assert!(!reader.is_finished(), "there was memory");
    drop(lack);
    reader.join().expect("it reads what was there");
    assert_hold(&pages, 0..PAGES, 0);
    wait_until("the end of packing", || {
        flags_of(&pages).iter().all(|flags| !flags.contains(" um"))
    });
    supervisor.detach(true).expect("it ends");
}

/// At the addresses there may be the next VM's memory soon.
#[test]
fn a_vm_ends_before_there_is_memory_for_what_was_packed_of_it() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    for unmerge in [false, true] {
        let (store, pages, supervisor) = packed_vm(PAGES);
        let lack = Injection::begin(Call::Copy, libc::ENOMEM, Times::Always);
        let ended = supervisor.detach(unmerge);
        assert_eq!(ended.is_err(), unmerge, "{ended:?}");
        assert!(!readable(&pages, 300), "it has other bytes");
        pages.renew();
        fill(&pages, 0..PAGES / 2, 7);
        drop(lack);
        begin(&store, &pages, &supervisor);
        // Nothing of the VM before comes where this one has nothing yet.
        (PAGES / 2..PAGES).for_each(|page| assert_eq!(pages.load(page, 5), 0, "page {page}"));
        fill(&pages, PAGES / 2..PAGES, 7);
        wait_until("packing", || packed_of(&supervisor) == PAGES - TWINS);
        assert_hold(&pages, 0..PAGES, 7);
    }
}

#[test]
fn a_supervisor_that_is_dropped_leaves_nothing_packed() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (_store, pages, supervisor) = packed_vm(PAGES);
    let lack = Injection::begin(Call::Copy, libc::ENOMEM, Times::Always);
    let _ = supervisor.refuse(refusal::confidential());
    let end = std::thread::spawn(move || drop(supervisor));
    std::thread::sleep(Duration::from_millis(300));
    assert!(!end.is_finished(), "pages are packed that nobody rebuilds");
    drop(lack);
    end.join().expect("it ends");
    assert_not_registered(&pages);
    assert_hold(&pages, 0..PAGES, 0);
}

/// A logger that panics in the supervisor's thread, while it is told to: that thread dies as by a bug of its own.
struct Panics(AtomicBool);

static PANICS: Panics = Panics(AtomicBool::new(false));

impl log::Log for Panics {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, _: &log::Record<'_>) {
        let is_supervisor = std::thread::current().name() == Some("dedup-supervisor");
        let dies = is_supervisor && self.0.load(Ordering::Acquire);
        assert!(!dies, "the supervisor's thread dies");
    }

    fn flush(&self) {}
}

/// Whoever calls is told, and whoever touches what is packed waits.
#[test]
fn nobody_waits_for_memory_to_hear_that_the_supervisor_has_died() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    log::set_logger(&PANICS).expect("no other test has a logger");
    log::set_max_level(log::LevelFilter::Warn);
    let (_store, pages, supervisor) = packed_vm(PAGES);
    let lack = Injection::begin(Call::Copy, libc::ENOMEM, Times::Always);
    PANICS.0.store(true, Ordering::Release);
    supervisor.note(refusal::protected());
    let told = supervisor.pin();
    assert!(matches!(told, Err(Error::Stopped)), "{told:?}");
    assert_eq!(supervisor.status(), Status::Detached);
    drop(supervisor.pinned().expect("nothing is merged any more"));
    PANICS.0.store(false, Ordering::Release);
    let is_away = |flags: &String| flags.contains(" um");
    assert!(flags_of(&pages).iter().any(is_away), "there was memory");
    drop(lack);
    drop(supervisor);
    assert_not_registered(&pages);
    assert_hold(&pages, 0..PAGES, 0);
}

/// Somebody is about to pin memory: it is waited for once, not for each part.
#[test]
fn without_memory_a_device_is_told_so_soon() {
    const LARGE: usize = 24 * 512;
    const SOON: Duration = Duration::from_secs(12);
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (_store, pages, supervisor) = packed_vm(LARGE);
    let lack = Injection::begin(Call::Copy, libc::ENOMEM, Times::Always);
    let start = Instant::now();
    let refused = supervisor.pin();
    let took = start.elapsed();
    assert!(matches!(refused, Err(Error::NotUnmerged(_))), "{refused:?}");
    assert!(took < SOON, "{took:?}");
    drop(lack);
    supervisor.pin().expect("there is memory again");
    assert_not_registered(&pages);
    assert_hold(&pages, 0..LARGE, 0);
}

/// The rebuilding thread touches memory for longer than a scanning thread that dies.
#[test]
fn memory_stays_until_all_is_back_although_the_scanning_thread_died() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let store = StoreThread::start();
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 2 << 20)]).expect("memory");
    let memory = Arc::new(memory);
    let kept = Arc::downgrade(&memory);
    let page_of = |number: u64| GuestAddress(number * PAGE_SIZE as u64);
    // Without twins.
    let bytes = |number: u64| -> Vec<u8> {
        let word = |word| content(TWINS + number as usize, word, 0).to_ne_bytes();
        (0..WORDS).flat_map(word).collect()
    };
    (0..512).for_each(|n| memory.write_slice(&bytes(n), page_of(n)).expect("it is written"));
    let service = DedupService::start(memory.clone(), &store.socket(), config()).expect("dedup starts");
    wait_until("packing", || packed(&service) == 512);
    drop(memory);
    let mut died = false;
    let scanner_dies = Observer::begin(move |_| {
        let is_scanner = std::thread::current().name() == Some("dedup-scan");
        let dies = is_scanner && !std::mem::replace(&mut died, true);
        assert!(!dies, "as a bug would have it");
    });
    wait_until("the scanning thread's death", || service.pass().is_err());
    drop(scanner_dies);
    std::thread::sleep(Duration::from_millis(50));
    let still = kept.upgrade().expect("the memory is there");
    for n in 0..512 {
        let mut found = vec![0; PAGE_SIZE];
        still.read_slice(&mut found, page_of(n)).expect("it is read");
        assert!(found == bytes(n), "page {n}");
    }
    drop(still);
    drop(service);
    assert!(kept.upgrade().is_none(), "it is nobody's any more");
}

#[test]
fn packed_pages_do_not_depend_on_the_store() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let (store, pages, service) = packed_guest(Breaks::KERNEL);
    drop(store);
    wait_until("the loss", || service.stats().state == 3);
    assert_hold(&pages, 0..PAGES, 0);
    service.stop(true).expect("it stops");
    assert_hold(&pages, 0..PAGES, 0);
}

#[test]
fn pinned_pages_are_not_packed_and_system_calls_find_packed_ones() {
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("it hangs"));
    let store = StoreThread::start();
    let pages = Pages::map(PAGES);
    fill(&pages, 0..PAGES, 0);
    let ring = pin(&pages, 100); // twins among them
    let service = pages.serve(&store.socket(), config()).expect("dedup starts");
    wait_until("packing", || packed(&service) == PAGES - 100);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(packed(&service), PAGES - 100);
    unpin(&ring);
    // The kernel reads and writes packed pages on behalf of system calls.
    let mut file = tempfile::tempfile().expect("a file");
    {
        use std::io::{Read, Seek, Write};
        // SAFETY: mapped memory of the test's own, which nobody writes meanwhile.
        let source = unsafe { std::slice::from_raw_parts(pages.address(200) as *const u8, 8 * PAGE_SIZE) };
        file.write_all(source).expect("it is written");
        file.rewind().expect("it is a file");
        // SAFETY: as above, and nobody else reads it.
        let target = unsafe { std::slice::from_raw_parts_mut(pages.address(300) as *mut u8, 8 * PAGE_SIZE) };
        file.read_exact(target).expect("it is read");
    }
    for page in 0..8 {
        assert!((0..WORDS).all(|word| pages.load(300 + page, word) == content(200 + page, word, 0)));
    }
    assert_hold(&pages, 0..300, 0);
    assert_hold(&pages, 308..PAGES, 0);
}

/// It writes a few words of pages of zeros, which pack well, and comes back to them.
#[test]
fn a_guest_finds_every_word_that_it_wrote() {
    need_kvm!();
    need_userfaultfd!();
    let _watchdog = Watchdog::start(HANGS, || eprintln!("a guest hangs"));
    let store = StoreThread::start();
    let payload = PayloadConfig::default()
        .private_mib(2)
        .zero_mib(16)
        .ws_area(WorkingSet::Zero)
        .ws_pages(2048)
        .rate(1500)
        .seconds(1_000_000);
    let config = Config {
        pass_period_ms: 20,
        pack: Pack {
            on: true,
            idle_ms: 60,
            ..Pack::default()
        },
        ..config()
    };
    let guest = Guest::boot(payload, 32, ThpMode::Never, Some((&store.socket(), config)));
    wait_until("packing and coming back", || {
        let packing = guest.stats().packing;
        packing.packs_total > 3000 && packing.touched_total > 1500
    });
    let packing = guest.stats().packing;
    let (verdict, stats) = guest.finish();
    assert!(verdict.ok && verdict.errors == 0, "{verdict:?}");
    assert_eq!((stats.packing.pages, stats.packing.broken_total), (0, 0));
    eprintln!(
        "{} packs, {} touched, p50 {} us, p99 {} us",
        packing.packs_total,
        packing.touched_total,
        packing.rebuild.quantile_us(0.5),
        packing.rebuild.quantile_us(0.99)
    );
}
