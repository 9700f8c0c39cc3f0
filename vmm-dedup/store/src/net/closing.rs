//! Closing what peers sent.
//!
//! Closing a descriptor can take as long as who sent it likes: a TCP socket with SO_LINGER and unsent data, a file of a FUSE file
//! system. Nobody has a reason to send descriptors to a store. From Linux 6.16 on the kernel refuses to pass them
//! ([`refuse_descriptors`]). Before, they are closed in a thread of their own, and so is a socket with unread records, which
//! may carry some. A connection keeps its place among those of its process until that is done.
#![allow(unsafe_code)] // setsockopt(SO_PASSRIGHTS), which rustix lacks.

use crate::requests::unread::Share;
use rustix::io::retry_on_intr;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};

/// `SO_PASSRIGHTS`, Linux 6.16.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Most threads that close: what is too much waits. (The unit for systemd allows the store 16 threads.)
const MAX_CLOSING: usize = 8;

/// Stack of such a thread, in bytes.
const STACK: usize = 64 << 10;

/// How long to wait when the kernel has no thread for us.
const SHORTAGE: Duration = Duration::from_millis(100);

/// Unread records that are taken out of a socket, and descriptors, before a thread is left to do the rest.
const MAX_DRAINED: usize = 256;

/// Most descriptors that the kernel passes with one record (SCM_MAX_FD).
const MAX_RECEIVED: usize = 253;

/// Has the kernel refuse to pass descriptors to this socket and to those accepted from it.
pub(super) fn refuse_descriptors(socket: impl AsFd) -> io::Result<()> {
    let off: libc::c_int = 0;
    let len = libc::socklen_t::try_from(size_of::<libc::c_int>()).expect("four");
    // SAFETY: the descriptor is open for the call; `off` is valid for reads of the size of an int, and `len` is that.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const off).cast(),
            len,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What is left of a connection: the socket, and what its peer sent.
#[derive(Debug)]
pub(super) struct Remains {
    socket: Arc<OwnedFd>,
    received: Vec<OwnedFd>,
    /// Whether the socket has no unread records.
    drained: bool,
}

impl Remains {
    /// Tells the peer that this is the end. Returns when it has read what was sent before, or has hung up.
    pub(super) async fn is_read(&self, unread: &Share) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        unread.is_read(&self.socket).await;
    }
}

/// Lets the peer send no more, and takes out what it has sent: a peer whose records are unread when the socket is closed loses
/// the one that tells it why. The caller has the last use of the socket.
pub(super) fn end(socket: Arc<OwnedFd>, mut received: Vec<OwnedFd>) -> Remains {
    // Credentials come with every record, and tell an empty one from the end.
    let set_up =
        set_socket_passcred(&socket, true).and_then(|()| rustix::net::shutdown(&socket, Shutdown::Read));
    let drained = set_up.is_ok() && (0..MAX_DRAINED).any(|_| !take_record(&socket, &mut received));
    Remains {
        socket,
        received,
        drained,
    }
}

/// Takes one unread record out. Returns whether there was one, or there may be more.
fn take_record(socket: &OwnedFd, received: &mut Vec<OwnedFd>) -> bool {
    if received.len() >= MAX_DRAINED {
        return true;
    }
    let mut more = false;
    let got = retry_on_intr(|| {
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RECEIVED), ScmCredentials(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0u8; 1];
        let mut into = [IoSliceMut::new(&mut byte)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = rustix::net::recvmsg(socket, &mut into, &mut ancillary, flags)?;
        for message in ancillary.drain() {
            match message {
                RecvAncillaryMessage::ScmRights(rights) => received.extend(rights),
                _ => more = true,
            }
        }
        Ok(got)
    });
    match got {
        Ok(got) => more || got.bytes > 0,
        Err(e) => e != rustix::io::Errno::AGAIN,
    }
}

/// The threads that close.
#[derive(Debug)]
pub(crate) struct Closers(Arc<Semaphore>);

impl Default for Closers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_CLOSING)))
    }
}

impl Closers {
    /// Closes what is left of a connection, here if that cannot take long. Returns when it is closed.
    pub(super) async fn close(&self, remains: Remains) {
        if remains.drained && remains.received.is_empty() {
            return;
        }
        let Ok(permit) = self.0.clone().acquire_owned().await else {
            return;
        };
        let (done, closed) = oneshot::channel();
        // In a slot of its own, so that what a failure to start a thread gives back is not closed here.
        let slot = Arc::new(std::sync::Mutex::new(Some((remains, permit, done))));
        loop {
            let slot = slot.clone();
            let thread = std::thread::Builder::new().name("store-close".into());
            let spawned = thread.stack_size(STACK).spawn(move || {
                let taken = slot.lock().map(|mut slot| slot.take());
                if let Ok(Some((remains, permit, done))) = taken {
                    let Remains { socket, received, .. } = remains;
                    drop((received, socket, permit));
                    let _ = done.send(());
                }
            });
            if spawned.is_ok() {
                break;
            }
            tokio::time::sleep(SHORTAGE).await;
        }
        let _ = closed.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::net::connection::serve;
    use crate::state::{Shared, State};
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    };
    use std::io::{IoSlice, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Mutex;
    use std::time::Instant;
    use vmm_dedup_protocol::message::{Hello, Kind, Role, StatsRequest, aligned_buffer, encode};
    use vmm_dedup_protocol::socket;
    use zerocopy::IntoBytes;

    /// How long closing what the attacker sends takes.
    const LINGER: Duration = Duration::from_secs(6);

    /// Far below [`LINGER`], and far above what a question takes, also on a busy machine.
    const HONEST: Duration = Duration::from_secs(3);

    /// A socket whose closing takes [`LINGER`], and its other end.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (unread, _) = listener.accept().unwrap();
        lingering.set_nonblocking(true).unwrap();
        while lingering.write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&lingering, Some(LINGER)).unwrap();
        (lingering, unread)
    }

    /// Sends a record and a descriptor, so many times. The receiver has the last references to it.
    fn send(socket: &OwnedFd, record: &[u8], (file, _): &(TcpStream, TcpStream), count: usize) {
        let fds = vec![file.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RECEIVED))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        let record = [IoSlice::new(record)];
        rustix::net::sendmsg(socket, &record, &mut ancillary, SendFlags::empty()).unwrap();
    }

    /// Sockets that take descriptors, as all do before Linux 6.16.
    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::io::ioctl_fionbio(&theirs, true).unwrap();
        (ours, theirs)
    }

    /// A store in a thread, whose connections are made here.
    struct Domain {
        runtime: tokio::runtime::Handle,
        stop: Option<oneshot::Sender<()>>,
        thread: Option<std::thread::JoinHandle<()>>,
        shared: Shared,
        closers: Arc<Closers>,
    }

    impl Domain {
        fn new(config: Config) -> Self {
            let (stop, stopped) = oneshot::channel::<()>();
            let (started, wait) = std::sync::mpsc::channel();
            let thread = std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                started.send(runtime.handle().clone()).unwrap();
                runtime.block_on(async { _ = stopped.await });
            });
            Self {
                runtime: wait.recv().unwrap(),
                stop: Some(stop),
                thread: Some(thread),
                shared: Arc::new(Mutex::new(State::new(config).unwrap())),
                closers: Arc::new(Closers::default()),
            }
        }

        fn connect(&self, setup: impl FnOnce(&OwnedFd)) -> OwnedFd {
            let (ours, theirs) = pair();
            setup(&ours);
            self.runtime.spawn(serve(
                self.shared.clone(),
                self.closers.clone(),
                Arc::default(),
                theirs,
            ));
            ours
        }

        /// The same, with a socket to send whose closing takes long. Also gives that one's other end.
        fn connect_lingering(
            &self,
            send: impl FnOnce(&OwnedFd, &(TcpStream, TcpStream)),
        ) -> (OwnedFd, TcpStream) {
            let mut files = Some(lingering());
            let mut unread = None;
            let ours = self.connect(|socket| {
                let files = files.take().unwrap();
                send(socket, &files);
                unread = Some(files.1);
            });
            (ours, unread.unwrap())
        }

        /// The longest that one of these questions takes, asked for as long as the attack could last.
        fn longest_question(&self, observer: &OwnedFd) -> Duration {
            let (request, mut buffer) = (StatsRequest { from: 0, reserved: 0 }, aligned_buffer());
            let (start, mut longest) = (Instant::now(), Duration::ZERO);
            while start.elapsed() < LINGER / 2 {
                let asked = Instant::now();
                socket::send(observer, &encode(Kind::StatsRequest, &[request.as_bytes()]), &[]).unwrap();
                socket::receive(observer, &mut buffer).unwrap().unwrap();
                longest = longest.max(asked.elapsed());
                std::thread::sleep(Duration::from_millis(5));
            }
            longest
        }

        fn observer(&self) -> OwnedFd {
            let hello = Hello::new(Role::Observer, "honest", 0);
            let observer = self.connect(|_| ());
            socket::send(&observer, &encode(Kind::Hello, &[hello.as_bytes()]), &[]).unwrap();
            socket::receive(&observer, &mut aligned_buffer())
                .unwrap()
                .unwrap();
            observer
        }
    }

    impl Drop for Domain {
        fn drop(&mut self) {
            drop(self.stop.take());
            self.thread.take().unwrap().join().unwrap();
        }
    }

    fn question() -> Vec<u8> {
        let request = StatsRequest { from: 0, reserved: 0 };
        encode(Kind::StatsRequest, &[request.as_bytes()])
    }

    #[test]
    fn descriptors_that_take_long_to_close_hold_up_nobody() {
        let domain = Domain::new(Config::default());
        let observer = domain.observer();
        let greeting = encode(Kind::Hello, &[Hello::new(Role::Observer, "evil", 0).as_bytes()]);
        let (one, unread_1) = domain.connect_lingering(|socket, file| send(socket, &greeting, file, 1));
        // More than a record of the protocol ever has.
        let (many, unread_2) =
            domain.connect_lingering(|socket, file| send(socket, &greeting, file, MAX_RECEIVED));
        let long = vec![0; vmm_dedup_protocol::message::MAX_MESSAGE + 1];
        let (long, unread_3) = domain.connect_lingering(|socket, file| send(socket, &long, file, 1));
        // Not read, since what came before is malformed, or empty, which is taken for the end.
        let behind = |first: &[u8]| {
            domain.connect_lingering(|socket, file| {
                rustix::net::send(socket, first, SendFlags::empty()).unwrap();
                rustix::net::send(socket, &[], SendFlags::empty()).unwrap();
                send(socket, &question(), file, 1);
            })
        };
        let unread = [behind(&[1, 2, 3]), behind(&[])];
        let longest = domain.longest_question(&observer);
        assert!(longest < HONEST, "a question took {longest:?}");
        let mut buffer = aligned_buffer();
        let record = socket::receive(&one, &mut buffer).unwrap().unwrap();
        let text = format!("{:?}", record.parse(&buffer).unwrap());
        assert!(text.contains("not expected here: a descriptor"), "{text}");
        drop((many, long, unread, unread_1, unread_2, unread_3));
    }

    #[test]
    fn descriptors_of_a_connection_that_is_refused_hold_up_nobody() {
        let domain = Domain::new(Config {
            max_connections: 1,
            ..Config::default()
        });
        let observer = domain.observer();
        let refused = domain.connect_lingering(|socket, file| send(socket, &question(), file, 1));
        let longest = domain.longest_question(&observer);
        assert!(longest < HONEST, "a question took {longest:?}");
        drop(refused);
    }

    #[test]
    fn a_connection_keeps_its_place_until_all_is_closed() {
        let domain = Domain::new(Config::default());
        let (evil, unread) = domain.connect_lingering(|socket, file| send(socket, &question(), file, 1));
        socket::receive(&evil, &mut aligned_buffer()).unwrap().unwrap();
        std::thread::sleep(LINGER / 6);
        assert_eq!(crate::state::lock(&domain.shared).peers.len(), 1);
        // The other end resets the connection: closing takes no longer.
        drop(unread);
        let start = Instant::now();
        while crate::state::lock(&domain.shared).peers.len() > 0 {
            assert!(start.elapsed() < 2 * LINGER);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
