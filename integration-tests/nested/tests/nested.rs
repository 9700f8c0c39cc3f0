//! Every scenario, as a test. Needs QEMU, apt with a Debian mirror, and dpkg-deb; skips visibly where one of them is
//! missing, except in CI. The first test fetches some 90 MB of packages into the target directory. In software each takes a
//! minute or two, on one CPU.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use vmm_dedup_built::{library, package, profile};
use vmm_dedup_nested::host::{Accelerator, Measured, Stage, passes_devices_through};
use vmm_dedup_nested::{Failure, Scenario};

/// A tenth of a guest of 192 MiB: less is no sharing to speak of.
const SOME_PAGES: u64 = 4915;

const CLI: &str = "vmm-dedup";
const PRELOAD: &str = "libvmm_dedup_preload.so";

/// The folder of the CLI and the preload library, which `cargo test` of this package alone does not build. They are copies: cargo
/// removes what it builds again.
fn programs() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        package("vmm-dedup-cli");
        let library = library("vmm-dedup-preload");
        let profile = profile();
        let folder = profile.with_file_name("nested").join("programs");
        std::fs::create_dir_all(&folder).expect("a folder in the target directory");
        for (built, name) in [(profile.join(CLI), CLI), (library, PRELOAD)] {
            std::fs::copy(built, folder.join(name)).expect("it was just built");
        }
        folder
    })
}

/// Plays a scenario; `None`, and the reason on standard error, where this machine cannot.
fn play(scenario: Scenario) -> Option<Measured> {
    try_to_play(scenario).map(|result| result.unwrap_or_else(|failure| panic!("{failure}")))
}

fn try_to_play(scenario: Scenario) -> Option<Result<Measured, Failure>> {
    let folder = programs();
    let stage = Stage {
        cache: folder.parent().expect("it is in the cache").to_owned(),
        vmm_dedup: folder.join(CLI),
        preload: folder.join(PRELOAD),
        guest_programs: folder.to_owned(),
        own: env!("CARGO_BIN_EXE_vmm-dedup-nested").into(),
        accelerator: Accelerator::best(),
        out: None,
    };
    match stage.play(scenario, &mut |text| eprintln!("{scenario}: {text}")) {
        Err(failure) if failure.is_missing() && std::env::var_os("CI").is_none() => {
            eprintln!("SKIPPED {scenario}: {failure}");
            None
        }
        result => Some(result),
    }
}

/// What went wrong when it had to.
fn failure_of(scenario: Scenario) -> Option<String> {
    try_to_play(scenario).map(|result| result.expect_err("this cannot go well").to_string())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn pages(measured: &Measured, name: &str) -> u64 {
    measured[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {measured:?}"))
}

#[test]
fn linux_boots_and_powers_off() {
    let Some(measured) = play(Scenario::Boot) else {
        return;
    };
    assert_eq!(measured["booted_with_1"], true);
    assert_eq!(measured["booted_with_2"], true);
}

#[test]
fn an_old_kernel_is_refused_before_the_guest_starts() {
    let Some(measured) = play(Scenario::OldKernel) else {
        return;
    };
    assert_eq!(measured["exit_code"], 1, "{measured:?}");
    assert_eq!(measured["guest_said"], "");
    let refusal = measured["refusal"].as_str().expect("a text");
    assert!(
        refusal.contains("kernel") && refusal.contains("6.") && refusal.lines().count() == 1,
        "{refusal}"
    );
}

/// The very same guests, first under KSM, then under us. In plain pages both are equal, but for what changes in the guests between
/// the two, and ours has freed more by the host's account. Both say what is left after their own metadata; of that ours counts
/// more: stacks, heap, page tables and mappings (265 bytes each), which KSM's profit leaves out. How many mappings it takes depends on
/// which of the guests is the first to find a page: 9,681 and 21,747 were seen, which is three quarters of a per cent.
#[test]
fn same_guests_save_at_least_what_ksm_saves() {
    let Some(measured) = play(Scenario::Same) else {
        return;
    };
    let (ours, ksm) = (&measured["ours"], &measured["ksm"]);
    let (our_pages, ksm_pages) = (number(&ours["saved_pages"]), number(&ksm["pages_sharing"]));
    assert!(our_pages > 4.0 * SOME_PAGES as f64, "{measured:?}");
    assert!(our_pages >= ksm_pages * 0.99, "{measured:?}");
    let (our_net, ksm_net) = (number(&ours["saved_net_bytes"]), number(&ksm["general_profit"]));
    assert!(our_net >= ksm_net * 0.97, "{measured:?}");
    let (our_freed, ksm_freed) = (
        number(&measured["ours_freed_mib"]),
        number(&measured["ksm_freed_mib"]),
    );
    assert!(our_freed >= ksm_freed * 0.99, "{measured:?}");
    // Every page is somewhere.
    let known = ["zero", "mapped", "unique", "volatile", "broken"];
    let sum: f64 = known.iter().map(|name| number(&ours[*name])).sum();
    assert!(sum > 0.0 && sum <= number(&ours["pages"]), "{measured:?}");
}

#[test]
fn guests_with_different_work_share_and_work_on() {
    let Some(measured) = play(Scenario::Mixed) else {
        return;
    };
    assert!(
        number(&measured["ours"]["saved_pages"]) > 4.0 * SOME_PAGES as f64,
        "{measured:?}"
    );
    assert_eq!(measured["verified"], 4);
}

/// What is hot stays huge, what is cold is shared, what turns hot is huge again, by what DAMON tells.
#[test]
fn damon_tells_which_memory_is_used() {
    let Some(measured) = play(Scenario::Damon) else {
        return;
    };
    let (process, guests) = (&measured["smartmd"]["process"], &measured["smartmd"]["guests"]);
    assert_eq!(process["use_source"], "damon");
    // DAMON has one user at a time.
    assert_eq!(guests["use_source"], "damon, fault-sampling");
    // Of 32 huge pages 8 are hot, and 12 cold ones hold 6 times 256 pages twice. Emulated, L1's clock goes by its instructions, and
    // DAMON misses nothing. With KVM, on a busy machine, the accessing thread may not run while it samples, and it misses what is
    // hot now and then.
    assert!(number(&process["huge_pages"]) >= 6.0, "{measured:?}");
    assert!(
        number(&process["saved_pages"]) >= 6.0 * 256.0 * 0.9,
        "{measured:?}"
    );
    // The same; and the host may have no huge page for some, or a page of theirs in its hands whenever they are tried.
    let (rebuilt, turned) = (number(&process["rebuilt"]), number(&process["turned"]));
    let refused = |why| number(&process["rebuild_refused"][why]);
    assert!(
        turned > 0.0 && rebuilt > 0.0 && (rebuilt + refused("memory") + refused("pinned")) * 2.0 >= turned,
        "{measured:?}"
    );
    // Each guest has 8 hot huge pages, and 64 MiB that both hold.
    assert!(number(&guests["huge_pages"]) >= 12.0, "{measured:?}");
    assert!(number(&guests["saved_pages"]) >= 16384.0 * 0.9, "{measured:?}");
    assert_eq!(measured["users_of_damon_afterwards"], "0");
}

#[test]
fn guests_survive_losses_of_the_store_and_of_each_other() {
    let Some(measured) = play(Scenario::Trouble) else {
        return;
    };
    for name in ["before", "after_store_loss", "after_kill", "after_reboot"] {
        assert!(pages(&measured, name) > SOME_PAGES, "{measured:?}");
    }
    assert!(
        pages(&measured, "after_kill") < pages(&measured, "before"),
        "{measured:?}"
    );
    // Two writers have 1024 pages of files each.
    assert!(pages(&measured, "breaks") > 100, "{measured:?}");
    assert_eq!(measured["verified"], 2);
}

#[test]
fn writers_wait_for_memory_and_nobody_is_killed() {
    let Some(measured) = play(Scenario::Pressure) else {
        return;
    };
    assert!(pages(&measured, "reserve_waits") > 0, "{measured:?}");
    assert_eq!(measured["verified"], 2);
    assert_eq!(measured["oom_kills"], 0);
}

#[test]
fn guests_on_huge_pages_share() {
    let Some(measured) = play(Scenario::Huge) else {
        return;
    };
    // Two guests of 192 MiB: most of what they use.
    assert!(pages(&measured, "huge_mib_at_first") > 64, "{measured:?}");
    assert!(
        number(&measured["ours"]["saved_pages"]) > 2.0 * SOME_PAGES as f64,
        "{measured:?}"
    );
}

#[test]
fn guests_of_other_vmms_share_and_are_estimated() {
    let Some(measured) = play(Scenario::Vmms) else {
        return;
    };
    assert!(!measured.is_empty(), "QEMU at least is here");
    for (vmm, told) in &measured {
        assert!(
            number(&told["estimated"]["duplicates"]["pages"]) > SOME_PAGES as f64,
            "{vmm}: {told}"
        );
        assert!(
            number(&told["ours"]["saved_pages"]) > SOME_PAGES as f64,
            "{vmm}: {told}"
        );
    }
}

/// Of stock Cloud Hypervisor with the preload library, and of one with the engine in it, where they are: CI need not have them.
#[test]
fn a_device_has_all_memory_for_itself_and_sharing_comes_back_behind_it() {
    if !passes_devices_through() {
        eprintln!("SKIPPED passthrough: no Cloud Hypervisor");
        return;
    }
    let Some(measured) = play(Scenario::Passthrough) else {
        return;
    };
    for (vmm, told) in &measured {
        assert!(number(&told["before"]) > SOME_PAGES as f64, "{vmm}: {told}");
        assert_eq!(told["during"], 0, "{vmm}: {told}");
        // A guest's memory, but for a hole or two.
        assert!(number(&told["pinned_kib"]) > 150.0 * 1024.0, "{vmm}: {told}");
        assert!(number(&told["after"]) > SOME_PAGES as f64 / 2.0, "{vmm}: {told}");
    }
}

#[test]
fn a_panic_of_the_host_is_told_with_its_log() {
    let Some(text) = failure_of(Scenario::Panic) else {
        return;
    };
    assert!(text.starts_with("panic: L1 ended early"), "{text}");
    assert!(text.contains("sysrq triggered crash"), "{text}");
}

#[test]
fn a_host_that_hangs_is_ended() {
    let Some(text) = failure_of(Scenario::Hang) else {
        return;
    };
    assert!(text.starts_with("hang: L1 was not done after 20 s"), "{text}");
}
