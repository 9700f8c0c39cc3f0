//! What the dashboards show of a real fleet, as SVG: `make screens`.

use clap::Parser;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use vmm_dedup_built::{package, profile};
use vmm_dedup_integration_tests::dashboards::{array, drawing, folder, read, substitute, text};
use vmm_dedup_integration_tests::prometheus::{Prometheus, Series};
use vmm_dedup_plot::Lines;

/// Starts a fleet of four VMs and a Prometheus that scrapes its store every second, lets things happen to them, and draws each panel of
/// the dashboards `fleet` and `vm` that is a line or a figure from what Prometheus has then. Needs KVM and Prometheus.
#[derive(Parser, Debug)]
struct Args {
    /// Where the SVG files go; those that are there and are not drawn any more are removed.
    folder: PathBuf,
}

/// Three VMs that write little, and one, with managed breaks, that rewrites what it has in common twice a minute.
const FLEET: &str = r#"
name = "screens"
[store]
socket = "store.sock"
metrics = "METRICS"
max_mib = 512
[template.payload]
vmm = "reference"
memory_mib = 96
kernel = "payload.elf"
dedup = { pass_period_ms = 500, cpu_percent = 30 }
[[vm]]
name = "web"
count = 3
template = "payload"
cmdline = "seed={index} private_mib=16 zero_mib=4 common_mib=48 ws_area=private ws_pages=64 rate=50 seconds=1000000"
[[vm]]
name = "db"
template = "payload"
cmdline = "seed=9 private_mib=16 zero_mib=4 common_mib=48 ws_area=common ws_pages=1000000 rate=0 rewrite=restore rest_ms=30000 seconds=1000000"
dedup = { pass_period_ms = 500, cpu_percent = 30, breaks = { mode = "managed", reserve_pages = 1024 } }
"#;

/// The VM that the dashboard of one VM shows.
const VM: &str = "db";

/// What happens, and after how many seconds.
const EVENTS: [(u64, &[&str]); 4] = [
    (0, &["fleet", "up", "fleet.toml"]),
    (70, &["set", "web-2", "off", "--unmerge"]),
    (110, &["set", "web-2", "on"]),
    (180, &["stat"]),
];

struct Fleet {
    folder: tempfile::TempDir,
    program: PathBuf,
}

impl Fleet {
    fn new(metrics: SocketAddr) -> Self {
        package("vmm-dedup-cli");
        let folder = tempfile::tempdir().expect("a folder");
        let file = FLEET.replace("METRICS", &metrics.to_string());
        fs::write(folder.path().join("fleet.toml"), file).expect("a file");
        fs::write(folder.path().join("payload.elf"), vmm_dedup_payload::ELF).expect("a kernel");
        Self {
            folder,
            program: profile().join("vmm-dedup"),
        }
    }

    fn run(&self, args: &[&str]) -> bool {
        let mut command = Command::new(&self.program);
        command.args(args).current_dir(self.folder.path());
        command.env("VMM_DEDUP_RUNTIME_DIR", self.folder.path().join("run"));
        command.env_remove("VMM_DEDUP_STORE");
        command.status().is_ok_and(|status| status.success())
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if !self.run(&["fleet", "down", "fleet.toml", "--grace", "0"]) {
            eprintln!("screens: VMs may be left, of {}", self.folder.path().display());
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match draw(&args.folder) {
        Ok(count) => {
            println!("{count} panels in {}", args.folder.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("screens: {error}");
            ExitCode::FAILURE
        }
    }
}

fn draw(to: &Path) -> Result<usize, String> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
    let metrics = free.map_err(|e| e.to_string())?;
    let fleet = Fleet::new(metrics);
    let Some(prometheus) = Prometheus::start(metrics, &folder().join("vmm-dedup.rules.yml")) else {
        return Err("prometheus is missing (Debian package prometheus)".into());
    };
    let (clock, begun) = (Instant::now(), unix_now());
    for (after, args) in EVENTS {
        std::thread::sleep(Duration::from_secs(after).saturating_sub(clock.elapsed()));
        if !fleet.run(args) {
            return Err(format!("`vmm-dedup {}` fails", args.join(" ")));
        }
    }
    let ended = unix_now();
    fs::create_dir_all(to).map_err(|e| format!("{}: {e}", to.display()))?;
    let mut drawn = BTreeSet::new();
    for name in ["fleet", "vm"] {
        let dashboard = read(name);
        for panel in array(&dashboard, "panels") {
            if !matches!(text(panel, "type"), "stat" | "timeseries") {
                continue;
            }
            let lines = lines_of(panel, &prometheus, begun..ended)?;
            // A line of what did not happen says nothing; a figure says that it did not.
            let is_figure = text(panel, "type") == "stat";
            let mut figures = lines.series.iter().flat_map(|(_, points)| points);
            if figures.any(|(_, figure)| figure.is_finite() && (is_figure || *figure != 0.0)) {
                let file = drawing(name, panel);
                let path = to.join(&file);
                fs::write(&path, lines.svg()).map_err(|e| format!("{}: {e}", path.display()))?;
                drawn.insert(file);
            }
        }
    }
    remove_others(to, &drawn).map_err(|e| format!("{}: {e}", to.display()))?;
    Ok(drawn.len())
}

fn unix_now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |now| now.as_secs_f64())
}

fn remove_others(folder: &Path, drawn: &BTreeSet<String>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".svg") && !drawn.contains(&name) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// A panel over time.
fn lines_of(panel: &Value, prometheus: &Prometheus, time: std::ops::Range<f64>) -> Result<Lines, String> {
    let (unit, factor) = match text(&panel["fieldConfig"]["defaults"], "unit") {
        "bytes" => ("MiB", 1.0 / f64::from(1 << 20)),
        "Bps" => ("MiB a second", 1.0 / f64::from(1 << 20)),
        "percentunit" => ("%", 100.0),
        "s" => ("ms", 1000.0),
        "ops" => ("a second", 1.0),
        _ => ("number", 1.0),
    };
    let mut series = Vec::new();
    for target in array(panel, "targets") {
        let expression = substitute(text(target, "expr"), VM);
        for Series { labels, points } in prometheus.query_range(&expression, time.clone())? {
            let moved = points
                .into_iter()
                .map(|(at, figure)| (at - time.start, figure * factor));
            series.push((legend(text(target, "legendFormat"), &labels), moved.collect()));
        }
    }
    Ok(Lines {
        title: text(panel, "title").into(),
        along: "seconds".into(),
        unit: unit.into(),
        series,
    })
}

/// A legend with the labels that it names. There is one store: its address says nothing.
fn legend(format: &str, labels: &Value) -> String {
    let mut text = format.replace("{{instance}} ", "").replace("__auto", "all");
    for (name, value) in labels.as_object().into_iter().flatten() {
        text = text.replace(&format!("{{{{{name}}}}}"), value.as_str().unwrap_or_default());
    }
    text
}
