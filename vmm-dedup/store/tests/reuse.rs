//! Pages that the kernel still reads when nobody maps them any more.
//!
//! A pipe plays the slow disk: vmsplice() puts a page into it by reference, as a direct write or a `MSG_ZEROCOPY` send
//! does, and what is read from the pipe later is what the page holds by then.
#![allow(unsafe_code)] // vmsplice

mod support;

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::time::Duration;
use support::{Client, Server, eventually, page, stats};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};
use vmm_dedup_protocol::{PAGE_SIZE, Slot};
use zerocopy::IntoBytes;

/// I/O that reads a slot and does not end before it is asked to.
struct SlowRead {
    pipe: File,
}

impl SlowRead {
    fn start(client: &Client, slot: Slot) -> Self {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let (_, map) = client.segments[slot.segment() as usize].as_ref().unwrap();
        let page = libc::iovec {
            iov_base: (map.address() + slot.offset()) as *mut _,
            iov_len: PAGE_SIZE,
        };
        // SAFETY: the vector names a page of a live mapping, which the kernel only reads.
        let taken = unsafe { libc::vmsplice(write.as_raw_fd(), &raw const page, 1, 0) };
        assert_eq!(taken, PAGE_SIZE.cast_signed());
        Self { pipe: read.into() }
    }

    fn end(mut self) -> PageWords {
        let mut page = [0; PAGE_WORDS];
        self.pipe.read_exact(page.as_mut_bytes()).unwrap();
        page
    }
}

/// Publishes two pages and drops the first one while it is being read; then publishes others.
fn read_slowly(server: &Server) -> (Client, SlowRead, Vec<Slot>) {
    let mut client = Client::connect(&server.socket, "a");
    let slots = client.publish(&[page(1), page(2)]);
    let read = SlowRead::start(&client, slots[0].unwrap());
    client.batch(&[], &[], &[(slots[0].unwrap(), -1)]);
    client.acknowledge();
    // One by one: they would fill a hole of one slot.
    let others = (10..20).map(|seed| client.publish(&[page(seed)])[0].unwrap());
    let mut all: Vec<Slot> = others.collect();
    all.push(slots[1].unwrap());
    (client, read, all)
}

#[test]
fn what_is_still_read_stays_as_it_is() {
    let server = Server::start(|_| ());
    let (_client, read, _) = read_slowly(&server);
    assert_eq!(read.end(), page(1));
}

#[test]
fn what_is_still_read_stays_as_it_is_when_its_segment_goes_and_its_number_returns() {
    let server = Server::start(|_| ());
    let (mut client, read, slots) = read_slowly(&server);
    let dropped: Vec<(Slot, i32)> = slots.into_iter().map(|slot| (slot, -1)).collect();
    client.batch(&[], &[], &dropped);
    eventually(Duration::from_secs(5), || {
        client.acknowledge();
        client.retired == [0]
    });
    client.release();
    eventually(Duration::from_secs(5), || {
        stats(&server.socket).store.resident_bytes == 0
    });
    std::thread::sleep(Duration::from_millis(1500));
    let again = client.publish(&[page(30)])[0].unwrap();
    assert_eq!((again.number(), client.content(again)), (0, page(30)));
    assert_eq!(read.end(), page(1));
}
