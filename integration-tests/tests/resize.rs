//! Guest memory that comes, goes, is lent to another userfaultfd, or is given up by the guest.
#![allow(unsafe_code)] // raw memory

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::{
    Breaks, Call, Config, DedupService, Error, HostRange, Injection, Policy, Settings, Site, Switch, Times,
    Watch,
};
use vmm_dedup_integration_tests::memory::{Pages, flags_of};
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::{alone, need_userfaultfd};
use vmm_dedup_protocol::observer::Observer;
use vmm_dedup_trouble::Watchdog;

const PAGE: usize = 4096;
const MANAGED: Breaks = Breaks::managed(1024, 0);

fn config(breaks: Breaks) -> Config {
    Config {
        pass_period_ms: 10,
        cpu_percent: 100,
        // Every page is shared, also those by which use is sampled.
        huge_policy: Policy::Ksm,
        breaks,
        ..Config::default()
    }
}

/// Every content twice.
fn fill(pages: &Pages) {
    (0..pages.count()).for_each(|page| pages.fill(page, page as u64 / 2 + 1));
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn mapped(service: &DedupService) -> u64 {
    service.stats().pages_mapped
}

fn range(pages: &Pages, from: usize, count: usize) -> HostRange {
    HostRange::try_new(pages.address(from), count * PAGE).expect("aligned")
}

fn discard_shared_pages(breaks: Breaks) {
    let store = StoreThread::start();
    let pages = Pages::map(1024);
    fill(&pages);
    let service = pages
        .serve(&store.socket(), config(breaks))
        .expect("dedup starts");
    wait_until("sharing", || mapped(&service) == 1024);
    pages.store(5, 0, 7); // copied on write: a private page in a store mapping, or one of its own
    let discarder = service.discarder();
    // SAFETY: the test's own memory, whose content is not needed any more.
    unsafe { discarder.discard(pages.address(0), 512 * PAGE) }.expect("it is discarded");
    (0..512).for_each(|page| assert!(pages.holds(page, 0), "page {page} has stale content"));
    (512..1024).for_each(|page| assert!(pages.holds(page, page as u64 / 2 + 1)));
    // What is written there now is tracked and shared like any other memory.
    (0..512).for_each(|page| pages.fill(page, page as u64 / 2 + 1));
    wait_until("sharing again", || mapped(&service) == 1024);
    (0..1024).for_each(|page| assert!(pages.holds(page, page as u64 / 2 + 1)));
    service.stop(true).expect("it stops");
    // The discarder outlives the service.
    // SAFETY: as above.
    unsafe { discarder.discard(pages.address(0), 1024 * PAGE) }.expect("it is discarded");
    (0..1024).for_each(|page| assert!(pages.holds(page, 0)));
}

#[test]
fn discarded_pages_read_as_zeros_and_can_be_shared_again() {
    need_userfaultfd!();
    discard_shared_pages(Breaks::KERNEL);
}

#[test]
fn discarded_pages_read_as_zeros_with_managed_breaks() {
    need_userfaultfd!();
    discard_shared_pages(MANAGED);
}

/// The kernel has no mapping left for fresh memory: zeros are written to copies instead.
fn discard_without_a_mapping(breaks: Breaks) {
    let _alone = alone();
    let _watchdog = Watchdog::start(Duration::from_secs(100), || eprintln!("a discard hangs"));
    let store = StoreThread::start();
    let pages = Pages::map(1024);
    fill(&pages);
    let service = pages
        .serve(&store.socket(), config(breaks))
        .expect("dedup starts");
    wait_until("sharing", || mapped(&service) == 1024);
    let discarder = service.discarder();
    let discard = || {
        // SAFETY: the test's own memory, whose content is not needed any more.
        unsafe { discarder.discard(pages.address(0), 512 * PAGE) }.expect("it is discarded");
        (0..512).for_each(|page| assert!(pages.holds(page, 0), "page {page} has stale content"));
    };
    for _ in 0..2 {
        let injection = Injection::begin(Call::MapAnonymous, libc::ENOMEM, Times::Always);
        discard();
        assert!(injection.failed() > 0);
    }
    (0..8).for_each(|_| _ = service.pass().expect("a pass"));
    // The copies still lie in mappings of the store.
    discard();
    (0..8).for_each(|_| _ = service.pass().expect("a pass"));
    discard();
    (512..1024).for_each(|page| assert!(pages.holds(page, page as u64 / 2 + 1)));
    service.stop(true).expect("it stops");
}

#[test]
fn discarded_pages_read_as_zeros_although_no_mapping_is_left() {
    need_userfaultfd!();
    discard_without_a_mapping(Breaks::KERNEL);
}

#[test]
fn discarded_pages_read_as_zeros_although_no_mapping_is_left_with_managed_breaks() {
    need_userfaultfd!();
    discard_without_a_mapping(MANAGED);
}

/// A thread that dies leaves a window whole: pages that map slots by then do so, although nothing notes it any more.
#[test]
fn discarded_pages_read_as_zeros_although_the_service_died_before_it_noted_that_they_are_shared() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let pages = Pages::map(1024);
    fill(&pages);
    let service = pages
        .serve(&store.socket(), config(Breaks::KERNEL))
        .expect("dedup starts");
    let mut mapped = false;
    let observer = vmm_dedup::Observer::begin(move |site| {
        mapped |= site.call == Call::MapSegment && site.file.ends_with("merge/merger.rs");
        let wakes = site.call == Call::Wake && site.file.ends_with("window/mod.rs");
        if wakes && std::mem::take(&mut mapped) {
            panic!("the scanning thread dies");
        }
    });
    wait_until("its death", || matches!(service.pass(), Err(Error::Stopped)));
    drop(observer);
    (0..1024).for_each(|page| assert!(pages.holds(page, page as u64 / 2 + 1), "page {page}"));
    assert!(flags_of(&pages).len() > 1, "slots are mapped");
    // SAFETY: the test's own memory, whose content is not needed any more.
    unsafe { service.discarder().discard(pages.address(0), 1024 * PAGE) }.expect("it is discarded");
    (0..1024).for_each(|page| assert!(pages.holds(page, 0), "page {page} has stale content"));
}

/// It keeps the userfaultfd open, on which nobody serves writers any more.
#[test]
fn nobody_waits_for_a_service_that_has_ended_while_its_discarder_lives() {
    need_userfaultfd!();
    let _alone = alone();
    let _watchdog = Watchdog::start(Duration::from_secs(100), || eprintln!("a writer hangs"));
    for breaks in [Breaks::KERNEL, MANAGED] {
        let store = StoreThread::start();
        let pages = Pages::map(1024);
        fill(&pages);
        let service = pages
            .serve(&store.socket(), config(breaks))
            .expect("dedup starts");
        wait_until("sharing", || mapped(&service) == 1024);
        let discarder = service.discarder();
        let stats = service.stop(false).expect("it stops");
        assert_eq!(stats.pages_mapped, 1024);
        (0..512).for_each(|page| pages.fill(page, page as u64 + 7));
        (0..512).for_each(|page| assert!(pages.holds(page, page as u64 + 7)));
        (512..1024).for_each(|page| assert!(pages.holds(page, page as u64 / 2 + 1)));
        // SAFETY: the test's own memory, whose content is not needed any more.
        unsafe { discarder.discard(pages.address(0), 1024 * PAGE) }.expect("it is discarded");
        (0..1024).for_each(|page| assert!(pages.holds(page, 0)));
        // The memory is free for another userfaultfd.
        let service = pages
            .serve(&store.socket(), config(breaks))
            .expect("the memory is free");
        service.stop(true).expect("it stops");
        drop(discarder);
    }
}

/// A page that the kernel has copied is not noticed at once, and stays in the store's mapping.
#[test]
fn copies_in_released_memory_are_left_alone() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let pages = Pages::map(2048);
    fill(&pages);
    let service = pages
        .serve(&store.socket(), config(Breaks::KERNEL))
        .expect("dedup starts");
    service.vouch_for_pins();
    wait_until("sharing", || mapped(&service) == 2048);
    // The content that it has, and of which there is a slot.
    (0..64).for_each(|page| pages.fill(page, page as u64 / 2 + 1));
    service
        .release_range(range(&pages, 0, 1024))
        .expect("it is released");
    (0..200).for_each(|_| _ = service.pass().expect("a pass"));
    let stats = service.stats();
    assert_eq!((stats.heals_total, stats.pages_broken), (0, 64), "{stats:?}");
    service
        .resume_range(range(&pages, 0, 1024))
        .expect("it is free again");
    wait_until("that copies are merged again", || mapped(&service) == 2048);
    (0..2048).for_each(|page| assert!(pages.holds(page, page as u64 / 2 + 1)));
    service.stop(true).expect("it stops");
}

/// Copies that were reported to the store, and whose twin comes while they are lent.
#[test]
fn copies_in_released_memory_are_not_found_by_those_who_have_their_twins() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::start();
    let (pages, twins) = (Pages::map(2048), Pages::map(128));
    fill(&pages);
    let passed = Config {
        pass_period_ms: 3_600_000,
        ..config(Breaks::KERNEL)
    };
    let serve = |pages: &Pages| {
        pages
            .serve(&store.socket(), passed.clone())
            .expect("dedup starts")
    };
    let service = serve(&pages);
    service.vouch_for_pins();
    let passes = |n: usize| (0..n).for_each(|_| _ = service.pass().expect("a pass"));
    passes(20);
    assert_eq!(mapped(&service), 2048);
    (0..64).for_each(|page| pages.fill(page, 1_000_000 + page as u64));
    passes(60);
    let stats = service.stats();
    assert_eq!((stats.pages_broken, stats.heals_total), (64, 0), "{stats:?}");
    service
        .release_range(range(&pages, 0, 1024))
        .expect("it is released");
    passes(3);
    (0..128).for_each(|page| twins.fill(page, 1_000_000 + page as u64 % 64));
    let other = serve(&twins);
    for _ in 0..10 {
        other.pass().expect("a pass");
        passes(1);
    }
    passes(70);
    assert_eq!(service.stats().heals_total, 0, "{:?}", service.stats());
    service
        .resume_range(range(&pages, 0, 1024))
        .expect("it is free again");
    wait_until("that copies are merged", || {
        passes(1);
        mapped(&service) == 2048
    });
    assert!((0..64).all(|page| pages.holds(page, 1_000_000 + page as u64)));
    service.stop(true).expect("it stops");
    other.stop(true).expect("it stops");
}

#[test]
fn a_discarded_range_does_not_have_to_be_aligned_to_anything_but_pages() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(64);
    fill(&pages);
    let service = pages
        .serve(&store.socket(), config(Breaks::KERNEL))
        .expect("dedup starts");
    wait_until("sharing", || mapped(&service) == 64);
    let discarder = service.discarder();
    // SAFETY: the test's own memory.
    let error = unsafe { discarder.discard(pages.address(1) + 8, PAGE) };
    assert!(error.is_err());
    assert!(pages.holds(1, 1));
    // SAFETY: as above.
    unsafe { discarder.discard(pages.address(3), 1) }.expect("it is discarded");
    assert!(pages.holds(3, 0) && pages.holds(2, 2) && pages.holds(4, 3));
    assert!(discarder.covers(pages.address(63), 1) && !discarder.covers(pages.address(63) + PAGE, 1));
}

/// A guest that fills, rests until the pages are shared, and gives them up again, while all of it is being merged.
fn discard_under_fire(breaks: Breaks) {
    const GUESTS: usize = 2;
    const PAGES: usize = 256;
    let store = StoreThread::start();
    let pages = Pages::map(GUESTS * PAGES);
    let service = pages
        .serve(&store.socket(), config(breaks))
        .expect("dedup starts");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for guest in 0..GUESTS {
            let (service, stop) = (&service, &stop);
            scope.spawn(move || {
                let discarder = service.discarder();
                let mine = guest * PAGES..(guest + 1) * PAGES;
                for round in 1u64.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    for page in mine.clone() {
                        pages.fill(page, page as u64 % 64 + 1);
                    }
                    // From far too short to be shared to long enough.
                    std::thread::sleep(Duration::from_millis(round * 7 % 60));
                    for page in mine.clone() {
                        assert!(
                            pages.holds(page, page as u64 % 64 + 1),
                            "page {page}, round {round}"
                        );
                    }
                    let step = [1, 3, 64, PAGES][usize::try_from(round % 4).expect("small")];
                    for page in mine.clone().step_by(step) {
                        let count = step.min(mine.end - page);
                        // SAFETY: the test's own memory.
                        unsafe { discarder.discard(pages.address(page), count * PAGE) }.expect("discarded");
                        for page in page..page + count {
                            assert!(
                                pages.holds(page, 0),
                                "page {page} has stale content, round {round}"
                            );
                        }
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_secs(4));
        stop.store(true, Ordering::Relaxed);
    });
    let stats = service.stop(true).expect("it stops");
    assert!(
        stats.merges_total > 500,
        "too little was merged to prove anything: {stats:?}"
    );
}

#[test]
fn no_stale_content_appears_while_pages_are_merged() {
    need_userfaultfd!();
    discard_under_fire(Breaks::KERNEL);
}

#[test]
fn no_stale_content_appears_while_pages_are_merged_and_broken_by_the_service() {
    need_userfaultfd!();
    discard_under_fire(MANAGED);
}

#[test]
fn memory_can_come_and_go() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let (boot, plugged) = (Pages::map(600), Pages::map(1000));
    fill(&boot);
    fill(&plugged);
    let service = boot
        .serve(&store.socket(), config(Breaks::KERNEL))
        .expect("dedup starts");
    wait_until("sharing", || mapped(&service) == 600);
    for _ in 0..3 {
        // SAFETY: the pages are never unmapped and only accessed through raw pointers.
        unsafe { service.add_range(range(&plugged, 0, 1000)) }.expect("it is added");
        wait_until("sharing all", || mapped(&service) == 1600);
        assert_eq!(service.stats().pages, 1600);
        service
            .release_range(range(&plugged, 0, 1000))
            .expect("it is released");
        service
            .remove_range(range(&plugged, 0, 1000))
            .expect("it is removed");
        service.pass().expect("a pass");
        assert_eq!((service.stats().pages, mapped(&service)), (600, 600));
    }
    // A part in the middle, while it is shared.
    service
        .remove_range(range(&boot, 100, 300))
        .expect("it is removed");
    service.pass().expect("a pass");
    assert_eq!((service.stats().pages, mapped(&service)), (300, 300));
    (0..600).for_each(|page| assert!(boot.holds(page, page as u64 / 2 + 1)));
    // Nothing left at all, as between two boots of a VM.
    service.remove_range(range(&boot, 0, 600)).expect("it is removed");
    service.pass().expect("a pass");
    assert_eq!((service.stats().pages, mapped(&service)), (0, 0));
    // SAFETY: as above.
    unsafe { service.add_range(range(&plugged, 0, 1000)) }.expect("it is added");
    wait_until("sharing after all went", || mapped(&service) == 1000);
    (0..1000).for_each(|page| assert!(plugged.holds(page, page as u64 / 2 + 1)));
    // SAFETY: as above.
    let twice = unsafe { service.add_range(range(&plugged, 999, 1)) };
    assert!(matches!(twice, Err(vmm_dedup::Error::Overlap(_))), "{twice:?}");
    service.stop(true).expect("it stops");
}

/// A vCPU that writes memory which was removed, and not unmapped yet, goes on.
fn removed_memory_is_written(breaks: Breaks) {
    let store = StoreThread::start();
    let pages = std::sync::Arc::new(Pages::map(600));
    fill(&pages);
    let service = pages
        .serve(&store.socket(), config(breaks))
        .expect("dedup starts");
    wait_until("sharing", || mapped(&service) == 600);
    service
        .remove_range(range(&pages, 100, 300))
        .expect("it is removed");
    let theirs = pages.clone();
    let writer = std::thread::spawn(move || (100..400).for_each(|page| theirs.store(page, 5, 77)));
    wait_until("writing what was removed", || writer.is_finished());
    writer.join().expect("the writer ends");
    (100..400).for_each(|page| assert_eq!(pages.load(page, 5), 77, "page {page}"));
    service.stop(true).expect("it stops");
    (0..600).for_each(|page| pages.store(page, 6, 78));
}

#[test]
fn nobody_waits_for_memory_that_was_removed() {
    need_userfaultfd!();
    removed_memory_is_written(Breaks::KERNEL);
}

#[test]
fn nobody_waits_for_memory_that_was_removed_with_managed_breaks() {
    need_userfaultfd!();
    removed_memory_is_written(MANAGED);
}

#[test]
fn released_memory_is_anonymous_and_free_for_another_userfaultfd() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(2048);
    fill(&pages);
    let service = pages
        .serve(&store.socket(), config(Breaks::KERNEL))
        .expect("dedup starts");
    wait_until("sharing", || mapped(&service) == 2048);
    let whole = range(&pages, 0, 2048);
    service.release_range(whole).expect("it is released");
    assert_eq!(service.pass().expect("a pass").pages_mapped, 0);
    let other = Pages::map(16);
    // A second service stands for the VMM's own userfaultfd.
    // SAFETY: the pages are never unmapped and only accessed through raw pointers.
    let second = unsafe {
        DedupService::start_on_ranges(
            &[whole, range(&other, 0, 16)],
            &store.socket(),
            config(Breaks::KERNEL),
        )
    }
    .expect("the memory is free");
    let refused = service.resume_range(whole).expect_err("it is taken");
    assert!(matches!(refused, vmm_dedup::Error::Register { .. }), "{refused}");
    second.stop(true).expect("it stops");
    service.resume_range(whole).expect("it is free again");
    wait_until("sharing again", || mapped(&service) == 2048);
    (0..2048).for_each(|page| assert!(pages.holds(page, page as u64 / 2 + 1)));
    service.stop(true).expect("it stops");
}

#[test]
fn memory_of_which_a_part_is_taken_still_is_not_taken_back_at_all() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(2048);
    fill(&pages);
    let service = pages
        .serve(&store.socket(), config(Breaks::KERNEL))
        .expect("dedup starts");
    let whole = range(&pages, 0, 2048);
    service.release_range(whole).expect("it is released");
    // The VMM's own userfaultfd.
    let borrow = |first: usize, count: usize| {
        let range = range(&pages, first, count);
        // SAFETY: the pages are never unmapped and only accessed through raw pointers.
        unsafe { DedupService::start_on_ranges(&[range], &store.socket(), config(Breaks::KERNEL)) }
    };
    let last = borrow(1536, 512).expect("the memory is free");
    let refused = service.resume_range(whole).expect_err("a part is taken");
    assert!(matches!(refused, vmm_dedup::Error::Register { .. }), "{refused}");
    let first = borrow(0, 1536).expect("nothing of the rest was taken back");
    first.stop(true).expect("it stops");
    last.stop(true).expect("it stops");
    service.resume_range(whole).expect("it is free again");
    wait_until("sharing", || mapped(&service) == 2048);
    service.stop(true).expect("it stops");
    (0..2048).for_each(|page| assert!(pages.holds(page, page as u64 / 2 + 1)));
}

/// The kernel registers what it can, and then says that it lacks mappings.
#[test]
fn memory_that_could_not_be_added_is_not_registered_in_part() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let (pages, more) = (Pages::map(16), Pages::map(512));
    let service = pages
        .serve(&store.socket(), config(Breaks::KERNEL))
        .expect("dedup starts");
    let lack = Injection::begin(Call::Register, libc::ENOMEM, Times::Always);
    let watch = Watch::begin();
    // SAFETY: the pages are never unmapped and only accessed through raw pointers.
    let add = || unsafe { service.add_range(range(&more, 0, 512)) };
    let refused = add().expect_err("there are no mappings");
    assert!(matches!(refused, Error::Register { .. }), "{refused}");
    let ends = |site: &Site| site.call == Call::Unregister && site.file.ends_with("scan/hotplug.rs");
    assert!(watch.sites().keys().any(ends), "a part of it may be registered");
    drop((lack, watch));
    add().expect("there are mappings again");
    service.stop(true).expect("it stops");
}

/// What the VMM had advised for guest memory: it is not to be in core dumps, nor in children.
fn advice_survives(breaks: Breaks) {
    const ADVICE: [(i32, &str); 2] = [(libc::MADV_DONTDUMP, "dd"), (libc::MADV_DONTFORK, "dc")];
    let store = StoreThread::start();
    let pages = Pages::map_huge(1024);
    for (advice, _) in ADVICE {
        // SAFETY: the test's own memory, whose content stays.
        let advised = unsafe { libc::madvise(pages.address(0) as *mut _, 1024 * PAGE, advice) };
        assert_eq!(advised, 0);
    }
    fill(&pages);
    let service = pages
        .serve(&store.socket(), config(breaks))
        .expect("dedup starts");
    wait_until("sharing", || mapped(&service) == 1024);
    let mapping = || flags_of(&pages);
    // Advice about huge pages is for the guest's own memory.
    assert!(
        mapping().iter().any(|flags| !flags.contains(" hg")),
        "nothing is replaced"
    );
    // SAFETY: the test's own memory, whose content is not needed any more.
    unsafe { service.discarder().discard(pages.address(0), 512 * PAGE) }.expect("it is discarded");
    service.stop(true).expect("it stops");
    for flags in mapping() {
        assert!(ADVICE.iter().all(|(_, flag)| flags.contains(flag)), "{flags}");
        assert!(flags.contains(" hg"), "{flags}");
    }
    (512..1024).for_each(|page| assert!(pages.holds(page, page as u64 / 2 + 1)));
}

#[test]
fn advice_holds_for_memory_that_is_renewed() {
    need_userfaultfd!();
    advice_survives(Breaks::KERNEL);
}

#[test]
fn advice_holds_for_memory_that_is_renewed_with_managed_breaks() {
    need_userfaultfd!();
    advice_survives(MANAGED);
}

#[test]
fn a_service_that_gave_everything_back_holds_nothing_back() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let (kept, given) = (Pages::map(512), Pages::map(512));
    [&kept, &given].into_iter().for_each(fill);
    let serve = |pages: &Pages| {
        pages
            .serve(&store.socket(), config(Breaks::KERNEL))
            .expect("dedup starts")
    };
    let (stays, goes) = (serve(&kept), serve(&given));
    wait_until("sharing", || mapped(&stays) == 512 && mapped(&goes) == 512);
    // A private page in a mapping of the store stays where it is.
    given.store(5, 0, 7);
    goes.stop(true).expect("it stops");
    // What the other one shared alone from then on is free again, although this process lives.
    let vms = || {
        let mut observer = Observer::connect(&store.socket()).expect("the store is there");
        observer.stats().expect("it answers")
    };
    wait_until("the end of the first", || vms().1.len() == 1);
    let off = Settings {
        switch: Some(Switch::OffUnmerge),
        ..Settings::default()
    };
    stays.set(off).expect("it gives back");
    wait_until("the reuse of slots", || {
        let (account, _) = vms();
        account.pages_shared == 0 && account.slots_limbo == 0
    });
    (0..512).for_each(|page| assert!(kept.holds(page, page as u64 / 2 + 1)));
    (0..512)
        .filter(|page| *page != 5)
        .for_each(|page| assert!(given.holds(page, page as u64 / 2 + 1)));
    stays.stop(true).expect("it stops");
}

#[test]
fn a_service_that_is_not_enabled_waits() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(64);
    fill(&pages);
    let config = Config {
        enabled: false,
        ..config(Breaks::KERNEL)
    };
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(service.stats().passes_total, 0);
    let on = Settings {
        switch: Some(Switch::On),
        ..Settings::default()
    };
    service.set(on).expect("it is switched on");
    wait_until("sharing", || mapped(&service) == 64);
    service.stop(true).expect("it stops");
}
