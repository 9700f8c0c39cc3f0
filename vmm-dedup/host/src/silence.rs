//! Why a store cannot be asked, in words that tell what to do.

use crate::failure::Failure;
use crate::process::Stat;
use crate::{registry, store};
use rustix::io::Errno;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use vmm_dedup_protocol::observer::Error;

/// What is wrong with a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    /// Nobody listens.
    Gone,
    /// This user may not connect.
    NoAccess,
    /// It listens, and does not answer.
    Hangs,
    /// It says no, or what no store of this release says.
    Strange,
}

impl Silence {
    /// One word for tables.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::NoAccess => "no access",
            Self::Hangs => "hangs",
            Self::Strange => "strange",
        }
    }

    /// What an error means.
    #[must_use]
    pub fn of(error: &Error) -> Self {
        match error {
            Error::Unreachable { source, .. } => match source.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::NotADirectory => Self::Gone,
                ErrorKind::PermissionDenied => Self::NoAccess,
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::Hangs,
                _ => Self::Strange,
            },
            Error::Broken(source) => match source.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::Hangs,
                _ => Self::Gone,
            },
            Error::Gone => Self::Gone,
            _ => Self::Strange,
        }
    }
}

/// An error of a store at this socket, for the user. `pid`: the store's process, if it is known.
#[must_use]
pub fn failure(socket: &Path, pid: Option<u32>, error: Error) -> Failure {
    let at = socket.display();
    let start = || {
        let line = store::command_line(socket, registry::record(socket).as_ref());
        format!("`{line}`")
    };
    let told = |wrong: String, between, advice: &str| Failure::advised(&wrong, between, advice);
    if std::fs::metadata(socket).is_ok_and(|there| !there.file_type().is_socket()) {
        let advice = "name that of a store with --store";
        return told(format!("{at} is no socket"), ": ", advice);
    }
    match (Silence::of(&error), &error) {
        (Silence::NoAccess, _) => told(
            format!("this user may not use the store at {at}"),
            ": ",
            "run this as root, or as the user whose VMs it serves",
        ),
        (Silence::Gone, Error::Unreachable { source, .. })
            if source.kind() == ErrorKind::ConnectionRefused =>
        {
            told(
                format!("the store at {at} has ended: guests go on, nothing merges"),
                "; ",
                &format!("start it again with {}", start()),
            )
        }
        (Silence::Gone, Error::Unreachable { .. }) if !in_folder(socket) => told(
            format!("no store listens at {at}, and there is no such folder"),
            ": ",
            "name a store's socket with --store",
        ),
        (Silence::Gone, Error::Unreachable { .. }) => told(
            format!("no store listens at {at}"),
            ": ",
            &format!(
                "start one with {}, or name another's socket with --store",
                start()
            ),
        ),
        (Silence::Gone, _) => Failure::new(format!("the store at {at} closed the connection")),
        (Silence::Hangs, _) => {
            let (how, advice) = how_it_hangs(pid);
            told(format!("the store at {at} does not answer: {how}"), "; ", &advice)
        }
        // What a VM says, or the store on its behalf, is a sentence of its own.
        (Silence::Strange, Error::NotDone(_)) => Failure::from_error(error),
        (Silence::Strange, Error::Refused(why)) => Failure::new(format!("the store at {at} refused: {why}")),
        (Silence::Strange, Error::Unreachable { source, .. }) => match source.raw_os_error() {
            Some(number) if Errno::from_raw_os_error(number) == Errno::PROTOTYPE => told(
                format!("what listens at {at} is no store"),
                ": ",
                "name a store's socket with --store",
            ),
            _ => Failure::new(format!("{at} cannot be connected to: {source}")),
        },
        (Silence::Strange, _) => {
            let text = Failure::from_error(error);
            Failure::new(format!(
                "what listens at {at} is no store of this release: {text}"
            ))
        }
    }
}

/// Whether a store could listen there.
fn in_folder(socket: &Path) -> bool {
    let absolute = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    absolute.parent().is_some_and(Path::is_dir)
}

/// How, and what to do.
fn how_it_hangs(pid: Option<u32>) -> (String, String) {
    match pid.map(|pid| (pid, Stat::of(pid.into()))) {
        Some((pid, Some(stat))) if stat.is_stopped() => (
            format!("its process {pid} is stopped"),
            format!("`kill -CONT {pid}` lets it go on"),
        ),
        Some((pid, Some(_))) => (
            format!("its process {pid} hangs; guests go on"),
            format!("end it (`kill -KILL {pid}`), and start another"),
        ),
        _ => (
            "it hangs or is stopped; guests go on".to_owned(),
            "look for its process: `pgrep -af 'vmm-dedup store'`".to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn unreachable(kind: ErrorKind) -> Error {
        Error::Unreachable {
            path: "/s".into(),
            source: kind.into(),
        }
    }

    #[test]
    fn each_cause_has_its_advice() {
        let text = |error| failure(Path::new("/s"), None, error).to_string();
        let denied = text(unreachable(ErrorKind::PermissionDenied));
        assert!(
            denied.contains("may not use") && !denied.contains("vmm-dedup store"),
            "{denied}"
        );
        for (kind, part) in [
            (
                ErrorKind::NotFound,
                // Without metrics, if another store of this host has their port.
                "start one with `vmm-dedup store --socket /s",
            ),
            (ErrorKind::ConnectionRefused, "has ended"),
            (ErrorKind::WouldBlock, "does not answer"),
        ] {
            let text = text(unreachable(kind));
            assert!(text.contains(part) && !text.contains("os error"), "{text}");
        }
        let stream = Error::Unreachable {
            path: "/s".into(),
            source: Errno::PROTOTYPE.into(),
        };
        assert_eq!(
            text(stream),
            "what listens at /s is no store: name a store's socket with --store"
        );
        let nowhere = Path::new("/no-such-folder/s");
        let nowhere = failure(nowhere, None, unreachable(ErrorKind::NotFound)).to_string();
        assert!(
            nowhere.contains("there is no such folder") && !nowhere.contains('`'),
            "{nowhere}"
        );
        let folder = failure(Path::new("/"), None, unreachable(ErrorKind::ConnectionRefused)).to_string();
        assert_eq!(folder, "/ is no socket: name that of a store with --store");
        let hangs = text(Error::Broken(io::ErrorKind::WouldBlock.into()));
        assert!(hangs.contains("does not answer"), "{hangs}");
        assert_eq!(
            text(Error::NotDone("no VM is called x".into())),
            "no VM is called x"
        );
    }
}
