//! A VM as Cloud Hypervisor's `vm.create` wants it, checked key by key.

use super::placeholder::Values;
use super::vm::VmPlan;
use crate::file::{VmSettings, Vmm};
use cloud_hypervisor_client::models::VmConfig;
use serde_json::{Value, json};
use std::net::IpAddr;
use std::path::Path;

/// The configuration that a VM's settings come to.
pub(crate) fn config(
    vm: &VmPlan,
    entry: &VmSettings,
    values: Values<'_>,
    folder: &Path,
) -> Result<VmConfig, String> {
    let mut wanted = json!({
        "cpus": { "boot_vcpus": vm.cpus, "max_vcpus": vm.cpus },
        "memory": { "size": vm.memory_mib << 20 },
        "payload": { "kernel": text(&vm.kernel)?, "cmdline": vm.cmdline },
    });
    if let Some(initramfs) = &vm.initramfs {
        wanted["payload"]["initramfs"] = text(initramfs)?.into();
    }
    let disks = list(entry.disks.as_ref(), values);
    if let Some(disks) = disks.map_err(|e| format!("disks: {e}"))? {
        wanted["disks"] = disks;
    }
    let net = list(entry.net.as_ref(), values);
    if let Some(net) = net.map_err(|e| format!("net: {e}"))? {
        wanted["net"] = net;
    }
    if let Some(vsock) = &entry.vsock {
        let vsock = values.fill_table(vsock).map_err(|e| format!("vsock: {e}"))?;
        wanted["vsock"] = vsock_device(json_of(vsock)?)?;
    }
    if let Some(api) = &entry.api {
        let api = values.fill_table(api).map_err(|e| format!("api: {e}"))?;
        complete(&mut wanted, json_of(api)?);
    }
    for key in ["serial", "console"] {
        if wanted.get(key).is_some() {
            return Err(format!(
                "api.{key} cannot be set: the serial port goes to a file of the fleet"
            ));
        }
    }
    make_absolute(&mut wanted, folder)?;
    let config: VmConfig = serde_json::from_value(wanted.clone())
        .map_err(|e| format!("not what Cloud Hypervisor takes: {}", in_words(&e.to_string())))?;
    let understood = serde_json::to_value(&config).map_err(|e| e.to_string())?;
    if let Some(key) = lost(&wanted, &understood, "") {
        let key = key.replace("$__toml_private_datetime", "a date");
        return Err(format!("{key} is not known to Cloud Hypervisor's API"));
    }
    check(&config)?;
    Ok(config)
}

/// A parser's message without the names of a program's types.
fn in_words(message: &str) -> String {
    let message = crate::file::in_words(message).replace("expected i64", "expected a whole number");
    match message.split_once("expected struct ") {
        Some((before, _)) => format!("{before}expected a table"),
        None => message,
    }
}

/// The other VMMs take devices only as arguments.
pub(crate) fn refuse_devices(vmm: Vmm, entry: &VmSettings) -> Result<(), String> {
    let given = [
        ("disks", entry.disks.is_some()),
        ("net", entry.net.is_some()),
        ("vsock", entry.vsock.is_some()),
        ("api", entry.api.is_some()),
    ];
    match (given.into_iter().find(|(_, given)| *given), vmm) {
        (None, _) => Ok(()),
        (Some((key, _)), Vmm::Qemu) => Err(format!(
            "{key} is for cloud-hypervisor: give QEMU its devices in extra_args"
        )),
        (Some((key, _)), _) => Err(format!(
            "{key} is for cloud-hypervisor: the {vmm} VMM has no such devices"
        )),
    }
}

fn text(path: &Path) -> Result<&str, String> {
    path.to_str()
        .ok_or_else(|| format!("{} is not UTF-8", path.display()))
}

fn json_of(table: toml::Table) -> Result<Value, String> {
    serde_json::to_value(table).map_err(|e| e.to_string())
}

fn list(tables: Option<&Vec<toml::Table>>, values: Values<'_>) -> Result<Option<Value>, String> {
    let Some(tables) = tables else { return Ok(None) };
    let items = tables.iter().map(|table| json_of(values.fill_table(table)?));
    Ok(Some(Value::Array(items.collect::<Result<_, _>>()?)))
}

/// `cid` may be a string, for the sake of placeholders.
fn vsock_device(mut vsock: Value) -> Result<Value, String> {
    if let Some(text) = vsock["cid"].as_str() {
        let cid: u32 = text
            .parse()
            .map_err(|_| format!("vsock.cid is {text:?}: it must be a number"))?;
        vsock["cid"] = cid.into();
    }
    Ok(vsock)
}

/// Adds what `more` has, going into objects.
fn complete(to: &mut Value, more: Value) {
    match (to, more) {
        (Value::Object(to), Value::Object(more)) => {
            for (key, value) in more {
                complete(to.entry(key).or_insert(Value::Null), value);
            }
        }
        (to, more) => *to = more,
    }
}

/// Paths begin at the fleet file's folder.
fn make_absolute(wanted: &mut Value, folder: &Path) -> Result<(), String> {
    if let Some(socket) = wanted.pointer_mut("/vsock/socket")
        && let Some(path) = socket.as_str()
    {
        *socket = text(&folder.join(path))?.into();
    }
    for disk in wanted
        .get_mut("disks")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if let Some(path) = disk.get("path").and_then(Value::as_str) {
            disk["path"] = text(&folder.join(path))?.into();
        }
    }
    Ok(())
}

/// The first key of `wanted` that `understood` has not.
fn lost(wanted: &Value, understood: &Value, at: &str) -> Option<String> {
    let join = |key: &str| {
        if at.is_empty() {
            key.to_owned()
        } else {
            format!("{at}.{key}")
        }
    };
    match (wanted, understood) {
        (Value::Object(wanted), understood) => {
            wanted.iter().find_map(|(key, value)| match understood.get(key) {
                Some(known) => lost(value, known, &join(key)),
                None => Some(join(key)),
            })
        }
        (Value::Array(wanted), Value::Array(understood)) => {
            let pairs = wanted.iter().zip(understood).enumerate();
            pairs
                .into_iter()
                .find_map(|(n, (value, known))| lost(value, known, &format!("{at}[{n}]")))
        }
        _ => None,
    }
}

/// What the API itself would only find when the VM starts.
fn check(config: &VmConfig) -> Result<(), String> {
    for disk in config.disks.iter().flatten() {
        if disk.path.is_none() && disk.vhost_socket.is_none() {
            return Err("a disk has neither path nor vhost_socket".into());
        }
    }
    for net in config.net.iter().flatten() {
        for (key, mac) in [("mac", &net.mac), ("host_mac", &net.host_mac)] {
            if let Some(mac) = mac
                && !is_mac(mac)
            {
                return Err(format!(
                    "net.{key} is {mac:?}: give six bytes, e.g. 52:54:00:00:00:01"
                ));
            }
        }
        for (key, address) in [("ip", &net.ip), ("mask", &net.mask)] {
            if let Some(address) = address
                && address.parse::<IpAddr>().is_err()
            {
                return Err(format!("net.{key} is {address:?}: give an IP address"));
            }
        }
    }
    if let Some(vsock) = &config.vsock
        && !(3..i64::from(u32::MAX)).contains(&vsock.cid)
    {
        return Err(format!("vsock.cid is {}: give 3 to 4294967294", vsock.cid));
    }
    Ok(())
}

fn is_mac(text: &str) -> bool {
    let bytes: Vec<&str> = text.split(':').collect();
    bytes.len() == 6
        && bytes
            .iter()
            .all(|b| b.len() == 2 && b.chars().all(|c| c.is_ascii_hexdigit()))
}
