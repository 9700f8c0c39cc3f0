//! Programs that mark their memory: the socket, and who is on it.
//!
//! A client is a process, by the credentials that the kernel put on its connection. A pidfd tells its end, also if a child holds the
//! socket. What it marks are ranges of its addresses; [`pagemap`] turns them into frames, again and again.

pub mod pagemap;
pub mod ranges;

use crate::source::frames::Frames;
use crate::stretches::FrameSet;
use pagemap::Pagemap;
use ranges::Ranges;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
    recv, send, socket_with,
};
use rustix::process::{PidfdFlags, pidfd_open};
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use vmm_dedup_agent_wire::message::Mark;
use vmm_dedup_hints::{REQUEST, Reply, Request, Status};

/// Processes at once.
const MOST_CLIENTS: usize = 64;
/// Requests of one process that are served before others have their turn.
const MOST_REQUESTS: usize = 16;

#[derive(Debug)]
struct Client {
    socket: OwnedFd,
    process: OwnedFd,
    pagemap: Result<Pagemap, Status>,
    ranges: Ranges,
    /// A reply that waits until marks hold.
    waiting: Option<Waiting>,
    has_ended: bool,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    pages: u64,
    /// The serial that is to be acknowledged, once it is known.
    serial: Option<u32>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Programs {
    listener: OwnedFd,
    path: PathBuf,
    clients: Vec<Client>,
    most_pages: u64,
    /// The frames that have each mark.
    marked: [FrameSet; Mark::ALL.len()],
}

impl Programs {
    /// Listens at a path, in whose place a socket of an agent before may be.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn listen(path: &Path, most_mib: u64) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        // Everybody may say what he thinks of his own memory.
        std::fs::set_permissions(path, Permissions::from_mode(0o666))?;
        listen(&listener, 16)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            clients: Vec::new(),
            most_pages: most_mib * 256,
            marked: Default::default(),
        })
    }

    /// What to wait for: something to read on any of them.
    pub fn wait_for(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.clients.iter().filter(|client| client.waiting.is_none());
        let sockets = clients.map(|client| client.socket.as_fd());
        let processes = self.clients.iter().map(|client| client.process.as_fd());
        std::iter::once(self.listener.as_fd())
            .chain(sockets)
            .chain(processes)
    }

    /// Whether anybody marks anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// The frames that have a mark, as they were found last.
    #[must_use]
    pub fn marked(&self, mark: Mark) -> &FrameSet {
        &self.marked[mark as usize - 1]
    }

    /// Lets programs in, hears what they want, and lets those go that have ended. Returns whether there is something new, so that
    /// frames are to be found again.
    pub fn serve(&mut self, proc: &Path) -> bool {
        let mut is_new = self.admit(proc);
        let mut left = self
            .most_pages
            .saturating_sub(self.clients.iter().map(|c| c.ranges.pages()).sum());
        for client in &mut self.clients {
            is_new |= client.serve(&mut left);
        }
        let before = self.clients.len();
        self.clients.retain(|client| !client.has_ended);
        is_new || self.clients.len() != before
    }

    fn admit(&mut self, proc: &Path) -> bool {
        let before = self.clients.len();
        while let Ok(socket) = accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            // One too many is let go: it sees a closed connection.
            if self.clients.len() < MOST_CLIENTS
                && let Ok(client) = Client::new(socket, proc)
            {
                self.clients.push(client);
            }
        }
        self.clients.len() != before
    }

    /// Finds the frames of all that is marked.
    pub fn follow(&mut self, frames: &mut Frames) {
        let mut marked: [Vec<_>; Mark::ALL.len()] = Default::default();
        for client in &mut self.clients {
            let mut pages = 0;
            let Ok(pagemap) = &client.pagemap else { continue };
            for (mark, range) in client.ranges.iter() {
                let before = marked[mark as usize - 1].len();
                let list = &mut marked[mark as usize - 1];
                match pagemap.frames(range, list) {
                    Ok(()) => pages += list[before..].iter().map(|r| r.end - r.start).sum::<u64>(),
                    Err(status) => {
                        client.pagemap = Err(status);
                        break;
                    }
                }
            }
            if let Some(waiting) = &mut client.waiting {
                waiting.pages = pages;
            }
        }
        for (is, found) in self.marked.iter_mut().zip(marked) {
            let found = FrameSet::of(found);
            // The page of zeros belongs to nobody.
            let zeros = zeros_in(&found.without(is), frames);
            *is = found.without(&zeros);
        }
    }

    /// All that was found was told: replies wait for this serial.
    pub fn told(&mut self, serial: u32) {
        for waiting in self
            .clients
            .iter_mut()
            .filter_map(|client| client.waiting.as_mut())
        {
            waiting.serial.get_or_insert(serial);
        }
    }

    /// Replies to those whose marks hold.
    pub fn reply(&mut self, is_done: impl Fn(u32) -> bool) {
        for client in &mut self.clients {
            if let Some(Waiting {
                pages,
                serial: Some(serial),
            }) = client.waiting
                && is_done(serial)
            {
                client.reply(Status::Holds, pages);
            }
        }
    }

    /// Replies to those who wait: nobody listens.
    pub fn reply_without_service(&mut self) {
        for client in &mut self.clients {
            if let Some(waiting) = client.waiting {
                client.reply(Status::NoService, waiting.pages);
            }
        }
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        // Another agent has replaced it, or it goes with its folder.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Those that are pages of zeros.
fn zeros_in(found: &FrameSet, frames: &mut Frames) -> FrameSet {
    let mut zeros = Vec::new();
    let mut flags = [0; 64];
    for range in found.stretches() {
        for first in range.clone().step_by(flags.len()) {
            let count = usize::try_from(range.end - first)
                .unwrap_or(usize::MAX)
                .min(flags.len());
            if frames.flags_of(first, &mut flags[..count]).is_ok() {
                let is_zero = |(_, flags): &(u64, &u64)| **flags & crate::classify::ZERO_PAGE != 0;
                let found = (first..).zip(&flags[..count]).filter(is_zero);
                zeros.extend(found.map(|(frame, _)| frame..frame + 1));
            }
        }
    }
    FrameSet::of(zeros)
}

impl Client {
    fn new(socket: OwnedFd, proc: &Path) -> io::Result<Self> {
        let pid = socket_peercred(&socket)?.pid;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let pagemap = Pagemap::open(proc, pid);
        // The process lived when it had been opened, so it is that of this number; and it was the one that connected, unless
        // that ended and another one took its number since: then the socket's other end is closed, or held by a child that has
        // nothing to mark.
        Ok(Self {
            has_ended: has_ended(&process),
            socket,
            process,
            pagemap,
            ranges: Ranges::default(),
            waiting: None,
        })
    }

    /// Takes requests, one at a time; returns whether ranges have changed.
    fn serve(&mut self, left: &mut u64) -> bool {
        if has_ended(&self.process) {
            self.has_ended = true;
            return true;
        }
        let mut is_new = false;
        for _ in 0..MOST_REQUESTS {
            if self.waiting.is_some() || self.has_ended {
                break;
            }
            let mut bytes = [0; REQUEST + 1];
            match recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => self.has_ended = true,
                Ok((_, read)) => match self.request(&bytes[..read], left) {
                    Ok(()) => {
                        is_new = true;
                        self.waiting = Some(Waiting {
                            pages: 0,
                            serial: None,
                        });
                    }
                    Err(status) => self.reply(status, 0),
                },
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => break,
                Err(_) => self.has_ended = true,
            }
        }
        is_new || self.has_ended
    }

    fn request(&mut self, bytes: &[u8], left: &mut u64) -> Result<(), Status> {
        let request = Request::parse(bytes)?;
        if let Err(status) = &self.pagemap {
            return Err(*status);
        }
        let before = self.ranges.pages();
        let ranges = self.ranges.marked(request)?;
        let more = ranges.pages().saturating_sub(before);
        *left = left.checked_sub(more).ok_or(Status::TooMuch)?;
        self.ranges = ranges;
        Ok(())
    }

    fn reply(&mut self, status: Status, pages: u64) {
        self.waiting = None;
        let status = self.pagemap.as_ref().err().copied().unwrap_or(status);
        let bytes = Reply { status, pages }.to_bytes();
        // Who does not read its replies is let go.
        if send(&self.socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_err() {
            self.has_ended = true;
        }
    }
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let now = rustix::time::Timespec::default();
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}
