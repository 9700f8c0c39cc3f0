//! What L1 tells L0: JSON lines on its second serial line.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// Something was reached, for whoever watches.
    Note(String),
    /// What a scenario has measured, under a name.
    Measured(String, Value),
    /// A log or metrics, to be kept.
    File(String, String),
    /// The scenario failed.
    Failed(String),
    /// The scenario has played to its end.
    Done,
}
