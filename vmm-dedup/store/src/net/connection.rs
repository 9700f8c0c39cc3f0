//! One task per connection: receives, handles, answers; after the end waits for the peer's process.

use crate::error::Error;
use crate::ledger::epochs::MemberId;
use crate::net::closing::{self, Closers};
use crate::net::process::PeerProcess;
use crate::net::turns::{Place, Turns};
use crate::net::watched::{Watched, watch};
use crate::requests::outbox::{Flushed, Outbox};
use crate::requests::peers::Parting;
use crate::requests::violation::Violation;
use crate::state::{Shared, State, lock};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use vmm_dedup_protocol::message::{Kind, encode};
use vmm_dedup_protocol::socket;

/// An orphan whose process still lives after this long is worth a warning: what it references stays.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(1);

/// How long a connection may take for its first message: it would keep a place that others can use.
const GREETING: Duration = Duration::from_secs(10);

/// How long what a peer sent before it went may take to be read. It is bounded for what breaks otherwise: then nobody has gone.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// How long a step of forgetting takes that is one of several, at least.
const FORGETTING: Duration = Duration::from_micros(250);

/// How long to wait when the kernel is short of what sending takes.
const SHORTAGE: Duration = Duration::from_millis(20);

/// Serves one peer until it goes or breaks the rules, and its process has ended.
pub(crate) async fn serve(shared: Shared, closers: Arc<Closers>, turns: Arc<Turns>, accepted: OwnedFd) {
    let socket = Arc::new(accepted);
    let outbox = Arc::new(Outbox::new(socket.clone()));
    let peer = match PeerProcess::of(&socket) {
        Ok(peer) => peer,
        Err(e) => {
            log::warn!("a connection is refused, since its process cannot be identified: {e}");
            outbox.push(error_record(&Violation::Unidentified(e)), Vec::new());
            drop(outbox);
            closers.close(closing::end(socket, Vec::new())).await;
            return;
        }
    };
    let admitted = lock(&shared).admit(peer.pid, peer.uid, outbox.clone());
    let id = match admitted {
        Ok(id) => id,
        Err(violation) => {
            // A service that is refused tries again each second.
            let level = match violation {
                Violation::Stranger { again: true, .. } => log::Level::Debug,
                _ => log::Level::Warn,
            };
            log::log!(
                level,
                "a connection of process {} is refused: {violation}",
                peer.pid
            );
            outbox.push(error_record(&violation), Vec::new());
            drop(outbox);
            closers.close(closing::end(socket, Vec::new())).await;
            return;
        }
    };
    let place = Place::new(&turns, peer.pid, peer.uid);
    let mut received = Vec::new();
    let end = converse(&shared, id, &socket, &outbox, &place, &mut received).await;
    if let Err(violation) = end {
        log::warn!("the connection of process {} is closed: {violation}", peer.pid);
        lock(&shared).peers.counters.malformed += 1;
        outbox.push(error_record(&violation), Vec::new());
    }
    drop(outbox);
    lock(&shared).hang_up(id);
    // The connection counts as one of its process until all is closed: so what one process can leave to be closed is bounded.
    closers.close(closing::end(socket, received)).await;
    part(&shared, id, peer, &place).await;
    place.settle().await;
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
    place: &Place,
    received: &mut Vec<OwnedFd>,
) -> Result<(), Violation> {
    let interest = Interest::READABLE | Interest::WRITABLE;
    let watched = watch(socket.clone(), interest).map_err(|e| Violation::Resources(Error::Memory(e)))?;
    tokio::select! {
        done = receive_all(shared, id, &watched, outbox, place, received) => done,
        () = send_all(shared, &watched, outbox) => Ok(()),
        () = silence(shared, id) => Err(Violation::Silent(GREETING)),
        () = over(shared, id) => Ok(()),
        () = cut(shared, id) => Err(Violation::Stopped),
    }
}

/// Returns when the connection is to end.
async fn cut(shared: &Shared, id: MemberId) {
    let cut = lock(shared).peers.cut(id);
    cut.notified().await;
}

/// Returns when the peer's process has given up this membership over another one.
async fn over(shared: &Shared, id: MemberId) {
    let over = lock(shared).peers.over(id);
    over.notified().await;
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
    place: &Place,
    received: &mut Vec<OwnedFd>,
) -> Result<(), Violation> {
    loop {
        let Ok(mut ready) = watched.readable().await else {
            return Ok(());
        };
        let mut turn = place.turn().await;
        while !turn.is_over() {
            let (next, news) = receive(shared, id, watched.get_ref(), outbox, received)?;
            turn.count(news);
            match next {
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
        turn.end().await;
    }
}

enum Next {
    More,
    Nothing,
    End,
    /// The answer does not fit the queue any more.
    Overflow,
}

/// Receives and handles one record, if there is one; what became of it, and how much needless news it caused. Descriptors that came
/// along are not closed here: that may take for ever.
fn receive(
    shared: &Shared,
    id: MemberId,
    socket: &Watched,
    outbox: &Outbox,
    received: &mut Vec<OwnedFd>,
) -> Result<(Next, u64), Violation> {
    let mut state = lock(shared);
    let news = state.exchange.needless_news();
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
    Ok((next?, state.exchange.needless_news() - news))
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
                // The peer has gone, which whoever receives finds behind what it sent before, as a goodbye.
                Flushed::Broken => return tokio::time::sleep(LAST_WORDS).await,
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

/// Does something step by step, a turn for each, until there is no more to do.
async fn step_by_step(shared: &Shared, place: &Place, mut step: impl FnMut(&mut State) -> bool) {
    loop {
        let turn = place.turn().await;
        let more = step(&mut lock(shared));
        if !more {
            return;
        }
        turn.end().await;
    }
}

/// Counts what a peer references as an orphan's.
async fn orphan(shared: &Shared, id: MemberId, place: &Place) {
    step_by_step(shared, place, |state| state.orphan(id)).await;
}

/// Lets go of a peer: what it sighted at once, what it references when its process has ended or it said goodbye.
async fn part(shared: &Shared, id: MemberId, peer: PeerProcess, place: &Place) {
    let mut steps = 0..;
    step_by_step(shared, place, |state| {
        let start = Instant::now();
        let mut step = || steps.next().is_some_and(|step| state.forget_some(id, step));
        while step() {
            if start.elapsed() >= FORGETTING {
                return true;
            }
        }
        false
    })
    .await;
    let mut turn = place.turn().await;
    let (parting, news) = {
        let mut state = lock(shared);
        let news = state.exchange.needless_news();
        (state.disconnect(id), state.exchange.needless_news() - news)
    };
    turn.count(news);
    turn.end().await;
    if parting == Parting::Done {
        return;
    }
    if let (Parting::AwaitEnd, Some(pidfd)) = (parting, peer.pidfd) {
        outlive(shared, id, peer.pid, pidfd, place).await;
    }
    step_by_step(shared, place, |state| state.depart(id)).await;
}

/// Returns when an orphan's process has ended, or has given up its membership.
async fn outlive(shared: &Shared, id: MemberId, pid: u64, pidfd: OwnedFd, place: &Place) {
    let ended = match watch(Arc::new(pidfd), Interest::READABLE) {
        Ok(ended) => ended,
        Err(e) => {
            // Never assume that a process has ended.
            log::error!(
                "process {pid} cannot be watched, its pages stay until it gives them up or the store restarts: {e}"
            );
            orphan(shared, id, place).await;
            return over(shared, id).await;
        }
    };
    let end = async || {
        tokio::select! {
            _ = ended.readable() => {}
            () = over(shared, id) => {}
        }
    };
    // Usually the process is ending, and then the rest need not be counted.
    tokio::select! {
        () = end() => return,
        () = orphan(shared, id, place) => {}
    }
    if tokio::time::timeout(ORPHAN_PATIENCE, end()).await.is_err() {
        log::warn!(
            "process {pid} lives without a connection: what it references stays until it ends or gives that up over another \
             connection"
        );
        end().await;
    }
}
