//! One task per connection: receives, handles, answers; after the end waits for the peer's process.

use crate::error::Error;
use crate::ledger::epochs::MemberId;
use crate::net::closing::{self, Closers};
use crate::net::process::PeerProcess;
use crate::net::turns::{Place, Turns};
use crate::net::watched::{Watched, watch};
use crate::requests::outbox::{self, Flushed, Outbox};
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
    let peer = match PeerProcess::of(&socket) {
        Ok(peer) => peer,
        Err(e) => {
            log::warn!("a connection is refused, since its process cannot be identified: {e}");
            let _ = socket::send(&socket, &error_record(&Violation::Unidentified(e)), &[]);
            closers.close(closing::end(socket, Vec::new())).await;
            return;
        }
    };
    let outbox = {
        let unread = lock(&shared).peers.unread(peer.uid);
        Arc::new(Outbox::new(socket.clone(), unread))
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
            outbox.end_with(error_record(&violation));
            drop(outbox);
            closers.close(closing::end(socket, Vec::new())).await;
            return;
        }
    };
    let place = Place::new(&turns, peer.pid, peer.uid);
    let mut received = Vec::new();
    let end = converse(&shared, id, &socket, &outbox, &place, &mut received).await;
    if let Err(violation) = end {
        // A service that may not join tries again each second, and that its user may not was said.
        if !matches!(violation, Violation::Barred { .. }) {
            log::warn!("the connection of process {} is closed: {violation}", peer.pid);
            lock(&shared).peers.counters.malformed += 1;
        }
        outbox.end_with(error_record(&violation));
    }
    lock(&shared).hang_up(id);
    let unread = outbox.left_unread();
    drop(outbox);
    let remains = closing::end(socket, received);
    match unread {
        None => {
            // The connection counts as one of its process until all is closed: so what one process can leave to be closed is bounded.
            closers.close(remains).await;
            part(&shared, id, peer, &place).await;
        }
        // That its user may have only so many descriptors unread bounds it, too. Whoever waits for this peer need not wait for its reading.
        Some(unread) => {
            let close = async {
                remains.is_read(&unread).await;
                closers.close(remains).await;
                drop(unread);
            };
            tokio::join!(close, part(&shared, id, peer, &place));
        }
    }
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
    log::warn!(
        "a service, or others of its user, do not read what the store sends: its connection is closed"
    );
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
                Flushed::NoRoom => {
                    let _ = tokio::time::timeout(outbox::PATIENCE, outbox.room()).await;
                    continue;
                }
                Flushed::Blocked => {}
            }
            // Also whenever the peer has read a record, if little is left.
            let ready = match tokio::time::timeout(outbox::PATIENCE, watched.writable()).await {
                Ok(ready) => ready,
                Err(_) => continue,
            };
            let Ok(mut ready) = ready else {
                return;
            };
            if outbox.flush() == Flushed::Blocked {
                // It shut its socket down both ways: that stays, and nothing can be sent.
                if ready.ready().is_write_closed() {
                    return tokio::time::sleep(LAST_WORDS).await;
                }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::requests::unread::Unread;
    use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};
    use std::sync::Mutex;
    use vmm_dedup_protocol::message::aligned_buffer;

    /// Sends as many descriptors as a store of 16 GiB has, to who does this; how long that went on, at most two seconds.
    fn send_to(peer: impl FnOnce(OwnedFd) + Send) -> Duration {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::io::ioctl_fionbio(&ours, true).unwrap();
        let shared = Arc::new(Mutex::new(State::new(Config::default()).unwrap()));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        std::thread::scope(|scope| {
            let peer = scope.spawn(|| peer(theirs));
            let start = Instant::now();
            runtime.block_on(async {
                let socket = Arc::new(ours);
                let watched = watch(socket.clone(), Interest::READABLE | Interest::WRITABLE).unwrap();
                let outbox = Outbox::new(socket, Arc::new(Unread::of_this_process()).share(1));
                let file = Arc::new(rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
                (0..1024).for_each(|_| outbox.push_greeting(vec![0; 16], vec![file.clone()]));
                let sent = send_all(&shared, &watched, &outbox);
                let read = async {
                    while !peer.is_finished() {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                };
                tokio::select! {
                    () = sent => {}
                    () = read => {}
                    () = tokio::time::sleep(Duration::from_secs(2)) => {}
                }
            });
            start.elapsed()
        })
    }

    #[test]
    fn a_long_greeting_goes_out_as_fast_as_it_is_read() {
        let took = send_to(|socket| {
            let mut buffer = aligned_buffer();
            let mut got = 0;
            while got < 1024 {
                got += socket::receive(&socket, &mut buffer).unwrap().unwrap().fds.len();
            }
        });
        println!("{took:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
    }

    #[test]
    fn who_shuts_its_socket_down_and_reads_nothing_keeps_the_store_no_busier() {
        let busy = || {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap())
        };
        let before = busy();
        let took = send_to(|socket| {
            // It has as much as it gets.
            std::thread::sleep(Duration::from_millis(200));
            rustix::net::shutdown(&socket, Shutdown::Both).unwrap();
            std::thread::sleep(Duration::from_secs(1));
        });
        let busy = busy() - before;
        println!("{busy:?} of {took:?}");
        assert!(busy < took / 4, "{busy:?} of {took:?}");
    }
}
