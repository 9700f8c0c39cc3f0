//! `explain`: what became of a VM's pages, and why.

use crate::store_socket::StoreSocket;
use clap::Args;
use serde_json::{Value, json};
use std::ops::Range;
use vmm_dedup_host::{Failure, account};
use vmm_dedup_protocol::control::Explained;
use vmm_dedup_protocol::observer::{Account, Observer, Vm};
use vmm_dedup_protocol::refusal::Refused;
use vmm_dedup_protocol::stats::ServiceStats;

/// Explain what became of a VM's pages: how many are shared, zero, unique, volatile, pinned and so on; for a VM
/// that is not deduplicated, the reason and what would lift it.
#[derive(Args, Debug)]
pub(crate) struct ExplainArgs {
    /// The VM: its name as `vmm-dedup stat` shows it, or NAME.PID.
    vm: String,
    /// Only the pages at these guest physical addresses, e.g. 0x100000-0x200000 (the end is not included).
    #[arg(long, value_name = "START-END", value_parser = parse_range)]
    gpa: Option<Range<u64>>,
    #[command(flatten)]
    store: StoreSocket,
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
    let mut observer = Observer::connect(&args.store.path).map_err(Failure::from_error)?;
    let account = observer
        .explain(&args.vm, args.gpa.clone())
        .map_err(Failure::from_error)?;
    let (_, vms) = observer.stats().map_err(Failure::from_error)?;
    let vm = vms.iter().find(|v| v.is_called(&args.vm));
    if args.json {
        let value = match &account {
            Account::Explained(explained) => explained_json(&args.vm, explained, vm),
            Account::Refused(refused) => refused_json(refused),
        };
        let text = serde_json::to_string_pretty(&value).map_err(Failure::from_error)?;
        println!("{text}");
        return Ok(());
    }
    match &account {
        Account::Explained(explained) => print!("{}", table(&args.vm, explained)),
        Account::Refused(refused) => print!("{}", refusal(refused)),
    }
    if let (None, Some(vm), Account::Explained(_)) = (&args.gpa, vm, &account) {
        print!("{}{}", refusals(&vm.stats), huge_pages(&vm.stats));
    }
    Ok(())
}

/// What a class means, and what to do if it is large.
fn meaning(class: &str) -> &'static str {
    match class {
        "shared" => "map a page of the store",
        "zero" => "replaced by the zero page",
        "unique" => "nobody else has the same page",
        "waiting" => "have a twin, to be merged in one of the next passes",
        "over_vmas" => "have a twin, but no mapping is left: raise vm.max_map_count",
        "suspended" => "have a twin, but merging is suspended while direct I/O could be harmed",
        "swapped" => "have a twin, but are swapped out; tried again when they are back",
        "deferred" => "have a twin, and wait some passes for more around them",
        "volatile" => "written all the time",
        "too_new" => "written lately, or not looked at yet",
        "unpopulated" => "nothing there: no memory to save",
        "pinned" => "in use by a device (DMA, direct I/O); tried again later",
        "broken" => "copied by the kernel after sharing, or an exception in a run; no twin is known",
        "may_be_pinned" => "copied so, and nothing tells now that they are not pinned",
        "restless" => "written soon after they were shared, more than once maybe: left alone for a while",
        "huge" => "in huge pages with too few twins to be split",
        "probe" => "kept private to see whether what was a huge page is used",
        "foreign" => "map a page of a store that is gone; move to the new one as twins are found",
        "withheld" => "marked by the guest: never to be shared",
        "idle" => "left alone: the guest says that they are free, or soon overwritten",
        "packed" => "kept in fewer bytes: nobody has touched them for long",
        _ => "",
    }
}

fn table(vm: &str, explained: &Explained) -> String {
    let all = &explained.explanation;
    let mut text = format!("{vm}: {}, {} pages\n", account::state_name(all.state), all.pages);
    for (class, pages) in all.classes() {
        let share = pages as f64 / all.pages.max(1) as f64 * 100.0;
        text += &format!("{pages:>12} {share:>5.1} %  {class:<13} {}\n", meaning(class));
    }
    if all.broken + all.may_be_pinned > 0 {
        let can = if all.heals == 1 { "can" } else { "cannot" };
        text += &format!("pages that the kernel copied {can} be merged again now\n");
    }
    if !explained.note.is_empty() {
        text += &format!("{}\n", explained.note);
    }
    text
}

/// How often pages could not be shared, since the VM started.
fn refusals(stats: &ServiceStats) -> String {
    format!(
        "tried in vain so far: {} pinned, {} for want of mappings, {} swapped out, {} changed meanwhile, {} other\n",
        stats.refused_pinned_total,
        stats.refused_vmas_total,
        stats.refused_swapped_total,
        stats.mismatches_total,
        stats.refused_other_total
    )
}

/// What became of huge pages, if there are or were any.
fn huge_pages(stats: &ServiceStats) -> String {
    if [stats.huge_ranges, stats.huge_splits_total, stats.huge_zero_total] == [0; 3] {
        return String::new();
    }
    format!(
        "huge pages: {} there, {} of them kept since they are in use although {} of their pages repeat; {} are split\n\
         so far: {} split unused, {} rarely used, {} given up as zeros, {} built again (p99 {} us away); \
         not built: {} pinned or copied by the kernel, {} for want of memory, {} other\n\
         use is told by: {}\n",
        stats.huge_ranges,
        stats.huge_kept_hot,
        stats.pages_given_up,
        stats.huge_split,
        stats
            .huge_splits_total
            .saturating_sub(stats.huge_splits_rare_total),
        stats.huge_splits_rare_total,
        stats.huge_zero_total,
        stats.huge_rebuilt_total,
        stats.rebuild.quantile_us(0.99),
        stats.rebuild_pinned_total,
        stats.rebuild_memory_total,
        stats.rebuild_other_total,
        stats.use_source_name()
    )
}

fn huge_json(stats: &ServiceStats) -> Value {
    json!({
        "kept": stats.huge_ranges,
        "kept_in_use": stats.huge_kept_hot,
        "pages_given_up": stats.pages_given_up,
        "split": stats.huge_split,
        "splits_total": {
            "unused": stats.huge_splits_total.saturating_sub(stats.huge_splits_rare_total),
            "rarely_used": stats.huge_splits_rare_total,
            "zero": stats.huge_zero_total,
        },
        "rebuilt_total": stats.huge_rebuilt_total,
        "rebuild_us": { "p50": stats.rebuild.quantile_us(0.5), "p99": stats.rebuild.quantile_us(0.99) },
        "rebuild_refusals_total": {
            "pinned": stats.rebuild_pinned_total,
            "memory": stats.rebuild_memory_total,
            "other": stats.rebuild_other_total,
        },
        "use_source": stats.use_source_name(),
    })
}

fn refusal(refused: &Refused) -> String {
    let (name, refusal) = (refused.name.text(), &refused.refusal);
    let mut text = format!(
        "{name}: refused ({}), {} pages\nwhy: {}\n",
        refusal.reason.label(),
        refused.pages,
        refusal.detail()
    );
    if !refusal.lift().is_empty() {
        text += &format!("to lift it: {}\n", refusal.lift());
    }
    text
}

fn explained_json(name: &str, explained: &Explained, vm: Option<&Vm>) -> Value {
    let all = &explained.explanation;
    let classes: serde_json::Map<String, Value> = all
        .classes()
        .into_iter()
        .map(|(class, pages)| (class.to_owned(), pages.into()))
        .collect();
    let refusals = vm.map(|vm| {
        json!({
            "pinned": vm.stats.refused_pinned_total,
            "vmas": vm.stats.refused_vmas_total,
            "swapped": vm.stats.refused_swapped_total,
            "mismatches": vm.stats.mismatches_total,
            "other": vm.stats.refused_other_total,
        })
    });
    json!({
        "vm": name,
        "state": account::state_name(all.state),
        "pages": all.pages,
        "classes": classes,
        "heals": all.heals == 1,
        "note": explained.note,
        "refusals_total": refusals,
        "huge_pages": vm.map(|vm| huge_json(&vm.stats)),
    })
}

fn refused_json(refused: &Refused) -> Value {
    json!({
        "vm": refused.name.text(),
        "state": "refused",
        "pages": refused.pages,
        "reason": refused.refusal.reason.label(),
        "detail": refused.refusal.detail(),
        "lift": refused.refusal.lift(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_protocol::control::Explanation;

    #[test]
    fn ranges_are_read_and_wrong_ones_refused() {
        assert_eq!(parse_range("0x1000-8192"), Ok(4096..8192));
        for text in ["", "1", "0x2000-0x1000", "5-5", "0x-1", "1-2-3", "-1-5"] {
            assert!(parse_range(text).is_err(), "{text}");
        }
    }

    #[test]
    fn it_is_told_whether_copies_can_be_merged_again() {
        let explained = |may_be_pinned, heals| Explained {
            serial: 0,
            explanation: Explanation {
                pages: 9,
                may_be_pinned,
                heals,
                ..Explanation::default()
            },
            note: String::new(),
        };
        let says =
            |may_be_pinned, heals, what: &str| table("vm", &explained(may_be_pinned, heals)).contains(what);
        assert!(says(9, 0, "cannot be merged again now") && says(9, 1, "can be merged again now"));
        assert!(!says(0, 0, "merged again"));
        assert_eq!(explained_json("vm", &explained(9, 0), None)["heals"], false);
        assert_eq!(
            explained_json("vm", &explained(9, 1), None)["classes"]["may_be_pinned"],
            9
        );
    }

    #[test]
    fn every_class_is_explained() {
        assert!(
            Explanation::default()
                .classes()
                .iter()
                .all(|(class, _)| !meaning(class).is_empty())
        );
    }
}
