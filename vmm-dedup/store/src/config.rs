//! What an operator chooses.

use crate::error::Error;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use vmm_dedup_protocol::name::{FILE_NAME_RULE, is_file_name};
use vmm_dedup_protocol::peer::overflow_user;
use vmm_dedup_protocol::{MAX_SLOTS, PAGE_SIZE};

/// Configuration of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Path of the socket. Whoever may connect belongs to the trust domain.
    pub socket: PathBuf,
    /// Permissions of the socket, e.g. 0o600.
    pub mode: u32,
    /// The group of the socket, by number; `None` for that of the store's process.
    pub group: Option<u32>,
    /// The users who may connect, by number, besides root and the store's own; empty: whoever the socket's permissions let in.
    pub join_users: Vec<u32>,
    /// Most bytes of shared pages.
    pub max_bytes: u64,
    /// Where to serve /metrics and /healthz; `None` for nowhere.
    pub metrics: Option<SocketAddr>,
    /// Name of the trust domain, a label in the metrics: [`FILE_NAME_RULE`].
    pub domain: String,
    /// Most pages that one VM may announce.
    pub max_vm_pages: u64,
    /// Most keys that are remembered of pages which have no twin yet, of all VMs: 8 to 12 bytes each. 0 is four for each page of
    /// the host's memory.
    pub max_sightings: u64,
    /// Most connections, counting those whose process lives on after its socket broke.
    pub max_connections: usize,
    /// Most connections of one process, counted likewise.
    pub max_connections_per_process: usize,
    /// How long a VM may take to answer somebody who asks it to change or explain something, in seconds; bringing all
    /// memory back may take 60 times as long.
    pub answer_seconds: u32,
    /// Whether to publish the slots in the order of their content, too, for services that search with an
    /// engine. Costs some comparisons for each publication, and 8 bytes a slot.
    pub ordered: bool,
    /// Whether guests are to learn nothing of sharing by timing: services map nothing of the store into guests, take part with idle
    /// pages only, and with each of them whether another VM has it or not. Slots come from random places.
    pub secure: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: "/run/vmm-dedup/store.sock".into(),
            mode: 0o600,
            group: None,
            join_users: Vec::new(),
            max_bytes: u64::from(MAX_SLOTS) * PAGE_SIZE as u64,
            metrics: Some(SocketAddr::from(([127, 0, 0, 1], 9753))),
            domain: "default".into(),
            max_vm_pages: 1 << 28,
            max_sightings: 0,
            max_connections: 8192,
            max_connections_per_process: 32,
            answer_seconds: 10,
            ordered: false,
            secure: false,
        }
    }
}

impl Config {
    /// Checks that the values make sense together.
    pub fn validate(&self) -> Result<(), Error> {
        let refuse = |field, value: String, hint| Err(Error::Config { field, value, hint });
        // sockaddr_un holds 108 bytes with the terminating zero.
        if self.socket.as_os_str().is_empty() || self.socket.as_os_str().len() > 107 {
            let value = self.socket.display().to_string();
            return refuse("socket", value, "give a path of 1 to 107 bytes");
        }
        if self.mode & !0o777 != 0 || self.mode & 0o600 != 0o600 {
            let hint = "give permission bits that let the owner read and write, e.g. 0600";
            return refuse("mode", format!("{:o}", self.mode), hint);
        }
        if self.join_users.contains(&overflow_user()) {
            let hint = "name another user: the kernel gives this number for every user that it cannot name";
            return refuse("join_users", overflow_user().to_string(), hint);
        }
        if self.max_bytes < PAGE_SIZE as u64 {
            return refuse(
                "max_bytes",
                self.max_bytes.to_string(),
                "give at least one page, 4096",
            );
        }
        if self.max_bytes > u64::from(MAX_SLOTS) * PAGE_SIZE as u64 {
            return refuse(
                "max_bytes",
                self.max_bytes.to_string(),
                "give at most 256 GiB, 274877906944",
            );
        }
        if !is_file_name(&self.domain) {
            return refuse("domain", format!("{:?}", self.domain), FILE_NAME_RULE);
        }
        if self.max_vm_pages == 0 || self.max_vm_pages > 1 << 36 {
            return refuse(
                "max_vm_pages",
                self.max_vm_pages.to_string(),
                "give 1 to 2^36 pages",
            );
        }
        if !(1..=60_000).contains(&self.max_connections) {
            return refuse(
                "max_connections",
                self.max_connections.to_string(),
                "give 1 to 60000",
            );
        }
        if self.max_connections_per_process == 0 {
            return refuse("max_connections_per_process", "0".into(), "give at least 1");
        }
        if !(1..=3600).contains(&self.answer_seconds) {
            let value = self.answer_seconds.to_string();
            return refuse("answer_seconds", value, "give 1 to 3600");
        }
        Ok(())
    }

    /// Most keys that are remembered.
    pub(crate) fn sightings(&self) -> u64 {
        let info = rustix::system::sysinfo();
        #[allow(clippy::useless_conversion)] // narrower on other architectures
        let host = u64::from(info.totalram).saturating_mul(info.mem_unit.into());
        match self.max_sightings {
            0 => host / PAGE_SIZE as u64 * 4,
            most => most,
        }
    }

    /// Most slots that `max_bytes` holds.
    pub(crate) fn max_slots(&self) -> u32 {
        u32::try_from(self.max_bytes / PAGE_SIZE as u64)
            .unwrap_or(MAX_SLOTS)
            .min(MAX_SLOTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        Config::default().validate().unwrap();
    }

    #[test]
    fn each_bad_value_is_named() {
        let bad = [
            (
                "socket",
                Config {
                    socket: "".into(),
                    ..Config::default()
                },
            ),
            (
                "mode",
                Config {
                    mode: 0o1600,
                    ..Config::default()
                },
            ),
            (
                "mode",
                Config {
                    mode: 0o066,
                    ..Config::default()
                },
            ),
            (
                "join_users",
                Config {
                    join_users: vec![1000, overflow_user()],
                    ..Config::default()
                },
            ),
            (
                "max_bytes",
                Config {
                    max_bytes: 4095,
                    ..Config::default()
                },
            ),
            (
                "max_bytes",
                Config {
                    max_bytes: u64::MAX,
                    ..Config::default()
                },
            ),
            (
                "domain",
                Config {
                    domain: "-a".into(),
                    ..Config::default()
                },
            ),
            (
                "max_vm_pages",
                Config {
                    max_vm_pages: 0,
                    ..Config::default()
                },
            ),
            (
                "max_connections",
                Config {
                    max_connections: 65_536,
                    ..Config::default()
                },
            ),
            (
                "answer_seconds",
                Config {
                    answer_seconds: 0,
                    ..Config::default()
                },
            ),
        ];
        for (name, config) in bad {
            let text = config.validate().unwrap_err().to_string();
            assert!(text.starts_with(name), "{text}");
        }
    }
}
