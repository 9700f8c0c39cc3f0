//! Records a trace of what a running process writes, for `overlays --trace`.

use clap::Parser;
use std::error::Error;
use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use vmm_dedup_page_overlays::record::{ProcessMemory, Recorder};

/// Record what a process writes, by comparing its memory at intervals. A VMM's process has its guest's memory.
#[derive(Parser)]
struct Args {
    /// The process.
    #[arg(long)]
    pid: u32,
    /// Samples, the first one included.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(2..))]
    samples: u32,
    /// Milliseconds between samples.
    #[arg(long, default_value_t = 100)]
    every_ms: u64,
    /// Pages that may be held in memory.
    #[arg(long, default_value_t = 262_144)]
    most_pages: usize,
    /// The trace.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("record: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let process = ProcessMemory::open(args.pid)?;
    let mut recorder = Recorder::new(BufWriter::new(File::create(&args.out)?), args.most_pages)?;
    for sample in 0..args.samples {
        if sample > 0 {
            std::thread::sleep(Duration::from_millis(args.every_ms));
        }
        process.sample(&(0..u64::MAX), &mut recorder)?;
    }
    let (pages, lines) = recorder.seen();
    recorder.finish()?;
    println!("{pages} pages, {lines} lines written, in {}", args.out.display());
    Ok(())
}
