//! `estimate`: what sharing would save, before it is switched on.

mod html;
mod pack_table;
mod page_file;
mod table;

use clap::{Args, ValueEnum};
use page_file::PageFile;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use vmm_dedup_estimate::pack::{self, pack};
use vmm_dedup_estimate::{
    Error, Inputs, Memory, Reading, Report, Sample, estimate, near::estimate_with_near,
};
use vmm_dedup_host::{Failure, hint, say};

/// Tell how much sharing would save, without changing anything.
///
/// Each --pid and each FILE is one VM. Processes are read while they run (private anonymous memory that is populated;
/// nothing is stopped, populated or registered). FILE is an ELF memory dump (QEMU's dump-guest-memory, Cloud
/// Hypervisor's coredump), the directory of a Cloud Hypervisor snapshot, or a raw image of memory.
///
/// More than 16 GiB are sampled by content, and numbers get an error bound (95 %). Savings are gross: metadata and
/// mappings take some 1 % of the memory.
#[derive(Args, Debug)]
pub(crate) struct EstimateArgs {
    #[command(flatten)]
    inputs: Inputs,
    /// Look at one content in so many (1, 2, 4, ... 65536; 1 is exact) [default: by size, 1 up to 16 GiB].
    #[arg(long, value_name = "K", value_parser = parse_sample)]
    sample: Option<Sample>,
    /// Look for nearly equal pages as well: 48 of 64 lines equal at the same place. Takes several times as long.
    #[arg(long)]
    near: bool,
    /// Pack the pages without a twin as well, by each codec alone and by all together, and tell what that would save
    /// beyond zero pages and sharing, net of its metadata. Takes some ten seconds of CPU time for 100 MiB of such pages.
    #[arg(long)]
    pack: bool,
    /// With --pack: whose pages may be bases of others.
    #[arg(long, value_enum, default_value_t = Bases::Own, requires = "pack")]
    bases: Bases,
    /// Write a page for a browser into this file as well: what each memory holds, and what any two have in common. A file that is
    /// there is overwritten only if it is an HTML page, and none of the inputs.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Whose pages may be bases of others.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Bases {
    /// Those of the same VM.
    Own,
    /// Those of all VMs; then a page that one VM alone has is known to all VMs of the domain.
    Domain,
}

fn parse_sample(text: &str) -> Result<Sample, String> {
    let one_in = text.parse().map_err(|_| "expected a number".to_owned())?;
    Sample::try_new(one_in).map_err(|e| e.to_string())
}

/// Runs the command.
pub(crate) fn run(args: &EstimateArgs) -> Result<(), Failure> {
    let page_at = |path: &PathBuf| PageFile::at(path, &args.inputs.files);
    let page = args.html.as_ref().map(page_at).transpose()?;
    let memories = args.inputs.open().map_err(Failure::from_error)?;
    let pages = memories.iter().map(Memory::pages).sum();
    let sample = args.sample.unwrap_or_else(|| Sample::fitting(pages));
    let progress = Progress::new();
    let show = |done, total| progress.show(done, total);
    let reading = Reading {
        threads: args.inputs.threads(),
        progress: &show,
    };
    let start = Instant::now();
    let report = examine(args, &memories, sample, &reading);
    progress.clear();
    let report = report.map_err(Failure::from_error)?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(Failure::from_error)?;
        say!("{text}");
    } else {
        table::print(&report, start.elapsed());
    }
    page.map_or(Ok(()), |page| page.write(&html::page(&report)))
}

fn examine(
    args: &EstimateArgs,
    memories: &[Memory],
    sample: Sample,
    reading: &Reading<'_>,
) -> Result<Report, Error> {
    let mut report = match args.near {
        true => estimate_with_near(memories, sample, reading)?,
        false => estimate(memories, sample, reading)?,
    };
    if args.pack {
        let settings = pack::Settings {
            bases: match args.bases {
                Bases::Own => pack::Bases::Own,
                Bases::Domain => pack::Bases::Domain,
            },
            ..pack::Settings::default()
        };
        report.pack = Some(pack(memories, &settings, reading)?);
    }
    Ok(report)
}

/// A line on the terminal that tells how far a scan is.
struct Progress {
    last: Option<Mutex<Instant>>,
}

impl Progress {
    const PERIOD: Duration = Duration::from_millis(200);

    /// Shows nothing unless standard error is a terminal.
    fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self {
            last: terminal.then(|| Mutex::new(Instant::now())),
        }
    }

    fn show(&self, done: u64, total: u64) {
        // A thread that finds another one printing has nothing to add.
        let Some(Ok(mut last)) = self.last.as_ref().map(Mutex::try_lock) else {
            return;
        };
        if last.elapsed() >= Self::PERIOD {
            *last = Instant::now();
            let (done, total) = (done >> 8, total >> 8);
            hint!("\r\x1b[K{done} of {total} MiB ");
            let _ = std::io::stderr().flush();
        }
    }

    fn clear(&self) {
        if self.last.is_some() {
            hint!("\r\x1b[K");
        }
    }
}
