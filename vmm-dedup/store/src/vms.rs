//! The connected VMs: those with a service and those that are refused, and what they are called.

use crate::epochs::MemberId;
use crate::error::Violation;
use crate::state::{Connection, Phase, State};
use vmm_dedup_protocol::message::{Kind, Welcome, encode};
use vmm_dedup_protocol::refusal::{Refusal, Refused};
use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::IntoBytes;

/// A VM that is not deduplicated.
#[derive(Debug)]
pub(crate) struct RefusedVm {
    /// Its name, made unique among the connected ones.
    pub(crate) name: String,
    announced: String,
    pub(crate) pages: u64,
    pub(crate) refusal: Refusal,
}

/// A number of [`vmm_dedup_protocol::stats::STATES`].
pub(crate) const STATE_REFUSED: u64 = 4;

impl RefusedVm {
    /// What there is to tell in numbers.
    pub(crate) fn stats(&self) -> ServiceStats {
        ServiceStats {
            pages: self.pages,
            state: STATE_REFUSED,
            ..ServiceStats::default()
        }
    }
}

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
    pub(crate) fn is_called(&self, wanted: &str) -> bool {
        [self.name, self.announced].contains(&wanted) || format!("{}.{}", self.announced, self.pid) == wanted
    }
}

impl State {
    /// A VM that is not deduplicated introduces itself.
    pub(crate) fn announce(&mut self, id: MemberId, refused: &Refused) -> Result<(), Violation> {
        let Connection {
            phase: Phase::Greeting,
            outbox: Some(outbox),
            pid,
        } = &self.connections[&id]
        else {
            return Err(Violation::Unexpected("Refused after a greeting"));
        };
        let welcome = Welcome {
            salt: 0,
            incarnation: self.incarnation,
            index_bytes: 0,
        };
        outbox.push(encode(Kind::Welcome, &[welcome.as_bytes()]), Vec::new());
        let announced = refused.name.text();
        let name = self.unique_name(&announced, *pid);
        log::info!("VM {name} (process {pid}) is refused: {}", refused.refusal);
        let vm = RefusedVm {
            name,
            announced,
            pages: refused.pages,
            refusal: refused.refusal.clone(),
        };
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.phase = Phase::Refused(Box::new(vm));
        }
        Ok(())
    }

    pub(crate) fn unique_name(&self, wanted: &str, pid: u32) -> String {
        let base = if wanted.is_empty() { "vm" } else { wanted };
        let taken = |name: &str| self.vms().any(|vm| vm.name == name);
        let numbered = (2..).map(|n| format!("{base}.{pid}.{n}"));
        let mut names = [base.to_owned(), format!("{base}.{pid}")]
            .into_iter()
            .chain(numbered);
        names.find(|name| !taken(name)).unwrap_or_default()
    }

    /// The connected VMs that are not deduplicated.
    pub(crate) fn refused(&self) -> impl Iterator<Item = &RefusedVm> {
        self.connections.values().filter_map(|c| match &c.phase {
            Phase::Refused(refused) => Some(&**refused),
            _ => None,
        })
    }

    /// All connected VMs.
    pub(crate) fn vms(&self) -> impl Iterator<Item = Vm<'_>> {
        self.connections.iter().filter_map(|(id, connection)| {
            let (name, announced) = match &connection.phase {
                Phase::Service(service) => (&service.name, &service.announced),
                Phase::Refused(refused) => (&refused.name, &refused.announced),
                _ => return None,
            };
            let (id, pid) = (*id, connection.pid);
            Some(Vm {
                id,
                pid,
                name,
                announced,
            })
        })
    }
}
