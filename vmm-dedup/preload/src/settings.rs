//! What the environment of the VMM asks for.

use std::ffi::OsString;
use std::path::PathBuf;
use vmm_dedup::{Config, Refusal, Setup, refusal};

/// From the variables VMM_DEDUP_*, read when the library is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// VMM_DEDUP_STORE.
    pub(crate) store: PathBuf,
    name: Option<String>,
    config: Option<PathBuf>,
    /// VMM_DEDUP_LOG.
    pub(crate) log: Option<PathBuf>,
}

impl Settings {
    /// `None` without a store: then the library does nothing at all.
    pub(crate) fn from_environment() -> Option<Self> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        // Paths begin where the VMM was started: it may work elsewhere when they are used (QEMU's -daemonize).
        let path = |name| set(name).map(|value| std::path::absolute(&value).unwrap_or(value.into()));
        Some(Self {
            store: path("VMM_DEDUP_STORE")?,
            name: set("VMM_DEDUP_NAME").map(|name| name.to_string_lossy().into_owned()),
            config: path("VMM_DEDUP_CONFIG"),
            log: path("VMM_DEDUP_LOG"),
        })
    }

    /// The VM's name: the one that was given, or that of the program and its process number.
    pub(crate) fn name(&self) -> String {
        let program = || {
            let path = std::env::current_exe().unwrap_or_default();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            format!("{name}-{}", std::process::id())
        };
        self.name.clone().unwrap_or_else(program)
    }

    /// Who we are where the settings are wrong.
    pub(crate) fn fallback(&self) -> Setup {
        self.with(Config {
            name: self.name(),
            ..Config::default()
        })
    }

    fn with(&self, config: Config) -> Setup {
        Setup {
            store: self.store.clone(),
            config,
        }
    }

    /// The engine's settings: those of the file that VMM_DEDUP_CONFIG names, or the defaults. A name in the environment goes
    /// before one in the file.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub(crate) fn setup(&self) -> Result<Setup, Refusal> {
        let lift = "correct the file that VMM_DEDUP_CONFIG names";
        let config = self.read().map_err(|mistake| refusal::settings(&mistake, lift))?;
        Ok(self.with(config))
    }

    fn read(&self) -> Result<Config, String> {
        let name = self.name();
        let config = match &self.config {
            Some(path) => vmm_dedup_engines::read_config(path, &name)?,
            None => Config::default(),
        };
        let given = self.config.is_some() && self.name.is_none() && !config.name.is_empty();
        Ok(match given {
            true => config,
            false => Config { name, ..config },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Option<Settings> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name);
        Settings::from_variables(|name| find(name).map(|(_, value)| value.into()))
    }

    fn with_file(text: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dedup.toml");
        std::fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap();
        settings(&[("VMM_DEDUP_STORE", "/s"), ("VMM_DEDUP_CONFIG", path)])
            .unwrap()
            .read()
    }

    #[test]
    fn without_a_store_there_is_nothing_to_do() {
        assert_eq!(settings(&[("VMM_DEDUP_NAME", "x")]), None);
        assert_eq!(settings(&[("VMM_DEDUP_STORE", "")]), None);
    }

    #[test]
    fn paths_begin_where_the_vmm_was_started() {
        let relative = settings(&[("VMM_DEDUP_STORE", "s"), ("VMM_DEDUP_LOG", "l")]).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(relative.store, here.join("s"));
        assert_eq!(relative.log, Some(here.join("l")));
    }

    #[test]
    fn the_name_is_that_of_the_program_unless_given() {
        let unnamed = settings(&[("VMM_DEDUP_STORE", "/s")]).unwrap();
        assert!(
            unnamed
                .read()
                .unwrap()
                .name
                .ends_with(&format!("-{}", std::process::id()))
        );
        let named = settings(&[("VMM_DEDUP_STORE", "/s"), ("VMM_DEDUP_NAME", "web1")]).unwrap();
        assert_eq!(named.read().unwrap().name, "web1");
    }

    #[test]
    fn a_file_sets_the_engines_fields_and_mistakes_are_named() {
        let config = with_file("enabled = false\ncpu_percent = 7\n[breaks]\nmode = \"kernel\"").unwrap();
        assert!(!config.enabled && config.cpu_percent == 7);
        assert_eq!(with_file("name = \"from-file\"").unwrap().name, "from-file");
        for (text, says) in [
            ("cpu_percent = 101", "cpu_percent is 101"),
            ("cpu = 7", "unknown field `cpu`"),
            (
                "verify.engine = \"gpu\"",
                "verify.engine is \"gpu\", but this program has cpu",
            ),
            ("cpu_percent = ", "dedup.toml"),
        ] {
            let error = with_file(text).unwrap_err();
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_missing_is_named() {
        let variables = [
            ("VMM_DEDUP_STORE", "/s"),
            ("VMM_DEDUP_CONFIG", "/nonexistent/x.toml"),
        ];
        let error = settings(&variables).unwrap().read().unwrap_err();
        assert!(error.contains("/nonexistent/x.toml"), "{error}");
    }
}
