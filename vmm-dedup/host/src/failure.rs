//! Why a command failed: one line for the user, and an exit code.

use std::process::ExitCode;

/// Ends a command.
#[derive(Debug)]
pub struct Failure {
    text: String,
    code: u8,
}

impl Failure {
    /// Exit code 1.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            code: 1,
        }
    }

    /// Exit code 2: this machine lacks something that the command needs.
    #[must_use]
    pub fn missing(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            code: 2,
        }
    }

    /// Exit code 2, as clap's: wrong usage that clap cannot see.
    #[must_use]
    pub fn usage(text: impl Into<String>) -> Self {
        Self::missing(text)
    }

    /// Ended by a signal: exit code 128 + signal, as a shell has it.
    #[must_use]
    pub fn interrupted(signal: i32) -> Self {
        Self {
            text: format!("ended by signal {signal}"),
            code: u8::try_from(128 + signal).unwrap_or(1),
        }
    }

    /// This failure, and another that followed from dealing with it.
    #[must_use]
    pub fn and(self, second: &Self) -> Self {
        Self {
            text: format!("{self}; then: {second}"),
            code: self.code,
        }
    }

    /// An error with its causes in one line; exit code 1.
    #[must_use]
    pub fn from_error(error: impl std::error::Error) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        Self::new(text)
    }

    /// What the process ends with.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        self.code.into()
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}
