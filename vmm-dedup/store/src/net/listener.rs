//! The socket file: made with the right permissions from the start, replaced when stale, removed at the end.

use crate::config::Config;
use crate::error::Error;
use crate::net::closing;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vmm_dedup_protocol::socket;

/// A listening socket that removes its file when dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: Arc<OwnedFd>,
    path: PathBuf,
    inode: u64,
}

impl Listener {
    pub(crate) fn bind(config: &Config) -> Result<Self, Error> {
        let path = &config.socket;
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if !parent.is_dir() {
            return Err(Error::NoDirectory(parent.to_owned()));
        }
        remove_stale(path)?;
        let listen = |source| Error::Listen {
            path: path.clone(),
            source,
        };
        let socket = listen_at(path, config).map_err(listen)?;
        let inode = std::fs::symlink_metadata(path).map_err(listen)?.ino();
        Ok(Self {
            socket: Arc::new(socket),
            path: path.clone(),
            inode,
        })
    }

    pub(crate) fn socket(&self) -> Arc<OwnedFd> {
        self.socket.clone()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Not that of a successor who replaced it.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|file| file.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn listen_at(path: &Path, config: &Config) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // bind() gives the file these permissions, less the umask: there is no moment at which others may connect.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    give_rights(path, config)?;
    // Connections inherit it. Before Linux 6.16 peers can send descriptors, which are closed elsewhere.
    if let Err(e) = closing::refuse_descriptors(&socket) {
        log::debug!("the kernel does not keep peers from sending descriptors: {e}");
    }
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Gives the socket's file its group and its permissions, in this order: no other group has them in between. In a folder of
/// somebody else's, something else may lie at the path by now: no link is followed, and only a socket of our own is changed.
fn give_rights(path: &Path, config: &Config) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let is = rustix::fs::fstat(&file)?;
    let ours = is.st_uid == rustix::process::geteuid().as_raw();
    if FileType::from_raw_mode(is.st_mode) != FileType::Socket || !ours {
        let text = "the socket was replaced while it was made: choose a folder that only this user writes to";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    if let Some(group) = config.group {
        let group = Some(rustix::fs::Gid::from_raw(group));
        rustix::fs::chownat(&file, "", None, group, AtFlags::EMPTY_PATH)?;
    }
    // fchmod() refuses such a descriptor, and the file has no other name that cannot be changed meanwhile.
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::set_permissions(name, std::fs::Permissions::from_mode(config.mode))
}

fn remove_stale(path: &Path) -> Result<(), Error> {
    let listen = |source| Error::Listen {
        path: path.to_owned(),
        source,
    };
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(listen(e)),
        Ok(file) if !file.file_type().is_socket() => Err(Error::NotASocket(path.to_owned())),
        Ok(_) => match socket::connect(path) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(listen)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            // Somebody listens: a store, one that hangs with a full backlog (EAGAIN), or another program
            // (EPROTOTYPE).
            _ => Err(Error::InUse(path.to_owned())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(dir: &tempfile::TempDir) -> Config {
        Config {
            socket: dir.path().join("store.sock"),
            ..Config::default()
        }
    }

    #[test]
    fn the_file_has_the_mode_and_goes_with_the_listener() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            mode: 0o660,
            ..config(&dir)
        };
        let listener = Listener::bind(&config).unwrap();
        assert_eq!(std::fs::metadata(&config.socket).unwrap().mode() & 0o777, 0o660);
        drop(listener);
        assert!(!config.socket.exists());
    }

    #[test]
    fn the_file_has_the_group_that_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        // One that the process has for sure, since others may not be given by who is not root.
        let group = rustix::process::getegid().as_raw();
        let other = if rustix::process::geteuid().is_root() {
            group + 7
        } else {
            group
        };
        let config = Config {
            mode: 0o660,
            group: Some(other),
            ..config(&dir)
        };
        let _listener = Listener::bind(&config).unwrap();
        let file = std::fs::metadata(&config.socket).unwrap();
        assert_eq!((file.gid(), file.mode() & 0o777), (other, 0o660));
    }

    #[test]
    fn what_replaced_the_socket_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            mode: 0o666,
            ..config(&dir)
        };
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "").unwrap();
        std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&victim, &config.socket).unwrap();
        let text = give_rights(&config.socket, &config).unwrap_err().to_string();
        assert!(text.contains("replaced"), "{text}");
        assert_eq!(std::fs::metadata(&victim).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_live_store_is_not_replaced_and_a_stale_file_is() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(&dir);
        let listener = Listener::bind(&config).unwrap();
        let text = Listener::bind(&config).unwrap_err().to_string();
        assert!(text.starts_with("a store is already listening on"), "{text}");
        let stale = config.socket.with_extension("moved");
        std::fs::rename(&config.socket, &stale).unwrap();
        drop(listener);
        std::fs::rename(&stale, &config.socket).unwrap();
        Listener::bind(&config).unwrap();
    }

    #[test]
    fn a_missing_directory_and_a_foreign_file_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = Config {
            socket: dir.path().join("no/store.sock"),
            ..Config::default()
        };
        assert!(matches!(Listener::bind(&missing), Err(Error::NoDirectory(_))));
        let config = config(&dir);
        std::fs::write(&config.socket, "mine").unwrap();
        assert!(matches!(Listener::bind(&config), Err(Error::NotASocket(_))));
    }

    #[test]
    fn a_successors_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(&dir);
        let first = Listener::bind(&config).unwrap();
        std::fs::remove_file(&config.socket).unwrap();
        let second = Listener::bind(&config).unwrap();
        drop(first);
        assert!(config.socket.exists());
        drop(second);
    }
}
