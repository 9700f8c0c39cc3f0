//! How vCPU threads are paused, resumed and ended. A thread passes the gate between two entries into the guest;
//! whoever closes it kicks the threads out of the guest and waits until all have arrived.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::devices::ExitReason;
use crate::error::Error;

/// A kick that arrives between the check at the gate and the entry into the guest is lost, so it is repeated.
const KICK_AGAIN: Duration = Duration::from_millis(2);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    Run,
    Pause,
    Stop,
}

struct State {
    wish: Wish,
    /// Threads that wait at the gate.
    parked: usize,
    /// Threads that are gone.
    left: usize,
    /// How the VM ended, from the first thread that had something to say.
    outcome: Option<Result<ExitReason, Error>>,
}

/// The gate of one VM.
pub(crate) struct Gate {
    vcpus: usize,
    /// Whether the wish is Run, for the way between two entries.
    open: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn new(vcpus: u8) -> Self {
        let state = State {
            wish: Wish::Run,
            parked: 0,
            left: 0,
            outcome: None,
        };
        Gate {
            vcpus: usize::from(vcpus),
            open: AtomicBool::new(true),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A vCPU thread is between two entries; false if it must leave.
    pub(crate) fn pass(&self) -> bool {
        if self.open.load(Ordering::Acquire) {
            return true;
        }
        let mut state = self.state();
        state.parked += 1;
        self.changed.notify_all();
        while state.wish == Wish::Pause {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.parked -= 1;
        state.wish == Wish::Run
    }

    /// A vCPU thread leaves for good.
    pub(crate) fn leave(&self, outcome: Option<Result<ExitReason, Error>>) {
        let mut state = self.state();
        state.left += 1;
        if state.outcome.is_none() {
            state.outcome = outcome;
        }
        state.wish = Wish::Stop;
        self.open.store(false, Ordering::Release);
        self.changed.notify_all();
    }

    /// Closes the gate and returns when no vCPU is in the guest. `kick` interrupts all threads.
    pub(crate) fn pause(&self, kick: impl Fn()) {
        let mut state = self.state();
        if state.wish == Wish::Run {
            state.wish = Wish::Pause;
            self.open.store(false, Ordering::Release);
        }
        while state.parked + state.left < self.vcpus {
            kick();
            state = self
                .changed
                .wait_timeout(state, KICK_AGAIN)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Opens the gate again.
    pub(crate) fn resume(&self) {
        let mut state = self.state();
        if state.wish == Wish::Pause {
            state.wish = Wish::Run;
            self.open.store(true, Ordering::Release);
            self.changed.notify_all();
        }
    }

    /// Asks all threads to leave.
    pub(crate) fn stop(&self, kick: impl Fn()) {
        self.state().wish = Wish::Stop;
        self.open.store(false, Ordering::Release);
        self.changed.notify_all();
        kick();
    }

    /// Waits until some thread has left.
    pub(crate) fn wait_end(&self) {
        let mut state = self.state();
        while state.left == 0 && state.wish != Wish::Stop {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The same with a limit; false if it was reached.
    pub(crate) fn wait_end_for(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        while state.left == 0 {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return false;
            }
            state = self
                .changed
                .wait_timeout(state, rest)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }

    /// Kicks until all threads have left, and takes the outcome.
    pub(crate) fn drain(&self, kick: impl Fn()) -> Result<ExitReason, Error> {
        let mut state = self.state();
        state.wish = Wish::Stop;
        self.open.store(false, Ordering::Release);
        self.changed.notify_all();
        while state.left < self.vcpus {
            kick();
            state = self
                .changed
                .wait_timeout(state, KICK_AGAIN)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.outcome.take().unwrap_or(Ok(ExitReason::Stopped))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use super::*;

    /// Threads that count turns at the gate as vCPUs would enter the guest.
    fn spinning(gate: &Arc<Gate>, turns: &Arc<AtomicU64>) -> Vec<thread::JoinHandle<()>> {
        let turn = |gate: Arc<Gate>, turns: Arc<AtomicU64>| {
            move || {
                while gate.pass() {
                    turns.fetch_add(1, Ordering::Relaxed);
                    thread::yield_now();
                }
                gate.leave(None);
            }
        };
        (0..gate.vcpus)
            .map(|_| thread::spawn(turn(gate.clone(), turns.clone())))
            .collect()
    }

    #[test]
    fn nothing_runs_while_paused_and_everything_after() {
        let (gate, turns) = (Arc::new(Gate::new(3)), Arc::new(AtomicU64::new(0)));
        let threads = spinning(&gate, &turns);

        gate.pause(|| ());
        let paused_at = turns.load(Ordering::Relaxed);
        thread::sleep(Duration::from_millis(20));
        let still = turns.load(Ordering::Relaxed);
        gate.resume();
        while turns.load(Ordering::Relaxed) == still {
            thread::yield_now();
        }

        assert_eq!(paused_at, still);
        assert!(matches!(gate.drain(|| ()), Ok(ExitReason::Stopped)));
        threads
            .into_iter()
            .for_each(|thread| thread.join().expect("no panic"));
    }

    #[test]
    fn a_paused_vm_can_be_stopped() {
        let (gate, turns) = (Arc::new(Gate::new(2)), Arc::new(AtomicU64::new(0)));
        let threads = spinning(&gate, &turns);

        gate.pause(|| ());
        gate.stop(|| ());

        threads
            .into_iter()
            .for_each(|thread| thread.join().expect("no panic"));
    }

    #[test]
    fn the_first_outcome_counts() {
        let gate = Gate::new(2);

        gate.leave(Some(Ok(ExitReason::Reboot)));
        gate.leave(Some(Ok(ExitReason::PowerOff)));

        assert!(gate.wait_end_for(Duration::ZERO));
        assert!(matches!(gate.drain(|| ()), Ok(ExitReason::Reboot)));
    }
}
