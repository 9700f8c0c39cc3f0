//! Where a process's pages are: /proc/PID/pagemap, a word for each page. Kernel documentation: admin-guide/mm/pagemap.

use rustix::process::Pid;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use vmm_dedup_hints::Status;

const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
/// Pages that are read at once.
const STEP: usize = 512;

/// The pagemap of a process. After its end it has no pages.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens it.
    ///
    /// # Errors
    /// The status to reply.
    pub fn open(proc: &Path, pid: Pid) -> Result<Self, Status> {
        let path = proc.join(pid.as_raw_nonzero().to_string()).join("pagemap");
        File::open(path).map(Self).map_err(|_| Status::Rights)
    }

    /// Appends the frames of the pages in a range that are in memory.
    ///
    /// # Errors
    /// The kernel shows pages, but not where they are.
    pub fn frames(&self, pages: Range<u64>, frames: &mut Vec<Range<u64>>) -> Result<(), Status> {
        let mut bytes = [0; STEP * 8];
        for first in pages.clone().step_by(STEP) {
            let count = usize::try_from(pages.end - first).unwrap_or(usize::MAX).min(STEP);
            let read = match self.0.read_at(&mut bytes[..count * 8], first * 8) {
                Ok(read) => read,
                // The process ends, or has no addresses there.
                Err(e) if e.kind() == ErrorKind::PermissionDenied => return Err(Status::Rights),
                Err(_) => return Ok(()),
            };
            let (words, _) = bytes[..read].as_chunks::<8>();
            for word in words.iter().map(|word| u64::from_ne_bytes(*word)) {
                match word & FRAME {
                    _ if word & PRESENT == 0 => {}
                    0 => return Err(Status::Rights),
                    frame => match frames.last_mut() {
                        Some(last) if last.end == frame => last.end += 1,
                        _ => frames.push(frame..frame + 1),
                    },
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_those_of_pages_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let pid = rustix::process::getpid();
        let own = folder.path().join(pid.as_raw_nonzero().to_string());
        assert!(matches!(Pagemap::open(folder.path(), pid), Err(Status::Rights)));
        std::fs::create_dir(&own).unwrap();
        let put = |words: &[u64]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            std::fs::write(own.join("pagemap"), bytes).unwrap();
            let mut frames = Vec::new();
            let pagemap = Pagemap::open(folder.path(), pid).unwrap();
            pagemap.frames(1..6, &mut frames).map(|()| frames)
        };
        // The second-highest bit: swapped out, and the rest is where.
        let swapped = 1 << 62 | 77;
        let found = put(&[
            PRESENT | 1,
            PRESENT | 8,
            PRESENT | 9,
            0,
            swapped,
            PRESENT | 3,
            PRESENT | 4,
        ]);
        assert_eq!(found.unwrap(), [8..10, 3..4]);
        assert_eq!(put(&[0, PRESENT]), Err(Status::Rights));
    }
}
