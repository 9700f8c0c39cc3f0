//! Attacks on a live store, and what an honest VM notices of each.

mod support;

use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{
    Answer, Client, HELPER_SOCKET, Helper, Observer, Server, come_and_go, eventually, page, stats, stats_from,
};
use vmm_dedup_protocol::control::{Settings, Switch};
use vmm_dedup_protocol::index::{News, RING};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};
use vmm_dedup_protocol::message::{Hello, Kind, Message, Role, aligned_buffer, encode};
use vmm_dedup_protocol::stats::ServiceStats;
use vmm_dedup_protocol::{PAGE_SIZE, SEGMENT_BYTES, SLOTS_PER_SEGMENT, STAGING_PAGES, Slot, socket};
use vmm_dedup_store::Config;
use zerocopy::IntoBytes;

/// What an attack that works costs an honest VM.
const LINGER: Duration = Duration::from_secs(8);
/// Far more than a batch of an honest VM takes, also on a busy machine, and far less than that.
const HONEST: Duration = Duration::from_secs(4);

/// The longest that one of an honest VM's batches takes, sent for so long.
fn longest_batch(honest: &mut Client, time: Duration) -> Duration {
    let (start, mut longest) = (Instant::now(), Duration::ZERO);
    while start.elapsed() < time {
        let asked = Instant::now();
        honest.acknowledge();
        longest = longest.max(asked.elapsed());
        std::thread::sleep(Duration::from_millis(2));
    }
    longest
}

#[test]
fn a_descriptor_that_takes_long_to_close_holds_up_nobody() {
    let server = Server::start(|_| ());
    let mut honest = Client::connect(&server.socket, "honest");
    let evil = socket::connect(&server.socket).unwrap();
    let hello = encode(Kind::Hello, &[Hello::new(Role::Observer, "evil", 0).as_bytes()]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let _unread = listener.accept().unwrap();
    lingering.set_nonblocking(true).unwrap();
    while lingering.write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&lingering, Some(LINGER)).unwrap();
    // From Linux 6.16 on it does not reach the store.
    let sent = socket::send(&evil, &hello, &[lingering.as_fd()]);
    println!("sent: {sent:?}");
    drop(lingering);
    let longest = longest_batch(&mut honest, Duration::from_secs(2));
    assert!(longest < HONEST, "a batch took {longest:?}");
}

/// What anybody on the host can hold open who may do as little as connect.
const SCRAPERS: usize = 400;

/// A store with metrics, and an honest VM.
fn server_with_metrics() -> (Server, SocketAddr, Client) {
    let server = Server::start(|config| config.metrics = Some(SocketAddr::from(([127, 0, 0, 1], 0))));
    let honest = Client::connect(&server.socket, "honest");
    let address = server.metrics.unwrap();
    (server, address, honest)
}

#[test]
fn many_who_ask_for_metrics_and_do_not_read_them_hold_up_no_vm() {
    let (server, address, mut honest) = server_with_metrics();
    // Each is a VM of its own in the text, which takes the longer to be made.
    let stats = ServiceStats::default();
    let vms: Vec<_> = (0..20)
        .map(|vm| Client::connect(&server.socket, &format!("vm{vm}")))
        .collect();
    for vm in &vms {
        vm.send(Kind::Report, stats.as_bytes());
    }
    let question = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(50);
    let _asking: Vec<_> = (0..SCRAPERS)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(question.as_bytes()).unwrap();
            stream
        })
        .collect();
    let longest = longest_batch(&mut honest, Duration::from_secs(3));
    println!("a batch took at most {longest:?}");
    assert!(longest < HONEST / 8, "a batch took {longest:?}");
}

#[test]
fn silent_connections_for_metrics_take_few_descriptors_and_keep_nobody_out() {
    let (_server, address, mut honest) = server_with_metrics();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let silent: Vec<_> = (0..SCRAPERS)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    // Client and store are one process here: one descriptor of each connection is the client's.
    let of_store = descriptors().saturating_sub(before + silent.len());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(
        of_store <= 40,
        "the store has {of_store} descriptors for {SCRAPERS} connections"
    );
    honest.acknowledge();
}

/// A user that is neither root nor who runs the tests.
const STRANGER: u32 = 65_533;

/// Does something as [`STRANGER`], in a thread of its own, whose rights alone change. The test that calls it is one of root.
fn as_stranger<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    as_user(STRANGER, act)
}

fn as_user<T: Send>(user: u32, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let user = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            act()
        });
        thread.join().unwrap()
    })
}

/// A store whose socket anybody may open; `None` where the test cannot become somebody else.
fn open_server() -> Option<Server> {
    open_server_with(|_| ())
}

/// One that only these users and root may join.
fn open_server_for(users: &[u32]) -> Option<Server> {
    open_server_with(|config| config.join_users = users.to_vec())
}

fn open_server_with(change: impl FnOnce(&mut Config)) -> Option<Server> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can act as another user");
        return None;
    }
    let server = Server::start(|config| {
        config.mode = 0o666;
        change(config);
    });
    std::fs::set_permissions(server.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    Some(server)
}

#[test]
fn a_member_that_runs_as_another_user_shares_and_steers_nobody() {
    let Some(server) = open_server() else { return };
    let mut honest = Client::connect(&server.socket, "honest");
    let mut neighbour = as_stranger(|| Client::connect(&server.socket, "neighbour"));
    neighbour.acknowledge();
    let mut hostile = as_stranger(|| Observer::connect(&server.socket));
    let off = Settings {
        switch: Some(Switch::OffUnmerge),
        ..Settings::default()
    };
    for vm in ["honest", "neighbour", "nobody"] {
        hostile.set(vm, 1, off);
        let set = hostile.refusal();
        hostile.explain(vm, 2);
        let explain = hostile.refusal();
        assert!(
            set.contains("user 65533 may not") && set.contains("as root"),
            "{set}"
        );
        assert_eq!(set, explain, "a refusal does not tell who is there");
    }
    // Whatever the honest VM is sent comes before the next answer to it: nothing was.
    honest.acknowledge();
    let mut operator = Observer::connect(&server.socket);
    operator.set("honest", 3, off);
    let serial = honest.question();
    honest.send(Kind::Done, &serial.to_ne_bytes());
    assert_eq!(operator.answer(), Answer::Done(3));
}

#[test]
fn a_user_with_many_processes_leaves_places_for_others() {
    let Some(server) = open_server_with(|config| config.max_connections = 16) else {
        return;
    };
    let connect = |name| Client::try_connect(&server.socket, name);
    let taken: Vec<Client> = as_stranger(|| (0..14).map_while(|_| connect("hostile")).collect());
    assert_eq!(taken.len(), 14);
    assert!(as_stranger(|| connect("hostile").is_none()));
    let mut honest = connect("honest").expect("a place is kept");
    honest.acknowledge();
}

#[test]
fn a_user_who_fills_the_store_leaves_a_quarter_to_others() {
    let Some(server) = open_server_with(|config| config.max_bytes = MAX) else {
        return;
    };
    let all = MAX / PAGE_SIZE as u64;
    let mut honest = Client::connect(&server.socket, "honest");
    let mut taken = 0;
    let _evil = as_stranger(|| {
        let mut evil = Client::connect(&server.socket, "evil");
        loop {
            let pages: Vec<_> = (0..STAGING_PAGES as u64).map(|n| page(taken + n)).collect();
            let slots = evil.publish(&pages).into_iter().flatten().count() as u64;
            taken += slots;
            if slots == 0 {
                return evil;
            }
        }
    });
    assert!((all / 2..=all * 3 / 4).contains(&taken), "{taken} of {all}");
    let mut share = |round: u64| {
        let first = (1 << 40) + round * STAGING_PAGES as u64;
        let pages: Vec<_> = (first..first + STAGING_PAGES as u64).map(page).collect();
        honest.publish(&pages).into_iter().flatten().count()
    };
    let rounds = (all - taken) / STAGING_PAGES as u64;
    assert!((0..rounds).all(|round| share(round) == STAGING_PAGES));
    assert_eq!(share(rounds), 0, "it is full");
}

#[test]
fn a_user_who_keeps_what_went_is_cut_off_and_waits() {
    let Some(server) = open_server_with(|config| (config.max_bytes, config.answer_seconds) = (MAX, 1)) else {
        return;
    };
    let mut honest = Client::connect(&server.socket, "honest");
    let is_cut_off = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            as_stranger(|| {
                let mut evil = Client::connect(&server.socket, "evil");
                evil.keeps = true;
                // It acknowledges all the time, and lets go of nothing.
                let end = catch_unwind(AssertUnwindSafe(|| {
                    loop {
                        evil.acknowledge();
                        std::thread::sleep(Duration::from_millis(50));
                    }
                }));
                assert!(end.is_err());
                drop(evil);
                is_cut_off.store(true, Ordering::Relaxed);
                let said = greeting(&server, "evil").expect_err("it may not join");
                assert!(said.contains("VMs of user 65533 kept what went"), "{said}");
            });
        });
        let mut seed = 0;
        eventually(|| {
            seed += 1;
            let came = come_and_go(&mut honest, seed << 20);
            is_cut_off.load(Ordering::Relaxed) && came == SLOTS_PER_SEGMENT as usize
        });
    });
    Client::connect(&server.socket, "another").acknowledge();
    let waited = eventually(|| as_stranger(|| greeting(&server, "evil").is_ok()));
    println!("it waited for {waited:?}");
    assert!(waited > Duration::from_secs(3), "{waited:?}");
}

/// A page whose content takes no time to make.
fn cheap(seed: u64) -> PageWords {
    let mut words = page(0);
    [0, 100, PAGE_WORDS - 1].iter().for_each(|at| words[*at] = seed);
    words
}

/// Publishes as many new pages as go into a message; their slots, where there was room.
fn publish_some(client: &mut Client, seed: &mut u64) -> Vec<Slot> {
    let first = *seed;
    *seed += STAGING_PAGES as u64;
    let pages: Vec<_> = (first..*seed).map(cheap).collect();
    client.publish(&pages).into_iter().flatten().collect()
}

/// Keeps half of the store, and has as many pages come and go as there is room for.
fn come_and_go_fast(path: &Path, is_over: &AtomicBool) {
    let mut evil = Client::connect(path, "evil");
    let mut seed = 1 << 30;
    let half = MAX / PAGE_SIZE as u64 / 2 / STAGING_PAGES as u64;
    (0..half).for_each(|_| _ = publish_some(&mut evil, &mut seed));
    while !is_over.load(Ordering::Relaxed) {
        let slots = publish_some(&mut evil, &mut seed);
        let dropped: Vec<_> = slots.iter().map(|slot| (*slot, -1)).collect();
        evil.batch(&[], &[], &dropped);
        evil.acknowledge();
        evil.release();
    }
}

#[test]
fn who_lets_go_a_little_later_is_not_cut_off_by_a_user_who_comes_and_goes() {
    let Some(server) = open_server_with(|config| (config.max_bytes, config.answer_seconds) = (MAX, 4)) else {
        return;
    };
    let mut honest = Client::connect(&server.socket, "honest");
    honest.keeps = true;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| as_stranger(|| come_and_go_fast(&server.socket, &is_over)));
        // As a service does that looks every two seconds where it maps what went.
        let (start, mut look, mut most) = (Instant::now(), Instant::now(), 0);
        let end = catch_unwind(AssertUnwindSafe(|| {
            while start.elapsed() < Duration::from_secs(20) {
                honest.acknowledge();
                most = most.max(honest.kept.len());
                if look.elapsed() > Duration::from_secs(2) {
                    look = Instant::now();
                    honest.kept.clear();
                    honest.release();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }));
        is_over.store(true, Ordering::Relaxed);
        println!("{most} segments were kept at most");
        assert!(end.is_ok(), "it is cut off after {:?}", start.elapsed());
        assert!(
            most > 2,
            "it had more than an equal part of four, or this shows nothing"
        );
    });
}

/// What the store says to who would join it with a VM: a welcome, or the error as which the connection ends.
fn greeting(server: &Server, name: &str) -> Result<(), String> {
    let hello = encode(Kind::Hello, &[Hello::new(Role::Service, name, 1).as_bytes()]);
    let socket = socket::connect(&server.socket).unwrap();
    let _ = socket::send(&socket, &hello, &[]);
    let mut buffer = aligned_buffer();
    let answer = socket::receive(&socket, &mut buffer).unwrap().unwrap();
    match answer.parse(&buffer).unwrap() {
        Message::Welcome(_) => Ok(()),
        Message::Error(text) => {
            assert!(answer.fds.is_empty());
            Err(text)
        }
        other => panic!("{other:?}"),
    }
}

/// The users of a list, besides root.
const GUEST: u32 = 65_532;

#[test]
fn who_is_not_on_the_list_is_told_so_and_shares_nothing() {
    let Some(server) = open_server_for(&[GUEST]) else {
        return;
    };
    let said = as_stranger(|| greeting(&server, "stranger")).expect_err("it is not on the list");
    assert!(
        said.contains("user 65533 may not join this store") && said.contains("--join-user"),
        "{said}"
    );
    // Root is always let in, and so is who is on it.
    Client::connect(&server.socket, "honest").acknowledge();
    as_user(GUEST, || Client::connect(&server.socket, "guest").acknowledge());
}

#[test]
fn strangers_who_connect_all_the_time_hold_up_nobody() {
    let Some(server) = open_server_for(&[GUEST]) else {
        return;
    };
    let mut honest = as_user(GUEST, || Client::connect(&server.socket, "honest"));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                as_stranger(|| {
                    while !done.load(Ordering::Relaxed) {
                        let _ = socket::connect(&server.socket);
                    }
                });
            });
        }
        let longest = longest_batch(&mut honest, Duration::from_secs(3));
        done.store(true, Ordering::Relaxed);
        println!("a batch took at most {longest:?}");
        assert!(longest < HONEST / 8, "a batch took {longest:?}");
    });
}

/// As many changes as a batch may have: the slot is dropped and taken again by each two.
const FLAPPING: usize = 2048;

#[test]
fn a_batch_that_drops_and_takes_a_slot_again_is_no_news() {
    let server = Server::start(|_| ());
    let mut honest = Client::connect(&server.socket, "honest");
    let mut evil = Client::connect(&server.socket, "evil");
    let slot = evil.publish(&[page(1)])[0].unwrap();
    honest.acknowledge();
    let (position, flapping) = (honest.index.news_position(), [(slot, -1), (slot, 1)]);
    let changes: Vec<_> = flapping.into_iter().cycle().take(FLAPPING).collect();
    // Each pair was a word of the ring: it was overrun.
    for _ in 0..2 * RING / FLAPPING {
        evil.batch(&[], &[], &changes);
    }
    honest.acknowledge();
    assert_eq!(honest.index.news_since(position), News::Keys(vec![]));
    // The pages that it counts are as many as before: the slot is found until it is dropped.
    assert_eq!(honest.find(&page(1)), Some(slot));
    evil.batch(&[], &[], &[(slot, 1), (slot, -2)]);
    assert_eq!(honest.find(&page(1)), None);
}

#[test]
fn who_takes_all_of_a_vms_names_does_not_keep_its_operator_from_it() {
    let server = Server::start(|_| ());
    let mut victim = Helper::start("victim", &server.socket);
    let pid: u32 = victim.ask("pid").parse().unwrap();
    let full = format!("victim.{pid}");
    let _hostile = ["victim", &full, &format!("{full}.2")].map(|name| Client::connect(&server.socket, name));
    let mut operator = Observer::connect(&server.socket);
    operator.set(&full, 1, Settings::default());
    assert_eq!(victim.ask("answer"), "answered");
    assert_eq!(operator.answer(), Answer::Done(1));
}

/// Not a test but the part of a VM in a process of its own.
#[test]
fn victim() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let mut client = Client::connect(Path::new(&path), "victim");
    for line in std::io::stdin().lock().lines() {
        match &*line.unwrap() {
            "pid" => println!("\n> {}", std::process::id()),
            _ => {
                let serial = client.question();
                client.send(Kind::Done, &serial.to_ne_bytes());
                println!("\n> answered");
            }
        }
    }
}

/// A small store, in bytes, and what others may keep of it.
const MAX: u64 = 64 << 20;
const HELD: u64 = 64 << 20;

/// Bytes of memory that a file in memory has.
fn bytes_of(file: impl AsFd) -> u64 {
    u64::try_from(rustix::fs::fstat(file).unwrap().st_blocks).unwrap() * 512
}

#[test]
fn who_says_that_it_lets_go_and_does_not_keeps_so_much_and_no_more() {
    let server = Server::start(|config| config.max_bytes = MAX);
    let mut honest = Client::connect(&server.socket, "honest");
    let shared = honest.publish(&[page(1)])[0].unwrap();
    let mut evil = Client::connect(&server.socket, "evil");
    evil.keeps = true;
    let mut seed = 1 << 20;
    let mut round = |client: &mut Client| {
        seed += u64::from(SLOTS_PER_SEGMENT);
        come_and_go(client, seed)
    };
    // It goes on until it gets nothing, and a while after that.
    let start = Instant::now();
    let mut got = Vec::new();
    while got.len() < 64 && (got.last() != Some(&0) || start.elapsed() < Duration::from_secs(6)) {
        got.push(round(&mut evil));
        honest.acknowledge();
        honest.release();
    }
    let kept: u64 = evil.kept.iter().map(|(file, _)| bytes_of(file)).sum();
    let resident = stats(&server.socket).store.resident_bytes;
    println!(
        "it got {got:?} pages, keeps {} MiB, {} MiB are resident",
        kept >> 20,
        resident >> 20
    );
    assert_eq!(got.last(), Some(&0));
    assert!(kept >= HELD / 2, "the attack works at all: {kept}");
    let slack = 2 * SEGMENT_BYTES as u64;
    assert!(
        kept <= MAX + HELD && resident <= MAX + HELD + slack,
        "{kept} and {resident}"
    );
    assert!(resident >= kept, "what it keeps is seen: {kept} of {resident}");
    // The others have what they had, and find it, where that may have moved to.
    let found = honest.find(&page(1)).unwrap();
    assert!(honest.content(shared) == page(1) && honest.content(found) == page(1));
    drop(evil);
    eventually(|| {
        honest.acknowledge();
        honest.release();
        honest.publish(&[page(2)])[0].is_some()
    });
    assert!(round(&mut honest) > 0);
    // It does not follow pages that move, so that their old segments are there, too.
    eventually(|| {
        honest.acknowledge();
        honest.release();
        stats(&server.socket).store.resident_bytes <= MAX
    });
}

#[test]
fn who_is_stopped_does_not_keep_the_store_from_growing() {
    let server = Server::start(|config| (config.max_bytes, config.answer_seconds) = (MAX, 1));
    let mut honest = Client::connect(&server.socket, "honest");
    // It reads nothing from here on: the files wait in its socket.
    let mut stopped = Client::connect(&server.socket, "stopped");
    let mut rounds = (1..).map(|round| come_and_go(&mut honest, round << 20));
    let (start, mut most) = (Instant::now(), 0);
    // Seven rounds are what others may keep while nothing else is there. It is cut off after six seconds, and before that.
    while most < 12 && start.elapsed() < Duration::from_secs(40) {
        most += usize::from(rounds.next() == Some(SLOTS_PER_SEGMENT as usize));
        std::thread::sleep(Duration::from_millis(1500));
    }
    println!("{most} rounds in {:?}", start.elapsed());
    assert_eq!(most, 12, "it is cut off");
    let text = stopped.error();
    assert!(
        text.contains("said nothing") && text.contains("connect again"),
        "{text}"
    );
    drop(stopped);
    // Once it goes on it is let in as ever.
    Client::connect(&server.socket, "stopped").acknowledge();
}

#[test]
fn who_reads_all_of_the_index_makes_it_no_larger_than_what_is_shared() {
    let server = Server::start(|_| ());
    let evil = Client::connect(&server.socket, "evil");
    let before = bytes_of(&evil.index_file);
    let len = usize::try_from(rustix::fs::fstat(&evil.index_file).unwrap().st_size).unwrap();
    let map = vmm_dedup_protocol::mapping::Mapping::read_only(&evil.index_file, len).unwrap();
    let sum: u64 = map
        .words()
        .iter()
        .map(|word| word.load(Ordering::Relaxed) & 1)
        .sum();
    let after = bytes_of(&evil.index_file);
    println!("{before} bytes of {len}, {after} when all are read ({sum})");
    assert!(after <= 4 << 20, "{after}");
}

#[test]
fn an_orphan_keeps_no_memory_of_segments_that_it_never_had() {
    let server = Server::start(|config| config.max_bytes = MAX);
    let mut orphan = Helper::start("loses_its_socket", &server.socket);
    assert_eq!(orphan.ask("connect"), "connected");
    assert_eq!(orphan.ask("hang up"), "done");
    let mut honest = Client::connect(&server.socket, "honest");
    let got: Vec<usize> = (1..20)
        .map(|round| come_and_go(&mut honest, round << 20))
        .collect();
    assert!(
        got.iter().all(|pages| *pages == SLOTS_PER_SEGMENT as usize),
        "{got:?}"
    );
    let mut resident = 0;
    eventually(|| {
        honest.acknowledge();
        honest.release();
        resident = stats(&server.socket).store.resident_bytes;
        resident <= 2 * SEGMENT_BYTES as u64
    });
    println!("{resident} bytes are resident");
}

/// Not a test but the part of a process that connects, loses its socket, and lives on.
#[test]
fn loses_its_socket() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let mut client = None;
    for line in std::io::stdin().lock().lines() {
        match &*line.unwrap() {
            "connect" => {
                client = Some(Client::connect(Path::new(&path), "orphan"));
                println!("\n> connected");
            }
            _ => {
                drop(client.take());
                println!("\n> done");
            }
        }
    }
}

/// As many processes as make twice the news that one user may.
const FLAPPERS: usize = 8;
/// Needless news of a user at once, and in a second, as in the store.
const NEWS_AT_ONCE: f64 = 32_768.0;
const NEWS_PER_SECOND: f64 = 16_384.0;

#[test]
fn a_user_with_many_processes_makes_no_more_news_than_a_user_may() {
    let Some(server) = open_server() else { return };
    let mut honest = Client::connect(&server.socket, "honest");
    let mut flappers: Vec<_> = (0..FLAPPERS)
        .map(|_| Helper::start("flapper", &server.socket))
        .collect();
    let (before, start) = (honest.index.news_position(), Instant::now());
    flappers
        .iter_mut()
        .for_each(|flapper| assert_eq!(flapper.ask("begin"), "begun"));
    let mut longest = Duration::ZERO;
    // On a busy machine the attack takes a while to work at all.
    eventually(|| {
        longest = longest.max(longest_batch(&mut honest, Duration::from_secs(6)));
        (honest.index.news_position() - before) as f64 >= NEWS_AT_ONCE
    });
    honest.acknowledge();
    let news = (honest.index.news_position() - before) as f64;
    let most = NEWS_AT_ONCE + NEWS_PER_SECOND * (start.elapsed().as_secs_f64() + 1.0);
    println!("{news} news, of {most} at most; a batch took at most {longest:?}");
    assert!(news <= most, "{news} of {most}");
    assert!(longest < HONEST / 4, "a batch took {longest:?}");
}

/// Not a test but the part of a process that drops slots and takes them again, batch by batch, until it is killed.
#[test]
fn flapper() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let begin = std::io::stdin().lock().lines().next();
    assert!(begin.is_some());
    println!("\n> begun");
    as_stranger(|| {
        let mut evil = Client::connect(Path::new(&path), "evil");
        let first = u64::from(std::process::id()) << 20;
        let pages: Vec<_> = (0..STAGING_PAGES as u64).map(|n| page(first + n)).collect();
        let slots: Vec<_> = evil.publish(&pages).into_iter().flatten().collect();
        for delta in [-1, 1].into_iter().cycle() {
            let changes: Vec<_> = slots.iter().map(|slot| (*slot, delta)).collect();
            // It acknowledges nothing, so that none of them is free.
            evil.send_batch(0, &[], &[], &changes);
            evil.batch_reply();
        }
    });
}

/// A user whose store it is.
const OWNER: u32 = 65_531;
/// How many files that store may have open, and so how many descriptors Linux lets be on their way to all others together.
const FILES: u64 = 1024;
/// Connections to a store of so many segments that have more descriptors than that, when each is sent them.
const UNREADING: u32 = 150;
const SEGMENTS: usize = 6;

/// Publishes pages until there is a new segment: the longest that took.
fn until_there_is_a_new_segment(client: &mut Client, seed: &mut u64) -> Duration {
    let segments = |client: &Client| client.segments.iter().flatten().count();
    let (before, mut longest) = (segments(client), Duration::ZERO);
    while segments(client) == before {
        let pages: Vec<_> = (*seed..*seed + STAGING_PAGES as u64).map(page).collect();
        *seed += STAGING_PAGES as u64;
        let asked = Instant::now();
        assert!(client.publish(&pages).iter().all(Option::is_some));
        longest = longest.max(asked.elapsed());
        client.acknowledge();
    }
    longest
}

#[test]
fn a_user_that_greets_and_reads_nothing_keeps_no_descriptor_from_others() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can act as another user");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let socket = dir.path().join("store.sock");
    let mut store = Helper::start("owner", &socket);
    assert_eq!(store.ask("begin"), "serving");
    let (mut honest, mut seed) = (Client::connect(&socket, "honest"), 1 << 30);
    (0..SEGMENTS).for_each(|_| _ = until_there_is_a_new_segment(&mut honest, &mut seed));
    let hello = encode(Kind::Hello, &[Hello::new(Role::Service, "evil", 1).as_bytes()]);
    let evil: Vec<_> = as_stranger(|| {
        let connect = |_| {
            let evil = socket::connect(&socket).unwrap();
            socket::send(&evil, &hello, &[]).unwrap();
            evil
        };
        (0..UNREADING).map(connect).collect()
    });
    // The last ones have joined.
    eventually(|| stats_from(&socket, UNREADING).next != 0);
    let start = Instant::now();
    let mut second = Client::connect(&socket, "second");
    second.acknowledge();
    let welcomed = start.elapsed();
    let longest = until_there_is_a_new_segment(&mut honest, &mut seed);
    let start = Instant::now();
    second.acknowledge();
    let told = start.elapsed();
    println!(
        "a VM is welcomed after {welcomed:?}, has a segment after {longest:?}, and hears of it within {told:?}"
    );
    let segments = |client: &Client| client.segments.iter().flatten().count();
    assert_eq!(segments(&second), segments(&honest));
    for took in [welcomed, longest, told] {
        assert!(took < HONEST / 4, "{took:?}");
    }
    // Who reads gets what is his, one after the other. The rest are cut off when they have waited long enough.
    let mut buffer = aligned_buffer();
    let mut welcomes = 0;
    for evil in &evil {
        rustix::io::ioctl_fionbio(evil, true).unwrap();
    }
    eventually(|| {
        welcomes += evil
            .iter()
            .filter(|evil| matches!(socket::receive(evil, &mut buffer), Ok(Some(r)) if r.fds.len() == 2))
            .count();
        welcomes == evil.len()
    });
}

/// Not a test but the part of a store that runs as a user of its own, without any capability.
#[test]
fn owner() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let limit = rustix::process::Rlimit {
        current: Some(FILES),
        maximum: Some(FILES),
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    as_user(OWNER, || {
        let _server = Server::start(|config| {
            (config.socket, config.mode) = (path.into(), 0o666);
            config.max_connections_per_process = 1000;
        });
        let mut lines = std::io::stdin().lock().lines();
        assert!(lines.next().is_some());
        println!("\n> serving");
        lines.for_each(drop);
    });
}
