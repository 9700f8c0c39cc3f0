//! What the environment of the VMM asks for.

use std::ffi::OsString;
use std::path::PathBuf;
use vmm_dedup::{Error, Refusal, Setup, refusal};

/// From the variables VMM_DEDUP*, read when the library is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// VMM_DEDUP: a line of settings, which go before all others.
    line: Option<OsString>,
    /// VMM_DEDUP_STORE.
    store: Option<PathBuf>,
    name: Option<OsString>,
    config: Option<PathBuf>,
    /// VMM_DEDUP_AGENT.
    agent: Option<OsString>,
    /// VMM_DEDUP_LOG.
    pub(crate) log: Option<PathBuf>,
}

impl Settings {
    /// `None` where neither a line nor a store is given: then the library does nothing at all.
    pub(crate) fn from_environment() -> Option<Self> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        let path = |name| set(name).map(|value| absolute(value.into()));
        let settings = Self {
            line: set("VMM_DEDUP"),
            store: path("VMM_DEDUP_STORE"),
            name: set("VMM_DEDUP_NAME"),
            config: path("VMM_DEDUP_CONFIG"),
            agent: set("VMM_DEDUP_AGENT"),
            log: path("VMM_DEDUP_LOG"),
        };
        (settings.line.is_some() || settings.store.is_some()).then_some(settings)
    }

    /// Who we are where the settings are wrong, and what they complete: the store, and the name that was given, or that of the
    /// program and its process number.
    pub(crate) fn fallback(&self) -> Setup {
        let program = || {
            let path = std::env::current_exe().unwrap_or_default();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            format!("{name}-{}", std::process::id())
        };
        let given = self.name.as_ref().map(|name| name.to_string_lossy().into_owned());
        Setup::new(self.store.clone().unwrap_or_default())
            .with(|config| config.name = given.unwrap_or_else(program))
    }

    /// The engine's settings: those of the line, then those of the other variables, then those of the file that VMM_DEDUP_CONFIG
    /// names.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(crate) fn setup(&self) -> Result<Setup, Refusal> {
        let mut setup = self.fallback();
        if let Some(path) = &self.config {
            let lift = "correct the file that VMM_DEDUP_CONFIG names";
            let config = vmm_dedup_engines::read_config(path, &setup.config.name)
                .map_err(|mistake| refusal::settings(&mistake, lift))?;
            let given = self.name.as_ref().map(|_| setup.config.name.clone());
            setup = setup.with(|ours| *ours = config);
            if let Some(name) = given {
                setup.config.name = name;
            }
        }
        let lift = "set VMM_DEDUP_AGENT to the path of the vsock's socket, or to cid: and the guest's CID";
        let wrong = |mistake: String| refusal::settings(&mistake, lift);
        if let Some(agent) = &self.agent {
            let text = agent.to_str().ok_or("VMM_DEDUP_AGENT is no text");
            let agent = text.map_err(|mistake| wrong(mistake.into()))?.parse();
            setup.agent = Some(agent.map_err(|mistake: Error| wrong(mistake.to_string()))?);
        }
        let lift = "correct the line in VMM_DEDUP, e.g. store=/run/vmm-dedup/store.sock,name=web1";
        let wrong = |mistake: String| refusal::settings(&mistake, lift);
        if let Some(line) = &self.line {
            let line = line.to_str().ok_or("VMM_DEDUP is no text");
            let changed = setup.changed_by(line.map_err(|mistake| wrong(mistake.into()))?);
            setup = changed.map_err(|mistake| wrong(mistake.to_string()))?;
            setup.store = absolute(setup.store);
            let checked = setup.check(&vmm_dedup_engines::engines());
            checked.map_err(|mistake| wrong(mistake.to_string()))?;
        }
        Ok(setup)
    }
}

/// Paths begin where the VMM was started: it may work elsewhere when they are used (QEMU's -daemonize).
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup::Config;

    fn settings(variables: &[(&str, &str)]) -> Option<Settings> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name);
        Settings::from_variables(|name| find(name).map(|(_, value)| value.into()))
    }

    fn setup(variables: &[(&str, &str)]) -> Result<Setup, String> {
        let setup = settings(variables).unwrap().setup();
        setup.map_err(|refusal| refusal.to_string())
    }

    fn with_file(text: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dedup.toml");
        std::fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap();
        setup(&[("VMM_DEDUP_STORE", "/s"), ("VMM_DEDUP_CONFIG", path)]).map(|setup| setup.config)
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
        assert_eq!(relative.setup().unwrap().store, here.join("s"));
        assert_eq!(relative.log, Some(here.join("l")));
        assert_eq!(setup(&[("VMM_DEDUP", "store=s")]).unwrap().store, here.join("s"));
    }

    #[test]
    fn the_name_is_that_of_the_program_unless_given() {
        let program = format!("-{}", std::process::id());
        for variables in [[("VMM_DEDUP_STORE", "/s")], [("VMM_DEDUP", "store=/s")]] {
            let name = setup(&variables).unwrap().config.name;
            assert!(name.ends_with(&program), "{name}");
        }
        let named = setup(&[("VMM_DEDUP_STORE", "/s"), ("VMM_DEDUP_NAME", "web1")]);
        assert_eq!(named.unwrap().config.name, "web1");
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
        let error = setup(&variables).unwrap_err();
        assert!(error.contains("/nonexistent/x.toml"), "{error}");
    }

    #[test]
    fn a_line_says_all_that_variables_say_and_goes_before_them() {
        let line = "store=/s,name=web1,cpu_percent=7,agent=cid:7";
        let alone = setup(&[("VMM_DEDUP", line)]).unwrap();
        assert_eq!(alone, line.parse().unwrap());
        let both = setup(&[
            ("VMM_DEDUP", line),
            ("VMM_DEDUP_STORE", "/other"),
            ("VMM_DEDUP_NAME", "other"),
            ("VMM_DEDUP_AGENT", "cid:9"),
        ]);
        assert_eq!(both.unwrap(), alone);
        let completed = setup(&[("VMM_DEDUP", "cpu_percent=7"), ("VMM_DEDUP_STORE", "/s")]).unwrap();
        assert_eq!(
            (completed.store.to_str(), completed.config.cpu_percent),
            (Some("/s"), 7)
        );
    }

    #[test]
    fn mistakes_in_a_line_are_named_and_the_store_is_told() {
        for (line, says) in [
            ("name=web1", "store is empty"),
            ("store=/s,cpu=7", "unknown field `cpu`"),
            ("store=/s,search=gpu", "this program has"),
        ] {
            let error = setup(&[("VMM_DEDUP", line)]).unwrap_err();
            assert!(error.contains(says) && error.contains("VMM_DEDUP"), "{error}");
        }
        let told = settings(&[("VMM_DEDUP", "cpu=7"), ("VMM_DEDUP_STORE", "/s")]).unwrap();
        assert_eq!(told.fallback().store.to_str(), Some("/s"));
    }
}
