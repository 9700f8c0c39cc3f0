//! Prints the experiments' tables: `cargo run --release -p vmm-dedup-page-overlays --example overlays -- --help`.

use clap::{Parser, ValueEnum};
use serde::Serialize;
use std::error::Error;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use vmm_dedup_page_overlays::experiments::{fork, metadata, sparse};
use vmm_dedup_page_overlays::{Config, MachineError, OnWrite, TraceReader};

/// The model of Page Overlays: the paper's experiments, in kind, or a trace under both ways to write.
#[derive(Parser)]
struct Args {
    /// Only these.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Experiment>,
    /// Pages of the program that forks, and of the one with metadata.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(256..=65536))]
    pages: u64,
    /// Rows and columns of the sparse matrices; a multiple of 512.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1024..=65536))]
    rows: u64,
    /// Play this trace instead, with copy-on-write and with overlay-on-write.
    #[arg(long, value_name = "FILE", conflicts_with = "only")]
    trace: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Experiment {
    /// Overlay-on-write against copy-on-write after a fork (figures 8 and 9).
    Fork,
    /// What in the machine costs the time of a fork's writers.
    Variants,
    /// Sparse matrices against CSR (figures 10 and 11).
    Sparse,
    /// Sparse matrices against dense ones.
    Dense,
    /// Metadata of words against shadow memory.
    Metadata,
}

#[derive(Serialize)]
struct Dense {
    zero_lines: f64,
    overlay: sparse::Run,
    dense: sparse::Run,
}

#[derive(Default, Serialize)]
struct Report {
    fork: Vec<fork::Comparison>,
    fork_averages: Option<(f64, f64)>,
    variants: Vec<fork::Comparison>,
    sparse: Vec<sparse::Comparison>,
    dense: Vec<Dense>,
    metadata: Vec<metadata::Run>,
    trace: Vec<fork::Run>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("overlays: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let report = measure(&args)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print(&report);
    }
    Ok(())
}

fn measure(args: &Args) -> Result<Report, Box<dyn Error>> {
    let mut report = Report::default();
    if let Some(path) = &args.trace {
        for on_write in [OnWrite::Copy, OnWrite::Overlay] {
            report.trace.push(play(path, on_write)?);
        }
        return Ok(report);
    }
    let wanted = |experiment| args.only.is_empty() || args.only.contains(&experiment);
    if wanted(Experiment::Fork) {
        report.fork = writers(args.pages, fork::Variant::Table2)?;
        report.fork_averages = fork::averages(&report.fork);
    }
    if wanted(Experiment::Variants) {
        for variant in fork::Variant::ALL {
            report.variants.extend(writers(args.pages, variant)?);
        }
    }
    if wanted(Experiment::Sparse) {
        for shape in [sparse::Shape::Band, sparse::Shape::Scattered] {
            for locality in sparse::LOCALITIES {
                report
                    .sparse
                    .push(sparse::compare(args.rows, 64, locality, shape)?);
            }
        }
    }
    if wanted(Experiment::Dense) {
        for zero_lines in [0.0, 0.25, 0.5, 0.75, 0.9, 0.99] {
            let matrix = sparse::Matrix::of_lines(1024, 4096, zero_lines);
            report.dense.push(Dense {
                zero_lines,
                overlay: sparse::by_overlays(&matrix, sparse::Code::Packed)?,
                dense: sparse::dense(&matrix, sparse::Code::Packed)?,
            });
        }
    }
    if wanted(Experiment::Metadata) {
        for one_in in [1000, 100, 10, 1] {
            for way in metadata::Way::ALL {
                report.metadata.push(metadata::run(args.pages, one_in, way)?);
            }
        }
    }
    Ok(report)
}

fn writers(pages: u64, variant: fork::Variant) -> Result<Vec<fork::Comparison>, MachineError> {
    let compare = |writer| fork::compare(writer, pages, variant);
    fork::WRITERS.iter().map(compare).collect()
}

fn play(path: &Path, on_write: OnWrite) -> Result<fork::Run, Box<dyn Error>> {
    let reader = TraceReader::new(BufReader::new(File::open(path)?))?;
    let played = fork::run_trace(reader, Config::table_2(on_write))?;
    Ok(played)
}

fn percent(share: f64) -> f64 {
    share * 100.0
}

#[allow(clippy::cast_precision_loss)] // a statistic
fn kib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0
}

#[allow(clippy::cast_precision_loss)] // a statistic
fn share(of: u64, to: u64) -> f64 {
    of as f64 / to as f64
}

fn cycles_per_instruction(run: &fork::Run) -> f64 {
    share(run.account.core.cycles, run.account.core.instructions)
}

fn print(report: &Report) {
    if !report.fork.is_empty() {
        print_fork(report);
    }
    if !report.variants.is_empty() {
        print_variants(&report.variants);
    }
    if !report.sparse.is_empty() {
        print_sparse(&report.sparse);
    }
    if !report.dense.is_empty() {
        println!("\nsparse against dense, by zero lines (paper: faster at all, by a straight line)");
        for one in &report.dense {
            let faster = share(one.dense.account.core.cycles, one.overlay.account.core.cycles) - 1.0;
            let shorter = 1.0 - share(one.overlay.account.core.cycles, one.dense.account.core.cycles);
            let (zero, faster, shorter) = (percent(one.zero_lines), percent(faster), percent(shorter));
            println!("{zero:>5.0} % zero  {faster:>8.1} % faster  {shorter:>6.1} % less time");
        }
    }
    if !report.metadata.is_empty() {
        print_metadata(&report.metadata);
    }
    if let [copy, overlay] = report.trace.as_slice() {
        println!("trace                 KiB     cycles  DRAM reads     writes");
        for (name, run) in [("copy-on-write", copy), ("overlay-on-write", overlay)] {
            let (cycles, dram) = (run.account.core.cycles, run.account.dram);
            let kib = kib(run.bytes());
            println!(
                "{name:<17} {kib:>9.0} {cycles:>10} {:>11} {:>10}",
                dram.reads, dram.writes
            );
        }
        let segments = overlay.memory;
        println!(
            "overlay lines alone {:.0} KiB, OMT {:.0} KiB",
            kib(segments.overlay_lines),
            kib(segments.omt)
        );
    }
}

fn print_fork(report: &Report) {
    println!(
        "after a fork: copy-on-write (C) and overlay-on-write (O); paper: 53 % less memory, 15 % faster on average"
    );
    println!(
        "type writer                     KiB C    KiB O  lines O   OMT O   CPI C   CPI O  less mem   faster"
    );
    for one in &report.fork {
        println!(
            "{:>4} {:<24} {:>8.0} {:>8.0} {:>8.0} {:>7.0} {:>7.3} {:>7.3} {:>7.1} % {:>6.1} %",
            one.writer.kind,
            one.writer.name,
            kib(one.copy.bytes()),
            kib(one.overlay.bytes()),
            kib(one.overlay.memory.overlay_lines),
            kib(one.overlay.memory.omt),
            cycles_per_instruction(&one.copy),
            cycles_per_instruction(&one.overlay),
            percent(one.less_memory()),
            percent(one.faster()),
        );
    }
    if let Some((memory, faster)) = report.fork_averages {
        println!(
            "mean of the types: {:.1} % less memory, {:.1} % faster",
            percent(memory),
            percent(faster)
        );
    }
    println!(
        "what costs it       DRAM reads, writes  row conflicts   OMT misses  OMT+metadata writes  lines moved  stalls"
    );
    for one in &report.fork {
        for (name, run) in [("C", &one.copy), ("O", &one.overlay)] {
            let account = &run.account;
            println!(
                "{:<24} {name} {:>8} {:>8} {:>9} {:>12} {:>12} {:>12} {:>12} win {:>9} store",
                one.writer.name,
                account.dram.reads,
                account.dram.writes,
                account.dram.row_conflicts,
                account.omt.misses,
                account.omt.entry_writes + account.omt.metadata_writes,
                account.store.lines_migrated,
                account.core.window_stall_cycles,
                account.core.store_stall_cycles,
            );
        }
    }
}

fn print_variants(variants: &[fork::Comparison]) {
    println!(
        "\nthe same on other machines: by how much overlays are faster, and how much less memory they take"
    );
    print!("{:<24}", "writer");
    for variant in fork::Variant::ALL {
        print!(" {:>21}", format!("{variant:?}"));
    }
    println!();
    for writer in fork::WRITERS {
        print!("{:<24}", writer.name);
        for one in variants.iter().filter(|one| one.writer == writer) {
            print!(
                " {:>8.1} % {:>8.1} %",
                percent(one.faster()),
                percent(one.less_memory())
            );
        }
        println!();
    }
}

fn print_sparse(comparisons: &[sparse::Comparison]) {
    println!(
        "\nsparse matrices, overlays against CSR; paper: L 1.09: 4.83 of the memory, 70 % slower; L 8: 0.66, 92 % faster"
    );
    println!(
        "shape           L   values  lines/CSR  segments+OMT/CSR   faster  packed   cycles a value O, C   OMT misses"
    );
    for one in comparisons {
        println!(
            "{:<10} {:>6.2} {:>8} {:>10.2} {:>17.2} {:>6.1} % {:>5.1} % {:>12.2} {:>8.2} {:>12}",
            format!("{:?}", one.shape),
            one.locality,
            one.values,
            one.lines(),
            one.memory(),
            percent(one.faster()),
            percent(one.packed_faster()),
            share(one.overlay.account.core.cycles, one.values),
            share(one.csr.account.core.cycles, one.values),
            one.overlay.account.omt.misses,
        );
    }
    for shape in [sparse::Shape::Band, sparse::Shape::Scattered] {
        let of_shape = || comparisons.iter().filter(|one| one.shape == shape);
        let figures = |figure: fn(&sparse::Comparison) -> f64| -> Vec<(f64, f64)> {
            of_shape().map(|one| (one.locality, figure(one))).collect()
        };
        let time = sparse::crossover(&figures(sparse::Comparison::faster));
        let packed = sparse::crossover(&figures(sparse::Comparison::packed_faster));
        let lines = sparse::crossover(&figures(|one| 1.0 - one.lines()));
        let memory = sparse::crossover(&figures(|one| 1.0 - one.memory()));
        let at = |crossover: Option<f64>| crossover.map_or("none".to_owned(), |at| format!("{at:.1}"));
        let [time, packed, lines, memory] = [time, packed, lines, memory].map(at);
        println!(
            "{shape:?}: better from L = {time} on (time), {packed} (packed), {lines} (lines), {memory} (memory); paper: 4.5"
        );
    }
    println!(
        "memory by bytes of a block, relative to the values alone (figure 11; paper: 53 on average at 4,096)"
    );
    for one in comparisons {
        print!("{:<10} L {:>5.2}:", format!("{:?}", one.shape), one.locality);
        for (bytes, overhead) in one.overheads {
            print!("  {bytes} B {overhead:.2}");
        }
        println!("  CSR {:.2}", share(one.csr_bytes, one.values * 8));
    }
}

fn print_metadata(runs: &[metadata::Run]) {
    println!("\nmetadata of words (no figures in the paper)");
    println!(
        "marked     way                KiB   cycles/access  of none    TLB misses  DRAM reads  loads without line"
    );
    for four in runs.chunks(metadata::Way::ALL.len()) {
        for run in four {
            println!(
                "{:>6.1} % {:<12} {:>10.0} {:>12.2} {:>9.2} {:>12} {:>11} {:>12}",
                percent(run.marked),
                format!("{:?}", run.way),
                kib(run.bytes()),
                share(run.account.core.cycles, metadata::ACCESSES),
                share(run.account.core.cycles, four[0].account.core.cycles),
                run.account.tlb.misses,
                run.account.dram.reads,
                run.account.events.metadata_loads_absent,
            );
        }
    }
}
