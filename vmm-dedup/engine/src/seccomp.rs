//! What a filter must allow to the supervisor's thread, and so to all threads that it starts, which inherit its filter.
//!
//! [`CALLS`] is kept true by a test that runs services, breaks, healing, discards, loans, pins, refusals and stops under exactly
//! this filter, and that fails if an entry is missing or is never used.

use libc::{SYS_ioctl, c_long};

/// A system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its name.
    pub name: &'static str,
    /// Its number.
    pub number: c_long,
    /// Of ioctl: what is asked for.
    pub request: Option<u32>,
}

const fn call(name: &'static str, number: c_long) -> Call {
    Call {
        name,
        number,
        request: None,
    }
}

const fn ioctl(name: &'static str, request: u32) -> Call {
    Call {
        name,
        number: SYS_ioctl,
        request: Some(request),
    }
}

/// All of them.
pub const CALLS: &[Call] = &[call("futex", libc::SYS_futex), ioctl("UFFDIO_API", 0xc018_aa3f)];

#[cfg(feature = "seccomp")]
mod filter {
    use super::CALLS;
    use crate::error::Error;
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule,
    };
    use std::collections::BTreeMap;

    fn failed(error: impl std::fmt::Display) -> Error {
        Error::Seccomp(error.to_string())
    }

    /// [`CALLS`] as rules of seccompiler, for a filter that allows what matches.
    ///
    /// # Errors
    /// [`Error::Seccomp`].
    pub fn rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, Error> {
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
        for call in CALLS {
            let rules = rules.entry(call.number).or_default();
            if let Some(request) = call.request {
                let is = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, request.into());
                let rule = is.and_then(|is| SeccompRule::new(vec![is]));
                rules.push(rule.map_err(failed)?);
            }
        }
        Ok(rules)
    }

    /// Filters the calling thread, and all that it starts: [`Options::first`](crate::supervisor::Options::first). Any other call
    /// ends the process.
    ///
    /// # Errors
    /// [`Error::Seccomp`].
    pub fn restrict_this_thread() -> Result<(), Error> {
        let architecture = std::env::consts::ARCH.try_into().map_err(failed)?;
        let filter = SeccompFilter::new(rules()?, SeccompAction::Trap, SeccompAction::Allow, architecture);
        let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(failed)?;
        seccompiler::apply_filter(&program).map_err(failed)
    }
}

#[cfg(feature = "seccomp")]
pub use filter::{restrict_this_thread, rules};
