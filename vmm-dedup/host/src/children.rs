//! Child processes, which a termination ends before anything is put back.

use crate::failure::Failure;
use std::io;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A child process; killed when dropped, and by [`stop`].
#[derive(Debug)]
pub struct Process(Arc<Mutex<Child>>);

struct Running {
    stopping: bool,
    children: Vec<Arc<Mutex<Child>>>,
}

static RUNNING: Mutex<Running> = Mutex::new(Running {
    stopping: false,
    children: Vec::new(),
});

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a command keeps its temporary files, and the sockets of its children.
#[must_use]
pub fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("vmm-dedup-{name}-{}", std::process::id()))
}

/// This program, to be run as a child that ends with this process.
///
/// # Errors
/// A [`Failure`] if the kernel does not tell where the program is.
pub fn command() -> Result<Command, Failure> {
    let own = std::env::current_exe().map_err(|e| Failure::new(format!("cannot find this program: {e}")))?;
    let mut command = Command::new(own);
    command.args(["--die-with-parent", &std::process::id().to_string()]);
    Ok(command)
}

/// Ends all children, and lets no more start.
pub fn stop() {
    let mut running = lock(&RUNNING);
    running.stopping = true;
    let children = std::mem::take(&mut running.children);
    drop(running);
    children.iter().for_each(|child| end(child));
}

fn end(child: &Mutex<Child>) {
    let mut child = lock(child);
    let _ = child.kill();
    let _ = child.wait();
}

impl Process {
    /// Starts one, unless this process is about to end.
    ///
    /// # Errors
    /// That of starting, or that this process is about to end.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        // Locked until the child is listed: `stop` misses none.
        let mut running = lock(&RUNNING);
        if running.stopping {
            return Err(io::Error::other("interrupted"));
        }
        let child = Arc::new(Mutex::new(command.spawn()?));
        running.children.push(child.clone());
        Ok(Self(child))
    }

    /// Its process number.
    #[must_use]
    pub fn id(&self) -> u32 {
        lock(&self.0).id()
    }

    /// Its standard input, once.
    #[must_use]
    pub fn input(&self) -> Option<ChildStdin> {
        lock(&self.0).stdin.take()
    }

    /// Its standard output, once.
    #[must_use]
    pub fn output(&self) -> Option<ChildStdout> {
        lock(&self.0).stdout.take()
    }

    /// Waits for its end. [`stop`] waits as well meanwhile: call this for a child that is about to end.
    ///
    /// # Errors
    /// That of waiting.
    pub fn wait(&self) -> io::Result<ExitStatus> {
        lock(&self.0).wait()
    }

    /// Its exit status, if it has ended.
    ///
    /// # Errors
    /// That of waiting.
    pub fn try_wait(&self) -> io::Result<Option<ExitStatus>> {
        lock(&self.0).try_wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        end(&self.0);
        lock(&RUNNING).children.retain(|c| !Arc::ptr_eq(c, &self.0));
    }
}
