//! The thread that owns the service: starts it when there is guest memory, and does for the VMM's threads what they
//! may not do themselves. It is unfiltered, since it starts before the VMM restricts itself, and blocks all signals.
#![allow(unsafe_code)] // signal masks; memory that the VMM owns

use crate::logging;
use crate::mappings::{Backing, Mapping, Mappings};
use crate::refusal::{Reason, Refusal};
use crate::settings::Settings;
use crate::watch::{Request, WATCH};
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use vmm_dedup::{Config, DedupService, Error, HostRange};

thread_local! {
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Whether what the calling thread does is our own doing or the engine's, and not the VMM's.
pub(crate) fn is_ours() -> bool {
    OURS.get() || vmm_dedup::in_service_thread()
}

/// Does something of ours in a thread of the VMM. It must not panic.
pub(crate) fn as_ours<T>(work: impl FnOnce() -> T) -> T {
    let before = OURS.replace(true);
    let result = work();
    OURS.set(before);
    result
}

/// How long to wait for more memory slots before the service starts.
const SETTLE: Duration = Duration::from_millis(20);
/// Until what may pass by itself is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// How long memory is left alone at least that the VMM was about to register with a userfaultfd of its own.
const LENT: Duration = Duration::from_secs(5);

/// Starts the manager; whether that worked.
pub(crate) fn spawn(settings: &'static Settings) -> bool {
    // A new thread has its parent's mask, and must not take a single signal of the VMM's.
    // SAFETY: valid, exclusive sets; the mask of the calling thread is put back.
    let before = unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) =
            (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    let thread = std::thread::Builder::new().name("dedup-manager".into());
    let spawned = thread.spawn(|| run(settings)).is_ok();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    spawned
}

fn run(settings: &Settings) {
    OURS.set(true);
    let mut manager = None;
    let ended = catch_unwind(AssertUnwindSafe(|| {
        logging::start(settings);
        manager.insert(Manager::new(settings)).work();
    }));
    // Only a bug leads here. What is merged stays merged, and stays right; nothing is touched any more.
    if ended.is_err() {
        let stopped = catch_unwind(AssertUnwindSafe(|| drop(manager)));
        log::error!(
            "dedup has ended in this VM ({}): please report this",
            stopped.is_ok()
        );
    }
    WATCH.go_deaf();
}

/// What the manager knows of a range of guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// The service works on it.
    Active,
    /// To be given to the service, not before.
    Wanted(Instant),
    /// The service knows it and leaves it alone; to be resumed, not before.
    Released(Instant),
    /// Never to be deduplicated.
    Refused,
}

#[derive(Clone, Debug)]
struct Region {
    range: Range<usize>,
    state: State,
}

struct Manager<'a> {
    settings: &'a Settings,
    config: Option<Config>,
    service: Option<DedupService>,
    regions: Vec<Region>,
    /// Set when this VM is not to be deduplicated any more.
    retired: bool,
    reported: Vec<Refusal>,
    unknown: usize,
}

impl<'a> Manager<'a> {
    fn new(settings: &'a Settings) -> Self {
        let mut manager = Self {
            settings,
            config: None,
            service: None,
            regions: Vec::new(),
            retired: false,
            reported: Vec::new(),
            unknown: 0,
        };
        if is_filtered() {
            manager.refuse(Refusal::new(
                Reason::Other,
                "the VMM had restricted its system calls before it talked to KVM",
                "start the VMM without its sandbox",
            ));
            manager.retired = true;
            return manager;
        }
        match settings.config() {
            Ok(config) => manager.config = Some(config),
            Err(error) => {
                manager.refuse(Refusal::new(
                    Reason::Other,
                    error,
                    "correct the file that VMM_DEDUP_CONFIG names",
                ));
                manager.retired = true;
            }
        }
        manager
    }

    fn work(&mut self) -> ! {
        let mut seen = 0;
        loop {
            let work = WATCH.wait(&mut seen, self.next_try());
            if let Some((mappings, unknown)) = work.news {
                self.take_in(&mappings, unknown);
            }
            if let Some(request) = work.request {
                self.obey(&request);
                WATCH.answer();
            }
            self.try_wanted();
        }
    }

    fn next_try(&self) -> Option<Instant> {
        let due = self.regions.iter().filter_map(|r| match r.state {
            State::Wanted(at) | State::Released(at) => Some(at),
            State::Active | State::Refused => None,
        });
        due.min().filter(|_| !self.retired)
    }

    /// Looks for guest memory that is new.
    fn take_in(&mut self, mappings: &Mappings, unknown: usize) {
        for mapping in mappings.iter().filter(|m| m.guest) {
            let known = |r: &Region| mapping.overlaps(&r.range);
            if !self.regions.iter().any(known) {
                let state = self.judge(mapping);
                let range = mapping.range();
                log::info!("guest memory at {range:x?}: {:?}", mapping.backing);
                self.regions.push(Region { range, state });
            }
        }
        if unknown > std::mem::replace(&mut self.unknown, unknown) {
            self.refuse(Refusal::new(
                Reason::NoKvmMemory,
                format!("{unknown} bytes of guest memory were not mapped by a call that this library sees"),
                "report this with the VMM's name and version",
            ));
        }
    }

    fn judge(&mut self, mapping: &Mapping) -> State {
        let refusal = match mapping.backing {
            Backing::Anonymous => return State::Wanted(Instant::now() + SETTLE),
            Backing::HugeTlb => hugetlb(),
            Backing::Shared if has_large_pages(mapping.start) => hugetlb(),
            Backing::Shared => {
                let arguments: Vec<String> = std::env::args_os()
                    .map(|a| a.to_string_lossy().into_owned())
                    .collect();
                Refusal::shared(&arguments)
            }
            Backing::File => Refusal::new(
                Reason::SharedMemory,
                "guest memory is a mapping of a file",
                "start the VM with anonymous memory",
            ),
        };
        self.refuse(refusal);
        State::Refused
    }

    /// Does what a thread of the VMM waits for.
    fn obey(&mut self, request: &Request) {
        match request {
            Request::Remove(range) => self.remove(range),
            Request::Move(range) => {
                self.release(range);
                self.remove(range);
            }
            Request::Lend(range) => self.release(range),
            Request::Passthrough => self.retire(Refusal::new(
                Reason::Vfio,
                "a device has direct access to guest memory (VFIO, vDPA), which pins all of it",
                "remove the device, and start the VMM anew",
            )),
            Request::Confidential => self.retire(Refusal::new(
                Reason::Confidential,
                "guest memory is private to the guest (SEV-SNP, TDX, guest_memfd)",
                "start the VM without confidential computing",
            )),
        }
    }

    fn remove(&mut self, gone: &Range<usize>) {
        if let (Some(service), Ok(range)) = (&self.service, HostRange::try_new(gone.start, gone.len()))
            && let Err(error) = service.remove_range(range)
        {
            log::warn!("guest memory at {gone:x?} goes while {error}");
        }
        let regions = std::mem::take(&mut self.regions);
        for Region { range, state } in regions {
            let before = range.start..range.end.min(gone.start);
            let behind = range.start.max(gone.end)..range.end;
            for range in [before, behind].into_iter().filter(|r| r.start < r.end) {
                let state = state.clone();
                self.regions.push(Region { range, state });
            }
        }
    }

    fn release(&mut self, range: &Range<usize>) {
        let later = Instant::now() + LENT;
        let mut refusals = Vec::new();
        for region in &mut self.regions {
            if region.range.start >= range.end || range.start >= region.range.end {
                continue;
            }
            let service = self.service.as_ref().filter(|_| region.state == State::Active);
            region.state = match (service, &region.state) {
                (_, State::Refused) => State::Refused,
                (None, State::Released(_)) => State::Released(later),
                (None, _) => State::Wanted(later),
                (Some(service), _) => {
                    let released = host_range(&region.range).and_then(|range| service.release_range(range));
                    if let Err(error) = released {
                        log::warn!("guest memory at {:x?} is not given back: {error}", region.range);
                    }
                    State::Released(later)
                }
            };
            refusals.push(Refusal::new(
                Reason::ForeignUserfaultfd,
                "the VMM uses a userfaultfd on guest memory (postcopy, on-demand restore, background snapshot)",
                "wait until that is over",
            ));
        }
        refusals.into_iter().for_each(|refusal| self.refuse(refusal));
    }

    /// Brings everything back to anonymous memory, and never starts again. (The discarder stays: pages that the kernel
    /// copied still lie in mappings of the store.)
    fn retire(&mut self, refusal: Refusal) {
        self.retired = true;
        if let Some(service) = self.service.take()
            && let Err(error) = service.stop(true)
        {
            log::error!("{error}");
        }
        self.refuse(refusal);
    }

    /// Gives the service what is due.
    fn try_wanted(&mut self) {
        if self.retired {
            return;
        }
        let now = Instant::now();
        let due = |r: &Region| matches!(r.state, State::Wanted(at) | State::Released(at) if at <= now);
        if !self.regions.iter().any(due) {
            return;
        }
        for at in 0..self.regions.len() {
            if !due(&self.regions[at]) {
                continue;
            }
            let Region { range, state } = self.regions[at].clone();
            let done = match (&self.service, &state) {
                (Some(service), State::Released(_)) => {
                    host_range(&range).and_then(|range| service.resume_range(range))
                }
                (Some(service), _) => add(service, &range),
                (None, _) => self.start(&range),
            };
            self.regions[at].state = match done {
                Ok(()) => {
                    log::info!("guest memory at {range:x?} is deduplicated");
                    self.reported.retain(|r| !r.reason.passes());
                    State::Active
                }
                Err(error) => {
                    let refusal = Refusal::of(&error);
                    let passes = refusal.reason.passes();
                    self.refuse(refusal);
                    match state {
                        _ if !passes => State::Refused,
                        State::Released(_) => State::Released(now + RETRY),
                        _ => State::Wanted(now + RETRY),
                    }
                }
            };
        }
    }

    fn start(&mut self, range: &Range<usize>) -> Result<(), Error> {
        let Some(config) = &self.config else {
            return Err(Error::Stopped);
        };
        // Paused, until a thread that frees memory finds the discarder.
        let paused = Config {
            enabled: false,
            ..config.clone()
        };
        // SAFETY: as in add().
        let service =
            unsafe { DedupService::start_on_ranges(&[host_range(range)?], &self.settings.store, paused) }?;
        WATCH.lock().discarder = Some(service.discarder());
        if config.enabled {
            service.resume();
        }
        self.service = Some(service);
        Ok(())
    }

    /// Reports a refusal, once.
    fn refuse(&mut self, refusal: Refusal) {
        if !self.reported.contains(&refusal) {
            let name = self.config.as_ref().map(|c| c.name.clone());
            refusal.report(&name.unwrap_or_else(|| self.settings.name()));
            self.reported.push(refusal);
        }
    }
}

fn add(service: &DedupService, range: &Range<usize>) -> Result<(), Error> {
    // SAFETY: guest memory, which only the guest and raw addresses reach; munmap, mmap and mremap ask us before it
    // goes.
    unsafe { service.add_range(host_range(range)?) }
}

fn host_range(range: &Range<usize>) -> Result<HostRange, Error> {
    HostRange::try_new(range.start, range.len())
}

fn hugetlb() -> Refusal {
    Refusal::new(
        Reason::Hugetlb,
        "guest memory consists of hugetlb pages, which cannot be shared in parts",
        "start the VM without hugepages=on; transparent huge pages are fine",
    )
}

/// Whether the mapping at an address has pages larger than 4 KiB by itself.
fn has_large_pages(address: usize) -> bool {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let begins = format!("{address:x}-");
    let mapping = smaps.lines().skip_while(|line| !line.starts_with(&begins));
    let size = mapping
        .into_iter()
        .find_map(|line| line.strip_prefix("KernelPageSize:"));
    size.is_some_and(|size| size.trim() != "4 kB")
}

/// Whether this thread's system calls are filtered.
fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    mode.is_some_and(|mode| mode.trim() != "0")
}
