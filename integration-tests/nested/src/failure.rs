//! Why something here failed: a line for the user, perhaps with the end of a log below.

use std::fmt;
use std::path::Path;

/// Ends what was being done.
#[derive(Debug)]
pub struct Failure {
    text: String,
    missing: bool,
}

impl Failure {
    /// Something failed.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            missing: false,
        }
    }

    /// This machine lacks something that is needed: a test skips.
    #[must_use]
    pub fn missing(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            missing: true,
        }
    }

    /// Whether a test skips for it, except in CI.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.missing
    }

    /// An error about a file.
    pub(crate) fn file(path: &Path, error: impl fmt::Display) -> Self {
        Self::new(format!("{}: {error}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Failure {}
