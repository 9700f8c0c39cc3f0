//! A service that only says what it is told to.

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;
use vmm_dedup_protocol::message::{Hello, Kind, Message, Role, aligned_buffer, encode};
use vmm_dedup_protocol::socket;
use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::IntoBytes;

/// Connects as the service of a VM of 1 GiB.
pub(crate) fn connect(store: &Path, name: &str) -> OwnedFd {
    let connection = socket::connect(store).expect("a connection");
    set_socket_timeout(&connection, Timeout::Recv, Some(Duration::from_secs(10))).expect("a timeout");
    let hello = Hello::new(Role::Service, name, 262_144);
    socket::send(&connection, &encode(Kind::Hello, &[hello.as_bytes()]), &[]).expect("hello");
    let mut buffer = aligned_buffer();
    let answer = socket::receive(&connection, &mut buffer).expect("an answer");
    let answer = answer.expect("a welcome");
    assert!(matches!(answer.parse(&buffer), Ok(Message::Welcome(_))));
    connection
}

/// Reports this.
pub(crate) fn report(connection: &OwnedFd, stats: &ServiceStats) {
    socket::send(connection, &encode(Kind::Report, &[stats.as_bytes()]), &[]).expect("a report");
}
