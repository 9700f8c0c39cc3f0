//! Attacks on a live store, and what an honest VM notices of each.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};
use support::{Answer, Client, Observer, Server};
use vmm_dedup_protocol::control::{Settings, Switch};
use vmm_dedup_protocol::message::{Hello, Kind, Role, encode};
use vmm_dedup_protocol::socket;
use vmm_dedup_protocol::stats::ServiceStats;
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
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let stranger = rustix::process::Uid::from_raw(STRANGER);
            rustix::thread::set_thread_res_uid(stranger, stranger, stranger).unwrap();
            act()
        });
        thread.join().unwrap()
    })
}

/// A store whose socket anybody may open; `None` where the test cannot become somebody else.
fn open_server() -> Option<Server> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can act as another user");
        return None;
    }
    let server = Server::start(|config| config.mode = 0o666);
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
