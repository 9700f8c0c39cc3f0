//! A service's settings, as the files of these programs have them: TOML, with the fields of [`Config`].

use crate::engines;
use std::fs;
use std::path::Path;
use vmm_dedup::Config;

/// A reserve for managed breaks that does not say its size, pages, and the memory below which it is not refilled, bytes.
const RESERVE: (i64, i64) = (1024, 256 << 20);

/// Takes settings out of a table, and checks them with the engines that there are.
///
/// # Errors
/// What is wrong, in one line.
pub fn config_of(mut table: toml::Table) -> Result<Config, String> {
    complete(&mut table)?;
    let config: Config = table
        .try_into()
        .map_err(|e: toml::de::Error| e.message().to_owned())?;
    config.check(&engines()).map_err(|e| e.to_string())?;
    Ok(config)
}

/// Takes `breaks` in short, `budget` for `cpu_percent`, and managed breaks without figures.
fn complete(table: &mut toml::Table) -> Result<(), String> {
    if let Some(percent) = table.remove("budget")
        && table.insert("cpu_percent".into(), percent).is_some()
    {
        return Err("budget and cpu_percent are one thing: give one of them".into());
    }
    let Some(breaks) = table.get_mut("breaks") else {
        return Ok(());
    };
    if let Some(mode) = breaks.as_str() {
        *breaks = toml::Value::Table(toml::Table::from_iter([("mode".into(), mode.into())]));
    }
    let mode = breaks
        .get("mode")
        .and_then(toml::Value::as_str)
        .unwrap_or_default();
    match (mode.to_owned().as_str(), breaks.as_table_mut()) {
        ("kernel", Some(_)) => Ok(()),
        ("managed", Some(breaks)) => {
            breaks.entry("reserve_pages").or_insert(RESERVE.0.into());
            breaks.entry("floor_bytes").or_insert(RESERVE.1.into());
            Ok(())
        }
        _ => Err(
            "breaks must be \"kernel\", \"managed\", or a table with that as its mode, e.g. { mode = \"managed\", \
             reserve_pages = 1024 }"
                .into(),
        ),
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
            ("enabled = 1", "invalid type: integer `1`, expected a boolean"),
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
