//! A store, and what it says of itself and its VMs.

use crate::Failure;
use crate::wait::wait_for;
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vmm_dedup_protocol::control::{Settings, Switch};
use vmm_dedup_protocol::observer::Observer;

pub(super) const SOCKET: &str = "/run/store.sock";
const METRICS: &str = "127.0.0.1:9753";
/// The saving has settled when it has not grown by half a per cent for so long, and in more than so many full
/// scans of every VM.
const SETTLED: Duration = Duration::from_secs(8);
const SETTLED_SCANS: u64 = 2;

/// A store's process; killed when dropped.
pub(super) struct Store(Child);

impl Store {
    pub(super) fn start() -> Result<Self, Failure> {
        let _ = std::fs::remove_file(SOCKET);
        let mut command = Command::new("vmm-dedup");
        command.args([
            "store",
            "--socket",
            SOCKET,
            "--metrics",
            METRICS,
            "--max-mib",
            "4096",
        ]);
        let child = command.stdin(Stdio::null()).spawn();
        let child = child.map_err(|e| Failure::new(format!("the store cannot be started: {e}")))?;
        let store = Self(child);
        wait_for("the store to listen", || {
            Ok(Path::new(SOCKET).exists().then_some(()))
        })?;
        Ok(store)
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Ends it as a crash would.
    pub(super) fn kill(mut self) -> Result<(), Failure> {
        let killed = self.0.kill().and_then(|()| self.0.wait());
        killed
            .map(drop)
            .map_err(|e| Failure::new(format!("the store cannot be killed: {e}")))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Switches merging of a guest's memory on or off, as soon as the guest is known.
///
/// Guests boot with it off: an emulated guest is slow, and being looked at every second, at the pace that suits a real
/// one, it would spend its time with faults.
pub(super) fn switch(guest: &str, switch: Switch) -> Result<(), Failure> {
    let settings = Settings {
        switch: Some(switch),
        cpu_percent: Some(100),
        ..Settings::default()
    };
    wait_for(&format!("{guest} to be switched"), || {
        let observer = Observer::connect(Path::new(SOCKET));
        Ok(observer
            .and_then(|mut observer| observer.set(guest, settings))
            .ok())
    })
}

/// `vmm-dedup stat --json`.
pub(super) struct Stat(pub(super) Value);

impl Stat {
    /// Asks the store. On a busy machine it may take longer than `stat` waits: then it is asked again.
    pub(super) fn fetch() -> Result<Self, Failure> {
        wait_for("the store to answer", || {
            let mut command = Command::new("vmm-dedup");
            let output = command.args(["stat", "--socket", SOCKET, "--json"]).output();
            let output = output.map_err(|e| Failure::new(format!("stat cannot be started: {e}")))?;
            Ok(serde_json::from_slice(&output.stdout).ok().map(Self))
        })
    }

    /// A number of the store's.
    pub(super) fn store(&self, name: &str) -> i64 {
        self.0["store"][name].as_i64().unwrap_or(0)
    }

    /// A number of all VMs together.
    pub(super) fn vms(&self, name: &str) -> u64 {
        self.each().map(|vm| vm[name].as_u64().unwrap_or(0)).sum()
    }

    /// A number of one VM.
    pub(super) fn vm(&self, vm: &str, name: &str) -> Option<u64> {
        self.each().find(|value| value["name"] == vm)?[name].as_u64()
    }

    /// How many frames a guest's agent says are what.
    pub(super) fn hint(&self, vm: &str, name: &str) -> u64 {
        let vm = self.each().find(|value| value["name"] == vm);
        vm.and_then(|vm| vm["hints"][name].as_u64()).unwrap_or(0)
    }

    fn each(&self) -> impl Iterator<Item = &Value> {
        self.0["vms"].as_array().into_iter().flatten()
    }

    /// Pages that sharing has freed.
    pub(super) fn saved_pages(&self) -> u64 {
        let used = self.store("pages_shared").unsigned_abs();
        (self.vms("pages_mapped") + self.vms("pages_zero")).saturating_sub(used)
    }

    /// CPU seconds of services and store.
    pub(super) fn cpu_seconds(&self) -> f64 {
        let stages = |vm: &Value| -> f64 {
            let stages = vm["cpu_seconds"].as_object().into_iter().flatten();
            stages.filter_map(|(_, seconds)| seconds.as_f64()).sum()
        };
        self.0["store"]["cpu_seconds"].as_f64().unwrap_or(0.0) + self.each().map(stages).sum::<f64>()
    }

    /// What all VMs' services have used of it, stage by stage.
    pub(super) fn cpu_of_stages(&self) -> String {
        let mut sums = std::collections::BTreeMap::<&str, f64>::new();
        for (stage, seconds) in self
            .each()
            .filter_map(|vm| vm["cpu_seconds"].as_object())
            .flatten()
        {
            *sums.entry(stage).or_default() += seconds.as_f64().unwrap_or(0.0);
        }
        let sums: Vec<String> = sums
            .iter()
            .map(|(stage, sum)| format!("{stage} {sum:.1}"))
            .collect();
        sums.join(", ")
    }
}

/// Waits until nothing more is saved; returns the account.
pub(super) fn settle() -> Result<Stat, Failure> {
    let (mut best, mut since, mut scans) = (0, Instant::now(), 0);
    wait_for("the saving to settle", || {
        std::thread::sleep(Duration::from_millis(500));
        let stat = Stat::fetch()?;
        let (saved, scanned) = (stat.saved_pages(), fewest_scans(&stat));
        if saved > best + best / 200 || best == 0 {
            (best, since, scans) = (saved, Instant::now(), scanned);
        }
        Ok((best > 0 && since.elapsed() > SETTLED && scanned > scans + SETTLED_SCANS).then_some(stat))
    })
}

fn fewest_scans(stat: &Stat) -> u64 {
    stat.each()
        .filter_map(|vm| vm["full_scans_total"].as_u64())
        .min()
        .unwrap_or(0)
}

/// What Prometheus would get.
pub(super) fn metrics() -> Result<String, Failure> {
    let output = Command::new("wget")
        .args(["-q", "-O", "-", &format!("http://{METRICS}/metrics")])
        .output();
    let output = output.map_err(|e| Failure::new(format!("wget cannot be started: {e}")))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
