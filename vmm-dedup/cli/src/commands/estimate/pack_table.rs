//! What packing would save, for people.

use vmm_dedup_estimate::pack::{Packing, Plan};
use vmm_dedup_host::say;
use vmm_dedup_host::table::{self, Column, Table, wrapped};

const MIB: f64 = (1 << 20) as f64;

const COLUMNS: [Column; 12] = [
    Column::name("MIB BY CODECS"),
    Column::number("SAVED NET", 1),
    Column::number("%", 2),
    Column::number("PAGES", 5),
    Column::number("BASES", 6),
    Column::number("PAYLOAD", 8),
    Column::number("FRAGMENT.", 11),
    Column::number("METADATA", 10),
    Column::number("PACK US", 4),
    Column::number("REBUILD US", 9),
    Column::number("P50 US", 7),
    Column::number("P99 US", 3),
];

pub(super) fn print(packing: &Packing) {
    let all = packing.all_pages.max(1) as f64 * 4096.0;
    let width = table::width();
    let text = |text: &str| {
        wrapped(text, width.unwrap_or(usize::MAX))
            .iter()
            .for_each(|line| say!("{line}"))
    };
    say!();
    text(&format!(
        "packed, beyond zero pages and sharing: {:.1} MiB of pages without a twin were tried, bases of {}",
        packing.pages as f64 * 4096.0 / MIB,
        match packing.bases {
            "own" => "the same memory",
            _ => "all memories",
        }
    ));
    let mut plans = Table::new(&COLUMNS);
    packing.plans.iter().for_each(|plan| plans.row(row(plan, all)));
    plans.lines(width).iter().for_each(|line| say!("{line}"));
    for plan in packing.plans.iter().filter(|plan| plan.refused > 0) {
        text(&format!(
            "{}: {} pages changed meanwhile, and stay as they are",
            plan.name, plan.refused
        ));
    }
    let search = &packing.search;
    text(&format!(
        "bases found: {} zero page, {} by the neighbour, {} by a line; {} proposed, {} left out, index {:.1} MiB",
        search.zero,
        search.neighbour,
        search.line,
        search.proposed,
        search.capped,
        packing.index_bytes as f64 / MIB
    ));
    let tried = packing.tried.iter();
    let tried: Vec<String> = tried
        .map(|tried| format!("{} {:.1}", tried.codec, tried.pack_us))
        .collect();
    text(&format!("CPU time of a try, us: {}", tried.join(", ")));
    text(&format!(
        "packing took {:.2} s; every packed page was rebuilt and compared",
        packing.seconds
    ));
}

fn row(plan: &Plan, all: f64) -> [String; 12] {
    let mib = |bytes: f64| format!("{:.2}", bytes / MIB);
    [
        plan.name.to_string(),
        mib(plan.saved_bytes as f64),
        format!("{:.2}", plan.saved_bytes as f64 / all * 100.0),
        plan.pages.to_string(),
        plan.bases.to_string(),
        mib(plan.payload_bytes as f64),
        mib(plan.fragmentation_bytes as f64),
        mib(plan.metadata_bytes as f64),
        format!("{:.1}", plan.pack_us),
        format!("{:.1}", plan.rebuild_us),
        format!("{:.1}", plan.rebuild_p50_us),
        format!("{:.1}", plan.rebuild_p99_us),
    ]
}
