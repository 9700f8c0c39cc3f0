//! What the product is built of: no tests, no guests, no benches.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// The product's crates, with all of their features; the command line follows below.
const PRODUCT: [&str; 9] = [
    "vmm-dedup-protocol",
    "vmm-dedup",
    "vmm-dedup-preload",
    "vmm-dedup-store",
    "vmm-dedup-packed",
    "vmm-dedup-estimate",
    "vmm-dedup-refvmm",
    "vmm-dedup-fleet",
    "vmm-dedup-host",
];
/// The product's crate whose features may be left out.
const COMMAND_LINE: &str = "vmm-dedup-cli";
/// Where crates stand that the product must not be built of, from the workspace's root.
const NOT_THE_PRODUCTS: [&str; 3] = ["integration-tests", "vmm-dedup/guests", "vmm-dedup/bench"];

/// A crate of the workspace.
#[derive(Debug)]
struct Member {
    /// Its folder, from the workspace's root.
    folder: String,
    dependencies: Vec<Dependency>,
    default_features: BTreeSet<String>,
}

/// What it is built of, tests and examples aside.
#[derive(Clone, Debug)]
struct Dependency {
    name: String,
    optional: bool,
}

/// Whether dependencies that a feature switches on count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Optional {
    Count,
    LeftOut,
}

/// Reads what `cargo metadata --no-deps` prints.
fn members(metadata: &Value) -> BTreeMap<String, Member> {
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let list = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let root = text(metadata, "workspace_root");
    let member = |package: &Value| {
        let manifest = text(package, "manifest_path");
        let folder = Path::new(&manifest).parent().unwrap_or(Path::new(""));
        let dependencies = list(package, "dependencies");
        let built_of = dependencies
            .iter()
            .filter(|dependency| dependency["kind"] != "dev");
        let default_features = list(&package["features"], "default");
        let member = Member {
            folder: folder.strip_prefix(&root).unwrap_or(folder).display().to_string(),
            dependencies: built_of
                .map(|dependency| Dependency {
                    name: text(dependency, "name"),
                    optional: dependency["optional"] == true,
                })
                .collect(),
            default_features: default_features
                .iter()
                .filter_map(|feature| feature.as_str().map(str::to_owned))
                .collect(),
        };
        (text(package, "name"), member)
    };
    list(metadata, "packages").iter().map(member).collect()
}

/// The way from a crate to one that it must not be built of, if there is one. Only the crate's own optional dependencies
/// can be left out: those of others may be switched on by whoever uses them.
fn forbidden(members: &BTreeMap<String, Member>, name: &str, optional: Optional) -> Option<Vec<String>> {
    let mut seen = BTreeSet::new();
    let mut ways = vec![vec![name.to_owned()]];
    while let Some(way) = ways.pop() {
        let last = &way[way.len() - 1];
        let Some(member) = members.get(last).filter(|_| seen.insert(last.clone())) else {
            continue;
        };
        if NOT_THE_PRODUCTS
            .iter()
            .any(|folder| Path::new(&member.folder).starts_with(folder))
        {
            return Some(way);
        }
        let counts =
            |dependency: &&Dependency| way.len() > 1 || optional == Optional::Count || !dependency.optional;
        let on = member.dependencies.iter().filter(counts);
        ways.extend(on.map(|dependency| [&way[..], std::slice::from_ref(&dependency.name)].concat()));
    }
    None
}

fn workspace() -> BTreeMap<String, Member> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    members(&serde_json::from_slice(&output.stdout).expect("JSON"))
}

#[test]
fn the_product_is_built_without_tests_guests_and_benches() {
    let members = workspace();
    for name in PRODUCT {
        assert!(members.contains_key(name), "there is no crate {name}");
        assert_eq!(forbidden(&members, name, Optional::Count), None);
    }
}

#[test]
fn the_command_line_can_be_built_without_them_and_has_them_by_default() {
    let members = workspace();
    assert_eq!(forbidden(&members, COMMAND_LINE, Optional::LeftOut), None);
    // That it finds them if they are on.
    assert!(forbidden(&members, COMMAND_LINE, Optional::Count).is_some());
    let default = &members[COMMAND_LINE].default_features;
    assert!(
        ["bench", "demo"].iter().all(|feature| default.contains(*feature)),
        "{default:?}"
    );
}

#[test]
fn a_way_to_a_guest_is_found_through_other_crates_and_builds_but_not_through_tests() {
    let sample = |kind: Option<&str>, optional: bool| {
        let package = |name: &str, folder: &str, dependencies: Value| {
            serde_json::json!({
                "name": name, "manifest_path": format!("/w/{folder}/Cargo.toml"), "features": {},
                "dependencies": dependencies,
            })
        };
        members(&serde_json::json!({ "workspace_root": "/w", "packages": [
            package("a", "vmm-dedup/a", serde_json::json!([{ "name": "b", "kind": null, "optional": false }])),
            package("b", "vmm-dedup/b", serde_json::json!([{ "name": "g", "kind": kind, "optional": optional }])),
            package("g", "vmm-dedup/guests/g", serde_json::json!([])),
        ]}))
    };
    let way = |kind, optional, left_out| forbidden(&sample(kind, optional), "a", left_out);
    let expected = Some(["a", "b", "g"].map(str::to_owned).to_vec());
    assert_eq!(way(None, false, Optional::LeftOut), expected);
    assert_eq!(way(Some("build"), false, Optional::LeftOut), expected);
    // Another crate's feature may be on.
    assert_eq!(way(None, true, Optional::LeftOut), expected);
    assert_eq!(way(Some("dev"), false, Optional::Count), None);
    assert_eq!(forbidden(&sample(None, true), "b", Optional::LeftOut), None);
}
