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

/// Show what this host's stores and VMs save and cost.
///
/// Exit code 1 if a store does not answer; what the others say is shown all the same.
#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    #[command(flatten)]
    store: WhichStore,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const COLUMNS: [Column; 14] = [
    Column::name("VM"),
    Column::text("DOMAIN", 7),
    Column::number("PID", 5),
    Column::text("STATE", 1),
    Column::number("LAST PASS", 3),
    Column::number("SAVED", 1),
    Column::number("SHARED", 4),
    Column::number("UNIQUE", 6),
    Column::number("BREAKS", 4),
    Column::number("MAPPINGS", 9),
    Column::number("CPU S", 2),
    Column::number("BUDGET", 8),
    Column::number("PERIOD", 10),
    Column::number("STOP", 11),
];

/// Runs the command.
pub(crate) fn run(args: &StatArgs) -> Result<(), Failure> {
    let host = args.store.ask()?;
    if args.json {
        let text = serde_json::to_string_pretty(&Told::of(&host)).map_err(Failure::from_error)?;
        say!("{text}");
    } else {
        print(&host);
    }
    host.complete()
}

/// All that there is to tell.
#[derive(Serialize)]
struct Told<'a> {
    saved_net_bytes: i64,
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
            saved_net_bytes: host.saved_net(),
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

fn print(host: &HostView) {
    let vms = host.vms().count();
    let stores = match host.stores.len() {
        1 => String::new(),
        n => format!(" in {}", count(n, "store", "stores")),
    };
    say!(
        "saved net {} by {}{stores}",
        mib(host.saved_net()),
        count(vms, "VM", "VMs")
    );
    let width = table::width();
    for store in &host.stores {
        for line in store_lines(store) {
            let wide = width.unwrap_or(usize::MAX);
            table::wrapped(&line, wide).iter().for_each(|line| say!("{line}"));
        }
    }
    if vms == 0 {
        say!("no VM is connected");
        return;
    }
    say!();
    vm_table(host).lines(width).iter().for_each(|line| say!("{line}"));
    host.vms()
        .for_each(|(_, vm)| put!("{}", account::engine_lines(vm)));
}

/// What there is to tell of a store.
fn store_lines(store: &StoreView) -> Vec<String> {
    let mut about = vec![store.socket.display().to_string()];
    if let Some(record) = &store.record {
        about.push(format!("process {}", record.pid));
        about.extend(up(store).map(|up| format!("up {}", units::span(up))));
        about.push(format!("version {}", record.version));
    }
    let mut lines = vec![format!(
        "store {}: {} ({})",
        store.domain().unwrap_or("?"),
        state(store),
        about.join(", ")
    )];
    if let Ok((stats, _)) = &store.account {
        lines.extend(account_lines(stats));
    }
    lines
}

fn account_lines(s: &StoreStats) -> Vec<String> {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let mut lines = vec![
        format!(
            "  {} kept once, {} not kept again; saved net {}",
            pages_mib(s.pages_shared),
            pages_mib(s.pages_sharing),
            mib(account::saved_net(s))
        ),
        format!(
            "  memory {} for {} in use, of at most {}; metadata {}; CPU {:.2} s",
            mib(signed(s.resident_bytes)),
            mib(signed(account::in_use_bytes(s))),
            mib(signed(account::limit_bytes(s))),
            mib(signed(s.metadata_bytes)),
            s.cpu_ns as f64 / 1e9
        ),
    ];
    if account::is_full(s) {
        lines.push(format!(
            "  FULL: {} pages were refused; pages called unique may have twins: raise --max-mib",
            s.refused_full_total
        ));
    }
    lines
}

fn vm_table(host: &HostView) -> Table {
    let mut table = Table::new(&COLUMNS);
    for (store, vm) in host.vms() {
        let s = &vm.stats;
        let shared = s
            .pages_mapped
            .saturating_add(s.pages_zero)
            .saturating_mul(units::PAGE_BYTES);
        let unique = s.pages_unshared.saturating_mul(units::PAGE_BYTES);
        table.row([
            vm.name.clone(),
            store.domain().unwrap_or("?").to_owned(),
            vm.pid.to_string(),
            account::condition(vm).to_owned(),
            account::last_pass_text(vm),
            units::short(vm.saved_net_bytes),
            units::short(i64::try_from(shared).unwrap_or(i64::MAX)),
            units::short(i64::try_from(unique).unwrap_or(i64::MAX)),
            s.breaks_total().to_string(),
            s.vmas.to_string(),
            format!("{:.2}", s.cpu_ns.total() as f64 / 1e9),
            format!("{} %", s.cpu_percent),
            format!("{} ms", s.pass_period_ms),
            format!("{} us", s.stop_target_us),
        ]);
    }
    table
}
