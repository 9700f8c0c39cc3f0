//! Attacks on a live store, and what an honest VM notices of each.

mod support;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use support::{Client, Server};
use vmm_dedup_protocol::message::{Hello, Kind, Role, encode};
use vmm_dedup_protocol::socket;
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
