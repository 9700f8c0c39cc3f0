//! What a guest's agent says, and what the service makes of it: a real socket, a real store, memory of this process.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vmm_dedup::{AgentSocket, Breaks, Config, DedupService, Policy, ServiceStats, UseSource};
use vmm_dedup_agent_wire::message::{Mark, Sources};
use vmm_dedup_agent_wire::said::{Kind, Said, Temperature};
use vmm_dedup_integration_tests::agent::Agent;
use vmm_dedup_integration_tests::huge::HUGE_PAGES;
use vmm_dedup_integration_tests::huge_pages_or_skip;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;

const PATIENCE: Duration = Duration::from_secs(20);
/// Where the guest sees its memory.
const GUEST: u64 = 0x4000_0000;

/// Works by passes alone.
fn config() -> Config {
    Config {
        cpu_percent: 100,
        pass_period_ms: 3_600_000,
        ..Config::default()
    }
}

/// A VM whose service listens to an agent.
struct Vm {
    pages: Pages,
    service: DedupService,
    folder: TempDir,
}

impl Vm {
    /// With pages that hold these numbers.
    fn start(store: &StoreThread, count: usize, id: impl Fn(usize) -> u64) -> Self {
        let pages = Pages::map(count);
        (0..count).for_each(|page| pages.fill(page, id(page)));
        Self::start_on(store, pages, config())
    }

    fn start_on(store: &StoreThread, pages: Pages, config: Config) -> Self {
        let mut service = pages
            .serve_at(&store.socket(), config, GUEST)
            .expect("dedup starts");
        let folder = tempfile::tempdir().expect("a folder");
        let at = AgentSocket::Hybrid(folder.path().join("vm.vsock"));
        service.listen_to_agent(at).expect("a thread");
        Self {
            pages,
            service,
            folder,
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("vm.vsock_9755")
    }

    fn connect(&self) -> UnixStream {
        let start = Instant::now();
        loop {
            match UnixStream::connect(self.socket()) {
                Ok(stream) => return stream,
                Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn agent(&self) -> Agent {
        self.agent_with(Sources::default())
    }

    fn agent_with(&self, sources: Sources) -> Agent {
        Agent::greet(self.connect(), sources, GUEST)
    }

    /// Lets the agent say something, of which the service knows before it looks at memory again.
    fn while_paused(&self, say: impl FnOnce(), what: &str, is: impl FnMut(&ServiceStats) -> bool) {
        self.service.pause();
        say();
        self.passes_until(what, is);
        self.service.resume();
    }

    fn pass(&self) -> ServiceStats {
        self.service.pass().expect("a pass")
    }

    fn passes_until(&self, what: &str, mut is: impl FnMut(&ServiceStats) -> bool) -> ServiceStats {
        let start = Instant::now();
        loop {
            let stats = self.pass();
            if is(&stats) {
                return stats;
            }
            assert!(start.elapsed() < PATIENCE, "no {what}: {stats:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The classes of some pages.
    fn class(&self, pages: Range<usize>, class: &str) -> u64 {
        let address = |page: usize| GUEST + page as u64 * 4096;
        let addresses = address(pages.start)..address(pages.end);
        let (explanation, _) = self.service.explain(Some(addresses)).expect("it answers");
        let classes = explanation.classes();
        classes
            .iter()
            .find(|(name, _)| *name == class)
            .expect("a class")
            .1
    }
}

/// How many of some pages are pages of a store's file.
fn of_store(pagemap: &File, pages: &Pages, range: Range<usize>) -> usize {
    // Documentation/admin-guide/mm/pagemap.rst: the page is present; it is a file's, or shared memory.
    const PRESENT: u64 = 1 << 63;
    const OF_FILE: u64 = 1 << 61;
    let mut words = vec![0; range.len() * 8];
    let first = pages.address(range.start) / 4096 * 8;
    pagemap
        .read_exact_at(&mut words, first as u64)
        .expect("the pages");
    let words = words
        .chunks(8)
        .map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes")));
    // All were touched: a private one is present.
    words.filter(|word| word & (PRESENT | OF_FILE) != PRESENT).count()
}

/// All pages but zero pages in the files of stores of this process.
fn in_stores() -> HashSet<Vec<u8>> {
    const AT_ONCE: usize = 1 << 20;
    let mut found = HashSet::new();
    let mut bytes = vec![0; AT_ONCE];
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("/proc is there");
    for entry in descriptors.flatten() {
        let name = std::fs::read_link(entry.path()).unwrap_or_default();
        let is_segment = name.to_string_lossy().starts_with("/memfd:vmm-dedup-segment");
        let Some(file) = is_segment.then(|| File::open(entry.path()).ok()).flatten() else {
            continue;
        };
        let mut at = 0;
        while let Ok(read @ 1..) = file.read_at(&mut bytes, at) {
            let pages = bytes[..read].chunks(4096);
            found.extend(
                pages
                    .filter(|page| page.iter().any(|byte| *byte != 0))
                    .map(<[u8]>::to_vec),
            );
            at += read as u64;
        }
    }
    found
}

fn bytes_of(pages: &Pages, page: usize) -> Vec<u8> {
    let words = (0..512).map(|word| pages.load(page, word));
    words.flat_map(u64::to_le_bytes).collect()
}

#[test]
fn free_frames_are_neither_keyed_nor_published_until_they_are_used() {
    need_userfaultfd!();
    const PAGES: usize = 1024;
    let store = StoreThread::start();
    // Each page twice.
    let vm = Vm::start(&store, PAGES, |page| page as u64 / 2 + 1);
    let mut agent = vm.agent();
    let say = || agent.say_of(0..512, Said::new(Kind::Free));
    vm.while_paused(say, "word of free frames", |stats| stats.hints.free == 512);
    assert_eq!(vm.pass().hints.agent_name(), "connected");
    let stats = vm.passes_until("sharing", |stats| stats.pages_mapped == 512);
    assert_eq!(
        (stats.published_total, stats.pages_keyed_total),
        (256, 512),
        "{stats:?}"
    );
    assert_eq!(
        (vm.class(0..512, "idle"), vm.class(512..1024, "shared")),
        (512, 512)
    );
    // The guest uses some of them: that is seen before the agent tells.
    (0..64).for_each(|page| vm.pages.fill(page, page as u64 / 2 + 1));
    let stats = vm.passes_until("sharing of what is used", |stats| stats.pages_mapped == 576);
    assert_eq!(stats.hints.wrong_total, 64);
    // Pieces of a file that were written are no free frames.
    agent.say_of(0..512, Said::new(Kind::FileClean));
    let stats = vm.passes_until("sharing of all", |stats| stats.pages_mapped == PAGES as u64);
    assert!(stats.hints.merges_total >= 448, "{stats:?}");
    (0..PAGES).for_each(|page| assert!(vm.pages.holds(page, page as u64 / 2 + 1)));
    // What is free now stays shared until the guest writes it.
    agent.say_of(0..1024, Said::new(Kind::Free));
    let stats = vm.passes_until("word of free frames", |stats| stats.hints.free == PAGES as u64);
    assert_eq!(stats.pages_mapped, PAGES as u64);
    drop(agent);
    vm.passes_until("the agent's end", |stats| stats.hints.agent_name() == "awaited");
    vm.service.stop(true).expect("it stops");
}

/// Pieces of files need not stand still from one visit to the next, and are merged before anything else is looked at.
#[test]
fn pieces_of_files_are_shared_by_the_first_pass_that_sees_them() {
    need_userfaultfd!();
    const PAGES: usize = 1024;
    let store = StoreThread::start();
    let vm = Vm::start(&store, PAGES, |page| page as u64 + 1);
    vm.passes_until("keys", |stats| stats.pages_unshared == PAGES as u64);
    let mut agent = vm.agent();
    agent.say_of(512..1024, Said::new(Kind::FileClean));
    vm.passes_until("word of files", |stats| stats.hints.file_clean == 512);
    let (_, note) = vm.service.explain(None).expect("it answers");
    assert_eq!(
        note,
        "pages by what the guest says: 512 worth sharing (files as on the disk, or marked)"
    );
    // Each page twice.
    let write = |pages: Range<usize>, round: u64| {
        pages.for_each(|page| vm.pages.fill(page, (round << 20) + page as u64 / 2));
    };
    write(0..PAGES, 1);
    let before = vm.service.stats().pages_keyed_total;
    let first = vm.pass();
    assert_eq!(
        (first.pages_mapped, first.pages_keyed_total - before),
        (512, 512),
        "{first:?}"
    );
    vm.passes_until("sharing of the rest", |stats| stats.pages_mapped == PAGES as u64);
    // What is written again and again is not as on the disk, whatever the agent says.
    (2..=4).for_each(|round| {
        write(512..1024, round);
        vm.pass();
    });
    assert!((512..1024).all(|page| vm.pages.holds(page, (4 << 20) + page as u64 / 2)));
    vm.service.stop(true).expect("it stops");
}

/// Another VM has all of it by the time that this one looks: all twins are found at once.
#[test]
fn pieces_of_files_are_merged_before_what_lies_in_front_of_them() {
    need_userfaultfd!();
    const OTHERS: usize = 12_288;
    const FILES: usize = 512;
    const PAGES: usize = OTHERS + FILES;
    let store = StoreThread::start();
    let pages = Pages::map(PAGES);
    (0..PAGES).for_each(|page| pages.fill(page, page as u64 + 1));
    // Slow enough to be watched.
    let slow = Config {
        cpu_percent: 5,
        ..config()
    };
    let vm = Vm::start_on(&store, pages, slow);
    let mut agent = vm.agent();
    agent.say_of(OTHERS..PAGES, Said::new(Kind::FileClean));
    vm.passes_until("word of files, and keys", |stats| {
        stats.hints.file_clean == FILES as u64 && stats.pages_unshared == PAGES as u64
    });
    let other = Vm::start(&store, PAGES, |page| page as u64 + 1);
    other.passes_until("publication", |stats| stats.pages_mapped == PAGES as u64);
    let pagemap = File::open("/proc/self/pagemap").expect("/proc is there");
    let others = std::thread::scope(|scope| {
        scope.spawn(|| vm.passes_until("sharing", |stats| stats.pages_mapped == PAGES as u64));
        let start = Instant::now();
        while of_store(&pagemap, &vm.pages, OTHERS..PAGES) < FILES {
            assert!(start.elapsed() < PATIENCE, "files are not shared");
            std::thread::sleep(Duration::from_millis(1));
        }
        of_store(&pagemap, &vm.pages, 0..OTHERS)
    });
    println!("{others} other pages were merged when all of the files were");
    assert!(others < OTHERS / 2, "{others}");
    for vm in [vm, other] {
        assert!((0..PAGES).all(|page| vm.pages.holds(page, page as u64 + 1)));
        vm.service.stop(true).expect("it stops");
    }
}

/// Files are read, and dropped some seconds later: what is shared by then, by the settings that there are.
#[test]
fn sharing_that_lasts_for_seconds_is_found_with_an_agent_and_without() {
    need_userfaultfd!();
    /// Of each file; 16 MiB.
    const PAGES: usize = 4096;
    /// With an agent or without.
    const FILES: [bool; 4] = [false, false, true, true];
    const LIVES: Duration = Duration::from_secs(15);
    let store = StoreThread::start();
    let start = || Vm::start_on(&store, Pages::map(FILES.len() * PAGES), Config::default());
    let guests = [start(), start()];
    let mut agents = Vec::new();
    for (file, with_agent) in FILES.into_iter().enumerate() {
        let pages = file * PAGES..(file + 1) * PAGES;
        if with_agent && agents.is_empty() {
            agents.extend(guests.iter().map(Vm::agent));
        }
        let merges = || -> u64 {
            guests
                .iter()
                .map(|guest| guest.service.stats().merges_total)
                .sum()
        };
        let before = merges();
        for guest in &guests {
            pages
                .clone()
                .for_each(|page| guest.pages.fill(page, page as u64 + 1));
        }
        for agent in &mut agents {
            agent.say_of(pages.clone(), Said::new(Kind::FileClean));
        }
        let (start, all) = (Instant::now(), 2 * PAGES as u64);
        while (merges() - before) * 10 < all * 6 {
            assert!(
                start.elapsed() < LIVES,
                "file {file}: {} of {all}",
                merges() - before
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        let seconds = start.elapsed().as_secs_f64();
        println!("six tenths of 16 MiB in two guests, agent {with_agent}: {seconds:.2} s");
    }
    for guest in guests {
        guest.service.stop(true).expect("it stops");
    }
}

#[test]
fn what_is_never_to_be_shared_is_broken_and_does_not_come_to_the_store() {
    need_userfaultfd!();
    const PAGES: usize = 1024;
    /// The other tests of this process have stores, too, but no such pages.
    const OURS: u64 = 5_000_000;
    const LATER: u64 = 7_000_000;
    let store = StoreThread::start();
    let vm = Vm::start(&store, PAGES, |page| OURS + page as u64 / 2);
    let mut agent = vm.agent();
    // Before it has been looked at.
    vm.service.pause();
    let serial = agent.mark(100..164, Mark::Never, true);
    agent.listen_for(&format!("Done {{ serial: {serial} }}"), || _ = vm.pass());
    vm.service.resume();
    vm.passes_until("sharing", |stats| stats.pages_mapped == PAGES as u64 - 64);
    let in_store = in_stores();
    assert!(in_store.contains(&bytes_of(&vm.pages, 99)));
    for page in 100..164 {
        assert!(!in_store.contains(&bytes_of(&vm.pages, page)), "page {page}");
    }
    assert_eq!(vm.class(100..164, "withheld"), 64);
    let keyed = vm.pass().pages_keyed_total;
    assert_eq!(keyed, PAGES as u64 - 64);
    // What is shared already. Not before it is done the guest hears that it is.
    let serial = agent.mark(512..600, Mark::Never, true);
    agent.listen_for(&format!("Done {{ serial: {serial} }}"), || _ = vm.pass());
    assert_eq!(
        (vm.class(512..600, "withheld"), vm.class(512..600, "shared")),
        (88, 0)
    );
    // A secret comes later, in several places.
    (520..530).for_each(|page| vm.pages.fill(page, LATER));
    (0..20).for_each(|_| _ = vm.pass());
    assert!(!in_stores().contains(&bytes_of(&vm.pages, 520)));
    assert_eq!(vm.class(512..600, "withheld"), 88);
    // Marks outlive the agent.
    drop(agent);
    vm.passes_until("the agent's end", |stats| stats.hints.agent_name() == "awaited");
    assert_eq!(vm.class(512..600, "withheld"), 88);
    // Another one lifts them.
    let mut agent = vm.agent();
    agent.mark(0..PAGES, Mark::Never, false);
    vm.passes_until("sharing of what was withheld", |stats| {
        stats.hints.never == 0 && stats.pages_mapped == PAGES as u64
    });
    (0..PAGES).for_each(|page| {
        let id = if (520..530).contains(&page) {
            LATER
        } else {
            OURS + page as u64 / 2
        };
        assert!(vm.pages.holds(page, id), "page {page}");
    });
    vm.service.stop(true).expect("it stops");
}

/// A small generator: the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end as u64).expect("below the end")
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).expect("a byte")
    }
}

#[test]
fn an_agent_that_sends_anything_costs_no_byte() {
    need_userfaultfd!();
    const PAGES: usize = 1024;
    let store = StoreThread::start();
    let vm = Vm::start(&store, PAGES, |page| page as u64 / 2 + 1);
    let mut random = Random(0x1234_5678_9abc_def1);
    // Lies about everything, while the guest writes.
    let mut agent = vm.agent();
    let mut written = vec![0; PAGES];
    for round in 1..=60 {
        let first = random.below(PAGES - 1);
        let range = first..first + 1 + random.below(PAGES - first);
        match random.below(3) {
            0 => {
                agent.mark(range, Mark::ALL[random.below(3)], random.below(2) == 0);
            }
            1 => agent.say_of(range, Said::from_bits(random.byte() % 6).unwrap_or(Said::UNKNOWN)),
            // Far beyond the guest's memory.
            _ => agent.say_of(1 << 30..(1 << 30) + 9, Said::new(Kind::Free)),
        }
        for _ in 0..20 {
            let page = random.below(PAGES);
            written[page] = round * 1024 + page as u64 % 97;
            vm.pages.fill(page, written[page] + 1);
        }
        vm.pass();
        agent.listen();
    }
    drop(agent);
    // Half messages, noise and floods, each until the service ends it or enough was sent.
    for round in 0..40 {
        let mut stream = vm.connect();
        let patience = Some(Duration::from_millis(20));
        stream.set_write_timeout(patience).expect("a timeout");
        let noise: Vec<u8> = (0..4096).map(|_| random.byte()).collect();
        let sent = match round % 4 {
            0 => stream.write_all(&noise[..3]),
            1 => stream.write_all(&noise),
            2 => (0..64).try_for_each(|_| stream.write_all(&noise)),
            _ => Ok(()),
        };
        // It may have been cut off, or not be let in.
        drop(sent);
        vm.pass();
    }
    vm.passes_until("refusals", |stats| {
        stats.hints.agents_refused_total > 0 && stats.hints.agents_cut_off_total > 0
    });
    for (page, written) in written.into_iter().enumerate() {
        let id = match written {
            0 => page as u64 / 2 + 1,
            id => id + 1,
        };
        assert!(vm.pages.holds(page, id), "page {page}");
    }
    let (socket, folder) = (vm.socket(), vm.folder);
    vm.service.stop(true).expect("it stops");
    assert!(!socket.exists(), "{folder:?}");
}

#[test]
fn a_service_without_a_socket_works_and_says_so() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(64);
    (0..64).for_each(|page| pages.fill(page, page as u64 / 2 + 1));
    let mut service = pages
        .serve_at(&store.socket(), config(), GUEST)
        .expect("dedup starts");
    assert_eq!(service.stats().hints.agent_name(), "off");
    let at = AgentSocket::Hybrid("/nonexistent/vm.vsock".into());
    service.listen_to_agent(at).expect("a thread");
    let start = Instant::now();
    loop {
        let stats = service.pass().expect("a pass");
        if stats.pages_mapped == 64 && stats.hints.agent_name() == "failed" {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{stats:?}");
    }
    service.stop(true).expect("it stops");
}

/// Pages of each 2 MiB that are kept private to sample its use.
const PROBES: usize = 4;

/// Works by passes alone, and judges the use of memory often.
fn smart(use_source: UseSource) -> Config {
    Config {
        huge_policy: Policy::Smartmd,
        use_source,
        sampling: vmm_dedup::Sampling {
            interval_ms: 50,
            window_us: 5000,
        },
        breaks: Breaks::managed(1024, 64 << 20),
        ..config()
    }
}

/// Huge pages in pairs of equal ones.
fn pairs(chunks: usize, first: u64) -> Pages {
    let pages = Pages::map_huge(chunks * HUGE_PAGES);
    (0..pages.count()).for_each(|page| pages.fill(page, pair_id(page, first)));
    pages
}

fn pair_id(page: usize, first: u64) -> u64 {
    first + (page / (2 * HUGE_PAGES) * HUGE_PAGES + page % HUGE_PAGES) as u64
}

/// Ends a thread, also when the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Runs `then` while a thread reads words all over some pages.
fn while_reading(pages: &Pages, range: Range<usize>, then: impl FnOnce()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 1_usize;
            while !done.load(Ordering::Acquire) {
                n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                std::hint::black_box(pages.load(range.start + (n >> 32) % range.len(), (n >> 20) % 512));
            }
        });
        let _end = End(&done);
        then();
    });
}

/// The agent calls hot what nobody reads, and cold what is read all the time: so it is seen whose word counts.
#[test]
fn the_agent_tells_which_huge_pages_are_kept_and_without_it_they_are_sampled_again() {
    need_userfaultfd!();
    const FIRST_PAIR: Range<usize> = 0..2 * HUGE_PAGES;
    const SECOND_PAIR: Range<usize> = 2 * HUGE_PAGES..4 * HUGE_PAGES;
    const SHARED: u64 = 2 * (HUGE_PAGES - PROBES) as u64;
    let store = StoreThread::start();
    let pages = pairs(4, 1);
    huge_pages_or_skip!(&pages);
    let vm = Vm::start_on(&store, pages, smart(UseSource::Agent));
    let is_kept = |kept: Range<usize>, split: Range<usize>| {
        (vm.class(kept, "huge"), vm.class(split, "shared")) == (2 * HUGE_PAGES as u64, SHARED)
    };
    while_reading(&vm.pages, SECOND_PAIR, || {
        let mut agent = vm.agent_with(Sources(Sources::FLAGS | Sources::IDLE));
        let note = || vm.service.explain(None).expect("it answers").1;
        // Who has not told everything might speak of another boot.
        vm.passes_until("word of the agent", |stats| {
            stats.hints.agent_name() == "connected"
        });
        let told = note();
        assert_eq!(vm.pass().use_source_name(), "fault-sampling");
        assert!(
            told.contains("not told by agent: the agent has not told"),
            "{told}"
        );
        agent.say_use(
            1,
            &[(FIRST_PAIR, Temperature::Hot), (SECOND_PAIR, Temperature::Cold)],
        );
        vm.passes_until("huge pages as the agent says", |stats| {
            stats.use_source_name() == "agent" && is_kept(FIRST_PAIR, SECOND_PAIR)
        });
        assert_eq!(note(), "");
        // So it stays for some intervals.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(300) {
            vm.pass();
        }
        assert!(is_kept(FIRST_PAIR, SECOND_PAIR), "{:?}", vm.pass());
        drop(agent);
        vm.passes_until("huge pages as they are used", |stats| {
            stats.use_source_name() == "fault-sampling" && is_kept(SECOND_PAIR, FIRST_PAIR)
        });
        let told = note();
        assert!(
            told.contains("not told by agent: no agent is connected"),
            "{told}"
        );
        // An agent without idle page tracking and DAMON tells nothing of use.
        let mut agent = vm.agent_with(Sources(Sources::FLAGS));
        agent.say_use(
            1,
            &[(FIRST_PAIR, Temperature::Hot), (SECOND_PAIR, Temperature::Cold)],
        );
        vm.passes_until("word of the agent", |stats| {
            stats.hints.anonymous == 4 * HUGE_PAGES as u64
        });
        assert_eq!(vm.pass().use_source_name(), "fault-sampling");
        let told = note();
        assert!(
            told.contains("not told by agent: the agent cannot see use"),
            "{told}"
        );
    });
    let pages = vm.pages;
    assert!((0..pages.count()).all(|page| pages.holds(page, pair_id(page, 1))));
    vm.service.stop(true).expect("it stops");
}

/// It says hot and cold in turns, while its guest writes, beside a VM whose agent does not lie.
#[test]
fn an_agent_that_lies_about_use_costs_its_own_vm_alone() {
    need_userfaultfd!();
    const OTHERS: u64 = 1 << 32;
    const SHARED: u64 = 4 * (HUGE_PAGES - PROBES) as u64;
    let store = StoreThread::start();
    let (pages, others) = (pairs(4, 1), pairs(4, OTHERS));
    huge_pages_or_skip!(&pages);
    huge_pages_or_skip!(&others);
    let liar = Vm::start_on(&store, pages, smart(UseSource::Agent));
    let other = Vm::start_on(&store, others, smart(UseSource::Agent));
    let mut honest = other.agent_with(Sources(Sources::IDLE));
    honest.say_use(1, &[(0..4 * HUGE_PAGES, Temperature::Cold)]);
    other.passes_until("sharing", |stats| stats.pages_mapped == SHARED);
    let before = other.pass();
    let mut agent = liar.agent_with(Sources(Sources::IDLE));
    agent.say_use(1, &[]);
    let mut random = Random(0x0fed_cba9_8765_4321);
    let mut written = vec![0; liar.pages.count()];
    let is_worked_up = |stats: &ServiceStats| stats.huge_splits_total >= 4 && stats.huge_rebuilt_total >= 2;
    let start = Instant::now();
    let mut round = 0;
    while !is_worked_up(&liar.pass()) {
        assert!(start.elapsed() < PATIENCE, "{:?}", liar.pass());
        round += 1;
        let temperature = if round / 16 % 2 == 0 {
            Temperature::Cold
        } else {
            Temperature::Hot
        };
        agent.say_of(
            0..4 * HUGE_PAGES,
            Said::new(Kind::Anonymous).with_temperature(temperature),
        );
        agent.listen();
        for _ in 0..4 {
            let page = random.below(written.len());
            written[page] = round;
            liar.pages.fill(page, (round << 20) + page as u64);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    for (page, round) in written.iter().enumerate() {
        let id = match round {
            0 => pair_id(page, 1),
            round => (round << 20) + page as u64,
        };
        assert!(liar.pages.holds(page, id), "page {page}");
    }
    let after = other.pass();
    assert_eq!(
        (
            after.pages_mapped,
            after.breaks_managed_total,
            after.huge_splits_total
        ),
        (SHARED, before.breaks_managed_total, before.huge_splits_total)
    );
    assert!((0..other.pages.count()).all(|page| other.pages.holds(page, pair_id(page, OTHERS))));
    liar.service.stop(true).expect("it stops");
    other.service.stop(true).expect("it stops");
}

/// The same block is read into the same place again: its key is withdrawn before it is told anew.
#[test]
fn what_is_read_again_has_no_twin_in_itself() {
    need_userfaultfd!();
    const PAGES: usize = 1024;
    let store = StoreThread::with_metrics();
    let pages = Pages::map(PAGES);
    (0..PAGES).for_each(|page| pages.fill(page, page as u64 + 1));
    let service = pages
        .serve_at(&store.socket(), config(), GUEST)
        .expect("dedup starts");
    let start = Instant::now();
    let pass = || service.pass().expect("a pass");
    while pass().pages_unshared < PAGES as u64 {
        assert!(start.elapsed() < PATIENCE, "{:?}", service.stats());
    }
    for _ in 0..3 {
        (0..PAGES).for_each(|page| pages.fill(page, page as u64 + 1));
        service.note_read(pages.address(0)..pages.address(PAGES - 1));
        let after = pass();
        assert_eq!(after.pages_mapped, 0, "{after:?}");
    }
    assert_eq!(store.metric("store_published_total"), 0);
    service.stop(true).expect("it stops");
}

/// A guest without an agent, whose VMM says what it has read.
#[test]
fn what_the_vmm_has_read_is_shared_by_the_first_pass_that_sees_it() {
    need_userfaultfd!();
    const PAGES: usize = 1024;
    let store = StoreThread::start();
    let pages = Pages::map(PAGES);
    // Pages that occur once, and pairs behind them.
    let id = |page: usize| {
        if page < 512 {
            page as u64 + 1
        } else {
            4096 + page as u64 / 2
        }
    };
    (0..PAGES).for_each(|page| pages.fill(page, id(page)));
    let service = pages
        .serve_at(&store.socket(), config(), GUEST)
        .expect("dedup starts");
    let start = Instant::now();
    let pass = || service.pass().expect("a pass");
    while pass().pages_mapped < 512 {
        assert!(start.elapsed() < PATIENCE, "{:?}", service.stats());
    }
    // Two files are read, of which one is noted, and half of a page more; what is no guest memory is of no interest.
    let read = |page: usize| (1 << 20) + page as u64 / 2;
    (0..512).for_each(|page| pages.fill(page, read(page)));
    service.note_read(pages.address(0)..pages.address(256) + 2048);
    service.note_read(0..1 << 30);
    let first = pass();
    assert_eq!(first.pages_mapped, 512 + 256, "{first:?}");
    while pass().pages_mapped < PAGES as u64 {
        assert!(start.elapsed() < PATIENCE, "{:?}", service.stats());
    }
    let id = |page: usize| if page < 512 { read(page) } else { id(page) };
    assert!((0..PAGES).all(|page| pages.holds(page, id(page))));
    service.stop(true).expect("it stops");
}
