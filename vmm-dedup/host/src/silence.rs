//! Why a store cannot be asked, in words that tell what to do.

use crate::failure::Failure;
use crate::process::Stat;
use crate::units::quoted;
use std::io::ErrorKind;
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
    let start = format!("`vmm-dedup store --socket {}`", quoted(&socket.to_string_lossy()));
    match (Silence::of(&error), &error) {
        (Silence::NoAccess, _) => Failure::new(format!(
            "this user may not use the store at {at}: run this as root, or as the user whose VMs it serves"
        )),
        (Silence::Gone, Error::Unreachable { source, .. })
            if source.kind() == ErrorKind::ConnectionRefused =>
        {
            Failure::new(format!(
                "the store at {at} has ended: guests go on, nothing merges; start it again with {start}"
            ))
        }
        (Silence::Gone, Error::Unreachable { .. }) => Failure::new(format!(
            "no store listens at {at}: start one with {start}, or name another's socket with --store"
        )),
        (Silence::Gone, _) => Failure::new(format!("the store at {at} closed the connection")),
        (Silence::Hangs, _) => Failure::new(format!("the store at {at} {}", how_it_hangs(pid))),
        // What a VM says, or the store on its behalf, is a sentence of its own.
        (Silence::Strange, Error::NotDone(_)) => Failure::from_error(error),
        (Silence::Strange, Error::Refused(why)) => Failure::new(format!("the store at {at} refused: {why}")),
        (Silence::Strange, _) => {
            let text = Failure::from_error(error);
            Failure::new(format!(
                "what listens at {at} is no store of this release: {text}"
            ))
        }
    }
}

fn how_it_hangs(pid: Option<u32>) -> String {
    match pid.map(|pid| (pid, Stat::of(pid.into()))) {
        Some((pid, Some(stat))) if stat.is_stopped() => {
            format!("does not answer: its process {pid} is stopped; `kill -CONT {pid}` lets it go on")
        }
        Some((pid, Some(_))) => {
            format!("does not answer: its process {pid} hangs; guests go on, end it and start another")
        }
        _ => "does not answer: it hangs or is stopped; guests go on".to_owned(),
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
                "start one with `vmm-dedup store --socket /s`",
            ),
            (ErrorKind::ConnectionRefused, "has ended"),
            (ErrorKind::WouldBlock, "does not answer"),
        ] {
            let text = text(unreachable(kind));
            assert!(text.contains(part) && !text.contains("os error"), "{text}");
        }
        let hangs = text(Error::Broken(io::ErrorKind::WouldBlock.into()));
        assert!(hangs.contains("does not answer"), "{hangs}");
        assert_eq!(
            text(Error::NotDone("no VM is called x".into())),
            "no VM is called x"
        );
    }
}
