//! Records and descriptors over a `SOCK_SEQPACKET` Unix socket.

use crate::message::{MAX_MESSAGE, Malformed, Message, parse};
use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Most descriptors in one record of a store.
const MAX_FDS: usize = 2;

/// Most descriptors that the kernel passes with one record (SCM_MAX_FD). Room for all of them is given to it: what it has no
/// room for it closes in the thread that receives, and closing can take as long as who sent it likes.
const MOST_RECEIVED: usize = 253;

/// A store that takes longer than this for one record, or to accept a connection, hangs.
const PATIENCE: Duration = Duration::from_secs(5);

/// Connects to a store. Blocking, but not for ever: connecting, sending and receiving fail with
/// [`io::ErrorKind::WouldBlock`] when the store hangs for five seconds.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    let address = SocketAddrUnix::new(path)?;
    // With a timeout set, signals interrupt also where SA_RESTART would otherwise hide them.
    retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    Ok(socket)
}

/// Binds and listens, non-blocking. The path must not exist.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Accepts one connection, non-blocking.
pub fn accept(listener: impl AsFd) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(retry_on_intr(|| rustix::net::accept_with(&listener, flags))?)
}

/// Sends one record with its descriptors.
pub fn send(socket: impl AsFd, record: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "too many descriptors for one message",
        ));
    }
    let sent = retry_on_intr(|| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(rustix::io::Errno::INVAL);
        }
        let record = [IoSlice::new(record)];
        rustix::net::sendmsg(&socket, &record, &mut ancillary, SendFlags::NOSIGNAL)
    })?;
    if sent == record.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// As [`send`], to who may have hung up already: then what it said before is there to be received.
pub fn send_or_hear_why_not(socket: impl AsFd, record: &[u8]) -> io::Result<()> {
    match send(socket, record, &[]) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        sent => sent,
    }
}

/// A record as received.
#[derive(Debug)]
pub struct Received {
    len: usize,
    /// Descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

/// Receives one record into `buffer` (of [`crate::message::aligned_buffer`]); `None` at the end of the connection.
pub fn receive(socket: impl AsFd, buffer: &mut [u64]) -> io::Result<Option<Received>> {
    let mut fds = Vec::new();
    let received = receive_apart(socket, buffer, &mut fds)?;
    Ok(received.map(|received| Received { fds, ..received }))
}

/// As [`receive`], for who does not trust the peer: all descriptors that arrived are added to `fds`, whatever the result is, and
/// none comes with it. So the caller decides in which thread they are closed.
pub fn receive_apart(
    socket: impl AsFd,
    buffer: &mut [u64],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<Option<Received>> {
    let got = retry_on_intr(|| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RECEIVED))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(buffer.as_mut_bytes())];
        let got = rustix::net::recvmsg(&socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        Ok(got)
    })?;
    if got.flags.contains(ReturnFlags::TRUNC) {
        let text = format!("a message longer than {MAX_MESSAGE} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok((got.bytes > 0).then_some(Received {
        len: got.bytes,
        fds: Vec::new(),
    }))
}

impl Received {
    /// Parses the record, which lies in the buffer it was received into.
    pub fn parse<'a>(&self, buffer: &'a [u64]) -> Result<Message<'a>, Malformed> {
        parse(&buffer.as_bytes()[..self.len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Kind, aligned_buffer, encode};

    fn pair() -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap()
    }

    #[test]
    fn records_keep_their_bounds_and_descriptors() {
        let (a, b) = pair();
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        send(
            &a,
            &encode(Kind::Segment, &[&5u32.to_le_bytes()]),
            &[file.as_fd()],
        )
        .unwrap();
        send(&a, &encode(Kind::SegmentRetired, &[&5u32.to_le_bytes()]), &[]).unwrap();
        let mut buffer = aligned_buffer();
        let first = receive(&b, &mut buffer).unwrap().unwrap();
        assert!(matches!(first.parse(&buffer), Ok(Message::Segment(5))));
        assert_eq!(first.fds.len(), 1);
        let second = receive(&b, &mut buffer).unwrap().unwrap();
        assert!(matches!(second.parse(&buffer), Ok(Message::SegmentRetired(5))));
        drop(a);
        assert!(receive(&b, &mut buffer).unwrap().is_none());
    }

    #[test]
    fn a_hung_store_is_not_waited_for_for_ever() {
        let path = std::env::temp_dir().join(format!("vmm-dedup-hung-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let _listener = listen(&path).unwrap();
        let start = std::time::Instant::now();
        // Nobody accepts: the backlog fills.
        let mut waiting = Vec::new();
        let error = loop {
            match connect(&path) {
                Ok(socket) => waiting.push(socket),
                Err(e) => break e,
            }
            assert!(waiting.len() < 1000);
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(start.elapsed() >= PATIENCE && start.elapsed() < 3 * PATIENCE);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn who_hung_up_is_heard_all_the_same() {
        let (a, b) = pair();
        send(&b, &encode(Kind::Error, &[b"why"]), &[]).unwrap();
        drop(b);
        let record = encode(Kind::Goodbye, &[]);
        assert_eq!(
            send(&a, &record, &[]).unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
        send_or_hear_why_not(&a, &record).unwrap();
        let mut buffer = aligned_buffer();
        let heard = receive(&a, &mut buffer).unwrap().unwrap();
        assert!(matches!(heard.parse(&buffer), Ok(Message::Error(text)) if text == "why"));
    }

    #[test]
    fn oversized_records_are_refused() {
        let (a, b) = pair();
        rustix::net::send(&a, &vec![0; MAX_MESSAGE + 1], SendFlags::empty()).unwrap();
        assert_eq!(
            receive(&b, &mut aligned_buffer()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }
}
