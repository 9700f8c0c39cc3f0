//! What Prometheus gets to see.

mod support;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use support::{Client, Server, eventually, page, refused};
use vmm_dedup_protocol::message::{Kind, encode};
use vmm_dedup_protocol::name::EngineName;
use vmm_dedup_protocol::refusal::{Reason, Refusal};
use vmm_dedup_protocol::socket;
use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::IntoBytes;

fn get(address: SocketAddr, path: &str, accept: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    body.to_owned()
}

fn server() -> (Server, SocketAddr) {
    let server = Server::start(|config| config.metrics = Some(SocketAddr::from(([127, 0, 0, 1], 0))));
    let address = server.metrics.unwrap();
    (server, address)
}

fn report(client: &mut Client, stats: &ServiceStats) {
    socket::send(&client.socket, &encode(Kind::Report, &[stats.as_bytes()]), &[]).unwrap();
    client.acknowledge();
}

fn value(text: &str, series: &str) -> Option<f64> {
    text.lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn counters_start_at_zero_and_outlive_their_vm() {
    let (server, address) = server();
    let merges = "vmmdedup_merges_total{domain=\"default\"}";
    let of_vm = "vmmdedup_vm_merges_total{domain=\"default\",vm=\"web\"}";
    let text = get(address, "/metrics", "");
    assert_eq!(value(&text, merges), Some(0.0), "{text}");
    assert_eq!(
        value(
            &text,
            "vmmdedup_refusals_total{domain=\"default\",reason=\"store_full\"}"
        ),
        Some(0.0)
    );

    let mut vm = Client::connect(&server.socket, "web");
    vm.publish(&[page(1)]);
    let mut account = ServiceStats {
        merges_total: 5,
        pages_mapped: 3,
        pages_zero: 2,
        ..Default::default()
    };
    account.stop.observe(3_000);
    report(&mut vm, &account);
    let text = get(address, "/metrics", "");
    assert_eq!(
        (value(&text, merges), value(&text, of_vm)),
        (Some(5.0), Some(5.0))
    );
    assert_eq!(
        value(&text, "vmmdedup_pages_shared{domain=\"default\"}"),
        Some(1.0)
    );
    let stop = |le| {
        value(
            &text,
            &format!("vmmdedup_stop_seconds_bucket{{domain=\"default\",le=\"{le}\"}}"),
        )
    };
    assert_eq!(
        (stop("0.000002"), stop("0.000005"), stop("+Inf")),
        (Some(0.0), Some(1.0), Some(1.0)),
        "{text}"
    );
    let metadata = value(&text, "vmmdedup_store_metadata_bytes{domain=\"default\"}").unwrap();
    let net = value(&text, "vmmdedup_saved_net_bytes{domain=\"default\"}").unwrap();
    // A page, or a folio of 64 KiB where the host has such.
    let resident = value(&text, "vmmdedup_resident_bytes{domain=\"default\"}").unwrap();
    // What a service takes and does not tell: 1,200 KiB, and page tables for its view of the store.
    let untold = f64::from(1200 << 10) + resident / 512.0;
    assert_eq!(net, (3.0 + 2.0) * 4096.0 - resident - metadata - untold);

    drop(vm);
    eventually(|| {
        let text = get(address, "/metrics", "");
        (value(&text, merges), value(&text, of_vm)) == (Some(5.0), None)
    });
}

/// A service that lost its connection, as behind a store that stood still, comes again and maps everything anew.
#[test]
fn what_is_shared_counts_once_for_a_process_that_connects_again() {
    let (server, address) = server();
    let sharing = || {
        value(
            &get(address, "/metrics", ""),
            "vmmdedup_pages_sharing{domain=\"default\"}",
        )
    };
    let mut one = Client::connect(&server.socket, "one");
    let slot = one.publish(&[page(1)])[0].unwrap();
    let mut two = Client::connect(&server.socket, "two");
    two.batch(&[], &[], &[(slot, 1)]);
    assert_eq!(sharing(), Some(1.0));

    drop(two);
    // The store counts what it holds a moment after it is an orphan.
    eventually(|| {
        value(
            &get(address, "/metrics", ""),
            "vmmdedup_orphans{domain=\"default\"}",
        ) == Some(1.0)
            && sharing() == Some(0.0)
    });
    let mut again = Client::connect(&server.socket, "two");
    again.batch(&[], &[], &[(slot, 1)]);
    assert_eq!(sharing(), Some(1.0));
}

/// A slot that only the process of a lost connection still maps keeps its memory, and takes nothing from what others share.
#[test]
fn slots_that_only_lost_connections_hold_do_not_lessen_what_is_shared() {
    let (server, address) = server();
    let account = || {
        let text = get(address, "/metrics", "");
        ["pages_shared", "pages_sharing", "orphans"]
            .map(|name| value(&text, &format!("vmmdedup_{name}{{domain=\"default\"}}")).unwrap())
    };
    let mut lost = Client::connect(&server.socket, "lost");
    let slots = lost.publish(&[page(1), page(2), page(3)]);
    let mut one = Client::connect(&server.socket, "one");
    let mut two = Client::connect(&server.socket, "two");
    one.batch(&[], &[], &[(slots[0].unwrap(), 1)]);
    two.batch(&[], &[], &[(slots[0].unwrap(), 1)]);
    assert_eq!(account(), [3.0, 2.0, 0.0]);

    drop(lost);
    // The store counts what it holds a moment after it is an orphan.
    eventually(|| account() == [3.0, 1.0, 1.0]);
}

#[test]
fn hostile_reports_do_no_harm() {
    let (server, address) = server();
    let mut honest = Client::connect(&server.socket, "honest");
    let account = |merges_total| ServiceStats {
        pages: 7,
        merges_total,
        ..Default::default()
    };
    report(&mut honest, &account(1));
    let mut vm = Client::connect(&server.socket, "x\"} 1\n");
    let mut all = ServiceStats::default();
    all.as_mut_bytes().fill(0xff);
    report(&mut vm, &all);
    report(&mut vm, &all);
    let _other = Client::connect(&server.socket, "y");
    report(&mut honest, &account(3));
    let text = get(address, "/metrics", "");
    assert_eq!(
        value(&text, "vmmdedup_vm_pages{domain=\"default\",vm=\"x___1_\"}"),
        Some(u64::MAX as f64)
    );
    // What others say still counts: here, and when it has gone.
    let of_host = |text: &str, name: &str| value(text, &format!("vmmdedup_{name}{{domain=\"default\"}}"));
    assert_eq!(
        ["merges_total", "pages"].map(|name| of_host(&text, name)),
        [Some(3.0), Some(7.0)],
        "{text}"
    );
    drop(vm);
    report(&mut honest, &account(4));
    let text = get(address, "/metrics", "");
    assert_eq!(of_host(&text, "merges_total"), Some(4.0));
}

/// A store that was started anew has not seen what services did before.
#[test]
fn what_a_service_did_before_it_knew_the_store_is_in_its_own_account_only() {
    let (server, address) = server();
    let breaks = "vmmdedup_breaks_total{domain=\"default\",mode=\"kernel\"}";
    let of_vm = "vmmdedup_vm_breaks_total{domain=\"default\",vm=\"web\",mode=\"kernel\"}";
    let account = |passes_total, breaks_kernel_total| ServiceStats {
        passes_total,
        breaks_kernel_total,
        ..Default::default()
    };
    // It loses its first connection before it has reported anything.
    drop(Client::connect(&server.socket, "web"));
    eventually(|| {
        let text = get(address, "/metrics", "");
        value(&text, "vmmdedup_orphans{domain=\"default\"}") == Some(1.0)
    });
    let mut vm = Client::connect(&server.socket, "web");
    let text = get(address, "/metrics", "");
    assert_eq!(value(&text, of_vm), None, "nothing is known of it: {text}");

    report(&mut vm, &account(900, 52_236));
    let text = get(address, "/metrics", "");
    assert_eq!(
        [breaks, of_vm].map(|series| value(&text, series)),
        [Some(0.0), Some(52_236.0)]
    );

    report(&mut vm, &account(901, 52_240));
    let text = get(address, "/metrics", "");
    assert_eq!(
        [breaks, of_vm].map(|series| value(&text, series)),
        [Some(4.0), Some(52_240.0)]
    );

    // One that has just begun did all of it here.
    let mut new = Client::connect(&server.socket, "new");
    report(&mut new, &account(1, 3));
    assert_eq!(value(&get(address, "/metrics", ""), breaks), Some(7.0));
}

#[test]
fn refused_vms_are_counted_by_reason_and_vanish() {
    let (server, address) = server();
    let vfio = "vmmdedup_refused_vms{domain=\"default\",reason=\"vfio\"}";
    let state = "vmmdedup_vm_state{domain=\"default\",vm=\"gpu\",state=\"refused\"}";
    let info = "vmmdedup_vm_refused_info{domain=\"default\",vm=\"gpu\",reason=\"vfio\"}";
    assert_eq!(value(&get(address, "/metrics", ""), vfio), Some(0.0));
    let refusal = Refusal::new(Reason::Vfio, "a device", "detach it");
    let vm = refused(&server.socket, "gpu", &refusal);
    let text = get(address, "/metrics", "");
    let values = [vfio, state, info].map(|series| value(&text, series));
    assert_eq!(values, [Some(1.0); 3], "{text}");
    drop(vm);
    eventually(|| {
        let text = get(address, "/metrics", "");
        [vfio, state, info].map(|series| value(&text, series)) == [Some(0.0), None, None]
    });
}

#[test]
fn the_account_of_a_vm_is_shown_by_stage_and_adds_up() {
    let (server, address) = server();
    let mut vm = Client::connect(&server.socket, "web");
    vm.publish(&[page(1)]);
    let mut account = ServiceStats {
        pages_mapped: 4,
        metadata_bytes: 10,
        cpu_percent: 20,
        state: 6,
        search: EngineName::try_new("pageforge").unwrap(),
        verify: EngineName::try_new("cpu").unwrap(),
        verifications_total: 7,
        ..Default::default()
    };
    account.bytes_read.hash = 4096;
    account.break_latency.observe(3_000);
    report(&mut vm, &account);
    let text = get(address, "/metrics", "");
    let of_vm = |name: &str, labels: &str| {
        let series = format!("vmmdedup_vm_{name}{{domain=\"default\",vm=\"web\"{labels}}}");
        value(&text, &series)
    };
    assert_eq!(
        of_vm("read_bytes_total", ",stage=\"hash\""),
        Some(4096.0),
        "{text}"
    );
    assert_eq!(of_vm("cpu_budget_cores", ""), Some(0.2));
    assert_eq!(of_vm("state", ",state=\"off\""), Some(1.0));
    assert_eq!(of_vm("state", ",state=\"running\""), Some(0.0));
    let engines = ",search=\"pageforge\",verify=\"cpu\"";
    assert_eq!(of_vm("engine_info", engines), Some(1.0));
    assert_eq!(of_vm("verifications_total", ""), Some(7.0));
    assert_eq!(of_vm("break_seconds_count", ""), Some(1.0));
    let host = value(&text, "vmmdedup_saved_net_bytes{domain=\"default\"}");
    assert_eq!(of_vm("saved_net_bytes", ""), host, "the only VM bears all");
}

#[test]
fn how_memory_comes_back_is_shown() {
    let server = Server::start(|config| config.metrics = Some(SocketAddr::from(([127, 0, 0, 1], 0))));
    let metric = |name: &str| {
        let text = get(server.metrics.unwrap(), "/metrics", "");
        value(&text, &format!("vmmdedup_{name}{{domain=\"default\"}}"))
    };
    let mut vm = Client::connect(&server.socket, "web");
    let slots = vm.publish(&[page(1), page(2)]);
    vm.batch(&[], &[], &[(slots[0].unwrap(), -1)]);
    assert_eq!(["slots_dead", "segments"].map(metric), [Some(1.0), Some(1.0)]);
    vm.batch(&[], &[], &[(slots[1].unwrap(), -1)]);
    eventually(|| metric("segments") == Some(0.0));
    let held = ["slots_dead", "segments_held", "segments_retired_total"].map(metric);
    assert_eq!(held, [Some(0.0), Some(1.0), Some(1.0)]);
    assert!(metric("held_bytes") >= Some(8192.0), "the VM keeps it");
    vm.acknowledge();
    vm.release();
    eventually(|| metric("held_bytes") == Some(0.0));
    assert_eq!(metric("segments_held"), Some(0.0));
}

/// The names in the table of docs/operating.md, without their prefix.
fn told_to_operators() -> BTreeSet<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operating.md");
    let text = std::fs::read_to_string(path).unwrap();
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| metric, with the prefix `vmmdedup_` |"));
    let rows = rows.take_while(|line| line.starts_with('|')).skip(2);
    let names = rows.flat_map(|row| {
        let cell = row.split('|').nth(1).unwrap_or_default();
        let names = cell.split('`').skip(1).step_by(2);
        names.map(|name| name.split('{').next().unwrap_or_default().to_owned())
    });
    names.collect()
}

#[test]
fn each_metric_is_told_to_operators_and_no_other() {
    let (server, address) = server();
    let mut client = Client::connect(&server.socket, "web");
    report(&mut client, &ServiceStats::default());
    let refusal = Refusal::new(Reason::Vfio, "a device", "detach it");
    let _refused = refused(&server.socket, "gpu", &refusal);

    let text = get(address, "/metrics", "");
    let types = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE vmmdedup_"));
    let served: BTreeSet<String> = types
        .filter_map(|line| line.split(' ').next().map(str::to_owned))
        .collect();

    let told = told_to_operators();
    assert!(told.len() > 100, "{told:?}");
    let is_told = |name: &&String| {
        told.contains(*name) || name.strip_prefix("vm_").is_some_and(|host| told.contains(host))
    };
    let untold: Vec<&String> = served.iter().filter(|name| !is_told(name)).collect();
    assert!(untold.is_empty(), "not in docs/operating.md: {untold:?}");
    // Where the kernel tells nothing of pressure, neither does the store.
    let elsewhere = |name: &&String| name.starts_with("host_pressure_");
    let is_served = |name: &&String| served.contains(*name) || elsewhere(name);
    let gone: Vec<&String> = told.iter().filter(|name| !is_served(name)).collect();
    assert!(gone.is_empty(), "only in docs/operating.md: {gone:?}");
}

#[test]
fn healthz_and_openmetrics_are_served() {
    let (_server, address) = server();
    assert_eq!(get(address, "/healthz", ""), "ok\n");
    let text = get(address, "/metrics", "application/openmetrics-text; version=1.0.0");
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn promtool_finds_nothing_to_complain_about() {
    let (server, address) = server();
    let mut vm = Client::connect(&server.socket, "web");
    vm.publish(&[page(1)]);
    report(
        &mut vm,
        &ServiceStats {
            merges_total: 5,
            ..Default::default()
        },
    );
    let _gpu = refused(&server.socket, "gpu", &Refusal::new(Reason::Vfio, "", ""));
    let text = get(address, "/metrics", "");
    let spawned = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut child) = spawned else {
        assert!(
            std::env::var("CI").as_deref() != Ok("true"),
            "promtool is needed: install prometheus"
        );
        eprintln!("SKIPPED: promtool is not installed (Debian package prometheus)");
        return;
    };
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && complaints.is_empty(),
        "{complaints}\n{text}"
    );
}
