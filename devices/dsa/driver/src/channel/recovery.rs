//! What is done when a device is silent: first what it has is aborted, then it is reset, in the end it is given up.

use crate::way::{Remedy, Trouble, software_error};
use std::time::{Duration, Instant};

/// Times that a device is helped before it is given up, unless it has worked for [`FORGIVEN`] since.
const RESETS: usize = 3;
/// After this time a reset is forgotten.
const FORGIVEN: Duration = Duration::from_secs(60);

/// When a device was helped, by aborting or resetting.
#[derive(Debug, Default)]
pub(super) struct Resets {
    at: Vec<Instant>,
    /// Of the last time: what is to be logged.
    pub(super) note: Option<String>,
}

impl Resets {
    /// What is done about a silent device that says this: whether it is to be aborted first, and what is wrong, in words.
    ///
    /// # Errors
    /// If nothing helps, or it was helped too often.
    pub(super) fn plan(&mut self, trouble: Option<Trouble>) -> Result<(bool, String), Trouble> {
        let remedy = match &trouble {
            None => Remedy::Again,
            Some(Trouble::Software { error, .. }) => software_error(*error).1,
            Some(Trouble::Halted(_)) => Remedy::Reset,
            Some(Trouble::Gone(_)) => Remedy::GiveUp,
        };
        let text = trouble.map_or("it does not answer".to_owned(), |trouble| trouble.to_string());
        if remedy == Remedy::GiveUp {
            return Err(Trouble::Gone(text));
        }
        let first = self.is_calm();
        if !self.allow_one_more() {
            return Err(Trouble::Gone(format!(
                "{text}, after {RESETS} resets in {FORGIVEN:?}"
            )));
        }
        Ok((first && remedy == Remedy::Again, text))
    }

    /// Whether there was none of late.
    fn is_calm(&self) -> bool {
        self.at.iter().all(|at| at.elapsed() >= FORGIVEN)
    }

    /// Notes one, unless there were too many of late.
    fn allow_one_more(&mut self) -> bool {
        self.at.retain(|at| at.elapsed() < FORGIVEN);
        let may = self.at.len() < RESETS;
        if may {
            self.at.push(Instant::now());
        }
        may
    }
}
