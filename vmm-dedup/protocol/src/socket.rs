//! Records and descriptors over a `SOCK_SEQPACKET` Unix socket.

use crate::message::{MAX_MESSAGE, Malformed, Message, parse};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use zerocopy::IntoBytes;

/// Most descriptors in one record.
const MAX_FDS: usize = 2;

/// Connects to a store. Blocking.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
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
    Ok(rustix::net::accept_with(
        listener,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
    )?)
}

/// Sends one record with its descriptors.
pub fn send(socket: impl AsFd, record: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "too many descriptors for one message",
        ));
    }
    let sent = rustix::net::sendmsg(
        socket,
        &[IoSlice::new(record)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    if sent == record.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
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
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(buffer.as_mut_bytes())];
    let got = rustix::net::recvmsg(socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        let text = format!("a message longer than {MAX_MESSAGE} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok((got.bytes > 0).then_some(Received { len: got.bytes, fds }))
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
    fn oversized_records_are_refused() {
        let (a, b) = pair();
        rustix::net::send(&a, &vec![0; MAX_MESSAGE + 1], SendFlags::empty()).unwrap();
        assert_eq!(
            receive(&b, &mut aligned_buffer()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }
}
