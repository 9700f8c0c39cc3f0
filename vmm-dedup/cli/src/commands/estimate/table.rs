//! An estimate for people.

use super::pack_table;
use std::time::Duration;
use vmm_dedup_estimate::near::Near;
use vmm_dedup_estimate::{Amount, Report};
use vmm_dedup_host::say;
use vmm_dedup_host::table::{self, Column, Table, percent, wrapped};
use vmm_dedup_host::units::printable;

/// Pairs are shown for so many memories, and for as many as have room; JSON has all.
fn most_pairs(width: Option<usize>) -> usize {
    width.map_or(12, |width| width.saturating_sub(3) / 9).min(12)
}

const COLUMNS: [Column; 8] = [
    Column::number("", 1),
    Column::name("MEMORY"),
    Column::number("READ", 5),
    Column::number("ZERO", 4),
    Column::number("INSIDE", 3),
    Column::number("SHARED", 1),
    Column::number("UNIQUE", 2),
    Column::number("MERGED", 6),
];

pub(crate) fn print(report: &Report, elapsed: Duration) {
    let mib = |pages: u64| pages as f64 * report.page_bytes as f64 / f64::from(1 << 20);
    let amount = |amount: Amount| match amount.error {
        0 => format!("{:.1}", mib(amount.pages)),
        error => format!("{:.1} +-{:.1}", mib(amount.pages), mib(error)),
    };
    let width = table::width();
    let text = |text: &str| {
        wrapped(text, width.unwrap_or(usize::MAX))
            .iter()
            .for_each(|line| say!("{line}"))
    };
    text(
        "MiB of each memory: zero pages, pages with twins inside only, in others, and without twins; merged already",
    );
    let mut memories = Table::new(&COLUMNS);
    for (i, input) in report.inputs.iter().enumerate() {
        memories.row([
            i.to_string(),
            printable(&input.name),
            format!("{:.1}", mib(input.pages)),
            format!("{:.1}", mib(input.zero)),
            amount(input.inside),
            amount(input.shared),
            amount(input.unique),
            format!("{:.1}", mib(input.merged_already)),
        ]);
    }
    memories.lines(width).iter().for_each(|line| say!("{line}"));
    if (2..=most_pairs(width)).contains(&report.inputs.len()) {
        say!();
        text(
            "MiB that sharing frees within each memory (diagonal) and between two of them, zero pages aside",
        );
        let numbers: String = (0..report.inputs.len()).map(|i| format!(" {i:>8}")).collect();
        say!("   {numbers}");
        for (i, row) in report.pairs.iter().enumerate() {
            let row: String = row.iter().map(|a| format!(" {:>8.1}", mib(a.pages))).collect();
            say!("{i:>3}{row}");
        }
    }
    let total = &report.total;
    say!();
    text(&format!(
        "to be saved: {} MiB of {:.1} MiB ({} %): {:.1} MiB zero pages, {} MiB duplicates",
        amount(total.saved),
        mib(total.pages),
        percent(total.saved.pages, total.pages),
        mib(total.zero),
        amount(total.duplicates)
    ));
    let merged: u64 = report.inputs.iter().map(|input| input.merged_already).sum();
    if merged > 0 {
        text(&format!(
            "{:.1} MiB are merged already (by KSM, a store, or as zero pages): they are in no other column, and the sum is of what \
             is left",
            mib(merged)
        ));
    }
    if report.one_in > 1 {
        text(&format!(
            "sampled: one content in {}; bounds are those of 95 % intervals",
            report.one_in
        ));
    }
    if let Some(near) = &report.near {
        print_near(near);
    }
    if let Some(packing) = &report.pack {
        pack_table::print(packing);
    }
    say!("took {:.2} s", elapsed.as_secs_f64());
}

fn print_near(near: &Near) {
    let told = format!(
        "nearly equal to another page ({} of 64 lines or more): {} of {} unique pages looked at, {:.1} % +-{:.1}; \
         {} to the zero page",
        near.enough_lines,
        near.near,
        near.queries,
        near.near_ratio * 100.0,
        near.near_ratio_error * 100.0,
        near.near_zero
    );
    let wide = table::width().unwrap_or(usize::MAX);
    wrapped(&told, wide).iter().for_each(|line| say!("{line}"));
}
