//! A wall clock that jumps under commands, stores and VMs. (libfaketime answers for it; the other clocks stay as they are.)

use crate::host::{Host, eventually, kvm_is_there, text};
use crate::terminal::Terminal;
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

/// Longer than any pass and any step of a test takes, shorter than any jump.
const SHORT: Duration = Duration::from_secs(900);

const FLEET: &str = r#"
name = "clock"
[store]
socket = "store.sock"
metrics = "127.0.0.1:0"
max_mib = 256
[[vm]]
name = "web"
count = 2
vmm = "reference"
memory_mib = 64
kernel = "payload.elf"
cmdline = "seed={index} private_mib=4 zero_mib=1 common_mib=8 ws_area=private ws_pages=8 rate=10 report_ms=500 seconds=1000000"
dedup = { pass_period_ms = 100 }
"#;

/// A fleet under a clock that can be set.
struct Jumping {
    host: Host,
    clock: PathBuf,
    ahead: i64,
}

impl Drop for Jumping {
    fn drop(&mut self) {
        let _ = self.command(&["fleet", "down", "fleet.toml"]).status();
    }
}

impl Jumping {
    fn up() -> Option<Self> {
        if !Path::new(LIBRARY).exists() {
            eprintln!("SKIPPED: libfaketime is missing (Debian package libfaketime)");
            return None;
        }
        let host = Host::new();
        fs::write(host.path("payload.elf"), vmm_dedup_payload::ELF).expect("a kernel");
        fs::write(host.path("fleet.toml"), FLEET).expect("a file");
        let mut jumping = Self {
            clock: host.path("clock"),
            host,
            ahead: 0,
        };
        jumping.set(0);
        jumping.must(&["fleet", "up", "fleet.toml"]);
        eventually("both share", || {
            let vms = jumping.stat()["vms"].as_array()?.clone();
            let shares = |vm: &Value| vm["pages_mapped"].as_u64() >= Some(2048);
            (vms.len() == 2 && vms.iter().all(shares)).then_some(())
        });
        Some(jumping)
    }

    /// Sets the clock so many seconds ahead of the real one.
    fn set(&mut self, ahead: i64) {
        let fresh = self.host.path("clock.new");
        fs::write(&fresh, format!("{ahead:+}\n")).expect("a file");
        fs::rename(fresh, &self.clock).expect("a file");
        self.ahead = ahead;
    }

    /// A command under this clock, and what it starts.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.host.command(args);
        command
            .current_dir(self.host.path(""))
            .env("LD_PRELOAD", LIBRARY)
            .env("FAKETIME_TIMESTAMP_FILE", &self.clock)
            .env("FAKETIME_NO_CACHE", "1")
            .env("DONT_FAKE_MONOTONIC", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        command
    }

    fn must(&self, args: &[&str]) -> String {
        let output = self.command(args).output().expect("the command runs");
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn stat(&self) -> Value {
        serde_json::from_str(&self.must(&["stat", "--json"])).expect("JSON")
    }

    /// Unix time by this clock.
    fn now(&self) -> Duration {
        let real = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        real.saturating_add_signed(self.ahead)
    }

    fn passes(&self) -> u64 {
        let stat = self.stat();
        let vms = stat["vms"].as_array().expect("VMs");
        vms.iter()
            .filter_map(|vm| vm["passes_total"].as_u64())
            .min()
            .expect("passes")
    }

    /// A series of the store, as Prometheus sees it.
    fn metric(&self, name: &str) -> f64 {
        let stat = self.stat();
        let address = stat["stores"][0]["metrics"].as_str().expect("an address");
        let mut stream = TcpStream::connect(address).expect("a connection");
        write!(
            stream,
            "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        .expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let line = answer.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name}: {answer}"))
    }
}

trait AddSigned {
    fn saturating_add_signed(self, seconds: i64) -> Self;
}

impl AddSigned for Duration {
    fn saturating_add_signed(self, seconds: i64) -> Self {
        let by = Duration::from_secs(seconds.unsigned_abs());
        if seconds < 0 {
            self.saturating_sub(by)
        } else {
            self + by
        }
    }
}

/// Ages such as `3 h` or `12 min` in a text: none of what is minutes old at most is that old.
fn tells_of_long_ages(text: &str) -> bool {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.windows(2).any(|two| {
        two[0].parse::<f64>().is_ok()
            && (two[1].starts_with('h') || two[1].starts_with('d'))
            && two[1].len() <= 2
    })
}

/// Three hours forwards, then six backwards, then to where it was.
const JUMPS: [i64; 3] = [3 * 3600, -3 * 3600, 0];

#[test]
fn ages_and_dates_are_right_whatever_the_clock_does() {
    if !kvm_is_there() {
        return;
    }
    let Some(mut all) = Jumping::up() else { return };
    for ahead in JUMPS {
        all.set(ahead);
        let passes = all.passes();
        eventually("passes go on", || (all.passes() > passes + 2).then_some(()));

        let stat = all.stat();
        // Of a command whose clock is another, too.
        let other = all.host.json(&["stat", "--json"]);
        for vms in [&stat["vms"], &other["vms"]] {
            for vm in vms.as_array().expect("VMs") {
                let age = vm["last_pass_age_ms"].as_u64().map(Duration::from_millis);
                assert!(age.is_some_and(|age| age < SHORT), "{ahead}: {age:?}");
            }
        }
        let near = |unix: Duration| unix.abs_diff(all.now()) < SHORT;
        let ended = stat["vms"][0]["last_pass_unix_ms"].as_u64().expect("a date");
        assert!(near(Duration::from_millis(ended)), "{ahead}: {ended}");
        let store = &stat["stores"][0];
        assert!(
            store["up_seconds"].as_u64() < Some(SHORT.as_secs()),
            "{ahead}: {store}"
        );
        let started = store["started_unix"].as_u64().expect("a date");
        assert!(near(Duration::from_secs(started)), "{ahead}: {started}");
        // Of which Prometheus, if its clock is that of the host, makes the same ages.
        for series in [
            "vmmdedup_vm_last_pass_timestamp_seconds",
            "vmmdedup_start_time_seconds",
        ] {
            let unix = all.metric(series);
            assert!(near(Duration::from_secs_f64(unix)), "{ahead}: {series} {unix}");
        }
        for args in [
            &["stat"][..],
            &["explain", "web-0"],
            &["fleet", "status", "fleet.toml"],
        ] {
            let said = all.must(args);
            assert!(!tells_of_long_ages(&said), "{ahead}: {args:?}: {said}");
        }
        let doctor = text(&all.command(&["doctor"]).output().expect("it runs").stdout);
        assert!(!doctor.contains("its last pass ended"), "{ahead}: {doctor}");
    }
}

#[test]
fn what_is_watched_goes_on_whatever_the_clock_does() {
    if !kvm_is_there() {
        return;
    }
    let Some(mut all) = Jumping::up() else { return };
    let mut top = Terminal::open(all.command(&["top", "--interval", "0.2"]), 80, 24);
    top.shows("web-1");
    let logs = all.command(&["fleet", "logs", "fleet.toml", "web-0", "--serial", "-f"]);
    let logs = Terminal::open(logs, 200, 24);
    for ahead in JUMPS {
        all.set(ahead);
        let (drawn, followed) = (top.bytes().len(), logs.bytes().len());
        eventually("it is drawn again, and what the guest says comes", || {
            (top.bytes().len() > drawn + 2000 && logs.bytes().len() > followed).then_some(())
        });

        let screen = top.screen();
        let rows: Vec<&String> = screen.iter().filter(|line| line.starts_with("web-")).collect();
        assert_eq!(rows.len(), 2, "{screen:#?}");
        for row in rows {
            assert!(!tells_of_long_ages(row), "{ahead}: {row}");
            // MERGE/S, BREAK/S, CPU% and WAIT, of guests that write ten pages a second.
            let rates = row.split_whitespace().rev().take(4).map(str::parse::<f64>);
            assert!(
                rates.flatten().filter(|rate| *rate < 1000.0).count() == 4,
                "{ahead}: {row}"
            );
        }
    }
    top.types("q");
    assert!(top.end().success());
}
