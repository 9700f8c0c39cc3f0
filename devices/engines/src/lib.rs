//! The engines that search for a dedup service, by the names they have in its settings. The engine library knows them only
//! as [`Backend`]s; a program that runs the service links them by passing [`make`] to
//! [`DedupService::start_with`](vmm_dedup::DedupService::start_with).

use std::path::Path;
use vmm_dedup::compare::{Answer, Backend, Error};
use vmm_dedup::{Search, cpu_engines};
use vmm_dedup_pagecmp::PageCmpBackend;
use vmm_dedup_pageforge::driver::{InProcess, PageForgeBackend, VfioUser};

/// Modules of the PageForge in this process: on one thread, more would take as long.
const MODULES: usize = 1;

/// Makes an engine; `socket` is that of a PageForge in another process.
///
/// # Errors
/// If the device cannot be used.
pub fn make(search: Search, socket: Option<&Path>) -> Answer<Box<dyn Backend>> {
    match (search, socket) {
        (Search::Index | Search::Tree, _) => cpu_engines(search, socket),
        (Search::Pageforge, None) => Ok(Box::new(PageForgeBackend::new(InProcess::new(MODULES)))),
        (Search::Pageforge, Some(socket)) => {
            let port = VfioUser::connect(socket).map_err(|error| Error::Device(error.to_string()))?;
            Ok(Box::new(PageForgeBackend::new(port)))
        }
        (Search::Pagecmp, _) => Ok(Box::new(PageCmpBackend::new(false))),
        (Search::PagecmpHybrid, _) => Ok(Box::new(PageCmpBackend::new(true))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_search_has_its_engine() {
        let names = Search::ALL.map(|search| make(search, None).expect("an engine").name());
        assert_eq!(names, ["cpu", "cpu", "pageforge", "pagecmp", "pagecmp-hybrid"]);
    }

    #[test]
    fn a_device_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("device");
        let error = make(Search::Pageforge, Some(&socket)).err().expect("an error");
        assert!(error.to_string().contains(&*socket.to_string_lossy()), "{error}");
    }
}
