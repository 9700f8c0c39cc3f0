//! What a fleet file comes to: every VM by itself, every store, all paths absolute. Nothing on the host is looked at.

mod machine;
mod placeholder;
mod store;
#[cfg(test)]
mod tests;
mod vm;

use crate::file::{self, DEFAULT_DOMAIN, FleetFile, VmSettings, Vmm};
use placeholder::Values;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;
pub use store::StorePlan;
pub use vm::VmPlan;
use vmm_dedup::{AgentSocket, Config};
use vmm_dedup_host::Failure;

/// Most VMs of one fleet: what a store takes by default.
const MAX_VMS: usize = 4096;

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
            let place = mistake
                .entry
                .and_then(|entry| file::place(&text, entry, &mistake.text));
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
        place: impl FnOnce(&Mistake) -> String,
    ) -> Result<Self, Failure> {
        let absolute = std::path::absolute(path).map_err(Failure::from_error)?;
        let folder = absolute.parent().unwrap_or(Path::new("/")).to_owned();
        let name = file::fleet_name(path, file.name.clone())?;
        Self::expand(file, name, folder, run_folder).map_err(|mistake| {
            let place = place(&mistake);
            Failure::new(format!("{}{place}: {}", path.display(), mistake.text))
        })
    }

    fn expand(file: &FleetFile, name: String, folder: PathBuf, run_folder: &Path) -> Result<Self, Mistake> {
        let mut vms = Vec::new();
        for (template, settings) in &file.template {
            check_template(template, settings)?;
        }
        for (number, entry) in file.vm.iter().enumerate() {
            let expanded = with_template(entry, &file.template)
                .and_then(|entry| expand_entry(&entry, &folder, &mut vms));
            expanded.map_err(|text| Mistake {
                entry: Some(number),
                text,
            })?;
        }
        if vms.is_empty() {
            return Err("the fleet has no VM: add a [[vm]]".to_owned().into());
        }
        check_unique(&vms)?;
        let parallel = usize::from(file.parallel.unwrap_or(8));
        let seconds = file.start_timeout_s.unwrap_or(120);
        if parallel == 0 || seconds == 0 {
            return Err("parallel and start_timeout_s must be at least 1"
                .to_owned()
                .into());
        }
        Ok(Self {
            name,
            preload: file.preload.as_ref().map(|path| folder.join(path)),
            parallel,
            start_limit: Duration::from_secs(seconds),
            stores: store::stores(file, &vms, &folder, run_folder)?,
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

/// What is wrong in a file that is TOML.
#[derive(Debug)]
struct Mistake {
    /// The number of the `[[vm]]`, if it is in one.
    entry: Option<usize>,
    text: String,
}

impl From<String> for Mistake {
    fn from(text: String) -> Self {
        Self { entry: None, text }
    }
}

fn check_template(name: &str, settings: &VmSettings) -> Result<(), String> {
    if settings.name.is_some() || settings.count.is_some() || settings.template.is_some() {
        return Err(format!(
            "template {name:?} has a name, count or template: only a [[vm]] has those"
        ));
    }
    Ok(())
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
    let path = |text: &String| Ok::<_, String>(folder.join(values.fill(text)?));
    let vmm = entry.vmm.unwrap_or(Vmm::CloudHypervisor);
    let kernel = entry
        .kernel
        .as_ref()
        .ok_or("it has no kernel: name an ELF image or a bzImage")?;
    let extra_args = entry.extra_args.iter().flatten();
    let vm = VmPlan {
        name: values.name.to_owned(),
        entry: entry.name.clone().unwrap_or_default(),
        vmm,
        cpus: entry.cpus.unwrap_or(1),
        memory_mib: entry.memory_mib.unwrap_or(256),
        kernel: path(kernel)?,
        initramfs: entry.initramfs.as_ref().map(path).transpose()?,
        cmdline: values.fill(entry.cmdline.as_deref().unwrap_or("console=ttyS0"))?,
        extra_args: extra_args.map(|arg| values.fill(arg)).collect::<Result<_, _>>()?,
        api: None,
        domain: entry.domain.clone().unwrap_or_else(|| DEFAULT_DOMAIN.into()),
        dedup: dedup(values.name, entry.dedup.as_ref())?,
        agent: None,
    };
    if vm.cpus == 0 {
        return Err("cpus is 0: give it at least one".into());
    }
    if !(1..=1 << 24).contains(&vm.memory_mib) {
        return Err(format!("memory_mib is {}: give 1 to 16777216", vm.memory_mib));
    }
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

/// Names, MAC addresses, vsock sockets and writable disks belong to one VM.
fn check_unique(vms: &[VmPlan]) -> Result<(), String> {
    let mut names = BTreeSet::new();
    if let Some(vm) = vms.iter().find(|vm| !names.insert(&vm.name)) {
        return Err(format!("two VMs have the name {:?}", vm.name));
    }
    let mut owners: BTreeMap<String, &str> = BTreeMap::new();
    for vm in vms {
        let disks = vm.disks().filter(|(_, readonly)| !readonly);
        let things = (vm.macs().map(|mac| format!("the MAC address {mac}")))
            .chain(
                vm.vsock()
                    .map(|path| format!("the vsock socket {}", path.display())),
            )
            .chain(disks.map(|(path, _)| format!("the writable disk {}", path.display())));
        for thing in things {
            if let Some(other) = owners.get(&thing) {
                return Err(format!(
                    "VMs {other:?} and {:?} have {thing}: use {{name}} or {{index}} in it",
                    vm.name
                ));
            }
            owners.insert(thing, &vm.name);
        }
    }
    Ok(())
}
