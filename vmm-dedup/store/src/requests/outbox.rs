//! Records on their way to one peer. Sending never waits: what the socket does not take is queued, and a peer that
//! lets too much pile up is cut off.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use vmm_dedup_protocol::socket;

/// Most records that wait for one peer, beyond those that a greeting takes.
const MAX_QUEUED: usize = 1024;

/// Most bytes of such records. Who reads has one answer to wait for, of at most 64 KiB.
const MAX_QUEUED_BYTES: usize = 256 << 10;

#[derive(Debug)]
struct Record {
    bytes: Vec<u8>,
    fds: Vec<Arc<OwnedFd>>,
}

#[derive(Debug, Default)]
struct Queue {
    records: VecDeque<Record>,
    /// So many from the first on belong to the greeting: a large store has many segments, and who joins is not late with
    /// reading of them.
    greeting: usize,
    /// Of the records that do not.
    bytes: usize,
    overflow: bool,
}

/// What became of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// All was sent.
    Empty,
    /// The socket takes no more for now.
    Blocked,
    /// The kernel takes no more for now, and will not tell when it does: to be tried again soon.
    Later,
    /// The peer is to be cut off: it does not read.
    Overflow,
    /// The socket is broken.
    Broken,
}

/// The sending side of a connection.
#[derive(Debug)]
pub(crate) struct Outbox {
    socket: Arc<OwnedFd>,
    queue: Mutex<Queue>,
    queued: Notify,
}

fn send(socket: &OwnedFd, record: &Record) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = record.fds.iter().map(|fd| fd.as_fd()).collect();
    socket::send(socket, &record.bytes, &fds)
}

/// Whether the kernel is out of buffers, or too many descriptors wait in sockets of this user. Both pass.
fn is_shortage(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::NOBUFS, Errno::TOOMANYREFS]
        .into_iter()
        .any(|e| error.raw_os_error() == Some(e.raw_os_error()))
}

impl Outbox {
    pub(crate) fn new(socket: Arc<OwnedFd>) -> Self {
        Self {
            socket,
            queue: Mutex::default(),
            queued: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a record now or queues it.
    pub(crate) fn push(&self, bytes: Vec<u8>, fds: Vec<Arc<OwnedFd>>) {
        self.send_or_queue(Record { bytes, fds }, false);
    }

    /// As [`Self::push`], for what a peer is given when it joins: such records never are too many.
    pub(crate) fn push_greeting(&self, bytes: Vec<u8>, fds: Vec<Arc<OwnedFd>>) {
        self.send_or_queue(Record { bytes, fds }, true);
    }

    fn send_or_queue(&self, record: Record, greeting: bool) {
        let mut queue = self.lock();
        if queue.records.is_empty() && send(&self.socket, &record).is_ok() {
            return;
        }
        // Errors other than a full socket show again, and are dealt with, when the queue is flushed.
        if greeting {
            queue.records.push_back(record);
            (queue.greeting, queue.bytes) = (queue.records.len(), 0);
        } else if queue.records.len() - queue.greeting < MAX_QUEUED
            && queue.bytes + record.bytes.len() <= MAX_QUEUED_BYTES
        {
            queue.bytes += record.bytes.len();
            queue.records.push_back(record);
        } else {
            queue.overflow = true;
        }
        self.queued.notify_one();
    }

    /// Sends what waits, as far as the socket takes it.
    pub(crate) fn flush(&self) -> Flushed {
        let mut queue = self.lock();
        if queue.overflow {
            return Flushed::Overflow;
        }
        while let Some(record) = queue.records.front() {
            match send(&self.socket, record) {
                Ok(()) => {
                    let sent = queue.records.pop_front();
                    match queue.greeting {
                        0 => queue.bytes -= sent.map_or(0, |record| record.bytes.len()),
                        _ => queue.greeting -= 1,
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Flushed::Blocked,
                Err(e) if is_shortage(&e) => return Flushed::Later,
                Err(_) => return Flushed::Broken,
            }
        }
        Flushed::Empty
    }

    /// Whether the peer is to be cut off since it does not read.
    pub(crate) fn has_overflowed(&self) -> bool {
        self.lock().overflow
    }

    /// Waits until something has been queued.
    pub(crate) async fn queued(&self) {
        self.queued.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use vmm_dedup_protocol::message::{Kind, aligned_buffer, encode};

    #[test]
    fn shortages_pass_and_broken_sockets_do_not() {
        use rustix::io::Errno;
        assert!(is_shortage(&Errno::NOBUFS.into()) && is_shortage(&Errno::TOOMANYREFS.into()));
        assert!(!is_shortage(&Errno::PIPE.into()) && !is_shortage(&Errno::CONNRESET.into()));
    }

    #[test]
    fn a_greeting_may_be_long_and_what_follows_may_not() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let outbox = Outbox::new(Arc::new(a));
        let segment = |n: u32| encode(Kind::SegmentRetired, &[&n.to_le_bytes()]);
        // Files of 1 TiB.
        (0..65_536).for_each(|n| outbox.push_greeting(segment(n), Vec::new()));
        (65_536..66_500).for_each(|n| outbox.push(segment(n), Vec::new()));
        let (mut buffer, mut got) = (aligned_buffer(), 0);
        while got < 66_500 {
            match socket::receive(&b, &mut buffer) {
                Ok(Some(_)) => got += 1,
                _ => assert_ne!(outbox.flush(), Flushed::Overflow),
            }
        }
        (0..4000).for_each(|n| outbox.push(segment(n), Vec::new()));
        assert_eq!(outbox.flush(), Flushed::Overflow);
    }

    #[test]
    fn long_records_are_too_many_before_short_ones_are() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let outbox = Outbox::new(Arc::new(a));
        let record = vec![0; 8 << 10];
        // The socket takes some of them itself.
        while outbox.flush() == Flushed::Empty {
            outbox.push(record.clone(), Vec::new());
        }
        let queued = MAX_QUEUED_BYTES / record.len() - 1;
        (0..queued).for_each(|_| outbox.push(record.clone(), Vec::new()));
        assert_eq!(outbox.flush(), Flushed::Blocked);
        // What stands before a greeting goes with it.
        outbox.push_greeting(record.clone(), Vec::new());
        outbox.push(record.clone(), Vec::new());
        let mut buffer = aligned_buffer();
        while outbox.flush() == Flushed::Blocked {
            while socket::receive(&b, &mut buffer).is_ok() {}
        }
        assert_eq!((outbox.flush(), outbox.lock().bytes), (Flushed::Empty, 0));
        (0..200).for_each(|_| outbox.push(record.clone(), Vec::new()));
        assert_eq!(outbox.flush(), Flushed::Overflow);
    }

    #[test]
    fn a_peer_that_does_not_read_overflows_and_one_that_does_gets_all_in_order() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let outbox = Outbox::new(Arc::new(a));
        (0..1000u32).for_each(|n| outbox.push(encode(Kind::SegmentRetired, &[&n.to_le_bytes()]), Vec::new()));
        let (mut buffer, mut got) = (aligned_buffer(), 0);
        while got < 1000 {
            match socket::receive(&b, &mut buffer) {
                Ok(Some(record)) => {
                    let message = record.parse(&buffer).unwrap();
                    assert!(
                        matches!(message, vmm_dedup_protocol::message::Message::SegmentRetired(n) if n == got)
                    );
                    got += 1;
                }
                _ => assert_ne!(outbox.flush(), Flushed::Overflow),
            }
        }
        (0..4000u32).for_each(|n| outbox.push(encode(Kind::SegmentRetired, &[&n.to_le_bytes()]), Vec::new()));
        assert_eq!(outbox.flush(), Flushed::Overflow);
    }
}
