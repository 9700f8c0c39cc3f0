//! `bench engines` and `device` as their users meet them.

#[path = "operator/drawn.rs"]
mod plots;

use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn vmm_dedup(args: &[&str]) -> Output {
    let command = Command::new(env!("CARGO_BIN_EXE_vmm-dedup")).args(args).output();
    command.expect("the command runs")
}

fn list<'a>(report: &'a Value, key: &str) -> &'a [Value] {
    report[key].as_array().expect("a list")
}

#[test]
fn all_engines_find_the_same_and_say_what_it_took() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    // 64 pages of 16 kinds, and a piece of one.
    let pages: Vec<u8> = (0..64u8)
        .flat_map(|page| [page % 16 + 1; 4096])
        .chain([0; 100])
        .collect();
    std::fs::write(&image, pages).expect("an image");
    let image = image.to_str().expect("UTF-8");
    let args = [
        "bench", "engines", "--mib", "8", "--kinds", "runs", "--slots", "1000", "--image", image, "--later",
        image, "--json", "--plot",
    ];
    let plots = folder.path().join("plots");
    let output = vmm_dedup(&[&args[..], &[plots.to_str().expect("UTF-8")]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    plots::are_whole(
        &plots,
        &["engines-merging", "engines-searching", "engines-service"],
    );
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");

    let merging = list(&report, "merging");
    assert_eq!(merging.len(), 2 * 6, "two contents, six engines");
    for figures in merging {
        assert_eq!(figures["same_merges"], true, "{figures}");
        let saved = if figures["content"] == "runs" {
            2048 / 4 * 3
        } else {
            48
        };
        assert_eq!(figures["saved_pages"], saved, "{figures}");
    }
    let keys = list(&report, "keys");
    let bytes = |engine: &str| {
        let of_engine = keys.iter().filter(|key| {
            key["engine"]
                .as_str()
                .is_some_and(|name| name.starts_with(engine))
        });
        of_engine
            .map(|key| key["bytes_per_key"].as_f64().expect("a number"))
            .collect::<Vec<_>>()
    };
    assert_eq!((bytes("jhash2"), bytes("ECC")), (vec![1024.0; 7], vec![256.0; 7]));
    let unchanged = keys.iter().filter(|key| key["write"] == "guest");
    assert!(
        unchanged
            .clone()
            .all(|key| key["changed"] == 0 && key["mismatches"] == 0)
    );
    assert_eq!(unchanged.count(), 3);
    let service = list(&report, "service");
    let names: Vec<&Value> = service.iter().map(|figures| &figures["engine"]).collect();
    assert_eq!(names, ["index", "tree", "pageforge"]);
    for figures in service {
        assert_eq!(figures["merged"], 512, "{figures}");
        assert_eq!(
            figures["searches"] != 0,
            figures["engine"] != "index",
            "{figures}"
        );
    }
    let searching = list(&report, "searching");
    assert_eq!(searching.len(), 3);
    for figures in searching {
        assert_eq!(figures["same_answers"], true, "{figures}");
        assert_eq!(figures["found"], 32_768 / 2, "{figures}");
    }
}

struct Device(Child);

impl Drop for Device {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_until(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn devices_take_their_sockets_away_and_no_other_ones() {
    ["pageforge", "dsa"].into_iter().for_each(takes_its_socket_away);
}

fn takes_its_socket_away(kind: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("device");
    let path = socket.to_str().expect("UTF-8");
    let command = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args(["device", kind, "--socket", path])
        .stderr(Stdio::null())
        .spawn();
    let mut device = Device(command.expect("it starts"));
    wait_until("the device listens", || socket.exists());
    let second = vmm_dedup(&["device", kind, "--socket", path]);
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1));
    assert!(
        text.contains("exists") && text.trim_end().lines().count() == 1,
        "{text}"
    );
    assert!(Path::new(path).exists(), "that of the first one stays");
    rustix::process::kill_process(Pid::from_child(&device.0), Signal::TERM).expect("kill");
    assert_eq!(device.0.wait().expect("wait").code(), Some(128 + 15));
    assert!(!socket.exists());
}

/// A device that nobody could use is refused before it listens.
#[test]
fn devices_refuse_options_that_make_no_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("device");
    let path = socket.to_str().expect("UTF-8");
    for (kind, option, value) in [
        ("dsa", "--max-clients", "0"),
        ("pageforge", "--max-clients", "0"),
        ("dsa", "--latency-ns", "18446744073709551615"),
        ("dsa", "--megabytes-per-s", "0"),
    ] {
        let output = vmm_dedup(&["device", kind, "--socket", path, option, value]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(option) && text.contains("is not in"), "{text}");
    }
}

/// A queue that there is not is told with the reason of the kernel's, and nobody does its work.
#[test]
fn a_queue_that_cannot_be_measured_is_told_with_the_reason() {
    for (node, reason) in [
        ("/dev/dsa/wq9999.0", "No such file or directory"),
        ("/dev/null", "/dev/null is not a work queue: name one such as"),
        (
            "/sys/bus/pci/devices/none",
            "is not a PCI device: name one such as",
        ),
    ] {
        let output = vmm_dedup(&["bench", "dsa", "--node", node, "--json"]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(
            text.contains(reason) && !text.contains("the CPU does the same"),
            "{text}"
        );
        assert!(output.stdout.is_empty());
    }
}

/// Every figure is there, all ways merge the same, and the report says that it is of a model.
#[test]
fn dsa_is_compared_with_the_cpu() {
    let args = [
        "bench", "dsa", "--model", "--mib", "4", "--pages", "1024", "--kinds", "runs", "--rounds", "2",
        "--json", "--plot",
    ];
    let plots = tempfile::tempdir().expect("a folder");
    let output = vmm_dedup(&[&args[..], &[plots.path().to_str().expect("UTF-8")]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    plots::are_whole(plots.path(), &["dsa-operations", "dsa-impact"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["device"]["kind"], "modelled");
    assert_eq!(report["device"]["latency_ns"], 800);
    assert_eq!(list(&report, "operations").len(), 2 * 13);
    let merges: Vec<&Value> = list(&report, "ksm").iter().map(|way| &way["merges"]).collect();
    assert_eq!(merges.len(), 6);
    assert!(
        merges
            .iter()
            .all(|count| *count == merges[0] && count.as_u64() > Some(500))
    );
    assert_eq!(list(&report, "service").len(), 5);
    assert!(
        list(&report, "impact")
            .iter()
            .all(|way| way["slowdown"].as_f64() > Some(0.0))
    );
    let ratios = list(&report, "ratios");
    let of: Vec<&Value> = ratios.iter().map(|ratios| &ratios["of"]).collect();
    assert_eq!(of, ["runs", "service"]);
    for ratios in ratios {
        let [least, median, most] =
            ["least", "median", "most"].map(|name| ratios["para_of_dsa"][name].as_f64().expect("a ratio"));
        assert!(0.0 < least && least <= median && median <= most, "{ratios}");
    }
}
