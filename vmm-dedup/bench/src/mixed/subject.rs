//! What is measured: a policy, and how long its samples of use last.

use std::fmt;
use std::str::FromStr;
use vmm_dedup::Policy;

/// Samples of `ingens` by which it is compared, microseconds: its threshold between used and not.
const INGENS_WINDOWS: [u64; 3] = [3000, 1000, 300];

/// A policy, written `POLICY` or `POLICY@MICROSECONDS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(super) policy: Policy,
    /// `None`: as configured by default.
    pub(super) window_us: Option<u64>,
}

impl Subject {
    /// Every policy, and `ingens` with several thresholds.
    pub(super) fn usual() -> Vec<Self> {
        let plain = Policy::ALL.iter().map(|&policy| Self {
            policy,
            window_us: None,
        });
        let ingens = INGENS_WINDOWS.map(|us| Self {
            policy: Policy::Ingens,
            window_us: Some(us),
        });
        plain.chain(ingens).collect()
    }
}

/// How the report calls it.
pub(super) fn name(subject: Option<Subject>) -> String {
    subject.map_or_else(|| "none".into(), |s| s.to_string())
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.window_us {
            Some(us) => write!(f, "{}@{us}", self.policy),
            None => write!(f, "{}", self.policy),
        }
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (policy, window) = match text.split_once('@') {
            Some((policy, window)) => (policy, Some(window)),
            None => (text, None),
        };
        let us = |text: &str| {
            let us = text.parse::<u64>().ok().filter(|us| (100..=100_000).contains(us));
            us.ok_or_else(|| format!("a sample lasts 100 to 100000 microseconds, not {text:?}"))
        };
        Ok(Self {
            policy: policy.parse()?,
            window_us: window.map(us).transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for subject in Subject::usual() {
            assert_eq!(subject.to_string().parse(), Ok(subject));
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_rule() {
        for (text, rule) in [
            ("fast", "choose one of"),
            ("ingens@", "100 to 100000"),
            ("ingens@50", "100 to 100000"),
            ("@1000", "choose one of"),
        ] {
            assert!(text.parse::<Subject>().unwrap_err().contains(rule), "{text}");
        }
    }
}
