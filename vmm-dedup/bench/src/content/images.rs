//! Content that real guests had: images of their memory, one after the other.

use super::area::Area;
use std::path::{Path, PathBuf};
use vmm_dedup_estimate::{Error, Memory};
use vmm_dedup_host::Failure;

/// Pages of 2 MiB: a guest's memory begins with a huge page.
const HUGE_PAGES: u64 = 512;

/// MiB that all images take, each of them rounded up to huge pages.
pub(crate) fn total_mib(images: &[PathBuf]) -> Result<u32, Failure> {
    let pages = images
        .iter()
        .map(|path| Ok(pages(&open(path)?)))
        .sum::<Result<u64, Failure>>()?;
    u32::try_from(pages >> 8).map_err(|_| Failure::new("the images are larger than all memory can be"))
}

fn open(path: &Path) -> Result<Memory, Failure> {
    Memory::of_file(path).map_err(Failure::from_error)
}

fn pages(memory: &Memory) -> u64 {
    memory.pages().next_multiple_of(HUGE_PAGES)
}

/// Fills an area of [`total_mib`] with what is in the images. Zero pages are not written: most were never used, and
/// memory that nobody touched is not there. (With huge pages they come along all the same.)
pub(super) fn fill(images: &[PathBuf], area: &mut Area) -> Result<(), Failure> {
    let mut start = 0;
    for path in images {
        let memory = open(path)?;
        let mut page = start;
        memory
            .each_page(|content| {
                if content.iter().any(|byte| *byte != 0) {
                    area.write(page, content);
                }
                page += 1;
                Ok::<(), Error>(())
            })
            .map_err(Failure::from_error)?;
        start += usize::try_from(pages(&memory)).unwrap_or(usize::MAX);
    }
    Ok(())
}
