//! What L1's kernel says of the memory of a VM's process and of a store.

use crate::Failure;
use crate::shared_files;
use crate::wait::wait_for;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use vmm_dedup_protocol::{PAGE_SIZE, SEGMENT_NAME};

/// Documentation/admin-guide/mm/pagemap.rst: the page is present; it is a file's, or shared memory.
const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;
/// Pages that are looked at together.
const AT_ONCE: usize = 1024;

/// Where the pages of the shared files are in a VM.
pub(super) struct FilePages {
    pagemap: File,
    memory: File,
    /// Their addresses, in order, and their numbers.
    places: Vec<(usize, u64)>,
}

impl FilePages {
    /// Looks for them in a process's private memory. What is not present is not touched.
    pub(super) fn find(pid: u32) -> Result<Self, Failure> {
        let open = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            File::open(&path).map_err(|e| Failure::file(path.as_ref(), e))
        };
        let (pagemap, memory) = (open("pagemap")?, open("mem")?);
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"));
        let maps = maps.map_err(|e| Failure::new(format!("no maps of {pid}: {e}")))?;
        let (mut places, mut page) = (Vec::new(), vec![0; PAGE_SIZE]);
        for range in maps.lines().filter_map(large_and_private) {
            for start in range.clone().step_by(AT_ONCE * PAGE_SIZE) {
                let pages = AT_ONCE.min((range.end - start) / PAGE_SIZE);
                for (n, word) in words(&pagemap, start, pages)?.into_iter().enumerate() {
                    let address = start + n * PAGE_SIZE;
                    // (One that goes meanwhile cannot be read.)
                    if word & PRESENT != 0
                        && memory.read_exact_at(&mut page, address as u64).is_ok()
                        && let Some(number) = shared_files::number_of(&page)
                    {
                        places.push((address, number));
                    }
                }
            }
        }
        Ok(Self {
            pagemap,
            memory,
            places,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// In how many of their places a store's file is. All were present, and private, when they were found.
    pub(super) fn shared(&self) -> Result<usize, Failure> {
        let mut shared = 0;
        let mut rest = self.places.as_slice();
        while let Some((first, _)) = rest.first().copied() {
            let near = rest.partition_point(|(address, _)| *address < first + AT_ONCE * PAGE_SIZE);
            let words = words(&self.pagemap, first, AT_ONCE)?;
            let is_shared =
                |place: &&(usize, u64)| words[(place.0 - first) / PAGE_SIZE] & (PRESENT | OF_FILE) != PRESENT;
            shared += rest[..near].iter().filter(is_shared).count();
            rest = &rest[near..];
        }
        Ok(shared)
    }

    /// In how many of their places something else is by now.
    pub(super) fn wrong(&self) -> Result<usize, Failure> {
        let (mut wrong, mut page) = (0, vec![0; PAGE_SIZE]);
        for (address, number) in &self.places {
            // A page that is being merged is away for a moment, and cannot be read then.
            wait_for("a page of a guest to be there", || {
                Ok(self.memory.read_exact_at(&mut page, *address as u64).ok())
            })?;
            wrong += usize::from(!shared_files::page(*number).eq(page.iter().copied()));
        }
        Ok(wrong)
    }
}

/// The addresses of a mapping, by its line in /proc/PID/maps, if it is private memory of some size.
fn large_and_private(line: &str) -> Option<std::ops::Range<usize>> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    let is_private = fields.next()?.starts_with("rw-p");
    let is_anonymous = fields.nth(2)? == "0";
    (is_private && is_anonymous && range.len() >= 1 << 20).then_some(range)
}

fn words(pagemap: &File, start: usize, pages: usize) -> Result<Vec<u64>, Failure> {
    let mut bytes = vec![0; pages * 8];
    // Behind the end of the address space it ends; a process that has ended has none.
    pagemap
        .read_exact_at(&mut bytes, (start / PAGE_SIZE * 8) as u64)
        .map_err(|e| Failure::new(format!("pagemap cannot be read: {e}")))?;
    let word = |eight: &[u8]| u64::from_ne_bytes(eight.try_into().unwrap_or_default());
    Ok(bytes.chunks_exact(8).map(word).collect())
}

/// Pages of a store's files that are full of one byte.
pub(super) fn pages_of_store(pid: u32, byte: u8) -> Result<usize, Failure> {
    let folder = format!("/proc/{pid}/fd");
    let failed = |e: std::io::Error| Failure::new(format!("the store's files cannot be read: {e}"));
    let (mut found, mut segments) = (0, 0);
    for entry in fs::read_dir(&folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_segment = |target: &std::path::PathBuf| target.to_string_lossy().contains(SEGMENT_NAME);
        if !fs::read_link(&path).is_ok_and(|target| is_segment(&target)) {
            continue;
        }
        segments += 1;
        let file = File::open(&path).map_err(failed)?;
        let mut at = 0;
        while let Some(start) = next_data(&file, at)? {
            let mut page = vec![0; PAGE_SIZE];
            match file.read_exact_at(&mut page, start) {
                Ok(()) => found += usize::from(page.iter().all(|have| *have == byte)),
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => {}
                Err(e) => return Err(failed(e)),
            }
            at = start + PAGE_SIZE as u64;
        }
    }
    if segments == 0 {
        return Err(Failure::new("the store has no file to be searched"));
    }
    Ok(found)
}

/// The next page of a file that is not a hole.
fn next_data(file: &File, at: u64) -> Result<Option<u64>, Failure> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(data) => Ok(Some(data / PAGE_SIZE as u64 * PAGE_SIZE as u64)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(e) => Err(Failure::new(format!("a store's file cannot be read: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_private_memory_is_told_by_its_line() {
        let line = "7f0000000000-7f0010000000 rw-p 00000000 00:00 0 ";
        assert_eq!(large_and_private(line), Some(0x7f00_0000_0000..0x7f00_1000_0000));
        for other in [
            "7f0000000000-7f0010000000 rw-s 00000000 00:01 5 /memfd:x",
            "7f0000000000-7f0010000000 rw-p 00000000 00:01 5 /file",
            "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 ",
            "",
        ] {
            assert_eq!(large_and_private(other), None, "{other}");
        }
    }
}
