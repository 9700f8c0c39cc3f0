//! What VMMs do rarely, done by a stand-in (src/bin/standin.rs) under the preload library.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::unmodified::library;
use vmm_dedup_integration_tests::{need_kvm, need_userfaultfd};

/// How long a stand-in may take to share its memory.
const PATIENCE: Duration = Duration::from_secs(60);

/// Plays a scenario; returns what the library logged.
fn play(scenario: &str, breaks: &str) -> String {
    let mut store = StoreThread::start();
    let file = |name: &str| store.path().join(name);
    let period_ms = if scenario == READS { 400 } else { 20 };
    let settings = format!("pass_period_ms = {period_ms}\ncpu_percent = 80\n{breaks}");
    std::fs::write(file("dedup.toml"), settings).expect("a file");
    let child = Command::new(env!("CARGO_BIN_EXE_standin"))
        .arg(scenario)
        .env("LD_PRELOAD", library::path())
        .env("VMM_DEDUP_STORE", store.socket())
        .env("VMM_DEDUP_CONFIG", file("dedup.toml"))
        .env("VMM_DEDUP_LOG", file("dedup.log"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let folder = store.path().to_owned();
    let file = |name: &str| folder.join(name);
    if scenario == RESTARTS {
        store = restart(store, &folder);
    }
    let output = child.wait_with_output().expect("it ends");
    let log = std::fs::read_to_string(file("dedup.log")).unwrap_or_default();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {errors}\n{log}", output.status);
    drop(store);
    log
}

/// The scenario in which memory changes more often than it is looked at.
const READS: &str = "reads";
/// The scenario whose store is killed.
const RESTARTS: &str = "store";

/// Starts another store when the stand-in shares, and tells it.
fn restart(store: StoreThread, folder: &Path) -> StoreThread {
    let start = Instant::now();
    while !folder.join("shared").exists() && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    let store = store.restart();
    std::fs::write(folder.join("restarted"), "").expect("a file");
    store
}

const MANAGED: &str = "[breaks]\nmode = \"managed\"\nreserve_pages = 512\nfloor_bytes = 0\n";

macro_rules! scenarios {
    ($($name:ident: $scenario:expr, $breaks:expr, $says:literal;)*) => {
        $(#[test] fn $name() {
            need_kvm!();
            need_userfaultfd!();
            let log = play($scenario, $breaks);
            assert!(log.contains($says), "{log}");
        })*
    };
}

scenarios! {
    memory_is_given_back_before_a_device_pins_it: "passthrough", "", "vfio:";
    memory_is_given_back_before_a_device_pins_it_with_managed_breaks: "passthrough", MANAGED, "vfio:";
    memory_is_shared_again_when_a_device_has_gone: "passthrough_and_back", "", "vfio:";
    memory_is_shared_again_when_a_vdpa_device_has_gone: "vdpa_and_back", MANAGED, "vfio:";
    what_is_pinned_stays_where_it_is_when_a_device_seems_to_have_gone: "hidden_pin", "", "vfio:";
    memory_that_comes_to_old_addresses_is_left_alone: "reuse", "", "vfio:";
    a_vdpa_device_is_recognised: "vdpa", "", "vfio:";
    a_vhost_scsi_device_is_recognised: "vhost_scsi", "", "vfio:";
    memory_that_the_vmm_protects_keeps_its_protection: "protect", "", "mprotect";
    confidential_guests_are_refused: "confidential", "", "confidential:";
    a_part_of_the_memory_can_be_unmapped: "unmap", "", "is deduplicated";
    a_part_of_the_memory_can_be_replaced: "replace", "", "is deduplicated";
    memory_can_be_moved: "move", "", "is deduplicated";
    the_vmm_may_use_a_userfaultfd_of_its_own: "userfaultfd", "", "foreign_userfaultfd:";
    what_is_freed_is_missed_by_the_vmms_own_userfaultfd: "postcopy", "", "foreign_userfaultfd:";
    what_is_read_from_files_is_shared_before_it_stands_still: READS, "", "is deduplicated";
    forked_children_are_left_alone: "fork", "", "is deduplicated";
    filtered_threads_can_free_shared_memory: "filtered", "", "is deduplicated";
    filtered_threads_can_free_shared_memory_with_managed_breaks: "filtered", MANAGED, "is deduplicated";
    memory_that_others_map_is_refused_by_range: "shared", "", "shared_memory:";
    a_store_that_is_killed_is_replaced: RESTARTS, "", "is deduplicated";
    a_vmm_that_was_sandboxed_before_is_refused: "sandboxed", "", "other:";
}

/// What the VMM opens is looked at before it has the descriptor.
fn nothing_is_merged_from_then_on(scenario: &str) {
    need_kvm!();
    need_userfaultfd!();
    let log = play(scenario, MANAGED);
    if log.contains("is deduplicated") {
        assert!(log.contains("merging is suspended"), "{log}");
    } else {
        eprintln!("SKIPPED: no overlayfs can be mounted here");
    }
}

#[test]
fn nothing_is_merged_once_a_file_is_open_for_direct_io() {
    nothing_is_merged_from_then_on("direct_io/open");
}

#[test]
fn nothing_is_merged_once_a_file_is_set_to_direct_io() {
    nothing_is_merged_from_then_on("direct_io/fcntl");
}

#[test]
fn without_a_store_the_library_does_nothing() {
    need_kvm!();
    let output = Command::new(env!("CARGO_BIN_EXE_standin"))
        .arg("sandboxed")
        .env("LD_PRELOAD", library::path())
        .env_remove("VMM_DEDUP_STORE")
        .output()
        .expect("it runs");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert!(Path::new(env!("CARGO_BIN_EXE_standin")).is_file());
}
