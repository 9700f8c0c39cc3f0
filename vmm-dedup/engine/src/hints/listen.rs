//! The thread that listens to a guest's agent.
//!
//! It has one agent at a time: whoever comes takes the place of the one before, as after a reboot. Guests cannot make it work
//! much: the receiver takes no more bytes than it granted, who comes too often is refused, after which nobody is let in for a
//! second, and the thread rests when it has used its share of the CPU budget.

use crate::config::AgentSocket;
use crate::error::Error;
use crate::hints::line::{AgentLine, Inner, State};
use crate::seccomp::Part;
use crate::sys::cpu_budget::Pacer;
use crate::sys::{proc, thread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_dedup_agent_receiver::listen::{self as sockets, Connection, Listener};
use vmm_dedup_agent_wire::PORT;

/// Between two tries to make the socket.
const NEXT_TRY: Duration = Duration::from_secs(10);
/// After somebody was refused, or could not be let in.
const CLOSED: Duration = Duration::from_secs(1);
/// After others crowded the port.
const CROWDED: Duration = Duration::from_millis(20);
/// Turned away at a time while nobody is let in.
const TURNED_AWAY: usize = 256;
/// Until the next are, if there may be more of them.
const NEXT_TURNED_AWAY: Duration = Duration::from_millis(50);
/// The receiver wants to hear of the time at least so often.
const TICK: Duration = Duration::from_secs(1);
/// Who has used more than his share rests for so long, and says what is to be said, until he has not. To wake takes some 65 us, which is
/// the share of 13 ms where the whole budget is one percent: who slept no longer than he has to make up for would never have made up.
const RESTS: Duration = Duration::from_millis(50);
/// Most that waits for an agent to read it. Answers are few; who reads none is cut off.
const MOST_UNREAD: usize = 64 << 10;
/// Between two reads: a guest that sends a byte at a time does not keep the thread busy. Credit is for far less than can be read so.
const BETWEEN_READS: Duration = Duration::from_millis(5);
/// Read at a time.
const AT_ONCE: usize = 16 << 10;

/// Starts the thread that listens, until the line ends.
///
/// # Errors
/// [`Error::Thread`].
pub(crate) fn start(line: &Arc<AgentLine>, at: AgentSocket) -> Result<JoinHandle<()>, Error> {
    line.begin();
    let line = line.clone();
    let listens = move || again_after_panics(&line, |opens| listen(&line, &at, opens));
    thread::spawn(Part::Agent, listens).map_err(Error::Thread)
}

/// Listens until the line ends. What agents send is hostile: should it find a bug, the agent is taken to have gone, and somebody is let in
/// again later. What is forbidden stays so.
fn again_after_panics(line: &AgentLine, mut listen: impl FnMut(Instant)) {
    let mut opens = Instant::now();
    while catch_unwind(AssertUnwindSafe(|| listen(opens))).is_err() {
        log::error!("the guest's agent is not heard for a while, by a bug: please report this");
        line.set_state(State::Failed);
        let disconnect = || line.lock().receiver.disconnected(line.now());
        let _ = catch_unwind(AssertUnwindSafe(disconnect));
        opens = Instant::now() + NEXT_TRY;
    }
}

/// `opens`: when the socket is made.
fn listen(line: &AgentLine, at: &AgentSocket, opens: Instant) {
    let mut ear = Ear {
        line,
        listener: None,
        opens,
        agent: None,
        reads: Instant::now(),
        turns_away: Instant::now(),
        pacer: Pacer::new(line.may_use()),
        buffer: vec![0; AT_ONCE],
    };
    while !line.has_ended() {
        ear.open(at);
        // Who rests hears nobody, and says what is to be said.
        if ear.has_used_up_its_share() {
            std::thread::sleep(RESTS);
        } else {
            ear.wait();
            ear.let_in();
            ear.hear();
        }
        ear.answer();
        line.note_cpu_ns(proc::thread_cpu_ns());
    }
}

struct Ear<'a> {
    line: &'a AgentLine,
    listener: Option<Listener>,
    /// When the socket is made, or when somebody is let in again.
    opens: Instant,
    agent: Option<Connection>,
    /// When it is read from again.
    reads: Instant,
    /// When others are turned away again, while nobody is let in.
    turns_away: Instant,
    pacer: Pacer,
    buffer: Vec<u8>,
}

impl Ear<'_> {
    /// Makes the socket, if there is none.
    fn open(&mut self, at: &AgentSocket) {
        if self.listener.is_some() || Instant::now() < self.opens {
            return;
        }
        let made: Result<Listener, sockets::Error> = match at {
            AgentSocket::Hybrid(socket) => Listener::hybrid(socket, PORT),
            AgentSocket::Vhost(cid) => Listener::vhost(*cid),
        };
        match made {
            Ok(listener) => {
                log::info!("the guest's agent is heard on {listener}");
                self.line.set_state(State::Awaited);
                self.listener = Some(listener);
            }
            Err(error) => {
                log::warn!("the guest's agent cannot be heard, merging goes on without it: {error}");
                self.line.set_state(State::Failed);
                self.opens = Instant::now() + NEXT_TRY;
            }
        }
    }

    fn has_used_up_its_share(&mut self) -> bool {
        self.pacer.set_percent(self.line.may_use());
        !self.pacer.debt().is_zero()
    }

    /// Waits until somebody comes, sends, reads or rings.
    fn wait(&self) {
        let is_closed = Instant::now() < self.opens;
        let listener = self.listener.as_ref().filter(|_| !is_closed);
        let wants = match self.line.lock().out.is_empty() {
            true => PollFlags::IN,
            false => PollFlags::IN | PollFlags::OUT,
        };
        let reads = self.reads.saturating_duration_since(Instant::now());
        let mut fds = vec![PollFd::new(&self.line.bell, PollFlags::IN)];
        fds.extend(listener.map(|listener| PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)));
        fds.extend(
            self.agent
                .as_ref()
                .filter(|_| reads.is_zero())
                .map(|agent| PollFd::from_borrowed_fd(agent.as_fd(), wants)),
        );
        let opens = self.opens.saturating_duration_since(Instant::now());
        let turns_away = self.turns_away.saturating_duration_since(Instant::now());
        let times = [
            (is_closed, opens),
            (is_closed, turns_away),
            (!reads.is_zero(), reads),
        ];
        let next = times.into_iter().filter(|(is, _)| *is).map(|(_, time)| time);
        let until = next.min().unwrap_or(TICK).min(TICK);
        let timeout = Timespec::try_from(until).ok();
        // Interrupted: all is looked at anyway.
        let _ = poll(&mut fds, timeout.as_ref());
        self.line.bell.hush();
    }

    fn let_in(&mut self) {
        let Some(listener) = &self.listener else { return };
        let now = Instant::now();
        if now < self.opens {
            // Whoever comes meanwhile is turned away: a VMM may wait in connect() while the queue is full.
            if now >= self.turns_away {
                let turned_away = || matches!(listener.accept(), Ok(Some(_)));
                let all = (0..TURNED_AWAY).take_while(|_| turned_away()).count() < TURNED_AWAY;
                self.turns_away = now + if all { TICK } else { NEXT_TURNED_AWAY };
            }
            return;
        }
        match listener.accept() {
            Ok(None) => {}
            Ok(Some(mut agent)) => {
                let mut inner = self.line.lock();
                match inner.receiver.connected(self.line.now()) {
                    Ok(()) => {
                        inner.out.clear();
                        drop(inner);
                        self.agent = Some(agent);
                        self.line.set_state(State::Connected);
                    }
                    Err(refusal) => {
                        drop(inner);
                        // Who does not take it learns it by the connection's end.
                        let _ = agent.write(&refusal);
                        self.opens = Instant::now() + CLOSED;
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::ResourceBusy => self.opens = Instant::now() + CROWDED,
            Err(error) => {
                log::debug!("an agent could not be let in: {error}");
                self.opens = Instant::now() + CLOSED;
            }
        }
    }

    /// Takes what the agent has sent, but not more than a piece.
    fn hear(&mut self) {
        let now = self.line.now();
        let waits = Instant::now() < self.reads;
        let Some(agent) = self.agent.as_mut().filter(|_| !waits) else {
            let Inner { receiver, out, .. } = &mut *self.line.lock();
            return receiver.tick(now, out);
        };
        let read = agent.read(&mut self.buffer);
        if matches!(read, Ok(bytes) if bytes > 0) {
            self.reads = Instant::now() + BETWEEN_READS;
        }
        let mut inner = self.line.lock();
        let Inner { receiver, out, .. } = &mut *inner;
        let goes_on = match read {
            Ok(0) => false,
            Ok(bytes) => match receiver.received(&self.buffer[..bytes], now, out) {
                Ok(()) => true,
                Err(violation) => {
                    log::info!("the guest's agent is cut off: {violation}");
                    // The reason, if it takes it.
                    let _ = agent.write(out);
                    false
                }
            },
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        };
        if goes_on {
            receiver.tick(now, out);
        } else {
            drop(inner);
            self.part();
        }
    }

    /// Sends what is to be sent, as far as the agent takes it.
    fn answer(&mut self) {
        let Some(agent) = &mut self.agent else { return };
        let mut inner = self.line.lock();
        while !inner.out.is_empty() {
            match agent.write(&inner.out) {
                Ok(sent) if sent > 0 => drop(inner.out.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && inner.out.len() <= MOST_UNREAD => {
                    return;
                }
                _ => {
                    drop(inner);
                    return self.part();
                }
            }
        }
    }

    /// The agent has gone, or is not wanted any more.
    fn part(&mut self) {
        self.agent = None;
        let mut inner = self.line.lock();
        inner.receiver.disconnected(self.line.now());
        inner.out.clear();
        self.line.set_state(State::Awaited);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bug_ends_one_agent_and_not_the_listening() {
        let line = AgentLine::new(1 << 30, Arc::default()).unwrap();
        line.begin();
        let mut calls = Vec::new();
        again_after_panics(&line, |opens| {
            calls.push((opens, line.figures().0));
            assert!(calls.len() > 1, "a bug");
        });
        let [(first, awaited), (second, failed)] = calls[..] else {
            panic!("{calls:?}")
        };
        assert_eq!((awaited, failed), (State::Awaited as u64, State::Failed as u64));
        assert!(second >= first + NEXT_TRY);
    }
}
