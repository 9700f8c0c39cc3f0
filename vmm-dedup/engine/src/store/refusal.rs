//! VMs without a service: they tell the store why, so that operators see them and what would lift the refusal.

use crate::error::Error;
use crate::seccomp::Part;
use crate::sys::bell::Bell;
use crate::sys::thread;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use vmm_dedup_protocol::message::{Kind, aligned_buffer, encode};
use vmm_dedup_protocol::name::Name;
use vmm_dedup_protocol::refusal::{self, Refusal};
use vmm_dedup_protocol::socket;

/// Time between two tries to reach a store.
const RETRY: Duration = Duration::from_secs(1);

/// Keeps a refused VM known to the store, for as long as it lives.
#[derive(Debug)]
pub struct Refused {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    bell: Bell,
    stop: AtomicBool,
}

impl Refused {
    /// Announces a VM of so many pages to the store at this path, now or as soon as there is one, and again whenever
    /// the store has come back. `name` as in [`crate::Config::name`].
    ///
    /// The work is done by a thread of its own, `dedup-refused`, which sleeps nearly always. It inherits the calling
    /// thread's seccomp filter.
    ///
    /// # Errors
    /// [`Error::Eventfd`], [`Error::Thread`].
    pub fn announce(store: &Path, name: &str, pages: u64, refusal: &Refusal) -> Result<Self, Error> {
        let shared = Arc::new(Shared {
            bell: Bell::new().map_err(Error::Eventfd)?,
            stop: AtomicBool::new(false),
        });
        let announcement = refusal::Refused {
            serial: 0,
            pages,
            name: Name::new(name),
            refusal: refusal.clone(),
        };
        let announcer = Announcer {
            record: encode(Kind::Refused, &[&announcement.body()]),
            store: store.to_owned(),
            shared: shared.clone(),
        };
        let thread = thread::spawn(Part::Refused, move || announcer.run()).map_err(Error::Thread)?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for Refused {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Announcer {
    record: Vec<u8>,
    store: PathBuf,
    shared: Arc<Shared>,
}

impl Announcer {
    fn run(&self) {
        while !self.stopped() {
            if let Ok(socket) = self.announce() {
                self.stay(&socket);
            }
            if !self.stopped() {
                self.shared.bell.wait(RETRY, None);
            }
        }
    }

    fn stopped(&self) -> bool {
        self.shared.stop.load(Ordering::Acquire)
    }

    fn announce(&self) -> std::io::Result<OwnedFd> {
        let socket = socket::connect(&self.store)?;
        socket::send(&socket, &self.record, &[])?;
        Ok(socket)
    }

    /// Stays connected until the store goes. It has nothing to say but that it took the announcement, or why not.
    fn stay(&self, socket: &OwnedFd) {
        let mut buffer = aligned_buffer();
        while !self.stopped() {
            if !self
                .shared
                .bell
                .wait(Duration::from_secs(3600), Some(socket.as_fd()))
            {
                continue;
            }
            match socket::receive(socket, &mut buffer) {
                Ok(Some(_)) => {}
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_protocol::refusal::Reason;

    #[test]
    fn a_vm_is_announced_again_to_every_new_store() {
        let path = std::env::temp_dir().join(format!("vmm-dedup-refused-{}", std::process::id()));
        let refusal = Refusal::new(Reason::Vfio, "a device", "detach it");
        let refused = Refused::announce(&path, "vm", 5, &refusal).unwrap();
        for _store in 0..2 {
            let _ = std::fs::remove_file(&path);
            let listener = socket::listen(&path).unwrap();
            let bell = Bell::new().unwrap();
            let minute = Duration::from_secs(60);
            assert!(bell.wait(minute, Some(listener.as_fd())));
            let peer = socket::accept(&listener).unwrap();
            assert!(bell.wait(minute, Some(peer.as_fd())));
            let mut buffer = aligned_buffer();
            let record = socket::receive(&peer, &mut buffer).unwrap().unwrap();
            let message = record.parse(&buffer).unwrap();
            let vmm_dedup_protocol::message::Message::Refused(announced) = message else {
                panic!("{message:?}")
            };
            assert_eq!((announced.pages, announced.refusal), (5, refusal.clone()));
        }
        drop(refused);
        std::fs::remove_file(&path).unwrap();
    }
}
