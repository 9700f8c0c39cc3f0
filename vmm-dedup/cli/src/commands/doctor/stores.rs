//! The stores, and the VMs on them.

use super::finding::{Finding, Verdict};
use vmm_dedup_host::account::Trouble;
use vmm_dedup_host::silence::Silence;
use vmm_dedup_host::units::{count, pages_mib, span};
use vmm_dedup_host::view::{HostView, StoreView, address};
use vmm_dedup_host::{Failure, account};
use vmm_dedup_protocol::observer::Vm;

/// `store_words`: how a command asks the same stores.
pub(super) fn findings(view: Result<&HostView, &Failure>, store_words: &str) -> Vec<Finding> {
    let view = match view {
        Ok(view) => view,
        Err(failure) => return vec![of_failure(Verdict::Note, "store", failure)],
    };
    let mut findings: Vec<Finding> = view.stores.iter().flat_map(store).collect();
    findings.extend(view.vms().filter_map(|(_, found)| vm(found, store_words)));
    findings
}

fn store(store: &StoreView) -> Vec<Finding> {
    let what = format!("store {}", store.domain().unwrap_or("?"));
    let at = store.socket.display();
    let (stats, vms) = match &store.account {
        Ok(account) => account,
        Err((Silence::NoAccess, failure)) => {
            return vec![of_failure(Verdict::Note, &what, failure)];
        }
        Err((_, failure)) => return vec![of_failure(Verdict::Warn, &what, failure)],
    };
    let own = env!("CARGO_PKG_VERSION");
    let release = store.record.as_ref().map(|record| record.version.as_str());
    let mut findings = vec![match release {
        Some(other) if other != own => Finding::new(
            Verdict::Note,
            &what,
            format!("answers at {at}, and is of release {other}; this command is of {own}"),
            "restart it with this release when it suits",
        ),
        _ => Finding::ok(
            &what,
            format!(
                "answers at {at}, {} connected{}",
                count(vms.len(), "VM", "VMs"),
                if account::is_secure(stats) {
                    ", shares securely"
                } else {
                    ""
                }
            ),
        ),
    }];
    if let Some(what_to_do) = store.if_full() {
        findings.push(Finding::new(
            Verdict::Warn,
            "store full",
            format!(
                "{what} at {at} is full: {} of pages, refused {}",
                pages_mib(stats.pages_shared),
                account::refused_full(stats)
            ),
            what_to_do,
        ));
    }
    if stats.malformed_total > 0 {
        findings.push(Finding::new(
            Verdict::Warn,
            &what,
            format!(
                "has cut {} for what they sent",
                count(
                    usize::try_from(stats.malformed_total).unwrap_or(usize::MAX),
                    "connection",
                    "connections"
                )
            ),
            "run one release on both sides; the store's log names the processes",
        ));
    }
    findings
}

fn of_failure(verdict: Verdict, what: &str, failure: &Failure) -> Finding {
    let (found, change) = failure.parts();
    Finding::new(verdict, what, found, change)
}

/// What is wrong with a VM, if something is.
fn vm(vm: &Vm, store_words: &str) -> Option<Finding> {
    let (found, change) = match account::trouble(vm)? {
        Trouble::Refused(reason) => (
            format!("is not deduplicated: {reason}"),
            format!(
                "`vmm-dedup explain {}{store_words}` tells what would lift it",
                address(vm)
            ),
        ),
        Trouble::Frozen => (
            "its process is stopped".to_owned(),
            format!("`kill -CONT {}` lets it go on", account::pid(vm)),
        ),
        Trouble::Stuck(age) => (
            format!("its last pass ended {} ago", span(age)),
            format!(
                "its thread hangs, or cpu_percent ({}) is far too small",
                vm.stats.cpu_percent
            ),
        ),
    };
    Some(Finding::new(
        Verdict::Warn,
        &format!("VM {}", vm.name),
        found,
        change,
    ))
}
