//! What a store says of its VMs.

use std::path::Path;
use vmm_dedup_protocol::message::{Hello, Kind, Message, Role, StatsRequest, aligned_buffer, encode};
use vmm_dedup_protocol::socket;
use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::IntoBytes;

/// Names and accounts of the VMs that are connected to a store.
///
/// # Panics
/// If the store does not answer.
#[must_use]
pub fn vms(store: &Path) -> Vec<(String, ServiceStats)> {
    let stream = socket::connect(store).expect("the store is there");
    let hello = Hello::new(Role::Observer, "test", 0);
    socket::send(&stream, &encode(Kind::Hello, &[hello.as_bytes()]), &[]).expect("it listens");
    let mut buffer = aligned_buffer();
    socket::receive(&stream, &mut buffer)
        .expect("it answers")
        .expect("it welcomes an observer");
    let mut vms = Vec::new();
    loop {
        let index = u32::try_from(vms.len()).expect("few VMs");
        let request = StatsRequest { index, reserved: 0 };
        socket::send(&stream, &encode(Kind::StatsRequest, &[request.as_bytes()]), &[]).expect("it listens");
        let received = socket::receive(&stream, &mut buffer)
            .expect("it answers")
            .expect("it stays");
        let Message::Stats(stats) = received.parse(&buffer).expect("a message") else {
            panic!("not what was asked for");
        };
        if stats.found == 0 {
            return vms;
        }
        let name = stats.name.split(|b| *b == 0).next().unwrap_or_default();
        vms.push((String::from_utf8_lossy(name).into_owned(), stats.vm));
    }
}

/// The account of one VM, if it is connected.
#[must_use]
pub fn vm(store: &Path, name: &str) -> Option<ServiceStats> {
    vms(store)
        .into_iter()
        .find_map(|(n, stats)| (n == name).then_some(stats))
}
