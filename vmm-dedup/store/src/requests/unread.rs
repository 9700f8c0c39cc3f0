//! Descriptors that were sent to peers, and that these have not read.
//!
//! Linux counts them for all sockets of the user who sends, and at the limit on open files it passes none of that user's any more: to
//! nobody. So the store counts them by the users whom it sends them to. A user has no more than a part of what is left, so there always
//! is some left, however many users read nothing. What is too much waits in the outbox, for that user's peers to read. A connection
//! that ends is counted until its peer has read all or has hung up: before, its descriptors are on their way as ever.
#![allow(unsafe_code)] // ioctl(TIOCOUTQ), which rustix lacks.

use rustix::process::{Resource, getrlimit};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// The store lets this part of what the kernel does be on its way at most: other stores of its user have some, too, and a connection
/// that ended keeps a descriptor of the store's open as long as it counts.
const OF_KERNEL: usize = 4;

/// A user has this part of what is left of that.
const OF_USER: usize = 16;

/// Most descriptors of one connection: so many that who reads is not waited for often.
const WINDOW: usize = 16;

/// No record takes so few bytes of a socket's buffer: what is left beyond this while it goes is the kernel's own counting.
const NO_RECORD: libc::c_int = 256;

/// Time between two looks at a connection that has ended, at first and at most.
const FIRST_LOOK: Duration = Duration::from_millis(10);
const LAST_LOOK: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct User {
    count: usize,
    shares: usize,
    /// Told when there may be room: one of those who wait, who tells the next one.
    room: Arc<Notify>,
}

#[derive(Debug, Default)]
struct All {
    count: usize,
    users: HashMap<u32, User>,
}

/// Those of all connections.
#[derive(Debug)]
pub(crate) struct Unread {
    most: usize,
    all: Mutex<All>,
}

impl Unread {
    /// As many as this process may have.
    pub(crate) fn of_this_process() -> Self {
        let files = getrlimit(Resource::Nofile).current;
        let files = files.and_then(|files| usize::try_from(files).ok());
        Self::new(files.unwrap_or(usize::MAX) / OF_KERNEL)
    }

    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            all: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// That of a connection of a user: none yet.
    pub(crate) fn share(self: &Arc<Self>, uid: u32) -> Share {
        let mut all = self.lock();
        let user = all.users.entry(uid).or_default();
        user.shares += 1;
        Share {
            room: user.room.clone(),
            unread: self.clone(),
            uid,
            count: 0,
        }
    }

    /// Has those who wait look again: what others read gives them room, too. To be called now and then.
    pub(crate) fn look_again(&self) {
        self.lock().users.values().for_each(|user| user.room.notify_one());
    }
}

/// Why a descriptor cannot be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// This peer is to read first.
    ForPeer,
    /// Others of its user are.
    ForUser,
}

/// Those of a connection. As long as this is there they are counted.
#[derive(Debug)]
pub(crate) struct Share {
    unread: Arc<Unread>,
    uid: u32,
    room: Arc<Notify>,
    count: usize,
}

impl Share {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Told when there may be room for more of this user.
    pub(super) fn room(&self) -> Arc<Notify> {
        self.room.clone()
    }

    /// So many more are about to be sent. A user that has none may always send some.
    pub(super) fn take(&mut self, fds: usize) -> Result<(), Wait> {
        if self.count > 0 && self.count + fds > WINDOW {
            return Err(Wait::ForPeer);
        }
        let mut all = self.unread.lock();
        let part = self.unread.most.saturating_sub(all.count) / OF_USER;
        let All { count, users } = &mut *all;
        let user = users.entry(self.uid).or_default();
        if user.count > 0 && user.count + fds > part {
            return Err(if self.count > 0 {
                Wait::ForPeer
            } else {
                Wait::ForUser
            });
        }
        (*count, user.count, self.count) = (*count + fds, user.count + fds, self.count + fds);
        user.room.notify_one();
        Ok(())
    }

    /// So many were read, or could not be sent.
    pub(super) fn give_back(&mut self, fds: usize) {
        if fds == 0 {
            return;
        }
        let mut all = self.unread.lock();
        let All { count, users } = &mut *all;
        let user = users.entry(self.uid).or_default();
        (*count, user.count, self.count) = (*count - fds, user.count - fds, self.count - fds);
        user.room.notify_one();
    }

    /// Gives all back if the peer has read all that was sent over this socket.
    pub(super) fn look(&mut self, socket: &OwnedFd) {
        if self.count > 0 && is_read(socket) {
            self.give_back(self.count);
        }
    }

    /// The same in a share of its own, which leaves this one empty.
    pub(super) fn split_off(&mut self) -> Self {
        let mut other = self.unread.share(self.uid);
        std::mem::swap(&mut self.count, &mut other.count);
        other
    }

    /// Returns when the peer has read all, or has hung up. The kernel does not tell when.
    pub(crate) async fn is_read(&self, socket: &OwnedFd) {
        let mut pause = FIRST_LOOK;
        while !is_read(socket) {
            tokio::time::sleep(pause).await;
            pause = LAST_LOOK.min(2 * pause);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.give_back(self.count);
        let mut all = self.unread.lock();
        if let Some(user) = all.users.get_mut(&self.uid) {
            user.shares -= 1;
            if user.shares == 0 {
                all.users.remove(&self.uid);
            }
        }
    }
}

/// Whether the peer has read all that was sent over a Unix socket. The kernel counts a record no more only once its descriptors are not
/// on their way any more.
fn is_read(socket: &OwnedFd) -> bool {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open for the call, and `bytes` is valid for writes of an int, which is what the kernel writes.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    result == 0 && bytes < NO_RECORD
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many as a connection may have.
    fn fill(share: &mut Share) -> Wait {
        loop {
            if let Err(wait) = share.take(1) {
                return wait;
            }
        }
    }

    #[test]
    fn however_many_users_read_nothing_there_is_room_for_another_one() {
        let unread = Arc::new(Unread::new(4096));
        let mut hostile = Vec::new();
        for uid in 1..=64 {
            let mut shares: Vec<_> = (0..64).map(|_| unread.share(uid)).collect();
            let waits: Vec<_> = shares.iter_mut().map(fill).collect();
            assert_eq!(waits[63], Wait::ForUser, "user {uid}");
            if uid == 1 {
                let count: usize = shares.iter().map(|share| share.count).sum();
                assert!((224..=256).contains(&count), "{count}");
            }
            hostile.extend(shares);
        }
        let mut honest: Vec<_> = (0..2).map(|_| unread.share(65)).collect();
        assert_eq!(fill(&mut honest[0]), Wait::ForPeer);
        assert!(honest[0].count >= 4, "{}", honest[0].count);
        honest[0].give_back(2);
        assert!(honest[1].take(2).is_ok());
        assert!(unread.lock().count < 4096);
        drop((hostile, honest));
        assert!(unread.lock().users.is_empty() && unread.lock().count == 0);
    }

    #[test]
    fn who_has_none_may_have_some_whatever_the_limit_is() {
        let unread = Arc::new(Unread::new(1));
        let (mut a, mut b, mut c) = (unread.share(1), unread.share(1), unread.share(2));
        assert!(a.take(2).is_ok() && c.take(2).is_ok());
        assert_eq!((a.take(1), b.take(1)), (Err(Wait::ForPeer), Err(Wait::ForUser)));
        drop(a);
        assert!(b.take(1).is_ok());
    }
}
