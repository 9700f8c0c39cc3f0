//! Page stores on this host: where they are, and one for the time of a command.

use crate::children::{self, Process};
use crate::failure::Failure;
use crate::registry::Record;
use crate::units::quoted;
use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Where a store listens if nothing else is said.
pub const DEFAULT_SOCKET: &str = "/run/vmm-dedup/store.sock";
/// What the socket of a host's only store is called in the runtime folder.
pub const SOCKET_NAME: &str = "store.sock";
/// Where it serves its metrics.
pub const DEFAULT_METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9753);
/// Most memory for shared pages, MiB.
pub const DEFAULT_MAX_MIB: u64 = 65_536;
/// Of what it may have, what is for shared pages: tables, and files that are being emptied, come on top.
const FOR_PAGES: (u64, u64) = (5, 6);
/// What may be chosen instead.
pub const MAX_MIB: RangeInclusive<u64> = 1..=262_144;
/// How long a store of a command may take to listen.
const START_LIMIT: Duration = Duration::from_secs(10);
/// How long it may take to find out that somebody serves at an address of this host.
const CONNECT_LIMIT: Duration = Duration::from_millis(100);

/// Reads the address for metrics: `None` for "none".
///
/// # Errors
/// A text that says what is expected.
pub fn parse_metrics(text: &str) -> Result<Option<SocketAddr>, String> {
    if text == "none" {
        return Ok(None);
    }
    let address = text
        .parse()
        .map_err(|_| "expected ADDRESS:PORT, e.g. 127.0.0.1:9753, or \"none\"")?;
    Ok(Some(address))
}

/// Most memory for shared pages, MiB, of a store of which nothing else is said: [`DEFAULT_MAX_MIB`], or what the limit of its control
/// group leaves for them. Beyond that limit it would be killed, where it ought to be full.
#[must_use]
pub fn default_max_mib(limit: Option<u64>) -> u64 {
    let (of_pages, of_all) = FOR_PAGES;
    let fits = |limit: u64| (limit / of_all * of_pages) >> 20;
    let most = limit.map_or(DEFAULT_MAX_MIB, fits);
    most.clamp(*MAX_MIB.start(), DEFAULT_MAX_MIB)
}

/// The command line that starts a store at this socket; with the options of the one that `was` there, so that it is the same
/// store to its VMs and to Prometheus. Where somebody else serves at its address for metrics it is to go without.
#[must_use]
pub fn command_line(socket: &Path, was: Option<&Record>) -> String {
    let metrics = was.map_or(Some(DEFAULT_METRICS), |record| record.metrics);
    line(socket, was, metrics.filter(|address| is_free(*address)))
}

/// What gives a store that runs twice as much room, if it may have that: the commands that end it and start it again, to be pasted
/// one after the other.
#[must_use]
pub fn with_more_room(record: &Record, limit_bytes: u64) -> Option<[String; 2]> {
    let max_mib = (limit_bytes >> 20).max(1) * 2;
    let record = Record {
        max_mib: Some(max_mib),
        ..record.clone()
    };
    let start = line(&record.socket, Some(&record), record.metrics);
    let end = format!("kill {}", record.pid);
    MAX_MIB.contains(&max_mib).then_some([end, start])
}

fn line(socket: &Path, was: Option<&Record>, metrics: Option<SocketAddr>) -> String {
    let mut line = format!("vmm-dedup store --socket {}", quoted(&socket.to_string_lossy()));
    if let Some(record) = was {
        line += &format!(" --domain {}", quoted(&record.domain));
        if let Some(max_mib) = record.max_mib {
            line += &format!(" --max-mib {max_mib}");
        }
        if record.ordered {
            line += " --ordered";
        }
        if record.secure {
            line += " --secure";
        }
        line += &record.access.words();
    }
    match metrics {
        None => line += " --metrics none",
        Some(DEFAULT_METRICS) => {}
        Some(address) => line += &format!(" --metrics {address}"),
    }
    line
}

/// Whether nobody has this address of the host; who has it and is too busy to answer has it. It is not bound to find out: whose it
/// is may be about to do so.
fn is_free(address: SocketAddr) -> bool {
    let connected = TcpStream::connect_timeout(&address, CONNECT_LIMIT);
    connected.is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
}

/// Whether anything listens on a store's socket.
#[must_use]
pub fn listens(socket: &Path) -> bool {
    vmm_dedup_protocol::socket::connect(socket).is_ok()
}

/// A store in a child process, with a socket of its own; ended, and its folder removed, on drop.
#[derive(Debug)]
pub struct OwnStore {
    process: Process,
    folder: PathBuf,
    socket: PathBuf,
}

impl OwnStore {
    /// Starts one and waits until it listens. `name` is that of its folder, see [`children::folder`].
    ///
    /// # Errors
    /// A [`Failure`] if it ends, or does not listen in time.
    pub fn start(name: &str, metrics: Option<SocketAddr>) -> Result<Self, Failure> {
        let metrics = metrics.map_or("none".to_owned(), |address| address.to_string());
        Self::start_with(name, &["--metrics", &metrics])
    }

    /// The same, with these options of `vmm-dedup store`.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with(name: &str, options: &[&str]) -> Result<Self, Failure> {
        let folder = children::folder()?.join(name);
        fs::create_dir_all(&folder)
            .map_err(|e| Failure::new(format!("cannot create {}: {e}", folder.display())))?;
        let socket = folder.join("store.sock");
        let mut command = children::command()?;
        command
            .arg("store")
            .args(options)
            .arg("--socket")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let process =
            Process::start(&mut command).map_err(|e| Failure::new(format!("cannot start a store: {e}")))?;
        let store = Self {
            process,
            folder,
            socket,
        };
        let deadline = Instant::now() + START_LIMIT;
        while !listens(&store.socket) {
            if let Ok(Some(status)) = store.process.try_wait() {
                return Err(Failure::new(format!("the store ended early ({status})")));
            }
            if Instant::now() > deadline {
                return Err(Failure::new("the store did not start within ten seconds"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(store)
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for OwnStore {
    fn drop(&mut self) {
        // The process itself ends when its field is dropped.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Access;
    use std::net::TcpListener;

    fn record(metrics: Option<SocketAddr>) -> Record {
        Record {
            socket: "/s".into(),
            domain: "two words".into(),
            pid: 1,
            metrics,
            max_mib: Some(8),
            ordered: true,
            secure: true,
            access: Access {
                mode: 0o660,
                group: Some(7),
                users: vec![1000, 1001],
            },
            started: 1,
            version: "0".into(),
        }
    }

    #[test]
    fn a_store_is_full_before_it_is_killed() {
        let of = |gib: u64| default_max_mib(Some(gib << 30));
        assert_eq!((of(9), of(90), default_max_mib(None)), (7680, 65_536, 65_536));
        assert_eq!(default_max_mib(Some(5)), 1);
    }

    #[test]
    fn a_store_is_started_again_as_it_was() {
        assert_eq!(
            command_line(Path::new("/a b"), Some(&record(None))),
            "vmm-dedup store --socket '/a b' --domain 'two words' --max-mib 8 --ordered --secure --socket-mode 0660 --socket-group 7 \
             --join-user 1000,1001 --metrics none"
        );
    }

    #[test]
    fn an_address_for_metrics_that_somebody_else_has_is_not_asked_for() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let was = record(Some(other.local_addr().unwrap()));
        let line = || command_line(Path::new("/s"), Some(&was));
        assert!(line().ends_with(" --metrics none"), "{}", line());
        // One that takes no connections: those that wait for it are as many as it lets wait, so others are not answered.
        let full: Vec<_> = (0..8192)
            .map_while(|_| TcpStream::connect_timeout(&was.metrics?, CONNECT_LIMIT).ok())
            .collect();
        assert!(
            full.len() < 8192 && line().ends_with(" --metrics none"),
            "{}",
            line()
        );
        drop((full, other));
        let address = was.metrics.unwrap();
        assert!(line().ends_with(&format!(" --metrics {address}")), "{}", line());
    }

    #[test]
    fn addresses_for_metrics_are_read_and_wrong_ones_refused() {
        assert_eq!(parse_metrics("none"), Ok(None));
        assert_eq!(parse_metrics("127.0.0.1:9753"), Ok(Some(DEFAULT_METRICS)));
        for text in ["", "9753", "localhost:9753", "127.0.0.1:99999"] {
            assert!(
                parse_metrics(text).unwrap_err().contains("ADDRESS:PORT"),
                "{text}"
            );
        }
    }
}
