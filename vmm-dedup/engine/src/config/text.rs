//! A [`Setup`] as text.
//!
//! As one line it is `store=/run/vmm-dedup/store.sock,name=web1,cpu_percent=10`. Keys are those of the fields of [`Config`],
//! joined by a dot where they nest (`breaks.mode=managed,breaks.reserve_pages=512`), `store` and `agent`. What is not named keeps its
//! default. A value with a comma or a quotation mark stands in quotation marks, in which `\` takes the next character as it is.
//! In JSON and TOML it is one table with the same keys.
//!
//! Everywhere `budget` and `cpu-percent` are other names of `cpu_percent`, and so is `cpu_budget_cores`, the metric's, in cores. `breaks`
//! may be `kernel` or `managed`, with a reserve of a usual size ([`Setup::written_out`]).

use crate::config::agent::AGENT;
use crate::config::setup::STORE;
use crate::config::{Breaks, Config, Setup, kinds};
use crate::error::Error;
use serde::{Deserialize, Deserializer, Serializer};
use serde_json::{Map, Value};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

impl TryFrom<Map<String, Value>> for Config {
    type Error = Error;

    /// Reads a table, and checks its values ([`Config::validate`]).
    fn try_from(mut fields: Map<String, Value>) -> Result<Self, Error> {
        complete(&mut fields).map_err(Error::Settings)?;
        let config = read(fields).map_err(Error::Settings)?;
        config.validate()?;
        Ok(config)
    }
}

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        Self::try_from(fields).map_err(serde::de::Error::custom)
    }
}

/// Reads a table that is written out; what it does not name keeps its default.
fn read(mut fields: Map<String, Value>) -> Result<Config, String> {
    let mut config = Config::default();
    let usual = kinds::usual();
    macro_rules! take {
        ($($field:ident),*) => {{
            // A field that is not listed is an error of the compiler's.
            let Config { $($field),* } = &mut config;
            $(if let Some(value) = fields.remove(stringify!($field)) {
                kinds::check(stringify!($field), &value, &usual[stringify!($field)])?;
                let too_large = value.is_u64().then(|| format!("{} is {value}: that is too large", stringify!($field)));
                let read = serde_json::from_value(value);
                *$field = read.map_err(|error| too_large.unwrap_or(format!("{}: {error}", stringify!($field))))?;
            })*
            [$(stringify!($field)),*]
        }};
    }
    let known = take!(
        name,
        enabled,
        pass_period_ms,
        cpu_percent,
        max_vmas,
        stop_target_us,
        huge_policy,
        huge_split_pages,
        use_source,
        sampling,
        search,
        search_socket,
        verify,
        breaks,
        pack
    );
    match fields.keys().next() {
        Some(other) => Err(kinds::unknown(other, known)),
        None => Ok(config),
    }
}

/// A path that is no text is refused when settings are checked; who writes unchecked ones shall not lose all others with it.
pub(super) fn path<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => serializer.serialize_some(&path.to_string_lossy()),
        None => serializer.serialize_none(),
    }
}

/// The name that the metric has of `cpu_percent`: in cores.
const CORES: &str = "cpu_budget_cores";

/// Percent of a core, of cores.
fn percent_of(cores: &Value) -> Result<u64, String> {
    let read = cores.as_f64().or_else(|| cores.as_str()?.parse().ok());
    let percent = (1..=100u32).find(|percent| read == Some(f64::from(*percent) / 100.0));
    let wrong = || format!("{CORES} is {cores}, but it must be 0.01 to 1, in steps of 0.01");
    percent.map(u64::from).ok_or_else(wrong)
}

/// Writes out what is given in short.
fn complete(fields: &mut Map<String, Value>) -> Result<(), String> {
    for other in ["budget", "cpu-percent", CORES] {
        let Some(value) = fields.remove(other) else {
            continue;
        };
        let percent = match other {
            CORES => percent_of(&value)?.into(),
            _ => value,
        };
        if fields.insert("cpu_percent".into(), percent).is_some() {
            return Err(format!("{other} and cpu_percent are one thing: give one of them"));
        }
    }
    let Some(breaks) = fields.get_mut("breaks") else {
        return Ok(());
    };
    if let Some(mode) = breaks.as_str() {
        *breaks = serde_json::json!({ "mode": mode });
    }
    let mode = breaks.get("mode").and_then(Value::as_str).unwrap_or_default();
    match (mode.to_owned().as_str(), breaks.as_object_mut()) {
        ("kernel", Some(_)) => Ok(()),
        ("managed", Some(breaks)) => {
            if let Breaks::Managed {
                reserve_pages,
                floor_bytes,
                ..
            } = Breaks::MANAGED
            {
                breaks.entry("reserve_pages").or_insert(reserve_pages.into());
                breaks.entry("floor_bytes").or_insert(floor_bytes.into());
            }
            Ok(())
        }
        _ => Err(
            "breaks must be \"kernel\", \"managed\", or a table with that as its mode, e.g. { mode = \"managed\", \
             reserve_pages = 1024 }"
                .into(),
        ),
    }
}

impl TryFrom<Map<String, Value>> for Setup {
    type Error = Error;

    /// Reads a table, and checks its values ([`Setup::validate`]). So `store` must be named.
    fn try_from(mut fields: Map<String, Value>) -> Result<Self, Error> {
        let said = |error: serde_json::Error| Error::Settings(error.to_string());
        let store = fields
            .remove(STORE)
            .map_or(Ok(PathBuf::new()), serde_json::from_value);
        let agent = fields.remove(AGENT).map(|agent| match agent {
            Value::String(text) => text.parse(),
            other => Err(Error::Settings(format!("{AGENT} must be text, and is {other}"))),
        });
        let setup = Self {
            store: store.map_err(said)?,
            agent: agent.transpose()?,
            config: fields.try_into()?,
        };
        setup.validate()?;
        Ok(setup)
    }
}

impl From<Setup> for Map<String, Value> {
    /// What differs from the defaults: an older engine, to which a VM migrates, need not know of settings that nobody has made.
    fn from(setup: Setup) -> Self {
        let values = |config: &Config| match serde_json::to_value(config) {
            Ok(Value::Object(fields)) => fields,
            // Every field can be said in JSON.
            _ => Self::new(),
        };
        let (mut fields, defaults) = (values(&setup.config), values(&Config::default()));
        fields.retain(|key, value| defaults.get(key) != Some(value));
        if !setup.store.as_os_str().is_empty() {
            fields.insert(STORE.into(), setup.store.to_string_lossy().into());
        }
        if let Some(agent) = setup.agent {
            fields.insert(AGENT.into(), agent.to_string().into());
        }
        fields
    }
}

impl Setup {
    /// Parses a line as the table that it stands for, [written out](Self::written_out), whose values are not checked yet.
    ///
    /// # Errors
    /// [`Error::Settings`]: it is no line of settings.
    pub fn table(line: &str) -> Result<Map<String, Value>, Error> {
        fields(line).map_err(Error::Settings).and_then(Self::written_out)
    }

    /// Writes out what a table has in short (`budget`, `breaks = "managed"`), so that two tables can be laid over each other key by
    /// key. Values are not checked yet.
    ///
    /// # Errors
    /// [`Error::Settings`]: it cannot be written out.
    pub fn written_out(mut table: Map<String, Value>) -> Result<Map<String, Value>, Error> {
        complete(&mut table).map_err(Error::Settings)?;
        Ok(table)
    }

    /// The store and the name that a line gives as far as it can be read, whatever else is wrong with it: whom to tell of that.
    #[must_use]
    pub fn addressed_by(line: &str) -> Self {
        let mut setup = Self::default();
        for (key, Text::Plain(text) | Text::Quoted(text)) in pairs(line).0 {
            match key.as_str() {
                STORE => setup.store = text.into(),
                "name" => setup.config.name = text,
                _ => {}
            }
        }
        setup
    }

    /// Parses a line that sets some of this one's fields, and checks all: what it does not name stays. (A table in it, such as
    /// `breaks`, is set as a whole.)
    ///
    /// # Errors
    /// As of a line by itself.
    pub fn changed_by(&self, line: &str) -> Result<Self, Error> {
        // As text it would be another one.
        self.check_paths()?;
        let mut all = Self::table(line)?;
        for (key, value) in Map::from(self.clone()) {
            all.entry(key).or_insert(value);
        }
        all.try_into()
    }
}

impl FromStr for Setup {
    type Err = Error;

    /// Parses a line, and checks its values ([`Setup::validate`]). So `store` must be named.
    fn from_str(line: &str) -> Result<Self, Error> {
        Self::table(line)?.try_into()
    }
}

impl fmt::Display for Setup {
    /// What differs from the defaults: parsed, it is the same again if it is valid.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = Vec::new();
        for (key, value) in &Map::from(self.clone()) {
            write(key, value, &mut all);
        }
        f.write_str(&all.join(","))
    }
}

fn write(key: &str, value: &Value, all: &mut Vec<String>) {
    match value {
        Value::Null => {}
        Value::Object(fields) => fields
            .iter()
            .for_each(|(name, value)| write(&format!("{key}.{name}"), value, all)),
        Value::String(text) => all.push(format!("{key}={}", quoted(text))),
        other => all.push(format!("{key}={other}")),
    }
}

/// In quotation marks, if it would be read as something else without.
fn quoted(text: &str) -> String {
    let plain = guess(text.to_owned()).is_string() && !text.contains([',', '"', '\\']) && text.trim() == text;
    if plain && !text.is_empty() {
        return text.to_owned();
    }
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', r#"\""#))
}

pub(super) fn fields(line: &str) -> Result<Map<String, Value>, String> {
    let mut usual = kinds::usual();
    usual[STORE] = Value::String(String::new());
    let mut all = Map::new();
    let (pairs, read) = pairs(line);
    read?;
    for (key, value) in pairs {
        let path: Vec<&str> = key.split('.').collect();
        let usual = path.iter().try_fold(&usual, |at, name| at.get(name));
        let value = match (value, usual) {
            (Text::Quoted(text), _) | (Text::Plain(text), Some(Value::String(_))) => Value::String(text),
            (Text::Plain(text), _) => guess(text),
        };
        insert(&mut all, &path, value).ok_or_else(|| match key.split_once('.') {
            Some((table, _)) if !all[table].is_object() => {
                format!("{table} is given twice, as {key} as well")
            }
            _ => format!("{key} is given twice"),
        })?;
    }
    Ok(all)
}

/// A number, a boolean, or text.
fn guess(text: String) -> Value {
    let number = text.parse::<u64>().map(Value::from);
    let either = number.or_else(|_| text.parse::<bool>().map(Value::from));
    either.unwrap_or(Value::String(text))
}

/// `None`: there is something at that place.
pub(super) fn insert(at: &mut Map<String, Value>, path: &[&str], value: Value) -> Option<()> {
    let (first, rest) = path.split_first()?;
    if rest.is_empty() {
        return at.insert((*first).to_owned(), value).is_none().then_some(());
    }
    let next = at
        .entry(*first)
        .or_insert_with(|| Value::Object(Map::new()))
        .as_object_mut()?;
    insert(next, rest, value)
}

#[derive(Debug, PartialEq, Eq)]
enum Text {
    Plain(String),
    Quoted(String),
}

/// What a line has, and whether it could be read to its end.
fn pairs(line: &str) -> (Vec<(String, Text)>, Result<(), String>) {
    let mut all = Vec::new();
    let read = read_pairs(line, &mut all);
    (all, read)
}

fn read_pairs(line: &str, all: &mut Vec<(String, Text)>) -> Result<(), String> {
    let mut rest = line.trim();
    while !rest.is_empty() {
        let (key, behind) = rest
            .split_once('=')
            .filter(|(key, _)| !key.trim().is_empty())
            .ok_or_else(|| format!("{rest:?} is no KEY=VALUE"))?;
        let (value, behind) = match behind.strip_prefix('"') {
            Some(quoted) => {
                let (text, behind) = unquoted(quoted).ok_or("a quotation mark is missing")?;
                (Text::Quoted(text), behind)
            }
            None => {
                let end = behind.find(',').unwrap_or(behind.len());
                (Text::Plain(behind[..end].trim().to_owned()), &behind[end..])
            }
        };
        let key = key.trim();
        all.push((key.to_owned(), value));
        rest = match behind.strip_prefix(',') {
            Some(next) if !next.trim().is_empty() => next,
            None if behind.trim().is_empty() => "",
            _ => return Err(format!("there must be a comma and another setting behind {key}")),
        };
    }
    Ok(())
}

/// The text up to the next quotation mark, and what is behind that.
fn unquoted(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((text, &quoted[at + 1..])),
            '\\' => text.push(characters.next()?.1),
            other => text.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Engines;
    use crate::config::{AgentSocket, Breaks, Config, Policy, UseSource, Verification};
    use proptest::prelude::*;

    #[test]
    fn a_line_sets_fields_and_the_rest_keeps_its_default() {
        let setup: Setup = "store=/run/s.sock, name=web1,cpu_percent=10,huge_policy=no-splitting"
            .parse()
            .unwrap();
        let expected = Setup {
            store: "/run/s.sock".into(),
            agent: None,
            config: Config {
                name: "web1".into(),
                cpu_percent: 10,
                huge_policy: Policy::NoSplitting,
                ..Config::default()
            },
        };
        assert_eq!(setup, expected);
        assert_eq!(
            setup.to_string(),
            "cpu_percent=10,huge_policy=no-splitting,name=web1,store=/run/s.sock"
        );
        assert_eq!(Setup::default().to_string(), "");
        assert!(setup.check(&Engines::new()).is_ok());
        let heard: Setup = "agent=cid:7,store=/run/s.sock".parse().unwrap();
        assert_eq!(heard.agent, Some(AgentSocket::Vhost(7)));
        assert_eq!(heard.to_string(), "agent=cid:7,store=/run/s.sock");
        let error = "agent=7".parse::<Setup>().unwrap_err().to_string();
        assert!(error.contains("must be text"), "{error}");
    }

    #[test]
    fn there_is_a_store() {
        let error = Setup::default().check(&Engines::new()).unwrap_err().to_string();
        assert!(error.contains("store is empty"), "{error}");
        for line in ["", "name=web1", "store=\"\""] {
            assert_eq!(line.parse::<Setup>().unwrap_err().to_string(), error, "{line}");
        }
        for json in ["{}", r#"{ "name": "web1" }"#, r#"{ "store": "" }"#] {
            let said = serde_json::from_str::<Setup>(json).unwrap_err().to_string();
            assert!(said.contains(&error), "{json}: {said}");
        }
    }

    #[test]
    fn json_has_one_table() {
        let text = r#"{ "store": "/s", "name": "web1", "breaks": { "mode": "kernel" } }"#;
        let setup: Setup = serde_json::from_str(text).unwrap();
        assert_eq!(
            (setup.store.to_str(), setup.config.name.as_str()),
            (Some("/s"), "web1")
        );
        let again = serde_json::from_str(&serde_json::to_string(&setup).unwrap());
        assert_eq!(again.ok(), Some(setup));
        let error = serde_json::from_str::<Setup>(r#"{ "stroe": "/s" }"#).unwrap_err();
        assert!(error.to_string().contains("unknown field `stroe`"), "{error}");
    }

    #[test]
    fn json_is_checked_when_it_is_read() {
        for (fields, says) in [
            (r#""cpu_percent": 0"#, "cpu_percent is 0, but it must be 1 to 100"),
            (r#""verify": { "timeout_us": 1 }"#, "verify.timeout_us is 1"),
            (r#""agent": "cid:2""#, "a guest's CID must be"),
            (r#""agent": 7"#, "agent must be text"),
        ] {
            let json = format!(r#"{{ "store": "/s", {fields} }}"#);
            let error = serde_json::from_str::<Setup>(&json).unwrap_err().to_string();
            assert!(error.contains(says), "{json}: {error}");
        }
    }

    #[test]
    fn nested_fields_and_quoted_values_are_read() {
        let line = r#"store="a,\"b\"",name=web1,breaks.mode=managed,breaks.reserve_pages=5,breaks.floor_bytes=0,max_vmas=7"#;
        let Setup { config, store, .. } = line.parse().unwrap();
        assert_eq!((store.to_str(), config.max_vmas), (Some(r#"a,"b""#), Some(7)));
        assert_eq!(config.breaks, Breaks::managed(5, 0));
        assert_eq!("store=/s,name=12".parse::<Setup>().unwrap().config.name, "12");
    }

    #[test]
    fn what_nobody_has_set_is_not_written() {
        let written = |setup: &Setup| serde_json::to_string(setup).unwrap();
        assert_eq!(written(&Setup::new("/s")), r#"{"store":"/s"}"#);
        let setup: Setup = "store=/s,cpu_percent=7,breaks=managed".parse().unwrap();
        let text = written(&setup);
        assert!(
            text.contains("cpu_percent") && !text.contains("pass_period_ms"),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Setup>(&text).unwrap(), setup);
    }

    #[test]
    fn what_is_short_is_written_out() {
        let setup: Setup = "store=/s,budget=7,breaks=managed".parse().unwrap();
        let breaks = Breaks::managed(1024, 256 << 20);
        assert_eq!((setup.config.cpu_percent, setup.config.breaks), (7, breaks));
        let json = r#"{ "store": "/s", "breaks": { "mode": "managed", "reserve_pages": 5 } }"#;
        let setup: Setup = serde_json::from_str(json).unwrap();
        assert_eq!(setup.config.breaks, Breaks::managed(5, 256 << 20));
        for line in ["cpu-percent=7", "cpu_budget_cores=0.07", "budget=7"] {
            let setup: Setup = format!("store=/s,{line}").parse().unwrap();
            assert_eq!(setup.to_string(), "cpu_percent=7,store=/s");
        }
        let json = |cores: f64| format!(r#"{{ "cpu_budget_cores": {cores} }}"#);
        for percent in 1..=100u32 {
            let config: Config = serde_json::from_str(&json(f64::from(percent) / 100.0)).unwrap();
            assert_eq!(config.cpu_percent, percent);
        }
        for cores in [0.0, 0.005, 0.001, 1.01, -0.01] {
            let error = serde_json::from_str::<Config>(&json(cores)).unwrap_err();
            assert!(error.to_string().contains("it must be 0.01 to 1"), "{error}");
        }
    }

    #[test]
    fn settings_by_serde_are_those_of_a_table() {
        let config: Config = serde_json::from_str(r#"{ "budget": 7, "breaks": "managed" }"#).unwrap();
        assert_eq!(
            (config.cpu_percent, config.breaks),
            (7, Breaks::managed(1024, 256 << 20))
        );
        for (json, says) in [
            (r#"{ "cpu_percent": 0 }"#, "cpu_percent is 0"),
            (
                r#"{ "sampling": { "interval_ms": 1 } }"#,
                "sampling.interval_ms is 1",
            ),
            (r#"{ "cpu": 7 }"#, "unknown field `cpu`, expected one of name, "),
        ] {
            let error = serde_json::from_str::<Config>(json).unwrap_err().to_string();
            assert!(error.contains(says), "{json}: {error}");
        }
    }

    #[test]
    fn what_is_not_text_takes_nothing_else_with_it() {
        use std::os::unix::ffi::OsStringExt;
        let path = PathBuf::from(std::ffi::OsString::from_vec(b"/\xff".to_vec()));
        let setup = Setup::new("/s").with(|config| {
            config.cpu_percent = 7;
            config.search_socket = Some(path.clone());
        });
        assert_eq!(
            setup.to_string(),
            "cpu_percent=7,search_socket=/\u{fffd},store=/s"
        );
        // It is not written as another one that would be right.
        let error = setup.changed_by("max_vmas=9").unwrap_err().to_string();
        assert!(error.starts_with("search_socket is"), "{error}");
        let error = Setup::new(path).changed_by("max_vmas=9").unwrap_err().to_string();
        assert!(error.starts_with("store is"), "{error}");
    }

    #[test]
    fn whom_a_line_is_for_is_read_as_far_as_it_goes() {
        for line in [
            "store=/s,name=web1,cpu=7",
            "name=web1,store=\"/s\",",
            "store=/s,name=web1,x",
        ] {
            let who = Setup::addressed_by(line);
            assert!(line.parse::<Setup>().is_err());
            assert_eq!(
                who,
                Setup::new("/s").with(|config| config.name = "web1".into()),
                "{line}"
            );
        }
    }

    #[test]
    fn a_line_changes_what_it_names() {
        let base = Setup::new("/s")
            .with(|config| config.name = "web1".into())
            .with(|config| config.cpu_percent = 7)
            .with_agent(AgentSocket::Vhost(7));
        // Also where it names a default.
        for line in ["cpu_percent=20,max_vmas=9", "budget=20,max_vmas=9"] {
            let expected = base
                .clone()
                .with(|config| (config.cpu_percent, config.max_vmas) = (20, Some(9)));
            assert_eq!(base.changed_by(line).unwrap(), expected, "{line}");
        }
        assert_eq!(base.changed_by("").unwrap(), base);
        let error = base.changed_by("cpu_percent=0").unwrap_err().to_string();
        assert!(error.contains("cpu_percent is 0"), "{error}");
        let error = Setup::default().changed_by("name=x").unwrap_err().to_string();
        assert!(error.contains("store is empty"), "{error}");
    }

    #[test]
    fn mistakes_are_named() {
        for (line, says) in [
            (
                "store=/s,cpu_percent=0",
                "cpu_percent is 0, but it must be 1 to 100",
            ),
            ("cpu=7", "unknown field `cpu`"),
            (
                "cpu_percent=many",
                "cpu_percent is \"many\", but it must be a whole number",
            ),
            ("store=/s,name=web 1", "name is \"web 1\", but it must be"),
            ("name", "\"name\" is no KEY=VALUE"),
            ("name=a,name=b", "name is given twice"),
            ("name=\"a", "a quotation mark is missing"),
            ("name=a,", "another setting behind name"),
            ("name=\"a\"b", "there must be a comma"),
            ("name.first=a", "but it must be text"),
            (
                "name=a,name.first=b",
                "name is given twice, as name.first as well",
            ),
            ("breaks.mode=never", "breaks must be \"kernel\", \"managed\", or"),
            ("breaks=never", "breaks must be \"kernel\", \"managed\", or"),
            ("budget=3,cpu_percent=3", "are one thing"),
            ("budget=3,cpu_budget_cores=0.03", "are one thing"),
            ("cpu_budget_cores=many", "it must be 0.01 to 1"),
        ] {
            let error = line.parse::<Setup>().unwrap_err().to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
    }

    fn any_setup() -> impl Strategy<Value = Setup> {
        let healing = (0..=1_000_000u64, any::<bool>());
        let breaks = prop_oneof![
            healing.clone().prop_map(|(heal_stall_us, heal_without_fork)| {
                Breaks::Kernel {
                    heal_stall_us,
                    heal_without_fork,
                }
            }),
            (1..100usize, any::<u64>(), healing).prop_map(|(reserve_pages, floor_bytes, healing)| {
                Breaks::Managed {
                    reserve_pages,
                    floor_bytes,
                    heal_stall_us: healing.0,
                    heal_without_fork: healing.1,
                }
            }),
        ];
        let verify =
            (".{0,8}", prop::option::of(".{1,8}"), 10..100u64).prop_map(|(engine, socket, timeout_us)| {
                Verification {
                    engine,
                    socket: socket.map(Into::into),
                    trusted: false,
                    timeout_us,
                }
            });
        let texts = (
            "[a-zA-Z0-9_.:/][-a-zA-Z0-9_.:/]{0,63}",
            ".{1,12}",
            ".{0,6}",
            prop::option::of(".{1,6}"),
        );
        let hybrid = "/.{0,6}".prop_map(|path| AgentSocket::Hybrid(path.into()));
        let agent = prop_oneof![hybrid, (3..100u32).prop_map(AgentSocket::Vhost)];
        (
            texts,
            breaks,
            verify,
            prop::option::of(agent),
            any::<bool>(),
            prop::option::of(any::<u32>()),
        )
            .prop_map(
                |((name, store, search, search_socket), breaks, verify, agent, enabled, max_vmas)| Setup {
                    store: store.into(),
                    agent,
                    config: Config {
                        name,
                        search,
                        search_socket: search_socket.map(Into::into),
                        breaks,
                        verify,
                        enabled,
                        max_vmas: max_vmas.map(|n| n as usize),
                        use_source: UseSource::Damon,
                        ..Config::default()
                    },
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_written_is_read(setup in any_setup()) {
            let line = setup.to_string();
            prop_assert_eq!(line.parse().ok(), Some(setup), "{}", line);
        }

        #[test]
        fn any_line_is_read_or_refused(line in "[a-z.=,\"\\\\0-9 ]{0,40}") {
            let _ = line.parse::<Setup>();
        }
    }
}
