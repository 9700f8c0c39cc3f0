//! The handle that a VMM holds.

use crate::compare::Engines;
use crate::config::{AgentSocket, Config};
use crate::error::Error;
use crate::hints::line::AgentLine;
use crate::hints::listen;
use crate::lookup::tree_search::Searcher;
use crate::memory::layout::{HostRange, Memory};
use crate::merge::verify_engine::VerifyEngine;
use crate::pack::{Packer, Server};
use crate::scan::control::{Change, Command, Control, Ending, Event};
use crate::scan::pass::Pass;
use crate::seccomp::Part;
use crate::store::connection::Store;
use crate::sync::{Mutex, lock};
use crate::sys::late_log;
use crate::sys::pagemap::Pagemap;
use crate::sys::thread;
use crate::unmerge::cow::Breaker;
use crate::unmerge::discard::{Discarder, Discards};
use crate::unmerge::fault_thread::Faults;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vm_memory::GuestMemoryBackend;
use vmm_dedup_protocol::control::{Explanation, Settings, Switch};
use vmm_dedup_protocol::stats::ServiceStats;

/// What the scanning thread was asked for, and will answer.
#[derive(Debug)]
pub(crate) struct Pending<T>(mpsc::Receiver<T>);

impl<T> Pending<T> {
    /// Waits for the answer, by futex alone.
    ///
    /// # Errors
    /// [`Error::Stopped`]: the service has ended before.
    pub(crate) fn wait(self) -> Result<T, Error> {
        self.0.recv().map_err(|_| Error::Stopped)
    }
}

/// The rebuilding thread.
#[derive(Debug)]
struct Rebuilds {
    thread: JoinHandle<()>,
    /// Says that it goes on alone, for want of memory, although the service has ended.
    alone: Mutex<mpsc::Receiver<()>>,
}

/// A running dedup service for one VM: a scanning thread, in managed mode a fault thread, and if pages are packed one that rebuilds
/// them.
///
/// Dropping it stops it without unmerging: what is shared stays shared, and the kernel copies on write. What is packed comes back first,
/// however long the host lacks memory for that.
#[derive(Debug)]
pub struct DedupService {
    control: Arc<Control>,
    breaker: Arc<Breaker>,
    discards: Arc<Discards>,
    packer: Option<Arc<Packer>>,
    line: Arc<AgentLine>,
    scanner: Option<JoinHandle<(ServiceStats, Result<(), Error>)>>,
    faults: Option<JoinHandle<()>>,
    rebuilds: Option<Rebuilds>,
    listener: Option<JoinHandle<()>>,
}

impl DedupService {
    /// Starts a service on a VM's memory, which it keeps alive.
    ///
    /// # Errors
    /// Everything that can be checked is checked first: configuration, kernel, memory, store. On an error the guest
    /// is as it was.
    pub fn start<M>(memory: Arc<M>, store: &Path, config: Config) -> Result<Self, Error>
    where
        M: GuestMemoryBackend + Send + Sync + 'static,
    {
        Self::start_with(memory, store, config, Engines::new())
    }

    /// Starts a service that has these engines to choose from, for [`Config::search`] and [`Config::verify`].
    ///
    /// # Errors
    /// As [`Self::start`]. An engine that is registered and cannot be made now is no error: the index, or the CPU, does
    /// its work until it can.
    pub fn start_with<M>(
        memory: Arc<M>,
        store: &Path,
        config: Config,
        engines: Engines,
    ) -> Result<Self, Error>
    where
        M: GuestMemoryBackend + Send + Sync + 'static,
    {
        let ranges = HostRange::of_guest_memory(&*memory)?;
        Self::launch(&ranges, store, config, engines, memory)
    }

    /// Starts a service on plain address ranges.
    ///
    /// # Safety
    /// The ranges must be guest memory that stays mapped until the service has stopped, and that Rust code only
    /// accesses through raw pointers or volatile views: its pages vanish and come back at any time.
    ///
    /// # Errors
    /// As [`Self::start`].
    #[allow(unsafe_code)]
    pub unsafe fn start_on_ranges(ranges: &[HostRange], store: &Path, config: Config) -> Result<Self, Error> {
        Self::launch(ranges, store, config, Engines::new(), Arc::new(()))
    }

    /// The same, with engines as for [`Self::start_with`].
    ///
    /// # Safety
    /// As for [`Self::start_on_ranges`].
    ///
    /// # Errors
    /// As [`Self::start_with`].
    #[allow(unsafe_code)]
    pub unsafe fn start_on_ranges_with(
        ranges: &[HostRange],
        store: &Path,
        config: Config,
        engines: Engines,
    ) -> Result<Self, Error> {
        Self::launch(ranges, store, config, engines, Arc::new(()))
    }

    /// The same, paused: nothing is scanned and merged before [`Self::resume`], whatever an operator asks for as soon as the store
    /// knows the service.
    ///
    /// # Safety
    /// As for [`Self::start_on_ranges`].
    ///
    /// # Errors
    /// As [`Self::start_with`].
    #[allow(unsafe_code)]
    pub(crate) unsafe fn start_paused(
        ranges: &[HostRange],
        store: &Path,
        config: Config,
        engines: Engines,
    ) -> Result<Self, Error> {
        let control = Control::new(&config)?;
        control.set_paused(true);
        Self::launch_with(control, ranges, store, config, engines, Arc::new(()))
    }

    /// `keep_alive`: the memory, which each thread that touches it keeps for itself: the scanning thread may die before the others.
    fn launch(
        ranges: &[HostRange],
        store: &Path,
        config: Config,
        engines: Engines,
        keep_alive: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<Self, Error> {
        let control = Control::new(&config)?;
        Self::launch_with(control, ranges, store, config, engines, keep_alive)
    }

    fn launch_with(
        control: Control,
        ranges: &[HostRange],
        store: &Path,
        config: Config,
        engines: Engines,
        keep_alive: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<Self, Error> {
        if !cfg!(target_arch = "x86_64") {
            return Err(Error::Architecture(std::env::consts::ARCH));
        }
        config.check(&engines)?;
        let control = Arc::new(control);
        let engines = (
            Searcher::new(&config, engines.clone()),
            VerifyEngine::new(&config, engines),
        );
        let memory = Memory::new(ranges)?;
        let line = Arc::new(AgentLine::new(memory.guest_end(), control.cpu_budget())?);
        let shared = (control.clone(), line.clone());
        let mut pass = Pass::new(config, memory, store.to_owned(), engines, shared)?;
        pass.fill_stats();
        control.publish(&pass.account.stats);
        let (breaker, discards) = (pass.space.breaker.clone(), pass.space.discards.clone());
        let faults = if breaker.managed() {
            let (faults, pagemap) = (Faults::of(breaker.clone()), Pagemap::open()?);
            let memory = keep_alive.clone();
            let faults = thread::spawn(Part::Fault, move || {
                faults.serve(pagemap);
                drop(memory);
            });
            Some(faults.map_err(Error::Thread)?)
        } else {
            None
        };
        let packer = pass.space.packer.clone();
        let mut service = Self {
            control,
            breaker,
            discards,
            packer: packer.clone(),
            line,
            scanner: None,
            faults,
            rebuilds: None,
            listener: None,
        };
        if let Some(packer) = packer {
            let (server, alone) = Server::of(packer);
            let memory = keep_alive.clone();
            let serve = move || {
                server.serve();
                drop(memory);
            };
            match thread::spawn(Part::Pack, serve) {
                Ok(thread) => {
                    let alone = Mutex::new(alone);
                    service.rebuilds = Some(Rebuilds { thread, alone });
                }
                Err(error) => {
                    service.end_helpers();
                    return Err(Error::Thread(error));
                }
            }
        }
        let thread = thread::spawn(Part::Scan, move || {
            let end = scan(pass);
            drop(keep_alive);
            end
        });
        match thread {
            Ok(thread) => service.scanner = Some(thread),
            Err(error) => {
                service.end_helpers();
                return Err(Error::Thread(error));
            }
        }
        Ok(service)
    }

    /// Listens to the guest's agent from now on, in a thread of its own; once, more calls change nothing. A socket that cannot be
    /// made is no error: it is tried again, and the service goes on without hints. They need the guest physical addresses of
    /// memory ([`HostRange::at_guest_address`]).
    ///
    /// # Errors
    /// [`Error::Thread`]; [`Error::Config`] where the crate is built without its feature `agent`.
    pub fn listen_to_agent(&mut self, at: AgentSocket) -> Result<(), Error> {
        if self.listener.is_none() {
            self.listener = Some(listen::start(&self.line, at)?);
        }
        Ok(())
    }

    /// Stops scanning and merging until [`Self::resume`]: when this returns the scanning thread stands by. What is shared stays
    /// shared, and breaks are served. Memory that [`Self::set`] brings back comes back all the same.
    pub fn pause(&self) {
        self.control.set_paused(true);
        let (tell, told) = mpsc::channel();
        self.control.order(Command::Rest(tell));
        // A thread that has died does as well.
        let _ = told.recv();
    }

    /// Goes on after [`Self::pause`].
    pub fn resume(&self) {
        self.control.set_paused(false);
    }

    /// Changes settings while the service runs, as `vmm-dedup set` does. Switching off keeps what is shared; with
    /// [`Switch::OffUnmerge`] this waits until everything went back to anonymous memory, which keeps the CPU budget and lets other calls
    /// come first.
    ///
    /// # Errors
    /// [`Error::Config`] names a setting out of range, and nothing was changed then; [`Error::NotUnmerged`],
    /// [`Error::Stopped`].
    pub fn set(&self, settings: Settings) -> Result<(), Error> {
        self.begin_to_set(settings)?.wait()?
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub(crate) fn begin_to_set(&self, settings: Settings) -> Result<Pending<Result<(), Error>>, Error> {
        self.control.apply(&settings, &self.breaker)?;
        let (tell, told) = mpsc::channel();
        if settings.switch == Some(Switch::OffUnmerge) {
            self.control.order(Command::Unmerge(Some(tell)));
        } else {
            let _ = tell.send(Ok(()));
        }
        Ok(Pending(told))
    }

    /// What became of the pages at some guest physical addresses (`None`: of all), and what keeps the service from
    /// merging, if something does (else empty).
    ///
    /// # Errors
    /// [`Error::NoGuestAddresses`], [`Error::NotGuestMemory`], [`Error::Stopped`].
    pub fn explain(&self, addresses: Option<Range<u64>>) -> Result<(Explanation, String), Error> {
        let (tell, told) = mpsc::channel();
        self.control.ask(addresses, tell);
        told.recv().map_err(|_| Error::Stopped)?
    }

    /// Runs one pass now, whatever the period, and waits for its end.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn pass(&self) -> Result<ServiceStats, Error> {
        self.begin_pass().wait()
    }

    /// The same without waiting.
    pub(crate) fn begin_pass(&self) -> Pending<ServiceStats> {
        let (tell, told) = mpsc::channel();
        self.control.order(Command::Pass(tell));
        Pending(told)
    }

    /// Takes on memory that the VM got (hotplug), on plain addresses.
    ///
    /// # Safety
    /// As for [`Self::start_on_ranges`], until [`Self::remove_range`] has returned for it.
    ///
    /// # Errors
    /// Those of [`Self::start`] that concern memory; nothing has changed then.
    #[allow(unsafe_code)]
    pub unsafe fn add_range(&self, range: HostRange) -> Result<(), Error> {
        self.change(Change::Add, range)
    }

    /// Forgets memory that is about to be unmapped or replaced: when this returns the service does not touch it any
    /// more. What is shared there stays mapped. The range may be any part of the service's memory.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn remove_range(&self, range: HostRange) -> Result<(), Error> {
        self.change(Change::Remove, range)
    }

    /// Brings memory back to anonymous memory, ends its registrations and leaves it alone until
    /// [`Self::resume_range`], e.g. so that somebody else can use a userfaultfd on it. It works on chunks of 2 MiB.
    ///
    /// # Errors
    /// [`Error::NotUnmerged`], [`Error::Register`], [`Error::Stopped`].
    pub fn release_range(&self, range: HostRange) -> Result<(), Error> {
        self.change(Change::Release, range)
    }

    /// Goes on after [`Self::release_range`].
    ///
    /// # Errors
    /// [`Error::Register`] if another userfaultfd still owns the memory: try again later.
    pub fn resume_range(&self, range: HostRange) -> Result<(), Error> {
        self.change(Change::Resume, range)
    }

    /// Tells that a file was opened for direct I/O (O_DIRECT), or that this was switched on for an open one (F_SETFL). To
    /// be called before the first I/O to it: when this returns nothing is merged any more, if the file is on a file system
    /// whose direct I/O must not meet merging, until it is closed. Without it the service finds such files by itself, but
    /// may do so too late for their first I/O.
    ///
    /// # Errors
    /// [`Error::UnpinnedDirectIo`]: merging is suspended now, and why. [`Error::Stopped`].
    pub fn direct_io_opened(&self) -> Result<(), Error> {
        let (tell, told) = mpsc::channel();
        self.control.order(Command::DirectIo(tell));
        told.recv().map_err(|_| Error::Stopped)?
    }

    /// Vouches that whatever can have guest memory pinned shows in the files that this process has open: the guest cannot
    /// run guests of its own (KVM has pages of such pinned), and nobody else has the only descriptor of a file that reads into
    /// guest memory. From the next pass on pages that the kernel copied on write are merged again wherever no open file can have
    /// pages pinned. If it is wrong a guest can lose what a device writes.
    pub fn vouch_for_pins(&self) {
        self.control.vouch_for_pins(true);
    }

    /// Tells that what was said by [`Self::vouch_for_pins`] holds no longer, e.g. since the guest is about to be told that it can run guests
    /// of its own. To be called before: when this returns no page that the kernel copied is merged by it any more.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn pins_may_be_hidden(&self) -> Result<(), Error> {
        let (tell, told) = mpsc::channel();
        self.control.vouch_for_pins(false);
        self.control.order(Command::HiddenPins(tell));
        told.recv().map_err(|_| Error::Stopped)?
    }

    fn change(&self, change: Change, range: HostRange) -> Result<(), Error> {
        let (tell, told) = mpsc::channel();
        self.control.order(Command::Change(change, range, tell));
        told.recv().map_err(|_| Error::Stopped)?
    }

    /// What frees guest memory in the place of madvise(MADV_DONTNEED), from any thread.
    #[must_use]
    pub fn discarder(&self) -> Discarder {
        Discarder::of(self.discards.clone(), self.breaker.clone(), self.packer.clone())
    }

    /// Tells that a read from a file has just filled these addresses of this process, from any thread. What is read may be what other VMs
    /// have read: such pages are looked at first, and need not stand still before. To be called when the read has ended, and before the
    /// guest hears of it. It waits for nobody and makes no system call; now and then it does nothing.
    pub fn note_read(&self, addresses: Range<usize>) {
        self.control.reads().note(addresses);
    }

    /// Tells the account from any thread, without the service's handle.
    pub(crate) fn account(&self) -> Arc<Control> {
        self.control.clone()
    }

    /// The account as of the last pass (or the last pause for the CPU budget).
    pub fn stats(&self) -> ServiceStats {
        self.control.stats()
    }

    /// Changes the copy-on-write reserve of managed mode: pages kept ready, and the host memory (bytes) below which
    /// it is not refilled. Writers that wait go on as soon as there are pages.
    pub fn set_reserve(&self, pages: usize, floor_bytes: u64) {
        self.breaker.set_reserve(pages, floor_bytes);
        self.control.show_changes();
    }

    /// Ends the service. With `unmerge` everything is brought back to anonymous memory first; else what is shared
    /// stays shared for as long as the guest does not write it.
    ///
    /// # Errors
    /// [`Error::NotUnmerged`] if pages still map the store although they should not; [`Error::Stopped`] if the scanning
    /// thread had died.
    pub fn stop(mut self, unmerge: bool) -> Result<ServiceStats, Error> {
        self.end_as(if unmerge {
            Ending::Unmerge
        } else {
            Ending::StayShared
        })
    }
}

/// The end, and what is left of a service then.
impl DedupService {
    /// As [`Self::stop`], but what is packed is not waited for where the host lacks memory: it comes back when that is there, for as long as
    /// this is not dropped, which waits for it ([`Self::is_rebuilding`]).
    ///
    /// # Errors
    /// Those of [`Self::stop`].
    pub(crate) fn end_as(&mut self, ending: Ending) -> Result<ServiceStats, Error> {
        let (stats, end) = self.end(ending).ok_or(Error::Stopped)?;
        end.map(|()| stats)
    }

    /// Whether something packed is not back yet, of a service that has ended.
    pub(crate) fn is_rebuilding(&self) -> bool {
        let rebuilds = self.rebuilds.as_ref();
        rebuilds.is_some_and(|rebuilds| !rebuilds.thread.is_finished())
    }

    /// Memory of a service that has ended goes: what is packed of it does not come back any more.
    pub(crate) fn let_go(&self, range: &Range<usize>) {
        if let Some(packer) = &self.packer {
            packer.let_go(range, Duration::ZERO);
        }
    }

    /// Several calls come one behind the other (`true`), or no other: between two of them the scanning thread begins no pass and no try at
    /// a store. It answers no question meanwhile ([`Self::explain`]).
    pub(crate) fn hold(&self, held: bool) {
        self.control.hold(held);
    }

    /// Whether the scanning thread has ended by itself, which only a bug explains.
    pub(crate) fn has_died(&self) -> bool {
        self.control.is_closed()
    }

    fn end(&mut self, ending: Ending) -> Option<(ServiceStats, Result<(), Error>)> {
        let thread = self.scanner.take()?;
        self.control.order(Command::Stop(ending));
        let end = thread.join().ok();
        self.end_helpers();
        self.line.end();
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        end
    }

    /// To be called when the scanning thread has ended, however it did: whatever is packed then comes back, now or later.
    fn end_helpers(&mut self) {
        self.breaker.end();
        if let Some(faults) = self.faults.take() {
            let _ = faults.join();
        }
        if let Some(packer) = &self.packer {
            packer.end();
        }
        // Else it goes on alone.
        let ends = |rebuilds: &mut Rebuilds| lock(&rebuilds.alone).recv().is_err();
        if let Some(rebuilds) = self.rebuilds.take_if(ends) {
            let _ = rebuilds.thread.join();
        }
    }
}

impl Drop for DedupService {
    fn drop(&mut self) {
        self.end(Ending::StayShared);
        if let Some(rebuilds) = self.rebuilds.take() {
            let _ = rebuilds.thread.join();
        }
    }
}

/// Says that nobody answers any more, however the scanning thread ends.
struct Closes(Arc<Control>);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The scanning thread.
fn scan(mut pass: Pass) -> (ServiceStats, Result<(), Error>) {
    let control = pass.control.clone();
    let _closes = Closes(control.clone());
    pass.enter_thread();
    let (mut began, mut standing_by) = (None, false);
    loop {
        // Those that came while an answer of the store was waited for are not in its socket any more.
        if pass.has_questions() {
            pass.try_answer_questions();
        }
        late_log::tell();
        let store = pass.session.store().map(Store::socket);
        match control.next(began, standing_by, store) {
            Event::Question => pass.try_answer_questions(),
            Event::Command(Command::Unmerge(tell)) => {
                match (pass.unmerge_on_request(), tell) {
                    // Its turn comes again behind those that wait.
                    (None, tell) => control.order(Command::Unmerge(tell)),
                    (Some(done), Some(tell)) => _ = tell.send(done),
                    (Some(_), None) => {}
                }
            }
            Event::Command(Command::Change(change, range, tell)) => {
                let done = pass.change(change, range);
                // Whoever waits finds it in the account.
                pass.fill_stats();
                control.publish(&pass.account.stats);
                let _ = tell.send(done);
            }
            Event::Command(Command::DirectIo(tell)) => {
                let _ = tell.send(pass.direct_io.look());
            }
            Event::Command(Command::HiddenPins(tell)) => {
                pass.heed_pins();
                let _ = tell.send(Ok(()));
            }
            Event::Command(Command::Rest(tell)) => {
                let _ = tell.send(());
            }
            Event::Command(Command::Stop(ending)) => {
                let end = pass.finish(ending);
                control.publish(&pass.account.stats);
                late_log::tell();
                return (pass.account.stats, end);
            }
            Event::Command(Command::Pass(tell)) => {
                began = Some(Instant::now());
                if control.stands_by() {
                    pass.standby_pass();
                } else {
                    pass.run();
                }
                let _ = tell.send(pass.account.stats);
            }
            Event::Due => {
                (began, standing_by) = (Some(Instant::now()), control.stands_by());
                if standing_by {
                    pass.standby_pass();
                } else {
                    pass.run();
                }
            }
        }
    }
}
