//! Attacks on a live store, and what an honest VM notices of each.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use support::{Client, Server};
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
