//! A service's settings, as the files of these programs have them: TOML, with the fields of [`Config`].

use crate::engines;
use serde_json::{Map, Value};
use std::fs;
use std::path::Path;
use vmm_dedup::{Config, Error};

/// Takes settings out of a table, and checks them with the engines that there are.
///
/// # Errors
/// What is wrong, in one line.
pub fn config_of(table: toml::Table) -> Result<Config, String> {
    let fields: Map<String, Value> = table
        .try_into()
        .map_err(|e: toml::de::Error| e.message().to_owned())?;
    let config = Config::try_from(fields).map_err(mistake)?;
    config.check_engines(&engines()).map_err(|e| e.to_string())?;
    Ok(config)
}

/// What is wrong with settings, for a text that names where they stand.
#[must_use]
pub fn mistake(error: Error) -> String {
    match error {
        Error::Settings(text) => text,
        other => other.to_string(),
    }
}

/// Reads a file; `unnamed`: the VM's name where the file has none.
///
/// # Errors
/// One line that names the file and what is wrong in it.
pub fn read_config(path: &Path, unnamed: &str) -> Result<Config, String> {
    let fail = |e: String| format!("{}: {e}", path.display());
    let text = fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    let mut table = text
        .parse::<toml::Table>()
        .map_err(|e| fail(e.message().to_owned()))?;
    table.entry("name").or_insert_with(|| unnamed.into());
    config_of(table).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup::Breaks;

    #[test]
    fn a_file_without_a_name_leaves_it_to_the_reader() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("dedup.toml");
        for (text, name) in [("", "unnamed"), ("name = \"web1\"", "web1")] {
            fs::write(&path, text).expect("a file");
            assert_eq!(read_config(&path, "unnamed").expect("settings").name, name);
        }
    }

    #[test]
    fn settings_may_be_short() {
        let config = |text: &str| {
            let table = text.parse().expect("TOML");
            config_of(table).map_err(|e| e.to_string())
        };
        let breaks = |text: &str| config(text).expect("settings").breaks;
        assert_eq!(breaks("breaks = \"managed\""), Breaks::managed(1024, 256 << 20));
        assert_eq!(
            breaks("breaks = { mode = \"managed\", reserve_pages = 7 }"),
            Breaks::managed(7, 256 << 20)
        );
        assert_eq!(breaks("breaks = \"kernel\""), Breaks::KERNEL);
        assert_eq!(config("budget = 7").expect("settings").cpu_percent, 7);
        for wrong in [
            "breaks = \"manual\"",
            "breaks = 3",
            "breaks = {}",
            "breaks.mode = 1",
        ] {
            let error = config(wrong).expect_err(wrong);
            assert!(
                error.starts_with("breaks must be \"kernel\", \"managed\""),
                "{error}"
            );
        }
        assert!(
            config("budget = 7\ncpu_percent = 7")
                .expect_err("twice")
                .contains("one thing")
        );
    }

    #[test]
    fn a_wrong_file_is_named_with_the_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("dedup.toml");
        for (text, expected) in [
            ("cpu_percnt = 3", "unknown field `cpu_percnt`"),
            ("cpu_percent = 0", "cpu_percent is 0, but it must be 1 to 100"),
            (
                "search = \"hash\"",
                "this program has index, dsa, dsa-model, pagecmp, pagecmp-hybrid, pageforge, tree",
            ),
            (
                "[verify]\nengine = \"tree\"",
                "this program has cpu, dsa, dsa-model, pagecmp, pagecmp-hybrid, pageforge",
            ),
            ("enabled = 1", "enabled is 1, but it must be true or false"),
            ("enabled", "key"),
        ] {
            fs::write(&path, text).expect("a file");
            let error = read_config(&path, "vm").expect_err("it is wrong");
            assert!(
                error.contains("dedup.toml: ") && error.contains(expected),
                "{error}"
            );
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
}
