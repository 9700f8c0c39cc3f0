//! Fleets of payload guests, from `up` to `down`.

use crate::host::{COMMON_PAGES, Host, QEMU_VM, kvm_is_there, vmm_is_there, wait_until};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use vmm_dedup_integration_tests::unmodified::library;

const VMS: usize = 32;

fn vms(status: &Value) -> &Vec<Value> {
    status["vms"].as_array().expect("VMs")
}

/// Waits until each guest has filled its memory.
fn wait_for_guests(status: &Value) {
    for vm in vms(status) {
        let serial = Path::new(vm["serial"].as_str().expect("a path"));
        wait_until("a guest is ready", || {
            fs::read_to_string(serial).is_ok_and(|text| text.contains("@payload ready"))
        });
    }
}

/// Pages of all VMs that map a shared page.
fn mapped(status: &Value) -> u64 {
    vms(status)
        .iter()
        .filter_map(|vm| vm["dedup"]["pages_mapped"].as_u64())
        .sum()
}

#[test]
fn thirty_two_reference_vms_share_and_leave_nothing() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&format!(
        "[[vm]]\nname = \"pay\"\ncount = {VMS}\ntemplate = \"payload\"\nvmm = \"reference\"\ndedup = {{ pass_period_ms = 500 }}\n"
    ));
    let said = host.must("up", &[]);
    assert!(said.contains("32 VMs run"), "{said}");
    let status = host.status();
    assert_eq!(vms(&status).len(), VMS);
    assert!(
        vms(&status).iter().all(|vm| vm["state"] == "running"),
        "{status:#}"
    );
    wait_for_guests(&status);
    wait_until("all VMs share what they have in common", || {
        mapped(&host.status()) >= COMMON_PAGES * VMS as u64
    });
    let table = host.must("status", &[]);
    assert!(
        table.contains("pay-31") && table.contains("MiB saved net"),
        "{table}"
    );
    let memfds = Host::memfds_of(&status["stores"][0]["pid"]);
    host.must("down", &[]);
    host.assert_nothing_left(&memfds);
    let again = host.must("down", &[]);
    assert!(again.contains("is not up"), "{again}");
}

#[test]
fn a_fleet_whose_store_shares_securely_says_so_and_leaves_nothing() {
    if !kvm_is_there() {
        return;
    }
    let store = "[store]\nsocket = \"store.sock\"\nmetrics = \"none\"\nmax_mib = 256\nsecure = true\n";
    let dedup = "dedup = { pass_period_ms = 100, pack = { idle_ms = 200 } }\n";
    let vm = "[[vm]]\nname = \"pay\"\ncount = 2\ntemplate = \"payload\"\nvmm = \"reference\"\n";
    let host = Host::new(&format!("{vm}{dedup}{store}"));
    host.must("up", &[]);
    let status = host.status();
    wait_for_guests(&status);
    wait_until("both VMs keep in the store what they have in common", || {
        let account = &host.status()["stores"][0]["account"];
        account["pages_sharing"]
            .as_u64()
            .is_some_and(|pages| pages >= COMMON_PAGES)
    });
    let status = host.status();
    assert_eq!(status["stores"][0]["account"]["secure"], true, "{status:#}");
    assert_eq!(mapped(&status), 0, "{status:#}");
    let table = host.must("status", &[]);
    assert!(table.contains(" running, shares securely, "), "{table}");
    let memfds = Host::memfds_of(&status["stores"][0]["pid"]);
    host.must("down", &[]);
    host.assert_nothing_left(&memfds);
}

#[test]
fn thirty_two_vms_under_cloud_hypervisor_leave_nothing() {
    if !kvm_is_there() || !vmm_is_there("CLOUD_HYPERVISOR", "cloud-hypervisor") {
        return;
    }
    let host = Host::new(&format!(
        "preload = {:?}\n[[vm]]\nname = \"pay\"\ncount = {VMS}\ntemplate = \"payload\"\nvsock = {{ cid = \"{{index+3}}\", socket = \"{{name}}.vsock\" }}\ndedup = {{ pass_period_ms = 500 }}\n",
        library::path()
    ));
    host.must("up", &[]);
    let status = host.status();
    assert_eq!(vms(&status).len(), VMS);
    assert!(
        vms(&status)
            .iter()
            .all(|vm| vm["state"] == "running" && vm["vmm"] == "cloud-hypervisor"),
        "{status:#}"
    );
    wait_for_guests(&status);
    wait_until("all VMs share what they have in common", || {
        mapped(&host.status()) >= COMMON_PAGES * VMS as u64
    });
    let memfds = Host::memfds_of(&status["stores"][0]["pid"]);
    pause(&host.path("run/vm/pay-7/api.sock"));
    assert_eq!(host.vm("pay-7")["state"], "paused");
    // A paused VM does not shut down by itself: its time passes, then the VMM is told to end.
    host.must("down", &["--grace", "1"]);
    host.assert_nothing_left(&memfds);
}

fn pause(socket: &Path) {
    let mut api = UnixStream::connect(socket).expect("the API");
    api.write_all(b"PUT /api/v1/vm.pause HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n")
        .expect("a request");
    let mut answer = [0; 12];
    api.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 204");
}

#[test]
fn a_vm_under_qemu_runs_and_ends_by_its_monitor() {
    if !kvm_is_there() || !vmm_is_there("QEMU", "qemu-system-x86_64") {
        return;
    }
    let host = Host::new(QEMU_VM);
    host.must("up", &[]);
    let vm = host.vm("q");
    assert_eq!(
        (&vm["state"], &vm["dedup"]),
        (&Value::from("running"), &Value::Null),
        "{vm:#}"
    );
    host.must("down", &["--grace", "0"]);
    host.assert_nothing_left(&BTreeSet::new());
}
