//! The connection to the service.

use crate::config::Address;
use rustix::io::Errno;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use vmm_dedup_agent_wire::PORT;
use vsock::{VMADDR_CID_HOST, VsockStream};

/// The shortest and the longest wait between two tries.
const WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// A connection, without blocking.
#[derive(Debug)]
pub enum Link {
    /// Over vsock.
    Vsock(VsockStream),
    /// Over a Unix socket.
    Unix(UnixStream),
}

impl Link {
    fn connect(address: &Address, second: bool) -> io::Result<Self> {
        match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_nonblocking(true)?;
                Ok(Self::Unix(stream))
            }
            Address::VsockAt(cid, port) => Self::vsock(*cid, *port),
            // Behind vhost-vsock the host's port is the guest's own.
            Address::Vsock if second => {
                Self::vsock(VMADDR_CID_HOST, PORT.wrapping_add(vsock::get_local_cid()?))
            }
            Address::Vsock => Self::vsock(VMADDR_CID_HOST, PORT),
        }
    }

    fn vsock(cid: u32, port: u32) -> io::Result<Self> {
        // The kernel waits for two seconds at most.
        let stream = VsockStream::connect_with_cid_port(cid, port)?;
        stream.set_nonblocking(true)?;
        Ok(Self::Vsock(stream))
    }

    /// Reads what has come; 0 if nothing has.
    ///
    /// # Errors
    /// Also if the other side has closed.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = match self {
            Self::Vsock(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        };
        match read {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Err(e) if is_not_now(&e) => Ok(0),
            other => other,
        }
    }

    /// Writes what there is room for, and removes it.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn write(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        while !out.is_empty() {
            let written = match self {
                Self::Vsock(stream) => stream.write(out),
                Self::Unix(stream) => stream.write(out),
            };
            match written {
                Ok(written) => drop(out.drain(..written)),
                Err(e) if is_not_now(&e) => break,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

fn is_not_now(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Vsock(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

/// Tries to connect, less and less often.
#[derive(Debug)]
pub struct Dialler {
    address: Address,
    tries: u32,
    next: Duration,
    said: Option<String>,
}

impl Dialler {
    /// To an address.
    #[must_use]
    pub fn new(address: Address) -> Self {
        Self {
            address,
            tries: 0,
            next: Duration::ZERO,
            said: None,
        }
    }

    /// When to try next.
    #[must_use]
    pub fn next(&self) -> Duration {
        self.next
    }

    /// Tries once, if it is time. What prevents it is said once.
    pub fn try_to_connect(&mut self, now: Duration) -> Option<Link> {
        if now < self.next {
            return None;
        }
        let result = Link::connect(&self.address, self.tries % 2 == 1);
        self.tries = self.tries.saturating_add(1);
        self.wait(now, WAITS[0] * (1 << (self.tries / 2).min(6)));
        match result {
            Ok(link) => Some(link),
            Err(error) => {
                self.say(match Errno::from_io_error(&error) {
                    Some(Errno::NODEV | Errno::AFNOSUPPORT | Errno::NOENT) => {
                        format!("there is no way to the service ({error}); does this VM have a vsock device?")
                    }
                    _ => format!("no service listens ({error}); trying again"),
                });
                None
            }
        }
    }

    /// Not before so long, nor before the next try was due.
    pub fn wait(&mut self, now: Duration, wait: Duration) {
        self.next = self.next.max(now + wait.clamp(WAITS[0], WAITS[1]));
    }

    /// The service has greeted: the next try may come soon again.
    pub fn succeeded(&mut self) {
        self.tries = 0;
        self.next = Duration::ZERO;
        self.said = None;
    }

    /// Says something, if it was not the last thing said.
    pub fn say(&mut self, text: String) {
        if self.said.as_ref() != Some(&text) {
            eprintln!("vmm-dedup-agent: {text}");
            self.said = Some(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_come_less_and_less_often() {
        let mut dialler = Dialler::new(Address::Unix("/nonexistent/service.sock".into()));
        let (mut now, mut waits) = (Duration::ZERO, Vec::new());
        for _ in 0..16 {
            assert!(dialler.try_to_connect(now).is_none());
            waits.push((dialler.next() - now).as_secs());
            assert!(dialler.try_to_connect(now).is_none(), "not yet");
            now = dialler.next();
        }
        assert!(waits.is_sorted() && waits[0] == 1 && waits[15] == 60, "{waits:?}");
    }
}
