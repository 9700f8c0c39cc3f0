//! The filter that the tables make.

use crate::error::Error;
use crate::seccomp::{Part, allowed};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Seccomp(error.to_string())
}

/// What a part needs ([`allowed`]) as rules of seccompiler, for a filter that allows what matches.
///
/// # Errors
/// [`Error::Seccomp`].
pub fn rules(part: Part) -> Result<BTreeMap<i64, Vec<SeccompRule>>, Error> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for call in allowed(part) {
        let rules = rules.entry(call.number).or_default();
        if let Some(request) = call.request {
            let is = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, request.into());
            let rule = is.and_then(|is| SeccompRule::new(vec![is]));
            rules.push(rule.map_err(failed)?);
        }
    }
    Ok(rules)
}

/// Allows to the calling thread, and to all that it starts, what a part needs. Any other call ends the process.
///
/// # Errors
/// [`Error::Seccomp`].
pub fn restrict_this_thread(part: Part) -> Result<(), Error> {
    let architecture = std::env::consts::ARCH.try_into().map_err(failed)?;
    let filter = SeccompFilter::new(
        rules(part)?,
        SeccompAction::Trap,
        SeccompAction::Allow,
        architecture,
    );
    let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(failed)?;
    seccompiler::apply_filter(&program).map_err(failed)
}
