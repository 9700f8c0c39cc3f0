//! Commands to a device in another process, sent by a thread of their own: a device that does not answer holds up that
//! thread and nobody else. (The vfio-user crate's client waits for ever, and panics on some answers.)

use super::failure::{ConnectError, failed};
use super::port::PATIENCE;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use vfio_user::Client;
use vmm_dedup::compare::{Error, Stopwatch};

type Command = Box<dyn FnOnce(&mut Client) + Send>;

/// Who talks to the device. When this is dropped the thread hangs up, once it has the last answer.
pub(super) struct Courier {
    commands: Sender<Command>,
    cpu_ns: Arc<AtomicU64>,
}

impl Courier {
    /// Connects to the device at a socket.
    pub(super) fn start(path: &Path) -> Result<Self, ConnectError> {
        let (commands, inbox) = mpsc::channel::<Command>();
        let (tell, told) = mpsc::channel();
        let cpu_ns = Arc::new(AtomicU64::new(0));
        let (spent, socket) = (Arc::clone(&cpu_ns), path.to_owned());
        let thread = std::thread::Builder::new().name("pf-driver".into());
        thread.spawn(move || {
            let mut client = match Client::new(&socket) {
                Ok(client) => client,
                Err(error) => {
                    _ = tell.send(Err(error));
                    return;
                }
            };
            if tell.send(Ok(())).is_err() {
                return;
            }
            for command in inbox {
                let watch = Stopwatch::start();
                command(&mut client);
                spent.fetch_add(watch.stop_cpu(), Ordering::Relaxed);
            }
        })?;
        let path = || PathBuf::from(path);
        match told.recv_timeout(PATIENCE) {
            Ok(Ok(())) => Ok(Self { commands, cpu_ns }),
            Ok(Err(source)) => Err(ConnectError::Client { path: path(), source }),
            Err(_) => Err(ConnectError::Silent(path())),
        }
    }

    /// Sends a command and waits for the answer.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        command: impl FnOnce(&mut Client) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let (tell, told) = mpsc::channel();
        self.send(move |client| _ = tell.send(command(client)))?;
        told.recv_timeout(PATIENCE)
            .map_err(|_| failed("it does not answer"))
    }

    /// Sends a command that nobody waits for.
    pub(super) fn send(&self, command: impl FnOnce(&mut Client) + Send + 'static) -> Result<(), Error> {
        let sent = self.commands.send(Box::new(command));
        sent.map_err(|_| failed("it is gone"))
    }

    /// CPU time of the thread, ns.
    pub(super) fn cpu_ns(&self) -> u64 {
        self.cpu_ns.load(Ordering::Relaxed)
    }
}
