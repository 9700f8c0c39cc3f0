//! `set`: changes what the dedup services of running VMs do.

use crate::which_store::WhichStore;
use clap::Args;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use vmm_dedup_host::table::{self, shortened, wrapped};
use vmm_dedup_host::units::{self, count};
use vmm_dedup_host::view::{StoreView, address};
use vmm_dedup_host::{Failure, account, hint, say};
use vmm_dedup_protocol::control::{MAX_PASS_PERIOD_MS, MAX_RESERVE, MAX_STOP_TARGET_US, Settings, Switch};
use vmm_dedup_protocol::observer::Vm;

/// Time between two looks at how far memory has come back.
const LOOK: Duration = Duration::from_millis(500);

/// VMs that are asked at a time.
const AT_A_TIME: usize = 16;

/// No name is cut shorter than this.
const SHORTEST_NAME: usize = 12;

/// Settings of a service that it reads when it starts.
const NOT_LIVE: [&str; 12] = [
    "name",
    "max_vmas",
    "huge_policy",
    "huge_split_pages",
    "use_source",
    "sampling",
    "pack",
    "breaks",
    "heal_stall_us",
    "search",
    "search_socket",
    "verify",
];

/// What there is to change.
const CHANGES: &str =
    "on, off, cpu_percent=PERCENT, pass_period_ms=MS, stop_target_us=US or reserve_pages=PAGES";

/// Change settings of running VMs: switch merging on or off, set budgets, the pass period or the copy-on-write reserve
///
/// The changes of a VM are made all or none, and last until it ends. VM is a name
/// as `vmm-dedup stat` shows it, NAME.PID, or a pattern with * and ?, quoted for
/// the shell. Who may open the store's socket may do this.
///
/// Changes:
///   on, off              whether to merge; what is shared stays shared
///   cpu_percent=PERCENT  CPU time that dedup may use, 1 to 100 percent of one
///                        core (also: budget)
///   pass_period_ms=MS    time from one pass to the next, 10 to 3,600,000 ms
///   stop_target_us=US    how long pages should be away at most while they are
///                        merged, 10 to 100,000 us
///   reserve_pages=PAGES  managed breaks: pages kept ready for writers
///                        (also: reserve)
///
/// Nothing more is merged; what is shared stays shared:
///   vmm-dedup set web-1 off
/// And all memory goes back to the VM, which needs as much free memory:
///   vmm-dedup set web-1 off --unmerge
/// Merge again, with at most 5 % of a core each:
///   vmm-dedup set 'web-*' on cpu_percent=5
/// All VMs of all stores of this host:
///   vmm-dedup set --all off
#[derive(Args, Debug)]
#[command(
    verbatim_doc_comment,
    override_usage = "vmm-dedup set [OPTIONS] <VM> <CHANGE>...\n       vmm-dedup set [OPTIONS] --all <CHANGE>..."
)]
pub(crate) struct SetArgs {
    /// The VM or a pattern, then the changes.
    #[arg(required = true, value_name = "VM CHANGE")]
    words: Vec<String>,
    /// All VMs; all words are changes.
    #[arg(long)]
    all: bool,
    /// With off: bring all shared memory back, and wait until it is.
    #[arg(long)]
    unmerge: bool,
    #[command(flatten)]
    store: WhichStore,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    On,
    Off,
    Budget(u32),
    Reserve(u32),
    Period(u32),
    StopTarget(u32),
}

fn parse_change(text: &str) -> Result<Change, String> {
    let number = |value: &str, min: u32, max: u32, what: &str| match value.parse() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!("{what} must be {min} to {max}")),
    };
    let (key, value) = match text.split_once('=') {
        None if text == "on" => return Ok(Change::On),
        None if text == "off" => return Ok(Change::Off),
        None => (text.to_owned(), None),
        Some((key, value)) => (key.replace('-', "_"), Some(value)),
    };
    match (key.as_str(), value) {
        ("budget" | "cpu_percent", Some(value)) => {
            number(value, 1, 100, "cpu_percent, in percent of one core,").map(Change::Budget)
        }
        ("reserve" | "reserve_pages", Some(value)) => {
            number(value, 1, MAX_RESERVE, "reserve_pages").map(Change::Reserve)
        }
        ("pass_period_ms", Some(value)) => {
            number(value, 10, MAX_PASS_PERIOD_MS, "pass_period_ms").map(Change::Period)
        }
        ("stop_target_us", Some(value)) => {
            number(value, 10, MAX_STOP_TARGET_US, "stop_target_us").map(Change::StopTarget)
        }
        (key, _) if NOT_LIVE.contains(&key.split('.').next().unwrap_or_default()) => Err(format!(
            "{key} cannot be changed while the VM runs: change it in the VM's settings, and start the VM again"
        )),
        _ => Err(format!("{text:?}: expected {CHANGES}")),
    }
}

impl SetArgs {
    /// The VM or pattern, unless all are meant, and the changes.
    fn words(&self) -> Result<(Option<&str>, Settings), Failure> {
        let (pattern, changes) = match (self.all, &self.words[..]) {
            (true, changes) => (None, changes),
            (false, [vm, changes @ ..]) => (Some(vm.as_str()), changes),
            (false, []) => return Err(Failure::usage("name a VM")),
        };
        if changes.is_empty() {
            return Err(Failure::usage(format!("say what to change: {CHANGES}")));
        }
        let changes: Result<Vec<Change>, String> = changes.iter().map(|text| parse_change(text)).collect();
        Ok((pattern, self.settings(&changes.map_err(Failure::usage)?)?))
    }

    fn settings(&self, changes: &[Change]) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        for change in changes {
            let again = match change {
                Change::On => settings.switch.replace(Switch::On).is_some(),
                Change::Off if self.unmerge => settings.switch.replace(Switch::OffUnmerge).is_some(),
                Change::Off => settings.switch.replace(Switch::Off).is_some(),
                Change::Budget(percent) => settings.cpu_percent.replace(*percent).is_some(),
                Change::Reserve(pages) => settings.reserve_pages.replace(*pages).is_some(),
                Change::Period(ms) => settings.pass_period_ms.replace(*ms).is_some(),
                Change::StopTarget(us) => settings.stop_target_us.replace(*us).is_some(),
            };
            if again {
                return Err(Failure::usage("each setting can be given once"));
            }
        }
        if self.unmerge && settings.switch != Some(Switch::OffUnmerge) {
            return Err(Failure::usage("--unmerge goes with off"));
        }
        Ok(settings)
    }
}

/// Runs the command.
pub(crate) fn run(args: &SetArgs) -> Result<(), Failure> {
    let (pattern, settings) = args.words()?;
    let host = args.store.ask()?;
    let meant = match pattern {
        Some(pattern) => host.matching(pattern)?,
        None => host.vms().collect(),
    };
    match meant[..] {
        [] => Err(Failure::new(host.nobody())),
        [(store, vm)] => set(
            store,
            vm,
            settings,
            args.unmerge && std::io::stderr().is_terminal(),
        ),
        _ => set_many(&meant, settings, &args.store.words()),
    }
    // A store that says nothing may have VMs that are meant as well.
    .and_then(|()| match pattern {
        Some(pattern) if !pattern.contains(['*', '?']) => Ok(()),
        _ => host.complete(),
    })
}

/// Changes one VM; `watched`: shows how far it is.
fn set(store: &StoreView, vm: &Vm, settings: Settings, watched: bool) -> Result<(), Failure> {
    if account::is_frozen(vm) {
        return Err(Failure::new(format!(
            "VM {}: its process {} is stopped, and nothing was changed: `kill -CONT {}` lets it go on",
            vm.name, vm.pid, vm.pid
        )));
    }
    let mut observer = store.observer()?;
    let (tell, told) = channel();
    let name = address(vm);
    std::thread::spawn(move || tell.send(observer.set(&name, settings)));
    let done = match watched {
        true => watch(&told, store, vm),
        false => told.recv().map_err(|_| RecvTimeoutError::Disconnected),
    };
    match done {
        Ok(done) => done.map_err(|error| store.failure(error)),
        Err(_) => Err(Failure::new("the question was not asked")),
    }
}

/// Changes several VMs, some at a time, and tells of each in their order. `store_words`: how a command asks the same stores.
fn set_many(meant: &[(&StoreView, &Vm)], settings: Settings, store_words: &str) -> Result<(), Failure> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME.min(meant.len()) {
            scope.spawn(|| {
                while let Some((store, vm)) = meant.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = vm.reason.is_none().then(|| set(store, vm, settings, false));
                    if let Ok(mut results) = results.lock() {
                        results.push((address(vm), result));
                    }
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_default();
    let mut failed = 0;
    for (_, vm) in meant {
        match results.iter().find(|(name, _)| *name == address(vm)) {
            Some((_, None)) => say_of(vm, "refused, left as it is"),
            Some((_, Some(Ok(())))) => say_of(vm, "done"),
            Some((_, Some(Err(failure)))) => {
                failed += 1;
                say_of(vm, &format!("NOT DONE: {failure}"));
            }
            None => failed += 1,
        }
    }
    let refused = meant.iter().filter(|(_, vm)| vm.reason.is_some()).count();
    match failed {
        0 if refused == meant.len() => Err(Failure::new(format!(
            "nothing was changed: all {refused} VMs are refused, `vmm-dedup explain{store_words}` tells why"
        ))),
        0 => Ok(()),
        n => Err(Failure::new(format!(
            "{} of {} could not be changed",
            n,
            count(meant.len(), "VM", "VMs")
        ))),
    }
}

/// Tells what became of a VM: a name is cut, and a text broken, where the terminal ends.
fn say_of(vm: &Vm, what: &str) {
    let width = table::width().unwrap_or(usize::MAX);
    let room = width.saturating_sub(what.chars().count() + 2).max(SHORTEST_NAME);
    let lines = wrapped(&format!("{}: {what}", shortened(&vm.name, room)), width);
    lines.iter().for_each(|line| say!("{line}"));
}

/// Shows how many pages are still shared until the answer comes.
fn watch<T>(told: &Receiver<T>, store: &StoreView, vm: &Vm) -> Result<T, RecvTimeoutError> {
    loop {
        match told.recv_timeout(LOOK) {
            Err(RecvTimeoutError::Timeout) => {}
            done => {
                hint!("\r\x1b[K");
                return done;
            }
        }
        let shared = account::of_store(&store.socket).ok().and_then(|(_, vms)| {
            let found = vms.into_iter().find(|v| (&v.name, v.pid) == (&vm.name, vm.pid));
            found.map(|v| v.stats.pages_mapped)
        });
        if let Some(pages) = shared {
            hint!("\r\x1b[K{}: still shared: {}", vm.name, units::pages(pages));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read_by_all_their_names_and_wrong_ones_named() {
        for text in ["budget=7", "cpu_percent=7", "cpu-percent=7"] {
            assert_eq!(parse_change(text), Ok(Change::Budget(7)));
        }
        for text in ["reserve=16777216", "reserve_pages=16777216"] {
            assert_eq!(parse_change(text), Ok(Change::Reserve(MAX_RESERVE)));
        }
        for (text, part) in [
            ("budget=101", "1 to 100"),
            ("budget=0", "1 to 100"),
            ("reserve=", "1 to 16777216"),
            ("onn", "expected on, off"),
            ("budget", "expected on, off"),
            ("stop_target_us=5", "10 to 100000"),
            ("pass_period_ms=9", "10 to 3600000"),
            ("pass_period_ms", "expected on, off"),
            ("max_vmas=5", "cannot be changed while the VM runs"),
            ("sampling.interval_ms=5", "cannot be changed while the VM runs"),
            ("pack.on=true", "cannot be changed while the VM runs"),
            ("monitor_interval_ms=5", "expected on, off"),
        ] {
            let error = parse_change(text).expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }
}
