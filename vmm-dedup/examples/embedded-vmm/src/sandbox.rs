//! The VMM's own filter, for its main thread and the vCPUs that this starts: what the VMM itself does, and nothing that only dedup
//! needs.

use crate::calls::{CALLS, RARE};
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::MaskedEq;
use seccompiler::{BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule};

/// The type of KVM's ioctls, and where a request has its type.
const KVMIO: u64 = 0xae << 8;
const TYPE: u64 = 0xff << 8;

/// Whoever does anything else is killed.
pub(crate) fn restrict_this_thread() -> Result<(), Box<dyn std::error::Error>> {
    let request_of_kvm = SeccompCondition::new(1, Dword, MaskedEq(TYPE), KVMIO)?;
    let mut rules: std::collections::BTreeMap<_, _> =
        CALLS.iter().chain(RARE).map(|call| (*call, Vec::new())).collect();
    rules.insert(libc::SYS_ioctl, vec![SeccompRule::new(vec![request_of_kvm])?]);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Trap,
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}
