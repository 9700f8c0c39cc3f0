//! What a fleet file comes to: every VM by itself, every store, all paths absolute. Nothing on the host is looked at.

mod machine;
mod mistake;
mod placeholder;
mod store;
#[cfg(test)]
mod tests;
mod vm;

use crate::file::{self, DEFAULT_DOMAIN, FleetFile, VmSettings, Vmm};
use mistake::{Mistake, Place};
use placeholder::Values;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;
pub use store::StorePlan;
pub use vm::VmPlan;
use vmm_dedup::{AgentSocket, Config};
use vmm_dedup_host::Failure;

/// Most VMs of one fleet: what a store takes by default.
pub(crate) const MAX_VMS: usize = 4096;

/// The vCPUs and the guest memory, MiB, that `vmm-dedup run` takes.
const REFERENCE_TAKES: (RangeInclusive<u8>, RangeInclusive<u64>) = (1..=64, 4..=1 << 20);

/// A fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The fleet's name.
    pub name: String,
    /// Where relative paths of the file begin, and VMMs work.
    pub folder: PathBuf,
    /// The preload library, if the file names one.
    pub preload: Option<PathBuf>,
    /// VMs that are started at a time.
    pub parallel: usize,
    /// How long one VM may take to start.
    pub start_limit: Duration,
    /// The stores that VMs need.
    pub stores: Vec<StorePlan>,
    /// All VMs.
    pub vms: Vec<VmPlan>,
}

impl Plan {
    /// Reads a fleet file and expands it. `run_folder`: where sockets go that the file does not place.
    /// `scale`: how many VMs entries have, whatever the file says.
    pub(crate) fn read(
        path: &Path,
        run_folder: &Path,
        scale: &BTreeMap<String, u32>,
    ) -> Result<Self, Failure> {
        let text = file::read(path)?;
        let mut file = FleetFile::parse(path, &text)?;
        for entry in file.vm.iter_mut().filter(|entry| entry.count.is_some()) {
            let scaled = entry.name.as_ref().and_then(|name| scale.get(name));
            entry.count = scaled.copied().or(entry.count);
        }
        Self::checked(&file, path, run_folder, |mistake| {
            let place = match &mistake.place {
                Place::Unknown => None,
                Place::Entry(entry, key) => file::place(&text, *entry, *key, &mistake.text),
                Place::Key(keys) => file::place_of_key(&text, keys),
            };
            place.map_or(String::new(), |(line, column)| format!(":{line}:{column}"))
        })
    }

    /// Expands a fleet file. `path`: where it is, which gives names and relative paths their meaning; nothing is read there.
    /// `run_folder`: where sockets go that the file does not place.
    ///
    /// # Errors
    /// A [`Failure`] of one line.
    pub fn of(file: &FleetFile, path: &Path, run_folder: &Path) -> Result<Self, Failure> {
        Self::checked(file, path, run_folder, |_| String::new())
    }

    /// `place`: where a mistake is, as `:LINE:COLUMN`.
    fn checked(
        file: &FleetFile,
        path: &Path,
        run_folder: &Path,
        place: impl FnOnce(&Mistake<'_>) -> String,
    ) -> Result<Self, Failure> {
        let absolute = std::path::absolute(path).map_err(Failure::from_error)?;
        let folder = absolute.parent().unwrap_or(Path::new("/")).to_owned();
        let name = file::fleet_name(path, file.name.clone());
        Self::expand(file, name, folder, run_folder).map_err(|mistake| {
            let place = place(&mistake);
            Failure::new(format!("{}{place}: {}", path.display(), mistake.text))
        })
    }

    fn expand<'a>(
        file: &'a FleetFile,
        name: String,
        folder: PathBuf,
        run_folder: &Path,
    ) -> Result<Self, Mistake<'a>> {
        file::check_fleet_name(&name).map_err(|text| Mistake::at(&["name"], text))?;
        let mut vms = Vec::new();
        // Of each VM, the number of its entry.
        let mut entries = Vec::new();
        for (template, settings) in &file.template {
            check_template(template, settings)?;
        }
        let of_all = VmSettings {
            user: file.user.clone(),
            groups: file.groups.clone(),
            ..VmSettings::default()
        };
        for (number, entry) in file.vm.iter().enumerate() {
            let expanded = with_template(entry, &file.template)
                .and_then(|entry| expand_entry(&entry.over(&of_all), &folder, &mut vms));
            expanded.map_err(|text| Mistake {
                place: Place::Entry(number, None),
                text,
            })?;
            entries.resize(vms.len(), number);
        }
        if vms.is_empty() {
            return Err(Mistake {
                place: Place::Unknown,
                text: "the fleet has no VM: add a [[vm]]".into(),
            });
        }
        check_unique(&vms, &entries)?;
        let parallel = usize::from(file.parallel.unwrap_or(8));
        let seconds = file.start_timeout_s.unwrap_or(120);
        for (key, is_zero) in [("parallel", parallel == 0), ("start_timeout_s", seconds == 0)] {
            if is_zero {
                return Err(Mistake::at(&[key], format!("{key} is 0: it must be at least 1")));
            }
        }
        Ok(Self {
            name,
            preload: file.preload.as_ref().map(|path| folder.join(path)),
            parallel,
            start_limit: Duration::from_secs(seconds),
            stores: store::stores(file, &vms, &entries, &folder, run_folder)?,
            folder,
            vms,
        })
    }

    /// The store of a VM with dedup.
    pub(crate) fn store_of(&self, vm: &VmPlan) -> Option<&StorePlan> {
        vm.dedup.as_ref()?;
        self.stores.iter().find(|store| store.domain == vm.domain)
    }
}

fn check_template<'a>(name: &'a str, settings: &VmSettings) -> Result<(), Mistake<'a>> {
    let given = [
        ("name", settings.name.is_some()),
        ("count", settings.count.is_some()),
        ("template", settings.template.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((key, _)) => Err(Mistake::at(
            &["template", name, key],
            format!("template {name:?} has a name, count or template: only a [[vm]] has those"),
        )),
    }
}

fn with_template(entry: &VmSettings, templates: &BTreeMap<String, VmSettings>) -> Result<VmSettings, String> {
    let Some(name) = &entry.template else {
        return Ok(entry.clone());
    };
    let template = templates.get(name).ok_or_else(|| {
        let known = templates
            .keys()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(", ");
        let there_are = match known.as_str() {
            "" => "there are none".to_owned(),
            known => format!("there are: {known}"),
        };
        format!(
            "VM {:?}: there is no [template.{name}]; {there_are}",
            entry.name.as_deref().unwrap_or("")
        )
    })?;
    Ok(entry.clone().over(template))
}

fn expand_entry(entry: &VmSettings, folder: &Path, vms: &mut Vec<VmPlan>) -> Result<(), String> {
    let name = entry.name.as_deref().ok_or("a [[vm]] has no name")?;
    let count = entry.count.unwrap_or(1);
    if count == 0 || vms.len() + count as usize > MAX_VMS {
        return Err(format!(
            "VM {name:?}: count is {count}, but a fleet has 1 to {MAX_VMS} VMs"
        ));
    }
    for index in 0..count {
        let name = match entry.count {
            Some(_) => format!("{name}-{index}"),
            None => name.to_owned(),
        };
        file::check_name("a VM's name", &name)?;
        let values = Values { name: &name, index };
        vms.push(expand_vm(entry, values, folder).map_err(|e| format!("VM {name:?}: {e}"))?);
    }
    Ok(())
}

fn expand_vm(entry: &VmSettings, values: Values<'_>, folder: &Path) -> Result<VmPlan, String> {
    // With the key, which tells where the mistake is.
    let fill = |key, text: &str| values.fill(text).map_err(|e| format!("{key}: {e}"));
    let path = |key, text: &String| Ok::<_, String>(folder.join(fill(key, text)?));
    let vmm = entry.vmm.unwrap_or(Vmm::CloudHypervisor);
    let kernel = entry
        .kernel
        .as_ref()
        .ok_or("it has no kernel: name an ELF image or a bzImage")?;
    check_numbers(entry)?;
    let extra_args = entry.extra_args.iter().flatten();
    let user = entry.user.as_ref().map(|user| fill("user", user)).transpose()?;
    let groups = entry.groups.iter().flatten();
    let groups: Vec<String> = groups
        .map(|group| fill("groups", group))
        .collect::<Result<_, _>>()?;
    if user.is_none() && !groups.is_empty() {
        return Err("it has groups and no user: name the user that is to have them".into());
    }
    let vm = VmPlan {
        name: values.name.to_owned(),
        entry: entry.name.clone().unwrap_or_default(),
        vmm,
        cpus: entry.cpus.unwrap_or(1),
        memory_mib: entry.memory_mib.unwrap_or(256),
        kernel: path("kernel", kernel)?,
        initramfs: (entry.initramfs.as_ref())
            .map(|initramfs| path("initramfs", initramfs))
            .transpose()?,
        cmdline: fill("cmdline", entry.cmdline.as_deref().unwrap_or("console=ttyS0"))?,
        extra_args: extra_args
            .map(|arg| fill("extra_args", arg))
            .collect::<Result<_, _>>()?,
        api: None,
        user,
        groups,
        domain: entry.domain.clone().unwrap_or_else(|| DEFAULT_DOMAIN.into()),
        dedup: dedup(values.name, entry.dedup.as_ref())?,
        agent: None,
    };
    check_size(&vm)?;
    let vm = match vmm {
        Vmm::CloudHypervisor => {
            let api = machine::config(&vm, entry, values, folder)?;
            VmPlan {
                api: Some(Box::new(api)),
                ..vm
            }
        }
        Vmm::Reference | Vmm::Qemu => {
            machine::refuse_devices(vmm, entry)?;
            vm
        }
    };
    let agent = entry.agent.unwrap_or(false).then(|| agent(&vm)).transpose()?;
    Ok(VmPlan { agent, ..vm })
}

/// TOML has numbers that are none, or without end; no setting is that, and JSON, as which settings go on, has none of them.
fn check_numbers(entry: &VmSettings) -> Result<(), String> {
    fn odd(value: &toml::Value) -> Option<f64> {
        match value {
            toml::Value::Float(number) if !number.is_finite() => Some(*number),
            toml::Value::Array(values) => values.iter().find_map(odd),
            toml::Value::Table(table) => table.values().find_map(odd),
            _ => None,
        }
    }
    let tables = |key, tables: &[toml::Table]| {
        let mut values = tables.iter().flat_map(toml::Table::values);
        match values.find_map(odd) {
            Some(number) => Err(format!("{key} has {number}: no setting is that")),
            None => Ok(()),
        }
    };
    for (key, table) in [
        ("dedup", &entry.dedup),
        ("api", &entry.api),
        ("vsock", &entry.vsock),
    ] {
        table
            .as_ref()
            .map_or(Ok(()), |table| tables(key, std::slice::from_ref(table)))?;
    }
    for (key, list) in [("disks", &entry.disks), ("net", &entry.net)] {
        list.as_ref().map_or(Ok(()), |list| tables(key, list))?;
    }
    Ok(())
}

/// A VMM that refuses its VM's size does so when another that it should take the place of has ended.
fn check_size(vm: &VmPlan) -> Result<(), String> {
    let (cpus, memory_mib) = match vm.vmm {
        Vmm::Reference => REFERENCE_TAKES,
        Vmm::CloudHypervisor | Vmm::Qemu => (1..=u8::MAX, 1..=1 << 24),
    };
    if !cpus.contains(&vm.cpus) {
        let (least, most) = cpus.into_inner();
        return Err(format!("cpus is {}: give {least} to {most}", vm.cpus));
    }
    if !memory_mib.contains(&vm.memory_mib) {
        let (least, most) = memory_mib.into_inner();
        return Err(format!("memory_mib is {}: give {least} to {most}", vm.memory_mib));
    }
    Ok(())
}

/// Where the agent of a VM's guest comes to: by its vsock device.
fn agent(vm: &VmPlan) -> Result<AgentSocket, String> {
    if vm.dedup.is_none() {
        return Err("agent is true, but dedup.mode is \"off\": nobody would listen".into());
    }
    match vm.vmm {
        Vmm::CloudHypervisor => {
            let socket = vm.vsock().ok_or("agent is true: give the VM a vsock")?;
            Ok(AgentSocket::Hybrid(socket.into()))
        }
        Vmm::Qemu => {
            let cid = |arg: &String| {
                arg.split(',')
                    .find_map(|part| part.strip_prefix("guest-cid=").map(str::to_owned))
            };
            let cid = vm.extra_args.iter().find_map(cid);
            let cid =
                cid.ok_or("agent is true: give QEMU a vhost-vsock-pci with a guest-cid in extra_args")?;
            format!("cid:{cid}")
                .parse()
                .map_err(|error: vmm_dedup::Error| error.to_string())
        }
        Vmm::Reference => Err("agent is true, but the reference VMM has no vsock".into()),
    }
}

/// The settings of dedup: `mode`, and the engine's.
fn dedup(name: &str, table: Option<&toml::Table>) -> Result<Option<Config>, String> {
    let mut table = table.cloned().unwrap_or_default();
    let enabled = match table.remove("mode") {
        None => true,
        Some(toml::Value::String(mode)) if mode == "on" => true,
        Some(toml::Value::String(mode)) if mode == "standby" => false,
        Some(toml::Value::String(mode)) if mode == "off" => return Ok(None),
        Some(other) => {
            return Err(format!(
                "dedup.mode is {other}: it must be \"on\", \"standby\" or \"off\""
            ));
        }
    };
    for (key, says) in [
        ("name", "the VM's name"),
        ("enabled", "dedup.mode"),
        ("store", "the VM's domain"),
        ("agent", "the VM's key agent"),
    ] {
        if table.contains_key(key) {
            return Err(format!("dedup.{key} cannot be set here: {says} says it"));
        }
    }
    table.insert("name".into(), name.into());
    table.insert("enabled".into(), enabled.into());
    vmm_dedup_engines::config_of(table)
        .map(Some)
        .map_err(|e| format!("dedup: {e}"))
}

/// Names, MAC addresses, vsock sockets and writable disks belong to one VM. `entries`: of each VM, the number of its entry.
fn check_unique(vms: &[VmPlan], entries: &[usize]) -> Result<(), Mistake<'static>> {
    let mut owners: BTreeMap<String, &str> = BTreeMap::new();
    let mut names = BTreeSet::new();
    for (vm, entry) in vms.iter().zip(entries) {
        let mistake = |key, text| Mistake {
            place: Place::Entry(*entry, Some(key)),
            text,
        };
        if !names.insert(&vm.name) {
            return Err(mistake("name", format!("two VMs have the name {:?}", vm.name)));
        }
        let disks = vm.disks().filter(|(_, readonly)| !readonly);
        let things = (vm.macs().map(|mac| ("net", format!("the MAC address {mac}"))))
            .chain(
                vm.vsock()
                    .map(|path| ("vsock", format!("the vsock socket {}", path.display()))),
            )
            .chain(disks.map(|(path, _)| ("disks", format!("the writable disk {}", path.display()))));
        for (key, thing) in things {
            if let Some(other) = owners.get(&thing) {
                let text = format!(
                    "VMs {other:?} and {:?} have {thing}: use {{name}} or {{index}} in it",
                    vm.name
                );
                return Err(mistake(key, text));
            }
            owners.insert(thing, &vm.name);
        }
    }
    Ok(())
}
