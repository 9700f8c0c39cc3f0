//! Everything that a supervisor and its services do, in one process whose dedup threads are recorded and filtered: each part is
//! under exactly its own filter, and is killed by any other call. Prints what was seen, and what told the use of huge pages, as
//! JSON. `sandbox old` is a host without clone3 and /dev/userfaultfd, in `sandbox panic PART` such a thread panics. `sandbox record ...`
//! does not filter.
#![allow(unsafe_code)] // guest memory

use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::seccomp::{Part, restrict_this_thread};
use vmm_dedup::{
    AgentSocket, Breaks, Config, DedupService, HostRange, Injection, Lease, Options, Policy, Refused,
    Settings, Setup, Status, Supervisor, Switch, Times, UseSource,
};
use vmm_dedup_agent_wire::VERSION;
use vmm_dedup_agent_wire::message::{Hello, Message, Sources};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::seccomp::{Recorder, Seen};
use vmm_dedup_integration_tests::store::StoreThread;

/// Enough for huge pages, and for batches.
const PAGES: usize = 1024;
const PATIENCE: Duration = Duration::from_secs(60);

/// What is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Play {
    All,
    Old,
    Panic(Part),
}

impl Play {
    fn of(arguments: &[&str]) -> Option<Self> {
        match *arguments {
            [] => Some(Self::All),
            ["old"] => Some(Self::Old),
            ["panic", name] => {
                let part = Part::ALL.iter().find(|part| part.name() == name);
                part.copied().map(Self::Panic)
            }
            _ => None,
        }
    }

    fn recorder(self) -> Recorder {
        match self {
            Self::Old => Recorder::on_an_old_host(),
            _ => Recorder::new(),
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (filtered, arguments) = match arguments.split_first() {
        Some((&"record", rest)) => (false, rest),
        _ => (true, &arguments[..]),
    };
    let play = Play::of(arguments).expect("sandbox [record] [old | panic PART]");
    let folder = tempfile::tempdir().expect("a folder");
    if let Err(reason) = stand_in_for_the_kernel(folder.path()) {
        eprintln!("no stand-in for what tells of use: {reason}");
    }
    let recorder = play.recorder();
    let theirs = recorder.clone();
    let each = move |part: Part| {
        // The others have it from this one.
        if part == Part::Supervisor {
            theirs.record_this_thread();
        }
        if filtered {
            restrict_this_thread(part).expect("a filter");
        }
        if play == Play::Panic(part) {
            // As where the engine panics: the thread goes on to an end of its own.
            let _ = std::panic::catch_unwind(|| panic!("{part:?} has a bug"));
        }
    };
    let supervisor = Supervisor::spawn(Options {
        vouch_for_pins: true,
        each: Some(Arc::new(each)),
        may_be_filtered: true,
        ..Options::default()
    })
    .expect("it starts");
    let mut guest = Guest {
        supervisor: Arc::new(supervisor),
        store: StoreThread::start(),
        round: 0,
        disks: disks_on_overlay(folder.path()),
    };
    let sources = match play {
        Play::All => guest.plays_all(),
        Play::Old => {
            guest.lives(Breaks::managed(64, 0));
            Vec::new()
        }
        Play::Panic(part) => {
            guest.reaches(part);
            Vec::new()
        }
    };
    let mut seen = Vec::new();
    if play == Play::All {
        seen.extend(guest.lacks_memory());
        seen.extend(guest.is_called(filtered));
    }
    if matches!(play, Play::All | Play::Old) {
        seen.extend(guest.serves_without_a_supervisor(play, filtered));
    }
    // The supervisor ends as well.
    drop(guest);
    seen.extend(recorder.seen());
    let list: Vec<_> = seen
        .into_iter()
        .map(|seen| serde_json::json!([seen.thread, seen.call, seen.request]))
        .collect();
    println!("{}", serde_json::json!([list, sources]));
    unmount(folder.path());
    drop(folder);
    // Threads that rest for ever may not even end.
    std::process::exit(0);
}

/// Puts files in the place of DAMON's and of the bitmap of idle pages, which few kernels have, or have free: what is written there
/// changes nothing, and is read again. So no memory is ever used.
fn stand_in_for_the_kernel(folder: &Path) -> std::io::Result<()> {
    use rustix::mount::{
        MountFlags, MountPropagationFlags, mount, mount_bind, mount_bind_recursive, mount_change,
    };
    use std::fs::{create_dir_all, write};
    const MM: &str = "/sys/kernel/mm";
    // SAFETY: there is no other thread yet.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("tmpfs", folder, "tmpfs", MountFlags::empty(), None)?;
    // Everything else stays as it is.
    let entries = std::fs::read_dir(MM)?.flatten();
    let is_other =
        |name: &std::ffi::OsStr| !["damon", "page_idle"].iter().any(|stands_in| name == *stands_in);
    for entry in entries.filter(|entry| is_other(&entry.file_name()) && entry.path().is_dir()) {
        let place = folder.join(entry.file_name());
        create_dir_all(&place)?;
        mount_bind(entry.path(), &place)?;
    }
    create_dir_all(folder.join("page_idle"))?;
    write(folder.join("page_idle/bitmap"), "")?;
    let damon = folder.join("damon/admin/kdamonds");
    let context = damon.join("0/contexts/0");
    for name in ["intervals", "nr_regions"] {
        create_dir_all(context.join("monitoring_attrs").join(name))?;
    }
    create_dir_all(context.join("targets/0/regions/0"))?;
    for name in ["sz", "nr_accesses", "age"] {
        create_dir_all(context.join("schemes/0/access_pattern").join(name))?;
    }
    let region = context.join("schemes/0/tried_regions/0");
    create_dir_all(&region)?;
    for (name, number) in [("start", 0), ("end", u64::MAX >> 1), ("nr_accesses", 1)] {
        write(region.join(name), number.to_string())?;
    }
    write(damon.join("0/pid"), std::process::id().to_string())?;
    write(damon.join("nr_kdamonds"), "0")?;
    Ok(mount_bind_recursive(folder, MM)?)
}

/// Mounts an overlayfs, where the kernel has that and lets us.
fn disks_on_overlay(folder: &Path) -> Option<PathBuf> {
    use rustix::mount::{MountFlags, mount};
    let [lower, upper, work, disks] = ["lower", "upper", "work", "disks"].map(|name| folder.join(name));
    for place in [&lower, &upper, &work, &disks] {
        std::fs::create_dir(place).ok()?;
    }
    let layers = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.display(),
        upper.display(),
        work.display()
    );
    let layers = std::ffi::CString::new(layers).ok()?;
    mount(
        "overlay",
        &disks,
        "overlay",
        MountFlags::empty(),
        Some(layers.as_c_str()),
    )
    .ok()?;
    Some(disks)
}

fn unmount(folder: &Path) {
    for place in [Path::new("/sys/kernel/mm"), &folder.join("disks"), folder] {
        let _ = rustix::mount::unmount(place, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Does something in a thread that is recorded and, if wanted, filtered as a part of the engine; what was seen of it. The thread
/// never ends, since ending is the VMM's own business.
fn recorded(
    recorder: Recorder,
    part: Part,
    filtered: bool,
    work: impl FnOnce() + Send + 'static,
) -> Vec<Seen> {
    let (theirs, done) = (recorder.clone(), Arc::new(AtomicBool::new(false)));
    let tell = done.clone();
    let thread = std::thread::Builder::new().name(part.name().into());
    let thread = thread.spawn(move || {
        theirs.record_this_thread();
        if filtered {
            restrict_this_thread(part).expect("a filter");
        }
        theirs.forget();
        work();
        tell.store(true, Ordering::Release);
        loop {
            std::thread::park();
        }
    });
    thread.expect("a thread");
    let start = Instant::now();
    while !done.load(Ordering::Acquire) {
        assert!(start.elapsed() < PATIENCE, "{part:?} does not come to its end");
        std::thread::sleep(Duration::from_millis(1));
    }
    recorder.seen().into_iter().collect()
}

struct Guest {
    supervisor: Arc<Supervisor>,
    store: StoreThread,
    round: u64,
    /// Where files for direct I/O are, if not beside the store: on an overlayfs.
    disks: Option<PathBuf>,
}

/// One half is a copy of the other.
fn twins() -> Pages {
    let pages = Pages::map(PAGES);
    fill(&pages);
    pages
}

fn fill(pages: &Pages) {
    (0..PAGES).for_each(|page| pages.fill(page, (page % (PAGES / 2)) as u64 + 1));
}

fn range(pages: &Pages, first: usize, count: usize) -> HostRange {
    HostRange::try_new(pages.address(first), count * 4096).expect("aligned")
}

impl Guest {
    /// All that can happen; what told the use of huge pages, and what else was there.
    fn plays_all(&mut self) -> Vec<String> {
        for heal_without_fork in [true, false] {
            self.lives(Breaks::Kernel {
                heal_stall_us: 1_000_000,
                heal_without_fork,
            });
        }
        self.lives(Breaks::managed(64, 0));
        let sources = [UseSource::FaultSampling, UseSource::Damon, UseSource::PageIdle];
        let sources = sources.map(|source| self.uses_huge_pages(source));
        self.packs();
        self.loses_its_store();
        self.has_an_agent();
        self.has_a_disk();
        self.is_refused();
        let overlay = self.disks.as_ref().map(|_| "overlay".to_owned());
        sources.into_iter().chain(overlay).collect()
    }

    /// What has this thread of the engine.
    fn reaches(&mut self, part: Part) {
        match part {
            Part::Pack => self.packs(),
            Part::Damon => _ = self.uses_huge_pages(UseSource::Damon),
            Part::Agent => self.has_an_agent(),
            Part::Refused => self.is_refused(),
            _ => self.lives(Breaks::managed(64, 0)),
        }
    }

    fn attach(&mut self, config: Config) {
        let setup = self.setup(config);
        self.supervisor.attach(setup).expect("it fits");
    }

    fn setup(&mut self, config: Config) -> Setup {
        self.round += 1;
        let config = Config {
            name: format!("guest-{}", self.round),
            cpu_percent: 100,
            pass_period_ms: 10,
            ..config
        };
        Setup {
            config,
            ..Setup::new(self.store.socket())
        }
    }

    fn add(&self, range: HostRange) {
        // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
        unsafe { self.supervisor.add_range(range) };
    }

    fn wait(&self, what: &str, done: impl Fn(&vmm_dedup::ServiceStats) -> bool) {
        self.wait_for(what, || self.supervisor.stats().is_some_and(|stats| done(&stats)));
    }

    fn wait_for(&self, what: &str, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(
                start.elapsed() < PATIENCE,
                "{what} does not happen: {:?} {:?}",
                self.supervisor.status(),
                self.supervisor.stats()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn shares(&self) {
        self.wait("sharing", |s| s.pages_mapped > PAGES as u64 / 4);
    }

    /// Pages without twins are packed, touched, given up, and brought back.
    fn packs(&mut self) {
        let pages = Pages::map(PAGES);
        (0..PAGES).for_each(|page| pages.store(page, 7, page as u64 + 1));
        self.attach(Config {
            pack: vmm_dedup::Pack {
                on: true,
                idle_ms: 20,
            },
            ..Config::default()
        });
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        let packed = |s: &vmm_dedup::ServiceStats| s.packing.pages > PAGES as u64 / 2;
        self.wait("packing", packed);
        assert!((0..PAGES / 4).all(|page| pages.load(page, 7) == page as u64 + 1));
        // SAFETY: the pages' content is not needed any more.
        unsafe {
            self.supervisor
                .discarder()
                .discard(pages.address(0), PAGES / 2 * 4096)
        }
        .expect("it is discarded");
        assert!((0..PAGES / 2).all(|page| pages.load(page, 7) == 0));
        (0..PAGES / 2).for_each(|page| pages.store(page, 7, page as u64 + 1));
        self.wait("packing again", packed);
        self.supervisor.detach(true).expect("it ends");
        assert!((0..PAGES).all(|page| pages.load(page, 7) == page as u64 + 1));
    }

    /// A VM from its start to its end, through all that can happen to its memory.
    fn lives(&mut self, breaks: Breaks) {
        let (pages, more) = (twins(), twins());
        self.attach(Config {
            breaks,
            ..Config::default()
        });
        let supervisor = &self.supervisor;
        self.add(range(&pages, 0, PAGES));
        supervisor.start().expect("it starts");
        self.shares();
        self.breaks(&pages, breaks);
        // Memory comes, is given up, and goes.
        self.add(range(&more, 0, PAGES));
        self.wait("growing", |s| {
            s.pages == 2 * PAGES as u64 && s.pages_mapped > PAGES as u64
        });
        let discarder = supervisor.discarder();
        // SAFETY: what it held is not needed any more.
        unsafe { discarder.discard(pages.address(0), PAGES / 8 * 4096) }.expect("it is freed");
        assert!((0..PAGES / 8).all(|page| pages.load(page, 3) == 0));
        supervisor
            .remove_range(range(&more, 0, PAGES).addresses())
            .expect("it goes");
        // Others use it for a while.
        let all = range(&pages, 0, PAGES).addresses();
        supervisor
            .lend(all.clone(), Lease::UntilTakenBack)
            .expect("it is lent");
        supervisor.take_back(all);
        supervisor.pin().expect("it is given back");
        assert_eq!(supervisor.stats().map(|s| s.pages_mapped), Some(0));
        supervisor.unpin();
        self.shares();
        // An operator, and an administrator.
        supervisor.pause();
        supervisor.resume();
        let switch = |switch| Settings {
            switch: Some(switch),
            ..Settings::default()
        };
        supervisor.set(switch(Switch::OffUnmerge)).expect("it is off");
        supervisor.set(switch(Switch::On)).expect("it is on");
        let explained = supervisor.with_service(|service| service.map(|s| s.explain(None).is_ok()));
        assert_eq!(explained, Some(Some(true)));
        let direct = self.disk();
        let _ = supervisor.direct_io_opened();
        std::thread::sleep(Duration::from_millis(200));
        drop(direct);
        let passes = supervisor.stats().map_or(0, |s| s.passes_total);
        self.wait("two passes", |s| s.passes_total > passes + 1);
        supervisor.detach(true).expect("it ends");
    }

    /// A disk that is open for direct I/O, if its file system has that.
    fn disk(&self) -> std::io::Result<std::fs::File> {
        let beside = self.store.path();
        let file = self.disks.as_deref().unwrap_or(beside).join("disk");
        std::fs::write(&file, [0; 4096])?;
        let options = std::fs::File::options();
        options
            .clone()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(&file)
    }

    /// A service starts beside a disk.
    fn has_a_disk(&mut self) {
        let (pages, direct) = (twins(), self.disk());
        self.attach(Config::default());
        self.add(range(&pages, 0, PAGES));
        // On a file system that is not known it waits.
        let _ = self.supervisor.start();
        drop(direct);
        self.supervisor.detach(true).expect("it ends");
    }

    /// Writes break, and are merged again. What the kernel copied is healed, on any host where no fork is needed; where one is, a
    /// filtered service says that it can not.
    fn breaks(&self, pages: &Pages, breaks: Breaks) {
        let explain = |service: Option<&DedupService>| service.and_then(|s| s.explain(None).ok());
        let says_why_not = || {
            let explained = self.supervisor.with_service(explain).flatten();
            explained
                .is_some_and(|(explanation, note)| explanation.heals == 0 && note.contains("no fork tells"))
        };
        let stats = || self.supervisor.stats().unwrap_or_default();
        let done = || match breaks {
            Breaks::Kernel {
                heal_without_fork, ..
            } => stats().heals_total > 0 || !heal_without_fork && says_why_not(),
            _ => stats().breaks_managed_total > 0,
        };
        // Copies may leave the store's mappings before they are looked at (which follow when slots move). They are merged as any
        // other page then, and others are written.
        let start = Instant::now();
        let mut firsts = (0..8).cycle();
        while !done() {
            assert!(start.elapsed() < PATIENCE, "nothing is healed: {:?}", stats());
            let (first, before) = (firsts.next().unwrap_or(0), stats().breaks_total());
            for page in (first..PAGES / 2).step_by(8) {
                pages.store(page, 0, 1);
                pages.fill(page, page as u64 + 1);
            }
            self.wait("a break", |s| s.breaks_total() > before);
            let written = Instant::now();
            while !done() && written.elapsed() < Duration::from_secs(2) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Huge pages are watched, split and built again. Returns what told of their use.
    fn uses_huge_pages(&mut self, use_source: UseSource) -> String {
        let pages = Pages::map_huge(PAGES);
        fill(&pages);
        self.attach(Config {
            huge_policy: Policy::Smartmd,
            use_source,
            sampling: vmm_dedup::Sampling {
                interval_ms: 50,
                window_us: 1000,
            },
            ..Config::default()
        });
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.shares();
        let (start, split) = (
            Instant::now(),
            self.supervisor.stats().map_or(0, |s| s.huge_split),
        );
        // Use brings them back, where a stand-in does not tell of none.
        while use_source == UseSource::FaultSampling && start.elapsed() < Duration::from_secs(3) {
            (0..PAGES).step_by(3).for_each(|page| {
                let _ = pages.load(page, 1);
            });
            if self.supervisor.stats().is_some_and(|s| s.huge_rebuilt_total > 0) || split == 0 {
                break;
            }
        }
        let told = self.supervisor.stats().map(|s| s.use_source_name().to_owned());
        self.supervisor.detach(false).expect("it ends");
        told.expect("it is served")
    }

    /// The store goes and comes back.
    fn loses_its_store(&mut self) {
        let pages = twins();
        self.attach(Config::default());
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.shares();
        let elsewhere = StoreThread::start();
        let store = std::mem::replace(&mut self.store, elsewhere);
        self.store = store.restart();
        (0..PAGES).for_each(|page| pages.store(page, 7, 7));
        self.wait("another store", |s| s.pages_mapped > PAGES as u64 / 4);
        self.supervisor.detach(true).expect("it ends");
    }

    /// An agent comes to a socket in whose place an earlier service has left one, and goes.
    fn has_an_agent(&mut self) {
        let (pages, folder) = (twins(), tempfile::tempdir().expect("a folder"));
        let agent = AgentSocket::Hybrid(folder.path().join("vm.vsock"));
        let socket = agent.service_socket().expect("it is a Unix socket");
        drop(UnixListener::bind(&socket).expect("it is made"));
        let setup = Setup {
            agent: Some(agent),
            ..self.setup(Config::default())
        };
        self.supervisor.attach(setup).expect("it fits");
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.wait_for("listening", || UnixStream::connect(&socket).is_ok());
        let mut stream = UnixStream::connect(&socket).expect("it listens");
        let mut hello = Vec::new();
        Message::Hello(Hello {
            lowest: VERSION,
            highest: VERSION,
            sources: Sources::default(),
            boot: [7; 16],
            run: 1,
            blocks: 1 << 20,
        })
        .encode(0, &mut hello);
        stream.write_all(&hello).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let answer = stream.read(&mut [0; 64]).expect("it answers");
        assert!(answer > 0, "it goes on listening");
        drop(stream);
        self.shares();
        self.supervisor.detach(true).expect("it ends");
        assert!(!socket.exists());
    }

    /// Memory that cannot be shared, then a VM that must not be.
    fn is_refused(&mut self) {
        let pages = twins();
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4096).expect("it grows");
        // SAFETY: a new mapping, never unmapped.
        let shared = unsafe {
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            libc::mmap(std::ptr::null_mut(), 4096, prot, flags, fd, 0)
        };
        self.attach(Config::default());
        self.add(HostRange::try_new(shared as usize, 4096).expect("aligned"));
        self.wait_for("the refusal", || {
            matches!(self.supervisor.status(), Status::Waiting(_))
        });
        self.add(range(&pages, 0, PAGES));
        self.shares();
        let refusal = vmm_dedup::refusal::confidential();
        self.supervisor.refuse(refusal.clone()).expect("it is given back");
        assert_eq!(self.supervisor.status(), Status::Refused(refusal));
        std::thread::sleep(Duration::from_millis(100));
        self.supervisor.detach(false).expect("it ends");
        let nowhere = Setup::new("/nonexistent/store.sock");
        self.supervisor.attach(nowhere).expect("it fits");
        self.add(range(&twins(), 0, PAGES));
        assert!(self.supervisor.start().is_err());
        self.supervisor.detach(false).expect("it ends");
    }

    /// What a thread of the VMM's does that only calls, whose memory the allocator has.
    fn is_called(&mut self, filtered: bool) -> Vec<Seen> {
        let pages = twins();
        self.attach(Config::default());
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.shares();
        let (supervisor, discarder) = (self.supervisor.clone(), self.supervisor.discarder());
        let (all, at) = (range(&pages, 0, PAGES).addresses(), pages.address(0));
        let (next, new) = (self.setup(Config::default()), twins());
        let [ours, protected] = [0, PAGES / 2].map(|first| range(&new, first, PAGES / 2));
        let confidential = vmm_dedup::refusal::confidential();
        recorded(Recorder::new(), Part::Call, filtered, move || {
            // SAFETY: what it held is not needed any more.
            unsafe { discarder.discard(at, PAGES / 2 * 4096) }.expect("it is freed");
            supervisor.pause();
            supervisor.resume();
            supervisor
                .lend(all.clone(), Lease::UntilTakenBack)
                .expect("it is lent");
            supervisor.take_back(all);
            supervisor.pin().expect("it is given back");
            supervisor.unpin();
            supervisor.direct_io_opened().expect("it looks");
            assert_ne!(supervisor.status(), Status::Detached);
            supervisor.detach(true).expect("it ends");
            // The next VM.
            supervisor.attach(next).expect("it fits");
            for range in [ours, protected] {
                // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
                unsafe { supervisor.add_range(range) };
            }
            supervisor.start().expect("it starts");
            let settings = Settings {
                switch: Some(Switch::On),
                ..Settings::default()
            };
            supervisor.set(settings).expect("it is on");
            supervisor.pass().expect("a pass");
            assert!(supervisor.stats().is_some());
            supervisor
                .leave_alone(protected.addresses(), confidential.clone())
                .expect("it is given back");
            supervisor.remove_range(protected.addresses()).expect("it goes");
            drop(supervisor.pinned().expect("it is given back"));
            supervisor.pin_while(|| false).expect("it is given back");
            // As the kernel is, it is refused or not.
            let _ = supervisor.nested_guests();
            supervisor.refuse(confidential).expect("it is given back");
            supervisor.detach(false).expect("it ends");
        })
    }

    /// What a thread of the VMM's does that frees memory where the kernel lacks some: twice it leaves a hole. The test makes that by a
    /// call of its own (munmap), so this thread is not filtered, and nothing is seen of that.
    fn lacks_memory(&mut self) -> Vec<Seen> {
        let pages = twins();
        self.attach(Config::default());
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.shares();
        self.supervisor.pause();
        let (discarder, at) = (self.supervisor.discarder(), pages.address(0));
        let mut seen = recorded(Recorder::new(), Part::Call, false, move || {
            let lack = Injection::leaving_holes(vmm_dedup::Call::MapAnonymous, libc::ENOMEM, Times::First(2));
            // SAFETY: what it held is not needed any more.
            unsafe { discarder.discard(at, PAGES / 2 * 4096) }.expect("it is freed");
            assert_eq!(lack.failed(), 2);
        });
        assert!((0..PAGES / 2).all(|page| pages.load(page, 3) == 0));
        seen.retain(|seen| seen.call != libc::SYS_munmap);
        self.supervisor.detach(true).expect("it ends");
        seen
    }

    /// A VMM that starts services itself.
    fn serves_without_a_supervisor(&mut self, play: Play, filtered: bool) -> Vec<Seen> {
        let (store, pages, disk) = (self.store.socket(), twins(), self.disk());
        let all = range(&pages, 0, PAGES);
        let mut seen = recorded(play.recorder(), Part::Start, filtered, move || {
            for use_source in [UseSource::Damon, UseSource::PageIdle] {
                let config = Config {
                    name: "alone".into(),
                    breaks: Breaks::managed(64, 0),
                    huge_policy: Policy::Smartmd,
                    use_source,
                    ..Config::default()
                };
                // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
                let service = unsafe { DedupService::start_on_ranges(&[all], &store, config) };
                let service = service.expect("it starts");
                service.pass().expect("a pass");
                service.pass().expect("another one");
                service.stop(true).expect("it ends");
            }
        });
        drop(disk);
        let store = self.store.socket();
        seen.extend(recorded(play.recorder(), Part::Announce, filtered, move || {
            let refusal = vmm_dedup::refusal::confidential();
            drop(Refused::announce(&store, "refused", 1, &refusal).expect("it is told"));
        }));
        seen
    }
}
