//! Pages that the kernel still reads when nobody maps them any more.
//!
//! A pipe plays the slow disk: vmsplice() puts a page into it by reference, as a direct write or a `MSG_ZEROCOPY` send
//! does, and what is read from the pipe later is what the page holds by then.
#![allow(unsafe_code)] // vmsplice; a clock of its own

mod support;

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};
use support::{Client, Server, TICKS, eventually, page, stats};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};
use vmm_dedup_protocol::{PAGE_SIZE, SEGMENT_BYTES, SLOTS_PER_SEGMENT, STAGING_PAGES, Slot};
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
    eventually(|| {
        client.acknowledge();
        client.retired == [0]
    });
    client.release();
    eventually(|| stats(&server.socket).store.resident_bytes == 0);
    std::thread::sleep(TICKS);
    let again = client.publish(&[page(30)])[0].unwrap();
    assert_eq!((again.number(), client.content(again)), (0, page(30)));
    assert_eq!(read.end(), page(1));
}

/// Seconds that this process's clocks are ahead.
static AHEAD: AtomicI64 = AtomicI64::new(0);

/// Stands in the place of the C library's: what asks for the time in this process asks here.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    // SAFETY: as promised by the caller.
    let done = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    if done == 0 && matches!(clock, libc::CLOCK_MONOTONIC | libc::CLOCK_REALTIME) {
        // SAFETY: the kernel has just written it.
        unsafe { (*time).tv_sec += AHEAD.load(Ordering::Relaxed) };
    }
    if done == 0 { 0 } else { -1 }
}

/// However long I/O takes: a year goes by, and the dead slot is the only one that could be had.
#[test]
fn what_is_still_read_a_year_later_stays_as_it_is() {
    const YEAR: i64 = 365 * 24 * 3600;
    let server = Server::start(|config| config.max_bytes = SEGMENT_BYTES as u64);
    let mut client = Client::connect(&server.socket, "a");
    let pages: Vec<PageWords> = (1..=u64::from(SLOTS_PER_SEGMENT)).map(page).collect();
    let slots: Vec<Slot> = pages
        .chunks(STAGING_PAGES)
        .flat_map(|pages| client.publish(pages))
        .map(Option::unwrap)
        .collect();
    let read = SlowRead::start(&client, slots[0]);
    client.batch(&[], &[], &[(slots[0], -1)]);
    client.acknowledge();
    let before = Instant::now();
    AHEAD.store(YEAR, Ordering::Relaxed);
    assert!(
        before.elapsed() > Duration::from_secs(YEAR.unsigned_abs()),
        "time has gone by"
    );
    std::thread::sleep(TICKS);
    client.acknowledge();
    let another = client.publish(&[page(10_000)]);
    AHEAD.store(0, Ordering::Relaxed);
    assert_eq!(another, [None], "the store is full");
    assert_eq!(read.end(), page(1));
}
