//! When memory was used, by DAMON (operations `paddr`: physical addresses). Kernel documentation: admin-guide/mm/damon/usage.
//!
//! DAMON cuts memory into regions of equal use. Its interface in sysfs has one user: who finds it taken leaves it alone, unless an
//! agent has left it that was killed. It answers at the end of an aggregation, hence a thread of its own. What it tells is kept for
//! each block.

use super::{Lack, Roots};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use std::fs;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use vmm_dedup_agent_wire::frame::BLOCK;
use vmm_dedup_agent_wire::said::Temperature;

const ADMIN: &str = "kernel/mm/damon/admin/kdamonds";
const BLOCK_BYTES: u64 = BLOCK as u64 * 4096;
/// A look at each region.
const SAMPLE: Duration = Duration::from_millis(200);
/// Regions: as few as the kernel allows, and so many that it costs 0.1 % of a core at a microsecond each.
const REGIONS: Range<u32> = 10..200;
/// Aggregations without use after which a region is cold.
const COLD: u64 = 3;
/// The name of the socket that says that an agent uses DAMON.
const OWNER: &[u8] = b"vmm-dedup-agent/damon";
/// Tries while somebody else holds the lock of the files.
const TRIES: usize = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// The file and what happened.
type FileError = (String, io::Error);

/// A region, as DAMON has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Region {
    bytes: Range<u64>,
    accesses: u64,
    /// Aggregations since its accesses changed much.
    age: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct Damon {
    told: Arc<Mutex<Vec<Temperature>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _owner: OwnedFd,
}

impl Damon {
    /// Starts it for these blocks. A region's use is added up over `interval`.
    ///
    /// # Errors
    /// [`Lack`].
    pub fn start(roots: &Roots, blocks: &[Range<u32>], interval: Duration) -> Result<Self, Lack> {
        let files = Files(roots.sys.join(ADMIN));
        let owner = owner().map_err(|_| Lack::Damon("another agent uses it".into()))?;
        files.must_be_free().map_err(Lack::Damon)?;
        let set_up = files.set_up(blocks, interval);
        if let Err((file, error)) = set_up.and_then(|()| files.write("0/state", "on")) {
            files.clear();
            return Err(Lack::Damon(match error.kind() {
                ErrorKind::PermissionDenied => "it takes CAP_SYS_ADMIN".into(),
                _ => format!("the kernel refuses {file}: {error}"),
            }));
        }
        let end = blocks.last().map_or(0, |last| last.end as usize);
        let told = Arc::new(Mutex::new(vec![Temperature::Unknown; end]));
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stopped) = (Arc::clone(&told), Arc::clone(&stop));
        // It reads small files.
        let builder = std::thread::Builder::new()
            .name("damon".into())
            .stack_size(128 << 10);
        let thread = builder.spawn(move || run(&files, &shared, &stopped, interval));
        let thread = thread.map_err(|e| Lack::Damon(format!("no thread: {e}")))?;
        let thread = Some(thread);
        Ok(Self {
            told,
            stop,
            thread,
            _owner: owner,
        })
    }

    /// When something of a block was used.
    #[must_use]
    pub fn temperature(&self, block: u32) -> Temperature {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.get(block as usize).copied().unwrap_or(Temperature::Unknown)
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

/// What the agent that uses DAMON holds. The kernel lets go of it when the agent ends, however that happens.
fn owner() -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(OWNER)?)?;
    Ok(socket)
}

fn run(files: &Files, told: &Mutex<Vec<Temperature>>, stop: &AtomicBool, interval: Duration) {
    while !stop.load(Ordering::Acquire) {
        std::thread::park_timeout(interval);
        if stop.load(Ordering::Acquire) {
            break;
        }
        // Somebody else may have it now; what was told before says nothing any more.
        let regions = files.ask().unwrap_or_default();
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        told.fill(Temperature::Unknown);
        regions.iter().for_each(|region| tell(region, &mut told));
    }
    files.clear();
}

/// Of a block in which several regions lie, the hottest counts.
fn tell(region: &Region, told: &mut [Temperature]) {
    let temperature = match (region.accesses, region.age) {
        (0, COLD..) => Temperature::Cold,
        (0, _) => Temperature::Warm,
        _ => Temperature::Hot,
    };
    let first = region.bytes.start / BLOCK_BYTES;
    let end = region.bytes.end.div_ceil(BLOCK_BYTES).min(told.len() as u64);
    for at in first..end {
        let Some(block) = usize::try_from(at).ok().and_then(|at| told.get_mut(at)) else {
            return;
        };
        *block = match *block {
            Temperature::Unknown => temperature,
            known => known.min(temperature),
        };
    }
}

/// DAMON's files, below a folder.
#[derive(Debug)]
struct Files(PathBuf);

impl Files {
    /// To be called by the owner.
    fn must_be_free(&self) -> Result<(), String> {
        match self.read("nr_kdamonds") {
            Ok(number) if number == "0" => Ok(()),
            Ok(_) if self.is_left_over() => {
                self.clear();
                Ok(())
            }
            Ok(_) => Err("somebody else uses it".into()),
            Err((_, error)) if error.kind() == ErrorKind::NotFound => {
                Err("this kernel has none, or none in sysfs".into())
            }
            Err((file, error)) => Err(format!("{file} cannot be read: {error}")),
        }
    }

    /// Whether it was set up as by [`Self::set_up`], by an agent before this one.
    fn is_left_over(&self) -> bool {
        let context = |file: &str| self.read(&format!("0/contexts/0/{file}")).unwrap_or_default();
        let attribute = |file: &str| context(&format!("monitoring_attrs/{file}"));
        context("operations") == "paddr"
            && context("schemes/0/action") == "stat"
            && attribute("nr_regions/min") == REGIONS.start.to_string()
            && attribute("nr_regions/max") == REGIONS.end.to_string()
            && attribute("intervals/aggr_us") == attribute("intervals/update_us")
    }

    fn set_up(&self, blocks: &[Range<u32>], interval: Duration) -> Result<(), FileError> {
        let context = "0/contexts/0";
        let scheme = "0/contexts/0/schemes/0";
        let put = |file: String, number: u64| self.write(&file, &number.to_string());
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.write("nr_kdamonds", "1")?;
        self.write("0/contexts/nr_contexts", "1")?;
        self.write(&format!("{context}/operations"), "paddr")?;
        let intervals = [
            ("sample_us", SAMPLE.min(interval)),
            ("aggr_us", interval),
            ("update_us", interval),
        ];
        for (name, time) in intervals {
            put(format!("{context}/monitoring_attrs/intervals/{name}"), us(time))?;
        }
        // The more must not be less than the less at any time.
        for (name, regions) in [("max", REGIONS.end), ("min", REGIONS.start)] {
            put(
                format!("{context}/monitoring_attrs/nr_regions/{name}"),
                u64::from(regions),
            )?;
        }
        put(format!("{context}/targets/nr_targets"), 1)?;
        let target = format!("{context}/targets/0/regions");
        put(format!("{target}/nr_regions"), blocks.len() as u64)?;
        for (number, range) in blocks.iter().enumerate() {
            put(
                format!("{target}/{number}/start"),
                u64::from(range.start) * BLOCK_BYTES,
            )?;
            put(
                format!("{target}/{number}/end"),
                u64::from(range.end) * BLOCK_BYTES,
            )?;
        }
        put(format!("{context}/schemes/nr_schemes"), 1)?;
        self.write(&format!("{scheme}/action"), "stat")?;
        let most = u64::from(u32::MAX);
        for (name, most) in [("sz", u64::MAX), ("nr_accesses", most), ("age", most)] {
            put(format!("{scheme}/access_pattern/{name}/max"), most)?;
            put(format!("{scheme}/access_pattern/{name}/min"), 0)?;
        }
        // What is asked for later: Linux 6.2 and later have it.
        self.tried_regions().map(drop)
    }

    fn tried_regions(&self) -> Result<fs::ReadDir, FileError> {
        let name = "0/contexts/0/schemes/0/tried_regions";
        fs::read_dir(self.0.join(name)).map_err(|error| (name.to_owned(), error))
    }

    fn ask(&self) -> Result<Vec<Region>, FileError> {
        self.write("0/state", "update_schemes_tried_regions")?;
        // Beside the folders of regions there is a file with their sum.
        let folders = self.tried_regions()?;
        Ok(folders.filter_map(|entry| region(&entry.ok()?.path())).collect())
    }

    /// Ends monitoring and leaves DAMON free.
    fn clear(&self) {
        // The first fails if it never ran, and then there is nothing to end.
        let _ = self.write("0/state", "off");
        let _ = self.write("nr_kdamonds", "0");
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
    Some(Region {
        bytes: number("start")?..number("end")?,
        accesses: number("nr_accesses")?,
        age: number("age")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_as_hot_as_its_hottest_region() {
        let region = |start: u64, end: u64, accesses, age| Region {
            bytes: start * BLOCK_BYTES / 2..end * BLOCK_BYTES / 2,
            accesses,
            age,
        };
        let mut told = vec![Temperature::Unknown; 4];
        // In halves of blocks: cold, then warm, then hot.
        for region in [region(0, 3, 0, 9), region(3, 5, 0, 1), region(5, 100, 2, 9)] {
            tell(&region, &mut told);
        }
        use Temperature::{Cold, Hot, Warm};
        assert_eq!(told, [Cold, Warm, Hot, Hot]);
    }

    #[test]
    fn who_uses_it_already_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files(folder.path().to_owned());
        assert!(files.must_be_free().unwrap_err().contains("none"));
        fs::write(folder.path().join("nr_kdamonds"), "1\n").unwrap();
        assert!(files.must_be_free().unwrap_err().contains("somebody else"));
        fs::write(folder.path().join("nr_kdamonds"), "0\n").unwrap();
        assert_eq!(files.must_be_free(), Ok(()));
    }

    #[test]
    fn what_an_agent_has_left_that_was_killed_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files(folder.path().to_owned());
        let put = |file: &str, text: &str| {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let left = [
            ("nr_kdamonds", "1\n"),
            ("0/state", "on\n"),
            ("0/contexts/0/operations", "paddr\n"),
            ("0/contexts/0/schemes/0/action", "stat\n"),
            ("0/contexts/0/monitoring_attrs/nr_regions/min", "10\n"),
            ("0/contexts/0/monitoring_attrs/nr_regions/max", "200\n"),
            ("0/contexts/0/monitoring_attrs/intervals/aggr_us", "60000000\n"),
            ("0/contexts/0/monitoring_attrs/intervals/update_us", "60000000\n"),
        ];
        // Whoever differs in one of them is somebody else.
        for (file, _) in &left[2..] {
            left.iter().for_each(|(file, text)| put(file, text));
            put(file, "7\n");
            assert!(files.must_be_free().is_err(), "{file}");
        }
        left.iter().for_each(|(file, text)| put(file, text));
        assert_eq!(files.must_be_free(), Ok(()));
        let read = |file: &str| fs::read_to_string(folder.path().join(file)).unwrap();
        assert_eq!((read("0/state"), read("nr_kdamonds")), ("off".into(), "0".into()));
    }

    #[test]
    fn one_agent_at_a_time_uses_it() {
        let first = owner().unwrap();
        assert!(owner().is_err());
        drop(first);
        assert!(owner().is_ok());
    }
}
