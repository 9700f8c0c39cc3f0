//! What the environment of the VMM asks for.

use std::ffi::OsString;
use std::path::PathBuf;
use vmm_dedup::{Error, Refusal, Setup, refusal};
use vmm_dedup_protocol::name::{MAX_NAME, Name};

/// From the variables VMM_DEDUP*, read when the library is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Where the VMM was started, and where paths begin: it may work elsewhere when they are used (QEMU's -daemonize).
    folder: PathBuf,
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
    /// VMM_DEDUP_FILTERED=allowed: whoever started the VMM knows that the filters of system calls with which it began let dedup do what
    /// it does, or fail with an error. How many these are.
    filters: Option<u32>,
}

/// How many filters of system calls the calling thread has, where the kernel tells.
fn filters() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    let number = status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp_filters:"))?;
    number.trim().parse().ok()
}

impl Settings {
    /// `None` where neither a line nor a store is given: then the library does nothing at all.
    pub(crate) fn from_environment() -> Option<Self> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let folder = std::env::current_dir().unwrap_or_default();
        let set = |name| variable(name).filter(|value| !value.is_empty());
        let path = |name| set(name).map(|value| folder.join(value));
        let settings = Self {
            line: set("VMM_DEDUP"),
            store: path("VMM_DEDUP_STORE"),
            name: set("VMM_DEDUP_NAME"),
            config: path("VMM_DEDUP_CONFIG"),
            agent: set("VMM_DEDUP_AGENT"),
            log: path("VMM_DEDUP_LOG"),
            filters: set("VMM_DEDUP_FILTERED")
                .filter(|value| value == "allowed")
                .and_then(|_| filters()),
            folder: folder.clone(),
        };
        (settings.line.is_some() || settings.store.is_some()).then_some(settings)
    }

    /// Whether the calling thread has no filters but those with which the VMM began, and these are allowed to be there. The VMM may
    /// have restricted itself since: what it thought of was not dedup.
    pub(crate) fn allows_filters(&self) -> bool {
        self.filters.is_some() && filters() == self.filters
    }

    /// Who we are where the settings are wrong: the store, and the name, as far as the line gives them, else the other variables.
    pub(crate) fn fallback(&self) -> Setup {
        let base = self.base();
        let line = self.line.as_ref().map(|line| line.to_string_lossy());
        let told = line.map(|line| Setup::addressed_by(&line).at(&self.folder));
        let Some(told) = told else {
            return base;
        };
        let store = Some(told.store).filter(|store| !store.as_os_str().is_empty());
        Setup::new(store.unwrap_or(base.store)).with(|config| {
            let named = told.config.name != config.name;
            config.name = if named { told.config.name } else { base.config.name };
        })
    }

    /// What all settings complete: the store, and the name that was given, or that of the program and its process number.
    fn base(&self) -> Setup {
        let given = self.name.as_ref().map(|name| name.to_string_lossy().into_owned());
        Setup::new(self.store.clone().unwrap_or_default())
            .with(|config| config.name = given.unwrap_or_else(program_name))
    }

    /// The engine's settings: those of the line, then those of the other variables, then those of the file that VMM_DEDUP_CONFIG
    /// names.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(crate) fn setup(&self) -> Result<Setup, Refusal> {
        let mut setup = self.base();
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
        }
        let lift = match self.line {
            Some(_) => lift,
            None => "correct VMM_DEDUP_STORE, VMM_DEDUP_NAME or VMM_DEDUP_AGENT",
        };
        let setup = setup.at(&self.folder);
        let checked = setup.check(&vmm_dedup_engines::engines());
        checked.map_err(|mistake| refusal::settings(&mistake.to_string(), lift))?;
        Ok(setup)
    }
}

/// The name of the program and its process number.
fn program_name() -> String {
    let program = std::env::current_exe().unwrap_or_default();
    numbered(
        &program.file_name().unwrap_or_default().to_string_lossy(),
        std::process::id(),
    )
}

/// Any text and a process number, as a store can show them.
fn numbered(program: &str, pid: u32) -> String {
    let number = format!("-{pid}");
    let mut name = Name::new(program).text();
    name.truncate(MAX_NAME - number.len());
    Name::new(&(name + &number)).text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;
    use vmm_dedup::{AgentSocket, Config};
    use vmm_dedup_protocol::name::is_name;

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
    fn filters_are_allowed_by_name_and_as_many_as_there_were() {
        assert!(!settings(&[("VMM_DEDUP_STORE", "/s")]).unwrap().allows_filters());
        let other = [("VMM_DEDUP_STORE", "/s"), ("VMM_DEDUP_FILTERED", "yes")];
        assert!(!settings(&other).unwrap().allows_filters());
        let allowed = [("VMM_DEDUP_STORE", "/s"), ("VMM_DEDUP_FILTERED", "allowed")];
        let mut allowed = settings(&allowed).unwrap();
        assert!(allowed.allows_filters());
        // The VMM has one more since.
        allowed.filters = allowed.filters.map(|filters| filters + 1);
        assert!(!allowed.allows_filters());
    }

    #[test]
    fn paths_begin_where_the_vmm_was_started() {
        let relative = settings(&[("VMM_DEDUP_STORE", "s"), ("VMM_DEDUP_LOG", "l")]).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(relative.setup().unwrap().store, here.join("s"));
        assert_eq!(relative.log, Some(here.join("l")));
        let line = "store=s,agent=a,search=pageforge,search_socket=x,verify.engine=pageforge,verify.socket=v";
        let setup = setup(&[("VMM_DEDUP", line)]).unwrap();
        assert_eq!(setup.store, here.join("s"));
        assert_eq!(setup.agent, Some(AgentSocket::Hybrid(here.join("a"))));
        assert_eq!(setup.config.search_socket, Some(here.join("x")));
        assert_eq!(setup.config.verify.socket, Some(here.join("v")));
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
    fn what_a_program_is_called_becomes_a_name() {
        for (program, name) in [
            ("qemu (deleted)", "qemu__deleted_-7"),
            ("-sh", "_sh-7"),
            ("", "_7"),
            (&"x".repeat(80), &("x".repeat(62) + "-7")),
        ] {
            assert_eq!(numbered(program, 7), name);
            assert!(is_name(name));
        }
    }

    #[test]
    fn variables_are_checked_without_a_line_as_well() {
        let long = "x".repeat(65);
        let error = setup(&[("VMM_DEDUP_STORE", "/s"), ("VMM_DEDUP_NAME", &long)]).unwrap_err();
        assert!(
            error.contains("name is ") && error.contains("VMM_DEDUP_NAME"),
            "{error}"
        );
        let store = OsString::from_vec(b"/\xff".to_vec());
        let variable = |name: &str| (name == "VMM_DEDUP_STORE").then(|| store.clone());
        let settings = Settings::from_variables(variable).unwrap();
        let error = settings.setup().unwrap_err().to_string();
        assert!(error.contains("store is ") && error.contains("UTF-8"), "{error}");
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
        // The line itself says to whom.
        for line in ["store=/s,name=web1,cpu=7", "store=/s,name=web1,cpu"] {
            for others in [("VMM_DEDUP_NAME", ""), ("VMM_DEDUP_STORE", "/other")] {
                let told = settings(&[("VMM_DEDUP", line), others]).unwrap();
                assert!(told.setup().is_err());
                let expected = Setup::new("/s").with(|config| config.name = "web1".into());
                assert_eq!(told.fallback(), expected, "{line}");
            }
        }
    }

    #[test]
    fn a_short_form_in_the_line_goes_before_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dedup.toml");
        std::fs::write(&path, "cpu_percent = 7").unwrap();
        let both = [
            ("VMM_DEDUP", "store=/s,budget=5"),
            ("VMM_DEDUP_CONFIG", path.to_str().unwrap()),
        ];
        assert_eq!(setup(&both).unwrap().config.cpu_percent, 5);
    }
}
