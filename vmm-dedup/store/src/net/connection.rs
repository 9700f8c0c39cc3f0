//! One task per connection: receives, handles, answers; after the end waits for the peer's process.

use crate::error::Error;
use crate::ledger::epochs::MemberId;
use crate::net::closing::{self, Closers};
use crate::net::process::PeerProcess;
use crate::net::watched::{Watched, watch};
use crate::requests::outbox::{Flushed, Outbox};
use crate::requests::peers::Parting;
use crate::requests::violation::Violation;
use crate::state::{Shared, lock};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use vmm_dedup_protocol::message::{Kind, encode};
use vmm_dedup_protocol::socket;

/// Records of one connection that are handled before the others get their turn.
const TURN: usize = 8;

/// An orphan whose process still lives after this long is worth a warning: its slots cannot be freed.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(1);

/// How long a connection may take for its first message: it would keep a place that others can use.
const GREETING: Duration = Duration::from_secs(10);

/// How long to wait when the kernel is short of what sending takes.
const SHORTAGE: Duration = Duration::from_millis(20);

/// Serves one peer until it goes or breaks the rules, and its process has ended.
pub(crate) async fn serve(shared: Shared, closers: Arc<Closers>, accepted: OwnedFd) {
    let socket = Arc::new(accepted);
    let outbox = Arc::new(Outbox::new(socket.clone()));
    let peer = match PeerProcess::of(&socket) {
        Ok(peer) => peer,
        Err(e) => {
            log::warn!("a connection is refused, since its process cannot be identified: {e}");
            drop(outbox);
            closers.close(closing::end(socket, Vec::new())).await;
            return;
        }
    };
    let admitted = lock(&shared).admit(peer.pid, peer.uid, outbox.clone());
    let id = match admitted {
        Ok(id) => id,
        Err(violation) => {
            log::warn!("a connection of process {} is refused: {violation}", peer.pid);
            outbox.push(error_record(&violation), Vec::new());
            drop(outbox);
            closers.close(closing::end(socket, Vec::new())).await;
            return;
        }
    };
    let mut received = Vec::new();
    if let Err(violation) = converse(&shared, id, &socket, &outbox, &mut received).await {
        log::warn!("the connection of process {} is closed: {violation}", peer.pid);
        lock(&shared).peers.counters.malformed += 1;
        outbox.push(error_record(&violation), Vec::new());
    }
    drop(outbox);
    lock(&shared).peers.drop_outbox(id);
    // The connection counts as one of its process until all is closed: so what one process can leave to be closed is bounded.
    closers.close(closing::end(socket, received)).await;
    part(&shared, id, peer).await;
}

fn error_record(violation: &Violation) -> Vec<u8> {
    encode(Kind::Error, &[violation.to_string().as_bytes()])
}

/// Returns when the peer has gone, or with what it did wrong.
async fn converse(
    shared: &Shared,
    id: MemberId,
    socket: &Arc<OwnedFd>,
    outbox: &Outbox,
    received: &mut Vec<OwnedFd>,
) -> Result<(), Violation> {
    let interest = Interest::READABLE | Interest::WRITABLE;
    let watched = watch(socket.clone(), interest).map_err(|e| Violation::Resources(Error::Memory(e)))?;
    tokio::select! {
        done = receive_all(shared, id, &watched, outbox, received) => done,
        () = send_all(shared, &watched, outbox) => Ok(()),
        () = silence(shared, id) => Err(Violation::Silent(GREETING)),
    }
}

/// Returns when the peer has not greeted in time.
async fn silence(shared: &Shared, id: MemberId) {
    tokio::time::sleep(GREETING).await;
    if lock(shared).peers.greeting(id).is_none() {
        std::future::pending().await
    }
}

async fn receive_all(
    shared: &Shared,
    id: MemberId,
    watched: &AsyncFd<Watched>,
    outbox: &Outbox,
    received: &mut Vec<OwnedFd>,
) -> Result<(), Violation> {
    loop {
        let Ok(mut ready) = watched.readable().await else {
            return Ok(());
        };
        for _ in 0..TURN {
            match receive(shared, id, watched.get_ref(), outbox, received)? {
                Next::More => {}
                Next::Nothing => {
                    ready.clear_ready();
                    break;
                }
                Next::End => return Ok(()),
                Next::Overflow => {
                    cut_off(shared);
                    return Ok(());
                }
            }
        }
        drop(ready);
        tokio::task::yield_now().await;
    }
}

enum Next {
    More,
    Nothing,
    End,
    /// The answer does not fit the queue any more.
    Overflow,
}

/// Receives and handles one record, if there is one. Descriptors that came along are not closed here: that may take for ever.
fn receive(
    shared: &Shared,
    id: MemberId,
    socket: &Watched,
    outbox: &Outbox,
    received: &mut Vec<OwnedFd>,
) -> Result<Next, Violation> {
    let mut state = lock(shared);
    let mut buffer = std::mem::take(&mut state.buffer);
    let next = match socket::receive_apart(socket, &mut buffer, received) {
        _ if !received.is_empty() => Err(Violation::Unexpected("a descriptor")),
        Ok(Some(record)) => record
            .parse(&buffer)
            .map_err(Violation::from)
            .and_then(|message| state.handle(id, &message))
            .map(|reply| {
                if let Some(reply) = reply {
                    outbox.push(reply, Vec::new());
                }
                match () {
                    () if outbox.has_overflowed() => Next::Overflow,
                    () if state.peers.is_leaving(id) => Next::End,
                    () => Next::More,
                }
            }),
        Ok(None) => Ok(Next::End),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Next::Nothing),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Next::More),
        // It has gone without reading all, which the kernel says once; what it sent before, as a goodbye, follows.
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Ok(Next::More),
        Err(e) if e.kind() == io::ErrorKind::InvalidData => Err(Violation::Unreadable(e)),
        Err(_) => Ok(Next::End),
    };
    state.buffer = buffer;
    next
}

fn cut_off(shared: &Shared) {
    lock(shared).peers.counters.overflows += 1;
    log::warn!("a service does not read what the store sends: its connection is closed");
}

/// Sends what was queued, whenever the socket takes it. Returns when the connection is beyond hope.
async fn send_all(shared: &Shared, watched: &AsyncFd<Watched>, outbox: &Outbox) {
    loop {
        outbox.queued().await;
        loop {
            match outbox.flush() {
                Flushed::Empty => break,
                Flushed::Broken => return,
                Flushed::Overflow => {
                    cut_off(shared);
                    return;
                }
                Flushed::Later => {
                    tokio::time::sleep(SHORTAGE).await;
                    continue;
                }
                Flushed::Blocked => {}
            }
            let Ok(mut ready) = watched.writable().await else {
                return;
            };
            if outbox.flush() == Flushed::Blocked {
                ready.clear_ready();
            }
        }
    }
}

/// Counts what a peer references as an orphan's.
async fn orphan(shared: &Shared, id: MemberId) {
    loop {
        let more = lock(shared).orphan(id);
        if !more {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Lets go of a peer: what it sighted at once, what it references when its process has ended or it said goodbye.
async fn part(shared: &Shared, id: MemberId, peer: PeerProcess) {
    let parting = lock(shared).disconnect(id);
    if parting == Parting::Done {
        return;
    }
    if let (Parting::AwaitEnd, Some(pidfd)) = (parting, peer.pidfd) {
        match watch(Arc::new(pidfd), Interest::READABLE) {
            Ok(ended) => {
                // Usually the process is ending, and then the rest need not be counted.
                tokio::select! {
                    () = orphan(shared, id) => {}
                    _ = ended.readable() => {}
                }
                if tokio::time::timeout(ORPHAN_PATIENCE, ended.readable())
                    .await
                    .is_err()
                {
                    log::warn!(
                        "process {} lives without a connection: what it references stays, and slots that it may \
                         map are not freed, until it ends",
                        peer.pid
                    );
                    let _ = ended.readable().await;
                }
            }
            Err(e) => {
                // Never assume that a process has ended: what it references stays for good.
                log::error!(
                    "process {} cannot be watched, its pages stay until the store restarts: {e}",
                    peer.pid
                );
                orphan(shared, id).await;
                return;
            }
        }
    }
    loop {
        let more = lock(shared).depart(id);
        if !more {
            return;
        }
        tokio::task::yield_now().await;
    }
}
