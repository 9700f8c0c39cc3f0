//! Records on their way to one peer. Sending never waits: what the socket does not take is queued, and a peer that
//! lets too much pile up is cut off. Descriptors go out as far as its user's are read: [`crate::requests::unread`].

use crate::requests::unread::{Share, Wait};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use vmm_dedup_protocol::socket;

/// Most records that wait for one peer, beyond those that a greeting takes.
const MAX_QUEUED: usize = 1024;

/// Most bytes of such records. Who reads has one answer to wait for, of at most 64 KiB.
const MAX_QUEUED_BYTES: usize = 256 << 10;

/// How long a descriptor may wait until what was sent before is read.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Record {
    bytes: Vec<u8>,
    fds: Vec<Arc<OwnedFd>>,
}

#[derive(Debug)]
struct Queue {
    records: VecDeque<Record>,
    /// So many from the first on belong to the greeting: a large store has many segments, and who joins is not late with
    /// reading of them.
    greeting: usize,
    /// Of the records that do not.
    bytes: usize,
    overflow: bool,
    /// What was sent and is not read.
    unread: Share,
    /// Since when the first record waits, if it has a descriptor.
    waiting: Option<Instant>,
}

/// What became of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// All was sent, and all descriptors were read.
    Empty,
    /// The peer is to read first.
    Blocked,
    /// Others of the peer's user are to read first.
    NoRoom,
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

/// Sends a record, or tells why not.
fn send(socket: &OwnedFd, unread: &mut Share, record: &Record) -> Result<(), Flushed> {
    let fds: Vec<BorrowedFd<'_>> = record.fds.iter().map(|fd| fd.as_fd()).collect();
    if !fds.is_empty() {
        unread.look(socket);
        unread.take(fds.len()).map_err(|wait| match wait {
            Wait::ForPeer => Flushed::Blocked,
            Wait::ForUser => Flushed::NoRoom,
        })?;
    }
    socket::send(socket, &record.bytes, &fds).map_err(|e| {
        unread.give_back(fds.len());
        match e {
            e if e.kind() == io::ErrorKind::WouldBlock => Flushed::Blocked,
            e if is_shortage(&e) => Flushed::Later,
            _ => Flushed::Broken,
        }
    })
}

/// Whether the kernel is out of buffers, or too many descriptors wait in sockets of this user. Both pass.
fn is_shortage(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::NOBUFS, Errno::TOOMANYREFS]
        .into_iter()
        .any(|e| error.raw_os_error() == Some(e.raw_os_error()))
}

impl Outbox {
    pub(crate) fn new(socket: Arc<OwnedFd>, unread: Share) -> Self {
        let queue = Queue {
            records: VecDeque::new(),
            greeting: 0,
            bytes: 0,
            overflow: false,
            unread,
            waiting: None,
        };
        Self {
            socket,
            queue: Mutex::new(queue),
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
        if queue.records.is_empty() && send(&self.socket, &mut queue.unread, &record).is_ok() {
            // It is to be seen when they are read.
            if !record.fds.is_empty() {
                self.queued.notify_one();
            }
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

    /// Sends what waits, as far as that is possible now.
    pub(crate) fn flush(&self) -> Flushed {
        let mut queue = self.lock();
        if queue.overflow {
            return Flushed::Overflow;
        }
        let Queue { records, unread, .. } = &mut *queue;
        unread.look(&self.socket);
        let mut left = None;
        let unsent = |record: &Record| {
            left = send(&self.socket, unread, record).err();
            left.is_some()
        };
        let sent = records.iter().position(unsent).unwrap_or(records.len());
        for _ in 0..sent {
            let bytes = queue.records.pop_front().map_or(0, |record| record.bytes.len());
            match queue.greeting {
                0 => queue.bytes -= bytes,
                _ => queue.greeting -= 1,
            }
        }
        if sent > 0 {
            queue.waiting = None;
        }
        match (left, queue.records.front()) {
            (Some(Flushed::Blocked | Flushed::NoRoom), Some(first)) if !first.fds.is_empty() => {
                let now = Instant::now();
                let since = *queue.waiting.get_or_insert(now);
                queue.overflow = now.saturating_duration_since(since) >= PATIENCE;
            }
            _ => {}
        }
        match left {
            _ if queue.overflow => Flushed::Overflow,
            Some(why) => why,
            None if queue.unread.is_empty() => Flushed::Empty,
            None => Flushed::Blocked,
        }
    }

    /// Returns when others of the peer's user may have read, which is to be seen.
    pub(crate) async fn room(&self) {
        let room = self.lock().unread.room();
        room.notified().await;
    }

    /// Sends a record in place of all that waits, if the socket takes it.
    pub(crate) fn end_with(&self, bytes: Vec<u8>) {
        let mut queue = self.lock();
        queue.records.clear();
        let record = Record {
            bytes,
            fds: Vec::new(),
        };
        let _ = send(&self.socket, &mut queue.unread, &record);
    }

    /// What the peer has not read, if there is some. Nothing is to be sent any more.
    pub(crate) fn left_unread(&self) -> Option<Share> {
        let mut queue = self.lock();
        queue.unread.look(&self.socket);
        (!queue.unread.is_empty()).then(|| queue.unread.split_off())
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
    use crate::requests::unread::Unread;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use vmm_dedup_protocol::message::{Kind, aligned_buffer, encode};

    fn share() -> Share {
        Arc::new(Unread::new(1024)).share(1)
    }

    #[test]
    fn shortages_pass_and_broken_sockets_do_not() {
        use rustix::io::Errno;
        assert!(is_shortage(&Errno::NOBUFS.into()) && is_shortage(&Errno::TOOMANYREFS.into()));
        assert!(!is_shortage(&Errno::PIPE.into()) && !is_shortage(&Errno::CONNRESET.into()));
    }

    #[test]
    fn a_greeting_may_be_long_and_what_follows_may_not() {
        let (a, b) = pair();
        let outbox = Outbox::new(Arc::new(a), share());
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
        let (a, b) = pair();
        let outbox = Outbox::new(Arc::new(a), share());
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
        let (a, b) = pair();
        let outbox = Outbox::new(Arc::new(a), share());
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

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    /// Reads what there is: how many descriptors.
    fn read(socket: &OwnedFd) -> usize {
        let mut buffer = aligned_buffer();
        let records = std::iter::from_fn(|| socket::receive(socket, &mut buffer).ok().flatten());
        records.map(|record| record.fds.len()).sum()
    }

    #[test]
    fn a_user_that_reads_nothing_leaves_descriptors_to_others_also_when_its_connections_end() {
        let unread = Arc::new(Unread::new(512));
        let file = Arc::new(rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let connect = |uid, records| {
            let (ours, theirs) = pair();
            let outbox = Outbox::new(Arc::new(ours), unread.share(uid));
            (0..records).for_each(|_| outbox.push_greeting(vec![0; 16], vec![file.clone()]));
            (outbox, theirs)
        };
        let mut hostile: Vec<_> = (0..20).map(|_| connect(1, 20)).collect();
        let mut others: Vec<_> = (0..2).map(|_| connect(2, 20)).collect();
        assert_eq!(read(&others[0].1), 16, "another user has its own");
        assert_eq!((others[0].0.flush(), read(&others[0].1)), (Flushed::Blocked, 4));
        assert_eq!(others[0].0.flush(), Flushed::Empty);
        assert_eq!(hostile[19].0.flush(), Flushed::NoRoom);
        // They end, and are replaced, and again: what is in their sockets counts as ever.
        let mut ended = Vec::new();
        for _ in 0..3 {
            for (outbox, theirs) in hostile.drain(..) {
                outbox.end_with(vec![0; 16]);
                ended.push((outbox.left_unread(), theirs));
            }
            hostile.extend((0..20).map(|_| connect(1, 20)));
        }
        let kept: usize = ended.iter().map(|(_, theirs)| read(theirs)).sum();
        assert!((16..=512 / 16).contains(&kept), "{kept}");
        assert_eq!(hostile[0].0.flush(), Flushed::NoRoom, "nobody has looked");
        drop(ended);
        assert_eq!(hostile[0].0.flush(), Flushed::Blocked);
        // Who goes leaves nothing.
        drop(others.pop());
        drop(hostile);
        let (outbox, theirs) = connect(1, 20);
        assert_eq!(
            (read(&theirs), outbox.flush(), read(&theirs)),
            (16, Flushed::Blocked, 4)
        );
    }

    #[test]
    fn who_leaves_descriptors_unread_is_cut_off_if_more_wait() {
        let unread = Arc::new(Unread::new(1024));
        let file = Arc::new(rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let (ours, _theirs) = pair();
        let outbox = Outbox::new(Arc::new(ours), unread.share(1));
        let long_ago = Instant::now().checked_sub(PATIENCE).unwrap();
        (0..16).for_each(|_| outbox.push(vec![0; 16], vec![file.clone()]));
        outbox.push(vec![0; 16], Vec::new());
        assert_eq!(outbox.flush(), Flushed::Blocked);
        assert_eq!(outbox.lock().waiting, None, "nothing waits");
        outbox.push(vec![0; 16], vec![file]);
        assert_eq!(outbox.flush(), Flushed::Blocked);
        let since = outbox.lock().waiting.replace(long_ago);
        assert!(since.is_some());
        assert_eq!(outbox.flush(), Flushed::Overflow);
    }
}
