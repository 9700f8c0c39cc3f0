//! Of which kind the values of settings are: a table, a number, text, or true or false.

use crate::config::{Breaks, Config, Verification};
use serde_json::Value;
use std::path::PathBuf;

/// A value of its kind for every key.
pub(super) fn usual() -> Value {
    let all = Config {
        max_vmas: Some(1),
        search_socket: Some(PathBuf::new()),
        verify: Verification {
            socket: Some(PathBuf::new()),
            ..Verification::default()
        },
        breaks: Breaks::MANAGED,
        ..Config::default()
    };
    serde_json::to_value(all).unwrap_or_default()
}

/// Refuses a value that is not of the kind that it usually is. What serde says of that names types of the program, and not where in a table
/// it is.
pub(super) fn check(key: &str, value: &Value, usual: &Value) -> Result<(), String> {
    let must = match (usual, value) {
        // What is left out.
        (_, Value::Null) => return Ok(()),
        (Value::Object(known), Value::Object(given)) => {
            return given.iter().try_for_each(|(name, value)| {
                let usual = known
                    .get(name)
                    .ok_or_else(|| unknown(&format!("{key}.{name}"), known.keys()))?;
                check(&format!("{key}.{name}"), value, usual)
            });
        }
        (Value::Object(known), _) => format!("a table with any of {}", list(known.keys())),
        (Value::Bool(_), given) if !given.is_boolean() => "true or false".into(),
        (Value::Number(_), given) if !given.is_u64() => "a whole number".into(),
        (Value::String(_), given) if !given.is_string() => "text".into(),
        _ => return Ok(()),
    };
    Err(format!("{key} is {value}, but it must be {must}"))
}

fn list(keys: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let keys: Vec<_> = keys.into_iter().collect();
    keys.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")
}

/// That a table has no such key.
pub(super) fn unknown(key: &str, known: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    format!("unknown field `{key}`, expected one of {}", list(known))
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, Setup};

    #[test]
    fn what_is_of_the_wrong_kind_is_named_in_words() {
        for (line, says) in [
            (
                "sampling=x",
                r#"sampling is "x", but it must be a table with any of interval_ms, window_us"#,
            ),
            (
                "verify=cpu",
                r#"verify is "cpu", but it must be a table with any of engine, "#,
            ),
            (
                "pack=true",
                "pack is true, but it must be a table with any of idle_ms, on, touches_per_second",
            ),
            (
                "pack.on=maybe",
                r#"pack.on is "maybe", but it must be true or false"#,
            ),
            ("enabled=1", "enabled is 1, but it must be true or false"),
            (
                "pack.x=1",
                "unknown field `pack.x`, expected one of idle_ms, on, touches_per_second",
            ),
            (
                "verify.timeout_us=x",
                r#"verify.timeout_us is "x", but it must be a whole number"#,
            ),
            (
                "max_vmas=-1",
                r#"max_vmas is "-1", but it must be a whole number"#,
            ),
            ("budget=", r#"cpu_percent is "", but it must be a whole number"#),
            (
                "cpu_percent=5000000000",
                "cpu_percent is 5000000000: that is too large",
            ),
            (
                "cpu_percent.x=1",
                r#"cpu_percent is {"x":1}, but it must be a whole number"#,
            ),
            (
                "search.socket=/s",
                r#"search is {"socket":"/s"}, but it must be text"#,
            ),
            (
                "breaks=managed,breaks.floor_bytes=7",
                "breaks is given twice, as breaks.floor_bytes as well",
            ),
            (
                "breaks.mode=managed,breaks.reserve_pages=x",
                r#"breaks.reserve_pages is "x", but it must be a whole number"#,
            ),
            ("=1", r#""=1" is no KEY=VALUE"#),
        ] {
            let error = Setup::table(line)
                .and_then(Config::try_from)
                .unwrap_err()
                .to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
