//! Engines that verify what the service took: the same merges by each of them, and no harm from a bad one.

mod counting;

use counting::Counting;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::compare::conformance;
use vmm_dedup::compare::conformance::doubles::{Double, Faults};
use vmm_dedup::compare::{Cpu, Entry, KeyKind};
use vmm_dedup::{Breaks, Config, DedupService, Engines, Error, Policy, ServiceStats, Verification};
use vmm_dedup_dsa::{DsaEngine, InProcess, Options, Reach, Wanted};
use vmm_dedup_dsa_model::{Shape, Timing};
use vmm_dedup_integration_tests::huge::{HUGE_PAGES, wait};
use vmm_dedup_integration_tests::logged::Logged;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::twins::{PAGES, content, expected, guest, holds, merged};
use vmm_dedup_integration_tests::{huge_pages_or_skip, need_userfaultfd};
use vmm_dedup_pageforge::server::{Server, ServerConfig};
use vmm_dedup_protocol::key::Salt;

/// Passes after which guests that do not change are merged; it takes about ten.
const PASSES: usize = 300;
/// More than a device takes for a window on a busy machine.
const PATIENT: Duration = Duration::from_secs(5);
/// Less than a lost answer takes.
const IMPATIENT: Duration = Duration::from_millis(3);

fn config(name: &str, verify: &str, socket: Option<&Path>, timeout: Duration) -> Config {
    Config {
        name: name.to_owned(),
        cpu_percent: 100,
        pass_period_ms: 3_600_000, // passes come when the test asks for them
        verify: Verification {
            engine: verify.to_owned(),
            socket: socket.map(PathBuf::from),
            timeout_us: u64::try_from(timeout.as_micros()).expect("some seconds"),
            ..Verification::default()
        },
        // So that every page can be merged at any time.
        breaks: Breaks::managed(16, 0),
        ..Config::default()
    }
}

fn device() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("device");
    let server = Server::bind(&socket, ServerConfig::default()).expect("the device listens");
    std::thread::spawn(move || server.run());
    (folder, socket)
}

/// This project's engines and another one.
fn engines_with(name: &'static str, entry: Entry) -> Engines {
    vmm_dedup_engines::engines().register(name, entry)
}

fn doubles(faults: Faults) -> Engines {
    let cpu = || Cpu::new(KeyKind::Lines(Salt(0)));
    let make = move |_: Option<&Path>| Ok(Box::new(Double::new(cpu(), faults)) as _);
    engines_with("double", Entry::new().verify(make))
}

/// Two guests with twins of all kinds, merged to the end; their accounts.
fn converge(engines: &Engines, config: impl Fn(&str) -> Config) -> Vec<ServiceStats> {
    let store = StoreThread::start();
    let guests = [guest(0), guest(1)];
    let services = ["a", "b"].map(config).into_iter().zip(&guests);
    let services: Vec<DedupService> = services
        .map(|(config, guest)| guest.serve_with(&store.socket(), config, 0, engines.clone()))
        .map(|service| service.expect("dedup starts"))
        .collect();
    let expected = expected();
    let mut now = Vec::new();
    for _ in 0..PASSES {
        services
            .iter()
            .for_each(|service| _ = service.pass().expect("a pass"));
        now = merged(&guests);
        if now == expected {
            break;
        }
    }
    let wrong = (0..expected.len()).find(|page| now[*page] != expected[*page]);
    let stats: Vec<ServiceStats> = services.iter().map(DedupService::stats).collect();
    assert_eq!(wrong, None, "a page is merged with another one: {stats:?}");
    for (number, guest) in guests.iter().enumerate() {
        assert!((0..PAGES).all(|page| holds(guest, page, content(number, page))));
    }
    for service in services {
        service.stop(true).expect("it stops");
    }
    stats
}

#[test]
fn the_same_merges_page_for_page_by_every_verifier() {
    need_userfaultfd!();
    let (_folder, socket) = device();
    let engines = vmm_dedup_engines::engines();
    for (verify, socket, trusted) in [
        ("cpu", None, false),
        ("pageforge", None, false),
        ("pageforge", Some(socket.as_path()), false),
        ("pageforge", Some(socket.as_path()), true),
        ("pagecmp", None, true),
        ("dsa-model", None, false),
        ("dsa-model", None, true),
        ("pagecmp-hybrid", None, false),
    ] {
        let config = |name: &str| {
            let mut config = config(name, verify, socket, PATIENT);
            config.verify.trusted = trusted;
            config
        };
        for stats in converge(&engines, config) {
            assert_eq!((&*stats.verify.text(), stats.verify_failures_total), (verify, 0));
            let asked = stats.verifications_total;
            assert_eq!(
                asked >= stats.merges_total,
                verify != "cpu",
                "{verify}: {stats:?}"
            );
            let device = stats.verify_device;
            let told = device.requests + device.cpu_sooner + device.cpu_instead;
            assert_eq!(told > 0, verify == "dsa-model", "{verify}: {device:?}");
        }
    }
}

/// Where there are devices: DSA_NODES names two work queues, such as /dev/dsa/wq0.0,/dev/dsa/wq0.1. The nested tests run this
/// in a guest. Everything goes to the devices, also what the CPU would compare sooner.
#[test]
fn real_pages_are_merged_through_device_nodes() {
    need_userfaultfd!();
    let Ok(nodes) = std::env::var("DSA_NODES") else {
        eprintln!("SKIPPED: DSA_NODES names no work queues");
        return;
    };
    let nodes: Vec<&Path> = nodes.split(',').map(Path::new).collect();
    let options = Options {
        hybrid: false,
        only_if_sooner: false,
        time_limit: PATIENT,
        ..Options::default()
    };
    let make = move |node: Option<&Path>| {
        let engine = DsaEngine::new(vmm_dedup_dsa::open(node)?, options)?;
        Ok(Box::new(engine) as _)
    };
    let engines = engines_with("dsa-always", Entry::new().verify(make).behind_socket());
    let stats = converge(&engines, |name| {
        let node = nodes[usize::from(name == "b")];
        config(name, "dsa-always", Some(node), PATIENT)
    });
    for stats in stats {
        assert_eq!(
            (&*stats.verify.text(), stats.verify_failures_total),
            ("dsa-always", 0)
        );
        assert!(stats.merges_total > 0 && stats.verifications_total >= stats.merges_total);
        assert!(stats.verify_device.requests > 0, "{stats:?}");
    }
}

/// Where there is a device that belongs to VFIO: DSA_NODE names its folder. It belongs to one of the two services.
#[test]
fn real_pages_are_merged_through_vfio() {
    need_userfaultfd!();
    let node = std::env::var_os("DSA_NODE").filter(|node| Path::new(node).starts_with("/sys"));
    let Some(node) = node else {
        eprintln!("SKIPPED: DSA_NODE names no device of VFIO's");
        return;
    };
    let options = Options {
        hybrid: false,
        only_if_sooner: false,
        time_limit: PATIENT,
        ..Options::default()
    };
    let make = move |node: Option<&Path>| {
        let engine = DsaEngine::new(vmm_dedup_dsa::open(node)?, options)?;
        Ok(Box::new(engine) as _)
    };
    let engines = engines_with("dsa-always", Entry::new().verify(make).behind_socket());
    let stats = converge(&engines, |name| match name {
        "b" => config(name, "dsa-always", Some(Path::new(&node)), PATIENT),
        _ => config(name, "cpu", None, PATIENT),
    });
    let [_, by_device] = &stats[..] else {
        panic!("two services");
    };
    let verified = (&*by_device.verify.text(), by_device.verify_failures_total);
    assert_eq!(verified, ("dsa-always", 0));
    assert!(by_device.merges_total > 0 && by_device.verifications_total >= by_device.merges_total);
}

#[test]
fn a_verifier_is_added_by_its_registration() {
    need_userfaultfd!();
    conformance::verify(&mut |_| Box::new(Counting::default()));
    let compared = Arc::new(AtomicU64::new(0));
    let counted = compared.clone();
    let entry = Entry::new().verify(move |_| Ok(Box::new(Counting::new(counted.clone()))));
    let stats = converge(&engines_with("counting", entry), |name| {
        config(name, "counting", None, PATIENT)
    });
    let verified: u64 = stats.iter().map(|stats| stats.verifications_total).sum();
    assert_eq!(compared.load(Ordering::Relaxed), verified);
    for stats in stats {
        assert_eq!(stats.verify.text(), "counting");
        assert!(stats.verifications_total >= stats.merges_total + stats.zero_merges_total);
    }
}

/// What the kernel copied lies frozen in its place while it is compared, and is compared by the same engine.
#[test]
fn healed_pages_are_verified_as_others_are() {
    need_userfaultfd!();
    vmm_dedup::share_whatever_it_costs(true);
    const SOME: usize = 64;
    const REWRITTEN: usize = 16;
    let compared = Arc::new(AtomicU64::new(0));
    let counted = compared.clone();
    let entry = Entry::new().verify(move |_| Ok(Box::new(Counting::new(counted.clone()))));
    let engines = engines_with("counting", entry);
    let store = StoreThread::start();
    let guests = ["a", "b"].map(|name| {
        let pages = Pages::map(SOME);
        (0..SOME).for_each(|page| pages.fill(page, page as u64 + 1));
        (name, pages)
    });
    let services = guests.each_ref().map(|(name, pages)| {
        let config = Config {
            breaks: Breaks::Kernel {
                heal_stall_us: 200_000,
                heal_without_fork: true,
            },
            ..config(name, "counting", None, PATIENT)
        };
        let service = pages.serve_with(&store.socket(), config, 0, engines.clone());
        let service = service.expect("dedup starts");
        service.vouch_for_pins();
        service
    });
    let pass = |until: &dyn Fn(&ServiceStats) -> bool| {
        let mut passes =
            (0..PASSES).map(|_| services.each_ref().map(|service| service.pass().expect("a pass")));
        let done = passes.find(|stats| stats.iter().all(until));
        done.expect("it happens within some passes")
    };
    pass(&|stats| stats.pages_mapped == SOME as u64);
    for (_, pages) in &guests {
        (0..REWRITTEN).for_each(|page| pages.fill(page, page as u64 + 1000));
    }
    pass(&|stats| stats.pages_broken > 0);
    let stats = pass(&|stats| stats.heals_total >= REWRITTEN as u64);
    let verified: u64 = stats.iter().map(|stats| stats.verifications_total).sum();
    assert_eq!(compared.load(Ordering::Relaxed), verified);
    for stats in stats {
        // Each is compared for its merge; a healed one once more for that.
        assert!(
            stats.verifications_total >= SOME as u64 + stats.heals_total,
            "{stats:?}"
        );
    }
}

#[test]
fn a_name_that_was_not_registered_is_refused_with_those_that_were() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let guest = Pages::map(16);
    let config = config("a", "nobody", None, PATIENT);
    let error = guest.serve(&store.socket(), config).expect_err("there is none");
    assert!(
        matches!(
            error,
            Error::NoEngine {
                field: "verify.engine",
                ..
            }
        ),
        "{error}"
    );
    let known = "cpu, dsa, dsa-model, pagecmp, pagecmp-hybrid, pageforge";
    assert!(error.to_string().ends_with(known), "{error}");
}

/// A guest's pages, and what was written to each last.
struct Written {
    pages: Pages,
    ids: Vec<u64>,
    random: u64,
}

impl Written {
    fn new(seed: u64) -> Self {
        let pages = Pages::map(500);
        (0..500).for_each(|page| pages.fill(page, 1));
        Self {
            pages,
            ids: vec![1; 500],
            random: seed,
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        let next = self.random.wrapping_mul(6_364_136_223_846_793_005);
        self.random = next.wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % end
    }

    /// Few contents, so that there are always twins, and zero pages.
    fn write(&mut self, writes: usize) {
        for _ in 0..writes {
            let page = usize::try_from(self.below(500)).expect("below 500");
            self.ids[page] = self.below(60);
            self.pages.fill(page, self.ids[page]);
        }
    }

    fn first_wrong(&self) -> Option<usize> {
        (0..500).find(|page| !self.pages.holds(*page, self.ids[*page]))
    }
}

#[test]
fn verifiers_that_fail_cost_time_and_no_byte() {
    need_userfaultfd!();
    let good = Faults::default();
    for (faults, fails) in [
        (
            Faults {
                reorder: true,
                latency: Duration::from_micros(300),
                ..good
            },
            false,
        ),
        (Faults { faults: 100, ..good }, false),
        (Faults { lies: 100, ..good }, true),
        (Faults { lost: 30, ..good }, true),
        (
            Faults {
                twice: 30,
                strays: 30,
                ..good
            },
            true,
        ),
        (
            Faults {
                dies_after: Some(300),
                ..good
            },
            true,
        ),
        (
            Faults {
                latency: Duration::from_secs(1),
                ..good
            },
            true,
        ),
    ] {
        let store = StoreThread::start();
        let engines = doubles(faults);
        let mut guests = [Written::new(1), Written::new(2)];
        let timeout = if fails { IMPATIENT } else { PATIENT };
        let serve = |guest: &Written, name| {
            let config = config(name, "double", None, timeout);
            let service = guest
                .pages
                .serve_with(&store.socket(), config, 0, engines.clone());
            service.expect("dedup starts")
        };
        let services = [serve(&guests[0], "a"), serve(&guests[1], "b")];
        for round in 0..40 {
            // Most of a guest at first, a few pages later, some of them in the very pass.
            guests
                .iter_mut()
                .for_each(|guest| guest.write(if round % 20 == 0 { 500 } else { 10 }));
            std::thread::scope(|threads| {
                for service in &services {
                    threads.spawn(|| service.pass().expect("a pass"));
                }
                guests.iter_mut().for_each(|guest| guest.write(3));
            });
            for guest in &guests {
                assert_eq!(guest.first_wrong(), None, "{faults:?}, round {round}");
            }
        }
        // The CPU, or another engine of the kind, does the rest.
        let done = |stats: &ServiceStats| stats.pages_mapped + stats.pages_zero >= 495;
        let mut passes = 0;
        while !services.iter().all(|service| done(&service.stats())) {
            services
                .iter()
                .for_each(|service| _ = service.pass().expect("a pass"));
            passes += 1;
            assert!(passes < PASSES, "{faults:?}: {:?}", services[0].stats());
        }
        for (service, guest) in services.iter().zip(&guests) {
            let stats = service.stats();
            assert_eq!(guest.first_wrong(), None, "{faults:?}");
            assert!(
                stats.verifications_total > 0 || faults.latency > IMPATIENT,
                "{stats:?}"
            );
            assert_eq!(stats.verify_failures_total > 0, fails, "{faults:?}: {stats:?}");
        }
    }
}

/// The last queue of a device is lost in the middle of a window.
#[test]
fn a_dsa_that_dies_costs_no_merge_and_is_told_once() {
    need_userfaultfd!();
    let make = |_: Option<&Path>| {
        let faults = vmm_dedup_dsa_model::Faults {
            halts_after: Some(50),
            halts_for_good: true,
            ..vmm_dedup_dsa_model::Faults::default()
        };
        let shape = Shape::sapphire_rapids();
        let queue = InProcess::new(shape, Timing::NONE, faults, Reach::Process, Wanted::default());
        let queue = queue.map_err(|error| vmm_dedup::compare::Error::Device(error.to_string()))?;
        let options = Options {
            hybrid: false,
            only_if_sooner: false,
            ..Options::default()
        };
        Ok(Box::new(DsaEngine::new(vec![Box::new(queue)], options)?) as _)
    };
    let engines = engines_with("dying", Entry::new().verify(make));
    let store = StoreThread::start();
    let pages = Pages::map(400);
    (0..400).for_each(|page| pages.fill(page, page as u64 / 2 + 1));
    let logged = Logged::begin();
    let config = config("a", "dying", None, PATIENT);
    let service = pages.serve_with(&store.socket(), config, 0, engines);
    let service = service.expect("dedup starts");
    // Fewer than those after which another device is tried.
    (0..30).for_each(|_| _ = service.pass().expect("a pass"));
    let stats = service.stats();
    assert_eq!(
        (stats.pages_mapped, &*stats.verify.text()),
        (400, "cpu"),
        "{stats:?}"
    );
    assert_eq!(
        (stats.verify_failures_total, stats.verify_device.queues_lost),
        (1, 1)
    );
    assert_eq!(logged.count("halted"), 1);
    assert!(logged.says(&["no verification by dying", "dsa-model", "halted until"]));
    assert!((0..400).all(|page| pages.holds(page, page as u64 / 2 + 1)));
}

/// One window waits for it, for as long as it may; the others are the CPU's.
#[test]
fn an_engine_that_says_nothing_is_waited_for_once() {
    const TIMEOUT: Duration = Duration::from_millis(200);
    need_userfaultfd!();
    let silent = Faults {
        latency: Duration::from_secs(3600),
        ..Faults::default()
    };
    let store = StoreThread::start();
    let pages = Pages::map(400);
    (0..400).for_each(|page| pages.fill(page, page as u64 / 2 + 1));
    let config = config("a", "double", None, TIMEOUT);
    let service = pages.serve_with(&store.socket(), config, 0, doubles(silent));
    let service = service.expect("dedup starts");
    let mut stats = service.stats();
    for _ in 0..20 {
        stats = service.pass().expect("a pass");
    }
    assert_eq!(
        (stats.pages_mapped, &*stats.verify.text()),
        (400, "cpu"),
        "{stats:?}"
    );
    assert_eq!((stats.verify_failures_total, stats.verifications_total), (1, 0));
    let longest = Duration::from_nanos(stats.stop.max_ns);
    assert!(longest >= TIMEOUT, "nobody waited for the engine: {longest:?}");
    assert!(stats.stop.count() > 1, "there was one window only");
}

/// Comparing a huge page takes this engine 50 ms; who touches it meanwhile does not wait for that.
#[test]
fn who_waits_for_a_huge_page_that_an_engine_has_gets_it_back() {
    need_userfaultfd!();
    let slow = Faults {
        latency: Duration::from_millis(50),
        ..Faults::default()
    };
    let store = StoreThread::start();
    let pages = Pages::map_huge(4 * HUGE_PAGES);
    let id = |page: usize| (page % HUGE_PAGES) as u64 + 1;
    (0..pages.count()).for_each(|page| pages.fill(page, id(page)));
    huge_pages_or_skip!(&pages);
    let config = Config {
        pass_period_ms: 20,
        // Every page is shared, also those by which use is sampled.
        huge_policy: Policy::Ksm,
        breaks: Breaks::KERNEL,
        ..config("a", "double", None, PATIENT)
    };
    let service = pages.serve_with(&store.socket(), config, 0, doubles(slow));
    let service = service.expect("dedup starts");
    let stop = AtomicBool::new(false);
    let wrong: u64 = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut wrong = 0;
            for n in 0usize.. {
                let (page, word) = (n * 37 % pages.count(), n * 11 % 512);
                wrong += u64::from(pages.load(page, word) != pages.expected(id(page), word));
                if stop.load(Ordering::Acquire) {
                    break;
                }
            }
            wrong
        });
        wait(&service, "sharing", |s| s.pages_mapped == 4 * HUGE_PAGES as u64);
        stop.store(true, Ordering::Release);
        reader.join().expect("a reader")
    });
    let stats = service.stats();
    assert_eq!((wrong, stats.verify_failures_total), (0, 0), "{stats:?}");
    assert!(
        stats.huge_contended_total > 0,
        "nobody was given a page back: {stats:?}"
    );
    assert_eq!(stats.verify.text(), "double");
    service.stop(true).expect("it stops");
    assert!((0..pages.count()).all(|page| pages.holds(page, id(page))));
}

/// Slots of the next store have the numbers of those before. A device that still read the old ones would find nothing
/// equal, or the wrong pages; this one is trusted.
#[test]
fn a_trusted_device_reads_the_slots_of_the_store_there_is() {
    need_userfaultfd!();
    let (_folder, socket) = device();
    let mut store = StoreThread::start();
    let pages = Pages::map(400);
    let mut config = config("a", "pageforge", Some(&socket), PATIENT);
    config.verify.trusted = true;
    let service = pages.serve(&store.socket(), config).expect("dedup starts");
    for life in 0..3 {
        let id = |page: usize| (page / 2 + 1000 * life) as u64 + 1;
        let before = service.stats();
        (0..400).for_each(|page| pages.fill(page, id(page)));
        let start = Instant::now();
        let mut stats = before;
        while stats.pages_mapped < 400 || stats.merges_total < before.merges_total + 400 {
            stats = service.pass().expect("a pass");
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "life {life}: {stats:?}"
            );
        }
        assert!((0..400).all(|page| pages.holds(page, id(page))), "life {life}");
        assert!(
            stats.verifications_total >= before.verifications_total + 400,
            "{stats:?}"
        );
        assert_eq!(
            (stats.verify_failures_total, stats.mismatches_total),
            (0, 0),
            "{stats:?}"
        );
        store = store.restart();
    }
    service.stop(true).expect("it stops");
}
