//! What stands between a client and the vfio-user crate: only whole, well-formed messages get through.
//!
//! The crate's server believes what a message says of its own length, takes any amount of data, expects JSON where it
//! unwraps it, and loses its place in the stream after a message that it does not know. So a client talks to the gate,
//! which checks each message's size against its command, answers itself what the crate does not do, and passes on the
//! rest over a socket of its own; one at a time, with its answer, so nothing is ever out of step. A message whose end is not
//! known ends the connection. Replies to errors get a number, which the crate leaves out and QEMU wants.

use crate::wire::{
    FLAG_ERROR, FLAG_NO_REPLY, FLAG_REPLY, FLAGS_KIND, HEADER, Header, Message, read_body, read_header, send,
};
use rustix::io::Errno;
use std::io;
use std::os::unix::net::UnixStream;
use vfio_user::Command;

/// Most bytes that one access to a region may have: what the crate tells clients.
const MAX_ACCESS: u32 = 1 << 20;
const HEADER_SIZE: u32 = 16;
const _: () = assert!(HEADER_SIZE as usize == HEADER);
/// Most bytes of a client's JSON.
const MAX_VERSION: usize = 4096;
/// A client's JSON that says nothing.
const NO_CAPABILITIES: &[u8] = b"{\"capabilities\":{}}\0";

/// How a connection ended, or why it was ended.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The client's message cannot be understood, or would not end where it says.
    #[error("message {command} of {size} bytes is malformed: {problem}")]
    Malformed {
        /// The command's number.
        command: u16,
        /// The size that it claims.
        size: u32,
        /// What is wrong.
        problem: &'static str,
    },
    /// The connection broke.
    #[error("the connection broke")]
    Io(#[from] io::Error),
}

/// What becomes of a message.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// It goes to the server.
    Pass,
    /// The gate answers with this error.
    Refuse(Errno),
}

/// The gate of one connection, with what it remembers of it.
#[derive(Debug)]
pub struct Gate {
    regions: u32,
    greeted: bool,
}

impl Gate {
    /// For a device with so many regions.
    #[must_use]
    pub fn new(regions: u32) -> Self {
        Self {
            regions,
            greeted: false,
        }
    }

    /// Passes messages of `client` on to `server`, and its answers back, until the client hangs up.
    ///
    /// # Errors
    /// [`GateError`] if the client is not understood any more.
    pub fn run(mut self, client: &UnixStream, server: &UnixStream) -> Result<(), GateError> {
        while let Some((header, fds)) = read_header(client)? {
            check_size(&header)?;
            let mut message = read_body(client, header, fds)?;
            match self.judge(&mut message)? {
                Verdict::Pass => {
                    send(server, &message)?;
                    if header.flags & FLAG_NO_REPLY == 0 {
                        send(client, &reply(server)?)?;
                    }
                }
                Verdict::Refuse(_) if header.flags & FLAG_NO_REPLY != 0 => {}
                Verdict::Refuse(error) => send(client, &refusal(&header, error))?,
            }
        }
        Ok(())
    }

    fn judge(&mut self, message: &mut Message) -> Result<Verdict, GateError> {
        let header = message.header;
        let malformed = |problem| {
            Err(GateError::Malformed {
                command: header.command,
                size: header.size,
                problem,
            })
        };
        if header.flags & FLAGS_KIND != 0 {
            return malformed("it is not a command");
        }
        let Some(command) = Command::n(header.command) else {
            return Ok(Verdict::Refuse(Errno::INVAL));
        };
        if matches!(command, Command::Version) == self.greeted {
            return malformed("the version comes first, and once");
        }
        let no_reply = header.flags & FLAG_NO_REPLY != 0;
        let word = |at: usize| -> u32 {
            let bytes = message
                .body
                .get(at..at + 4)
                .and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(u32::MAX, u32::from_ne_bytes)
        };
        let len = message.body.len();
        let verdict = match command {
            Command::Version if no_reply => return malformed("it must have a reply"),
            Command::Version => {
                if !check_version(&mut message.body) {
                    return malformed("it has no version 0 and no JSON of at most 4096 bytes");
                }
                self.greeted = true;
                true
            }
            Command::DmaMap => len == 32 && message.fds.len() <= 1,
            Command::DmaUnmap => len == 24,
            Command::DeviceGetInfo => len == 16 && !no_reply,
            Command::DeviceGetRegionInfo => len == 32 && !no_reply && word(8) < self.regions,
            Command::GetIrqInfo => len == 16 && !no_reply,
            Command::SetIrqs => len == 20,
            Command::RegionRead => len == 16 && !no_reply && word(8) < self.regions && word(12) <= MAX_ACCESS,
            Command::RegionWrite => {
                word(8) < self.regions && word(12) <= MAX_ACCESS && len == 16 + word(12) as usize
            }
            Command::DeviceReset => len == 0,
            Command::Unknown
            | Command::GetRegionIoFds
            | Command::DmaRead
            | Command::DmaWrite
            | Command::UserDirtyPages => return Ok(Verdict::Refuse(Errno::NOTSUP)),
        };
        Ok(if verdict {
            Verdict::Pass
        } else {
            Verdict::Refuse(Errno::INVAL)
        })
    }
}

fn check_size(header: &Header) -> Result<(), GateError> {
    let most = HEADER_SIZE + 16 + MAX_ACCESS;
    if (HEADER_SIZE..=most).contains(&header.size) {
        return Ok(());
    }
    Err(GateError::Malformed {
        command: header.command,
        size: header.size,
        problem: "no message has such a size",
    })
}

/// Whether it is a version that the crate can read: 0.x, and JSON that ends with its only NUL. JSON may be missing, and
/// is made up then.
fn check_version(body: &mut Vec<u8>) -> bool {
    if body.len() == 4 {
        body.extend_from_slice(NO_CAPABILITIES);
    }
    let major = body.first_chunk().map(|major| u16::from_ne_bytes(*major));
    let json = body.get(4..).unwrap_or(&[]);
    let nul = json.iter().position(|byte| *byte == 0);
    major == Some(0) && json.len() <= MAX_VERSION && nul.is_some_and(|nul| nul + 1 == json.len())
}

/// The server's reply.
fn reply(server: &UnixStream) -> Result<Message, GateError> {
    let (header, fds) = read_header(server)?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    check_size(&header)?;
    let mut message = read_body(server, header, fds)?;
    if message.header.flags & FLAG_ERROR != 0 && message.header.error == 0 {
        message.header.error = Errno::INVAL.raw_os_error().unsigned_abs();
    }
    Ok(message)
}

fn refusal(header: &Header, error: Errno) -> Message {
    let header = Header {
        flags: FLAG_REPLY | FLAG_ERROR,
        error: error.raw_os_error().unsigned_abs(),
        ..*header
    };
    Message {
        header,
        body: Vec::new(),
        fds: Vec::new(),
    }
}
