//! Cloud Hypervisor and QEMU as they are, with the preload library: their guests share and stay right, whatever the
//! VMM does with the memory.

use std::time::{Duration, Instant};
use tempfile::TempDir;
use vmm_dedup::{Reason, ServiceStats};
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::unmodified::{Options, Program, Vmm, assert_clean, library};
use vmm_dedup_integration_tests::{need_kvm, need_userfaultfd};
use vmm_dedup_payload::{PayloadConfig, WorkingSet};
use vmm_dedup_protocol::observer;

const COMMON_MIB: u64 = 12;
const COMMON_PAGES: u64 = COMMON_MIB * 256;
const MANAGED: &str = "[breaks]\nmode = \"managed\"\nreserve_pages = 512\nfloor_bytes = 0\n";
const BALLOON: &str = "virtio-balloon-pci,disable-legacy=on,free-page-reporting=on";

/// Returns from a test, saying why, where a program is missing.
macro_rules! need {
    ($program:expr, $what:literal) => {
        match $program {
            Some(program) => program,
            None => {
                eprintln!(concat!("SKIPPED: no ", $what));
                return;
            }
        }
    };
}

/// Makes a test of each scenario for each VMM.
macro_rules! under_both {
    ($($scenario:ident)*) => {
        mod cloud_hypervisor {
            use super::*;
            $(#[test] fn $scenario() {
                need_kvm!();
                need_userfaultfd!();
                let program = need!(Program::cloud_hypervisor(), "cloud-hypervisor on the PATH or in CLOUD_HYPERVISOR");
                super::$scenario(&Bench::new(program));
            })*
        }
        mod qemu {
            use super::*;
            $(#[test] fn $scenario() {
                need_kvm!();
                need_userfaultfd!();
                let program = need!(Program::qemu(), "qemu-system-x86_64 on the PATH");
                super::$scenario(&Bench::new(program));
            })*
        }
    };
}

/// Makes a test of each scenario for a Cloud Hypervisor that has the service in it.
macro_rules! embedded {
    ($($scenario:ident)*) => {
        mod embedded {
            use super::*;
            $(#[test] fn $scenario() {
                need_kvm!();
                need_userfaultfd!();
                let program = need!(Program::embedded(), "Cloud Hypervisor with --dedup in CLOUD_HYPERVISOR_DEDUP");
                super::$scenario(&Bench::new(program));
            })*
        }
    };
}

// Broken settings end that one before there is a VM.
embedded! {
    four_vms_share
    vms_share_securely_in_huge_pages_too
    sharing_survives_a_reboot
    sharing_survives_pausing
    sharing_survives_a_snapshot_and_its_restore
    sharing_survives_a_live_migration
    plugged_memory_is_taken_on
    memory_for_virtio_mem_is_taken_on
    ballooned_pages_hold_nothing_stale
    shared_memory_is_refused_by_name
    hugetlb_memory_is_refused_by_name
    a_store_that_comes_later_is_found
    a_store_that_restarts_loses_nothing
    a_vm_that_is_switched_off_is_left_alone
    a_device_that_is_not_there_costs_no_sharing
    counters_have_what_a_store_is_told
}

under_both! {
    four_vms_share
    vms_share_securely_in_huge_pages_too
    sharing_survives_a_reboot
    sharing_survives_pausing
    sharing_survives_a_snapshot_and_its_restore
    sharing_survives_a_live_migration
    plugged_memory_is_taken_on
    memory_for_virtio_mem_is_taken_on
    ballooned_pages_hold_nothing_stale
    shared_memory_is_refused_by_name
    hugetlb_memory_is_refused_by_name
    a_store_that_comes_later_is_found
    a_store_that_restarts_loses_nothing
    a_vm_that_is_switched_off_is_left_alone
    broken_settings_do_not_stop_the_vm
}

/// A VMM, a store, and a folder for both.
struct Bench {
    program: Program,
    store: StoreThread,
    folder: TempDir,
}

impl Bench {
    fn new(program: Program) -> Self {
        Self {
            program,
            store: StoreThread::start(),
            folder: tempfile::tempdir().expect("a temporary folder"),
        }
    }

    fn options(&self, name: &str) -> Options {
        Options::new(name, &self.store.socket())
    }

    /// Cloud Hypervisor saves the state of nested guests, which not every KVM has.
    fn movable(&self, name: &str) -> Options {
        Options {
            behind: (!self.is_qemu()).then(library::nested_state),
            ..self.options(name)
        }
    }

    fn start(&self, seed: u64, options: &Options) -> Vmm {
        Vmm::start(&self.program, self.folder.path(), payload(seed), options)
    }

    /// `n` VMs that share their common pages.
    fn sharing(&self, n: u64, options: impl Fn(&str) -> Options) -> Vec<Vmm> {
        let start = |seed| self.start(seed, &options(&format!("vm-{seed}")));
        let vms: Vec<Vmm> = (1..=n).map(start).collect();
        vms.iter().for_each(|vm| vm.wait_ready(1));
        vms.iter().for_each(|vm| self.wait_shared(vm));
        vms
    }

    fn stats(&self, vm: &Vmm) -> Option<ServiceStats> {
        self.listed(vm)
            .filter(|vm| vm.reason.is_none())
            .map(|vm| vm.stats)
    }

    fn reason(&self, vm: &Vmm) -> Option<Reason> {
        self.listed(vm)?.reason
    }

    /// What the store says of a VM.
    fn listed(&self, vm: &Vmm) -> Option<observer::Vm> {
        let mut observer = observer::Observer::connect(&self.store.socket()).expect("the store is there");
        let (_, vms) = observer.stats().expect("it answers");
        vms.into_iter().find(|listed| listed.pid == u64::from(vm.pid()))
    }

    fn wait_shared(&self, vm: &Vmm) {
        self.wait(vm, "sharing", |s| s.pages_mapped >= COMMON_PAGES);
    }

    fn wait(&self, vm: &Vmm, what: &str, is: impl Fn(&ServiceStats) -> bool) {
        let start = Instant::now();
        while !self.stats(vm).is_some_and(|s| is(&s)) {
            let stats = self.stats(vm);
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{what} does not happen: {stats:?} {}",
                vm.story()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn is_qemu(&self) -> bool {
        matches!(self.program, Program::Qemu(_))
    }
}

fn wait_until(what: &str, vm: &Vmm, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{what} does not happen: {}",
            vm.story()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn payload(seed: u64) -> PayloadConfig {
    PayloadConfig::default()
        .seed(seed)
        .private_mib(2)
        .zero_mib(4)
        .common_mib(COMMON_MIB)
        .ws_area(WorkingSet::Private)
        .ws_pages(256)
        .rate(1000)
        .report_ms(100)
        .seconds(100_000)
}

fn four_vms_share(bench: &Bench) {
    let vms = bench.sharing(4, |name| bench.options(name));
    let saved: u64 = vms
        .iter()
        .filter_map(|vm| bench.stats(vm))
        .map(|s| s.pages_mapped)
        .sum();
    assert!(saved >= 4 * COMMON_PAGES);
    for vm in vms {
        assert!(vm.dedup_log().contains("is deduplicated"), "{}", vm.story());
        assert_clean(&vm.finish(1));
    }
}

/// With memory as each VMM has it by default, huge pages included. A page counts as shared when two VMs keep it in one slot.
fn vms_share_securely_in_huge_pages_too(bench: &Bench) {
    let bench = Bench {
        program: bench.program.clone(),
        store: StoreThread::secure(),
        folder: tempfile::tempdir().expect("a temporary folder"),
    };
    let start = |seed| {
        let options = bench.options(&format!("vm-{seed}"));
        let config = options.config.clone() + "[pack]\nidle_ms = 100\n";
        bench.start(seed, &Options { config, ..options })
    };
    let vms: Vec<Vmm> = (1..=2).map(start).collect();
    vms.iter().for_each(|vm| vm.wait_ready(1));
    let begun = Instant::now();
    wait_until("secure sharing", &vms[0], || {
        let mut observer = observer::Observer::connect(&bench.store.socket()).expect("the store is there");
        let (store, _) = observer.stats().expect("it answers");
        store.pages_sharing >= COMMON_PAGES * 9 / 10
    });
    println!(
        "{} of {COMMON_PAGES} pages are shared after {:?}",
        COMMON_PAGES * 9 / 10,
        begun.elapsed()
    );
    for vm in &vms {
        let stats = bench.stats(vm).expect("it is listed");
        println!(
            "{} huge pages were split, {} are left",
            stats.huge_splits_total, stats.huge_ranges
        );
    }
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

fn sharing_survives_a_reboot(bench: &Bench) {
    // Cloud Hypervisor maps new memory at a reboot. QEMU keeps it, and the guest writes it anew: what the kernel copies
    // stays private, so the service must.
    let vms = bench.sharing(2, |name| Options {
        config: bench.options(name).config + if bench.is_qemu() { MANAGED } else { "" },
        ..bench.options(name)
    });
    for nth in 2..=3 {
        for vm in &vms {
            vm.reboot();
            vm.wait_ready(nth);
        }
        vms.iter().for_each(|vm| bench.wait_shared(vm));
    }
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

fn sharing_survives_pausing(bench: &Bench) {
    let vms = bench.sharing(2, |name| bench.options(name));
    for vm in &vms {
        vm.pause();
        let passes = || bench.stats(vm).map(|s| s.passes_total);
        let before = passes();
        // A service that is told of it rests.
        if !matches!(bench.program, Program::Embedded(_)) {
            wait_until("a pass", vm, || passes() > before);
        }
        vm.resume();
        wait_until("a pass", vm, || passes() > before);
    }
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

fn sharing_survives_a_snapshot_and_its_restore(bench: &Bench) {
    // The second way of Cloud Hypervisor fills memory on demand, by a userfaultfd of its own.
    let ways = if bench.is_qemu() {
        vec![""]
    } else {
        vec!["", ",memory_restore_mode=ondemand"]
    };
    let options = |name: &str| bench.movable(name);
    let mut vms = bench.sharing(2, options);
    let state = bench.folder.path().join("snapshot");
    let saved = vms.swap_remove(0);
    saved.pause();
    saved.snapshot(&state);
    let name = saved.name().to_owned();
    drop(saved);
    for (n, way) in ways.into_iter().enumerate() {
        let options = Options {
            restore: Some((name.clone(), state.clone())),
            memory_options: way.into(),
            ..options(&format!("restored-{n}"))
        };
        let restored = bench.start(1, &options);
        restored.resume();
        bench.wait_shared(&restored);
        assert_clean(&restored.finish(1));
    }
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

fn sharing_survives_a_live_migration(bench: &Bench) {
    let mut vms = bench.sharing(2, |name| bench.movable(name));
    let source = vms.swap_remove(0);
    let options = Options {
        receive: Some(source.name().to_owned()),
        ..bench.movable("moved")
    };
    let moved = bench.start(1, &options);
    source.migrate_to(&moved);
    drop(source);
    bench.wait_shared(&moved);
    assert_clean(&moved.finish(1));
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

/// The payload has no driver for it: the VMM has the memory, and offers it to the guest.
fn memory_for_virtio_mem_is_taken_on(bench: &Bench) {
    const MORE_MIB: u64 = 128;
    let vms = bench.sharing(2, |name| {
        let options = bench.options(name);
        let (memory, arguments) = match bench.is_qemu() {
            true => (
                String::new(),
                vec![
                    "-object".to_owned(),
                    format!("memory-backend-ram,id=more,size={MORE_MIB}M"),
                    "-device".to_owned(),
                    "virtio-mem-pci,id=mem,memdev=more,requested-size=0".to_owned(),
                ],
            ),
            false => (",hotplug_method=virtio-mem".to_owned(), Vec::new()),
        };
        Options {
            memory_options: memory,
            arguments,
            hotplug_mib: MORE_MIB,
            ..options
        }
    });
    for vm in &vms {
        bench.wait(vm, "taking it on", |s| s.pages == (48 + MORE_MIB) * 256);
        vm.offer(MORE_MIB);
        bench.wait_shared(vm);
        let passes = bench.stats(vm).map_or(0, |s| s.passes_total);
        bench.wait(vm, "two passes", |s| s.passes_total > passes + 2);
        let reason = bench.reason(vm);
        assert_eq!(reason, None);
    }
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

fn plugged_memory_is_taken_on(bench: &Bench) {
    const MORE_MIB: u64 = 128;
    let vms = bench.sharing(2, |name| Options {
        hotplug_mib: MORE_MIB,
        ..bench.options(name)
    });
    let before = bench.stats(&vms[0]).map_or(0, |s| s.pages);
    vms[0].plug(MORE_MIB);
    bench.wait(&vms[0], "growing", |s| s.pages == before + MORE_MIB * 256);
    bench.wait_shared(&vms[0]);
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

fn ballooned_pages_hold_nothing_stale(bench: &Bench) {
    let arguments = match bench.is_qemu() {
        true => ["-device", BALLOON],
        false => ["--balloon", "size=0,free_page_reporting=on"],
    };
    for (name, breaks) in [("kernel", ""), ("managed", MANAGED)] {
        let mut vms = bench.sharing(2, |vm| {
            let options = bench.options(&format!("{vm}-{name}"));
            Options {
                arguments: arguments.map(String::from).to_vec(),
                config: options.config.clone() + breaks,
                ..options
            }
        });
        let mut nth = 0;
        for command in [b'b', b'f', b'b'] {
            nth += 1;
            for vm in &mut vms {
                bench.wait_shared(vm);
                let (pages, stale) = vm.balloon(command, nth);
                assert_eq!((pages, stale), (COMMON_PAGES, 0), "{}", vm.story());
            }
        }
        // What was filled again is shared again.
        vms.iter().for_each(|vm| bench.wait_shared(vm));
        vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
    }
}

fn shared_memory_is_refused_by_name(bench: &Bench) {
    let mut options = bench.options("shared");
    if bench.is_qemu() {
        options.arguments = [
            "-object",
            "memory-backend-memfd,id=ram,size=48M,share=on",
            "-machine",
            "memory-backend=ram",
        ]
        .map(String::from)
        .to_vec();
    } else {
        options.memory_options = ",shared=on".into();
    }
    let vm = bench.start(1, &options);
    vm.wait_ready(1);
    wait_until("the refusal", &vm, || {
        bench.reason(&vm) == Some(Reason::SharedMemory)
    });
    assert!(
        vm.dedup_log()
            .contains("start the VM with private anonymous memory")
    );
    assert_clean(&vm.finish(1));
}

fn hugetlb_memory_is_refused_by_name(bench: &Bench) {
    const HUGE_PAGES: usize = 24;
    let Some(_pages) = HugePages::reserve(HUGE_PAGES) else {
        eprintln!("SKIPPED: vm.nr_hugepages cannot be raised by {HUGE_PAGES}");
        return;
    };
    let mut options = bench.options("huge");
    if bench.is_qemu() {
        options.arguments = [
            "-object",
            "memory-backend-memfd,id=ram,size=48M,hugetlb=on,hugetlbsize=2M",
            "-machine",
            "memory-backend=ram",
        ]
        .map(String::from)
        .to_vec();
    } else {
        options.memory_options = ",hugepages=on,hugepage_size=2M".into();
    }
    let vm = bench.start(1, &options);
    vm.wait_ready(1);
    wait_until("the refusal", &vm, || bench.reason(&vm) == Some(Reason::Hugetlb));
    assert!(vm.dedup_log().contains("hugetlb:"), "{}", vm.story());
    assert_clean(&vm.finish(1));
}

/// Huge pages of the host, put back at the end.
struct HugePages {
    before: String,
}

impl HugePages {
    const SETTING: &str = "/proc/sys/vm/nr_hugepages";

    fn reserve(more: usize) -> Option<Self> {
        let read = || std::fs::read_to_string(Self::SETTING).ok();
        let before = read()?;
        let wanted = before.trim().parse::<usize>().ok()? + more;
        std::fs::write(Self::SETTING, wanted.to_string()).ok()?;
        let this = Self { before };
        (read()?.trim() == wanted.to_string()).then_some(this)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(Self::SETTING, &self.before);
    }
}

fn a_store_that_comes_later_is_found(bench: &Bench) {
    let socket = bench.folder.path().join("later.sock");
    let vms: Vec<Vmm> = (1..=2)
        .map(|seed| bench.start(seed, &Options::new(&format!("vm-{seed}"), &socket)))
        .collect();
    for vm in &vms {
        vm.wait_ready(1);
        wait_until("the refusal", vm, || vm.dedup_log().contains("store:"));
    }
    std::os::unix::fs::symlink(bench.store.socket(), &socket).expect("a link");
    vms.iter().for_each(|vm| bench.wait_shared(vm));
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

fn a_store_that_restarts_loses_nothing(bench: &Bench) {
    let mut bench = Bench::new(bench.program.clone());
    let vms = bench.sharing(2, |name| bench.options(name));
    bench.store = bench.store.restart();
    vms.iter().for_each(|vm| bench.wait_shared(vm));
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

/// All memory is given back before the VMM opens the device, and shared again when that has failed.
fn a_device_that_is_not_there_costs_no_sharing(bench: &Bench) {
    let vms = bench.sharing(2, |name| bench.options(name));
    for vm in &vms {
        vm.pass_through_nothing();
        let taken_up = |log: String| log.matches("is deduplicated").count() > 1;
        wait_until("sharing again", vm, || taken_up(vm.dedup_log()));
        bench.wait_shared(vm);
    }
    vms.into_iter().for_each(|vm| assert_clean(&vm.finish(1)));
}

/// What the VMM counts itself is there as well.
fn counters_have_what_a_store_is_told(bench: &Bench) {
    let vms = bench.sharing(2, |name| bench.options(name));
    for vm in vms {
        let counters = vm.counters();
        let told = bench.stats(&vm).expect("it is served");
        let mut names: Vec<&str> = told.numbers().map(|(name, _)| name).collect();
        names.sort_unstable();
        let dedup = counters["dedup"].as_object().expect("a table");
        assert_eq!(dedup.keys().collect::<Vec<_>>(), names);
        assert_eq!(dedup["pages"], told.pages);
        assert!(dedup["pages_mapped"].as_u64() >= Some(COMMON_PAGES), "{counters}");
        assert_clean(&vm.finish(1));
    }
}

fn a_vm_that_is_switched_off_is_left_alone(bench: &Bench) {
    let options = Options {
        config: "enabled = false\n".into(),
        ..bench.options("off")
    };
    let vm = bench.start(1, &options);
    vm.wait_ready(1);
    bench.wait(&vm, "connecting", |_| true);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(bench.stats(&vm).map(|s| s.passes_total), Some(0));
    assert_clean(&vm.finish(1));
}

fn broken_settings_do_not_stop_the_vm(bench: &Bench) {
    let options = Options {
        config: "cpu_percent = 400\n".into(),
        ..bench.options("broken")
    };
    let vm = bench.start(1, &options);
    vm.wait_ready(1);
    wait_until("the refusal", &vm, || {
        vm.dedup_log().contains("cpu_percent is 400")
    });
    wait_until("the announcement", &vm, || {
        bench.reason(&vm) == Some(Reason::Other)
    });
    assert_clean(&vm.finish(1));
}

/// The library is for LD_PRELOAD of VMMs, and is also loaded into whatever starts them.
#[test]
fn programs_that_do_not_talk_to_kvm_get_no_thread() {
    let library = library::path();
    assert!(library.is_file());
    let status = std::process::Command::new("cat")
        .arg("/proc/self/status")
        .env("LD_PRELOAD", library)
        .env("VMM_DEDUP_STORE", "/nonexistent/store.sock")
        .output()
        .expect("cat runs");
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(text.contains("Threads:\t1\n"), "{text}");
    assert_eq!(String::from_utf8_lossy(&status.stderr), "");
}
