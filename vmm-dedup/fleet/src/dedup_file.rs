//! The engine's settings in a TOML file: what `fleet` writes, and `run --dedup-config` and the preload library
//! (`VMM_DEDUP_CONFIG`) read.

use std::fs;
use std::path::Path;
use vmm_dedup::Config;
use vmm_dedup_host::Failure;

/// Takes settings out of a table, and checks them.
pub(crate) fn from_table(table: toml::Table) -> Result<Config, String> {
    let config: Config = table
        .try_into()
        .map_err(|e: toml::de::Error| e.message().to_owned())?;
    let checked = config.validate();
    let checked = checked.and_then(|()| config.check_engines(&vmm_dedup_engines::engines()));
    checked.map_err(|e| e.to_string())?;
    Ok(config)
}

/// Reads a file.
///
/// # Errors
/// A [`Failure`] of one line that names the file and what is wrong in it.
pub fn read(path: &Path) -> Result<Config, Failure> {
    let fail = |e: String| Failure::new(format!("{}: {e}", path.display()));
    let text = fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    let table = text
        .parse::<toml::Table>()
        .map_err(|e| fail(e.message().to_owned()))?;
    from_table(table).map_err(fail)
}

/// Writes a file.
pub(crate) fn write(config: &Config, path: &Path) -> Result<(), Failure> {
    let fail = |e: String| Failure::new(format!("cannot write {}: {e}", path.display()));
    let text = toml::to_string(config).map_err(|e| fail(e.to_string()))?;
    fs::write(path, text).map_err(|e| fail(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup::Breaks;

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dedup.toml");
        let config = Config {
            name: "web-1".into(),
            enabled: false,
            max_vmas: Some(1000),
            breaks: Breaks::managed(64, 1 << 20),
            ..Config::default()
        };
        write(&config, &path).unwrap();
        assert_eq!(read(&path).unwrap(), config);
    }

    #[test]
    fn a_wrong_file_is_named_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
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
            fs::write(&path, text).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(
                error.contains("dedup.toml: ") && error.contains(expected),
                "{error}"
            );
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
}
