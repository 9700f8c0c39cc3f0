//! What `doctor` found of one thing.

use serde_json::{Value, json};
use vmm_dedup_host::table::wrapped;

/// How bad something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    Ok,
    /// It could be better.
    Note,
    /// Something does not work, or will not for long.
    Warn,
    /// Nothing works.
    Bad,
}

impl Verdict {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warn => "warn",
            Self::Bad => "BAD",
        }
    }
}

/// What was found of one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) verdict: Verdict,
    /// What was looked at; stable, for machines.
    pub(super) what: String,
    pub(super) found: String,
    /// What to do; empty if all is well.
    pub(super) change: String,
}

impl Finding {
    pub(super) fn ok(what: &str, found: impl Into<String>) -> Self {
        Self::new(Verdict::Ok, what, found, "")
    }

    pub(super) fn new(
        verdict: Verdict,
        what: &str,
        found: impl Into<String>,
        change: impl Into<String>,
    ) -> Self {
        Self {
            verdict,
            what: what.to_owned(),
            found: found.into(),
            change: change.into(),
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "what": self.what,
            "verdict": self.verdict.word().to_ascii_lowercase(),
            "found": self.found,
            "change": self.change,
        })
    }

    pub(super) fn lines(&self, width: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let mut head = format!("{:<5}", self.verdict.word());
        for line in wrapped(&format!("{}: {}", self.what, self.found), width.saturating_sub(5)) {
            lines.push(format!("{head}{line}"));
            head = " ".repeat(5);
        }
        if !self.change.is_empty() {
            lines.extend(wrapped(&format!("     -> {}", self.change), width));
        }
        lines
    }
}
