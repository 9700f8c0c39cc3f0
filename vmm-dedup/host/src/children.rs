//! Child processes, which a termination ends before anything is put back.

use crate::failure::Failure;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

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

/// Of this process, while it has one.
static FOLDER: Mutex<Option<TempDir>> = Mutex::new(None);

/// Where a command keeps its temporary files, and the sockets of its children: a folder that nobody else can have made, or look
/// into. It is there until [`remove_folder`].
///
/// # Errors
/// A [`Failure`] if it cannot be made.
pub fn folder() -> Result<PathBuf, Failure> {
    let mut folder = lock(&FOLDER);
    if let Some(folder) = &*folder {
        return Ok(folder.path().to_owned());
    }
    let new = tempfile::Builder::new()
        .prefix("vmm-dedup-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir();
    let new = new.map_err(|e| {
        let within = std::env::temp_dir();
        let within = within.display();
        Failure::new(format!(
            "cannot create a folder in {within}: {e}: name another by TMPDIR"
        ))
    })?;
    Ok(folder.insert(new).path().to_owned())
}

/// Removes the folder, with all that is in it.
pub fn remove_folder() {
    drop(lock(&FOLDER).take());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_this_users_alone_and_of_no_name_to_be_guessed() {
        let own = folder().unwrap();
        assert_eq!(folder().unwrap(), own);
        let mode = std::fs::metadata(&own).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        std::fs::write(own.join("socket"), "").unwrap();
        remove_folder();
        assert!(!own.exists());
        assert_ne!(folder().unwrap(), own);
        remove_folder();
    }
}
