//! Which VMs of a fleet somebody means.

use vmm_dedup_host::Failure;
use vmm_dedup_host::view::matches;

/// The names that are meant: each word is a name, or a pattern with `*` and `?`. No words: all.
pub(crate) fn choose(words: &[String], names: &[&str]) -> Result<Vec<String>, Failure> {
    for word in words {
        if !names.iter().any(|name| matches(word, name)) {
            return Err(Failure::new(format!(
                "no VM of this fleet is called {word}: there are {}",
                names.join(", ")
            )));
        }
    }
    let chosen = |name: &&&str| words.is_empty() || words.iter().any(|word| matches(word, name));
    Ok(names
        .iter()
        .filter(chosen)
        .map(|name| (*name).to_owned())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_patterns_choose_and_wrong_ones_are_named() {
        let names = ["web-0", "web-1", "db"];
        let chosen = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            choose(&words, &names).map_err(|e| e.to_string())
        };
        assert_eq!(chosen(&[]).unwrap(), names);
        assert_eq!(chosen(&["web-*"]).unwrap(), ["web-0", "web-1"]);
        assert_eq!(chosen(&["db", "web-1"]).unwrap(), ["web-1", "db"]);
        assert_eq!(
            chosen(&["db", "mail"]).unwrap_err(),
            "no VM of this fleet is called mail: there are web-0, web-1, db"
        );
    }
}
