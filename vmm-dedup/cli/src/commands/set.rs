//! `set`: changes what the dedup services of running VMs do.

use crate::which_store::WhichStore;
use clap::Args;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use vmm_dedup::Setup;
use vmm_dedup_host::table::{self, shortened, wrapped};
use vmm_dedup_host::units::{self, count};
use vmm_dedup_host::view::{StoreView, address};
use vmm_dedup_host::{Failure, account, hint, say};
use vmm_dedup_protocol::control::{Settings, Switch};
use vmm_dedup_protocol::observer::Vm;

/// Time between two looks at how far memory has come back.
const LOOK: Duration = Duration::from_millis(500);

/// VMs that are asked at a time.
const AT_A_TIME: usize = 16;

/// No name is cut shorter than this.
const SHORTEST_NAME: usize = 12;

/// What there is to change.
const CHANGES: &str =
    "on, off, cpu_percent=PERCENT, pass_period_ms=MS, stop_target_us=US or reserve_pages=PAGES";

/// Change settings of running VMs: switch merging on or off, set budgets, the pass period or the copy-on-write reserve
///
/// The changes of a VM are made all or none, and last until it ends. VM is a name
/// as `vmm-dedup stat` shows it, NAME.PID, or a pattern with * and ?, quoted for
/// the shell. Root and the user of the VM's store may do this.
///
/// Changes:
///   on, off              whether to merge; what is shared stays shared
///   cpu_percent=PERCENT  CPU time that dedup may use, 1 to 100 percent of one
///                        core (also: budget, --cpu-percent PERCENT, and in
///                        cores cpu_budget_cores=0.05)
///   pass_period_ms=MS    time from one pass to the next, 10 to 3,600,000 ms
///   stop_target_us=US    how long pages should be away at most while they are
///                        merged, 10 to 100,000 us
///   reserve_pages=PAGES  managed breaks: pages kept ready for writers
///                        (also: reserve, breaks.reserve_pages)
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
    #[arg(required_unless_present = "all", value_name = "VM CHANGE")]
    words: Vec<String>,
    /// As the change cpu_percent.
    #[arg(long, visible_alias = "budget", value_name = "PERCENT")]
    cpu_percent: Option<String>,
    /// All VMs; all words are changes.
    #[arg(long)]
    all: bool,
    /// With off: bring all shared memory back, and wait until it is.
    #[arg(long)]
    unmerge: bool,
    #[command(flatten)]
    store: WhichStore,
}

/// Reads changes: `on`, `off`, or settings by the keys that they have everywhere.
fn parse_changes(words: &[String]) -> Result<Settings, String> {
    let switch_of = |word: &str| match word {
        "on" => Some(Switch::On),
        "off" => Some(Switch::Off),
        _ => None,
    };
    let mut switches = words.iter().filter_map(|word| switch_of(word));
    let mut line = Vec::new();
    for word in words.iter().filter(|word| switch_of(word).is_none()) {
        // As options are spelled.
        let (key, value) = word
            .split_once('=')
            .ok_or_else(|| format!("{word:?}: expected {CHANGES}"))?;
        line.push(format!("{}={value}", key.replace('-', "_")));
    }
    let mut settings = Setup::changes(&line.join(",")).map_err(vmm_dedup_engines::mistake)?;
    let switch = switches.next();
    if switches.next().is_some() || (switch.is_some() && settings.switch.is_some()) {
        return Err("whether to merge can be said once".into());
    }
    settings.switch = switch.or(settings.switch);
    Ok(settings)
}

impl SetArgs {
    /// The VM or pattern, unless all are meant, and the changes.
    fn words(&self) -> Result<(Option<&str>, Settings), Failure> {
        let (pattern, changes) = match (self.all, &self.words[..]) {
            (true, changes) => (None, changes),
            (false, [vm, ..]) if vm.is_empty() => {
                return Err(Failure::usage(
                    "the first word names a VM or is a pattern, and it is empty; --all means all VMs",
                ));
            }
            (false, [vm, changes @ ..]) => (Some(vm.as_str()), changes),
            (false, []) => return Err(Failure::usage("name a VM")),
        };
        let option = self.cpu_percent.as_ref();
        let option = option.map(|percent| format!("cpu_percent={percent}"));
        let changes: Vec<String> = changes.iter().cloned().chain(option).collect();
        if changes.is_empty() {
            return Err(Failure::usage(format!("say what to change: {CHANGES}")));
        }
        let mut settings = parse_changes(&changes).map_err(Failure::usage)?;
        if self.unmerge {
            if settings.switch != Some(Switch::Off) {
                return Err(Failure::usage("--unmerge goes with off"));
            }
            settings.switch = Some(Switch::OffUnmerge);
        }
        Ok((pattern, settings))
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
        )
        .map_err(|why| match account::is_frozen(vm) {
            true => Failure::new(format!("VM {}: {why}", vm.name)),
            false => why,
        }),
        _ => set_many(&meant, settings, &args.store.words()),
    }
    // A store that says nothing may have VMs that are meant as well.
    .and_then(|()| match pattern {
        Some(pattern) if !pattern.contains(['*', '?']) => Ok(()),
        _ => host.complete(),
    })
}

/// Changes one VM; `watched`: shows how far it is. What is wrong is said without the VM's name.
fn set(store: &StoreView, vm: &Vm, settings: Settings, watched: bool) -> Result<(), Failure> {
    if account::is_frozen(vm) {
        let pid = account::pid(vm);
        return Err(Failure::new(format!(
            "its process {pid} is stopped, and nothing was changed: `kill -CONT {pid}` lets it go on"
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

    fn parsed(text: &str) -> Result<Settings, String> {
        let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        parse_changes(&words)
    }

    #[test]
    fn changes_are_read_by_all_their_names_and_wrong_ones_named() {
        for text in [
            "budget=7 on",
            "on cpu_percent=7",
            "cpu-percent=7 on",
            "enabled=true cpu_budget_cores=0.07",
        ] {
            let expected = Settings {
                switch: Some(Switch::On),
                cpu_percent: Some(7),
                ..Settings::default()
            };
            assert_eq!(parsed(text), Ok(expected), "{text}");
        }
        for text in [
            "reserve=9 off",
            "reserve_pages=9 off",
            "off breaks.reserve-pages=9",
        ] {
            let expected = Settings {
                switch: Some(Switch::Off),
                reserve_pages: Some(9),
                ..Settings::default()
            };
            assert_eq!(parsed(text), Ok(expected), "{text}");
        }
        for (text, part) in [
            ("onn", "expected on, off"),
            ("budget", "expected on, off"),
            ("", "expected on, off"),
            ("on off", "said once"),
            ("on enabled=true", "said once"),
            ("budget=7 cpu_percent=7", "one thing"),
            ("reserve=7 breaks.reserve_pages=7", "given twice"),
            ("budget=101", "1 to 100"),
            ("max_vmas=5", "cannot be changed while the VM runs"),
            (
                "monitor_interval_ms=5",
                "unknown field `monitor_interval_ms`, expected one of breaks.",
            ),
        ] {
            let error = parsed(text).expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }
}
