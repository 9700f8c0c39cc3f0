//! The payload guest under the reference VMM. Needs /dev/kvm (any back end); skips visibly without.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_dedup_payload::{Console, PayloadConfig, Report, Rewrite, WorkingSet, measure_tsc_khz};
use vmm_dedup_refvmm::{Error, ExitReason, Image, RunningVm, ThpMode, Vm, VmConfig};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Generous: the machine may be busy, and KVM may be a software back end.
const SOON: Duration = Duration::from_secs(60);

/// Whether there is a KVM to test with; says so if not. With CI=true its absence is a failure.
fn kvm_is_there(test: &str) -> bool {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) if std::env::var("CI").is_ok_and(|ci| ci == "true") => panic!("{test}: /dev/kvm: {error}"),
        Err(error) => {
            eprintln!("SKIPPED {test}: /dev/kvm: {error}");
            false
        }
    }
}

/// An initrd of real files: shared libraries, each padded to whole pages.
fn initrd_of_libraries(mib: u64) -> NamedTempFile {
    let mut initrd = NamedTempFile::new().expect("a temporary file");
    let mut size = 0;
    for library in libraries(Path::new("/usr/lib")) {
        let left = mib * MIB - size;
        if left == 0 {
            break;
        }
        let content = fs::read(&library).expect("libraries are readable");
        let take = (content.len() as u64).min(left);
        let padded = take.next_multiple_of(PAGE).min(left);
        let mut content = content;
        content.resize(usize::try_from(padded).expect("a library fits into memory"), 0);
        initrd.write_all(&content).expect("room for the initrd");
        size += padded;
    }
    assert!(size > 0, "there are shared libraries under /usr/lib");
    initrd
}

fn libraries(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)
        .into_iter()
        .flatten()
        .filter_map(io::Result::ok)
    {
        let (path, kind) = (
            entry.path(),
            entry.file_type().expect("the kind of a directory entry"),
        );
        if kind.is_dir() {
            found.extend(libraries(&path));
        } else if kind.is_file()
            && path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().contains(".so"))
        {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn config(memory_mib: u64, initrd: Option<&Path>, payload: PayloadConfig) -> VmConfig {
    VmConfig {
        memory_mib,
        vcpus: 1,
        kernel: Image::Bytes(vmm_dedup_payload::ELF),
        initrd: initrd.map(Path::to_owned),
        cmdline: payload.tsc_khz(measure_tsc_khz()).command_line(),
        thp: ThpMode::Default,
    }
}

fn start(config: &VmConfig) -> (RunningVm, Console) {
    let console = Console::new();
    let vm = Vm::new(config).expect("the VM is built");
    let running = vm.start(Box::new(console.clone())).expect("the VM starts");
    (running, console)
}

fn last_tick(console: &Console) -> (u64, u64) {
    let mut ticks = console.reports().into_iter().filter_map(|report| match report {
        Report::Tick { writes, restores, .. } => Some((writes, restores)),
        _ => None,
    });
    ticks.next_back().expect("there is at least the final tick")
}

#[test]
fn payload_fills_works_verifies_and_powers_off() {
    if !kvm_is_there("payload_fills_works_verifies_and_powers_off") {
        return;
    }
    let initrd = initrd_of_libraries(16);
    let payload = PayloadConfig::default()
        .seed(7)
        .private_mib(8)
        .zero_mib(4)
        .common_mib(4)
        .seconds(2);

    let (vm, console) = start(&config(96, Some(initrd.path()), payload));

    let ready = console.wait_ready(SOON).expect("it gets ready");
    assert!(
        matches!(
            ready,
            Report::Ready {
                pages: 8192,
                files: 4096,
                private: 2048,
                zero: 1024,
                ..
            }
        ),
        "{ready:?}"
    );
    assert!(console.wait_done(SOON).expect("it ends"), "{}", console.text());
    assert_eq!(vm.wait().expect("no crash"), ExitReason::PowerOff);
    let (writes, _) = last_tick(&console);
    // Half of the rate that was asked for, in case the machine is busy.
    assert!(writes > 10_000, "{}", console.text());
    let verified = console.reports().contains(&Report::Verify {
        pages: 8192,
        errors: 0,
        writes,
    });
    assert!(verified, "{}", console.text());
}

#[test]
fn restored_pages_hold_their_original_content() {
    if !kvm_is_there("restored_pages_hold_their_original_content") {
        return;
    }
    let payload = PayloadConfig::default()
        .private_mib(1)
        .zero_mib(8)
        .ws_area(WorkingSet::Zero)
        .ws_pages(512)
        .rewrite(Rewrite::Restore)
        .rate(0)
        .seconds(1);

    let (vm, console) = start(&config(32, None, payload));

    assert!(console.wait_done(SOON).expect("it ends"), "{}", console.text());
    assert_eq!(vm.wait().expect("no crash"), ExitReason::PowerOff);
    assert!(last_tick(&console).1 > 512, "{}", console.text());
}

#[test]
fn changed_memory_is_noticed() {
    if !kvm_is_there("changed_memory_is_noticed") {
        return;
    }
    // Written by nobody: the guest is idle, so the change can only be found by the final verification.
    let payload = PayloadConfig::default()
        .private_mib(4)
        .zero_mib(4)
        .ws_pages(0)
        .seconds(60)
        .report_ms(50);
    let (vm, console) = start(&config(32, None, payload));
    console.wait_ready(SOON).expect("it gets ready");

    // The data pages begin at 2 MiB; the private area comes first without an initrd.
    vm.pause();
    let place = GuestAddress(2 * MIB + 5 * PAGE + 8);
    let word: u64 = vm.memory().read_obj(place).expect("in memory");
    vm.memory().write_obj(word ^ 1, place).expect("in memory");
    vm.resume();
    vm.serial_input(b"q");

    assert!(!console.wait_done(SOON).expect("it ends"), "{}", console.text());
    let bad = Report::Bad {
        page: 5,
        word: Some(1),
        want: word,
        got: word ^ 1,
    };
    assert!(console.reports().contains(&bad), "{}", console.text());
    assert_eq!(vm.wait().expect("no crash"), ExitReason::PowerOff);
}

#[test]
fn paused_guest_does_nothing_and_goes_on_after() {
    if !kvm_is_there("paused_guest_does_nothing_and_goes_on_after") {
        return;
    }
    let payload = PayloadConfig::default().seconds(60).report_ms(20);
    let (vm, console) = start(&config(32, None, payload));
    console
        .wait_for(SOON, |report| matches!(report, Report::Tick { .. }))
        .expect("it works");

    vm.pause();
    let paused_at = console.text();
    thread::sleep(Duration::from_millis(200));
    assert_eq!(console.text(), paused_at);
    vm.resume();
    vm.serial_input(b"q");

    assert!(console.wait_done(SOON).expect("it ends"), "{}", console.text());
}

#[test]
fn running_guest_can_be_stopped_and_its_memory_stays() {
    if !kvm_is_there("running_guest_can_be_stopped_and_its_memory_stays") {
        return;
    }
    let (vm, console) = start(&config(32, None, PayloadConfig::default().seconds(60)));
    console.wait_ready(SOON).expect("it gets ready");
    let memory = vm.memory().clone();

    vm.stop();

    assert_eq!(vm.wait().expect("no crash"), ExitReason::Stopped);
    let word: u64 = memory.read_obj(GuestAddress(2 * MIB)).expect("still mapped");
    assert_ne!(word, 0);
}

#[test]
fn memory_above_4_gib_is_used() {
    if !kvm_is_there("memory_above_4_gib_is_used") {
        return;
    }
    // The initrd is just below 3 GiB, the data begins at 2 MiB: nothing is touched above, but it is mapped.
    let config = config(3200, None, PayloadConfig::default().seconds(0));
    let vm = Vm::new(&config).expect("the VM is built");
    assert_eq!(
        vm.memory().iter().map(GuestMemoryRegion::len).sum::<u64>(),
        3200 * MIB
    );
    let console = Console::new();

    let running = vm.start(Box::new(console.clone())).expect("the VM starts");

    assert!(console.wait_done(SOON).expect("it ends"), "{}", console.text());
    assert_eq!(running.wait().expect("no crash"), ExitReason::PowerOff);
}

#[test]
fn guest_that_lacks_memory_says_so() {
    if !kvm_is_there("guest_that_lacks_memory_says_so") {
        return;
    }
    let (vm, console) = start(&config(32, None, PayloadConfig::default().private_mib(64)));

    assert!(!console.wait_done(SOON).expect("it ends"));
    assert!(
        console.text().contains("fail reason=memory"),
        "{}",
        console.text()
    );
    assert_eq!(vm.wait().expect("no crash"), ExitReason::PowerOff);
}

#[test]
fn kernel_that_is_none_is_refused() {
    let mut text = NamedTempFile::new().expect("a temporary file");
    text.write_all(b"#!/bin/sh\n").expect("room for it");
    let mut config = config(32, None, PayloadConfig::default());

    config.kernel = Image::Path(text.path().to_owned());

    assert!(matches!(Vm::new(&config), Err(Error::KernelFormat { .. })));
}

#[test]
fn kernel_that_is_missing_is_named() {
    let mut config = config(32, None, PayloadConfig::default());

    config.kernel = Image::Path("no-such-kernel".into());

    let error = Vm::new(&config).err().expect("it is not there");
    assert_eq!(error.to_string(), "cannot read the kernel no-such-kernel");
}

#[test]
fn configuration_out_of_range_is_refused() {
    let good = config(32, None, PayloadConfig::default());
    good.validate().expect("it is in range");

    let too_small = VmConfig {
        memory_mib: 1,
        ..good.clone()
    };
    let no_vcpus = VmConfig {
        vcpus: 0,
        ..good.clone()
    };
    let long_line = VmConfig {
        cmdline: "x".repeat(5000),
        ..good
    };

    assert!(matches!(too_small.validate(), Err(Error::MemorySize { mib: 1 })));
    assert!(matches!(no_vcpus.validate(), Err(Error::VcpuCount { vcpus: 0 })));
    assert!(matches!(
        long_line.validate(),
        Err(Error::CommandLine { bytes: 5000 })
    ));
}

/// Not a test of behaviour: prints how long a guest of 256 MiB with an initrd of 64 MiB takes to its first report.
#[test]
fn time_to_ready_is_printed() {
    if !kvm_is_there("time_to_ready_is_printed") {
        return;
    }
    let initrd = initrd_of_libraries(64);
    for thp in [ThpMode::Never, ThpMode::Always] {
        let mut config = config(256, Some(initrd.path()), PayloadConfig::default().seconds(0));
        config.thp = thp;
        let clock = Instant::now();
        let (vm, console) = start(&config);
        let started = clock.elapsed();
        console.wait_ready(SOON).expect("it gets ready");
        eprintln!(
            "thp {thp:?}: started after {started:?}, ready after {:?}",
            clock.elapsed()
        );
        vm.wait().expect("no crash");
        eprintln!("thp {thp:?}: verified and off after {:?}", clock.elapsed());
    }
}
