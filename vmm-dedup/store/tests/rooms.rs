//! The store's rooms: each folder or file of `src` uses those below it only, and no type has its methods in two rooms.
//!
//! Methods need no import, but a value of a type from a higher room cannot be had without one: a lower room would have to
//! name the type, or a type that holds it. With every type's `impl` blocks in one room, calls go down where imports do.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// From the ground up. A room may use what stands before it.
const FLOORS: [&str; 9] = [
    "error", "ledger", "config", "memory", "requests", "state", "metrics", "net", "server",
];

/// Lines of a file, without its tests.
const MOST_LINES: usize = 500;
/// Lines of an `impl` block.
const MOST_IMPL_LINES: usize = 400;

struct Source {
    room: String,
    path: PathBuf,
    /// Without tests.
    lines: Vec<String>,
}

fn sources(folder: &Path, room: Option<&str>, into: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name() == Some("tests.rs".as_ref()) || path.ends_with("tests") {
            continue;
        }
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let room = room.map_or(stem, str::to_owned);
        if path.is_dir() {
            sources(&path, Some(&room), into);
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let product = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        let lines = product.lines().map(str::to_owned).collect();
        into.push(Source { room, path, lines });
    }
}

fn all() -> Vec<Source> {
    let mut all = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), None, &mut all);
    all.retain(|source| source.room != "lib");
    assert!(all.len() > 20, "the sources are found");
    all
}

fn floor(room: &str) -> usize {
    let floor = FLOORS.iter().position(|name| *name == room);
    floor.unwrap_or_else(|| panic!("{room} is a new room: give it a floor"))
}

#[test]
fn no_room_uses_one_above_it() {
    for source in all() {
        let code = source
            .lines
            .iter()
            .filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            for used in line.split("crate::").skip(1) {
                let room = used
                    .split(|c: char| !c.is_alphanumeric() && c != '_')
                    .next()
                    .unwrap();
                let goes_down = floor(room) < floor(&source.room) || room == source.room;
                assert!(goes_down, "{}: {line}", source.path.display());
            }
        }
    }
}

/// The type of an inherent `impl` block that begins here.
fn implemented(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl")?;
    let rest = match rest.strip_prefix('<') {
        Some(generic) => generic.split_once('>')?.1,
        None => rest,
    };
    if rest.contains(" for ") {
        return None;
    }
    rest.trim()
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .next()
}

#[test]
fn no_type_has_its_methods_in_two_rooms() {
    let mut rooms: BTreeMap<String, String> = BTreeMap::new();
    for source in all() {
        for name in source.lines.iter().filter_map(|line| implemented(line)) {
            let room = rooms
                .entry(name.to_owned())
                .or_insert_with(|| source.room.clone());
            assert_eq!(*room, source.room, "methods of {name}");
        }
    }
    assert!(rooms.contains_key("Pool") && rooms.contains_key("Exchange"));
}

#[test]
fn files_and_impl_blocks_are_short() {
    for source in all() {
        let lines = source.lines.len();
        assert!(lines <= MOST_LINES, "{}: {lines} lines", source.path.display());
        let mut begun = None;
        for (at, line) in source.lines.iter().enumerate() {
            if line.starts_with("impl") {
                begun = Some(at);
            }
            if line == "}"
                && let Some(start) = begun.take()
            {
                assert!(
                    at - start < MOST_IMPL_LINES,
                    "{}:{}",
                    source.path.display(),
                    start + 1
                );
            }
        }
    }
}
