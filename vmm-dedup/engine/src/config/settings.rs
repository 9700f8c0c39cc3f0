//! Settings of a service.

use crate::compare::registry::CPU;
use crate::compare::{Engines, Work};
#[cfg(test)]
use crate::config::choices::FORMER_NAME;
use crate::config::choices::{Breaks, Policy, UseSource};
use crate::error::Error;
#[cfg(feature = "settings")]
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use vmm_dedup_protocol::control::{MAX_PASS_PERIOD_MS, MAX_RESERVE, MAX_STOP_TARGET_US};
use vmm_dedup_protocol::name::{NAME_RULE, is_name};

/// [`Config::search`] without an engine: the store's hash index, by which nothing is compared before a page is taken.
pub(crate) const INDEX: &str = "index";

/// Most that [`Breaks::Kernel::heal_stall_us`] may be.
const MOST_HEAL_STALL_US: u64 = 1_000_000;

/// Settings of a [`crate::DedupService`]. Fields may be added in any version: a literal ends in `..Config::default()`.
///
/// What is read by serde is checked ([`Self::validate`]), with all parts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "settings", derive(Serialize))]
pub struct Config {
    /// Name of the VM in metrics and logs: [`NAME_RULE`].
    pub name: String,
    /// Whether to merge from the start; else only after it was switched on ([`crate::DedupService::set`], or an
    /// operator's `vmm-dedup set`).
    pub enabled: bool,
    /// Milliseconds from the start of one pass to the start of the next.
    pub pass_period_ms: u64,
    /// CPU time the service may use, in percent of one core (1..=100).
    pub cpu_percent: u32,
    /// Most VMAs that merging may add to the process; `None`: what vm.max_map_count leaves, less a margin.
    pub max_vmas: Option<usize>,
    /// How long the pages of one merge batch should be away at most, in microseconds. Batches adapt to it.
    pub stop_target_us: u64,
    /// Which huge pages are split, and which are built again.
    pub huge_policy: Policy,
    /// Pages of a cold huge page that must have a twin before it is split (fewer when the host is short of memory).
    pub huge_split_pages: usize,
    /// What tells the use of huge pages.
    pub use_source: UseSource,
    /// How the use of huge pages is sampled.
    pub sampling: Sampling,
    /// What looks for the slot that a page equals: `index` is the store's hash index, anything else an engine of this
    /// program ([`Engines`]) that searches the tree of slots in the order of their content. So it needs a store that keeps
    /// one (`vmm-dedup store --ordered`); with any other, and whenever the engine fails, the index is used.
    pub search: String,
    /// The socket of its device, where the engine can have one.
    #[cfg_attr(feature = "settings", serde(serialize_with = "super::text::path"))]
    pub search_socket: Option<PathBuf>,
    /// What compares pages that were taken with the slots that are to replace them.
    pub verify: Verification,
    /// Who copies on write.
    pub breaks: Breaks,
    /// Whether pages that rest are kept packed.
    pub pack: Pack,
}

/// How the use of huge pages is sampled: part of [`Config`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "settings",
    derive(Serialize, Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct Sampling {
    /// Milliseconds from one sampling to the next, at least.
    pub interval_ms: u64,
    /// How long a sample lasts, in microseconds: memory used more often than that counts as used.
    pub window_us: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            interval_ms: 6000,
            window_us: 10_000,
        }
    }
}

/// Pages that rest and have no twin can be kept packed: in fewer bytes, from which they are built again when somebody touches
/// them. Part of [`Config`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "settings",
    derive(Serialize, Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct Pack {
    /// Whether they are. Access that may not wait fails at such a page then (/proc/PID/mem, core dumps), and no child of the VMM
    /// gets guest memory.
    pub on: bool,
    /// How long a page must have been left unwritten, in milliseconds. All memory is looked at once in that time.
    pub idle_ms: u64,
    /// With a store that shares securely: touches in a second of pages that lie in it, each of which keeps somebody waiting. While there are
    /// more, no further pages of the VM take part.
    pub touches_per_second: u64,
}

impl Default for Pack {
    fn default() -> Self {
        Self {
            on: false,
            idle_ms: 15_000,
            touches_per_second: 1000,
        }
    }
}

/// How pages that were taken are compared with the slots that are to replace them: part of [`Config`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "settings",
    derive(Serialize, Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct Verification {
    /// An engine of this program. Whenever it fails the CPU does it.
    pub engine: String,
    /// The socket of its device, where the engine can have one.
    #[cfg_attr(feature = "settings", serde(serialize_with = "super::text::path"))]
    pub socket: Option<PathBuf>,
    /// Whether the engine's word is enough to map a slot in the place of a page that it calls equal. If not, the CPU
    /// compares such pages once more. An engine that is trusted wrongly corrupts guests.
    pub trusted: bool,
    /// How long the engine may take for the pages of one window, in microseconds, before the CPU takes over. They are away
    /// from the guest meanwhile.
    pub timeout_us: u64,
}

impl Default for Verification {
    fn default() -> Self {
        Self {
            engine: CPU.into(),
            socket: None,
            trusted: false,
            timeout_us: 2000,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            name: "vm".into(),
            enabled: true,
            pass_period_ms: 1000,
            cpu_percent: 20,
            max_vmas: None,
            stop_target_us: 120,
            huge_policy: Policy::default(),
            huge_split_pages: 16,
            use_source: UseSource::default(),
            sampling: Sampling::default(),
            search: INDEX.into(),
            search_socket: None,
            verify: Verification::default(),
            breaks: Breaks::KERNEL,
            pack: Pack::default(),
        }
    }
}

impl Config {
    /// Checks every field, and the engines' names.
    ///
    /// # Errors
    /// Those of [`Self::validate`] and [`Self::check_engines`].
    pub fn check(&self, engines: &Engines) -> Result<(), Error> {
        self.validate()?;
        self.check_engines(engines)
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Config`] names the field, its value and the rule.
    pub fn validate(&self) -> Result<(), Error> {
        let check = |ok: bool, field, value: &dyn ToString, rule| {
            if ok {
                Ok(())
            } else {
                Err(Error::Config {
                    field,
                    value: value.to_string(),
                    rule,
                })
            }
        };
        // A store shows other names otherwise than they are, and two of them the same way.
        check(
            is_name(&self.name),
            "name",
            &format!("{:?}", self.name),
            NAME_RULE,
        )?;
        self.check_paths()?;
        check(
            (10..=MAX_PASS_PERIOD_MS.into()).contains(&self.pass_period_ms),
            "pass_period_ms",
            &self.pass_period_ms,
            "it must be 10 to 3600000",
        )?;
        check(
            (1..=100).contains(&self.cpu_percent),
            "cpu_percent",
            &self.cpu_percent,
            "it must be 1 to 100",
        )?;
        check(
            (10..=MAX_STOP_TARGET_US.into()).contains(&self.stop_target_us),
            "stop_target_us",
            &self.stop_target_us,
            "it must be 10 to 100000",
        )?;
        check(
            (1..=512).contains(&self.huge_split_pages),
            "huge_split_pages",
            &self.huge_split_pages,
            "it must be 1 to 512",
        )?;
        check(
            (10..=3_600_000).contains(&self.sampling.interval_ms),
            "sampling.interval_ms",
            &self.sampling.interval_ms,
            "it must be 10 to 3600000",
        )?;
        check(
            (100..=100_000).contains(&self.sampling.window_us),
            "sampling.window_us",
            &self.sampling.window_us,
            "it must be 100 to 100000",
        )?;
        check(
            (10..=10_000_000).contains(&self.verify.timeout_us),
            "verify.timeout_us",
            &self.verify.timeout_us,
            "it must be 10 to 10000000",
        )?;
        check(
            !self.verify.trusted || self.verify.engine != CPU,
            "verify.trusted",
            &self.verify.trusted,
            "the CPU needs no trust: name the engine that is meant",
        )?;
        check(
            (10..=3_600_000).contains(&self.pack.idle_ms),
            "pack.idle_ms",
            &self.pack.idle_ms,
            "it must be 10 to 3600000",
        )?;
        check(
            (1..=1_000_000).contains(&self.pack.touches_per_second),
            "pack.touches_per_second",
            &self.pack.touches_per_second,
            "it must be 1 to 1000000",
        )?;
        let heal_stall_us = self.breaks.heal_stall_us();
        check(
            heal_stall_us <= MOST_HEAL_STALL_US,
            "heal_stall_us",
            &heal_stall_us,
            "it must be 0 to 1000000",
        )?;
        match self.breaks {
            Breaks::Kernel { .. } => Ok(()),
            Breaks::Managed { reserve_pages, .. } => check(
                (1..=MAX_RESERVE as usize).contains(&reserve_pages),
                "reserve_pages",
                &reserve_pages,
                "it must be 1 to 16777216",
            ),
        }
    }

    pub(super) fn check_paths(&self) -> Result<(), Error> {
        let search = self.search_socket.as_deref().map(|path| ("search_socket", path));
        let verify = self.verify.socket.as_deref().map(|path| ("verify.socket", path));
        let mut paths = search.into_iter().chain(verify);
        paths.try_for_each(|(field, path)| check_path(field, path))
    }

    /// Checks the engines' names: a program has those that it registered.
    ///
    /// # Errors
    /// [`Error::NoEngine`] lists those there are; [`Error::Config`] for the socket of an engine that has none.
    pub fn check_engines(&self, engines: &Engines) -> Result<(), Error> {
        let searches = [INDEX].into_iter().chain(engines.names(Work::TreeSearch));
        let searches: Vec<&str> = searches.collect();
        let verifiers: Vec<&str> = engines.names(Work::Verify).collect();
        for (field, name, known) in [
            ("search", &self.search, searches),
            ("verify.engine", &self.verify.engine, verifiers),
        ] {
            if !known.contains(&name.as_str()) {
                return Err(Error::NoEngine {
                    field,
                    name: name.clone(),
                    known: known.join(", "),
                });
            }
        }
        for (field, socket, name) in [
            ("search_socket", &self.search_socket, &self.search),
            ("verify.socket", &self.verify.socket, &self.verify.engine),
        ] {
            if let Some(socket) = socket
                && !engines.takes_socket(name)
            {
                return Err(Error::Config {
                    field,
                    value: socket.display().to_string(),
                    rule: "that engine has no device behind a socket",
                });
            }
        }
        Ok(())
    }
}

/// Settings can all be text, so paths are.
pub(super) fn check_path(field: &'static str, path: &Path) -> Result<(), Error> {
    match path.to_str() {
        Some(_) => Ok(()),
        None => Err(Error::Config {
            field,
            value: format!("{path:?}"),
            rule: "a path must be UTF-8",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_what_a_store_shows() {
        let named = |name: &str| {
            let config = Config {
                name: name.into(),
                ..Config::default()
            };
            config.validate().map_err(|error| error.to_string())
        };
        for good in ["a", "web-1_2.3:4/5", &"x".repeat(64)] {
            assert_eq!(named(good), Ok(()));
        }
        for bad in ["", "web 1", "wéb", "a\"", "-a", &"x".repeat(65)] {
            let error = named(bad).unwrap_err();
            assert!(
                error.contains("name is ") && error.ends_with(NAME_RULE),
                "{error}"
            );
        }
    }

    #[test]
    fn defaults_are_valid() {
        Config::default().validate().unwrap();
    }

    #[test]
    fn errors_name_field_and_value() {
        let config = Config {
            cpu_percent: 0,
            ..Config::default()
        };
        assert_eq!(
            config.validate().unwrap_err().to_string(),
            "cpu_percent is 0, but it must be 1 to 100"
        );
    }

    #[test]
    fn a_fork_may_take_a_second_at_most() {
        let with = |heal_stall_us| Config {
            breaks: Breaks::Kernel {
                heal_stall_us,
                heal_without_fork: false,
            },
            ..Config::default()
        };
        with(0).validate().unwrap();
        with(1_000_000).validate().unwrap();
        assert_eq!(
            with(1_000_001).validate().unwrap_err().to_string(),
            "heal_stall_us is 1000001, but it must be 0 to 1000000"
        );
    }

    #[test]
    fn names_are_read_back() {
        for &policy in Policy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
        }
        assert!("huge".parse::<Policy>().unwrap_err().contains("smartmd"));
        for &source in UseSource::ALL {
            assert_eq!(source.name().parse(), Ok(source));
        }
        assert_eq!(FORMER_NAME.parse(), Ok(UseSource::FaultSampling));
        let error = "bits".parse::<UseSource>().unwrap_err();
        assert!(
            error.contains("fault-sampling, damon, page-idle, writes"),
            "{error}"
        );
    }

    #[test]
    fn engines_are_known_by_their_names() {
        let engines = Engines::new();
        Config::default().check_engines(&engines).unwrap();
        let with = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config.check_engines(&engines).map_err(|error| error.to_string())
        };
        assert_eq!(with(|config| config.search = "tree".into()), Ok(()));
        assert_eq!(
            with(|config| config.search = "hash".into()).unwrap_err(),
            "search is \"hash\", but this program has index, tree"
        );
        assert_eq!(
            with(|config| config.verify.engine = "tree".into()).unwrap_err(),
            "verify.engine is \"tree\", but this program has cpu"
        );
        let error = with(|config| config.verify.socket = Some("/s".into())).unwrap_err();
        assert!(error.contains("verify.socket is /s"), "{error}");
    }

    #[test]
    fn the_cpu_needs_no_trust() {
        let trusted = |engine: &str| Config {
            verify: Verification {
                engine: engine.into(),
                trusted: true,
                ..Verification::default()
            },
            ..Config::default()
        };
        let error = trusted("cpu").validate().unwrap_err().to_string();
        assert!(error.contains("verify.trusted is true"), "{error}");
        trusted("dsa").validate().unwrap();
    }
}
