//! `demo`: the main job on this machine, with nothing to prepare.

use clap::Args;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use vmm_dedup_host::store::OwnStore;
use vmm_dedup_host::table::{self, Column, Table, phrases};
use vmm_dedup_host::units::{mib, natural_order, pages_mib};
use vmm_dedup_host::{Failure, account, children, kvm, memory, note, output, put, say, termination};
use vmm_dedup_payload::{PayloadConfig, Report, Rewrite, real_files};
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::observer::Vm;

/// Files that every guest loads, at most.
const INITRD_BYTES: u64 = 72 << 20;
/// The saving counts as complete when it has not grown by a hundredth for so long.
const SETTLED: Duration = Duration::from_secs(3);
const VERIFY_PATIENCE: Duration = Duration::from_secs(120);
const START_PATIENCE: Duration = Duration::from_secs(120);
/// Memory that the demo needs beside that of its guests.
const SPARE_MIB: u64 = 512;

/// Run guests that load real files, watch them share memory, and verify every byte of them at the end.
///
/// Starts a store, then guests in processes of their own with dedup on. The guests keep reading and writing; each
/// checks all of its memory before it ends. Needs /dev/kvm (exit code 2 without).
#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// Number of guests.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=32))]
    guests: u32,
    /// Memory of each guest, MiB.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(64..=4096))]
    memory_mib: u64,
    /// Longest time to wait for the saving to settle, seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Print one JSON object at the end instead of tables.
    #[arg(long)]
    json: bool,
}

/// A guest in a process of its own.
struct Guest {
    name: String,
    process: std::process::Child,
    verified: Option<Verified>,
    ended: bool,
}

#[derive(Clone, Copy, Default)]
struct Verified {
    pages: u64,
    errors: u64,
    writes: u64,
    ok: bool,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Event {
    guest: usize,
    /// `None` at the end of its output.
    report: Option<Report>,
}

/// Runs the demo.
pub(crate) fn run(args: &DemoArgs) -> Result<(), Failure> {
    kvm::need()?;
    need_memory(args)?;
    termination::on_termination(children::remove_folder, || Demo::start(args)?.go(args))
}

/// Fails unless all guests fit before anything is shared.
fn need_memory(args: &DemoArgs) -> Result<(), Failure> {
    let needed = u64::from(args.guests) * args.memory_mib + SPARE_MIB;
    let available = memory::available()? >> 20;
    if available >= needed {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{available} MiB are available, {needed} needed: choose fewer --guests or a smaller --memory-mib"
    )))
}

struct Demo {
    // Guests go first: they use the store.
    guests: Vec<Guest>,
    events: Receiver<Event>,
    store: OwnStore,
    initrd_bytes: u64,
}

impl Demo {
    fn start(args: &DemoArgs) -> Result<Self, Failure> {
        let store = OwnStore::start("demo", None)?;
        let folder = store.socket().parent().unwrap_or(Path::new("/tmp")).to_owned();
        let room = (args.memory_mib << 20) * 2 / 7;
        let (initrd, initrd_bytes) = build_initrd(&folder, room.min(INITRD_BYTES))?;
        say(
            args,
            &format!(
                "store started; starting {} guests of {} MiB, each with {} MiB of this machine's shared libraries and locales",
                args.guests,
                args.memory_mib,
                initrd_bytes >> 20
            ),
        );
        let (tell, events) = channel();
        let mut guests = Vec::new();
        for n in 0..args.guests as usize {
            guests.push(launch(args, n, &store, &initrd, tell.clone())?);
        }
        Ok(Self {
            guests,
            events,
            store,
            initrd_bytes,
        })
    }

    fn go(mut self, args: &DemoArgs) -> Result<(), Failure> {
        self.wait_ready(args)?;
        let saved = self.watch(args)?;
        say(args, "verifying every page of every guest");
        let (store, vms) = account::of_store(self.store.socket())?;
        self.verify()?;
        let good = self
            .guests
            .iter()
            .all(|g| g.verified.is_some_and(|v| v.ok && v.errors == 0));
        let cpu: u64 = store.cpu_ns + vms.iter().map(|v| v.stats.cpu_ns.total()).sum::<u64>();
        if args.json {
            let guests: Vec<_> = self.guests.iter().map(guest_json).collect();
            say!(
                "{}",
                serde_json::json!({
                    "saved_net_bytes": saved, "cpu_seconds": cpu as f64 / 1e9, "verified": good,
                    "pages_shared": store.pages_shared, "pages_sharing": store.pages_sharing,
                    "initrd_bytes": self.initrd_bytes, "guests": guests,
                })
            );
        } else {
            for guest in &self.guests {
                let v = guest.verified.unwrap_or_default();
                let verdict = if v.ok && v.errors == 0 {
                    "every byte is right"
                } else {
                    "WRONG"
                };
                say!(
                    "{}: {} pages verified after {} writes: {verdict}",
                    guest.name,
                    v.pages,
                    v.writes
                );
            }
            let total = u64::from(args.guests) * args.memory_mib;
            let saved_mib = saved as f64 / f64::from(1 << 20);
            say!(
                "saved {saved_mib:.0} MiB net of all metadata, of {total} MiB in {} guests, for {:.2} s of CPU",
                args.guests,
                cpu as f64 / 1e9
            );
        }
        if good {
            Ok(())
        } else {
            Err(Failure::new("a guest found wrong bytes in its memory, see above"))
        }
    }

    /// Waits until all guests have filled their memory.
    fn wait_ready(&mut self, args: &DemoArgs) -> Result<(), Failure> {
        let (start, mut ready) = (Instant::now(), 0);
        while ready < self.guests.len() {
            let left = START_PATIENCE.saturating_sub(start.elapsed());
            let event = self.events.recv_timeout(left);
            let event = event.map_err(|_| Failure::new("the guests did not start within two minutes"))?;
            match event.report {
                Some(Report::Ready { pages, .. }) => {
                    ready += 1;
                    say(
                        args,
                        &format!(
                            "{} is up with {pages} pages of data",
                            self.guests[event.guest].name
                        ),
                    );
                }
                Some(Report::Fail { reason }) => {
                    return Err(Failure::new(format!("a guest gave up: {reason}")));
                }
                Some(_) => {}
                None => return Err(self.lost(event.guest)),
            }
        }
        Ok(())
    }

    fn lost(&self, guest: usize) -> Failure {
        Failure::new(format!("{} ended early, see above", self.guests[guest].name))
    }

    /// Shows progress until the saving has settled; returns it.
    fn watch(&mut self, args: &DemoArgs) -> Result<i64, Failure> {
        let start = Instant::now();
        let (mut best, mut since) = (0i64, Instant::now());
        let mut table = Live::new(args);
        loop {
            std::thread::sleep(Duration::from_millis(500));
            while let Ok(event) = self.events.try_recv() {
                if event.report.is_none() {
                    return Err(self.lost(event.guest));
                }
            }
            let (store, vms) = account::of_store(self.store.socket())?;
            let saved = account::saved_net(&store);
            table.show(start.elapsed(), &store, &vms);
            output::outcome()?;
            if saved > best + best / 100 {
                (best, since) = (saved, Instant::now());
            }
            if (best > 0 && since.elapsed() > SETTLED) || start.elapsed().as_secs() >= args.seconds {
                return Ok(saved);
            }
        }
    }

    /// Tells the guests to stop working and check all of their memory.
    fn verify(&mut self) -> Result<(), Failure> {
        for guest in &mut self.guests {
            let input = guest.process.stdin.as_mut();
            let sent = input.is_some_and(|i| i.write_all(b"q").and_then(|()| i.flush()).is_ok());
            if !sent {
                return Err(Failure::new(format!(
                    "{} does not take input any more",
                    guest.name
                )));
            }
        }
        let start = Instant::now();
        while self.guests.iter().any(|g| !g.ended) {
            let left = VERIFY_PATIENCE.saturating_sub(start.elapsed());
            let event = self.events.recv_timeout(left);
            let event = event.map_err(|_| Failure::new("the guests did not verify within two minutes"))?;
            let guest = &mut self.guests[event.guest];
            match event.report {
                Some(Report::Verify {
                    pages,
                    errors,
                    writes,
                }) => {
                    guest.verified = Some(Verified {
                        pages,
                        errors,
                        writes,
                        ok: false,
                    });
                }
                Some(Report::Done { ok }) => guest.verified.get_or_insert_default().ok = ok,
                Some(bad @ (Report::Bad { .. } | Report::Fault { .. })) => {
                    note!("{}: {bad:?}", guest.name)
                }
                Some(_) => {}
                None => guest.ended = true,
            }
        }
        Ok(())
    }
}

fn launch(
    args: &DemoArgs,
    n: usize,
    store: &OwnStore,
    initrd: &Path,
    tell: Sender<Event>,
) -> Result<Guest, Failure> {
    let payload = PayloadConfig::default()
        .seed(n as u64 + 1)
        .private_mib(args.memory_mib / 10)
        .zero_mib(args.memory_mib / 16)
        .ws_pages(1024)
        .rate(500)
        .reads(1)
        .rewrite(Rewrite::None)
        .seconds(100_000);
    let name = format!("guest-{}", n + 1);
    let mut process = children::command()?
        .args(["run", "--payload", &payload.command_line(), "--name", &name])
        .args([
            "--memory-mib",
            &args.memory_mib.to_string(),
            "--pass-period-ms",
            "500",
        ])
        .arg("--initrd")
        .arg(initrd)
        .arg("--store")
        .arg(store.socket())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| Failure::new(format!("cannot start a guest: {e}")))?;
    let output = process
        .stdout
        .take()
        .ok_or_else(|| Failure::new("a guest has no output"))?;
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if let Ok(Some(report)) = Report::parse(&line) {
                let _ = tell.send(Event {
                    guest: n,
                    report: Some(report),
                });
            }
        }
        let _ = tell.send(Event {
            guest: n,
            report: None,
        });
    });
    Ok(Guest {
        name,
        process,
        verified: None,
        ended: false,
    })
}

/// Concatenates real files, each padded to whole pages: `(path, bytes)`.
fn build_initrd(folder: &Path, limit: u64) -> Result<(PathBuf, u64), Failure> {
    let path = folder.join("files.img");
    let fail = |e: std::io::Error| Failure::new(format!("cannot write {}: {e}", path.display()));
    let mut image = File::create(&path).map_err(fail)?;
    let mut bytes = 0;
    for file in real_files() {
        let Ok(content) = fs::read(&file) else { continue };
        let padded = (content.len() as u64).next_multiple_of(4096);
        if bytes + padded > limit {
            continue;
        }
        image.write_all(&content).map_err(fail)?;
        bytes += padded;
        image.set_len(bytes).map_err(fail)?;
        std::io::Seek::seek(&mut image, std::io::SeekFrom::Start(bytes)).map_err(fail)?;
    }
    if bytes == 0 {
        return Err(Failure::missing(
            "no shared libraries found under /usr/lib to fill guests with",
        ));
    }
    Ok((path.clone(), bytes))
}

fn guest_json(guest: &Guest) -> serde_json::Value {
    let v = guest.verified.unwrap_or_default();
    serde_json::json!({ "name": guest.name, "pages": v.pages, "errors": v.errors, "writes": v.writes, "ok": v.ok })
}

fn say(args: &DemoArgs, text: &str) {
    if !args.json {
        say!("{text}");
    }
}

/// The live table: redrawn in place on a terminal, one line a second elsewhere.
struct Live {
    silent: bool,
    drawn: usize,
    shown: Duration,
}

const COLUMNS: [Column; 7] = [
    Column::name("GUEST"),
    Column::number("SHARED", 1),
    Column::number("ZERO", 5),
    Column::number("UNIQUE", 3),
    Column::number("BREAKS", 2),
    Column::number("CPU S", 4),
    Column::number("STOP P99", 6),
];

impl Live {
    fn new(args: &DemoArgs) -> Self {
        Self {
            silent: args.json,
            drawn: 0,
            shown: Duration::ZERO,
        }
    }

    fn show(&mut self, elapsed: Duration, store: &StoreStats, vms: &[Vm]) {
        let terminal = table::size();
        if self.silent || (terminal.is_none() && elapsed < self.shown + Duration::from_secs(1)) {
            return;
        }
        self.shown = elapsed;
        let total = total(elapsed, store, vms);
        let Some((width, height)) = terminal else {
            say!("{}", total.join("   "));
            return;
        };
        let mut lines = guests(vms).lines(Some(width));
        let total = phrases(&total, width);
        // What has scrolled away cannot be drawn again.
        let room = height.saturating_sub(total.len() + 1);
        if lines.len() > room {
            lines.truncate(room.saturating_sub(1));
            lines.push("...".into());
        }
        lines.extend(total);
        if self.drawn > 0 {
            put!("\x1b[{}A", self.drawn);
        }
        lines.iter().for_each(|line| say!("\x1b[2K{line}"));
        // A total that takes a line less than before.
        put!("\x1b[J");
        self.drawn = lines.len();
    }
}

fn total(elapsed: Duration, store: &StoreStats, vms: &[Vm]) -> [String; 6] {
    let cpu = store.cpu_ns + vms.iter().map(|v| v.stats.cpu_ns.total()).sum::<u64>();
    let breaks: u64 = vms.iter().map(|v| v.stats.breaks_total()).sum();
    [
        format!("{:>3} s", elapsed.as_secs()),
        format!("kept once {}", pages_mib(store.pages_shared)),
        format!("not again {}", pages_mib(store.pages_sharing)),
        format!("saved net {}", mib(account::saved_net(store))),
        format!("CPU {:.2} s", cpu as f64 / 1e9),
        format!("breaks {breaks}"),
    ]
}

fn guests(vms: &[Vm]) -> Table {
    let mut table = Table::new(&COLUMNS);
    let mut vms: Vec<&Vm> = vms.iter().collect();
    vms.sort_by(|a, b| natural_order(&a.name, &b.name));
    for vm in vms {
        let s = &vm.stats;
        table.row([
            vm.name.clone(),
            pages_mib(s.pages_mapped),
            pages_mib(s.pages_zero),
            pages_mib(s.pages_unshared),
            s.breaks_total().to_string(),
            format!("{:.2}", s.cpu_ns.total() as f64 / 1e9),
            format!("{} us", s.stop.quantile_us(0.99)),
        ]);
    }
    table
}
