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
    pub(crate) pid: u64,
    pub(crate) name: &'a str,
    /// The name that it gave itself.
    pub(crate) announced: &'a str,
}

/// What a VM is called that no other VM has to be told apart from.
fn base_of(announced: &str) -> &str {
    if announced.is_empty() { "vm" } else { announced }
}

impl Vm<'_> {
    /// Its announced name and process number. No process can have another one's.
    fn full_name(&self) -> String {
        format!("{}.{}", self.announced, self.pid)
    }

    /// By the announced name only where NAME.PID can tell two of one name apart. Where that is longer than a name may be, the
    /// shown one does.
    fn is_called(&self, wanted: &str) -> bool {
        let announced = self.full_name().len() <= MAX_NAME && self.announced == wanted;
        self.name == wanted || announced
    }
}

impl Peers {
    /// A name that no connected VM has, and none that another process had before its connection broke. It is shown whole: what makes
    /// it unique is at its end, so a long one is cut before that.
    pub(crate) fn unique_name(&self, wanted: &str, pid: u64) -> String {
        let base = base_of(wanted);
        let taken = |name: &str| self.is_taken(name, pid);
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

    /// Whether a connected VM has this name, or another process than this had it before its connection broke.
    fn is_taken(&self, name: &str, pid: u64) -> bool {
        let kept = self.peers.values().any(|peer| match &peer.phase {
            Phase::Orphan { name: old, .. } => peer.pid != pid && old == name,
            _ => false,
        });
        kept || self.vms().any(|vm| vm.name == name)
    }

    /// Who had this name has gone: a VM that announced it, and had to be told apart, has it from now on. So a VM that is started anew
    /// is called as before, even if it came before its last process was seen to end.
    pub(crate) fn pass_on(&mut self, name: &str) {
        let heirs = self.vms().filter(|vm| base_of(vm.announced) == name);
        let heir = heirs.map(|vm| (vm.id, vm.pid)).next();
        let Some((id, pid)) = heir.filter(|(_, pid)| !self.is_taken(name, *pid)) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        let shown = match &mut peer.phase {
            Phase::Service(service) => &mut service.name,
            Phase::Refused(refused) => &mut refused.name,
            Phase::Greeting | Phase::Observer | Phase::Orphan { .. } => return,
        };
        log::info!("VM {shown} (process {pid}) is called {name} from now on");
        name.clone_into(shown);
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

    /// The VM that somebody means: by its announced name and process number, and if there is none, by the name that the store shows
    /// or by the one it announced. `Err` says why there is no such one.
    pub(crate) fn find(&self, wanted: &str) -> Result<MemberId, String> {
        let full = self.vms().any(|vm| vm.full_name() == wanted);
        let vms = || {
            self.vms().filter(|vm| {
                if full {
                    vm.full_name() == wanted
                } else {
                    vm.is_called(wanted)
                }
            })
        };
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
                listed(vms().map(|vm| vm.full_name()))
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
