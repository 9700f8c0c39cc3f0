//! `explain`: what became of VMs' pages, and why.

mod json;
mod text;

use crate::which_store::WhichStore;
use clap::Args;
use serde_json::Value;
use std::ops::Range;
use vmm_dedup_host::view::{HostView, StoreView, address};
use vmm_dedup_host::{Failure, account, note, say, table};
use vmm_dedup_protocol::observer::{Account, Vm};

/// Explain what became of pages: how many are shared, zero, unique, volatile, pinned and so on; for a VM that is not
/// deduplicated, the reason and what would lift it.
///
/// Without a VM, of all VMs of all stores together.
#[derive(Args, Debug)]
pub(crate) struct ExplainArgs {
    /// The VM: its name as `vmm-dedup stat` shows it, or NAME.PID; or a pattern with * and ?, quoted for the shell: those VMs
    /// together.
    vm: Option<String>,
    /// Only the pages at these guest physical addresses, e.g. 0x100000-0x200000 (the end is not included).
    #[arg(long, value_name = "START-END", value_parser = parse_range, requires = "vm")]
    gpa: Option<Range<u64>>,
    #[command(flatten)]
    store: WhichStore,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn parse_range(text: &str) -> Result<Range<u64>, String> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    let ends = text
        .split_once('-')
        .map(|(start, end)| (number(start), number(end)));
    match ends {
        Some((Some(start), Some(end))) if start < end => Ok(start..end),
        _ => Err("expected START-END, e.g. 0x100000-0x200000, with START below END".into()),
    }
}

/// Runs the command.
pub(crate) fn run(args: &ExplainArgs) -> Result<(), Failure> {
    let host = args.store.ask()?;
    match args.vm.as_deref() {
        Some(pattern) if pattern.contains(['*', '?']) => {
            if args.gpa.is_some() {
                return Err(Failure::usage(format!(
                    "--gpa goes with one VM, and {pattern} may be several: name one"
                )));
            }
            several(args, &host, &host.matching(pattern)?, Some(pattern))
        }
        Some(name) => one(args, &host, name),
        None => several(args, &host, &host.vms().collect::<Vec<_>>(), None),
    }
}

fn one(args: &ExplainArgs, host: &HostView, name: &str) -> Result<(), Failure> {
    let (store, vm) = host.vm(name)?;
    let told = ask(store, vm, args.gpa.clone())?;
    match args.json {
        true => print_json(&json::of_vm(store, vm, &told)),
        false => {
            let named = format!("{}{}", host.name_of(vm), args.store.words());
            let mut lines = text::of_vm(store, vm, &told, args.gpa.is_none());
            lines.extend(text::hint(vm, &named));
            print_lines(&lines);
            Ok(())
        }
    }
}

/// VMs together, refused ones by name: all, or those that a pattern means.
fn several(
    args: &ExplainArgs,
    host: &HostView,
    meant: &[(&StoreView, &Vm)],
    pattern: Option<&str>,
) -> Result<(), Failure> {
    let mut told = Vec::new();
    let mut unheard = 0;
    for (store, vm) in meant.iter().copied() {
        match ask(store, vm, None) {
            Ok(account) => told.push((store, vm, account)),
            Err(failure) => {
                unheard += 1;
                note!("vmm-dedup: {failure}");
            }
        }
    }
    match args.json {
        true => {
            let vms: Vec<Value> = told
                .iter()
                .map(|(store, vm, told)| json::of_vm(store, vm, told))
                .collect();
            print_json(&serde_json::json!({ "vms": vms }))?;
        }
        // Nothing is known.
        false if host.accounts().next().is_none() || told.is_empty() && unheard > 0 => {}
        false => print_lines(&text::of_several(host, &told, pattern, &args.store.words())),
    }
    match unheard {
        0 => host.complete(),
        n => Err(Failure::new(format!("VMs that did not answer: {n}"))),
    }
}

/// Asks a VM.
fn ask(store: &StoreView, vm: &Vm, gpa: Option<Range<u64>>) -> Result<Account, Failure> {
    if account::is_frozen(vm) {
        let pid = account::pid(vm);
        return Err(Failure::new(format!(
            "VM {}: its process {} is stopped and cannot answer: `kill -CONT {pid}` lets it go on",
            vm.name, pid
        )));
    }
    let told = store.observer()?.explain(&address(vm), gpa);
    told.map_err(|error| store.failure(error))
}

fn print_json(value: &Value) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::from_error)?;
    say!("{text}");
    Ok(())
}

/// Prints lines, broken where the terminal ends; what goes on is indented as the text that it belongs to.
fn print_lines(lines: &[text::Line]) {
    let width = table::width().unwrap_or(usize::MAX);
    lines
        .iter()
        .flat_map(|line| line.broken(width))
        .for_each(|line| say!("{line}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_wrong_ones_refused() {
        assert_eq!(parse_range("0x1000-8192"), Ok(4096..8192));
        for text in ["", "1", "0x2000-0x1000", "5-5", "0x-1", "1-2-3", "-1-5"] {
            assert!(parse_range(text).is_err(), "{text}");
        }
    }
}
