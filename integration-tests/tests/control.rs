//! Operating a service while it runs: switching, explaining, refusing, through a real store.

use std::collections::HashMap;
use std::time::{Duration, Instant};
use vmm_dedup::{
    Breaks, Config, DedupService, Error, Explanation, Reason, Refusal, Refused, Settings, Switch,
};
use vmm_dedup_integration_tests::direct_io::{pin, unpin};
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::need_userfaultfd;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_protocol::key::{Key, Salt, line_words};
use vmm_dedup_protocol::message::{Hello, Kind, MAX_BATCH, Message, Role, aligned_buffer, encode};
use vmm_dedup_protocol::observer::{Account, Observer};
use vmm_dedup_protocol::socket;
use zerocopy::IntoBytes;

const PATIENCE: Duration = Duration::from_secs(60);

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn switch(switch: Switch) -> Settings {
    Settings {
        switch: Some(switch),
        ..Settings::default()
    }
}

fn config(name: &str) -> Config {
    Config {
        name: name.into(),
        pass_period_ms: 10,
        cpu_percent: 100,
        ..Config::default()
    }
}

fn explain(service: &DedupService) -> Explanation {
    service.explain(None).expect("an explanation").0
}

#[test]
fn a_vm_is_switched_off_and_on_and_gives_its_memory_back() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(4096);
    (0..4096).for_each(|page| pages.fill(page, page as u64 % 100 + 1));
    let off = Config {
        enabled: false,
        ..config("vm")
    };
    let service = pages.serve(&store.socket(), off).expect("dedup starts");
    let mut observer = Observer::connect(&store.socket()).expect("an observer");
    eventually("it says that it is off", || {
        observer.stats().expect("stats").1[0].stats.state == 6
    });
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(
        (service.stats().merges_total, service.stats().passes_total),
        (0, 0)
    );

    observer.set("vm", switch(Switch::On)).expect("on");
    eventually("all is merged", || service.stats().pages_mapped == 4096);
    observer.set("vm", switch(Switch::Off)).expect("off");
    eventually("it rests", || service.stats().state == 6);
    pages.fill(0, 50);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(
        service.stats().pages_mapped,
        4096,
        "nothing is given back, nothing is looked at"
    );

    observer.set("vm", switch(Switch::OffUnmerge)).expect("unmerged");
    let stats = service.stats();
    assert_eq!((stats.pages_mapped, stats.state), (0, 6));
    eventually("the store has let go of all slots", || {
        let store = observer.stats().expect("stats").0;
        (store.pages_shared, store.slots_limbo) == (0, 0)
    });
    assert!((1..4096).all(|page| pages.holds(page, page as u64 % 100 + 1)) && pages.holds(0, 50));

    // By the VMM itself. The page that the kernel copied may be pinned, for all one knows.
    service.set(switch(Switch::On)).expect("on");
    eventually("it is merged again", || service.stats().pages_mapped >= 4095);
    service.stop(true).expect("it stops");
}

#[test]
fn a_service_that_rests_does_not_hold_back_others() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let (resting, working) = (Pages::map(64), Pages::map(1024));
    let sleeper = resting
        .serve(&store.socket(), config("sleeper"))
        .expect("dedup starts");
    sleeper.pause();
    (0..1024).for_each(|page| working.fill(page, page as u64 % 8 + 1));
    let worker = working
        .serve(&store.socket(), config("worker"))
        .expect("dedup starts");
    eventually("all is merged", || worker.stats().pages_mapped == 1024);
    worker.set(switch(Switch::OffUnmerge)).expect("unmerged");
    let mut observer = Observer::connect(&store.socket()).expect("an observer");
    eventually("slots leave limbo although one VM is paused", || {
        let store = observer.stats().expect("stats").0;
        (store.pages_shared, store.slots_limbo) == (0, 0)
    });
}

#[test]
fn questions_that_come_while_the_service_asks_the_store_are_answered() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(1024);
    (0..1024).for_each(|page| pages.fill(page, page as u64 % 100 + 1));
    // A pass an hour: nothing but a question makes it look for questions.
    let seldom = Config {
        pass_period_ms: 3_600_000,
        ..config("vm")
    };
    let service = pages.serve(&store.socket(), seldom).expect("dedup starts");
    let socket = &store.socket();
    std::thread::scope(|operators| {
        for what in [Switch::On, Switch::OffUnmerge, Switch::On, Switch::Off] {
            operators.spawn(move || {
                let mut observer = Observer::connect(socket).expect("an observer");
                // The store gives a VM ten seconds.
                (0..100).for_each(|_| observer.set("vm", switch(what)).expect("done"));
            });
        }
    });
    service.stop(true).expect("everything goes back");
}

#[test]
fn budgets_change_while_it_works() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(20_000);
    (0..20_000).for_each(|page| pages.fill(page, page as u64 % 5000 + 1));
    let slow = Config {
        cpu_percent: 1,
        breaks: Breaks::managed(16, 0),
        ..config("slow")
    };
    let service = pages.serve(&store.socket(), slow).expect("dedup starts");
    let mut observer = Observer::connect(&store.socket()).expect("an observer");
    // Answered although the thread sleeps off its budget most of the time.
    let settings = Settings {
        cpu_percent: Some(100),
        reserve_pages: Some(128),
        ..Settings::default()
    };
    observer.set("slow", settings).expect("more");
    eventually("the work gets done", || service.stats().pages_mapped == 20_000);
    let stats = service.stats();
    assert_eq!((stats.cpu_percent, stats.reserve_target), (100, 128));
    let wrong = Settings {
        cpu_percent: Some(0),
        ..Settings::default()
    };
    assert!(matches!(
        service.set(wrong),
        Err(Error::Config {
            field: "cpu_percent",
            ..
        })
    ));
    service.stop(true).expect("it stops");
}

#[test]
fn the_pass_period_and_the_stop_target_change_at_once() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(64);
    let rare = Config {
        pass_period_ms: 3_600_000,
        ..config("rare")
    };
    let service = pages.serve(&store.socket(), rare).expect("dedup starts");
    eventually("it has passed once", || service.stats().passes_total == 1);
    let mut observer = Observer::connect(&store.socket()).expect("an observer");
    let settings = Settings {
        pass_period_ms: Some(20),
        stop_target_us: Some(55),
        ..Settings::default()
    };

    observer.set("rare", settings).expect("it is set");

    // It does not wait for the pass that was an hour away.
    eventually("passes go on", || service.stats().passes_total > 3);
    let stats = service.stats();
    assert_eq!((stats.pass_period_ms, stats.stop_target_us), (20, 55));
    for (wrong, field) in [
        (
            Settings {
                pass_period_ms: Some(9),
                ..settings
            },
            "pass_period_ms",
        ),
        (
            Settings {
                stop_target_us: Some(9),
                ..settings
            },
            "stop_target_us",
        ),
    ] {
        let error = service.set(wrong).expect_err(field);
        assert!(error.to_string().contains(field), "{error}");
    }
    let stats = service.stats();
    assert_eq!(
        (stats.pass_period_ms, stats.stop_target_us),
        (20, 55),
        "nothing was changed"
    );
    service.stop(true).expect("it stops");
}

/// However rare passes are.
#[test]
fn what_a_vmm_changes_itself_is_shown_at_once() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(64);
    let rare = Config {
        pass_period_ms: 3_600_000,
        breaks: Breaks::managed(16, 0),
        ..config("rare")
    };
    let service = pages.serve(&store.socket(), rare).expect("dedup starts");
    eventually("it has passed once", || service.stats().passes_total == 1);
    let mut observer = Observer::connect(&store.socket()).expect("an observer");
    let mut told = || observer.stats().expect("stats").1[0].stats;
    let settings = Settings {
        cpu_percent: Some(7),
        stop_target_us: Some(55),
        ..Settings::default()
    };

    service.set(settings).expect("it is set");
    eventually("the store tells of it", || {
        (told().cpu_percent, told().stop_target_us) == (7, 55)
    });
    service.set_reserve(32, 0);
    eventually("the store tells of the reserve", || told().reserve_target == 32);

    assert_eq!(service.stats().passes_total, 1);
    service.stop(true).expect("it stops");
}

#[test]
fn a_reserve_that_is_not_there_is_not_set() {
    need_userfaultfd!();
    let store = StoreThread::start();
    let pages = Pages::map(64);
    let service = pages
        .serve(&store.socket(), config("kernel"))
        .expect("dedup starts");
    let mut observer = Observer::connect(&store.socket()).expect("an observer");
    let settings = Settings {
        cpu_percent: Some(50),
        reserve_pages: Some(128),
        ..Settings::default()
    };
    let error = observer.set("kernel", settings).expect_err("no reserve");
    assert!(
        error.to_string().contains("only managed breaks have a reserve"),
        "{error}"
    );
    assert_eq!(service.stats().cpu_percent, 100, "nothing was changed");
}

#[test]
fn every_page_is_explained() {
    need_userfaultfd!();
    let store = StoreThread::start();
    // Two chunks: 300 pages with twins, 200 zero pages, 100 unique ones, the rest never touched.
    let pages = Pages::map(1024);
    (0..300).for_each(|page| pages.fill(page, page as u64 % 10 + 1));
    (300..500).for_each(|page| pages.fill(page, 0));
    (500..600).for_each(|page| pages.fill(page, page as u64 + 1000));
    let by_hand = Config {
        pass_period_ms: 3_600_000,
        // A process of many tests has much memory, and its forks take long.
        breaks: Breaks::Kernel {
            heal_stall_us: 1_000_000,
            heal_without_fork: false,
        },
        ..config("vm")
    };
    let service = pages
        .serve_at(&store.socket(), by_hand, 0x10_0000)
        .expect("dedup starts");
    eventually("the first pass is done", || service.stats().passes_total == 1);
    let explanation = explain(&service);
    assert_eq!(
        (explanation.pages, explanation.too_new, explanation.unpopulated),
        (1024, 600, 424)
    );
    for _ in 0..4 {
        service.pass().expect("a pass");
    }
    // A page that is written in every pass, one that the kernel copied, and one written a moment ago. (Copies are
    // looked for every few passes. This one was shared for a few passes only, so it is left alone for as long.)
    let mut restless = 0;
    for round in 0..64 {
        pages.fill(599, 5000 + round);
        pages.fill(0, 77);
        service.pass().expect("a pass");
        restless += explain(&service).restless;
    }
    assert!((1..64).contains(&restless), "{restless}");
    pages.fill(598, 6000);
    let explanation = explain(&service);
    let expected = Explanation {
        pages: 1024,
        shared: 299,
        zero: 200,
        unique: 99,
        volatile: 1,
        unpopulated: 424,
        broken: 1,
        heals: 1,
        ..Explanation::default()
    };
    assert_eq!(explanation, expected);

    let mut observer = Observer::connect(&store.socket()).expect("an observer");
    let at = |page: u64| 0x10_0000 + page * 4096;
    let account = observer
        .explain("vm", Some(at(290)..at(310)))
        .expect("an account");
    let Account::Explained(explained) = account else {
        panic!("{account:?}")
    };
    let part = explained.explanation;
    assert_eq!((part.pages, part.shared, part.zero), (20, 10, 10));
    assert_eq!(explained.note, "");
    let outside = observer
        .explain("vm", Some(0..0x10_0000))
        .expect_err("no memory there");
    assert!(
        outside.to_string().contains("no guest memory at 0x0..0x100000"),
        "{outside}"
    );
    service.stop(true).expect("it stops");
}

#[test]
fn pinned_pages_are_told_and_tried_ever_less_often() {
    need_userfaultfd!();
    const PINNED: u64 = 16;
    let store = StoreThread::start();
    let pages = Pages::map(512);
    (0..512).for_each(|page| pages.fill(page, 1));
    let pins = pin(&pages, 16);
    let by_hand = Config {
        pass_period_ms: 3_600_000,
        ..config("vm")
    };
    let service = pages.serve(&store.socket(), by_hand).expect("dedup starts");
    for _ in 0..6 {
        service.pass().expect("a pass");
    }
    let explanation = explain(&service);
    assert_eq!((explanation.pinned, explanation.shared), (PINNED, 496));
    for _ in 0..600 {
        service.pass().expect("a pass");
    }
    // Pauses of 8, 16, 32 ... passes: 7 tries in 600 passes, and chunks are visited in turn.
    let tries = service.stats().refused_pinned_total;
    assert!((2 * PINNED..=8 * PINNED).contains(&tries), "{tries} tries");
    unpin(&pins);
    for _ in 0..700 {
        service.pass().expect("a pass");
    }
    assert_eq!(explain(&service).shared, 512);
    service.stop(true).expect("it stops");
}

#[test]
fn a_refused_vm_is_shown_with_its_reason_and_comes_back_to_a_new_store() {
    let store = StoreThread::start();
    let refusal = Refusal::new(
        Reason::VhostUser,
        "RAM is shared: net0 needs it",
        "use virtio-net",
    );
    let announced = Refused::announce(&store.socket(), "net", 512, &refusal).expect("a thread");
    let shown = |path: &std::path::Path| {
        eventually("the refused VM is listed", || {
            let vms = Observer::connect(path).and_then(|mut o| o.stats());
            vms.is_ok_and(|(_, vms)| vms.len() == 1 && vms[0].reason == Some(Reason::VhostUser))
        });
        let mut observer = Observer::connect(path).expect("an observer");
        let account = observer.explain("net", None).expect("an account");
        assert!(matches!(account, Account::Refused(r) if r.refusal == refusal));
    };
    shown(&store.socket());
    let store = store.restart();
    shown(&store.socket());
    drop(announced);
    eventually("it is gone", || {
        let mut observer = Observer::connect(&store.socket()).expect("an observer");
        observer.stats().expect("stats").1.is_empty()
    });
}

/// A page has a twin in the index, which leaves it again before the page's service looks. The store does not remember the
/// page then, and its service must see to it that the next twin is found.
/// Two pages whose line keys have the same 32 bits in the index of a store with this salt.
fn alike(pages: &Pages, salt: Salt) -> [u64; 2] {
    let mut seen = HashMap::new();
    let mut look = |id: u64| {
        let key = Key::of_lines(&line_words(|word| pages.expected(id, word)), salt);
        seen.insert(key.raw() >> 16, id).map(|before| [before, id])
    };
    (1_000_000..)
        .find_map(&mut look)
        .expect("there are not so many keys")
}

fn salt(store: &StoreThread) -> Salt {
    let socket = socket::connect(&store.socket()).expect("the store is there");
    let hello = Hello::new(Role::Service, "asks", 1);
    socket::send(&socket, &encode(Kind::Hello, &[hello.as_bytes()]), &[]).expect("it listens");
    let mut buffer = aligned_buffer();
    let answer = socket::receive(&socket, &mut buffer)
        .expect("it answers")
        .expect("a record");
    match answer.parse(&buffer) {
        Ok(Message::Welcome(welcome)) => Salt(welcome.salt),
        other => panic!("{other:?}"),
    }
}

/// The second page's key is told to the store in a later message than the first one's, which has entered the index by then.
#[test]
fn a_page_whose_key_is_like_one_that_just_entered_is_shared() {
    need_userfaultfd!();
    const PAGES: usize = MAX_BATCH + 512;
    let store = StoreThread::start();
    let areas = [Pages::map(PAGES), Pages::map(PAGES)];
    let [first, second] = alike(&areas[0], salt(&store));
    let id = |page: usize| match page {
        0 => first,
        _ if page == PAGES - 1 => second,
        _ => page as u64,
    };
    let mut services = Vec::new();
    for (n, pages) in areas.iter().enumerate() {
        (0..PAGES).for_each(|page| pages.fill(page, id(page)));
        let service = pages
            .serve(&store.socket(), config(&format!("vm-{n}")))
            .expect("dedup starts");
        services.push(service);
        if n == 0 {
            eventually("its pages are known", || {
                services[0].stats().pages_unshared == PAGES as u64
            });
        }
    }
    eventually("both share", || {
        services.iter().all(|s| s.stats().pages_mapped == PAGES as u64)
    });
    for pages in &areas {
        assert_eq!(
            (0..PAGES).find(|page| !pages.holds(*page, id(*page))),
            None,
            "a page is wrong"
        );
    }
}

#[test]
fn a_twin_that_came_and_went_unseen_does_not_hide_the_next_one() {
    need_userfaultfd!();
    const PAGES: usize = 512;
    let store = StoreThread::start();
    let fill = |pages: &Pages| (0..PAGES).for_each(|page| pages.fill(page, page as u64 + 1));
    let waits = Pages::map(PAGES);
    fill(&waits);
    let waiting = waits
        .serve(&store.socket(), config("waits"))
        .expect("dedup starts");
    eventually("its pages are known", || {
        waiting.stats().pages_unshared == PAGES as u64
    });
    waiting.set(switch(Switch::Off)).expect("it is off");
    // More keys enter the index than its news has room for.
    let others = 2 * (vmm_dedup_protocol::index::RING + PAGES);
    let passes_by = Pages::map(PAGES + others);
    fill(&passes_by);
    (0..others).for_each(|n| passes_by.fill(PAGES + n, 1_000_000 + (n % (others / 2)) as u64));
    let service = passes_by
        .serve(&store.socket(), config("passes-by"))
        .expect("dedup starts");
    eventually("it shares all of it", || {
        service.stats().pages_mapped == passes_by.count() as u64
    });
    service.stop(true).expect("it stops");
    waiting.set(switch(Switch::On)).expect("it is on");
    let comes = Pages::map(PAGES);
    fill(&comes);
    let coming = comes
        .serve(&store.socket(), config("comes"))
        .expect("dedup starts");
    eventually("both share", || {
        [&waiting, &coming]
            .iter()
            .all(|s| s.stats().pages_mapped == PAGES as u64)
    });
}
