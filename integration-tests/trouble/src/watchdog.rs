//! The end of a test that hangs.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Ends the process if it was not fed for some time.
#[derive(Debug)]
pub struct Watchdog {
    feed: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts one. `last` is done before the process ends: what would outlive it.
    ///
    /// It returns when the thread runs. What a thread maps as it starts (its signal stack) would else fall into a hole that a test makes
    /// behind this, and leave a new one when the thread ends.
    ///
    /// # Panics
    /// If there can be no thread.
    #[must_use]
    pub fn start(patience: Duration, last: impl FnOnce() + Send + 'static) -> Self {
        let (feed, fed) = channel();
        let (started, runs) = channel();
        let watch = move || {
            let _ = started.send(());
            loop {
                match fed.recv_timeout(patience) {
                    Ok(()) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => break,
                }
            }
            eprintln!("HUNG: nothing went on for {} s", patience.as_secs_f64());
            eprintln!("{}", threads());
            last();
            // A thread that waits for a page cannot unwind, and its memory may be what a panic would print.
            std::process::abort();
        };
        let thread = std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(watch)
            .expect("a thread");
        runs.recv().expect("a thread that runs");
        Self {
            feed: Some(feed),
            thread: Some(thread),
        }
    }

    /// Something went on.
    pub fn feed(&self) {
        if let Some(feed) = &self.feed {
            let _ = feed.send(());
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.feed = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Where the threads of this process are in the kernel.
fn threads() -> String {
    let tasks = std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let line = |task: std::fs::DirEntry| {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        format!("{}: {}", read("comm").trim(), read("wchan").trim())
    };
    tasks.map(line).collect::<Vec<_>>().join("; ")
}
