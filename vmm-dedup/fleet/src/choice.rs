//! Which VMs of a fleet somebody means.

use crate::state::State;
use vmm_dedup_host::Failure;
use vmm_dedup_host::view::{listed, matches};

/// The names that are meant: each word is a name, or a pattern with `*` and `?`. No words: all.
///
/// # Errors
/// A [`Failure`] if a word means none; it tells which there are, those that ought to run before those that are down.
pub(crate) fn choose(words: &[String], names: &[&str], state: &State) -> Result<Vec<String>, Failure> {
    let is_meant = |word: &String| names.iter().any(|name| matches(word, name));
    if let Some(word) = words.iter().find(|word| !is_meant(word)) {
        return Err(none_called(word, names, state));
    }
    let chosen = |name: &&&str| words.is_empty() || words.iter().any(|word| matches(word, name));
    Ok(names
        .iter()
        .filter(chosen)
        .map(|name| (*name).to_owned())
        .collect())
}

/// No VM is meant by a word. `names`: all that may be meant.
pub(crate) fn none_called(word: &str, names: &[&str], state: &State) -> Failure {
    let up = state.names();
    let down = names.iter().filter(|name| !up.contains(name));
    let some = |names: &mut dyn Iterator<Item = &&str>| listed(names.map(|name| (*name).to_owned()));
    let (up, down) = (some(&mut up.iter()), some(&mut down.into_iter()));
    let there_are = match (up.is_empty(), down.is_empty()) {
        (false, true) => format!("there are {up}"),
        (false, false) => format!("there are {up}; down: {down}"),
        (true, false) => format!("all are down: {down}"),
        (true, true) => "there is none".to_owned(),
    };
    Failure::new(format!("no VM of this fleet is called {word}: {there_are}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::Vmm;
    use crate::state::Missing;

    fn up(names: &[&str]) -> State {
        let missing = |name: &&str| {
            let (vmm, why) = (Vmm::Reference, String::new());
            ((*name).to_owned(), Missing { vmm, why })
        };
        State {
            missing: names.iter().map(missing).collect(),
            ..State::default()
        }
    }

    #[test]
    fn names_and_patterns_choose_and_wrong_ones_are_named() {
        let names = ["web-0", "web-1", "db"];
        let chosen = |words: &[&str], state: &State| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            choose(&words, &names, state).map_err(|e| e.to_string())
        };
        let state = up(&names);
        assert_eq!(chosen(&[], &state).unwrap(), names);
        assert_eq!(chosen(&["web-*"], &state).unwrap(), ["web-0", "web-1"]);
        assert_eq!(chosen(&["db", "web-1"], &state).unwrap(), ["web-1", "db"]);
        for (state, there_are) in [
            (state, "there are db, web-0, web-1"),
            (up(&["old", "web-1"]), "there are old, web-1; down: web-0, db"),
            (State::default(), "all are down: web-0, web-1, db"),
        ] {
            assert_eq!(
                chosen(&["db", "mail"], &state).unwrap_err(),
                format!("no VM of this fleet is called mail: {there_are}")
            );
        }
    }
}
