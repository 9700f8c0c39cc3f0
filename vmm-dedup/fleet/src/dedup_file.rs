//! The engine's settings in a TOML file: what `fleet` writes, and `run --dedup-config` and the preload library
//! (`VMM_DEDUP_CONFIG`) read.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use vmm_dedup::Config;
use vmm_dedup_engines::read_config;
use vmm_dedup_host::Failure;

/// Reads a file.
///
/// # Errors
/// A [`Failure`] of one line that names the file and what is wrong in it.
pub fn read(path: &Path) -> Result<Config, Failure> {
    read_config(path, &Config::default().name).map_err(Failure::new)
}

/// Writes a file anew, for the owner of its folder alone. The folder may be that of a VM's user, who may have put anything at the path.
pub(crate) fn write(config: &Config, path: &Path) -> Result<(), Failure> {
    let fail = |e: String| Failure::new(format!("cannot write {}: {e}", path.display()));
    let text = toml::to_string(config).map_err(|e| fail(e.to_string()))?;
    let written = || {
        let folder = path.parent().unwrap_or(Path::new("."));
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(text.as_bytes())?;
        let (owner, mine) = (fs::metadata(folder)?, file.as_file().metadata()?);
        // A unit that is not root's may not even say what is so already.
        if (owner.uid(), owner.gid()) != (mine.uid(), mine.gid()) {
            std::os::unix::fs::fchown(&file, Some(owner.uid()), Some(owner.gid()))?;
        }
        file.persist(path)?;
        Ok(())
    };
    written().map_err(|e: io::Error| fail(e.to_string()))
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
        // What lies at the path is replaced, and not what it leads to.
        let victim = folder.path().join("victim");
        fs::write(&victim, "as it was").unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        write(&config, &path).unwrap();
        assert_eq!(read(&path).unwrap(), config);
        assert_eq!(fs::read_to_string(&victim).unwrap(), "as it was");
    }
}
