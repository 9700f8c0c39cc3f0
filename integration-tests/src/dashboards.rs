//! The dashboards as their files say: panels, and the expressions in them.

use serde_json::Value;
use std::path::{Path, PathBuf};

/// The dashboards there are, by the names of their files.
pub const DASHBOARDS: [&str; 3] = ["fleet", "vm", "scanner"];

/// Where dashboards and rules are.
#[must_use]
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../dashboards")
}

/// A dashboard's file.
///
/// # Panics
/// If there is none, or it is no JSON.
#[must_use]
pub fn read(name: &str) -> Value {
    let path = folder().join(name).with_extension("json");
    let text = std::fs::read_to_string(&path).expect("a dashboard");
    serde_json::from_str(&text).expect("JSON")
}

/// An array of an object; empty if it has none.
#[must_use]
pub fn array<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

/// A text of an object; empty if it has none.
#[must_use]
pub fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or("")
}

/// Replaces what Grafana would: all instances and domains, one VM.
///
/// # Panics
/// If there is a variable that it does not know.
#[must_use]
pub fn substitute(expression: &str, vm: &str) -> String {
    let variables = [
        ("$__rate_interval", "10s"),
        ("$instance", ".*"),
        ("$domain", ".*"),
        ("$vm", vm),
    ];
    let replace = |text: String, (from, to): (&str, &str)| text.replace(from, to);
    let expression = variables.into_iter().fold(expression.to_owned(), replace);
    assert!(
        !expression.contains('$'),
        "a variable that this does not know: {expression}"
    );
    expression
}

/// The name of the file that a panel of a dashboard is drawn into.
#[must_use]
pub fn drawing(dashboard: &str, panel: &Value) -> String {
    let plain = |c: char| match c.is_ascii_alphanumeric() {
        true => c.to_ascii_lowercase(),
        false => ' ',
    };
    let title: String = text(panel, "title").chars().map(plain).collect();
    let words: Vec<&str> = title.split_whitespace().collect();
    format!("{dashboard}-{}.svg", words.join("-"))
}
