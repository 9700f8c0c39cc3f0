//! An estimate for people.

use super::pack_table;
use std::time::Duration;
use vmm_dedup_estimate::near::Near;
use vmm_dedup_estimate::{Amount, Report};

/// Pairs are shown for so many memories; JSON has all.
const MOST_PAIRS: usize = 12;

pub(crate) fn print(report: &Report, elapsed: Duration) {
    let mib = |pages: u64| pages as f64 * report.page_bytes as f64 / f64::from(1 << 20);
    let amount = |amount: Amount| match amount.error {
        0 => format!("{:.1}", mib(amount.pages)),
        error => format!("{:.1} +-{:.1}", mib(amount.pages), mib(error)),
    };
    println!("MiB of each memory: zero pages, pages with twins inside only, in others, and without twins");
    println!(
        "{:>3} {:<24} {:>9} {:>9} {:>15} {:>15} {:>15} {:>8}",
        "", "memory", "read", "zero", "inside", "shared", "unique", "merged"
    );
    for (i, input) in report.inputs.iter().enumerate() {
        println!(
            "{i:>3} {:<24} {:>9.1} {:>9.1} {:>15} {:>15} {:>15} {:>8.1}",
            input.name,
            mib(input.pages),
            mib(input.zero),
            amount(input.inside),
            amount(input.shared),
            amount(input.unique),
            mib(input.merged_already)
        );
    }
    if (2..=MOST_PAIRS).contains(&report.inputs.len()) {
        println!(
            "\nMiB that sharing frees within each memory (diagonal) and between two of them, zero pages aside"
        );
        let numbers: String = (0..report.inputs.len()).map(|i| format!(" {i:>8}")).collect();
        println!("   {numbers}");
        for (i, row) in report.pairs.iter().enumerate() {
            let row: String = row.iter().map(|a| format!(" {:>8.1}", mib(a.pages))).collect();
            println!("{i:>3}{row}");
        }
    }
    let total = &report.total;
    println!(
        "\nto be saved: {} MiB of {:.1} MiB ({:.1} %): {:.1} MiB zero pages, {} MiB duplicates",
        amount(total.saved),
        mib(total.pages),
        total.saved.pages as f64 / total.pages.max(1) as f64 * 100.0,
        mib(total.zero),
        amount(total.duplicates)
    );
    if report.one_in > 1 {
        println!(
            "sampled: one content in {}; bounds are those of 95 % intervals",
            report.one_in
        );
    }
    if let Some(near) = &report.near {
        print_near(near);
    }
    if let Some(packing) = &report.pack {
        pack_table::print(packing);
    }
    println!("took {:.2} s", elapsed.as_secs_f64());
}

fn print_near(near: &Near) {
    println!(
        "nearly equal to another page ({} of 64 lines or more): {} of {} unique pages looked at, {:.1} % +-{:.1}; \
         {} to the zero page",
        near.enough_lines,
        near.near,
        near.queries,
        near.near_ratio * 100.0,
        near.near_ratio_error * 100.0,
        near.near_zero
    );
}
