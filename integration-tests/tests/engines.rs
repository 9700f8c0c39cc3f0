//! Engines that search for the service: the same merges from each of them, and no harm from a bad one.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use vmm_dedup::compare::ksm::Ksm;
use vmm_dedup::compare::{
    Account, Answer, Arena, Cpu, Engine, Entry, Error, KeyKind, Keys, PageId, Pages as Readable, TreeSearch,
};
use vmm_dedup::{Breaks, Config, DedupService, Engines};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_integration_tests::twins::{Groups, PAGES, content, expected, groups, guest, holds, merged};
use vmm_dedup_pageforge::server::{Server, ServerConfig};
use vmm_dedup_protocol::stats::ServiceStats;
use vmm_dedup_protocol::tree::TreeReader;

/// Passes after which guests that do not change are merged; each engine needs about ten.
const PASSES: usize = 300;

fn config(name: &str, search: &str, socket: Option<&Path>) -> Config {
    Config {
        name: name.to_owned(),
        cpu_percent: 100,
        pass_period_ms: 3_600_000, // passes come when the test asks for them
        search: search.to_owned(),
        search_socket: socket.map(PathBuf::from),
        // So that every page can be merged at any time.
        breaks: Breaks::managed(16, 0),
        ..Config::default()
    }
}

/// Two guests with this search; what is merged in the end, and the accounts.
fn converge(search: &str, socket: Option<&Path>) -> (Groups, Vec<ServiceStats>) {
    let store = StoreThread::ordered();
    let guests = [guest(0), guest(1)];
    let services: Vec<DedupService> = ["a", "b"]
        .into_iter()
        .zip(&guests)
        .map(|(name, guest)| {
            let config = config(name, search, socket);
            guest.serve(&store.socket(), config).expect("dedup starts")
        })
        .collect();
    let expected = expected();
    let mut now = Groups::new();
    for _ in 0..PASSES {
        for service in &services {
            service.pass().expect("a pass");
        }
        now = merged(&guests);
        if now == expected {
            break;
        }
    }
    for (number, guest) in guests.iter().enumerate() {
        assert!(
            (0..PAGES).all(|page| holds(guest, page, content(number, page))),
            "{search}"
        );
    }
    let zeros = services
        .iter()
        .map(|service| service.stats().pages_zero)
        .sum::<u64>();
    assert_eq!(zeros, PAGES as u64 / 10 * 2, "{search}");
    let stats = services.iter().map(DedupService::stats).collect();
    for service in services {
        service.stop(true).expect("it stops");
    }
    (now, stats)
}

fn device() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("device");
    let server = Server::bind(&socket, ServerConfig::default()).expect("the device listens");
    std::thread::spawn(move || server.run());
    (folder, socket)
}

#[test]
fn the_same_merges_page_for_page_from_every_engine() {
    need_userfaultfd!();
    let expected = expected();
    let sharing = expected.iter().flatten().count();
    assert!(sharing > PAGES, "{sharing} pages have twins");
    let (_folder, socket) = device();
    let engines = [
        ("index", None),
        ("tree", None),
        ("pageforge", None),
        ("pageforge", Some(socket.as_path())),
        ("dsa-model", None),
        ("pagecmp", None),
        ("pagecmp-hybrid", None),
    ];
    for (search, socket) in engines {
        let (merged, stats) = converge(search, socket);
        let wrong = (0..expected.len()).find(|page| merged[*page] != expected[*page]);
        assert_eq!(wrong, None, "{search} merges a page with another one: {stats:?}");
        for stats in stats {
            assert_eq!((&*stats.search.text(), stats.search_failures_total), (search, 0));
            assert_eq!(stats.searches_total > 0, search != "index", "{search}");
            let by_device = stats.search_device.requests > 0;
            assert_eq!(by_device, search == "dsa-model", "{search}: {stats:?}");
            assert_eq!(stats.search_twins_total > 0, search != "index", "{search}");
        }
    }
    assert_eq!(by_ksm(), expected, "KSM's algorithm");
}

/// KSM's algorithm on the same content. Zero pages are like others to it.
fn by_ksm() -> Groups {
    let arena = Arena::new(PAGES * 2).expect("an arena");
    for number in 0..2 {
        let pages = guest(number);
        for page in 0..PAGES {
            let words = std::array::from_fn(|word| pages.load(page, word));
            arena.write(number * PAGES + page, &words);
        }
    }
    let mut ksm = Ksm::new(PAGES * 2);
    let mut cpu = Cpu::new(KeyKind::Jhash2);
    for _ in 0..3 {
        ksm.pass(&mut cpu, &arena).expect("a pass");
    }
    let zero = |page: usize| content(page / PAGES, page % PAGES).id == 0;
    let twin = |page: usize| ksm.merged_with(PageId(page as u64)).filter(|_| !zero(page));
    groups((0..PAGES * 2).map(twin))
}

#[test]
fn what_the_store_has_is_found_by_the_engine_alone() {
    need_userfaultfd!();
    let store = StoreThread::ordered();
    let serve = |guest: &Pages, name, search| {
        let config = config(name, search, None);
        guest.serve(&store.socket(), config).expect("dedup starts")
    };
    let guests = [Pages::map(600), Pages::map(600), Pages::map(600)];
    for guest in &guests {
        (0..600).for_each(|page| guest.fill(page, page as u64 + 1));
    }
    let first = [serve(&guests[0], "a", "index"), serve(&guests[1], "b", "index")];
    for _ in 0..PASSES {
        first
            .iter()
            .for_each(|service| _ = service.pass().expect("a pass"));
        if first.iter().all(|service| service.stats().pages_mapped == 600) {
            break;
        }
    }
    let last = serve(&guests[2], "c", "pageforge");
    let mut stats = last.pass().expect("a pass");
    for _ in 0..PASSES {
        stats = last.pass().expect("a pass");
        if stats.pages_mapped == 600 {
            break;
        }
    }
    assert_eq!(
        (stats.merges_total, stats.search_twins_total),
        (600, 600),
        "{stats:?}"
    );
    assert_eq!((stats.pages_hashed_total, stats.mismatches_total), (0, 0));
    assert!(stats.cpu_ns.search > 0);
}

/// Proposes anything but what is right, and fails now and then.
#[derive(Debug)]
struct Liar(u64);

impl Liar {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next()).expect("31 bits") % end
    }
}

impl Engine for Liar {
    fn name(&self) -> &'static str {
        "liar"
    }

    fn account(&self) -> Account {
        Account::default()
    }
}

impl Keys for Liar {
    fn keys(&mut self, _: &dyn Readable, of: &[PageId]) -> Vec<Answer<u64>> {
        // Now and then one too few, or too many.
        let answers = match self.next() % 64 {
            0 => of.len() + 1,
            1 => of.len().saturating_sub(1),
            _ => of.len(),
        };
        (0..answers).map(|_| Ok(self.next() % 3)).collect()
    }
}

impl TreeSearch for Liar {
    fn search(
        &mut self,
        _: &dyn Readable,
        _: TreeReader<'_>,
        candidates: &[PageId],
    ) -> Vec<Answer<Option<PageId>>> {
        let answer = |page: &PageId| match self.next() % 16 {
            0 => Err(Error::Fault(*page)),
            1 => Ok(Some(PageId(u64::MAX))),
            2 => Ok(None),
            // Slots that there are, mostly of other content.
            _ => Ok(Some(PageId(self.next() % 700))),
        };
        candidates.iter().map(answer).collect()
    }

    fn among(&mut self, _: &dyn Readable, _: PageId, set: &[PageId]) -> Answer<Option<usize>> {
        Ok(Some(self.below(set.len() + 2)))
    }
}

fn liar() -> Engines {
    Engines::new().register("liar", Entry::new().tree_search(|_| Ok(Box::new(Liar(42)))))
}

#[test]
fn an_engine_that_lies_costs_savings_and_no_byte() {
    need_userfaultfd!();
    let store = StoreThread::ordered();
    let guests = [Pages::map(700), Pages::map(700)];
    let mut held = vec![vec![0u64; 700]; 2];
    let services: Vec<DedupService> = (["a", "b"].into_iter().zip(&guests))
        .map(|(name, guest)| {
            let config = config(name, "liar", None);
            guest
                .serve_with(&store.socket(), config, 0, liar())
                .expect("dedup starts")
        })
        .collect();
    let mut round = 0u64;
    let mut chaos = Liar(7);
    while round < 60
        || services
            .iter()
            .any(|service| service.stats().search_failures_total == 0)
    {
        assert!(
            round < 2000,
            "the liar is still believed: {:?}",
            services[0].stats()
        );
        round += 1;
        for (guest, held) in guests.iter().zip(&mut held) {
            // Most of a guest at first, a few pages later, some of them in the very pass.
            let writes = if round % 20 == 1 { 700 } else { 20 };
            for _ in 0..writes {
                let page = chaos.below(700);
                held[page] = chaos.next() % 300 + 1;
                guest.fill(page, held[page]);
            }
        }
        std::thread::scope(|threads| {
            for service in &services {
                threads.spawn(|| service.pass().expect("a pass"));
            }
            for (guest, held) in guests.iter().zip(&mut held) {
                let page = chaos.below(700);
                held[page] = chaos.next() % 300 + 1;
                guest.fill(page, held[page]);
            }
        });
        for (guest, held) in guests.iter().zip(&held) {
            let wrong = (0..700).find(|page| held[*page] != 0 && !guest.holds(*page, held[*page]));
            assert_eq!(wrong, None, "round {round}");
        }
    }
    let wrong: u64 = services
        .iter()
        .map(|service| service.stats().mismatches_total)
        .sum();
    assert!(wrong > 0, "nobody was lied to");
    // Without it the index does the work.
    for _ in 0..PASSES {
        services
            .iter()
            .for_each(|service| _ = service.pass().expect("a pass"));
        if services.iter().all(|service| service.stats().pages_mapped > 600) {
            return;
        }
    }
    panic!("{:?}", services[0].stats());
}

#[test]
fn a_device_that_is_gone_or_says_nothing_leaves_the_work_to_the_index() {
    need_userfaultfd!();
    let folder = tempfile::tempdir().expect("a folder");
    let silent = folder.path().join("silent");
    let _listener = UnixListener::bind(&silent).expect("a socket");
    let gone = folder.path().join("gone");
    for socket in [gone, silent] {
        let store = StoreThread::ordered();
        let guest = Pages::map(400);
        (0..400).for_each(|page| guest.fill(page, page as u64 / 2 + 1));
        let config = config("a", "pageforge", Some(&socket));
        let service = guest.serve(&store.socket(), config).expect("dedup starts");
        let mut stats = service.stats();
        for _ in 0..PASSES {
            stats = service.pass().expect("a pass");
            if stats.pages_mapped == 400 && stats.search_failures_total > 0 {
                break;
            }
        }
        assert_eq!(
            (stats.pages_mapped, &*stats.search.text()),
            (400, "index"),
            "{stats:?}"
        );
        assert!(stats.search_failures_total > 0);
        service.stop(true).expect("it stops");
    }
}

#[test]
fn a_store_without_the_order_is_searched_by_its_index() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let guest = Pages::map(200);
    (0..200).for_each(|page| guest.fill(page, page as u64 / 2 + 1));
    let service = guest
        .serve(&store.socket(), config("a", "tree", None))
        .expect("dedup starts");
    let mut stats = service.stats();
    for _ in 0..PASSES {
        stats = service.pass().expect("a pass");
        if stats.pages_mapped == 200 {
            break;
        }
    }
    assert_eq!(
        (stats.pages_mapped, stats.searches_total, &*stats.search.text()),
        (200, 0, "index")
    );
}
