//! The fleet file: what it says, printed and read again, and the plan that it comes to.
//!
//! The model is the file as a plain table of TOML, from which it works out the VMs and stores by docs/fleet.md: names and
//! numbers, defaults, templates, domains. What only the plan knows (placeholders, the engine's settings, the API of Cloud
//! Hypervisor) is held against the laws that it must keep: a file that was printed comes to the same plan, or to the same
//! error, and an error is one line that names a place in the file.

use std::collections::BTreeSet;
use std::path::Path;
use toml::{Table, Value};
use vmm_dedup_fleet::{FleetFile, Plan, VmPlan, Vmm};

/// Entries with more VMs are not expanded: that takes long and shows nothing new.
const MOST_VMS: i64 = 40;

/// Input: a file.
///
/// # Panics
/// If a law is broken, or the plan is not what the model says.
pub fn check(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else {
        return;
    };
    let path = Path::new("/fleets/fleet.toml");
    let file = match FleetFile::parse(path, text) {
        Ok(file) => file,
        Err(failure) => return check_place(&failure.to_string(), text),
    };
    let printed = file.print().expect("what was read can be printed");
    let again = FleetFile::parse(path, &printed).expect("what was printed can be read");
    assert_eq!(again.print().expect("what was read can be printed"), printed);
    // A number that is none equals nothing, not even itself.
    assert!(again == file || printed.contains("nan"), "{printed}");

    let table: Table = toml::from_str(text).expect("a fleet file is TOML");
    if entries(&table)
        .iter()
        .any(|vm| integer(vm, "count") > Some(MOST_VMS))
    {
        return;
    }
    let plan =
        |file: &FleetFile| Plan::of(file, path, Path::new("/run/vmm-dedup")).map_err(|e| e.to_string());
    match (plan(&file), plan(&again)) {
        (Ok(plan), Ok(same)) => {
            assert_eq!(plan, same);
            check_plan(&plan, &table);
        }
        (Err(error), Err(same)) => {
            assert_eq!(error, same);
            let one_line = error.lines().count() == 1 && error.starts_with("/fleets/fleet.toml: ");
            assert!(one_line || error.starts_with("the fleet's name"), "{error}");
        }
        (plan, same) => panic!("{plan:?}\n{same:?}"),
    }
}

/// An error is one line, `PATH:LINE:COLUMN: what`, and the place is in the file.
fn check_place(error: &str, text: &str) {
    assert_eq!(error.lines().count(), 1, "{error}");
    let place = error.strip_prefix("/fleets/fleet.toml:").expect(error);
    let mut parts = place.splitn(3, ':');
    let mut number = || {
        parts
            .next()
            .and_then(|part| part.parse::<usize>().ok())
            .expect(error)
    };
    let (line, column) = (number(), number());
    let found = text.split('\n').nth(line - 1);
    assert!(
        found.is_some_and(|line| (1..=line.len() + 1).contains(&column)),
        "{error}"
    );
}

fn entries(file: &Table) -> Vec<&Table> {
    let vms = file.get("vm").and_then(Value::as_array);
    vms.into_iter().flatten().filter_map(Value::as_table).collect()
}

fn integer(table: &Table, key: &str) -> Option<i64> {
    table.get(key).and_then(Value::as_integer)
}

/// A VM, as far as the table says it without placeholders.
#[derive(Debug, PartialEq, Eq)]
struct Vm {
    name: String,
    vmm: String,
    cpus: i64,
    memory_mib: i64,
    domain: String,
    dedup: bool,
}

impl Vm {
    fn of_plan(vm: &VmPlan) -> Self {
        Self {
            name: vm.name.clone(),
            vmm: vm.vmm.to_string(),
            cpus: vm.cpus.into(),
            memory_mib: vm.memory_mib.cast_signed(),
            domain: vm.domain.clone(),
            dedup: vm.dedup.is_some(),
        }
    }

    /// The VMs of an entry of `[[vm]]`.
    fn of_entry(entry: &Table, file: &Table) -> Vec<Self> {
        let template = entry.get("template").and_then(Value::as_str);
        let template = template.and_then(|name| file.get("template")?.as_table()?.get(name)?.as_table());
        let key = |key: &str| entry.get(key).or_else(|| template?.get(key));
        let text = |name: &str| key(name).and_then(Value::as_str).map(str::to_owned);
        // The tables of both count, the entry's first.
        let mode = |table: Option<&Table>| table?.get("dedup")?.get("mode")?.as_str().map(str::to_owned);
        let mode = mode(Some(entry)).or_else(|| mode(template));
        let name = text("name").unwrap_or_default();
        let names = match integer(entry, "count") {
            None => vec![name],
            Some(count) => (0..count).map(|n| format!("{name}-{n}")).collect(),
        };
        let vm = |name| Self {
            name,
            vmm: text("vmm").unwrap_or_else(|| Vmm::CloudHypervisor.to_string()),
            cpus: key("cpus").and_then(Value::as_integer).unwrap_or(1),
            memory_mib: key("memory_mib").and_then(Value::as_integer).unwrap_or(256),
            domain: text("domain").unwrap_or_else(|| "default".into()),
            dedup: mode.as_deref() != Some("off"),
        };
        names.into_iter().map(vm).collect()
    }
}

fn check_plan(plan: &Plan, file: &Table) {
    let planned: Vec<Vm> = plan.vms.iter().map(Vm::of_plan).collect();
    let expected: Vec<Vm> = entries(file)
        .into_iter()
        .flat_map(|entry| Vm::of_entry(entry, file))
        .collect();
    assert_eq!(planned, expected);

    let names: BTreeSet<&str> = plan.vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names.len(), plan.vms.len(), "two VMs of one name");
    assert!(plan.vms.iter().all(|vm| vm.kernel.is_absolute()));
    assert!(
        plan.vms
            .iter()
            .flat_map(VmPlan::disks)
            .all(|(path, _)| path.is_absolute())
    );
    assert!(plan.vms.iter().filter_map(VmPlan::vsock).all(Path::is_absolute));
    let macs: Vec<String> = plan.vms.iter().flat_map(VmPlan::macs).collect();
    assert_eq!(
        BTreeSet::from_iter(&macs).len(),
        macs.len(),
        "two devices of one MAC address"
    );

    // A store for each domain that a VM with dedup is in, each with a socket of its own.
    let domains: BTreeSet<&str> = expected
        .iter()
        .filter(|vm| vm.dedup)
        .map(|vm| vm.domain.as_str())
        .collect();
    let stores: Vec<&str> = plan.stores.iter().map(|store| store.domain.as_str()).collect();
    assert_eq!(stores, domains.into_iter().collect::<Vec<_>>());
    let sockets: BTreeSet<&Path> = plan.stores.iter().map(|store| store.socket.as_path()).collect();
    assert_eq!(sockets.len(), plan.stores.len(), "two stores with one socket");
    assert!(sockets.iter().all(|path| path.is_absolute()));
}

/// Files that say much in few lines.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let example = include_bytes!("../../../vmm-dedup/fleet/examples/fleet.toml");
    let smallest = b"[[vm]]\nname = \"web\"\ncount = 3\nkernel = \"vmlinux\"\n";
    let templates = br#"name = "shop"
parallel = 2
[template.small]
cpus = 2
memory_mib = 64
kernel = "k"
dedup = { cpu_percent = 5, mode = "off" }
[[vm]]
name = "a"
template = "small"
dedup = { mode = "standby", pass_period_ms = 500 }
[[vm]]
name = "b"
template = "small"
vmm = "qemu"
extra_args = ["-device", "x={name},y={index:02x}"]
"#;
    let domains = br#"store = { metrics = "none", max_mib = 100 }
[domain.pay]
socket = "/tmp/pay.sock"
metrics = "127.0.0.1:9800"
ordered = true
[[vm]]
name = "p"
domain = "pay"
vmm = "reference"
kernel = "/boot/{{k}}"
[[vm]]
name = "q"
kernel = "k"
"#;
    let devices = br#"[[vm]]
name = "d"
count = 2
kernel = "k"
disks = [{ path = "{name}.raw" }, { path = "base.raw", readonly = true }]
net = [{ tap = "tap{index}", mac = "52:54:00:00:00:{index+16:02x}", ip = "10.0.0.1" }]
vsock = { cid = "{index+3}", socket = "{name}.vsock" }
api = { rng = { src = "/dev/urandom" } }
"#;
    let broken = b"[[vm]]\nname = \"a\"\nkernle = nan\n";
    vec![
        ("example.toml", example.to_vec()),
        ("smallest.toml", smallest.to_vec()),
        ("templates.toml", templates.to_vec()),
        ("domains.toml", domains.to_vec()),
        ("devices.toml", devices.to_vec()),
        ("broken.toml", broken.to_vec()),
    ]
}
