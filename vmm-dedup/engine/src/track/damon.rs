//! DAMON, the kernel's monitor of memory use, for this process's guest memory (operations `fvaddr`: fixed ranges of virtual
//! addresses). Kernel documentation: admin-guide/mm/damon/usage.
//!
//! DAMON cuts memory into regions, and at each of its samples looks whether one page of each was accessed since the last.
//! A huge page is one page for that. The kernel counts KVM's accesses as well (MMU notifiers). At the end of an
//! aggregation of [`SAMPLES`] a thread of ours asks for the regions with use, as the scheme `stat` lists them, and keeps them
//! for whoever samples.
//!
//! The interface in sysfs has one user for the whole host: who finds it taken leaves it alone. One whose process has gone
//! (killed before it could tidy up) counts as free.
//!
//! What this service reads itself looks used as well: in one sample, hence [`OWN_LOOKS`], or in as many as the reading lasted where the
//! CPU is slow or shared.

use crate::config::UseSource;
use crate::memory::layout::Memory;
use crate::memory::thp_state::Use;
use crate::seccomp::Part;
use crate::sys::page_size::{CHUNK_PAGES, HUGE_SIZE};
use crate::sys::{proc, thread};
use crate::track::access::{AccessMonitor, Target};
use std::collections::HashMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

const ADMIN: &str = "/sys/kernel/mm/damon/admin/kdamonds";
/// Samples in an aggregation.
const SAMPLES: u64 = 20;
/// A look at a region costs the kernel about a microsecond. With this interval for each of them it takes 1 % of a core.
const SAMPLE_US_PER_REGION: u64 = 100;
const LEAST_SAMPLE_US: u64 = 5000;
/// Most regions. More memory than 2 MiB for each of them is cut by the kernel where use differs.
const MOST_REGIONS: usize = 1000;
/// Samples with use that the service's own reading explains, if it is done before the next sample.
const OWN_LOOKS: u64 = 1;
/// The kernel is asked that often while use is sampled once: each answer is some files for every region with use.
const ASKED_PER_INTERVAL: u32 = 4;
/// Tries while somebody else holds the lock of DAMON's files.
const TRIES: usize = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// A region with use.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Region {
    range: Range<usize>,
    /// Samples that found it accessed.
    accesses: u64,
}

/// What the kernel told last.
#[derive(Debug, Default)]
struct Told {
    /// How often it has told.
    number: u64,
    /// In the order of addresses.
    regions: Vec<Region>,
    /// CPU time of our thread and the kernel's, nanoseconds.
    cpu_ns: u64,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Damon {
    told: Arc<Mutex<Told>>,
    /// What was the last word on each target: each is passed on once.
    passed_on: HashMap<usize, u64>,
    /// What the service has read itself since the last word on it, where that lasted longer than a sample: samples with use that
    /// this explains beside [`OWN_LOOKS`].
    own_reads: HashMap<usize, u64>,
    sample: Duration,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Damon {
    /// Starts monitoring for somebody who samples once in an interval; the reason if that is not possible.
    pub(crate) fn start(memory: &Memory, interval: Duration) -> Result<Self, String> {
        let files = Files(PathBuf::from(ADMIN));
        files.must_be_free()?;
        let regions = memory.chunks().len().clamp(10, MOST_REGIONS);
        let sample_us = (regions as u64 * SAMPLE_US_PER_REGION).max(LEAST_SAMPLE_US);
        let ranges: Vec<Range<usize>> = memory.regions().collect();
        let set_up = files.set_up(&ranges, regions, sample_us);
        let set_up = set_up.and_then(|()| files.write("0/state", "on"));
        if let Err((file, error)) = set_up {
            files.clear();
            return Err(match error.kind() {
                ErrorKind::PermissionDenied => "it takes CAP_SYS_ADMIN to use DAMON".into(),
                _ => format!("DAMON refuses {file}: {error}"),
            });
        }
        let (told, stop) = (Arc::new(Mutex::default()), Arc::new(AtomicBool::new(false)));
        let every = Duration::from_micros(sample_us * SAMPLES).max(interval / ASKED_PER_INTERVAL);
        let reader = Reader {
            files,
            told: Arc::clone(&told),
            stop: stop.clone(),
            every,
        };
        let thread = thread::spawn(Part::Damon, move || reader.run());
        let thread = thread.map_err(|e| format!("no thread: {e}"))?;
        Ok(Self {
            told,
            passed_on: HashMap::new(),
            own_reads: HashMap::new(),
            sample: Duration::from_micros(sample_us),
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Damon {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl AccessMonitor for Damon {
    fn source(&self) -> UseSource {
        UseSource::Damon
    }

    fn needs_probes(&self) -> bool {
        false
    }

    fn helper_cpu_ns(&self) -> u64 {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).cpu_ns
    }

    fn sample(&mut self, targets: &[Target], _window: Duration) -> io::Result<Vec<Option<Use>>> {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let mut used = Vec::with_capacity(targets.len());
        for target in targets {
            let known = self.passed_on.insert(target.start(), told.number).unwrap_or(0);
            let news = (told.number > known).then(|| {
                let own_looks = OWN_LOOKS + self.own_reads.remove(&target.start()).unwrap_or(0);
                use_of(*target, &told.regions, self.sample, own_looks)
            });
            used.push(news.flatten());
        }
        Ok(used)
    }

    fn note_own_read(&mut self, start: usize, lasted: Duration) {
        let looks = u64::try_from(lasted.as_micros() / self.sample.as_micros()).unwrap_or(u64::MAX / 2);
        if looks > 0 {
            let known = self.own_reads.entry(start).or_default();
            *known = looks.max(*known);
        }
    }
}

/// How soon a target is used, if the kernel found that share of samples with use at random; `None` if most of them can be due to
/// the service's own reading. Of small pages the kernel looks at one in each sample, of 512.
#[allow(clippy::cast_precision_loss)] // small numbers
fn use_of(target: Target, regions: &[Region], sample: Duration, own_looks: u64) -> Option<Use> {
    let range = target.start()..target.start() + HUGE_SIZE;
    let first = regions.partition_point(|r| r.range.end <= range.start);
    let inside = regions[first..].iter().take_while(|r| r.range.start < range.end);
    let accesses = inside.map(|r| r.accesses).max().unwrap_or(0);
    if accesses <= OWN_LOOKS {
        return Some(Use::None);
    }
    if own_looks * 2 > SAMPLES {
        return None;
    }
    if accesses <= own_looks {
        return Some(Use::None);
    }
    if accesses >= SAMPLES {
        return Some(Use::AT_ONCE);
    }
    let share = accesses as f64 / SAMPLES as f64;
    let after = sample.as_secs_f64() / -(1.0 - share).ln();
    let pages = match target {
        Target::Huge(_) => 1,
        Target::Split(_) => CHUNK_PAGES,
    };
    Some(Use::After(Duration::from_secs_f64(after / pages as f64)))
}

/// Asks the kernel in the background, since it answers at the end of an aggregation.
struct Reader {
    files: Files,
    told: Arc<Mutex<Told>>,
    stop: Arc<AtomicBool>,
    every: Duration,
}

impl Reader {
    fn run(self) {
        let mut failed = false;
        let mut kernel_cpu_ns = 0;
        while !self.stop.load(Ordering::Acquire) {
            match self.files.ask() {
                Ok(regions) => {
                    // Not told while the kernel has its files in its hands.
                    kernel_cpu_ns = self.files.kernel_cpu_ns().unwrap_or(kernel_cpu_ns);
                    let cpu_ns = proc::thread_cpu_ns() + kernel_cpu_ns;
                    let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
                    told.number += 1;
                    (told.regions, told.cpu_ns) = (regions, cpu_ns);
                }
                Err((file, error)) if !failed => {
                    failed = true;
                    log::warn!("DAMON does not tell the use of memory any more: {file}: {error}");
                }
                Err(_) => {}
            }
            std::thread::park_timeout(self.every);
        }
        self.files.clear();
    }
}

/// DAMON's files, below a folder.
struct Files(PathBuf);

/// The file and what happened.
type FileError = (String, io::Error);

impl Files {
    fn must_be_free(&self) -> Result<(), String> {
        let number = match self.read("nr_kdamonds") {
            Ok(number) => number,
            Err((_, error)) if error.kind() == ErrorKind::NotFound => {
                return Err("this kernel has no DAMON, or none in sysfs".into());
            }
            Err((file, error)) => return Err(format!("{file} cannot be read: {error}")),
        };
        match number.as_str() {
            "0" => Ok(()),
            "1" if self.is_left_over() => Ok(()),
            _ => Err("somebody else on this host uses DAMON".into()),
        }
    }

    /// Whether who used DAMON has gone without a word.
    fn is_left_over(&self) -> bool {
        let off = self.read("0/state").is_ok_and(|state| state == "off");
        let pid = self.read("0/contexts/0/targets/0/pid_target");
        off && pid.is_ok_and(|pid| pid != "0" && !Path::new("/proc").join(pid).exists())
    }

    fn set_up(&self, ranges: &[Range<usize>], regions: usize, sample_us: u64) -> Result<(), FileError> {
        let aggregation = sample_us * SAMPLES;
        let context = "0/contexts/0";
        let scheme = "0/contexts/0/schemes/0";
        self.write("nr_kdamonds", "1")?;
        self.write("0/contexts/nr_contexts", "1")?;
        self.write(&format!("{context}/operations"), "fvaddr")?;
        for (name, us) in [
            ("sample_us", sample_us),
            ("aggr_us", aggregation),
            ("update_us", aggregation),
        ] {
            self.write(
                &format!("{context}/monitoring_attrs/intervals/{name}"),
                &us.to_string(),
            )?;
        }
        // The more must not be less than the less at any time.
        for name in ["max", "min"] {
            self.write(
                &format!("{context}/monitoring_attrs/nr_regions/{name}"),
                &regions.to_string(),
            )?;
        }
        self.write(&format!("{context}/targets/nr_targets"), "1")?;
        let target = format!("{context}/targets/0");
        self.write(&format!("{target}/pid_target"), &std::process::id().to_string())?;
        self.write(&format!("{target}/regions/nr_regions"), &ranges.len().to_string())?;
        for (number, range) in ranges.iter().enumerate() {
            self.write(
                &format!("{target}/regions/{number}/start"),
                &range.start.to_string(),
            )?;
            self.write(&format!("{target}/regions/{number}/end"), &range.end.to_string())?;
        }
        self.write(&format!("{context}/schemes/nr_schemes"), "1")?;
        self.write(&format!("{scheme}/action"), "stat")?;
        for (name, least, most) in [
            ("sz", 0, u64::MAX),
            ("nr_accesses", 1, u64::from(u32::MAX)),
            ("age", 0, u64::from(u32::MAX)),
        ] {
            self.write(&format!("{scheme}/access_pattern/{name}/max"), &most.to_string())?;
            self.write(&format!("{scheme}/access_pattern/{name}/min"), &least.to_string())?;
        }
        // What is asked for later: Linux 6.2 and later have it.
        self.tried_regions().map(drop)
    }

    fn tried_regions(&self) -> Result<fs::ReadDir, FileError> {
        let name = "0/contexts/0/schemes/0/tried_regions";
        fs::read_dir(self.0.join(name)).map_err(|error| (name.to_owned(), error))
    }

    /// The regions with use.
    fn ask(&self) -> Result<Vec<Region>, FileError> {
        self.write("0/state", "update_schemes_tried_regions")?;
        // Beside the folders of regions there is a file with their sum.
        let mut regions: Vec<Region> = self
            .tried_regions()?
            .filter_map(|entry| region(&entry.ok()?.path()))
            .collect();
        regions.sort_unstable_by_key(|region| region.range.start);
        Ok(regions)
    }

    /// CPU time of DAMON's thread.
    fn kernel_cpu_ns(&self) -> Option<u64> {
        let pid = self.read("0/pid").ok()?;
        let schedstat = fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
        schedstat.split_ascii_whitespace().next()?.parse().ok()
    }

    /// Ends monitoring and leaves DAMON free.
    fn clear(&self) {
        // Fails if it never ran.
        let _ = self.write("0/state", "off");
        if let Err((file, error)) = self.write("nr_kdamonds", "0") {
            log::warn!("DAMON's set-up stays: {file}: {error}");
        }
    }

    fn read(&self, file: &str) -> Result<String, FileError> {
        let text = fs::read_to_string(self.0.join(file)).map_err(|e| (file.to_owned(), e))?;
        Ok(text.trim().to_owned())
    }

    fn write(&self, file: &str, text: &str) -> Result<(), FileError> {
        let mut tries = 0..TRIES;
        loop {
            match fs::write(self.0.join(file), text) {
                Err(error) if error.kind() == ErrorKind::ResourceBusy && tries.next().is_some() => {
                    std::thread::sleep(PAUSE);
                }
                done => return done.map_err(|e| (file.to_owned(), e)),
            }
        }
    }
}

/// Reads one; `None` if the kernel has replaced it meanwhile.
fn region(folder: &Path) -> Option<Region> {
    let number = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let address = |name| usize::try_from(number(name)?).ok();
    Some(Region {
        range: address("start")?..address("end")?,
        accesses: number("nr_accesses")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Duration = Duration::from_millis(10);

    fn regions(accesses: &[u64]) -> Vec<Region> {
        let one = |(n, accesses): (usize, &u64)| Region {
            range: n * HUGE_SIZE..(n + 1) * HUGE_SIZE,
            accesses: *accesses,
        };
        accesses.iter().enumerate().map(one).collect()
    }

    #[test]
    fn use_follows_from_the_share_of_samples() {
        let regions = regions(&[20, 0, 1, 10]);
        let huge = |n| use_of(Target::Huge(n * HUGE_SIZE), &regions, SAMPLE, OWN_LOOKS);
        assert_eq!(
            [0, 1, 2, 9].map(huge),
            [Use::AT_ONCE, Use::None, Use::None, Use::None].map(Some)
        );
        // Half of the samples of 10 ms without use: once in 14 ms.
        let after = |used| match used {
            Some(Use::After(after)) => after.as_micros(),
            Some(Use::None) | None => 0,
        };
        assert_eq!(after(huge(3)), 14_426);
        let split = use_of(Target::Split(3 * HUGE_SIZE), &regions, SAMPLE, OWN_LOOKS);
        assert_eq!(after(split), 28);
    }

    /// On a slow CPU, or one that others have meanwhile, that takes longer than a sample.
    #[test]
    fn what_the_service_reads_itself_is_no_use() {
        let told = |number| Told {
            number,
            regions: regions(&[4, 4, 20, 20, 0]),
            cpu_ns: 0,
        };
        let mut damon = Damon {
            told: Arc::new(Mutex::new(told(1))),
            passed_on: HashMap::new(),
            own_reads: HashMap::new(),
            sample: SAMPLE,
            stop: Arc::default(),
            thread: None,
        };
        // The first and the third for four samples, the last two for an aggregation.
        for (n, samples) in [(0, 4), (2, 4), (3, 20), (4, 20)] {
            damon.note_own_read(n * HUGE_SIZE, SAMPLE * samples);
        }
        let targets: Vec<Target> = (0..5).map(|n| Target::Huge(n * HUGE_SIZE)).collect();
        let used = damon.sample(&targets, Duration::ZERO).unwrap();
        assert_eq!(used[0], Some(Use::None));
        assert!(matches!(used[1], Some(Use::After(_))));
        assert_eq!(used[2..], [Some(Use::AT_ONCE), None, Some(Use::None)]);
        // What was read before the next word does not count for it.
        *damon.told.lock().unwrap() = told(2);
        let used = damon.sample(&targets, Duration::ZERO).unwrap();
        assert!(matches!(used[0], Some(Use::After(_))));
        assert_eq!(used[3], Some(Use::AT_ONCE));
    }

    fn files(content: &[(&str, &str)]) -> (tempfile::TempDir, Files) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in content {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let files = Files(folder.path().to_owned());
        (folder, files)
    }

    #[test]
    fn without_damon_that_is_the_reason() {
        let (_folder, files) = files(&[]);
        assert!(files.must_be_free().unwrap_err().contains("no DAMON"));
    }

    #[test]
    fn what_others_use_is_left_alone() {
        let used = |state, pid| {
            files(&[
                ("nr_kdamonds", "1\n"),
                ("0/state", state),
                ("0/contexts/0/targets/0/pid_target", pid),
            ])
        };
        let gone = u32::MAX.to_string();
        let living = std::process::id().to_string();
        for (state, pid, free) in [
            ("on\n", gone.as_str(), false),
            ("off\n", living.as_str(), false),
            ("off\n", "0\n", false),
            ("off\n", gone.as_str(), true),
        ] {
            let (_folder, files) = used(state, pid);
            assert_eq!(files.must_be_free().is_ok(), free, "{state} {pid}");
        }
        let (_folder, files) = files(&[("nr_kdamonds", "2\n")]);
        assert!(files.must_be_free().unwrap_err().contains("somebody else"));
    }
}
