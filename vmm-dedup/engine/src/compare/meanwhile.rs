//! Work that fits into an engine's waiting.

use super::account::{Account, Stopwatch};

/// Work of a caller's that has to be done during a call of an engine, at any time. An engine that waits for a device has it
/// done while the device works; the others leave it to the caller. It is done once.
pub struct Meanwhile<'w> {
    /// `None` once it was done.
    work: Option<&'w mut dyn FnMut()>,
    /// What it took.
    took: Account,
}

impl<'w> Meanwhile<'w> {
    /// This is to be done. It must not be long: who waits for the engine waits for this, too.
    pub fn new(work: &'w mut dyn FnMut()) -> Self {
        Self {
            work: Some(work),
            took: Account::default(),
        }
    }

    /// Nothing is to be done.
    #[must_use]
    pub fn nothing() -> Self {
        Self {
            work: None,
            took: Account::default(),
        }
    }

    /// Whether nothing is left to be done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.work.is_none()
    }

    /// Does it, unless it was done before.
    pub fn run(&mut self) {
        if let Some(work) = self.work.take() {
            let watch = Stopwatch::start();
            work();
            watch.stop(&mut self.took);
        }
    }

    /// Takes the time that it took out of an account of the call in which it was done: it is not the engine's.
    pub fn leave_out(&self, account: &mut Account) {
        account.wall_ns = account.wall_ns.saturating_sub(self.took.wall_ns);
        account.cpu_ns = account.cpu_ns.saturating_sub(self.took.cpu_ns);
    }
}

impl std::fmt::Debug for Meanwhile<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meanwhile")
            .field("done", &self.is_done())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn it_is_done_once_and_its_time_is_left_out() {
        const LONG: Duration = Duration::from_millis(5);
        let mut times = 0;
        let mut work = || {
            times += 1;
            std::thread::sleep(LONG);
        };
        let mut account = Account::default();
        let watch = Stopwatch::start();
        let mut meanwhile = Meanwhile::new(&mut work);
        meanwhile.run();
        meanwhile.run();
        watch.stop(&mut account);
        let with_it = account.wall_ns;
        meanwhile.leave_out(&mut account);
        assert!(meanwhile.is_done());
        assert_eq!(times, 1);
        assert!(u128::from(with_it - account.wall_ns) >= LONG.as_nanos());
    }
}
