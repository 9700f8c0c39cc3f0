//! The store, payload guests that come and go, and the process with direct I/O.

use super::pair::Round;
use super::{Sample, problems};
use crate::store::StoreThread;
use crate::vm::Guest;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmm_dedup::Config;
use vmm_dedup_payload::{PayloadConfig, Rewrite, WorkingSet};
use vmm_dedup_refvmm::ThpMode;

/// Guests at a time.
const GUESTS: usize = 3;
/// What all guests have in common, MiB.
const COMMON_MIB: u64 = 8;
/// How long guests rest between rounds of theirs, in which they write and restore all of it.
const REST: Duration = Duration::from_secs(5);
/// A round: each guest has rested at least once, and the oldest gives way to a new one.
const ROUND: Duration = Duration::from_secs(9);
/// How long the fleet may take until it shares for the first time, and the pair to end.
const PATIENCE: Duration = Duration::from_secs(120);

/// What happened.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    samples: Vec<Sample>,
    /// Guests that ended, each of which compared all of its memory.
    guests: u64,
    /// Writes that these did.
    writes: u64,
    /// Pages read and written directly.
    direct: u64,
    /// Words and pages that were not what they had to be.
    wrong: u64,
    /// What else must not be.
    problems: Vec<String>,
}

impl Outcome {
    /// What must not be, as a sentence each; none: all is well.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut all = self.problems.clone();
        if self.wrong > 0 {
            all.push(format!("{} words or pages were wrong", self.wrong));
        }
        if self.direct == 0 || self.guests == 0 {
            all.push("nothing was written directly, or no guest ended".into());
        }
        all.extend(problems(&self.samples));
        all
    }

    /// For reports.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "ok": self.problems().is_empty(),
            "problems": self.problems(),
            "guests_ended": self.guests,
            "guest_writes": self.writes,
            "direct_pages": self.direct,
            "wrong": self.wrong,
            "rounds": self.samples.iter().map(Sample::json).collect::<Vec<Value>>(),
        })
    }
}

/// Runs the fleet for so long; `pair` is the program that is [`super::pair::run`] if called with `--pair SOCKET`.
///
/// # Panics
/// If something cannot be started that is needed.
#[must_use]
pub fn run(duration: Duration, pair: &Path) -> Outcome {
    let store = StoreThread::with_metrics();
    let mut pair = Pair::start(pair, store.socket());
    let mut booted = 0;
    let mut boot = || {
        booted += 1;
        boot(&store, booted)
    };
    let mut guests: VecDeque<Guest> = (0..GUESTS).map(|_| boot()).collect();
    let mut out = Outcome::default();
    let start = Instant::now();
    while guests_share(guests.iter(), Duration::from_secs(1)) < 0.9 {
        if start.elapsed() > PATIENCE {
            out.problems
                .push("the guests never shared what they have in common".into());
            break;
        }
    }
    let start = Instant::now();
    while start.elapsed() < duration && out.wrong == 0 {
        // The newest has not been there for long.
        let shared = guests_share(guests.iter().take(GUESTS - 1), ROUND);
        let oldest = guests.pop_front().expect("there are some");
        out.end(oldest);
        guests.push_back(boot());
        let round = pair.last();
        let sample = Sample {
            seconds: start.elapsed().as_secs_f64(),
            guests: shared,
            pair: round.shared,
            resident: store.metric("resident_bytes"),
            in_use: store.metric("pages_shared") * 4096,
            mappings: mappings("self") + mappings(&pair.pid()),
            memory: memory("self") + memory(&pair.pid()),
        };
        eprintln!(
            "{:>6.0} s: guests share {:.3}, the pair {:.3} of what is common; store {} MiB for {}; {} mappings, {} MiB; {} guests ended, {} pages moved directly, {} wrong",
            sample.seconds,
            sample.guests,
            sample.pair,
            sample.resident >> 20,
            sample.in_use >> 20,
            sample.mappings,
            sample.memory >> 20,
            out.guests,
            round.direct,
            out.wrong + round.wrong
        );
        out.samples.push(sample);
        if round.wrong > 0 {
            break;
        }
    }
    guests.into_iter().for_each(|guest| out.end(guest));
    match pair.end() {
        Some(round) => (out.direct, out.wrong) = (round.direct, out.wrong + round.wrong),
        None => out
            .problems
            .push("the pair with direct I/O did not end as it should".into()),
    }
    out
}

impl Outcome {
    fn end(&mut self, guest: Guest) {
        // This process lives on, so the store would keep what a guest maps that did not give it back.
        guest.end_dedup(true);
        let (verdict, _) = guest.finish();
        self.guests += 1;
        self.writes += verdict.writes;
        self.wrong += verdict.errors + u64::from(!verdict.ok && verdict.errors == 0);
    }
}

fn boot(store: &StoreThread, number: u64) -> Guest {
    let payload = PayloadConfig::default()
        .seed(number)
        .private_mib(2)
        .zero_mib(2)
        .common_mib(COMMON_MIB)
        .ws_area(WorkingSet::Common)
        .ws_pages(1 << 20)
        .rate(20_000)
        .reads(0)
        .rewrite(Rewrite::Restore)
        .rest_ms(u64::try_from(REST.as_millis()).expect("seconds"))
        .seconds(1_000_000);
    let config = Config {
        name: format!("guest-{number}"),
        pass_period_ms: 50,
        cpu_percent: 50,
        ..Config::default()
    };
    Guest::boot(payload, 24, ThpMode::Never, Some((&store.socket(), config)))
}

/// What the guest shared that shared least, at its best moment in so much time, of what is common.
fn guests_share<'a>(guests: impl Iterator<Item = &'a Guest>, time: Duration) -> f64 {
    let start = Instant::now();
    let guests: Vec<&Guest> = guests.collect();
    let mut best = vec![0.0f64; guests.len()];
    while start.elapsed() < time {
        std::thread::sleep(Duration::from_millis(100));
        for (best, guest) in best.iter_mut().zip(&guests) {
            let shared = guest.stats().pages_mapped as f64 / (COMMON_MIB << 8) as f64;
            *best = best.max(shared.min(1.0));
        }
    }
    best.into_iter().fold(1.0, f64::min)
}

fn mappings(process: &str) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
    maps.lines().count() as u64
}

/// Anonymous memory of a process, bytes.
fn memory(process: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// The process with direct I/O, and what it said last.
struct Pair {
    process: Child,
    last: Arc<Mutex<Option<Round>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Pair {
    fn start(program: &Path, store: PathBuf) -> Self {
        let mut process = Command::new(program)
            .arg("--pair")
            .arg(store)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let last = Arc::new(Mutex::new(None));
        let (lines, heard) = (process.stdout.take().expect("piped"), last.clone());
        let reader = std::thread::spawn(move || {
            let lines = BufReader::new(lines).lines().map_while(Result::ok);
            for round in lines.filter_map(|line| Round::parse(&line)) {
                *heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(round);
            }
        });
        let pair = Self {
            process,
            last,
            reader: Some(reader),
        };
        let start = Instant::now();
        while pair.heard().is_none() && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(50));
        }
        pair
    }

    fn pid(&self) -> String {
        self.process.id().to_string()
    }

    fn heard(&self) -> Option<Round> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn last(&self) -> Round {
        self.heard().unwrap_or_default()
    }

    /// Lets it compare all of its pages and end; `None` if it does not.
    fn end(&mut self) -> Option<Round> {
        drop(self.process.stdin.take());
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.process.try_wait().ok()? {
                break status;
            }
            if start.elapsed() > PATIENCE {
                return None;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        self.reader.take()?.join().ok()?;
        self.heard().filter(|round| round.done && status.success())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
