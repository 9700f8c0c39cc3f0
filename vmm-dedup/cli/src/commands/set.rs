//! `set`: changes what a running VM's dedup service does.

use crate::store_socket::StoreSocket;
use clap::Args;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use vmm_dedup_host::{Failure, account};
use vmm_dedup_protocol::control::{MAX_RESERVE, Settings, Switch};
use vmm_dedup_protocol::observer::{Error, Observer};

/// Time between two looks at how far memory has come back.
const LOOK: Duration = Duration::from_millis(500);

/// Change settings of a running VM: switch merging on or off, set its CPU budget or its copy-on-write reserve.
///
/// The changes are made all or none, and last until the VM ends. Who may open the store's socket may do this.
///
/// Examples:
///   vmm-dedup set web-1 off                 nothing more is merged; what is shared stays shared
///   vmm-dedup set web-1 off --unmerge       and all memory goes back to the VM: needs as much free memory
///   vmm-dedup set web-1 on budget=5         merge again, with at most 5 % of a core
///   vmm-dedup set web-1 reserve=8192        managed breaks: keep 8192 pages (32 MiB) ready for writers
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct SetArgs {
    /// The VM: its name as `vmm-dedup stat` shows it, or NAME.PID.
    vm: String,
    /// on, off, budget=PERCENT (of one core, 1 to 100), reserve=PAGES.
    #[arg(required = true, value_name = "CHANGE", value_parser = parse_change)]
    changes: Vec<Change>,
    /// With off: bring all shared memory back, and wait until it is.
    #[arg(long)]
    unmerge: bool,
    #[command(flatten)]
    store: StoreSocket,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    On,
    Off,
    Budget(u32),
    Reserve(u32),
}

fn parse_change(text: &str) -> Result<Change, String> {
    let number = |value: &str, max: u32, what: &str| match value.parse() {
        Ok(n) if (1..=max).contains(&n) => Ok(n),
        _ => Err(format!("{what} must be 1 to {max}")),
    };
    match text.split_once('=') {
        None if text == "on" => Ok(Change::On),
        None if text == "off" => Ok(Change::Off),
        Some(("budget", value)) => {
            number(value, 100, "a budget, in percent of one core,").map(Change::Budget)
        }
        Some(("reserve", value)) => number(value, MAX_RESERVE, "a reserve, in pages,").map(Change::Reserve),
        _ => Err("expected on, off, budget=PERCENT or reserve=PAGES".into()),
    }
}

impl SetArgs {
    fn settings(&self) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        for change in &self.changes {
            let again = match change {
                Change::On => settings.switch.replace(Switch::On).is_some(),
                Change::Off if self.unmerge => settings.switch.replace(Switch::OffUnmerge).is_some(),
                Change::Off => settings.switch.replace(Switch::Off).is_some(),
                Change::Budget(percent) => settings.cpu_percent.replace(*percent).is_some(),
                Change::Reserve(pages) => settings.reserve_pages.replace(*pages).is_some(),
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
    let settings = args.settings()?;
    let mut observer = Observer::connect(&args.store.path).map_err(Failure::from_error)?;
    let (tell, told) = channel();
    let vm = args.vm.clone();
    std::thread::spawn(move || tell.send(observer.set(&vm, settings)));
    let done = if args.unmerge && std::io::stderr().is_terminal() {
        watch(&told, &args.store.path, &args.vm)
    } else {
        told.recv().map_err(|_| RecvTimeoutError::Disconnected)
    };
    match done {
        Ok(done) => done.map_err(Failure::from_error),
        Err(_) => Err(Failure::new("the question was not asked")),
    }
}

/// Shows how many pages are still shared until the answer comes.
fn watch(
    told: &Receiver<Result<(), Error>>,
    store: &Path,
    vm: &str,
) -> Result<Result<(), Error>, RecvTimeoutError> {
    loop {
        match told.recv_timeout(LOOK) {
            Err(RecvTimeoutError::Timeout) => {}
            done => {
                eprint!("\r\x1b[K");
                return done;
            }
        }
        let shared = account::of_store(store).ok().and_then(|(_, vms)| {
            let found = vms.into_iter().find(|v| v.is_called(vm));
            found.map(|v| v.stats.pages_mapped)
        });
        if let Some(pages) = shared {
            eprint!("\r\x1b[K{vm}: {pages} pages are still shared");
            let _ = std::io::stderr().flush();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read_and_wrong_ones_named() {
        assert_eq!(parse_change("budget=7"), Ok(Change::Budget(7)));
        assert_eq!(parse_change("reserve=16777216"), Ok(Change::Reserve(MAX_RESERVE)));
        for (text, part) in [
            ("budget=101", "1 to 100"),
            ("budget=0", "1 to 100"),
            ("reserve=", "1 to 16777216"),
            ("onn", "expected on, off"),
        ] {
            let error = parse_change(text).expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }
}
