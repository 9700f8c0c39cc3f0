//! Files that several guests read from one disk, and how their pages are known again in a guest's memory.

use crate::Failure;
use crate::debian::output;
use std::fs;
use std::process::Command;

/// Files on the disk.
const FILES: u64 = 4;
const PAGE: usize = 4096;
/// Pages of all files: 64 MiB.
pub(crate) const PAGES: u64 = 16384;
/// What a page of a file begins with, before its number.
const MAGIC: u64 = 0x6d65_7473_7973_6566;
/// Room for the file system's own.
const DISK: &str = "72M";

/// A disk with the files, of which each page is different and does not compress. The same bytes every time, but for the file system's.
///
/// # Errors
/// If there is no mke2fs, or no room.
pub(crate) fn disk() -> Result<Vec<u8>, Failure> {
    let folder = tempfile::tempdir().map_err(|e| Failure::new(format!("no temporary folder: {e}")))?;
    let (files, disk) = (folder.path().join("files"), folder.path().join("disk"));
    fs::create_dir(&files).map_err(|e| Failure::file(&files, e))?;
    for file in 0..FILES {
        let path = files.join(file.to_string());
        let pages = file * PAGES / FILES..(file + 1) * PAGES / FILES;
        let content: Vec<u8> = pages.flat_map(page).collect();
        fs::write(&path, content).map_err(|e| Failure::file(&path, e))?;
    }
    output(
        Command::new("mke2fs")
            .args(["-q", "-t", "ext4", "-O", "^has_journal", "-d"])
            .args([&files, &disk])
            .arg(DISK),
    )?;
    fs::read(&disk).map_err(|e| Failure::file(&disk, e))
}

/// A page of a file.
pub(crate) fn page(number: u64) -> impl Iterator<Item = u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state)
    });
    let head = [MAGIC, number];
    head.into_iter()
        .chain(words)
        .take(PAGE / 8)
        .flat_map(u64::to_le_bytes)
}

/// The number of the page of a file that is here, if it looks like one.
pub(crate) fn number_of(page: &[u8]) -> Option<u64> {
    let word = |at: usize| Some(u64::from_le_bytes(page.get(at..at + 8)?.try_into().ok()?));
    let number = word(8)?;
    (word(0)? == MAGIC && number < PAGES).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_known_again_and_differ_in_every_part() {
        let pages: Vec<Vec<u8>> = [0, 1, PAGES - 1].map(|number| page(number).collect()).into();
        assert!(pages.iter().all(|page| page.len() == PAGE));
        let numbers: Vec<u64> = pages.iter().filter_map(|page| number_of(page)).collect();
        assert_eq!(numbers, [0, 1, PAGES - 1]);
        assert!(pages[0][64..128] != pages[1][64..128]);
        assert_eq!(number_of(&[0; PAGE]), None);
        assert_eq!(number_of(&page(PAGES).collect::<Vec<u8>>()), None);
    }
}
