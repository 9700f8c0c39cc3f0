//! A guest: memory in a process of its own that is written, round by round, while KSM or a service works on it.

use super::files::Files;
use super::orders::{Breaker, Done, Looked, Order, Passed, Plan};
use super::pattern::Pattern;
use crate::content::Area;
use crate::service::{Served, managed_breaks, vouched};
use crate::{host, worker};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_dedup::{Breaks, Config, Policy};
use vmm_dedup_host::Failure;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::bytes_of;

/// From the start of one pass to the start of the next while guests write: the shortest that a service can be set to. Passes
/// without any pause would measure how fast a service finds that there is nothing to do.
const PASS_PERIOD: Duration = Duration::from_millis(10);

/// The process: does what it is told, a line each.
pub(super) fn work() -> Result<(), Failure> {
    let mut guest: Option<Guest> = None;
    worker::converse(|order| match (order, &mut guest) {
        (Order::Fill(plan), None) => {
            guest = Some(Guest::fill(plan)?);
            worker::answer(&Done)
        }
        (order, Some(guest)) => guest.follow(order),
        (order, None) => Err(Failure::new(format!("{order:?} before there is memory"))),
    })
}

struct Guest {
    number: usize,
    area: Area,
    pattern: Pattern,
    files: Files,
    round: usize,
    service: Option<Service>,
}

impl Guest {
    fn fill(plan: Plan) -> Result<Self, Failure> {
        let mut files = Files::new(plan.files);
        let mut pattern = None;
        let area = Area::filled(plan.thp, plan.mib, |area| {
            let filled = pattern.insert(Pattern::new(plan.kind, plan.guest, area.pages(), &files));
            for (page, content) in filled.contents().iter().enumerate() {
                area.write(page, bytes_of(&content.words(&mut files)?));
            }
            Ok(())
        })?;
        Ok(Self {
            number: plan.guest,
            area,
            pattern: pattern.ok_or_else(|| Failure::new("the memory was not filled"))?,
            files,
            round: 0,
            service: None,
        })
    }

    fn follow(&mut self, order: Order) -> Result<(), Failure> {
        match order {
            Order::Fill(_) => Err(Failure::new("the memory is filled already")),
            Order::LetKsmMerge => {
                self.area.let_ksm_merge()?;
                worker::answer(&Done)
            }
            Order::Serve { store, breaks } => {
                self.service = Some(Service::start(self.number, &self.area, &store, breaks)?);
                worker::answer(&Done)
            }
            Order::PassAllTheTime(begin) => {
                self.served()?.pass_all_the_time(begin)?;
                worker::answer(&Done)
            }
            Order::Write => worker::answer(&self.write()?),
            Order::Pass => {
                let stats = self.served()?.service.pass()?;
                worker::answer(&Passed {
                    work: stats.merges_total
                        + stats.zero_merges_total
                        + stats.published_total
                        + stats.huge_splits_total
                        + stats.huge_rebuilt_total,
                    mapped: stats.pages_mapped,
                })
            }
            Order::Look => {
                let mapped = self.mapped()?;
                worker::answer(&self.served()?.look(mapped)?)
            }
            Order::Check => worker::answer(&self.area.wrong()),
        }
    }

    fn served(&mut self) -> Result<&mut Service, Failure> {
        self.service
            .as_mut()
            .ok_or_else(|| Failure::new("no service was started"))
    }

    fn write(&mut self) -> Result<Vec<u64>, Failure> {
        self.round += 1;
        let pages = self.pattern.advance(self.round, &self.files);
        let mut times = Vec::with_capacity(pages.len());
        for page in pages {
            let content = self.pattern.contents()[page].words(&mut self.files)?;
            let took = self.area.rewrite(page, &content);
            times.push(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        }
        Ok(times)
    }

    /// Pages that are a file's, which is the store's: whatever the service believes.
    fn mapped(&self) -> Result<u64, Failure> {
        let pages = self.area.address() / PAGE_SIZE..(self.area.address() + self.area.len()) / PAGE_SIZE;
        let mut entries = vec![0; pages.len() * 8];
        let read = File::open("/proc/self/pagemap")
            .and_then(|map| map.read_exact_at(&mut entries, (pages.start * 8) as u64));
        read.map_err(|e| Failure::new(format!("cannot read /proc/self/pagemap: {e}")))?;
        let (entries, _) = entries.as_chunks::<8>();
        let maps = host::read("/proc/self/maps")?;
        let of_files = maps.lines().filter_map(file_mapping).flat_map(|mapping| {
            let start = mapping.start.clamp(pages.start, pages.end);
            start..mapping.end.clamp(start, pages.end)
        });
        let shared = of_files.filter(|page| !is_private(u64::from_ne_bytes(entries[page - pages.start])));
        Ok(shared.count() as u64)
    }
}

/// Pages of a mapping, if it is one of a file: a line of /proc/PID/maps.
fn file_mapping(line: &str) -> Option<Range<usize>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let page = |address| Some(usize::from_str_radix(address, 16).ok()? / PAGE_SIZE);
    let inode = fields.nth(3)?;
    (inode != "0").then_some(page(start)?..page(end)?)
}

/// Whether a page in a mapping of a file is a copy, by its entry of /proc/PID/pagemap. One that was never touched since it was
/// mapped has no bit set, and is the file's.
fn is_private(entry: u64) -> bool {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;
    entry & (PRESENT | SWAPPED) != 0 && entry & OF_FILE == 0
}

/// A service, and whoever calls for passes.
struct Service {
    service: Arc<Served>,
    vmas_before: usize,
    passes: Option<Passes>,
}

impl Service {
    fn start(number: usize, area: &Area, store: &Path, breaks: Breaker) -> Result<Self, Failure> {
        let config = Config {
            name: format!("guest-{number}"),
            // Passes come when they are called for.
            pass_period_ms: 3_600_000,
            // Costs are measured; what a budget would put off is not to be.
            cpu_percent: 100,
            // As KSM does; watching use needs time as well as passes.
            huge_policy: Policy::Ksm,
            breaks: match breaks {
                Breaker::Kernel => Breaks::KERNEL,
                Breaker::Managed => managed_breaks(),
            },
            ..Config::default()
        };
        let vmas_before = host::vmas()?;
        let service = Arc::new(Served::area(area, store, config, vouched())?);
        Ok(Self {
            service,
            vmas_before,
            passes: None,
        })
    }

    fn pass_all_the_time(&mut self, begin: bool) -> Result<(), Failure> {
        if let Some(passes) = self.passes.take() {
            passes.end()?;
        }
        if begin {
            self.passes = Some(Passes::begin(self.service.clone()));
        }
        Ok(())
    }

    fn look(&self, mapped: u64) -> Result<Looked, Failure> {
        let stats = self.service.stats();
        Ok(Looked {
            mapped,
            zero: stats.pages_zero,
            vmas: host::vmas()?.saturating_sub(self.vmas_before) as u64,
            broken: stats.pages_broken,
        })
    }
}

/// A thread that calls for passes until it is told to end.
struct Passes {
    end: Sender<()>,
    thread: JoinHandle<Result<(), Failure>>,
}

impl Passes {
    fn begin(service: Arc<Served>) -> Self {
        let (end, ended) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            loop {
                let next = Instant::now() + PASS_PERIOD;
                service.pass()?;
                let pause = next.saturating_duration_since(Instant::now());
                if ended.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    return Ok(());
                }
            }
        });
        Self { end, thread }
    }

    fn end(self) -> Result<(), Failure> {
        drop(self.end);
        let ended = self.thread.join();
        ended.map_err(|_| Failure::new("the thread that calls for passes panicked"))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_files_are_told_from_others() {
        let line =
            "7f0000200000-7f0000204000 rw-p 00003000 00:01 2062      /memfd:vmm-dedup-segment (deleted)";
        assert_eq!(file_mapping(line), Some(0x7_f000_0200..0x7_f000_0204));
        assert_eq!(
            file_mapping("7f0000200000-7f0000204000 rw-p 00000000 00:00 0 "),
            None
        );
        assert_eq!(file_mapping("nonsense"), None);
    }

    #[test]
    fn copies_are_told_from_what_is_the_files() {
        let [present, swapped, of_file] = [63, 62, 61].map(|bit| 1 << bit);
        assert!(is_private(present) && is_private(swapped));
        assert!(!is_private(0) && !is_private(present | of_file));
    }
}
