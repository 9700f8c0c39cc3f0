//! What crates show that a VMM takes: a change is seen, and meant. `cargo semver-checks` would have to be built for each run of
//! CI and to have a published release to compare with; this compares with a listing that goes with the source, so that whoever
//! removes or changes an item changes a line of it, in the same commit. Then the crates' version and CHANGELOG.md say so.
//!
//! `WRITE_INTERFACE=1 cargo test -p vmm-dedup-integration-tests --test public_interface` writes the listings anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Traits on which nothing can be built by stable Rust.
const IRRELEVANT: [&str; 3] = ["Freeze", "StructuralPartialEq", "UnsafeUnpin"];

/// What rustdoc is told, so that it writes JSON.
const JSON: [&str; 4] = [
    "-Zunstable-options",
    "--output-format",
    "json",
    "--cap-lints=allow",
];

/// The listing of a crate, or why this toolchain does not make one.
fn listing(package: &str, features: &str) -> Result<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    // Only rustdoc may do what is unstable: otherwise all dependencies would be built once more.
    let folder = tempfile::tempdir().expect("a folder");
    let rustdoc = folder.path().join("rustdoc");
    std::fs::write(&rustdoc, "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc \"$@\"\n").expect("a script");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&rustdoc, mode).expect("it can be run");
    let made = Command::new(env!("CARGO"))
        .args([
            "rustdoc",
            "--quiet",
            "--lib",
            "-p",
            package,
            "--features",
            features,
        ])
        .arg("--target-dir")
        .arg(&target)
        .arg("--")
        .args(JSON)
        .env("RUSTDOC", &rustdoc)
        .current_dir(&root)
        .output()
        .expect("cargo runs");
    let errors = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{errors}");
    let json = target
        .join("doc")
        .join(package.replace('-', "_"))
        .with_extension("json");
    let build = |derived: bool| {
        let items = public_api::Builder::from_rustdoc_json(&json)
            .omit_blanket_impls(true)
            .omit_auto_trait_impls(!derived)
            .omit_auto_derived_impls(!derived)
            .build();
        let items = items.map_err(|error| error.to_string())?;
        Ok::<Vec<String>, String>(items.items().map(ToString::to_string).collect())
    };
    let (written, mut all) = (build(false)?, build(true)?);
    all.retain(|item| !written.contains(item));
    Ok(written
        .into_iter()
        .chain(traits(&all))
        .fold(String::new(), |mut all, line| {
            let _ = writeln!(all, "{line}");
            all
        }))
}

/// What nobody has written and users rely on all the same: a line for each type, with the traits that it has by itself (Send and
/// the like; with `!` those that it has not) and by deriving.
fn traits(items: &[String]) -> Vec<String> {
    let mut of: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for item in items {
        let Some((implemented, whose)) = item
            .strip_prefix("impl")
            .and_then(|rest| rest.split_once(" for "))
        else {
            continue;
        };
        let whose = whose.split(" where ").next().unwrap_or_default();
        // Without its generics, its path and those of the trait.
        let path = implemented.rsplit(' ').next().unwrap_or_default();
        let (not, path) = path.strip_prefix('!').map_or(("", path), |path| ("!", path));
        let path = path.split('<').next().unwrap_or_default();
        let name = path.rsplit("::").next().unwrap_or_default();
        if !IRRELEVANT.contains(&name) {
            of.entry(whose).or_default().insert(format!("{not}{name}"));
        }
    }
    let line = |(whose, traits): (&str, BTreeSet<String>)| {
        let traits: Vec<String> = traits.into_iter().collect();
        format!("{whose} is {}", traits.join(", "))
    };
    of.into_iter().map(line).collect()
}

fn check(package: &str, features: &str, folder: &str) {
    let now = match listing(package, features) {
        Ok(now) => now,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "{error}");
            return eprintln!("SKIPPED: another version of Rust: {error}");
        }
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = root.join(folder).join("public-interface.txt");
    if std::env::var_os("WRITE_INTERFACE").is_some() {
        std::fs::write(&path, &now).expect("it is written");
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    let only = |a: &str, b: &str| -> Vec<String> {
        let lines: std::collections::HashSet<&str> = b.lines().collect();
        a.lines()
            .filter(|line| !lines.contains(line))
            .map(str::to_owned)
            .collect()
    };
    let (gone, new) = (only(&known, &now), only(&now, &known));
    assert!(
        gone.is_empty() && new.is_empty(),
        "the public interface of {package} has changed. Gone: {gone:#?} New: {new:#?}"
    );
}

#[test]
fn a_type_has_a_line_of_the_traits_that_nobody_wrote() {
    let items = [
        "pub struct a::B",
        "impl core::marker::Send for a::B",
        "impl !core::marker::Sync for a::B",
        "impl core::marker::Freeze for a::B",
        "impl<T> core::clone::Clone for a::C<T> where T: core::clone::Clone",
        "impl<'de> serde::de::Deserialize<'de> for a::B",
    ];
    assert_eq!(
        traits(&items.map(str::to_owned)),
        ["a::B is !Sync, Deserialize, Send", "a::C<T> is Clone"]
    );
}

#[test]
fn the_engines_interface_is_as_listed() {
    check("vmm-dedup", "seccomp", "vmm-dedup/engine");
}

#[test]
fn the_protocols_interface_is_as_listed() {
    check("vmm-dedup-protocol", "", "vmm-dedup/protocol");
}

#[test]
fn the_packing_crates_interface_is_as_listed() {
    check("vmm-dedup-packed", "", "vmm-dedup/packed");
}

#[test]
fn the_interfaces_of_what_hears_agents_are_as_listed() {
    check("vmm-dedup-agent-wire", "", "guest-agent/wire");
    check("vmm-dedup-agent-receiver", "", "guest-agent/receiver");
}
