//! Files that guests are filled with: those that guests of this machine's kind would have, too.

use std::fs;
use std::path::{Path, PathBuf};

/// This machine's shared libraries and locale archives, in a fixed order.
#[must_use]
pub fn real_files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::from("/usr/lib")];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries.flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() && is_wanted(&entry.path()) => found.push(entry.path()),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

fn is_wanted(path: &Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
    name.contains(".so") || name.starts_with("locale-archive") || path.starts_with("/usr/lib/locale")
}
