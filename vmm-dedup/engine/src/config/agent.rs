//! Where a guest's agent is heard.

use crate::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
#[cfg(feature = "agent")]
use vmm_dedup_agent_receiver::listen::hybrid_path;
#[cfg(feature = "agent")]
use vmm_dedup_agent_wire::PORT;

/// The key of [`Setup::agent`](crate::Setup::agent).
pub(super) const AGENT: &str = "agent";
/// What CIDs have in front, where they are text.
const CID: &str = "cid:";
/// The first CID that a guest may have.
const FIRST_CID: u32 = 3;

/// Where a guest's agent comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AgentSocket {
    /// The VMM ends the guest's vsock itself (Cloud Hypervisor, Firecracker): its socket's path. The service listens beside it.
    Hybrid(PathBuf),
    /// The host's kernel does (QEMU with vhost-vsock): the guest's CID, 3 or more.
    Vhost(u32),
}

impl AgentSocket {
    /// The Unix socket that the service makes, if it makes one.
    #[cfg(feature = "agent")]
    #[must_use]
    pub fn service_socket(&self) -> Option<PathBuf> {
        match self {
            Self::Hybrid(socket) => Some(hybrid_path(socket, PORT)),
            Self::Vhost(_) => None,
        }
    }
}

/// What is said where the crate is built without its feature `agent`.
#[cfg(not(feature = "agent"))]
pub(crate) fn unheard(at: &AgentSocket) -> Error {
    Error::Config {
        field: AGENT,
        value: at.to_string(),
        rule: "this program is built without what hears an agent (the feature `agent`)",
    }
}

impl FromStr for AgentSocket {
    type Err = Error;

    /// The path, or `cid:` and the CID.
    fn from_str(text: &str) -> Result<Self, Error> {
        let refused = |rule| Error::Config {
            field: AGENT,
            value: format!("{text:?}"),
            rule,
        };
        match text.strip_prefix(CID).map(str::parse) {
            None if text.is_empty() => Err(refused("it must be the path of a vsock's socket")),
            None => Ok(Self::Hybrid(text.into())),
            Some(Ok(cid)) if (FIRST_CID..u32::MAX).contains(&cid) => Ok(Self::Vhost(cid)),
            Some(_) => Err(refused("a guest's CID must be 3 to 4294967294")),
        }
    }
}

impl fmt::Display for AgentSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hybrid(path) => path.display().fmt(f),
            Self::Vhost(cid) => write!(f, "{CID}{cid}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_or_a_cid_is_the_same_as_text() {
        for text in ["/run/vm.vsock", "cid:3", "cid:4294967294"] {
            assert_eq!(text.parse::<AgentSocket>().unwrap().to_string(), text);
        }
        assert_eq!("cid:5".parse::<AgentSocket>().unwrap(), AgentSocket::Vhost(5));
        for text in ["", "cid:", "cid:2", "cid:4294967295", "cid:x"] {
            let error = text.parse::<AgentSocket>().unwrap_err().to_string();
            assert!(error.contains("agent"), "{error}");
        }
    }
}
