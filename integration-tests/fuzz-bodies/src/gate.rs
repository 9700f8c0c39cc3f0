//! Streams of vfio-user messages through the gate before a device.
//!
//! The gate stands between a client and a server here, as it does between a client and the vfio_user crate. The model cuts
//! the client's stream into messages by its own reading of the protocol and says which of them reach the server, byte for
//! byte and with how many descriptors, what the client is answered, and how the connection ends. The server here answers
//! whatever reaches it, so that a message too many or too few is seen on both sides.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use vmm_dedup_vfio_user::{Gate, GateError};

/// Regions of the device behind the gate.
const REGIONS: u32 = 9;
const HEADER: usize = 16;
/// Most bytes of data in a message.
const MOST_DATA: u32 = 1 << 20;
/// Most descriptors of a message.
const MOST_FDS: usize = 16;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;
const EINVAL: u32 = 22;
const ENOTSUP: u32 = 95;

/// What went through the gate.
#[derive(Debug, PartialEq, Eq)]
struct Passed {
    /// Messages that reached the server, each with its number of descriptors.
    forwarded: Vec<(Vec<u8>, usize)>,
    /// What the client received.
    replies: Vec<u8>,
    end: End,
}

/// How the connection ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The client hung up between two messages.
    HungUp,
    /// The gate did, over a message that it does not understand.
    Malformed,
    /// In the middle of a message, or over too many descriptors.
    Broken,
}

/// Input: pieces of a stream. Each is a byte of flags, two bytes of length, and so many bytes. The two low bits of the flags
/// are the number of descriptors that come along. With the highest, the piece is a message that tells its true size, so that
/// changes of its length get beyond the check of that.
///
/// # Panics
/// If the gate does not do what the model says.
pub fn check(input: &[u8]) {
    let pieces = pieces(input);
    assert_eq!(through_the_gate(&pieces), model(&pieces));
}

/// Bytes that are sent at once, and how many descriptors come with them.
type Piece = (usize, Vec<u8>);

/// In a piece's flags: it tells its true size.
const TRUE_SIZE: u8 = 1 << 7;

fn pieces(mut input: &[u8]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    while let [flags, low, high, rest @ ..] = input {
        let len = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
        let (piece, rest) = rest.split_at(len);
        let mut piece = piece.to_vec();
        if let (true, Some(size)) = (flags & TRUE_SIZE != 0, piece.get_mut(4..8)) {
            size.copy_from_slice(&u32::try_from(len).expect("two bytes").to_le_bytes());
        }
        if !piece.is_empty() {
            pieces.push((usize::from(flags & 3), piece));
        }
        input = rest;
    }
    pieces
}

/// The parts of a header; the first is the whole.
#[derive(Clone, Copy)]
struct Header<'a> {
    bytes: &'a [u8],
    id: u16,
    command: u16,
    size: u32,
    flags: u32,
}

impl<'a> Header<'a> {
    fn of(bytes: &'a [u8]) -> Self {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
        Self {
            bytes: &bytes[..HEADER],
            id: half(0),
            command: half(2),
            size: word(4),
            flags: word(8),
        }
    }
}

/// A message of a header's parts and a body, with its true size.
fn message(id: u16, command: u16, flags: u32, error: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(HEADER + body.len()).expect("messages are small");
    let mut bytes = [id.to_le_bytes(), command.to_le_bytes()].concat();
    bytes.extend([size.to_le_bytes(), flags.to_le_bytes(), error.to_le_bytes()].concat());
    bytes.extend(body);
    bytes
}

/// What the server answers: with some ids an error, with or without a number.
fn answer(header: Header<'_>, body: &[u8]) -> Vec<u8> {
    let (flags, error) = match header.id % 3 {
        0 => (REPLY | ERROR, 0),
        1 => (REPLY | ERROR, 5),
        _ => (REPLY, 0),
    };
    message(
        header.id,
        header.command,
        flags,
        error,
        &body[..body.len().min(8)],
    )
}

/// What becomes of a message.
enum Fate {
    Forwarded,
    Refused(u32),
    Malformed,
}

/// The model.
fn model(pieces: &[Piece]) -> Passed {
    let stream: Vec<u8> = pieces.iter().flat_map(|(_, bytes)| bytes).copied().collect();
    // Descriptors belong to the message that the first byte of their piece is in.
    let fds_in = |start: usize, end: usize| -> usize {
        let mut at = 0;
        let mut sum = 0;
        for (fds, bytes) in pieces {
            sum += if (start..end).contains(&at) { *fds } else { 0 };
            at += bytes.len();
        }
        sum
    };
    let mut passed = Passed {
        forwarded: Vec::new(),
        replies: Vec::new(),
        end: End::HungUp,
    };
    let (mut at, mut greeted) = (0, false);
    while at < stream.len() {
        let rest = &stream[at..];
        if rest.len() < HEADER || fds_in(at, at + HEADER) > MOST_FDS {
            passed.end = End::Broken;
            break;
        }
        let header = Header::of(rest);
        if header.size < 16 || header.size > 32 + MOST_DATA {
            passed.end = End::Malformed;
            break;
        }
        let size = header.size as usize;
        let fds = fds_in(at, at + size);
        if rest.len() < size || fds > MOST_FDS {
            passed.end = End::Broken;
            break;
        }
        let mut body = rest[HEADER..size].to_vec();
        match fate(header, &mut body, fds, &mut greeted) {
            Fate::Forwarded => {
                let [_, _, _, _, _, _, _, _, same @ ..] = header.bytes else {
                    unreachable!("a header has 16 bytes")
                };
                let size = u32::try_from(HEADER + body.len()).expect("messages are small");
                let head = [&header.bytes[..4], &size.to_le_bytes(), same].concat();
                passed.forwarded.push(([head.as_slice(), &body].concat(), fds));
                if header.flags & NO_REPLY == 0 {
                    let mut reply = answer(header, &body);
                    // An error without a number gets one.
                    if header.id.is_multiple_of(3) {
                        reply[12..16].copy_from_slice(&EINVAL.to_le_bytes());
                    }
                    passed.replies.extend(reply);
                }
            }
            Fate::Refused(_) if header.flags & NO_REPLY != 0 => {}
            Fate::Refused(error) => {
                let refusal = message(header.id, header.command, REPLY | ERROR, error, &[]);
                passed.replies.extend(refusal);
            }
            Fate::Malformed => {
                passed.end = End::Malformed;
                break;
            }
        }
        at += size;
    }
    passed
}

fn fate(header: Header<'_>, body: &mut Vec<u8>, fds: usize, greeted: &mut bool) -> Fate {
    let refuse_unless = |right: bool| {
        if right {
            Fate::Forwarded
        } else {
            Fate::Refused(EINVAL)
        }
    };
    let wants_reply = header.flags & NO_REPLY == 0;
    let len = body.len();
    let word = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().expect("four bytes"));
    if header.flags & 0xf != 0 {
        return Fate::Malformed;
    }
    if header.command > 14 {
        return Fate::Refused(EINVAL);
    }
    if (header.command == 1) == *greeted {
        return Fate::Malformed;
    }
    match header.command {
        // VERSION: 0.x, and JSON that ends with its only zero; none is as good as one that says nothing.
        1 => {
            let json_is_right = match len {
                4 => true,
                5..=4100 => body[4..].iter().position(|byte| *byte == 0) == Some(len - 5),
                _ => false,
            };
            if !wants_reply || !json_is_right || body[..2] != [0, 0] {
                return Fate::Malformed;
            }
            if len == 4 {
                body.extend(b"{\"capabilities\":{}}\0");
            }
            *greeted = true;
            Fate::Forwarded
        }
        // DMA_MAP, DMA_UNMAP
        2 => refuse_unless(len == 32 && fds <= 1),
        3 => refuse_unless(len == 24),
        // DEVICE_GET_INFO, DEVICE_GET_REGION_INFO
        4 => refuse_unless(wants_reply && len == 16),
        5 => refuse_unless(wants_reply && len == 32 && word(8) < REGIONS),
        // DEVICE_GET_IRQ_INFO, DEVICE_SET_IRQS
        7 => refuse_unless(wants_reply && len == 16),
        8 => refuse_unless(len == 20),
        // REGION_READ, REGION_WRITE
        9 => refuse_unless(wants_reply && len == 16 && word(8) < REGIONS && word(12) <= MOST_DATA),
        10 => {
            let has_head = len >= 16 && word(8) < REGIONS;
            refuse_unless(has_head && word(12) <= MOST_DATA && len == 16 + word(12) as usize)
        }
        // DEVICE_RESET
        13 => refuse_unless(len == 0),
        // No command, DEVICE_GET_REGION_IO_FDS, DMA_READ, DMA_WRITE, USER_DIRTY_PAGES
        _ => Fate::Refused(ENOTSUP),
    }
}

/// What the gate does.
fn through_the_gate(pieces: &[Piece]) -> Passed {
    let pair = || UnixStream::pair().expect("a pair of sockets");
    let ((client, gates_client), (gates_server, server)) = (pair(), pair());
    std::thread::scope(|threads| {
        let gate = threads.spawn(|| {
            let ended = Gate::new(REGIONS).run(&gates_client, &gates_server);
            // Shut down and not closed, so that what was not read is no error for who reads what was sent.
            let _ = gates_client.shutdown(Shutdown::Both);
            let _ = gates_server.shutdown(Shutdown::Both);
            ended
        });
        let server = threads.spawn(|| serve(&server));
        threads.spawn(|| {
            for (fds, bytes) in pieces {
                // Once the gate has hung up nothing more goes.
                if !send(&client, bytes, *fds) {
                    break;
                }
            }
            let _ = client.shutdown(Shutdown::Write);
        });
        let mut replies = Vec::new();
        let _ = (&client).read_to_end(&mut replies);
        let end = match gate.join().expect("the gate does not panic") {
            Ok(()) => End::HungUp,
            Err(GateError::Malformed { .. }) => End::Malformed,
            Err(GateError::Io(_)) => End::Broken,
        };
        Passed {
            forwarded: server.join().expect("the server does not panic"),
            replies,
            end,
        }
    })
}

/// Takes messages and answers them until nobody sends any more.
fn serve(stream: &UnixStream) -> Vec<(Vec<u8>, usize)> {
    let mut all = Vec::new();
    loop {
        let mut bytes = vec![0; HEADER];
        let Some(mut fds) = receive(stream, &mut bytes) else {
            return all;
        };
        let size = Header::of(&bytes).size as usize;
        bytes.resize(size.max(HEADER), 0);
        fds += receive(stream, &mut bytes[HEADER..]).unwrap_or(0);
        let header = Header::of(&bytes);
        if header.flags & NO_REPLY == 0 && !send(stream, &answer(header, &bytes[HEADER..]), 0) {
            return all;
        }
        all.push((bytes, fds));
    }
}

/// Fills the buffer; the number of descriptors that came along. `None` at the end.
fn receive(stream: &UnixStream, buffer: &mut [u8]) -> Option<usize> {
    let (mut filled, mut fds) = (0, 0);
    while filled < buffer.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut buffer[filled..])];
        let got = recvmsg(stream, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds += rights.count();
            }
        }
        if got.bytes == 0 {
            return None;
        }
        filled += got.bytes;
    }
    Some(fds)
}

/// Whether all of it was sent.
fn send(stream: &UnixStream, bytes: &[u8], fds: usize) -> bool {
    let file = File::open("/dev/null").expect("/dev/null");
    let fds: Vec<BorrowedFd<'_>> = std::iter::repeat_n(file.as_fd(), fds).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)), "three fit");
    }
    let sent = sendmsg(
        stream,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    );
    sent == Ok(bytes.len())
}

/// A client's conversations, in one piece for each message.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let piece = |fds: u8, bytes: &[u8]| {
        let fds = fds | TRUE_SIZE;
        let len = u16::try_from(bytes.len()).expect("seeds are small").to_le_bytes();
        [&[fds, len[0], len[1]], bytes].concat()
    };
    let of = |command: u16, flags: u32, body: &[u8]| message(command + 6, command, flags, 0, body);
    let words = |words: &[u32]| {
        words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let greeting = |json: usize| [vec![0, 0, 1, 0], vec![b' '; json - 1], vec![0]].concat();
    let hello = piece(0, &of(1, 0, b"\0\0\x01\0{\"capabilities\":{}}\0"));
    let greeted = |messages: &[Vec<u8>]| [std::slice::from_ref(&hello), messages].concat().concat();
    let read = |region: u32| of(9, 0, &words(&[0, 0, region, 4]));
    vec![
        ("greeting_without_json", piece(0, &of(1, 0, &[0, 0, 1, 0]))),
        (
            "greeting_with_the_longest_json",
            piece(0, &of(1, 0, &greeting(4096))),
        ),
        (
            "greeting_with_too_long_json",
            piece(0, &of(1, 0, &greeting(4097))),
        ),
        (
            "memory",
            greeted(&[
                piece(1, &of(2, 0, &words(&[32, 1, 0, 0, 0, 0, 4096, 0]))),
                piece(0, &of(3, NO_REPLY, &words(&[24, 0, 0, 0, 4096, 0]))),
            ]),
        ),
        (
            "questions",
            greeted(&[
                piece(0, &of(4, 0, &words(&[16, 0, 0, 0]))),
                piece(0, &of(5, 0, &words(&[32, 0, 2, 0, 0, 0, 0, 0]))),
                piece(0, &of(7, 0, &words(&[16, 0, 2, 0]))),
            ]),
        ),
        (
            "registers",
            greeted(&[
                piece(0, &read(0)),
                piece(0, &of(10, 0, &words(&[16, 0, 0, 4, 1]))),
                piece(0, &of(10, NO_REPLY, &words(&[16, 0, 0, 8, 1, 2]))),
                piece(0, &read(9)),
            ]),
        ),
        (
            "interrupts_and_reset",
            greeted(&[
                piece(3, &of(8, 0, &words(&[20, 0x24, 2, 0, 3]))),
                piece(0, &of(13, 0, &[])),
            ]),
        ),
        (
            "refused",
            greeted(&[
                piece(0, &of(6, 0, &[])),
                piece(2, &of(99, 0, &[1])),
                piece(0, &of(11, NO_REPLY, &[])),
            ]),
        ),
        ("cut_into_pieces", {
            let stream = [of(1, 0, &[0, 0, 1, 0]), read(1)].concat();
            let part = |bytes: &[u8]| [&[1, 5, 0], bytes].concat();
            stream.chunks_exact(5).flat_map(part).collect()
        }),
        ("every_command_with_every_length", {
            let of_length = |command: u16| {
                [0, 4, 16, 20, 24, 28, 32, 36].map(|len| piece(0, &of(command, 0, &vec![0; len])))
            };
            greeted(&(2..16).flat_map(of_length).collect::<Vec<_>>())
        }),
        (
            "too_large",
            greeted(&[[0, 16, 0]
                .into_iter()
                .chain([0, 0, 10, 0, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0])
                .collect()]),
        ),
    ]
}
