//! What the operator of a guest may set.

use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Where the file is looked for if none is named.
pub const FILE: &str = "/etc/vmm-dedup-agent.toml";

/// Why settings are refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("{path} cannot be read: {error}")]
    Read {
        /// Which.
        path: PathBuf,
        /// What the kernel says.
        error: std::io::Error,
    },
    /// It is no TOML, or has a key that there is not.
    #[error("{path}: {error}")]
    Parse {
        /// Which.
        path: PathBuf,
        /// Where and what.
        error: toml::de::Error,
    },
    /// A value that makes no sense.
    #[error("{key} cannot be {value}: {why}")]
    Value {
        /// Which setting.
        key: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        why: &'static str,
    },
}

/// How to reach the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// The host, at the usual port, then at that of vhost-vsock, in turn.
    Vsock,
    /// A CID and a port.
    VsockAt(u32, u32),
    /// A Unix socket, for tests.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refused = || Error::Value {
            key: "connect",
            value: text.to_owned(),
            why: "it is \"vsock\", \"vsock:CID:PORT\" or \"unix:PATH\"",
        };
        if text == "vsock" {
            return Ok(Self::Vsock);
        }
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        let numbers = text.strip_prefix("vsock:").and_then(|rest| rest.split_once(':'));
        let (cid, port) = numbers.ok_or_else(refused)?;
        match (cid.parse(), port.parse()) {
            (Ok(cid), Ok(port)) => Ok(Self::VsockAt(cid, port)),
            _ => Err(refused()),
        }
    }
}

/// What tells when frames were used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// Idle page tracking if the kernel has it, else DAMON if nobody uses it, else nothing.
    #[default]
    Auto,
    /// Idle page tracking.
    Idle,
    /// DAMON.
    Damon,
    /// Nothing.
    Off,
}

/// The settings.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How to reach the service: see [`Address`].
    pub connect: String,
    /// The share of a core that the agent may use.
    pub share: f64,
    /// Seconds from the beginning of one round over memory to the next, at least.
    pub interval_seconds: u64,
    /// What tells when frames were used.
    pub temperature: Use,
    /// Seconds after which use is looked at again.
    pub use_interval_seconds: u64,
    /// The share of time, in per cent, in which somebody waits for memory, above which the agent rests.
    pub rest_above: f64,
    /// Where programs mark memory; empty: nowhere.
    pub hints_socket: PathBuf,
    /// Memory that programs may mark, together, in MiB.
    pub hints_mib: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            connect: "vsock".into(),
            share: 0.002,
            interval_seconds: 2,
            temperature: Use::Auto,
            use_interval_seconds: 60,
            rest_above: 10.0,
            hints_socket: vmm_dedup_hints::SOCKET.into(),
            hints_mib: 64,
        }
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::Read {
            path: path.to_owned(),
            error,
        })?;
        let config: Self = toml::from_str(&text).map_err(|error| Error::Parse {
            path: path.to_owned(),
            error,
        })?;
        config.validate()?;
        Ok(config)
    }

    /// Whether all values make sense.
    ///
    /// # Errors
    /// [`Error::Value`].
    pub fn validate(&self) -> Result<(), Error> {
        self.address()?;
        let refused = |key, value: &dyn ToString, why| {
            Err(Error::Value {
                key,
                value: value.to_string(),
                why,
            })
        };
        if !(0.0001..=1.0).contains(&self.share) {
            return refused("share", &self.share, "it is from 0.0001 to 1");
        }
        if !(0.0..=100.0).contains(&self.rest_above) {
            return refused("rest_above", &self.rest_above, "it is a percentage");
        }
        for (key, value, most) in [
            ("interval_seconds", self.interval_seconds, 3600),
            ("use_interval_seconds", self.use_interval_seconds, 86_400),
        ] {
            if !(1..=most).contains(&value) {
                return refused(key, &value, "it is from 1 to 3600, that of use to 86400");
            }
        }
        // What is marked is held as lists.
        if self.hints_mib > 1024 {
            return refused("hints_mib", &self.hints_mib, "it is 1024 at most");
        }
        Ok(())
    }

    /// How to reach the service.
    ///
    /// # Errors
    /// [`Error::Value`].
    pub fn address(&self) -> Result<Address, Error> {
        self.connect.parse()
    }

    /// From one round to the next.
    #[must_use]
    pub fn interval(&self) -> Duration {
        Duration::from_secs(self.interval_seconds)
    }

    /// From one look at use to the next.
    #[must_use]
    pub fn use_interval(&self) -> Duration {
        Duration::from_secs(self.use_interval_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, Error> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Config::read(file.path())
    }

    #[test]
    fn the_file_of_the_package_says_the_defaults() {
        let packaged = read(include_str!("../package/vmm-dedup-agent.toml")).unwrap();
        assert_eq!(packaged, Config::default());
        assert_eq!(read("").unwrap(), Config::default());
    }

    #[test]
    fn addresses_are_of_three_kinds() {
        let address = |text: &str| text.parse::<Address>().ok();
        assert_eq!(address("vsock"), Some(Address::Vsock));
        assert_eq!(address("vsock:2:77"), Some(Address::VsockAt(2, 77)));
        assert_eq!(address("unix:/x"), Some(Address::Unix("/x".into())));
        for wrong in ["", "tcp:1", "vsock:2", "vsock:a:1", "vsock:2:-1", "unix:"] {
            assert_eq!(address(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (text, named) in [
            ("shaer = 1", "shaer"),
            ("share = 0.0", "share"),
            ("share = 2.0", "share"),
            ("interval_seconds = 0", "interval_seconds"),
            ("rest_above = 101.0", "rest_above"),
            ("hints_mib = 4096", "hints_mib"),
            ("connect = \"tcp\"", "connect"),
            ("temperature = \"cold\"", "cold"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
