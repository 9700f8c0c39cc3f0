//! What packing would save, for people.

use vmm_dedup_estimate::pack::{Packing, Plan};

const MIB: f64 = (1 << 20) as f64;

pub(super) fn print(packing: &Packing) {
    let all = packing.all_pages.max(1) as f64 * 4096.0;
    println!(
        "\npacked, beyond zero pages and sharing: {:.1} MiB of pages without a twin were tried, bases of {}",
        packing.pages as f64 * 4096.0 / MIB,
        match packing.bases {
            "own" => "the same memory",
            _ => "all memories",
        }
    );
    println!(
        "{:<18} {:>10} {:>6} {:>8} {:>7} {:>9} {:>9} {:>9} {:>8} {:>10} {:>8} {:>8}",
        "MiB by codecs",
        "saved net",
        "%",
        "pages",
        "bases",
        "payload",
        "fragment.",
        "metadata",
        "pack us",
        "rebuild us",
        "p50 us",
        "p99 us"
    );
    for plan in &packing.plans {
        print_plan(plan, all);
    }
    let search = &packing.search;
    println!(
        "bases found: {} zero page, {} by the neighbour, {} by a line; {} proposed, {} left out, index {:.1} MiB",
        search.zero,
        search.neighbour,
        search.line,
        search.proposed,
        search.capped,
        packing.index_bytes as f64 / MIB
    );
    let tried = packing.tried.iter();
    let tried: Vec<String> = tried
        .map(|tried| format!("{} {:.1}", tried.codec, tried.pack_us))
        .collect();
    println!("CPU time of a try, us: {}", tried.join(", "));
    println!(
        "packing took {:.2} s; every packed page was rebuilt and compared",
        packing.seconds
    );
}

fn print_plan(plan: &Plan, all: f64) {
    let mib = |bytes: u64| bytes as f64 / MIB;
    println!(
        "{:<18} {:>10.2} {:>6.2} {:>8} {:>7} {:>9.2} {:>9.2} {:>9.2} {:>8.1} {:>10.1} {:>8.1} {:>8.1}",
        plan.name,
        plan.saved_bytes as f64 / MIB,
        plan.saved_bytes as f64 / all * 100.0,
        plan.pages,
        plan.bases,
        mib(plan.payload_bytes),
        mib(plan.fragmentation_bytes),
        mib(plan.metadata_bytes),
        plan.pack_us,
        plan.rebuild_us,
        plan.rebuild_p50_us,
        plan.rebuild_p99_us
    );
    if plan.refused > 0 {
        println!("  {} pages changed meanwhile, and stay as they are", plan.refused);
    }
}
