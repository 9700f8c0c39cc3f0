//! What happens to a VM.

use crate::guest::{CID, Guest, PAGES, PATIENCE, VSOCK, fill, range, twins};
use crate::other::Other;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};
use vmm_dedup::seccomp::Part;
use vmm_dedup::{
    AgentSocket, Breaks, Config, HostRange, Lease, Policy, Served, Settings, Setup, Status, Switch, UseSource,
};
use vmm_dedup_agent_wire::VERSION;
use vmm_dedup_agent_wire::message::{Hello, Message, Sources};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_protocol::observer::Observer;

impl Guest {
    /// All that can happen; what told the use of huge pages, and what else was there.
    pub(crate) fn plays_all(&mut self) -> Vec<String> {
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
        self.has_an_agent_by_vsock();
        self.has_a_disk();
        self.heals_beside_others();
        self.is_refused();
        let overlay = self.disks.as_ref().map(|_| "overlay".to_owned());
        sources.into_iter().chain(overlay).collect()
    }

    /// What has this thread of the engine.
    pub(crate) fn reaches(&mut self, part: Part) {
        match part {
            Part::Pack => self.packs(),
            Part::Damon => _ = self.uses_huge_pages(UseSource::Damon),
            Part::Agent => self.has_an_agent(),
            Part::Refused => self.is_refused(),
            _ => self.lives(Breaks::managed(64, 0)),
        }
    }

    /// A VM from its start to its end, through all that can happen to its memory.
    pub(crate) fn lives(&mut self, breaks: Breaks) {
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

    /// Writes break, and are merged again. What the kernel copied is healed, on any host where no fork is needed; where one is, a
    /// filtered service says that it can not.
    fn breaks(&self, pages: &Pages, breaks: Breaks) {
        let explain = |service: Option<Served<'_>>| service.and_then(|s| s.explain(None).ok());
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

    /// A VM whose pages have no twins, most of which are packed.
    pub(crate) fn packed(&mut self) -> Pages {
        let pages = Pages::map(PAGES);
        (0..PAGES).for_each(|page| pages.store(page, 7, page as u64 + 1));
        self.attach(Config {
            pack: vmm_dedup::Pack {
                on: true,
                idle_ms: 20,
                ..vmm_dedup::Pack::default()
            },
            ..Config::default()
        });
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.waits_for_packing();
        pages
    }

    fn waits_for_packing(&self) {
        self.wait("packing", |s| s.packing.pages > PAGES as u64 / 2);
    }

    /// Pages without twins are packed, touched, given up, and brought back.
    fn packs(&mut self) {
        let pages = self.packed();
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
        self.waits_for_packing();
        self.supervisor.detach(true).expect("it ends");
        assert!((0..PAGES).all(|page| pages.load(page, 7) == page as u64 + 1));
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
        // What is mapped of the store that has gone counts as well: the new one is asked who shares there.
        self.wait_for("another store", || {
            let account = Observer::connect(&self.store.socket()).and_then(|mut o| o.stats());
            account.is_ok_and(|(store, vms)| store.pages_shared > 0 && vms.len() == 1)
        });
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
        self.talks_to_an_agent(&socket);
        self.shares();
        self.supervisor.detach(true).expect("it ends");
        assert!(!socket.exists());
    }

    /// An agent comes by vsock, as it does to this host by the recorder.
    fn has_an_agent_by_vsock(&mut self) {
        let (pages, socket) = (twins(), self.folder.join(VSOCK));
        let setup = Setup {
            agent: Some(AgentSocket::Vhost(CID)),
            ..self.setup(Config::default())
        };
        self.supervisor.attach(setup).expect("it fits");
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.talks_to_an_agent(&socket);
        self.supervisor.detach(true).expect("it ends");
    }

    /// Until it was answered.
    fn talks_to_an_agent(&self, socket: &Path) {
        self.wait_for("listening", || UnixStream::connect(socket).is_ok());
        let mut stream = UnixStream::connect(socket).expect("it listens");
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
        let answer = loop {
            match stream.read(&mut [0; 64]) {
                // This program was stopped meanwhile.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                answer => break answer.expect("it answers"),
            }
        };
        assert!(answer > 0, "it goes on listening");
        drop(stream);
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

    /// Another process has pages pinned, so the kernel's count tells nothing of this one: each of its open files is looked at before
    /// what was copied is merged again, and what lies below the disk.
    fn heals_beside_others(&mut self) {
        let (pages, other, disk) = (twins(), Other::start(), self.disk_with(0));
        let breaks = Breaks::Kernel {
            heal_stall_us: 1_000_000,
            heal_without_fork: true,
        };
        self.attach(Config {
            breaks,
            ..Config::default()
        });
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.shares();
        self.breaks(&pages, breaks);
        self.supervisor.detach(true).expect("it ends");
        drop((disk, other));
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
}
