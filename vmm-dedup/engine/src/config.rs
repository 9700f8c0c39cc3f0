//! Settings of a service.

use crate::compare::registry::Search;
use crate::error::Error;
use crate::thp::policy::Policy;
use crate::track::access_source::UseSource;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Who copies a shared page when the guest writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "mode", deny_unknown_fields)]
pub enum Breaks {
    /// The kernel: a few microseconds a page, but the page stays private for good, and memory may run out.
    Kernel,
    /// The service, from a reserve: slower, but pages stay mergeable, and a writer waits when there is no memory.
    Managed {
        /// Pages (4 KiB) kept ready for writers.
        reserve_pages: usize,
        /// The reserve is refilled only while the host has more than this available, in bytes.
        floor_bytes: u64,
    },
}

/// Settings of a [`crate::DedupService`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Name of the VM in metrics and logs.
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
    /// Milliseconds from one sampling of the use of huge pages to the next, at least.
    pub monitor_interval_ms: u64,
    /// How long a sample lasts, in microseconds: memory used more often than that counts as used.
    pub monitor_window_us: u64,
    /// What looks for the slot that a page equals.
    pub search: Search,
    /// With [`Search::Pageforge`]: the vfio-user socket of a device; without, a model in this process.
    pub search_socket: Option<PathBuf>,
    /// Who copies on write.
    pub breaks: Breaks,
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
            monitor_interval_ms: 6000,
            monitor_window_us: 10_000,
            search: Search::default(),
            search_socket: None,
            breaks: Breaks::Kernel,
        }
    }
}

impl Config {
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
        check(!self.name.is_empty(), "name", &"empty", "a VM needs a name")?;
        check(
            (10..=3_600_000).contains(&self.pass_period_ms),
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
            (10..=100_000).contains(&self.stop_target_us),
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
            (10..=3_600_000).contains(&self.monitor_interval_ms),
            "monitor_interval_ms",
            &self.monitor_interval_ms,
            "it must be 10 to 3600000",
        )?;
        check(
            (100..=100_000).contains(&self.monitor_window_us),
            "monitor_window_us",
            &self.monitor_window_us,
            "it must be 100 to 100000",
        )?;
        if let Some(socket) = &self.search_socket {
            check(
                self.search == Search::Pageforge,
                "search_socket",
                &socket.display(),
                "only search = \"pageforge\" has a device",
            )?;
        }
        if let Breaks::Managed { reserve_pages, .. } = self.breaks {
            check(
                (1..=1 << 24).contains(&reserve_pages),
                "reserve_pages",
                &reserve_pages,
                "it must be 1 to 16777216",
            )?;
        }
        Ok(())
    }

    pub(crate) fn pass_period(&self) -> Duration {
        Duration::from_millis(self.pass_period_ms)
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
}
