//! Messages of the vfio-user protocol as bytes on a stream, with the descriptors that come with them.

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Descriptors that one message can carry: what the crate behind the gate takes.
pub(crate) const MAX_FDS: usize = 16;

/// What every message begins with.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) id: u16,
    pub(crate) command: u16,
    /// Bytes of the message, with this header.
    pub(crate) size: u32,
    pub(crate) flags: u32,
    pub(crate) error: u32,
}

/// Bytes of a header.
pub(crate) const HEADER: usize = size_of::<Header>();
const _: () = assert!(HEADER == 16);

/// In a header's flags: the kind (0 command, 1 reply).
pub(crate) const FLAGS_KIND: u32 = 0xf;
/// It is a reply.
pub(crate) const FLAG_REPLY: u32 = 1;
/// The sender wants no reply.
pub(crate) const FLAG_NO_REPLY: u32 = 1 << 4;
/// The reply tells of an error.
pub(crate) const FLAG_ERROR: u32 = 1 << 5;

/// A whole message.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Reads a header; `None` if the stream ends before it.
pub(crate) fn read_header(stream: &UnixStream) -> io::Result<Option<(Header, Vec<OwnedFd>)>> {
    let mut bytes = [0; HEADER];
    let mut fds = Vec::new();
    if !read(stream, &mut bytes, &mut fds)? {
        return Ok(None);
    }
    let header = Header::read_from_bytes(&bytes).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(Some((header, fds)))
}

/// Reads the rest of a message of a size that the caller has checked.
pub(crate) fn read_body(stream: &UnixStream, header: Header, mut fds: Vec<OwnedFd>) -> io::Result<Message> {
    let mut body = vec![0; (header.size as usize).saturating_sub(HEADER)];
    if !body.is_empty() && !read(stream, &mut body, &mut fds)? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Message { header, body, fds })
}

/// Fills the buffer; `false` if the stream had ended before.
fn read(stream: &UnixStream, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buffer.len() {
        let got = retry_on_intr(|| {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut buffer[filled..])];
            let got = recvmsg(stream, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            Ok(got)
        })?;
        if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
            let text = format!("more than {MAX_FDS} descriptors in one message");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        match (got.bytes, filled) {
            (0, 0) => return Ok(false),
            (0, _) => return Err(io::ErrorKind::UnexpectedEof.into()),
            (bytes, _) => filled += bytes,
        }
    }
    Ok(true)
}

/// Sends a message; its size is that of its parts.
pub(crate) fn send(stream: &UnixStream, message: &Message) -> io::Result<()> {
    let header = Header {
        size: u32::try_from(HEADER + message.body.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        ..message.header
    };
    let bytes: Vec<u8> = [header.as_bytes(), &message.body].concat();
    let fds: Vec<_> = message.fds.iter().map(AsFd::as_fd).collect();
    let mut sent = 0;
    while sent < bytes.len() {
        sent += retry_on_intr(|| {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            // Descriptors go with the first byte.
            if sent == 0 && !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(rustix::io::Errno::INVAL);
            }
            sendmsg(
                stream,
                &[IoSlice::new(&bytes[sent..])],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            )
        })?;
    }
    Ok(())
}
