//! The store empties segments in which little is left, services follow, and the memory returns.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, DedupService, Policy, ServiceStats};
use vmm_dedup_integration_tests::huge::{HUGE_PAGES, huge_kib_of_store};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::suspended::open_what_suspends;
use vmm_dedup_integration_tests::vm::Guest;
use vmm_dedup_integration_tests::{alone, huge_pages_or_skip, need_kvm, need_userfaultfd};
use vmm_dedup_payload::{PayloadConfig, WorkingSet};
use vmm_dedup_protocol::{PAGE_SIZE, SERIES};
use vmm_dedup_refvmm::ThpMode;

/// Pages of a guest: three segments.
const PAGES: usize = 3 * 4096;
/// Pages that die or live together, unless a test says otherwise.
const EXTENT: usize = 64;
/// Within this the memory has to return.
const PATIENCE: Duration = Duration::from_secs(60);

const KERNEL: Breaks = Breaks::Kernel {
    heal_stall_us: 50_000,
    heal_without_fork: true,
};
const MANAGED: Breaks = Breaks::managed(1024, 0);

fn config(name: &str, breaks: Breaks) -> Config {
    Config {
        name: name.into(),
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        // What is merged depends on passes, not on time.
        huge_policy: Policy::Ksm,
        breaks,
        ..Config::default()
    }
}

/// Memory under a service, and what it should hold.
struct Vm {
    pages: Pages,
    ids: Vec<u64>,
    service: DedupService,
}

impl Vm {
    fn start(store: &StoreThread, name: &str, pages: Pages, ids: Vec<u64>, breaks: Breaks) -> Self {
        ids.iter()
            .enumerate()
            .for_each(|(page, id)| pages.fill(page, *id));
        let service = pages.serve(&store.socket(), config(name, breaks));
        let service = service.expect("dedup starts");
        service.vouch_for_pins();
        Self { pages, ids, service }
    }

    fn write(&mut self, page: usize, id: u64) {
        self.pages.fill(page, id);
        self.ids[page] = id;
    }

    fn pass(&self) -> ServiceStats {
        self.service.pass().expect("passes run")
    }

    /// Files of stores that it maps, and how many mappings it has.
    fn mappings(&self) -> (BTreeSet<String>, usize) {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let range = self.pages.address(0)..self.pages.address(self.pages.count() - 1) + PAGE_SIZE;
        let inside = |line: &&str| {
            let start = line.split('-').next();
            let start = start.and_then(|hex| usize::from_str_radix(hex, 16).ok());
            start.is_some_and(|start| range.contains(&start))
        };
        let lines: Vec<&str> = maps.lines().filter(inside).collect();
        let inode = |line: &&str| line.split_ascii_whitespace().nth(4).map(str::to_owned);
        let inodes = lines.iter().filter_map(inode).filter(|inode| inode != "0");
        (inodes.collect(), lines.len())
    }

    /// Stops the service; every byte is right, and private.
    fn end(self) {
        let stats = self.service.stop(true).expect("it stops");
        assert_eq!(stats.pages_mapped, 0);
        let wrong = |page: &usize| !self.pages.holds(*page, self.ids[*page]);
        assert_eq!((0..self.pages.count()).find(wrong), None, "a page is wrong");
        self.pages.renew();
    }

    fn check(&self) {
        let wrong = |page: &usize| !self.pages.holds(*page, self.ids[*page]);
        assert_eq!((0..self.pages.count()).find(wrong), None, "a page is wrong");
    }
}

fn start_all(store: &StoreThread, count: usize, breaks: Breaks) -> Vec<Vm> {
    let ids: Vec<u64> = (1..=PAGES as u64).collect();
    let vms: Vec<Vm> = (0..count)
        .map(|n| Vm::start(store, &format!("vm-{n}"), Pages::map(PAGES), ids.clone(), breaks))
        .collect();
    pass_until(&vms, "sharing", || {
        vms.iter()
            .all(|vm| vm.service.stats().pages_mapped == PAGES as u64)
    });
    vms
}

fn pass_until(vms: &[Vm], what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    loop {
        vms.iter().for_each(|vm| _ = vm.pass());
        if done() {
            return;
        }
        // The store and guests have the CPU, too.
        std::thread::sleep(Duration::from_millis(2));
        if start.elapsed() > PATIENCE {
            let why = vms.iter().map(|vm| {
                let stats = vm.service.stats();
                let heals = (
                    stats.heals_total,
                    stats.heal_pinned_total,
                    stats.heal_contended_total,
                );
                (vm.service.explain(None), stats.mismatches_total, heals)
            });
            let why: Vec<_> = why.collect();
            panic!("{what} did not happen in time: {why:?}");
        }
    }
}

/// What the store's memory amounts to.
#[derive(Debug)]
#[allow(dead_code)] // printed
struct Memory {
    resident: u64,
    in_use: u64,
    leaving: u64,
    held: u64,
    moved: u64,
}

fn memory(store: &StoreThread) -> Memory {
    Memory {
        resident: store.metric("resident_bytes"),
        in_use: store.metric("pages_shared") * PAGE_SIZE as u64,
        leaving: store.metric("segments_leaving"),
        held: store.metric("segments_held"),
        moved: store.metric("moved_total"),
    }
}

impl Memory {
    fn is_small(&self) -> bool {
        self.resident * 100 <= self.in_use * 115 + (800 << 20) && (self.leaving, self.held) == (0, 0)
    }
}

/// Passes until the store's memory has returned, and nobody maps a file that is gone.
fn pass_until_small(store: &StoreThread, vms: &[Vm]) -> Memory {
    let start = Instant::now();
    let before = memory(store);
    let mut last = memory(store);
    pass_until(vms, "that memory returns", || {
        last = memory(store);
        if start.elapsed() > PATIENCE {
            eprintln!("{last:?}");
        }
        last.is_small()
    });
    let there = store.metric("segments");
    for vm in vms {
        let (files, mappings) = vm.mappings();
        assert!(files.len() as u64 <= there, "{files:?}, {there} segments");
        eprintln!("{mappings} mappings of {} files", files.len());
        vm.check();
    }
    eprintln!("{before:?} -> {last:?} in {:?}", start.elapsed());
    last
}

/// How pages die.
#[derive(Clone, Copy, Debug)]
enum Death {
    /// All VMs have other pages there, which are shared, too.
    Replaced,
    Zero,
    /// Each VM has a page of its own there.
    Own,
}

const DEATHS: [Death; 3] = [Death::Replaced, Death::Zero, Death::Own];

fn kill(vms: &mut [Vm], death: Death, dies: impl Fn(usize) -> bool) {
    for (n, vm) in (1u64..).zip(vms) {
        for page in (0..PAGES).filter(|page| dies(*page)) {
            let id = match death {
                Death::Replaced => (1 << 32) | page as u64,
                Death::Zero => 0,
                Death::Own => (n << 40) | page as u64,
            };
            vm.write(page, id);
        }
    }
}

/// Most pages of three VMs die, so and so many together.
fn most_die(breaks: Breaks, extent: usize, lives: usize, deaths: &[Death]) {
    for death in deaths.iter().copied() {
        let store = StoreThread::with_metrics();
        let mut vms = start_all(&store, 3, breaks);
        kill(&mut vms, death, |page| !(page / extent).is_multiple_of(lives));
        let shared = match death {
            Death::Replaced => PAGES,
            _ => PAGES / lives,
        };
        eprintln!("{breaks:?} {extent} {death:?}");
        let written: Vec<usize> = vms.iter().map(|vm| vm.mappings().1).collect();
        pass_until(&vms, "that the rest is shared", || {
            vms.iter()
                .all(|vm| vm.service.stats().pages_mapped == shared as u64)
        });
        let after = pass_until_small(&store, &vms);
        assert!(after.moved > 0, "{after:?}");
        for (vm, before) in vms.iter().zip(written) {
            // Each extent that lives lies in a mapping of its own then, and so does what is between.
            let now = vm.mappings().1;
            assert!(
                now <= before.max(2 * PAGES / extent) + 32,
                "{before} mappings became {now}"
            );
        }
        vms.into_iter().for_each(Vm::end);
    }
}

#[test]
fn memory_returns_when_most_of_it_dies_and_the_kernel_breaks() {
    need_userfaultfd!();
    let _alone = alone();
    most_die(KERNEL, EXTENT, 8, &DEATHS);
}

#[test]
fn memory_returns_when_most_of_it_dies_and_breaks_are_managed() {
    need_userfaultfd!();
    let _alone = alone();
    most_die(MANAGED, EXTENT, 8, &DEATHS);
}

/// Of every eight pages one lives.
#[test]
fn single_pages_that_live_follow() {
    need_userfaultfd!();
    let _alone = alone();
    most_die(KERNEL, 1, 8, &[Death::Replaced, Death::Own]);
    most_die(MANAGED, 1, 8, &[Death::Zero]);
}

#[test]
fn one_of_eight_vms_stays_and_follows() {
    need_userfaultfd!();
    let _alone = alone();
    for breaks in [KERNEL, MANAGED] {
        let store = StoreThread::with_metrics();
        let mut vms: Vec<Vm> = Vec::new();
        for n in 0..8u64 {
            // A fifth of the pages are in all VMs, the others in pairs of VMs.
            let id = |page: u64| {
                if page % 320 < 64 {
                    page + 1
                } else {
                    ((n / 2 + 1) << 32) | page
                }
            };
            let ids = (0..PAGES as u64 / 3).map(id).collect();
            vms.push(Vm::start(
                &store,
                &format!("vm-{n}"),
                Pages::map(PAGES / 3),
                ids,
                breaks,
            ));
        }
        pass_until(&vms, "sharing", || {
            vms.iter()
                .all(|vm| vm.service.stats().pages_mapped == PAGES as u64 / 3)
        });
        let full = memory(&store);
        vms.split_off(1).into_iter().for_each(Vm::end);
        let (_, before) = vms[0].mappings();
        let after = pass_until_small(&store, &vms);
        assert!(after.resident < full.resident / 2, "{full:?} {after:?}");
        let (_, now) = vms[0].mappings();
        assert!(now <= before + 8, "{before} mappings became {now}");
        assert_eq!(vms[0].service.stats().pages_mapped, PAGES as u64 / 3);
        vms.into_iter().for_each(Vm::end);
    }
}

#[test]
fn a_vm_that_does_not_follow_holds_up_nobody() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::with_metrics();
    let lives = |page: usize| (page / EXTENT).is_multiple_of(8);
    let mut vms = start_all(&store, 2, KERNEL);
    let own = |page: usize| {
        if lives(page) {
            page as u64 + 1
        } else {
            (77 << 32) | page as u64
        }
    };
    let ids = (0..PAGES).map(own).collect();
    let idle = Vm::start(&store, "idle", Pages::map(PAGES), ids, KERNEL);
    let shared = PAGES as u64 / 8;
    let start = Instant::now();
    while idle.pass().pages_mapped < shared {
        assert!(start.elapsed() < PATIENCE, "{:?}", idle.service.stats());
    }
    // From here on it runs no pass: it has all files that it was told of, and follows nobody.
    for round in 1..8u64 {
        for vm in &mut vms {
            (0..PAGES)
                .filter(|page| !lives(*page))
                .for_each(|page| vm.write(page, (round << 32) | page as u64));
        }
        pass_until(&vms, "sharing again", || {
            vms.iter()
                .all(|vm| vm.service.stats().pages_mapped == PAGES as u64)
        });
    }
    pass_until(&vms, "that pages move", || {
        store.metric("moved_total") > 0 && store.metric("segments_leaving") > 0
    });
    let (kept, _) = idle.mappings();
    pass_until(&vms, "that the others follow", || {
        vms.iter().all(|vm| vm.mappings().0.is_disjoint(&kept))
    });
    vms.iter().for_each(Vm::check);
    idle.check();
    vms.push(idle);
    pass_until_small(&store, &vms);
    vms.into_iter().for_each(Vm::end);
}

#[test]
fn series_follow_as_series() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::with_metrics();
    for breaks in [KERNEL, MANAGED] {
        let poison = 0xcccc;
        // Stretches of one content, and between them pages that will die.
        let ids = |_: usize| {
            let id = |page: usize| {
                if page % 512 < 2 * SERIES as usize {
                    poison
                } else {
                    page as u64 + 1
                }
            };
            (0..PAGES).map(id).collect::<Vec<u64>>()
        };
        let mut vms: Vec<Vm> = (0..2)
            .map(|n| Vm::start(&store, &format!("vm-{n}"), Pages::map(PAGES), ids(n), breaks))
            .collect();
        pass_until(&vms, "sharing", || {
            vms.iter()
                .all(|vm| vm.service.stats().pages_mapped == PAGES as u64)
        });
        let (_, before) = vms[0].mappings();
        kill(&mut vms, Death::Replaced, |page| {
            page % 512 >= 2 * SERIES as usize
        });
        pass_until(&vms, "sharing again", || {
            vms.iter()
                .all(|vm| vm.service.stats().pages_mapped == PAGES as u64)
        });
        pass_until_small(&store, &vms);
        let (_, now) = vms[0].mappings();
        assert!(now <= before + 64, "{before} mappings became {now}");
        vms.into_iter().for_each(Vm::end);
    }
}

#[test]
fn huge_pages_follow_as_huge_pages() {
    need_userfaultfd!();
    let _alone = alone();
    let store = StoreThread::with_metrics();
    let chunks = PAGES / HUGE_PAGES;
    // Every fourth huge page lives.
    let lives = |page: usize| (page / HUGE_PAGES).is_multiple_of(4);
    let ids: Vec<u64> = (1..=PAGES as u64).collect();
    let mut vms: Vec<Vm> = (0..2)
        .map(|n| {
            Vm::start(
                &store,
                &format!("vm-{n}"),
                Pages::map_huge(PAGES),
                ids.clone(),
                KERNEL,
            )
        })
        .collect();
    huge_pages_or_skip!(&vms[0].pages);
    let huge = |vm: &Vm| {
        vm.check();
        huge_kib_of_store(&vm.pages) / 2048
    };
    // In one run of thirty two of the pages have line keys that are the same for the index, and theirs is no huge page.
    let most = |chunks: usize| chunks - 2;
    pass_until(&vms, "huge pages", || {
        vms.iter().all(|vm| huge(vm) >= most(chunks))
    });
    // Nothing new needs the slots that become free.
    kill(&mut vms, Death::Zero, |page| !lives(page));
    pass_until(&vms, "that they die", || {
        vms.iter()
            .all(|vm| vm.service.stats().pages_mapped == (PAGES / 4) as u64)
    });
    let after = pass_until_small(&store, &vms);
    assert!(after.moved >= (PAGES / 4) as u64, "{after:?}");
    pass_until(&vms, "that those which moved are huge again", || {
        vms.iter().all(|vm| huge(vm) >= most(chunks / 4))
    });
    vms.into_iter().for_each(Vm::end);
}

#[test]
fn a_guest_that_writes_and_checks_follows() {
    need_kvm!();
    let _alone = alone();
    for breaks in [KERNEL, MANAGED] {
        let store = StoreThread::with_metrics();
        let config = |n: u64| Config {
            pass_period_ms: 20,
            ..config(&format!("guest-{n}"), breaks)
        };
        let payload = |seed: u64| {
            PayloadConfig::default()
                .seed(seed)
                .private_mib(2)
                .zero_mib(4)
                .common_mib(16)
                .ws_area(WorkingSet::Private)
                .ws_pages(256)
                .rate(2000)
                .seconds(1_000_000)
        };
        // Other memory shares with the guests' store, and dies.
        let mut vms = start_all(&store, 2, breaks);
        let guests: Vec<Guest> = (1..3)
            .map(|n| Guest::boot(payload(n), 40, ThpMode::Never, Some((&store.socket(), config(n)))))
            .collect();
        pass_until(&vms, "that guests share", || {
            guests.iter().all(|guest| guest.stats().pages_mapped >= 16 * 256)
        });
        for round in 1..4 {
            kill(&mut vms, Death::Replaced, |page| page / EXTENT % 4 != round);
            pass_until(&vms, "sharing again", || {
                vms.iter()
                    .all(|vm| vm.service.stats().pages_mapped == PAGES as u64)
            });
        }
        kill(&mut vms, Death::Zero, |_| true);
        let after = pass_until_small(&store, &vms);
        assert!(after.moved > 0, "{after:?}");
        for guest in guests {
            let (verdict, _) = guest.finish();
            assert!(verdict.ok && verdict.errors == 0, "{verdict:?}");
        }
        vms.into_iter().for_each(Vm::end);
    }
}

#[test]
fn a_store_that_dies_while_pages_move_takes_nothing_along() {
    need_userfaultfd!();
    let _alone = alone();
    for breaks in [KERNEL, MANAGED] {
        for wait in [0, 30, 300] {
            let mut store = StoreThread::with_metrics();
            let mut vms = start_all(&store, 2, breaks);
            kill(&mut vms, Death::Replaced, |page| {
                !(page / EXTENT).is_multiple_of(8)
            });
            let moved = || store.metric("moved_total") > 0;
            pass_until(&vms, "that pages move", moved);
            std::thread::sleep(Duration::from_millis(wait));
            vms[0].pass();
            store = store.restart();
            pass_until(&vms, "sharing with the next store", || {
                vms.iter()
                    .all(|vm| vm.service.stats().pages_mapped == PAGES as u64)
            });
            vms.iter().for_each(Vm::check);
            vms.into_iter().for_each(Vm::end);
        }
    }
}

/// Those that have no twin are left after a while, during which both kinds of breaks wait.
#[test]
fn files_of_a_store_that_died_are_left_within_a_minute() {
    need_userfaultfd!();
    let _alone = alone();
    std::thread::scope(|scope| {
        for breaks in [KERNEL, MANAGED] {
            scope.spawn(move || leave_files_of_a_store_that_died(breaks));
        }
    });
}

fn leave_files_of_a_store_that_died(breaks: Breaks) {
    let store = StoreThread::with_metrics();
    let mut vms = start_all(&store, 3, breaks);
    // Some pages are copies by then, and some have no twin any more.
    kill(&mut vms[..1], Death::Own, |page| page / EXTENT % 8 == 3);
    kill(&mut vms[1..2], Death::Own, |page| page / EXTENT % 8 >= 3);
    vms.pop().expect("three").end();
    (0..32).for_each(|_| vms.iter().for_each(|vm| _ = vm.pass()));
    let (old, _) = vms[0].mappings();
    let store = store.restart();
    let start = Instant::now();
    pass_until(&vms, "that the old files are left", || {
        vms.iter().all(|vm| vm.mappings().0.is_disjoint(&old))
    });
    eprintln!("{breaks:?}: left in {:?}", start.elapsed());
    let twins = |vm: &Vm| vm.service.stats().pages_mapped >= (PAGES * 3 / 8 - PAGES / 64) as u64;
    pass_until(&vms, "sharing with the next store", || vms.iter().all(twins));
    vms.iter().for_each(Vm::check);
    vms.into_iter().for_each(Vm::end);
    drop(store);
}

/// Which page of memory each of some pages is.
fn frames(vm: &Vm, pages: impl Iterator<Item = usize>) -> Vec<u64> {
    let pagemap = File::open("/proc/self/pagemap").expect("pagemap");
    let frame = |page: usize| {
        let mut entry = [0; 8];
        let at = (vm.pages.address(page) / PAGE_SIZE * 8) as u64;
        pagemap.read_exact_at(&mut entry, at).expect("an entry");
        u64::from_ne_bytes(entry) << 9 >> 9
    };
    pages.map(frame).collect()
}

/// What writes to a copy by a plain reference would be lost with it.
#[test]
fn copies_stay_where_they_are_while_merging_is_suspended() {
    need_userfaultfd!();
    let _alone = alone();
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let store = StoreThread::with_metrics();
    let mut vms = start_all(&store, 2, KERNEL);
    // Some lie between pages that follow, the others leave whole files.
    let dies = |page: usize| !(page / EXTENT).is_multiple_of(8) || page % 4 == 3;
    kill(&mut vms, Death::Own, dies);
    let copied = (0..PAGES).filter(|page| dies(*page)).count() as u64;
    pass_until(&vms, "that copies are noticed", || {
        vms.iter()
            .all(|vm| vm.service.stats().pages_mapped == PAGES as u64 - copied)
    });
    let Some(device) = open_what_suspends(folder.path()) else {
        return;
    };
    let copies = |vm: &Vm| frames(vm, (0..PAGES).filter(|page| dies(*page)));
    let (before, files): (Vec<_>, Vec<_>) = vms.iter().map(|vm| (copies(vm), vm.mappings().0)).unzip();
    let start = Instant::now();
    // The service looks every two seconds which files that went it still maps.
    pass_until(&vms, "that pages follow", || {
        start.elapsed() > Duration::from_secs(6)
    });
    for ((vm, before), files) in vms.iter().zip(&before).zip(&files) {
        let followed = vm.mappings().0.difference(files).count();
        let after = copies(vm);
        let replaced = after.iter().zip(before).filter(|(a, b)| a != b).count();
        // The kernel may move a page for reasons of its own.
        assert!(
            followed > 0 && replaced <= before.len() / 100,
            "{replaced} copies were replaced, {followed} new files"
        );
    }
    drop(device);
    pass_until_small(&store, &vms);
    vms.into_iter().for_each(Vm::end);
}
