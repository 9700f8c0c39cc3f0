//! The stores, and the VMs on them.

use super::finding::{Finding, Verdict};
use std::time::Duration;
use vmm_dedup_host::silence::Silence;
use vmm_dedup_host::units::{count, pages_mib, span};
use vmm_dedup_host::view::{HostView, StoreView, address};
use vmm_dedup_host::{Failure, account};
use vmm_dedup_protocol::observer::Vm;

/// A running service passes at least this often, but for the longest periods that can be set.
const LONG: Duration = Duration::from_secs(900);

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
            format!("answers at {at}, {} connected", count(vms.len(), "VM", "VMs")),
        ),
    }];
    if account::is_full(stats) {
        findings.push(Finding::new(
            Verdict::Warn,
            &what,
            format!(
                "at {at} is full: {} of pages, refused {}",
                pages_mib(stats.pages_shared),
                account::refused_full(stats)
            ),
            "raise its --max-mib",
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
    let what = format!("VM {}", vm.name);
    if let Some(reason) = vm.reason {
        let named = format!("{}{store_words}", address(vm));
        let explain = format!("`vmm-dedup explain {named}` tells what would lift it");
        let found = format!("is not deduplicated: {}", reason.label());
        return Some(Finding::new(Verdict::Warn, &what, found, explain));
    }
    if account::is_frozen(vm) {
        let revive = format!("`kill -CONT {}` lets it go on", vm.pid);
        return Some(Finding::new(
            Verdict::Warn,
            &what,
            "its process is stopped",
            revive,
        ));
    }
    // Three passes, where those are rare.
    let long = LONG.max(Duration::from_millis(vm.stats.pass_period_ms.saturating_mul(3)));
    let age = account::last_pass(vm)
        .filter(|age| *age > long && account::state_name(vm.stats.state) == "running")?;
    Some(Finding::new(
        Verdict::Warn,
        &what,
        format!("its last pass ended {} ago", span(age)),
        format!(
            "its thread hangs, or cpu_percent ({}) is far too small",
            vm.stats.cpu_percent
        ),
    ))
}
