//! Kinds of content.

use super::area::Area;
use super::images;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use vmm_dedup_host::Failure;
use vmm_dedup_protocol::PAGE_SIZE;

/// Kinds of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Every second page has four copies, next to each other; the others are unique.
    Scattered,
    /// Stretches of 1 MiB, four copies of each.
    Runs,
    /// Four guests: the same real files in each, then private data.
    Files,
    /// Images of real guests' memory, see `--images`.
    #[value(hide = true)]
    Images,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Scattered => "scattered",
            Kind::Runs => "runs",
            Kind::Files => "files",
            Kind::Images => "images",
        })
    }
}

/// Maps `mib` MiB, of huge pages if `thp`, and fills them.
pub(crate) fn fill(kind: Kind, thp: bool, mib: u32, images: &[PathBuf]) -> Result<Area, Failure> {
    Area::filled(thp, mib, |area| {
        match kind {
            Kind::Scattered => area.fill_words(|page| if page % 2 == 1 { page / 8 } else { page | 1 << 40 }),
            Kind::Runs => {
                let stretches = area.pages() / 256;
                let distinct = (stretches / 4).max(1);
                area.fill_words(|page| ((page / 256 % distinct) << 8) | (page % 256));
            }
            Kind::Files => fill_files(area)?,
            Kind::Images => images::fill(images, area)?,
        }
        Ok(())
    })
}

/// Each quarter of the area: files to three fifths of it, as far as there are files, then private data.
fn fill_files(area: &mut Area) -> Result<(), Failure> {
    let guest = area.pages() / 4;
    let files = read_files(guest * 3 / 5 * PAGE_SIZE)?;
    area.fill_words(|page| page | 1 << 41);
    for copy in 0..4 {
        for (i, page) in files.chunks_exact(PAGE_SIZE).enumerate() {
            area.write(copy * guest + i, page);
        }
    }
    Ok(())
}

/// Real files of this machine, each padded to whole pages, as many as fit.
fn read_files(limit: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::with_capacity(limit);
    for path in vmm_dedup_payload::real_files() {
        let Ok(file) = fs::File::open(&path) else { continue };
        let room = (limit - bytes.len()) as u64;
        if file.take(room).read_to_end(&mut bytes).is_ok() {
            bytes.resize(bytes.len().next_multiple_of(PAGE_SIZE), 0);
        }
        if bytes.len() >= limit {
            bytes.truncate(limit);
            return Ok(bytes);
        }
    }
    if bytes.len() < 16 << 20 {
        return Err(Failure::new(
            "fewer than 16 MiB of shared libraries and locales found under /usr/lib",
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn three_of_four_odd_pages_are_copies() {
        let area = fill(Kind::Scattered, false, 4, &[]).unwrap();
        let distinct: HashSet<_> = (0..area.pages()).map(|page| area.read(page)).collect();
        assert_eq!(area.pages() - distinct.len(), area.pages() / 2 * 3 / 4);
    }
}
