//! A line of what a running service is to take over.

use crate::config::agent::AGENT;
use crate::config::setup::STORE;
use crate::config::text::{fields, insert};
use crate::config::{Breaks, Config, Setup, kinds};
use crate::error::Error;
use serde_json::{Map, Value};
use vmm_dedup_protocol::control::Settings;

/// The table of [`Config::breaks`], and the key in it of who breaks.
const BREAKS: &str = "breaks";
const MODE: &str = "mode";

impl Setup {
    /// Parses a line of what a running service is to take over, and checks its values: the keys are those of any line, and what is not
    /// named stays as it is. Who breaks cannot change, so what `breaks` has besides may stand alone (`reserve_pages=512`, `reserve=512`).
    ///
    /// # Errors
    /// [`Error::Settings`]: it is no line of settings, or one of them cannot change while a service runs. [`Error::Config`] names a value
    /// out of range.
    pub fn changes(line: &str) -> Result<Settings, Error> {
        let usual = kinds::usual();
        let mut table = Map::new();
        for (key, value) in fields(line).map_err(Error::Settings)? {
            let short = match key.as_str() {
                "reserve" => "reserve_pages",
                other => other,
            };
            let stands_alone = usual.get(&key).is_none() && usual[BREAKS].get(short).is_some();
            let put = match stands_alone {
                true => insert(&mut table, &[BREAKS, short], value),
                false => insert(&mut table, &[&key], value),
            };
            put.ok_or_else(|| Error::Settings(format!("{short} is given twice")))?;
        }
        let breaks = table.remove(BREAKS);
        let mut table = Self::written_out(table)?;
        let mut keys = Vec::new();
        keys_of("", &table, &mut keys);
        if let Some(mut breaks) = breaks {
            match breaks.as_object_mut() {
                Some(fields) => {
                    keys_of(BREAKS, fields, &mut keys);
                    // Only managed breaks have anything that can change, and a service knows whether it has those.
                    fields.entry(MODE).or_insert("managed".into());
                }
                None => keys.push(BREAKS.into()),
            }
            table.insert(BREAKS.into(), breaks);
        }
        may_change(&keys, &usual)?;
        let config = Config::try_from(table)?;
        let mut changes = Settings::default();
        for key in &keys {
            config.live(key, &mut changes);
        }
        Ok(changes)
    }
}

/// The keys of a table, those of tables in it behind a dot.
fn keys_of(at: &str, table: &Map<String, Value>, keys: &mut Vec<String>) {
    for (name, value) in table {
        let key = match at {
            "" => name.clone(),
            outer => format!("{outer}.{name}"),
        };
        match value {
            Value::Object(inner) => keys_of(&key, inner, keys),
            _ => keys.push(key),
        }
    }
}

/// Whether a running service takes all of these keys over.
fn may_change(keys: &[String], usual: &Value) -> Result<(), Error> {
    let managed = Config {
        breaks: Breaks::MANAGED,
        ..Config::default()
    };
    let is_live = |key: &&String| managed.live(key, &mut Settings::default());
    let Some(key) = keys.iter().find(|key| !is_live(key)) else {
        return Ok(());
    };
    let place = key.split('.').try_fold(usual, |at, name| at.get(name));
    Err(Error::Settings(
        match place.is_some() || [STORE, AGENT].contains(&key.as_str()) {
            true => format!(
                "{key} cannot be changed while the VM runs: change it in the VM's settings, and start the VM again"
            ),
            false => {
                let mut known = Vec::new();
                keys_of("", usual.as_object().unwrap_or(&Map::new()), &mut known);
                kinds::unknown(key, known.iter().filter(is_live))
            }
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_protocol::control::Switch;

    #[test]
    fn a_line_of_changes_has_the_keys_of_any_line() {
        for line in [
            "cpu_percent=7",
            "budget=7",
            "cpu-percent=7",
            "cpu_budget_cores=0.07",
        ] {
            let expected = Settings {
                cpu_percent: Some(7),
                ..Settings::default()
            };
            assert_eq!(Setup::changes(line).unwrap(), expected, "{line}");
        }
        for line in ["breaks.reserve_pages=9", "reserve_pages=9", "reserve=9"] {
            let expected = Settings {
                reserve_pages: Some(9),
                ..Settings::default()
            };
            assert_eq!(Setup::changes(line).unwrap(), expected, "{line}");
        }
        let all = "enabled=false,cpu_percent=1,breaks.reserve_pages=16777216,pass_period_ms=3600000,stop_target_us=100000";
        let expected = Settings {
            switch: Some(Switch::Off),
            cpu_percent: Some(1),
            reserve_pages: Some(1 << 24),
            pass_period_ms: Some(3_600_000),
            stop_target_us: Some(100_000),
        };
        assert_eq!(Setup::changes(all).unwrap(), expected);
        assert_eq!(Setup::changes("").unwrap(), Settings::default());
    }

    #[test]
    fn what_cannot_change_is_told_from_what_there_is_not() {
        const STAYS: &str = "cannot be changed while the VM runs";
        for (line, says) in [
            ("max_vmas=9", STAYS),
            ("name=x", STAYS),
            ("store=/s", STAYS),
            ("agent=cid:7", STAYS),
            ("pack.on=true", STAYS),
            ("verify=x", STAYS),
            ("sampling.interval_ms=9", STAYS),
            ("breaks=managed", STAYS),
            ("breaks.mode=managed,breaks.reserve_pages=9", STAYS),
            ("heal_stall_us=0", "breaks.heal_stall_us cannot be changed"),
            (
                "cpu=7",
                "unknown field `cpu`, expected one of breaks.reserve_pages, cpu_percent, enabled, pass_period_ms, stop_target_us",
            ),
            ("breaks.x=7", "unknown field `breaks.x`"),
            ("reserve=9,reserve_pages=9", "reserve_pages is given twice"),
            (
                "breaks.reserve_pages=9,reserve_pages=9",
                "reserve_pages is given twice",
            ),
            ("breaks=x,reserve=9", "given twice"),
            ("budget=9,cpu_percent=9", "are one thing"),
            ("cpu_percent=101", "cpu_percent is 101, but it must be 1 to 100"),
            ("reserve=0", "reserve_pages is 0, but it must be 1 to 16777216"),
            (
                "reserve=",
                r#"breaks.reserve_pages is "", but it must be a whole number"#,
            ),
            ("pass_period_ms=9", "it must be 10 to 3600000"),
            ("stop_target_us=5000000000", "it must be 10 to 100000"),
            ("cpu_percent", "is no KEY=VALUE"),
        ] {
            let error = Setup::changes(line).unwrap_err().to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
