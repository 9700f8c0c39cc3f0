//! Each alert fires: real stores, VMs in the trouble that it is about, and a real Prometheus with the rules of the dashboards, in
//! which minutes are seconds.

use crate::host::{Host, Process, eventually, kvm_is_there};
use crate::peer;
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use vmm_dedup::{Reason, Refusal, Refused};
use vmm_dedup_integration_tests::prometheus::Prometheus;
use vmm_dedup_protocol::socket;
use vmm_dedup_protocol::stats::{DeviceWork, ServiceStats};

fn rules() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dashboards/vmm-dedup.rules.yml");
    fs::read_to_string(path).expect("the rules")
}

/// The rules with other times, and with two thresholds for hosts as small as this one.
fn hurried() -> String {
    let changes = [
        ("[5m]", "[5s]"),
        ("[15m]", "[15s]"),
        ("[30m]", "[60s]"),
        ("[1h]", "[10s]"),
        ("[6h]", "[120s]"),
        ("> 1000", "> 100"),
        ("67108864", "1048576"),
    ];
    let mut text = rules();
    for (long, short) in changes {
        assert!(text.contains(long), "the rules have no {long} any more");
        text = text.replace(long, short);
    }
    let line = |line: &str| match line.trim_start().strip_prefix("for: ") {
        Some(_) => line.split("for: ").next().unwrap_or_default().to_owned() + "for: 1s",
        None => line.to_owned(),
    };
    text.lines().map(|l| line(l) + "\n").collect()
}

/// All alerts that there are.
fn alerts() -> BTreeSet<String> {
    let rules = rules();
    let names = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    names.map(str::to_owned).collect()
}

/// A host with stores that have metrics.
struct Stores {
    host: Host,
    stores: Vec<Process>,
    guests: Vec<Process>,
}

impl Stores {
    fn socket(&self, store: &str) -> PathBuf {
        self.host.path(&format!("{store}.sock"))
    }

    /// A store that listens at NAME.sock, and where its metrics are.
    fn start(&mut self, name: &str, max_mib: &str) -> SocketAddr {
        let mut store = self
            .host
            .command(&["store", "--metrics", "127.0.0.1:0", "--max-mib", max_mib]);
        store.args(["--domain", name, "--socket"]).arg(self.socket(name));
        let store = Process(store.stderr(Stdio::null()).spawn().expect("a store"));
        let pid = store.pid();
        self.stores.push(store);
        eventually("the store is listed", || {
            let stat = self.host.run(&["stat", "--json"]);
            let stat: serde_json::Value = serde_json::from_slice(&stat.stdout).ok()?;
            let stores = stat["stores"].as_array()?;
            let store = stores.iter().find(|store| store["pid"] == pid)?;
            store["metrics"].as_str()?.parse().ok()
        })
    }

    /// A VM of a store; `options` of the command, and parameters of the test guest.
    fn guest(&mut self, store: &str, name: &str, options: &[&str], parameters: &str) -> &Process {
        let payload = format!("seconds=1000000 {parameters}");
        let mut run = self
            .host
            .command(&["run", "--memory-mib", "48", "--payload", &payload]);
        run.arg("--store").arg(self.socket(store)).args(options);
        run.args(["--name", name, "--pass-period-ms", "100"]);
        run.stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.guests.push(Process(run.spawn().expect("a VM")));
        self.guests.last().expect("a VM")
    }
}

/// Guests that write what they have in common again and again.
const RESTLESS: &str = "private_mib=1 zero_mib=0 common_mib=16 ws_area=common ws_pages=1000000 rate=0 rewrite=restore rest_ms=700";
const QUIET: &str = "private_mib=1 zero_mib=0 common_mib=16 ws_pages=0 rate=1";

#[test]
#[allow(clippy::too_many_lines)] // as many troubles as alerts
fn each_alert_fires() {
    if !kvm_is_there() {
        return;
    }
    let mut all = Stores {
        host: Host::new(),
        stores: Vec::new(),
        guests: Vec::new(),
    };
    let names = ["down", "full", "storm", "short", "alone", "stuck", "odd"];
    let targets = names.map(|name| all.start(name, if name == "full" { "1" } else { "256" }));
    let file = all.host.path("rules.yml");
    fs::write(&file, hurried()).expect("a file");
    let Some(prometheus) = Prometheus::start_on(&targets, &file) else {
        eprintln!("SKIPPED: prometheus is not installed (Debian package prometheus)");
        return;
    };

    // A store with room for 256 pages, a VM that is refused.
    for name in ["full-1", "full-2"] {
        all.guest("full", name, &[], QUIET);
    }
    let refusal = Refusal::new(Reason::Vfio, "a device has memory pinned", "detach it");
    let _refused = Refused::announce(&all.socket("full"), "gpu", 512, &refusal).expect("a thread");
    // What is merged is written.
    for name in ["storm-1", "storm-2"] {
        all.guest("storm", name, &["--cpu-percent", "40"], RESTLESS);
    }
    // No reserve can be had: there is never as much memory.
    let managed = [
        "--breaks",
        "managed",
        "--reserve-pages",
        "64",
        "--reserve-floor-mib",
        "16777216",
    ];
    for name in ["short-1", "short-2"] {
        all.guest("short", name, &managed, RESTLESS);
    }
    // Nothing is like anything.
    all.guest(
        "alone",
        "alone",
        &[],
        "private_mib=8 zero_mib=0 common_mib=0 ws_pages=0 rate=1",
    );
    // One that stands still, and two whose pages go while it does.
    all.guest("stuck", "stuck", &[], QUIET);
    for name in ["going-1", "going-2"] {
        all.guest(
            "stuck",
            name,
            &[],
            "private_mib=1 zero_mib=0 common_mib=24 common_seed=7 ws_pages=0 rate=1",
        );
    }
    eventually("they share", || {
        let shares = |name| Some(all.host.vm(name)?["pages_mapped"].as_u64()? >= 24 << 8);
        (shares("going-1")? && shares("going-2")? && all.host.vm("stuck").is_some()).then_some(())
    });
    let stuck = all
        .host
        .vm("stuck")
        .and_then(|vm| vm["pid"].as_u64())
        .expect("a VM");
    let stuck = all
        .guests
        .iter()
        .find(|guest| u64::from(guest.pid()) == stuck)
        .expect("a VM");
    // What grew before the first look at it has not grown.
    eventually("all stores have been looked at", || {
        let looked = prometheus.query("vmmdedup_slots_limbo").ok()?;
        (looked.len() == targets.len()).then_some(())
    });
    stuck.send(Signal::STOP);
    for name in ["going-1", "going-2"] {
        all.host.must(&["set", name, "off", "--unmerge"]);
    }
    // Services that say what is hard to bring about here: a device that fails, mappings that are used up; a connection that breaks
    // while its process lives; nonsense.
    let device = peer::connect(&all.socket("odd"), "device");
    peer::report(&device, &ServiceStats::default());
    drop(peer::connect(&all.socket("odd"), "orphan"));
    let odd = all.socket("odd");
    let nonsense = || {
        let connection = socket::connect(&odd).expect("a connection");
        let _ = socket::send(&connection, &[0xff; 64], &[]);
    };

    let (mut missing, start) = (alerts(), Instant::now());
    assert!(missing.len() >= 15, "{missing:?}");
    let mut late = 0;
    let mut is_down = false;
    while !missing.is_empty() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "never fired: {missing:?}"
        );
        std::thread::sleep(Duration::from_secs(1));
        nonsense();
        late += 1;
        peer::report(
            &device,
            &ServiceStats {
                verify_device: DeviceWork {
                    late,
                    ..DeviceWork::default()
                },
                vmas: 99,
                vmas_max: 100,
                ..ServiceStats::default()
            },
        );
        if !is_down && start.elapsed() > Duration::from_secs(5) {
            all.stores[0].kill();
            is_down = true;
        }
        for alert in prometheus.firing() {
            if missing.remove(&alert) {
                eprintln!("{alert} fires after {:.0?}", start.elapsed());
            }
        }
    }
}
