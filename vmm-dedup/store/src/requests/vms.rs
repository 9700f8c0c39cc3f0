//! The connected VMs: those with a service and those that are refused, and what they are called.

use crate::ledger::epochs::MemberId;
use crate::requests::peers::{Peers, Phase, RefusedVm};
use vmm_dedup_protocol::name::MAX_NAME;

/// Names listed for somebody who asked for a VM that is not there.
const LISTED: usize = 8;

/// A connected VM, with or without a service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vm<'a> {
    pub(crate) id: MemberId,
    pub(crate) pid: u32,
    pub(crate) name: &'a str,
    /// The name that it gave itself.
    pub(crate) announced: &'a str,
}

impl Vm<'_> {
    /// By the announced name only where NAME.PID can tell two of one name apart. Where that is longer than a name may be, the
    /// shown one does.
    fn is_called(&self, wanted: &str) -> bool {
        let full = format!("{}.{}", self.announced, self.pid);
        let announced = full.len() <= MAX_NAME && self.announced == wanted;
        self.name == wanted || announced || full == wanted
    }
}

impl Peers {
    /// A name that no connected VM has, and that is shown whole: what makes it unique is at its end, so a long one is cut before
    /// that.
    pub(crate) fn unique_name(&self, wanted: &str, pid: u32) -> String {
        let base = if wanted.is_empty() { "vm" } else { wanted };
        let taken = |name: &str| self.vms().any(|vm| vm.name == name);
        let numbered = (2..).map(|n| format!(".{pid}.{n}"));
        let ends = [String::new(), format!(".{pid}")].into_iter().chain(numbered);
        let mut names = ends.map(|end| {
            let room = MAX_NAME.saturating_sub(end.len());
            // ASCII, as all names that travel.
            let base: String = base.chars().take(room).collect();
            base + &end
        });
        names.find(|name| !taken(name)).unwrap_or_default()
    }

    /// The connected VMs that are not deduplicated.
    pub(crate) fn refused(&self) -> impl Iterator<Item = &RefusedVm> {
        self.peers.values().filter_map(|peer| match &peer.phase {
            Phase::Refused(refused) => Some(&**refused),
            _ => None,
        })
    }

    /// All connected VMs.
    pub(crate) fn vms(&self) -> impl Iterator<Item = Vm<'_>> {
        self.peers.iter().filter_map(|(id, peer)| {
            let (name, announced) = match &peer.phase {
                Phase::Service(service) => (&service.name, &service.announced),
                Phase::Refused(refused) => (&refused.name, &refused.announced),
                _ => return None,
            };
            let (id, pid) = (*id, peer.pid);
            Some(Vm {
                id,
                pid,
                name,
                announced,
            })
        })
    }

    /// The VM that somebody means: by the name that the store shows, by the one it announced, or by that and its
    /// process number. `Err` says why there is no such one.
    pub(crate) fn find(&self, wanted: &str) -> Result<MemberId, String> {
        let vms = || self.vms().filter(|vm| vm.is_called(wanted));
        let mut found = vms();
        match (found.next(), found.next()) {
            (Some(vm), None) => Ok(vm.id),
            (None, _) => Err(format!(
                "no VM is called {wanted}: {}",
                listed(self.vms().map(|vm| vm.name.to_owned()))
            )),
            (Some(_), Some(_)) => Err(format!(
                "{} VMs are called {wanted}: say which, {}",
                vms().count(),
                listed(vms().map(|vm| format!("{}.{}", vm.announced, vm.pid)))
            )),
        }
    }
}

/// Some names for a message.
fn listed(mut names: impl Iterator<Item = String>) -> String {
    let mut first: Vec<String> = names.by_ref().take(LISTED).collect();
    if first.is_empty() {
        return "no VM is connected".into();
    }
    if names.next().is_some() {
        first.push("...".into());
    }
    format!("there are {}", first.join(", "))
}
