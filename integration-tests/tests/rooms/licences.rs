//! The licences of everything that is built: each lets us pass it on under our own.

use serde_json::Value;
use std::process::Command;

/// Licences that do.
const ALLOWED: [&str; 9] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Whether an SPDX expression leaves a choice of allowed licences. AND binds closer than OR; the old `/` is an OR.
fn allows(expression: &str) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut tokens = spaced.split_whitespace().peekable();
    let allowed = any(&mut tokens);
    allowed && tokens.next().is_none()
}

type Tokens<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any(tokens: &mut Tokens<'_>) -> bool {
    let mut allowed = all(tokens);
    while tokens.next_if_eq(&"OR").is_some() {
        allowed |= all(tokens);
    }
    allowed
}

fn all(tokens: &mut Tokens<'_>) -> bool {
    let mut allowed = one(tokens);
    while tokens.next_if_eq(&"AND").is_some() {
        allowed &= one(tokens);
    }
    allowed
}

fn one(tokens: &mut Tokens<'_>) -> bool {
    if tokens.next_if_eq(&"(").is_some() {
        let allowed = any(tokens);
        return tokens.next() == Some(")") && allowed;
    }
    let Some(mut licence) = tokens.next().map(str::to_owned) else {
        return false;
    };
    if tokens.next_if_eq(&"WITH").is_some() {
        licence = format!("{licence} WITH {}", tokens.next().unwrap_or_default());
    }
    ALLOWED.contains(&&*licence)
}

#[test]
fn expressions_are_read_as_they_are_meant() {
    for good in [
        "MIT",
        "MIT/GPL-2.0",
        "GPL-2.0 OR MIT",
        "(GPL-2.0 OR MIT) AND Zlib",
        "GPL-2.0 AND MIT OR Zlib",
    ] {
        assert!(allows(good), "{good}");
    }
    for bad in [
        "",
        "GPL-2.0",
        "MIT AND GPL-2.0",
        "(MIT",
        "MIT MIT",
        "MIT WITH GPL-exception",
        "Zlib AND (GPL-2.0 OR AGPL-3.0)",
    ] {
        assert!(!allows(bad), "{bad}");
    }
}

#[test]
fn everything_that_is_built_has_a_licence_that_ours_allows() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--locked"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("a list");
    assert!(packages.len() > 100, "{} packages", packages.len());
    let refused = packages
        .iter()
        .filter(|package| !allows(package["license"].as_str().unwrap_or_default()));
    let refused: Vec<String> = refused
        .map(|package| {
            format!(
                "{} {}: {}",
                package["name"], package["version"], package["license"]
            )
        })
        .collect();
    assert!(refused.is_empty(), "{refused:#?}");
}
