//! The client of those who watch and operate: asks a store for accounts, and its VMs to change or explain something.

use crate::control::{Explain, Explained, Set, Settings};
use crate::message::{
    Hello, Kind, Malformed, Message, Role, Stats, StatsRequest, StoreStats, aligned_buffer, encode,
};
use crate::name::Name;
use crate::refusal::{Reason, Refused};
use crate::socket;
use crate::stats::ServiceStats;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zerocopy::IntoBytes;

/// A store that has not answered for itself for this long hangs.
const PATIENCE: Duration = Duration::from_secs(5);

/// A store answers for a VM that does not well before this (unless it is configured to wait longer).
const VM_PATIENCE: Duration = Duration::from_secs(30);

/// Bringing all memory of a VM back may take this long.
const UNMERGE_PATIENCE: Duration = Duration::from_secs(1800);

/// No store numbers its VMs higher.
const MOST_VMS: u32 = 1 << 16;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens, or this user may not connect.
    #[error("cannot reach a store at {path}: start one there, or name another's socket")]
    Unreachable {
        /// Where it should be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection broke, or the store does not answer.
    #[error("the store does not answer")]
    Broken(#[source] io::Error),
    /// The store closed the connection.
    #[error("the store closed the connection")]
    Gone,
    /// The store refused the connection.
    #[error("the store refused: {0}")]
    Refused(String),
    /// The VM or the store on its behalf says why not.
    #[error("{0}")]
    NotDone(String),
    /// The answer cannot be read, e.g. since the store is of another release.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// An answer to something else.
    #[error("the store sent an unexpected message")]
    Unexpected,
}

/// A VM, as the store lists it.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Its name in the store.
    pub name: String,
    /// Its process.
    pub pid: u64,
    /// Why it is refused, if it is.
    pub reason: Option<Reason>,
    /// Net bytes that it saves.
    pub saved_net_bytes: i64,
    /// Its account; of a refused one only pages and state.
    pub stats: ServiceStats,
}

impl Vm {
    /// Whether somebody means this VM: by its name, or by NAME.PID.
    #[must_use]
    pub fn is_called(&self, wanted: &str) -> bool {
        self.name == wanted || wanted.strip_suffix(&format!(".{}", self.pid)) == Some(&self.name)
    }
}

/// What became of a VM's pages.
#[derive(Clone, Debug)]
pub enum Account {
    /// By classes.
    Explained(Explained),
    /// It has no service, and why.
    Refused(Refused),
}

/// A connection that asks, one question at a time.
#[derive(Debug)]
pub struct Observer {
    socket: OwnedFd,
    buffer: Vec<u64>,
    serial: u64,
}

impl Observer {
    /// Connects to the store at this path.
    ///
    /// # Errors
    /// [`Error`].
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let unreachable = |source| Error::Unreachable {
            path: path.to_owned(),
            source,
        };
        let socket = socket::connect(path).map_err(unreachable)?;
        let mut observer = Self {
            socket,
            buffer: aligned_buffer(),
            serial: 0,
        };
        let hello = Hello::new(Role::Observer, "observer", 0);
        observer.ask(Kind::Hello, hello.as_bytes(), PATIENCE, |message| {
            matches!(message, Message::Welcome(_)).then_some(())
        })?;
        Ok(observer)
    }

    /// The store's account and those of all its VMs.
    ///
    /// # Errors
    /// [`Error`].
    pub fn stats(&mut self) -> Result<(StoreStats, Vec<Vm>), Error> {
        let mut vms = Vec::new();
        let mut from = 0;
        loop {
            let request = StatsRequest { from, reserved: 0 };
            let stats: Stats = self.ask(Kind::StatsRequest, request.as_bytes(), PATIENCE, |m| match m {
                Message::Stats(stats) => Some(**stats),
                _ => None,
            })?;
            // Numbers only rise, and are few, or a store that misleads could keep us here for ever.
            if stats.next <= from || from > MOST_VMS {
                return Ok((stats.store, vms));
            }
            from = stats.next;
            vms.push(Vm {
                name: stats.name.text(),
                pid: stats.pid,
                reason: Reason::of_number(stats.reason),
                saved_net_bytes: stats.saved_net_bytes.cast_signed(),
                stats: stats.vm,
            });
        }
    }

    /// Changes settings of a VM.
    ///
    /// # Errors
    /// [`Error::NotDone`] if there is no such VM, it is refused, or does not do it.
    pub fn set(&mut self, vm: &str, settings: Settings) -> Result<(), Error> {
        self.serial += 1;
        let set = Set {
            serial: self.serial,
            name: Name::new(vm),
            settings,
        };
        let unmerge = settings.switch == Some(crate::control::Switch::OffUnmerge);
        let patience = if unmerge { UNMERGE_PATIENCE } else { VM_PATIENCE };
        self.ask(Kind::Set, &set.body(), patience, |message| {
            matches!(message, Message::Done(serial) if *serial == set.serial).then_some(())
        })
    }

    /// Asks what became of the pages of a VM, all or those at some guest physical addresses.
    ///
    /// # Errors
    /// [`Error::NotDone`] if there is no such VM or memory, or it does not answer.
    pub fn explain(&mut self, vm: &str, addresses: Option<Range<u64>>) -> Result<Account, Error> {
        self.serial += 1;
        let addresses = addresses.unwrap_or(0..0);
        let explain = Explain {
            serial: self.serial,
            gpa_start: addresses.start,
            gpa_len: addresses.end.saturating_sub(addresses.start),
            name: Name::new(vm),
        };
        self.ask(Kind::Explain, explain.as_bytes(), VM_PATIENCE, |m| match m {
            Message::Explained(e) if e.serial == explain.serial => Some(Account::Explained(e.clone())),
            Message::Refused(r) if r.serial == explain.serial => Some(Account::Refused(r.clone())),
            _ => None,
        })
    }

    fn ask<T>(
        &mut self,
        kind: Kind,
        body: &[u8],
        patience: Duration,
        pick: impl FnOnce(&Message<'_>) -> Option<T>,
    ) -> Result<T, Error> {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(patience))
            .map_err(|e| Error::Broken(e.into()))?;
        socket::send_or_hear_why_not(&self.socket, &encode(kind, &[body])).map_err(Error::Broken)?;
        let received = socket::receive(&self.socket, &mut self.buffer).map_err(Error::Broken)?;
        match received.ok_or(Error::Gone)?.parse(&self.buffer)? {
            Message::Error(text) => Err(Error::Refused(text)),
            Message::NotDone(not_done) if not_done.serial == self.serial => {
                Err(Error::NotDone(not_done.text))
            }
            message => pick(&message).ok_or(Error::Unexpected),
        }
    }
}
