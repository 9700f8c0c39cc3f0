//! `stat`: what stores and their VMs say of themselves.

use crate::which_store::WhichStore;
use clap::Args;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::time::Duration;
use vmm_dedup_host::table::{self, Column, Table};
use vmm_dedup_host::units::{self, count, mib, pages_mib};
use vmm_dedup_host::view::{HostView, StoreView};
use vmm_dedup_host::{Failure, account, put, say};
use vmm_dedup_protocol::clock;
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::observer::Vm;

/// Show what this host's stores and VMs save and cost.
///
/// Exit code 1 if a store does not answer or is full, or a VM is frozen or has not passed for long; all that is known is shown.
#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    #[command(flatten)]
    store: WhichStore,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const COLUMNS: [Column; 16] = [
    Column::name("VM"),
    Column::text("DOMAIN", 7),
    Column::number("PID", 5),
    Column::text("STATE", 1),
    Column::number("LAST PASS", 3),
    Column::number("SAVED", 1),
    Column::number("SIZE", 9),
    Column::number("SHARED", 4),
    Column::number("UNIQUE", 6),
    Column::number("BREAKS", 4),
    Column::number("MAPPINGS", 9),
    Column::number("CPU S", 2),
    Column::number("BUDGET", 8),
    Column::number("PERIOD", 10),
    Column::number("STOP", 11),
    Column::number("RESERVE", 12),
];

/// Runs the command.
pub(crate) fn run(args: &StatArgs) -> Result<(), Failure> {
    let host = args.store.look()?;
    if args.json {
        let text = serde_json::to_string_pretty(&Told::of(&host)).map_err(Failure::from_error)?;
        say!("{text}");
    } else {
        print(&host, &args.store.words());
    }
    host.well(&args.store.words())
}

/// All that there is to tell.
#[derive(Serialize)]
struct Told<'a> {
    /// Nothing if no store says anything.
    saved_net_bytes: Option<i64>,
    /// If there is but one.
    #[serde(skip_serializing_if = "Option::is_none")]
    store: Option<Value>,
    stores: Vec<Value>,
    vms: Vms<'a>,
}

/// VMs, each of which is told of and forgotten: as values all of them together take many times the memory of their text.
struct Vms<'a>(&'a HostView);

impl Serialize for Vms<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.vms().map(|(store, vm)| {
            let mut told = account::vm_json(vm);
            told["domain"] = store.domain().into();
            told["store"] = store.socket.to_string_lossy().into();
            told
        }))
    }
}

impl<'a> Told<'a> {
    fn of(host: &'a HostView) -> Self {
        let stores: Vec<Value> = host.stores.iter().map(store_json).collect();
        Self {
            saved_net_bytes: host.accounts().next().map(|_| host.saved_net()),
            store: match &stores[..] {
                [only] => Some(only.clone()),
                _ => None,
            },
            stores,
            vms: Vms(host),
        }
    }
}

fn store_json(store: &StoreView) -> Value {
    let mut told = match &store.account {
        Ok((stats, _)) => account::store_json(stats),
        Err(_) => json!({}),
    };
    let record = store.record.as_ref();
    told["socket"] = store.socket.to_string_lossy().into();
    told["state"] = state(store).into();
    told["domain"] = store.domain().into();
    told["pid"] = record.map(|record| record.pid).into();
    let started = up(store).map(|up| account::unix_time(up).as_secs());
    told["started_unix"] = started.into();
    told["up_seconds"] = up(store).map(|up| up.as_secs()).into();
    told["version"] = record.map(|record| record.version.clone()).into();
    told["metrics"] = record.and_then(|record| Some(record.metrics?.to_string())).into();
    told
}

/// For how long a store has run, if it does.
fn up(store: &StoreView) -> Option<Duration> {
    let answers = store.account.is_ok();
    let record = store.record.as_ref().filter(|_| answers)?;
    Some(clock::age(record.started.saturating_mul(1000)))
}

/// How a store is, in a word.
fn state(store: &StoreView) -> &'static str {
    store
        .account
        .as_ref()
        .map_or_else(|(silence, _)| silence.word(), |_| "running")
}

/// `store_words`: how a command asks the same stores.
fn print(host: &HostView, store_words: &str) {
    let vms = host.vms().count();
    let width = table::width();
    let say_wrapped = |line: &str| {
        let lines = table::wrapped(line, width.unwrap_or(usize::MAX));
        lines.iter().for_each(|line| say!("{line}"));
    };
    say_wrapped(&saved_line(host));
    host.stores
        .iter()
        .flat_map(store_lines)
        .for_each(|line| say_wrapped(&line));
    if vms == 0 {
        match (host.accounts().count(), host.stores.len()) {
            (0, _) => {}
            (answer, all) if answer < all => say_wrapped("no VM is connected to the stores that answer"),
            _ => say!("no VM is connected"),
        }
        return;
    }
    say!();
    vm_table(host).lines(width).iter().for_each(|line| say!("{line}"));
    let refused = host.vms().filter(|(_, vm)| vm.reason.is_some()).count();
    if refused > 0 {
        say_wrapped(&format!(
            "not deduplicated: {}; `vmm-dedup doctor{store_words}` tells what to change",
            count(refused, "VM", "VMs")
        ));
    }
    host.vms()
        .for_each(|(_, vm)| put!("{}", account::engine_lines(vm)));
}

/// What is saved, and by whom, as far as stores say so.
fn saved_line(host: &HostView) -> String {
    let stores = match (host.accounts().count(), host.stores.len()) {
        (0, all) if host.forbidden() == all => {
            let which = if all == 1 { "the store" } else { "the stores" };
            return format!(
                "saved net: not known, this user may not use {which}: run this as root, or as the user whose VMs it serves"
            );
        }
        (0, 1) => return "saved net: not known, the store does not answer".into(),
        (0, _) => return "saved net: not known, no store answers".into(),
        (_, 1) => String::new(),
        _ => format!(" in {}", host.answering()),
    };
    let vms = count(host.vms().count(), "VM", "VMs");
    format!("saved net {} by {vms}{stores}", mib(host.saved_net()))
}

/// What there is to tell of a store.
fn store_lines(store: &StoreView) -> Vec<String> {
    let mut about = vec![store.socket.display().to_string()];
    if let Some(record) = &store.record {
        about.push(format!("process {}", record.pid));
        about.extend(up(store).map(|up| format!("up {}", units::span(up))));
        about.push(format!("version {}", record.version));
    }
    if store
        .account
        .as_ref()
        .is_ok_and(|(stats, _)| account::is_secure(stats))
    {
        about.push("secure".to_owned());
    }
    let domain = store
        .domain()
        .map_or(String::new(), |domain| format!(" {domain}"));
    let mut lines = vec![format!("store{domain}: {} ({})", state(store), about.join(", "))];
    if let Ok((stats, vms)) = &store.account {
        lines.extend(account_lines(stats, vms));
        lines.extend(store.if_full().map(|what_to_do| {
            let times = account::refused_full(stats);
            format!("  FULL: refused {times}; pages called unique may have twins: {what_to_do}")
        }));
    }
    lines
}

fn account_lines(s: &StoreStats, vms: &[Vm]) -> [String; 3] {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    [
        format!(
            "  {} kept once, {} not kept again",
            pages_mib(s.pages_shared),
            pages_mib(s.pages_sharing)
        ),
        format!("  {}", account::saved_in_parts(s, vms)),
        format!(
            "  memory {} for {} in use, of at most {}; metadata {}; CPU {:.2} s",
            mib(signed(s.resident_bytes)),
            mib(signed(account::in_use_bytes(s))),
            mib(signed(account::limit_bytes(s))),
            mib(signed(s.metadata_bytes)),
            s.cpu_ns as f64 / 1e9
        ),
    ]
}

/// A VM's memory; one that is not served has told nothing of it here.
fn size(pages: u64) -> String {
    match pages.saturating_mul(units::PAGE_BYTES) {
        0 => "-".to_owned(),
        bytes => units::short(i64::try_from(bytes).unwrap_or(i64::MAX)),
    }
}

fn vm_table(host: &HostView) -> Table {
    let mut table = Table::new(&COLUMNS);
    for (store, vm) in host.vms() {
        let s = &vm.stats;
        let served = vm.reason.is_none();
        let shared = account::shared_bytes(s);
        let unique = s.pages_unshared.saturating_mul(units::PAGE_BYTES);
        table.row([
            vm.name.clone(),
            store.domain().unwrap_or("?").to_owned(),
            account::pid(vm).to_string(),
            account::condition(vm).to_owned(),
            account::last_pass_text(vm),
            units::short(vm.saved_net_bytes),
            size(s.pages),
            units::short(i64::try_from(shared).unwrap_or(i64::MAX)),
            units::short(i64::try_from(unique).unwrap_or(i64::MAX)),
            s.breaks_total().to_string(),
            s.vmas.to_string(),
            format!("{:.2}", s.cpu_ns.total() as f64 / 1e9),
            account::setting(served, s.cpu_percent, " %"),
            account::setting(served, s.pass_period_ms, " ms"),
            account::setting(served, s.stop_target_us, " us"),
            account::setting(served, s.reserve_target, ""),
        ]);
    }
    table
}
