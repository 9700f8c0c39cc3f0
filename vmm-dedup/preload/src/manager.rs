//! The thread that owns the service: starts it when there is guest memory, and does for the VMM's threads what they
//! may not do themselves. It is unfiltered, since it starts before the VMM restricts itself, and blocks all signals.
#![allow(unsafe_code)] // signal masks; memory that the VMM owns

use crate::mappings::{Backing, Mapping, Mappings};
use crate::settings::Settings;
use crate::watch::{Lent, Request, WATCH};
use crate::{logging, refusal};
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use vmm_dedup::{Config, DedupService, Error, HostRange, Refusal, Refused, Settings as Change, Switch};

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
    /// Where the guest sees it, if known.
    guest_address: Option<u64>,
    state: State,
}

impl Region {
    fn host_range(&self) -> Result<HostRange, Error> {
        let range = HostRange::try_new(self.range.start, self.range.len())?;
        Ok(match self.guest_address {
            Some(address) => range.at_guest_address(address),
            None => range,
        })
    }

    /// Its parts in front of and behind what goes.
    fn without(self, gone: &Range<usize>) -> impl Iterator<Item = Self> {
        let range = self.range.clone();
        let before = range.start..range.end.min(gone.start);
        let behind = range.start.max(gone.end)..range.end;
        let part = move |part: Range<usize>| Self {
            guest_address: self
                .guest_address
                .map(|at| at + (part.start - range.start) as u64),
            range: part,
            state: self.state.clone(),
        };
        [before, behind].into_iter().filter(|r| r.start < r.end).map(part)
    }
}

struct Manager<'a> {
    settings: &'a Settings,
    config: Option<Config>,
    /// Guests that run guests, and devices, are noticed by the hooks; everything else that pins guest memory is an open file.
    pins_are_visible: bool,
    service: Option<DedupService>,
    /// Tells the store why there is no service.
    refused: Option<Refused>,
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
            pins_are_visible: true,
            service: None,
            refused: None,
            regions: Vec::new(),
            retired: false,
            reported: Vec::new(),
            unknown: 0,
        };
        if is_filtered() {
            manager.retire(refusal::sandboxed());
            return manager;
        }
        match settings.config() {
            Ok(config) => manager.config = Some(config),
            Err(mistake) => manager.retire(refusal::settings(&mistake)),
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
            let there = self.regions.iter_mut().find(|r| mapping.overlaps(&r.range));
            if let Some(region) = there {
                // Until the service has it, more slots may say more of where the guest sees it.
                if region.range == mapping.range() {
                    region.guest_address = mapping.guest_address;
                }
                continue;
            }
            log::info!("guest memory at {:x?}: {:?}", mapping.range(), mapping.backing);
            self.regions.push(Region {
                range: mapping.range(),
                guest_address: mapping.guest_address,
                state: State::Refused,
            });
            let state = self.judge(mapping);
            if let Some(region) = self.regions.last_mut() {
                region.state = state;
            }
        }
        if unknown > std::mem::replace(&mut self.unknown, unknown) {
            self.refuse(refusal::unknown_memory(unknown));
        }
    }

    fn judge(&mut self, mapping: &Mapping) -> State {
        let refusal = match mapping.backing {
            Backing::Anonymous => return State::Wanted(Instant::now() + SETTLE),
            Backing::HugeTlb => refusal::hugetlb(),
            Backing::Shared if has_large_pages(mapping.start) => refusal::hugetlb(),
            Backing::Shared => {
                let arguments = std::env::args_os().map(|a| a.to_string_lossy().into_owned());
                refusal::shared(&arguments.collect::<Vec<String>>())
            }
            Backing::File => refusal::file(),
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
            Request::Passthrough => self.retire(refusal::passthrough()),
            Request::Confidential => self.retire(refusal::confidential()),
            Request::Nested if !kvm_pins_nested_memory() && !self.retired => self.retire(refusal::nested()),
            Request::Nested => self.expect_nested_guests(),
            Request::Protect(range) => self.leave_alone(range),
            Request::RegisterAgain(lent) => {
                for Lent { range, uffd, mode } in lent {
                    if let Err(error) = crate::kvm::register_again(*uffd, range, *mode) {
                        log::debug!("the VMM's userfaultfd has {range:x?} no more: {error}");
                    }
                }
            }
            // Why merging is suspended says the service.
            Request::DirectIo => {
                let _ = self.service.as_ref().map(DedupService::direct_io_opened);
            }
        }
    }

    /// The guest may run guests: KVM has pages of it pinned then, which no open file shows.
    fn expect_nested_guests(&mut self) {
        if kvm_nests() {
            self.pins_are_visible = false;
            let _ = self.service.as_ref().map(DedupService::pins_may_be_hidden);
        }
    }

    fn remove(&mut self, gone: &Range<usize>) {
        if let (Some(service), Ok(range)) = (&self.service, HostRange::try_new(gone.start, gone.len()))
            && let Err(error) = service.remove_range(range)
        {
            log::warn!("guest memory at {gone:x?} goes while {error}");
        }
        // It outlives the service, and must not know memory that is gone: at its addresses there may be other memory soon.
        if let Some(discarder) = WATCH.discarder() {
            discarder.forget(gone.start, gone.len());
        }
        let regions = std::mem::take(&mut self.regions);
        self.regions = regions.into_iter().flat_map(|r| r.without(gone)).collect();
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
                    let released = region.host_range().and_then(|range| service.release_range(range));
                    if let Err(error) = released {
                        log::warn!("guest memory at {:x?} is not given back: {error}", region.range);
                    }
                    State::Released(later)
                }
            };
            refusals.push(refusal::foreign_userfaultfd());
        }
        refusals.into_iter().for_each(|refusal| self.refuse(refusal));
    }

    /// Brings memory back to anonymous memory, and does not deduplicate it any more.
    fn leave_alone(&mut self, range: &Range<usize>) {
        for region in &mut self.regions {
            if region.range.start >= range.end || range.start >= region.range.end {
                continue;
            }
            if let (Some(service), State::Active) = (&self.service, &region.state)
                && let Err(error) = region.host_range().and_then(|range| service.release_range(range))
            {
                log::warn!("guest memory at {:x?} is not given back: {error}", region.range);
            }
            region.state = State::Refused;
        }
        self.refuse(refusal::protected());
    }

    /// Brings everything back to anonymous memory, and never starts again. (The discarder stays, for as long as the memory
    /// does: pages that the kernel copied still lie in mappings of the store.)
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
            let region = self.regions[at].clone();
            let done = match (&self.service, &region.state) {
                (Some(service), State::Released(_)) => {
                    region.host_range().and_then(|range| service.resume_range(range))
                }
                (Some(service), _) => add(service, &region),
                (None, _) => self.start(&region),
            };
            self.regions[at].state = match done {
                Ok(()) => {
                    log::info!("guest memory at {:x?} is deduplicated", region.range);
                    self.reported.retain(|r| !refusal::passes(r));
                    State::Active
                }
                Err(error) => {
                    let refusal = Refusal::from(&error);
                    let passes = refusal::passes(&refusal);
                    self.refuse(refusal);
                    match region.state {
                        _ if !passes => State::Refused,
                        State::Released(_) => State::Released(now + RETRY),
                        _ => State::Wanted(now + RETRY),
                    }
                }
            };
        }
    }

    fn start(&mut self, region: &Region) -> Result<(), Error> {
        let Some(config) = &self.config else {
            return Err(Error::Stopped);
        };
        // Switched off, until a thread that frees memory finds the discarder.
        let off = Config {
            enabled: false,
            ..config.clone()
        };
        self.refused = None;
        // SAFETY: as in add().
        let service = unsafe {
            DedupService::start_on_ranges_with(
                &[region.host_range()?],
                &self.settings.store,
                off,
                vmm_dedup_engines::engines(),
            )
        }?;
        if self.pins_are_visible {
            service.vouch_for_pins();
        }
        WATCH.lock().discarder = Some(service.discarder());
        if config.enabled {
            service.set(Change {
                switch: Some(Switch::On),
                ..Change::default()
            })?;
        }
        self.service = Some(service);
        Ok(())
    }

    /// Reports a refusal, once: in the log, and to the store if there is nothing else to be said about this VM. (What
    /// may pass is not announced, since the VM is about to join under the same name.)
    fn refuse(&mut self, refusal: Refusal) {
        if self.reported.contains(&refusal) {
            return;
        }
        let name = self.config.as_ref().map(|c| c.name.clone());
        let name = name.unwrap_or_else(|| self.settings.name());
        log::warn!("VM {name} is not deduplicated: {refusal}");
        if self.service.is_none() && !refusal::passes(&refusal) {
            let pages = self.regions.iter().map(|r| r.range.len() / 4096).sum::<usize>();
            let announced = Refused::announce(&self.settings.store, &name, pages.max(1) as u64, &refusal);
            self.refused = announced
                .inspect_err(|error| log::warn!("the store is not told: {error}"))
                .ok();
        }
        self.reported.push(refusal);
    }
}

fn add(service: &DedupService, region: &Region) -> Result<(), Error> {
    // SAFETY: guest memory, which only the guest and raw addresses reach; munmap, mmap and mremap ask us before it
    // goes.
    unsafe { service.add_range(region.host_range()?) }
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

/// Whether KVM pins what it uses of a guest's memory while that runs a guest of its own: since Linux 6.13 (kvm_vcpu_map).
/// Before, it takes a plain reference, and the processor writes there (virtual APIC pages, posted interrupts) whatever
/// becomes of the guest's mapping. Where KVM does not let guests run guests, what their CPUID says does not matter.
fn kvm_pins_nested_memory() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    nested_memory_is_safe(&release, nested_settings())
}

/// Whether KVM lets guests run guests; if nothing tells, it does.
fn kvm_nests() -> bool {
    !nested_memory_is_safe("", nested_settings())
}

/// What KVM's modules say of guests that run guests.
fn nested_settings() -> [Option<String>; 2] {
    let setting =
        |module: &str| std::fs::read_to_string(format!("/sys/module/{module}/parameters/nested")).ok();
    [setting("kvm_intel"), setting("kvm_amd")]
}

fn nested_memory_is_safe(release: &str, settings: [Option<String>; 2]) -> bool {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|n| n.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let off = |setting: &String| matches!(setting.trim(), "N" | "0");
    version >= (6, 13) || settings.iter().flatten().any(off)
}

/// Whether this thread's system calls are filtered.
fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    mode.is_some_and(|mode| mode.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_that_run_guests_need_a_kernel_that_pins_or_a_kvm_that_does_not_let_them() {
        let setting = |text: &str| Some(text.to_owned());
        assert!(nested_memory_is_safe("6.13.0", [setting("Y\n"), None]));
        assert!(nested_memory_is_safe("7.0-rc1", [None, None]));
        assert!(!nested_memory_is_safe(
            "6.12.43+deb13-amd64",
            [setting("Y\n"), None]
        ));
        assert!(!nested_memory_is_safe(
            "6.12.43+deb13-amd64",
            [None, setting("1\n")]
        ));
        assert!(!nested_memory_is_safe("6.12.43+deb13-amd64", [None, None]));
        assert!(nested_memory_is_safe(
            "6.12.43+deb13-amd64",
            [setting("N\n"), None]
        ));
        assert!(nested_memory_is_safe(
            "6.12.43+deb13-amd64",
            [None, setting("0\n")]
        ));
    }
}
