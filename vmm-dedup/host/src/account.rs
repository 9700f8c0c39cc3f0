//! What a page store and the services of its VMs say of themselves, as figures and as JSON.

use crate::failure::Failure;
use crate::process::{self, Stat};
use crate::silence;
use crate::units;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use vmm_dedup_protocol::clock;
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::observer::{Observer, Vm};
use vmm_dedup_protocol::stats::{
    BytesRead, CpuNs, DeviceWork, Hints, Histogram, Packing, STATES, ServiceStats,
};

/// Asks a store for its account and those of all VMs.
///
/// # Errors
/// A [`Failure`] if nobody listens at the socket, or no store of this release.
pub fn of_store(socket: &Path) -> Result<(StoreStats, Vec<Vm>), Failure> {
    let stats = Observer::connect(socket).and_then(|mut observer| observer.stats());
    stats.map_err(|error| silence::failure(socket, None, error))
}

/// Net bytes saved on the host, after all metadata and mappings.
#[must_use]
pub fn saved_net(store: &StoreStats) -> i64 {
    store.saved_net_bytes.cast_signed()
}

/// What is saved net of what dedup takes, in parts that add up to it, for people. Each has one digit after the point. What rounding
/// leaves is with the services; so is what a service has reported between the answers of the store and of its VM.
#[must_use]
pub fn saved_in_parts(s: &StoreStats, vms: &[Vm]) -> String {
    let sum = |of: fn(&ServiceStats) -> u64| -> u64 {
        vms.iter()
            .fold(0, |sum: u64, vm| sum.saturating_add(of(&vm.stats)))
    };
    let pages = |of: fn(&ServiceStats) -> u64| sum(of).saturating_mul(units::PAGE_BYTES);
    let parts = [
        (Part::Spared, pages(|s| s.pages_mapped), "shared"),
        (Part::Spared, pages(|s| s.pages_zero), "zero"),
        (Part::Spared, pages(|s| s.packing.pages), away(is_secure(s))),
        (Part::Taken, s.resident_bytes, "the store's pages"),
        (Part::Taken, s.metadata_bytes, "its tables"),
        (Part::Taken, sum(|s| s.packing.bytes), "what is packed"),
        (Part::Taken, sum(|s| s.vma_bytes), "mappings"),
    ];
    in_parts(saved_net(s), &parts, "services")
}

/// Whether a store shares securely.
#[must_use]
pub fn is_secure(store: &StoreStats) -> bool {
    store.secure != 0
}

/// What pages are that are away from their guest until they are touched.
fn away(secure: bool) -> &'static str {
    if secure { "kept in the store" } else { "packed" }
}

/// [`saved_in_parts`] of a VM, whose part of the store is what is left; `secure`: whether its store shares securely.
#[must_use]
pub fn vm_saved_in_parts(vm: &Vm, secure: bool) -> String {
    let (s, pages) = (&vm.stats, |pages: u64| pages.saturating_mul(units::PAGE_BYTES));
    let parts = [
        (Part::Spared, pages(s.pages_mapped), "shared"),
        (Part::Spared, pages(s.pages_zero), "zero"),
        (Part::Spared, pages(s.packing.pages), away(secure)),
        (Part::Taken, s.packing.bytes, "what is packed"),
        (Part::Taken, s.metadata_bytes, "its service's tables"),
        (Part::Taken, s.vma_bytes, "mappings"),
    ];
    in_parts(
        vm.saved_net_bytes,
        &parts,
        "its part of the store, threads and page tables",
    )
}

/// Whether a part adds to what is saved.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Spared,
    Taken,
}

/// `rest`: what takes that which no part tells of.
fn in_parts(net: i64, parts: &[(Part, u64, &str)], rest: &str) -> String {
    // In tenths of MiB, as they are shown.
    let tenths = |bytes: i64| bytes.saturating_mul(10).saturating_add(1 << 19) >> 20;
    let mib = |tenths: i64| {
        let sign = if tenths < 0 { "-" } else { "" };
        format!("{sign}{}.{}", tenths.abs() / 10, tenths.abs() % 10)
    };
    let rounded = parts.iter().map(|(part, bytes, what)| {
        let bytes = i64::try_from(*bytes).unwrap_or(i64::MAX);
        (*part, tenths(bytes), *what)
    });
    let rounded: Vec<_> = rounded.filter(|(_, tenths, _)| *tenths != 0).collect();
    let sum = |wanted: Part| -> i64 {
        let parts = rounded.iter().filter(|(part, _, _)| *part == wanted);
        parts.fold(0, |sum: i64, (_, tenths, _)| sum.saturating_add(*tenths))
    };
    let left = sum(Part::Spared)
        .saturating_sub(sum(Part::Taken))
        .saturating_sub(tenths(net));
    let told = |wanted: Part| {
        let parts = rounded.iter().filter(|(part, _, _)| *part == wanted);
        parts
            .map(|(_, tenths, what)| format!("{} {what}", mib(*tenths)))
            .collect::<Vec<_>>()
    };
    let (mut spared, mut taken) = (told(Part::Spared), told(Part::Taken));
    if spared.is_empty() {
        spared.push("nothing".to_owned());
    }
    taken.push(format!("{} {rest}", mib(left)));
    format!(
        "saved net {} MiB: {}; less {}",
        mib(tenths(net)),
        spared.join(", "),
        taken.join(", ")
    )
}

/// A store's account for `--json`.
#[must_use]
pub fn store_json(s: &StoreStats) -> Value {
    json!({
        "saved_net_bytes": saved_net(s),
        "pages_shared": s.pages_shared,
        "pages_sharing": s.pages_sharing,
        "slots_limbo": s.slots_limbo,
        "slots_max": s.slots_max,
        "resident_bytes": s.resident_bytes,
        "in_use_bytes": in_use_bytes(s),
        "limit_bytes": limit_bytes(s),
        "full": is_full(s),
        "sightings": s.sightings,
        "marks": s.marks,
        "metadata_bytes": s.metadata_bytes,
        "cpu_seconds": s.cpu_ns as f64 / 1e9,
        "refused_full_total": s.refused_full_total,
        "malformed_total": s.malformed_total,
        "published_total": s.published_total,
        "epoch": s.epoch,
        "secure": is_secure(s),
    })
}

/// What a service does.
#[must_use]
pub fn state_name(state: u64) -> &'static str {
    let at = usize::try_from(state).unwrap_or(usize::MAX);
    STATES.get(at).copied().unwrap_or("unknown")
}

/// Whether a service in this state is switched off, as `vmm-dedup set` does.
#[must_use]
pub fn is_off(state: u64) -> bool {
    state_name(state) == "off"
}

/// What a service does, or why there is none, for people: what it said last is not true of a process that is stopped.
#[must_use]
pub fn condition(vm: &Vm) -> &'static str {
    match (vm.reason, state_name(vm.stats.state)) {
        (Some(reason), _) => reason.label(),
        _ if is_frozen(vm) => "frozen",
        (None, "without_store") => "no store",
        (None, state) => state,
    }
}

/// The number of a VM's process as we see it, and if we cannot see it, the one that its store gives it.
#[must_use]
pub fn pid(vm: &Vm) -> u64 {
    process::number(vm.pid).unwrap_or(vm.pid)
}

/// Whether a VM's process was stopped by a signal or a debugger.
#[must_use]
pub fn is_frozen(vm: &Vm) -> bool {
    process::number(vm.pid)
        .and_then(Stat::of)
        .is_some_and(|stat| stat.is_stopped())
}

/// What is wrong with a VM that is connected to a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It is not deduplicated: the reason's word.
    Refused(&'static str),
    /// Its process is stopped.
    Frozen,
    /// Its service runs, and its last pass ended so long ago.
    Stuck(Duration),
}

/// A running service passes at least this often, but for the longest periods that can be set.
const LONG: Duration = Duration::from_secs(900);

/// What is wrong with a VM, if something is: who watches and `doctor` call the same things wrong.
#[must_use]
pub fn trouble(vm: &Vm) -> Option<Trouble> {
    if let Some(reason) = vm.reason {
        return Some(Trouble::Refused(reason.label()));
    }
    if is_frozen(vm) {
        return Some(Trouble::Frozen);
    }
    // Three passes, where those are rare.
    let long = LONG.max(Duration::from_millis(vm.stats.pass_period_ms.saturating_mul(3)));
    last_pass(vm)
        .filter(|age| *age > long && state_name(vm.stats.state) == "running")
        .map(Trouble::Stuck)
}

/// How long ago a VM's last pass ended, whatever the wall clock did meanwhile; `None` before the first.
#[must_use]
pub fn last_pass(vm: &Vm) -> Option<Duration> {
    (vm.stats.last_pass_ms > 0).then(|| clock::age(vm.stats.last_pass_ms))
}

/// The Unix time of what is so old.
#[must_use]
pub fn unix_time(age: Duration) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(age)
}

/// A VM's memory that is shared or zero: the same in each table.
#[must_use]
pub fn shared_bytes(stats: &ServiceStats) -> u64 {
    let pages = stats.pages_mapped.saturating_add(stats.pages_zero);
    pages.saturating_mul(units::PAGE_BYTES)
}

/// How long ago a VM's last pass ended, for tables.
#[must_use]
pub fn last_pass_text(vm: &Vm) -> String {
    last_pass(vm).map_or("-".to_owned(), units::span)
}

/// A setting for tables, with its unit; `-` where the VM is not served, or there is no such setting.
#[must_use]
pub fn setting(is_served: bool, value: u64, unit: &str) -> String {
    match is_served && value > 0 {
        true => format!("{value}{unit}"),
        false => "-".to_owned(),
    }
}

/// Whether a store has no room: it has refused pages, and holds about as much as it may.
#[must_use]
pub fn is_full(s: &StoreStats) -> bool {
    let limit = limit_bytes(s);
    s.refused_full_total > 0 && s.resident_bytes > limit - limit / 16
}

/// How often a store has refused a page for want of room: it may have been the same page each time.
#[must_use]
pub fn refused_full(s: &StoreStats) -> String {
    match s.refused_full_total {
        1 => "once".to_owned(),
        times => format!("{times} times"),
    }
}

/// Bytes of pages that a store may hold.
#[must_use]
pub fn limit_bytes(s: &StoreStats) -> u64 {
    s.slots_max.saturating_mul(units::PAGE_BYTES)
}

/// Bytes of pages that a store holds and that are in use.
#[must_use]
pub fn in_use_bytes(s: &StoreStats) -> u64 {
    s.pages_shared.saturating_mul(units::PAGE_BYTES)
}

/// What the policy for huge pages did.
fn huge_json(s: &ServiceStats) -> Value {
    json!({
        "kept_hot": s.huge_kept_hot,
        "pages_given_up": s.pages_given_up,
        "split": s.huge_split,
        "splits_total": s.huge_splits_total,
        "whole_total": s.huge_whole_total,
        "contended_total": s.huge_contended_total,
        "rebuilt_total": s.huge_rebuilt_total,
        "zero_total": s.huge_zero_total,
        "rebuild_pinned_total": s.rebuild_pinned_total,
        "rebuild_memory_total": s.rebuild_memory_total,
        "rebuild_other_total": s.rebuild_other_total,
        "samples_total": s.samples_total,
        "samples_used_total": s.samples_used_total,
        "rebuild_us": histogram_json(&s.rebuild),
    })
}

/// What looks for twins, and what an engine was asked.
fn search_json(s: &ServiceStats) -> Value {
    json!({
        "engine": s.search.text(),
        "pages_total": s.searches_total,
        "twins_total": s.search_twins_total,
        "failures_total": s.search_failures_total,
        "device": device_json(&s.search_device),
    })
}

/// What verifies, and what an engine other than the CPU was asked.
fn verify_json(s: &ServiceStats) -> Value {
    json!({
        "engine": s.verify.text(),
        "pages_total": s.verifications_total,
        "failures_total": s.verify_failures_total,
        "device": device_json(&s.verify_device),
    })
}

/// What an engine's device did.
fn device_json(device: &DeviceWork) -> Value {
    let errors: BTreeMap<_, _> = device.errors().into_iter().collect();
    let left_to_cpu: BTreeMap<_, _> = device.left_to_cpu().into_iter().collect();
    json!({
        "requests_total": device.requests,
        "batches_total": device.batches,
        "read_bytes_total": device.bytes,
        "retries_total": { "page_fault": device.faults, "full": device.full, "other": device.again },
        "errors_total": errors,
        "left_to_cpu_total": left_to_cpu,
        "latency_us": histogram_json(&device.latency),
    })
}

/// What engines and their devices did for a VM, a line each; empty if the index and the CPU did all of it.
#[must_use]
pub fn engine_lines(vm: &Vm) -> String {
    let s = &vm.stats;
    let works = [
        (
            "search",
            s.search.text(),
            s.searches_total,
            s.search_failures_total,
            &s.search_device,
        ),
        (
            "verify",
            s.verify.text(),
            s.verifications_total,
            s.verify_failures_total,
            &s.verify_device,
        ),
    ];
    let mut lines = String::new();
    for (work, engine, pages, failures, device) in works {
        if pages == 0 && failures == 0 && *device == DeviceWork::default() {
            continue;
        }
        lines += &format!(
            "{}: {work} by {engine}: {}, {failures} failures\n",
            vm.name,
            units::pages(pages)
        );
        if *device == DeviceWork::default() {
            continue;
        }
        let parts = |parts: &[(&str, u64)]| {
            let parts: Vec<String> = parts.iter().map(|(name, n)| format!("{n} {name}")).collect();
            parts.join(", ")
        };
        lines += &format!(
            "  device: {} requests, {} batches (p50 {} us, p99 {} us); {} page faults, {} times full, {} given again; \
             errors: {}; left to the CPU: {}\n",
            device.requests,
            device.batches,
            device.latency.quantile_us(0.5),
            device.latency.quantile_us(0.99),
            device.faults,
            device.full,
            device.again,
            parts(&device.errors()),
            parts(&device.left_to_cpu()),
        );
    }
    lines
}

/// A VM's account for `--json`.
#[must_use]
pub fn vm_json(vm: &Vm) -> Value {
    let s = &vm.stats;
    let mut all = json!({
        "name": vm.name,
        "pid": pid(vm),
        "state": state_name(s.state),
        "refused": vm.reason.map(|reason| reason.label()),
        "saved_net_bytes": vm.saved_net_bytes,
        "cpu_percent": s.cpu_percent,
        "pages": s.pages,
        "pages_mapped": s.pages_mapped,
        "pages_zero": s.pages_zero,
        "pages_unshared": s.pages_unshared,
        "pages_volatile": s.pages_volatile,
        "pages_new": s.pages_new,
        "pages_pinned": s.pages_pinned,
        "pages_broken": s.pages_broken,
        "huge_ranges": s.huge_ranges,
        "huge": huge_json(s),
        "merges_total": s.merges_total,
        "zero_merges_total": s.zero_merges_total,
        "breaks_kernel_total": s.breaks_kernel_total,
        "breaks_managed_total": s.breaks_managed_total,
        "heal": heal_json(s),
        "mismatches_total": s.mismatches_total,
        "refused_pinned_total": s.refused_pinned_total,
        "refused_vmas_total": s.refused_vmas_total,
        "refused_other_total": s.refused_other_total,
        "published_total": s.published_total,
        "passes_total": s.passes_total,
        "full_scans_total": s.full_scans_total,
        "bytes_read_total": s.bytes_read.total(),
        "bytes_read": bytes_read_json(&s.bytes_read),
        "vmas": s.vmas,
        "vmas_max": s.vmas_max,
        "metadata_bytes": s.metadata_bytes,
        "vma_bytes": s.vma_bytes,
        "reserve_pages": s.reserve_pages,
        "reserve_target": s.reserve_target,
        "reserve_waits_total": s.reserve_waits_total,
        "waiting_writers": s.waiting_writers,
        "cpu_seconds": cpu_json(&s.cpu_ns),
        "stop_us": histogram_json(&s.stop),
        "break_us": histogram_json(&s.break_latency),
    });
    all["unmerged_total"] = s.unmerged_total.into();
    all["pass_period_ms"] = s.pass_period_ms.into();
    all["stop_target_us"] = s.stop_target_us.into();
    all["frozen"] = is_frozen(vm).into();
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    all["last_pass_age_ms"] = last_pass(vm).map(milliseconds).into();
    all["last_pass_unix_ms"] = last_pass(vm).map(unix_time).map_or(0, milliseconds).into();
    all["hints"] = hints_json(&s.hints);
    all["packing"] = packing_json(&s.packing);
    all["search"] = search_json(s);
    all["verify"] = verify_json(s);
    all["refused_swapped_total"] = s.refused_swapped_total.into();
    all["window_failures_total"] = s.window_failures_total.into();
    all
}

/// Pages that are kept packed.
fn packing_json(packing: &Packing) -> Value {
    json!({
        "pages": packing.pages,
        "bytes": packing.bytes,
        "packs_total": packing.packs_total,
        "touched_total": packing.touched_total,
        "early_total": packing.early_total,
        "brought_back_total": packing.brought_back_total,
        "broken_total": packing.broken_total,
        "rebuild_us": histogram_json(&packing.rebuild),
        "stop_us": histogram_json(&packing.stop),
    })
}

/// What the guest's agent says.
fn hints_json(hints: &Hints) -> Value {
    json!({
        "agent": hints.agent_name(),
        "free": hints.free,
        "file_clean": hints.file_clean,
        "file_dirty": hints.file_dirty,
        "anonymous": hints.anonymous,
        "kernel": hints.kernel,
        "never": hints.never,
        "worth": hints.worth,
        "soon": hints.soon,
        "merges_total": hints.merges_total,
        "wrong_total": hints.wrong_total,
        "agents_total": hints.agents_total,
        "agents_refused_total": hints.agents_refused_total,
        "agents_cut_off_total": hints.agents_cut_off_total,
    })
}

/// Pages that the kernel had copied on write.
fn heal_json(s: &ServiceStats) -> Value {
    json!({
        "pages_total": s.heals_total,
        "pinned_total": s.heal_pinned_total,
        "contended_total": s.heal_contended_total,
        "failed_total": s.heal_failed_total,
        "stall_us": histogram_json(&s.heal),
    })
}

fn bytes_read_json(read: &BytesRead) -> Value {
    json!({ "key": read.key, "hash": read.hash, "publish": read.publish, "verify": read.verify })
}

fn cpu_json(cpu: &CpuNs) -> Value {
    json!({
        "track": cpu.track as f64 / 1e9,
        "key": cpu.key as f64 / 1e9,
        "search": cpu.search as f64 / 1e9,
        "hash": cpu.hash as f64 / 1e9,
        "store": cpu.store as f64 / 1e9,
        "merge": cpu.merge as f64 / 1e9,
        "break": cpu.break_ as f64 / 1e9,
        "monitor": cpu.monitor as f64 / 1e9,
    })
}

fn histogram_json(times: &Histogram) -> Value {
    json!({
        "count": times.count(),
        "p50": times.quantile_us(0.5),
        "p99": times.quantile_us(0.99),
        "max": times.max_ns / 1000,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm() -> Vm {
        Vm {
            name: "web".to_owned(),
            pid: 1,
            reason: None,
            saved_net_bytes: 0,
            stats: ServiceStats::default(),
        }
    }

    /// The numbers of a line, with those that are taken below zero; the first is the sum.
    fn numbers(line: &str) -> Vec<i64> {
        let (spared, taken) = line.split_once("; less ").expect("what is taken");
        let of = |text: &str, sign: i64| -> Vec<i64> {
            let words = text.split([' ', ',']).filter(|word| word.contains('.'));
            words
                .map(|word| sign * word.replace('.', "").parse::<i64>().expect("a number"))
                .collect()
        };
        [of(spared, 1), of(taken, -1)].concat()
    }

    #[test]
    fn what_is_saved_is_the_sum_of_the_parts_that_are_shown() {
        let web = |pages_mapped: u64| {
            let mut vm = vm();
            vm.stats = ServiceStats {
                pages_mapped,
                pages_zero: 128,
                vma_bytes: 123_456,
                ..ServiceStats::default()
            };
            vm
        };
        for (mapped, services) in [(12_345, 5_555_555), (0, 1_234_567), (1, 0)] {
            let vms = [web(mapped), web(2 * mapped)];
            let spared = i64::try_from(3 * mapped + 256).expect("a number") * 4096;
            let net = spared - 12_345_678 - 777_777 - 2 * 123_456 - services;
            let store = StoreStats {
                saved_net_bytes: net.cast_unsigned(),
                resident_bytes: 12_345_678,
                metadata_bytes: 777_777,
                ..StoreStats::default()
            };
            let line = saved_in_parts(&store, &vms);
            let numbers = numbers(&line);
            assert_eq!(numbers[0], numbers[1..].iter().sum::<i64>(), "{line}");
            assert!(
                line.contains("zero") && line.contains("mappings") && !line.contains("packed"),
                "{line}"
            );
        }
        let nothing = saved_in_parts(&StoreStats::default(), &[]);
        assert_eq!(nothing, "saved net 0.0 MiB: nothing; less 0.0 services");
        let mut vm = web(512);
        (vm.stats.pages_zero, vm.stats.vma_bytes, vm.saved_net_bytes) = (0, 0, 1 << 20);
        let line = vm_saved_in_parts(&vm, false);
        let expected =
            "saved net 1.0 MiB: 2.0 shared; less 1.0 its part of the store, threads and page tables";
        assert_eq!(line, expected);
        vm.stats.pages_mapped = u64::MAX;
        vm.saved_net_bytes = i64::MIN;
        assert!(vm_saved_in_parts(&vm, false).starts_with("saved net -"));
    }

    #[test]
    fn a_vm_without_a_service_has_no_settings() {
        assert_eq!(setting(true, 20, " %"), "20 %");
        assert_eq!((&*setting(true, 0, ""), &*setting(false, 20, " %")), ("-", "-"));
    }

    #[test]
    fn engines_are_told_of_if_they_did_anything() {
        let mut vm = vm();
        assert_eq!(engine_lines(&vm), "");
        vm.stats.verifications_total = 7;
        assert_eq!(engine_lines(&vm).lines().count(), 1);
        vm.stats.verify_device.requests = 7;
        vm.stats.verify_device.cpu_instead = 3;
        vm.stats.verify_device.latency.observe(1500);
        let text = engine_lines(&vm);
        assert!(text.starts_with("web: verify by "), "{text}");
        assert!(
            text.contains("7 requests") && text.contains("3 instead"),
            "{text}"
        );
        let json = vm_json(&vm);
        assert_eq!(json["verify"]["device"]["left_to_cpu_total"]["instead"], 3);
        assert_eq!(json["verify"]["device"]["latency_us"]["count"], 1);
        assert_eq!(json["search"]["device"]["requests_total"], 0);
    }
}
