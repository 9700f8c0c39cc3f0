//! The kernel's idle page tracking, where it has one (CONFIG_IDLE_PAGE_TRACKING; Debian's kernels have not). Kernel
//! documentation: admin-guide/mm/idle_page_tracking.
//!
//! A bitmap has a bit for each page frame of the host. Who sets a bit marks the frame idle, and the kernel clears it when
//! it finds an accessed bit in any page table that maps the frame, KVM's included (MMU notifiers). Of a huge page the first
//! frame stands for all. Shared frames would tell of other VMs' use, so of split memory the probes are looked at, which are
//! private. The bitmap is read a few times in a window, to tell how soon memory is used.
//!
//! Nothing is taken away and nobody waits. It needs CAP_SYS_ADMIN: for the bitmap, and for frame numbers in pagemap. A frame
//! that was given to somebody else meanwhile tells nothing: its number is asked again at the end.

use crate::config::UseSource;
use crate::memory::thp_state::Use;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::track::access::{AccessMonitor, PROBES, Target};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const BITMAP: &str = "/sys/kernel/mm/page_idle/bitmap";
const PAGEMAP: &str = "/proc/self/pagemap";
/// The first look after the frames were marked; each other comes after twice the time.
const FIRST_LOOK: Duration = Duration::from_micros(500);
const FRAMES_PER_WORD: u64 = 64;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct PageIdle {
    bitmap: File,
    pagemap: File,
}

/// What is known of a target.
struct Watched {
    frames: Vec<u64>,
    used: Use,
}

impl PageIdle {
    /// Opens what it needs; the reason if that is not possible.
    pub(crate) fn start() -> Result<Self, String> {
        Self::open(Path::new(BITMAP), Path::new(PAGEMAP))
    }

    fn open(bitmap: &Path, pagemap: &Path) -> Result<Self, String> {
        let reason = |e: &io::Error| match e.kind() {
            ErrorKind::NotFound => "this kernel does not track idle pages".to_owned(),
            _ => format!("{} cannot be opened: {e}", bitmap.display()),
        };
        let bitmap = OpenOptions::new().read(true).write(true).open(bitmap);
        let this = Self {
            bitmap: bitmap.map_err(|e| reason(&e))?,
            pagemap: File::open(pagemap).map_err(|e| format!("{}: {e}", pagemap.display()))?,
        };
        let here = 0u8;
        match this.frame(&raw const here as usize) {
            Ok(Some(_)) => Ok(this),
            Ok(None) => Err("it takes CAP_SYS_ADMIN to see frame numbers".into()),
            Err(e) => Err(format!("{}: {e}", pagemap.display())),
        }
    }

    /// The frame at an address; `None` if there is none, or it is not told.
    fn frame(&self, address: usize) -> io::Result<Option<u64>> {
        let mut entry = [0; 8];
        let at = (address / PAGE_SIZE * entry.len()) as u64;
        self.pagemap.read_exact_at(&mut entry, at)?;
        let entry = u64::from_ne_bytes(entry);
        let (present, frame) = (entry >> 63 == 1, entry & ((1 << 55) - 1));
        Ok((present && frame != 0).then_some(frame))
    }

    /// The frames that tell of a target.
    fn frames(&self, target: Target) -> io::Result<Vec<u64>> {
        let addresses = match target {
            Target::Huge(start) => vec![start],
            Target::Split(start) => PROBES.map(|probe| start + bytes(probe as usize)).to_vec(),
        };
        let frames = addresses.into_iter().map(|address| self.frame(address));
        frames.filter_map(Result::transpose).collect()
    }

    fn mark_idle(&self, watched: &[Watched]) -> io::Result<()> {
        let mut words: BTreeMap<u64, u64> = BTreeMap::new();
        for frame in watched.iter().flat_map(|w| &w.frames) {
            *words.entry(frame / FRAMES_PER_WORD).or_default() |= 1 << (frame % FRAMES_PER_WORD);
        }
        let mut write = |(at, word): (u64, u64)| self.bitmap.write_all_at(&word.to_ne_bytes(), at * 8);
        words.into_iter().try_for_each(&mut write)
    }

    fn is_idle(&self, frame: u64) -> io::Result<bool> {
        let mut word = [0; 8];
        self.bitmap
            .read_exact_at(&mut word, frame / FRAMES_PER_WORD * 8)?;
        Ok(u64::from_ne_bytes(word) >> (frame % FRAMES_PER_WORD) & 1 == 1)
    }

    /// Notes what was used within that time since the frames were marked.
    fn look(&self, watched: &mut [Watched], after: Duration) -> io::Result<()> {
        for target in watched.iter_mut().filter(|target| target.used == Use::None) {
            for frame in &target.frames {
                if !self.is_idle(*frame)? {
                    target.used = Use::After(after);
                    break;
                }
            }
        }
        Ok(())
    }
}

impl AccessMonitor for PageIdle {
    fn source(&self) -> UseSource {
        UseSource::PageIdle
    }

    fn needs_probes(&self) -> bool {
        true
    }

    fn sample(&mut self, targets: &[Target], window: Duration) -> io::Result<Vec<Option<Use>>> {
        let watched = targets.iter().map(|target| {
            let (frames, used) = (self.frames(*target)?, Use::None);
            Ok(Watched { frames, used })
        });
        let mut watched: Vec<Watched> = watched.collect::<io::Result<_>>()?;
        self.mark_idle(&watched)?;
        let (mut passed, mut next) = (Duration::ZERO, FIRST_LOOK);
        while passed < window {
            next = next.min(window);
            std::thread::sleep(next - passed);
            (passed, next) = (next, next * 2);
            self.look(&mut watched, passed)?;
        }
        let told = targets.iter().zip(watched).map(|(target, watched)| {
            let same = !watched.frames.is_empty() && self.frames(*target)? == watched.frames;
            Ok(same.then_some(watched.used))
        });
        told.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::page_size::HUGE_SIZE;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// A pagemap in which page n is in frame n + 1,000, and a bitmap in which nothing is idle.
    fn files(pages: u64) -> (tempfile::TempDir, PageIdle) {
        let folder = tempfile::tempdir().unwrap();
        let entries = (0..pages).flat_map(|page| (1 << 63 | (page + 1000)).to_ne_bytes());
        std::fs::write(folder.path().join("pagemap"), entries.collect::<Vec<u8>>()).unwrap();
        std::fs::write(folder.path().join("bitmap"), vec![0u8; 4096]).unwrap();
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            options.open(folder.path().join(name)).unwrap()
        };
        let idle = PageIdle {
            bitmap: open("bitmap"),
            pagemap: open("pagemap"),
        };
        (folder, idle)
    }

    #[test]
    fn what_stays_idle_is_unused_and_what_does_not_was_used_by_then() {
        let (_folder, mut idle) = files(2048);
        let targets = [
            Target::Huge(0),
            Target::Split(HUGE_SIZE),
            Target::Huge(2 * HUGE_SIZE),
        ];
        let (kernel, stop) = (idle.bitmap.try_clone().unwrap(), AtomicBool::new(false));
        let told = std::thread::scope(|scope| {
            scope.spawn(|| {
                // The second probe of the second target, and the third, are always accessed.
                let frames = [1000 + 512 + u64::from(PROBES[1]), 1000 + 1024];
                while !stop.load(Ordering::Relaxed) {
                    for at in frames.map(|frame| frame / FRAMES_PER_WORD * 8) {
                        kernel.write_all_at(&[0; 8], at).unwrap();
                    }
                    std::thread::yield_now();
                }
            });
            let told = idle.sample(&targets, Duration::from_millis(20));
            stop.store(true, Ordering::Relaxed);
            told.unwrap()
        });
        assert_eq!(told[0], Some(Use::None));
        for told in &told[1..] {
            assert!(matches!(told, Some(Use::After(after)) if *after <= Duration::from_millis(20)));
        }
    }

    #[test]
    fn only_own_frames_are_marked() {
        let (_folder, idle) = files(2048);
        let frames = vec![1000, 1001, 1100];
        let used = Use::None;
        idle.mark_idle(&[Watched { frames, used }]).unwrap();
        let marked: Vec<u64> = (0..4096 * 8)
            .filter(|frame| idle.is_idle(*frame).unwrap())
            .collect();
        assert_eq!(marked, [1000, 1001, 1100]);
    }

    #[test]
    fn a_page_that_is_not_there_tells_nothing() {
        let (_folder, mut idle) = files(2048);
        idle.pagemap.write_all_at(&[0; 8], 0).unwrap();
        let told = idle.sample(&[Target::Huge(0)], Duration::from_millis(1));
        assert_eq!(told.unwrap(), [None]);
    }

    #[test]
    fn without_the_bitmap_that_is_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let missing = PageIdle::open(&folder.path().join("bitmap"), Path::new(PAGEMAP));
        assert!(missing.unwrap_err().contains("does not track idle pages"));
    }
}
