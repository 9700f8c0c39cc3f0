//! A device that is passed through to a guest of Cloud Hypervisor, and goes again.

use super::Stage;
use super::fleet::Fleet;
use super::store::{self, Stat, Store};
use super::vmm::{self, Vmm};
use crate::wait::{check, wait_for};
use crate::{Failure, Workload};
use serde_json::{Value, json};
use std::fs::{read_dir, read_to_string, write};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use vmm_dedup_protocol::control::Switch;

/// QEMU's e1000e.
const DEVICE: (&str, &str) = ("0x8086", "0x10d3");
/// What the VMM calls it.
const ID: &str = "card";

pub(super) fn passthrough(stage: &mut Stage) -> Result<(), Failure> {
    let device = hand_over()?;
    stage.note(format!("{} is behind an IOMMU, for VFIO", device.display()))?;
    for vmm in vmm::that_pass_through() {
        let store = Store::start()?;
        let measured = comes_and_goes(stage, vmm, &device)?;
        stage.measured(vmm.name(), measured)?;
        drop(store);
    }
    Ok(())
}

/// Finds the device, and has VFIO drive it.
fn hand_over() -> Result<PathBuf, Failure> {
    let failed = |e: std::io::Error| Failure::new(format!("no device for VFIO: {e}"));
    let is = |path: &PathBuf| {
        let says = |name: &str, value| read_to_string(path.join(name)).is_ok_and(|text| text.trim() == value);
        says("vendor", DEVICE.0) && says("device", DEVICE.1)
    };
    let all = read_dir("/sys/bus/pci/devices").map_err(failed)?.flatten();
    let device = all.map(|entry| entry.path()).find(is);
    let device = device.ok_or_else(|| Failure::new("QEMU's card is not there"))?;
    check(device.join("iommu_group").exists(), || "there is no IOMMU".into())?;
    write(device.join("driver_override"), "vfio-pci").map_err(failed)?;
    let address = device
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    write("/sys/bus/pci/drivers_probe", address).map_err(failed)?;
    check(device.join("driver").exists(), || "VFIO does not take it".into())?;
    Ok(device)
}

/// Two guests share; one gets the device, which pins all its memory, and gives it back; they share again.
fn comes_and_goes(stage: &mut Stage, vmm: Vmm, device: &PathBuf) -> Result<Value, Failure> {
    let mut guests = Vec::new();
    for number in 1..=2 {
        let name = format!("{}{number}", vmm.name());
        guests.push(vmm.start(&name, Workload::Idle)?);
        store::switch(&name, Switch::Off)?;
    }
    for guest in &mut guests {
        guest.wait("L2 ready")?;
    }
    let (name, pid) = (guests[0].name.clone(), guests[0].pid());
    let mut fleet = Fleet { guests };
    fleet.share()?;
    let before = mapped(&name)?;
    stage.note(format!("{name} shares {before} pages"))?;
    check(pinned_kib(pid) == 0, || {
        "memory is pinned without a device".into()
    })?;

    let added = json!({ "path": device, "id": ID });
    api(&name, "vm.add-device", &added)?;
    let (during, pinned) = (mapped(&name)?, pinned_kib(pid));
    stage.note(format!(
        "with the device it shares {during} pages, and {pinned} KiB are pinned"
    ))?;
    check(during == 0 && pinned > 0, || {
        format!("{during} pages are shared beside a device, {pinned} KiB pinned")
    })?;

    api(&name, "vm.remove-device", &json!({ "id": ID }))?;
    wait_for("the device to go", || Ok((pinned_kib(pid) == 0).then_some(())))?;
    let after = wait_for("sharing again", || {
        Ok(Some(mapped(&name)?).filter(|pages| *pages > before / 2))
    })?;
    stage.note(format!("without it {name} shares {after} pages"))?;
    fleet.verify()?;
    fleet.type_line("poweroff")?;
    fleet
        .guests
        .iter_mut()
        .try_for_each(|guest| guest.ended().map(drop))?;
    Ok(json!({ "before": before, "during": during, "pinned_kib": pinned, "after": after }))
}

/// Pages of a VM that map the store.
fn mapped(name: &str) -> Result<u64, Failure> {
    let pages = Stat::fetch()?.vm(name, "pages_mapped");
    pages.ok_or_else(|| Failure::new(format!("the store does not know {name}")))
}

/// What devices have pinned of the memory of a process that locks none itself: VFIO counts it as locked.
fn pinned_kib(pid: u32) -> u64 {
    let status = read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}

/// Has Cloud Hypervisor do something.
fn api(name: &str, command: &str, body: &Value) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::new(format!("{command}: {e}"));
    let mut stream = UnixStream::connect(vmm::api(name)).map_err(failed)?;
    let body = body.to_string();
    let head = "HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
    let length = body.len();
    write!(
        stream,
        "PUT /api/v1/{command} {head}\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .map_err(failed)?;
    let mut answer = [0; 1024];
    let read = stream.read(&mut answer).map_err(failed)?;
    let answer = String::from_utf8_lossy(&answer[..read]).into_owned();
    check(answer.starts_with("HTTP/1.1 20"), || {
        format!("{command}: {answer}")
    })
}
