//! Why a command failed: one line for the user, and an exit code.

use std::process::ExitCode;

/// Ends a command.
#[derive(Debug)]
pub struct Failure {
    text: String,
    /// Where what to do begins in the text, and how long what is between it and what is wrong is.
    advice: Option<(usize, usize)>,
    code: u8,
}

impl Failure {
    /// Exit code 1.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            advice: None,
            code: 1,
        }
    }

    /// What is wrong and what to do, in one line; exit code 1.
    #[must_use]
    pub fn advised(wrong: &str, between: &str, advice: &str) -> Self {
        Self {
            advice: Some((wrong.len() + between.len(), between.len())),
            ..Self::new(format!("{wrong}{between}{advice}"))
        }
    }

    /// What is wrong, and what to do if that stands apart.
    #[must_use]
    pub fn parts(&self) -> (&str, &str) {
        match self.advice {
            Some((at, between)) => (&self.text[..at - between], &self.text[at..]),
            None => (&self.text, ""),
        }
    }

    /// Exit code 3: what was asked for is done in part, or in part left to whoever asked.
    #[must_use]
    pub fn in_part(text: impl Into<String>) -> Self {
        Self {
            code: 3,
            ..Self::new(text)
        }
    }

    /// Exit code 2: this machine lacks something that the command needs.
    #[must_use]
    pub fn missing(text: impl Into<String>) -> Self {
        Self {
            code: 2,
            ..Self::new(text)
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
            code: u8::try_from(128 + signal).unwrap_or(1),
            ..Self::new(format!("ended by signal {signal}"))
        }
    }

    /// Whoever read the output has gone: nothing is said, and the exit code is that of a process that SIGPIPE ends.
    #[must_use]
    pub fn reader_gone() -> Self {
        Self {
            code: 128 + 13,
            ..Self::new("")
        }
    }

    /// Whether there is nothing to say.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.text.is_empty()
    }

    /// This failure, and another that followed from dealing with it.
    #[must_use]
    pub fn and(self, second: &Self) -> Self {
        Self {
            code: self.code,
            ..Self::new(format!("{self}; then: {second}"))
        }
    }

    /// This failure, whose cause may be in the host: with what finds it.
    #[must_use]
    pub fn of_host(self) -> Self {
        Self {
            code: self.code,
            ..Self::new(format!(
                "{self}; `vmm-dedup doctor` tells what is wrong on this host"
            ))
        }
    }

    /// An error with its causes in one line, each said once; exit code 1.
    #[must_use]
    pub fn from_error(error: impl std::error::Error) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            // Many errors say their cause themselves.
            if !text.contains(&cause_text) {
                text = format!("{text}: {cause_text}");
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error;
    use std::fmt;

    #[derive(Debug)]
    struct Outer(&'static str, std::io::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.1)
        }
    }

    #[test]
    fn a_failure_of_the_host_names_what_finds_its_cause_and_keeps_its_code() {
        let failure = Failure::missing("no KVM").of_host();
        assert_eq!(
            failure.to_string(),
            "no KVM; `vmm-dedup doctor` tells what is wrong on this host"
        );
        assert_eq!(failure.code, 2);
    }

    #[test]
    fn what_to_do_stands_apart_where_that_is_known() {
        let failure = Failure::advised("it is gone", "; ", "start it");
        assert_eq!(failure.to_string(), "it is gone; start it");
        assert_eq!(failure.parts(), ("it is gone", "start it"));
        assert_eq!(Failure::new("it is gone").parts(), ("it is gone", ""));
    }

    #[test]
    fn each_cause_is_said_once() {
        let cause = || std::io::Error::other("no room");
        let text = |says| Failure::from_error(Outer(says, cause())).to_string();
        assert_eq!(text("cannot write"), "cannot write: no room");
        assert_eq!(text("cannot write: no room"), "cannot write: no room");
    }
}
