//! Keeps the crates in their rooms: what may name what, from the bottom up.
//!
//! Each crate has a list of its rooms, which are the modules of its root: docs/design.md has the engine's, docs/design/store.md the
//! store's, and those of the others stand below. A room may name itself and those listed
//! before it. The checker reads the source as text, without tests, comments and strings: `use` and every path that begins
//! with `crate`, `super`, `self` or a child. Calls of methods have no path: that a type's methods are all in one room is a
//! rule of its own, and where they are in several modules of it their calls count as names. See [`rules`].
//!
//! Cargo keeps the boundaries between crates, but for what a product may depend on: see [`dependencies`].

mod dependencies;
mod licences;
mod reader;
mod rules;
mod samples;
mod source;
mod stream;
mod tokens;

use rules::{Rules, breaches};
use source::Source;
use std::path::Path;

/// The rules for most crates: no circle, and structs of any size.
const fn rooms<'a>(rooms: &'a [&'a str]) -> Rules<'a> {
    Rules {
        rooms,
        most_fields: None,
        circles: false,
    }
}

/// Fails with all breaches of a crate.
fn check(root: &str, rules: &Rules<'_>) {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &Path| std::fs::read_to_string(workspace.join(path)).ok();
    let source = Source::read(Path::new(root), &read);
    assert!(source.modules.len() > rules.rooms.len(), "{root} was not read");
    let breaches: Vec<String> = breaches(&source, rules).iter().map(ToString::to_string).collect();
    assert!(breaches.is_empty(), "\n{}", breaches.join("\n"));
}

#[test]
fn the_command_line_stands_in_its_rooms() {
    check("vmm-dedup/cli/src/main.rs", &rooms(&["which_store", "commands"]));
}

#[test]
fn the_fleet_launcher_stands_in_its_rooms() {
    let order = [
        "dedup_file",
        "file",
        "plan",
        "spec",
        "process",
        "log",
        "state",
        "log_keeper",
        "kept",
        "program",
        "rights",
        "runtime",
        "at",
        "stores",
        "vmm",
        "check",
        "changes",
        "launch",
        "choice",
        "down",
        "status",
        "up",
        "restart",
        "list",
        "logs",
        "api",
    ];
    check("vmm-dedup/fleet/src/lib.rs", &rooms(&order));
}

#[test]
fn what_commands_ask_of_the_host_stands_in_its_rooms() {
    let order = [
        "failure",
        "output",
        "units",
        "table",
        "kvm",
        "userfaultfd",
        "memory",
        "process",
        "users",
        "children",
        "termination",
        "runtime",
        "registry",
        "store",
        "silence",
        "account",
        "view",
    ];
    check("vmm-dedup/host/src/lib.rs", &rooms(&order));
}

#[test]
fn the_benches_stand_in_their_rooms() {
    let order = [
        "host", "kernel", "report", "plots", "worker", "content", "service", "ksm", "engines", "dsa",
        "mixed", "churn", "estimate", "pack",
    ];
    check("vmm-dedup/bench/src/lib.rs", &rooms(&order));
}

/// More crates: where their root is, and their rooms.
const OTHERS: [(&str, &[&str]); 17] = [
    (
        "vmm-dedup/protocol/src/lib.rs",
        &[
            "sync",
            "clock",
            "sizes",
            "raw",
            "name",
            "slot",
            "key",
            "malformed",
            "refusal",
            "control",
            "stats",
            "mapping",
            "forward",
            "tree",
            "index",
            "message",
            "peer",
            "socket",
            "observer",
        ],
    ),
    (
        "vmm-dedup/preload/src/lib.rs",
        &[
            "real", "mappings", "kvm", "settings", "logging", "manager", "active", "watch", "devices",
            "hooks", "files", "reads",
        ],
    ),
    (
        "vmm-dedup/estimate/src/lib.rs",
        &[
            "error", "process", "memory", "inputs", "sample", "packing", "report", "scan", "plain",
            "contents", "near", "pack",
        ],
    ),
    (
        "vmm-dedup/packed/src/lib.rs",
        &[
            "page",
            "class",
            "codec",
            "conformance",
            "search",
            "segments",
            "choice",
            "stars",
        ],
    ),
    (
        "devices/vfio-user/src/lib.rs",
        &[
            "wire",
            "config_space",
            "dma",
            "raiser",
            "interrupts",
            "gate",
            "server",
        ],
    ),
    (
        "guest-agent/receiver/src/lib.rs",
        &["credit", "listen", "map", "receiver"],
    ),
    (
        "guest-agent/agent/src/lib.rs",
        &[
            "budget",
            "classify",
            "config",
            "link",
            "report",
            "source",
            "stretches",
            "programs",
            "teller",
            "walk",
            "agent",
        ],
    ),
    (
        "guest-agent/wire/src/lib.rs",
        &[
            "limits",
            "malformed",
            "bits",
            "fields",
            "frame",
            "said",
            "block",
            "lists",
            "message",
            "stream",
        ],
    ),
    (
        "vmm-dedup/refvmm/src/lib.rs",
        &[
            "layout",
            "error",
            "config",
            "cpuid",
            "image",
            "memory",
            "boot",
            "registers",
            "devices",
            "gate",
            "kick",
            "vcpu",
            "running",
            "vm",
        ],
    ),
    (
        "devices/pagecmp/src/lib.rs",
        &["page", "chip", "cost", "controller", "engine"],
    ),
    (
        "devices/page-overlays/src/lib.rs",
        &[
            "sizes",
            "obits",
            "address",
            "config",
            "account",
            "dice",
            "memory",
            "dram",
            "lru",
            "cache",
            "prefetch",
            "segment",
            "store",
            "omt",
            "controller",
            "hierarchy",
            "pipeline",
            "tlb",
            "processes",
            "machine",
            "trace",
            "replay",
            "record",
            "experiments",
        ],
    ),
    (
        "devices/pageforge-vfio/src/lib.rs",
        &[
            "sizes",
            "error",
            "hash_key",
            "scan_table",
            "memory",
            "ecc",
            "timing",
            "module",
            "window",
            "ring",
            "device",
            "server",
            "driver",
        ],
    ),
    (
        "devices/dsa/abi/src/lib.rs",
        &[
            "sizes",
            "error",
            "operation",
            "integrity",
            "descriptor",
            "command",
            "completion",
            "registers",
            "portal",
            "config",
        ],
    ),
    (
        "devices/dsa/model/src/lib.rs",
        &[
            "dice",
            "memory",
            "board",
            "shape",
            "queue",
            "batch",
            "check",
            "control",
            "endings",
            "lens",
            "blocks",
            "operate",
            "works",
            "commands",
            "registers",
            "core",
        ],
    ),
    (
        "devices/dsa/driver/src/lib.rs",
        &[
            "instructions",
            "latency",
            "way",
            "area",
            "channel",
            "engine",
            "open",
        ],
    ),
    (
        "devices/dsa/server/src/lib.rs",
        &["spaces", "device", "pieces", "pci", "session"],
    ),
    (
        "integration-tests/src/lib.rs",
        &[
            "memory",
            "agent",
            "store",
            "segments",
            "prometheus",
            "random",
            "hostile",
            "dashboards",
            "seccomp",
            "suspended",
            "logged",
            "failing",
            "dying",
            "windows",
            "huge",
            "lives",
            "direct_io",
            "pinned",
            "vm",
            "twins",
            "guests",
            "follow_chaos",
            "heal_chaos",
            "huge_chaos",
            "swap_chaos",
            "soak",
            "unmodified",
        ],
    ),
];

#[test]
fn more_crates_stand_in_their_rooms() {
    for (root, order) in OTHERS {
        check(root, &rooms(order));
    }
}

/// Rooms in the order in which a text lists them: the first column of its table of rooms. (A room that is one file is listed as that.)
fn documented(text: &str) -> Vec<&str> {
    let rows = text.lines().skip_while(|line| !line.starts_with("| room |"));
    let names = rows
        .skip(2)
        .map_while(|row| row.strip_prefix("| `")?.split('`').next());
    names.map(|name| name.trim_end_matches(".rs")).collect()
}

#[test]
fn rooms_are_read_from_a_texts_table_and_in_its_order() {
    let text = "| word | x |\n| --- | --- |\n| `no` | x |\n\n| room | x |\n| --- | --- |\n| `cellar.rs` | `y` |\n\
                | `attic` | z |\n\n| `garden` | outside |\n";
    assert_eq!(documented(text), ["cellar", "attic"]);
}

/// Fails with all breaches of a crate whose rooms a text lists.
fn check_documented(root: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(text);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let rules = Rules {
        rooms: &documented(&text),
        most_fields: Some(15),
        circles: false,
    };
    check(root, &rules);
}

#[test]
fn the_engine_stands_in_its_rooms() {
    check_documented("vmm-dedup/engine/src/lib.rs", "docs/design.md");
}

/// What a pass goes through: each stage has what the one before made of it from the pass, and none names another.
const STAGES: [&str; 8] = [
    "track::dirty",
    "lookup::keys",
    "lookup::find",
    "merge::admission",
    "merge::plan",
    "merge::merger",
    "merge::healer",
    "merge::outcomes",
];

/// What those that only decide must not name: they work on the map as it is, and change nothing.
const HANDS: [&str; 7] = [
    "&mut PageMap",
    "account::",
    "store::session",
    "store::connection",
    "thp::",
    "unmerge::",
    "unsafe",
];

#[test]
fn no_stage_of_a_pass_names_another() {
    let engine = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vmm-dedup/engine/src");
    let text = |stage: &str| {
        let path = engine.join(stage.replace("::", "/")).with_extension("rs");
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    for stage in STAGES {
        let text = text(stage);
        for other in STAGES.iter().filter(|other| **other != stage) {
            let (room, module) = other.split_once("::").unwrap();
            let alone = format!("crate::{other}::");
            let listed = text.lines().any(|line| {
                let list = line.strip_prefix(&format!("use crate::{room}::{{"));
                list.is_some_and(|list| list.split([',', ' ', '}']).any(|name| name == module))
            });
            assert!(!text.contains(&alone) && !listed, "{stage} names {other}");
        }
    }
    for stage in ["merge::admission", "merge::plan"] {
        let text = text(stage);
        let product = text.split("#[cfg(test)]").next().unwrap();
        for hand in HANDS {
            assert!(!product.contains(hand), "{stage} only decides, and names {hand}");
        }
    }
}

#[test]
fn the_store_stands_in_its_rooms() {
    check_documented("vmm-dedup/store/src/lib.rs", "docs/design/store.md");
}

/// A way to keep a page is named in three files of the engine at most: `Backing::Packed`, which is used, in that of the enum and
/// that of the steps from one to another; `Backing::Dummy`, which only the engine's own tests compile, in the first, since its test
/// takes the step itself. Everybody else asks the enum what may be done with a page. That is not to say that what it answers is right
/// for a new backing: `page_state.rs` and `admission.rs` have arms for all backings that they do not name, which whoever adds one
/// has to read.
#[test]
fn another_backing_takes_three_files() {
    let engine = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vmm-dedup/engine/src");
    let named = files_naming(&engine, "Backing::Packed");
    assert_eq!(named, ["memory/page_map.rs", "memory/page_state.rs"]);
    let named = files_naming(&engine, "Dummy");
    assert_eq!(named, ["memory/page_state.rs"]);
}

/// Source files below a folder that name something, in order, but for files of tests alone.
fn files_naming(folder: &Path, name: &str) -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.ends_with("tests.rs") && std::fs::read_to_string(&path).unwrap().contains(name) {
                found.push(path.strip_prefix(folder).unwrap().display().to_string());
            }
        }
    }
    found.sort();
    found
}
