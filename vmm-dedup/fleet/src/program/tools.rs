//! The programs of one fleet.

use super::lookup::{check_preloadable, library, of};
use crate::file::Vmm;
use crate::plan::Plan;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use vmm_dedup_host::Failure;

/// The programs that a fleet needs.
#[derive(Debug)]
pub(crate) struct Tools {
    programs: BTreeMap<Vmm, PathBuf>,
    library: Option<PathBuf>,
}

impl Tools {
    /// The program of a VMM that the plan has.
    pub(crate) fn program(&self, vmm: Vmm) -> &Path {
        &self.programs[&vmm]
    }

    /// What is preloaded into a VMM with dedup.
    pub(crate) fn library_for(&self, vmm: Vmm) -> Option<&Path> {
        self.library.as_deref().filter(|_| is_preloaded(vmm))
    }

    /// Finds the programs that a plan needs; fails if one is missing, or cannot take the library.
    pub(crate) fn find(plan: &Plan) -> Result<Self, Failure> {
        let mut tools = Self {
            programs: BTreeMap::new(),
            library: None,
        };
        for vmm in plan.vms.iter().map(|vm| vm.vmm).collect::<BTreeSet<_>>() {
            tools.programs.insert(vmm, of(vmm).map_err(Failure::missing)?);
        }
        let merging = plan.vms.iter().filter(|vm| vm.dedup.is_some()).map(|vm| vm.vmm);
        for vmm in merging.filter(|vmm| is_preloaded(*vmm)).collect::<BTreeSet<_>>() {
            tools.library = Some(library(plan.preload.as_deref()).map_err(Failure::missing)?);
            check_preloadable(tools.program(vmm)).map_err(Failure::new)?;
        }
        Ok(tools)
    }
}

/// The reference VMM has the engine built in.
fn is_preloaded(vmm: Vmm) -> bool {
    vmm != Vmm::Reference
}
