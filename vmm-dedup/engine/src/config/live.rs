//! What a running service takes over.

use crate::config::{Breaks, Config};
use vmm_dedup_protocol::control::{Settings, Switch};

impl Config {
    /// Puts what this key of a table says into the changes for a running service, where that can take it over. Keys that nest are joined by
    /// a dot. Returns whether it can; else the setting is read when a service starts.
    pub fn live(&self, key: &str, changes: &mut Settings) -> bool {
        // What is out of range is refused where it is validated.
        let number = |value: u64| u32::try_from(value).ok();
        match (key, self.breaks) {
            ("enabled", _) => {
                changes.switch = Some(if self.enabled { Switch::On } else { Switch::Off });
            }
            ("cpu_percent", _) => changes.cpu_percent = Some(self.cpu_percent),
            ("pass_period_ms", _) => changes.pass_period_ms = number(self.pass_period_ms),
            ("stop_target_us", _) => changes.stop_target_us = number(self.stop_target_us),
            ("breaks.reserve_pages", Breaks::Managed { reserve_pages, .. }) => {
                changes.reserve_pages = number(reserve_pages as u64);
            }
            _ => return false,
        }
        true
    }
}
