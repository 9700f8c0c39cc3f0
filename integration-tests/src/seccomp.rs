//! System calls of threads, seen by the kernel's own filters: recorded by a filter that asks for each call (and lets it go on, unless
//! it is to fail).
#![allow(unsafe_code)] // seccomp

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// One kind of call of one thread.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seen {
    /// The thread's name.
    pub thread: String,
    /// The call's number.
    pub call: i64,
    /// Of an ioctl: what is asked for.
    pub request: Option<u32>,
}

/// Records what the threads do that [`Recorder::record_this_thread`] was called in, and those that they start.
#[derive(Clone, Debug)]
pub struct Recorder {
    seen: Arc<Mutex<BTreeSet<Seen>>>,
    listener: Arc<AtomicI32>,
    host: Host,
}

/// What the host is to look like.
#[derive(Clone, Debug)]
enum Host {
    AsItIs,
    /// Without clone3 and /dev/userfaultfd.
    Old,
    /// A guest has a vsock: who connects to this socket comes from that guest.
    Vsock {
        socket: PathBuf,
        cid: u32,
        /// The descriptor that listens, or -1.
        listener: Arc<AtomicI32>,
    },
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}

impl Recorder {
    /// Starts the thread that records. It must not be filtered itself.
    #[must_use]
    pub fn new() -> Self {
        Self::start(Host::AsItIs)
    }

    /// The same on a host without clone3 and /dev/userfaultfd, as it looks to who is recorded.
    #[must_use]
    pub fn on_an_old_host() -> Self {
        Self::start(Host::Old)
    }

    /// The same on a host where a guest has a vsock: who listens on one listens on a Unix socket here, and whoever connects to that
    /// comes from the guest with this CID.
    #[must_use]
    pub fn beside_a_vsock(socket: &Path, cid: u32) -> Self {
        Self::start(Host::Vsock {
            socket: socket.to_owned(),
            cid,
            listener: Arc::new(AtomicI32::new(-1)),
        })
    }

    fn start(host: Host) -> Self {
        let recorder = Self {
            seen: Arc::default(),
            listener: Arc::new(AtomicI32::new(-1)),
            host,
        };
        let theirs = recorder.clone();
        std::thread::spawn(move || theirs.listen());
        recorder
    }

    /// What was seen so far.
    #[must_use]
    pub fn seen(&self) -> BTreeSet<Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets what was seen so far.
    pub fn forget(&self) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// From now on all calls of the calling thread are recorded, for good.
    ///
    /// # Panics
    /// If the kernel has no such filters.
    pub fn record_this_thread(&self) {
        let ask = libc::sock_filter {
            code: RETURN,
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_USER_NOTIF,
        };
        let mut filter = [ask];
        let program = libc::sock_fprog {
            len: 1,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: a filter of one valid instruction.
        let listener = unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
                &raw const program,
            )
        };
        assert!(
            listener >= 0,
            "no user notification: {}",
            io::Error::last_os_error()
        );
        // Nothing but a store from here on: every call waits for the listener already.
        #[allow(clippy::cast_possible_truncation)] // a descriptor
        self.listener.store(listener as i32, Ordering::Release);
    }

    fn listen(&self) {
        let listener = loop {
            match self.listener.load(Ordering::Acquire) {
                -1 => std::thread::sleep(Duration::from_millis(1)),
                // SAFETY: a fresh descriptor that nobody else closes.
                fd => break unsafe { OwnedFd::from_raw_fd(fd) },
            }
        };
        loop {
            // SAFETY: the kernel wants it zeroed.
            let mut notice: libc::seccomp_notif = unsafe { std::mem::zeroed() };
            let asked = ioctl(&listener, SECCOMP_IOCTL_NOTIF_RECV, (&raw mut notice).cast());
            match asked {
                Ok(()) => self.note(&notice),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                // The caller has died meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
                Err(_) => return,
            }
            let answer = self.stands_in(&notice);
            let (val, error) = match answer {
                Some(Ok(value)) => (value, 0),
                Some(Err(error)) => (0, -error),
                None => (0, 0),
            };
            let mut answer = libc::seccomp_notif_resp {
                id: notice.id,
                val,
                error,
                flags: if answer.is_some() { 0 } else { GO_ON },
            };
            let _ = ioctl(&listener, SECCOMP_IOCTL_NOTIF_SEND, (&raw mut answer).cast());
        }
    }

    /// What the host answers that this one is to look like, where it is not this one that answers.
    fn stands_in(&self, notice: &libc::seccomp_notif) -> Option<Result<i64, i32>> {
        let (call, arguments) = (i64::from(notice.data.nr), &notice.data.args);
        match &self.host {
            Host::AsItIs => None,
            Host::Old => match call {
                libc::SYS_clone3 => Some(Err(libc::ENOSYS)),
                libc::SYS_openat if starts_with(arguments[1], DEVICE) => Some(Err(libc::ENOENT)),
                _ => None,
            },
            Host::Vsock {
                socket,
                cid,
                listener,
            } => {
                let is_listener = i64::try_from(arguments[0]) == Ok(listener.load(Ordering::Acquire).into());
                match call {
                    libc::SYS_socket if arguments[0] == libc::AF_VSOCK as u64 => {
                        let listens = UnixListener::bind(socket).and_then(|listens| {
                            listens.set_nonblocking(true)?;
                            Ok(listens.into_raw_fd())
                        });
                        listener.store(*listens.as_ref().unwrap_or(&-1), Ordering::Release);
                        Some(listens.map(i64::from).map_err(|e| errno(&e)))
                    }
                    // It is bound.
                    libc::SYS_bind if is_listener => Some(Ok(0)),
                    libc::SYS_accept4 if is_listener => Some(accept(notice, *cid)),
                    _ => None,
                }
            }
        }
    }

    fn note(&self, notice: &libc::seccomp_notif) {
        let comm = std::fs::read_to_string(format!("/proc/{}/comm", notice.pid)).unwrap_or_default();
        let call = i64::from(notice.data.nr);
        #[allow(clippy::cast_possible_truncation)] // the kernel takes 32 bits
        let request = (call == libc::SYS_ioctl).then_some(notice.data.args[1] as u32);
        self.seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(Seen {
                thread: comm.trim().to_owned(),
                call,
                request,
            });
    }
}

/// Accepts whoever connects as one who comes by vsock.
#[allow(clippy::cast_possible_truncation)] // an address family, a descriptor, flags
fn accept(notice: &libc::seccomp_notif, cid: u32) -> Result<i64, i32> {
    let [listener, address, length, flags, ..] = notice.data.args;
    // SAFETY: the kernel wants it zeroed.
    let mut from: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    from.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    (from.svm_cid, from.svm_port) = (cid, 1024);
    // SAFETY: the caller waits in this process for its accept4, whose address has room for one of vsock.
    unsafe {
        let room = (length as *const libc::socklen_t).read();
        assert!(room as usize >= size_of_val(&from), "no room for an address");
        let accepted = libc::accept4(
            listener as i32,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            flags as i32,
        );
        if accepted < 0 {
            return Err(errno(&io::Error::last_os_error()));
        }
        (address as *mut libc::sockaddr_vm).write(from);
        Ok(accepted.into())
    }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

const DEVICE: &[u8] = b"/dev/userfaultfd\0";

/// Whether these bytes are at an address of this process, where its other threads have a path.
fn starts_with(address: u64, bytes: &[u8]) -> bool {
    let mut found = vec![0; bytes.len()];
    let memory = std::fs::File::open("/proc/self/mem");
    let read = memory.and_then(|memory| memory.read_at(&mut found, address));
    read.is_ok_and(|read| found[..read] == *bytes)
}

#[allow(clippy::cast_possible_truncation)] // 6
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
#[allow(clippy::cast_possible_truncation)] // 1
const GO_ON: u32 = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
const SECCOMP_IOCTL_NOTIF_RECV: u64 = 0xc050_2100;
const SECCOMP_IOCTL_NOTIF_SEND: u64 = 0xc018_2101;
const _: () =
    assert!(size_of::<libc::seccomp_notif>() == 0x50 && size_of::<libc::seccomp_notif_resp>() == 0x18);

fn ioctl(fd: &OwnedFd, request: u64, argument: *mut libc::c_void) -> io::Result<()> {
    // SAFETY: the request's argument, as its size above says.
    if unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
