//! The engines of this project's programs: what a program that runs the service passes to
//! [`DedupService::start_with`](vmm_dedup::DedupService::start_with). The engine library itself knows none of them.
//!
//! To add one: implement what it offers of [`vmm_dedup::compare`]'s traits in a crate of its own, and register it in
//! [`engines`].

mod config;

pub use config::{config_of, mistake, read_config};

use std::path::Path;
use vmm_dedup::Engines;
use vmm_dedup::compare::{Answer, Entry, Error};
use vmm_dedup_dsa::{DsaEngine, Options};
use vmm_dedup_pagecmp::PageCmpEngine;
use vmm_dedup_pageforge::driver::{InProcess, PageForgeEngine, PageForgeVerifier, VfioUser};

/// Modules of the PageForge in this process: on one thread, more would take as long.
const MODULES: usize = 1;

/// The CPU's engines, and the models of devices.
#[must_use]
pub fn engines() -> Engines {
    Engines::new()
        .register("pageforge", pageforge())
        .register("dsa", dsa())
        .register("dsa-model", dsa_model())
        .register("pagecmp", pagecmp(false))
        .register("pagecmp-hybrid", pagecmp(true))
}

/// PageForge (MICRO'17): a device behind a socket, or a model in this process.
fn pageforge() -> Entry {
    Entry::new()
        .tree_search(|socket| match socket {
            None => Ok(Box::new(PageForgeEngine::new(InProcess::new(MODULES)))),
            Some(socket) => Ok(Box::new(PageForgeEngine::new(connect(socket)?))),
        })
        .verify(|socket| match socket {
            None => Ok(Box::new(PageForgeVerifier::new(InProcess::new(MODULES))?)),
            Some(socket) => Ok(Box::new(PageForgeVerifier::new(connect(socket)?)?)),
        })
        .behind_socket()
}

fn connect(socket: &Path) -> Answer<VfioUser> {
    VfioUser::connect(socket).map_err(|error| Error::Device(error.to_string()))
}

/// Intel DSA: in the place of a socket stands the work queue of a device node, or a PCI device's folder for VFIO; without one,
/// all user queues.
fn dsa() -> Entry {
    let make = |node: Option<&Path>| DsaEngine::new(vmm_dedup_dsa::open(node)?, Options::default());
    Entry::new()
        .keys(move |node| Ok(Box::new(make(node)?)))
        .tree_search(move |node| Ok(Box::new(make(node)?)))
        .verify(move |node| Ok(Box::new(make(node)?)))
        .deltas(move |node| Ok(Box::new(make(node)?)))
        .behind_socket()
}

/// A model of it in this process.
fn dsa_model() -> Entry {
    let make = || {
        let queues = vmm_dedup_dsa::model().map_err(|error| Error::Device(error.to_string()))?;
        // It is asked however long it takes: the CPU would be sooner than a model by the CPU.
        let options = Options {
            only_if_sooner: false,
            ..Options::default()
        };
        DsaEngine::new(queues, options)
    };
    Entry::new()
        .keys(move |_| Ok(Box::new(make()?)))
        .tree_search(move |_| Ok(Box::new(make()?)))
        .verify(move |_| Ok(Box::new(make()?)))
        .deltas(move |_| Ok(Box::new(make()?)))
}

/// PageCmp: comparison in memory chips, as a model; `hybrid`: the first line of each comparison by the CPU.
fn pagecmp(hybrid: bool) -> Entry {
    Entry::new()
        .tree_search(move |_| Ok(Box::new(PageCmpEngine::new(hybrid))))
        .verify(move |_| Ok(Box::new(PageCmpEngine::new(hybrid))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup::compare::Work;

    #[test]
    fn every_name_makes_an_engine_of_what_it_offers() {
        let engines = engines();
        let searches: Vec<_> = engines
            .names(Work::TreeSearch)
            .filter(|name| *name != "dsa") // needs a device
            .map(|name| (name, engines.tree_search(name, None).expect("an engine").name()))
            .collect();
        let expected = [
            ("dsa-model", "dsa"),
            ("pagecmp", "pagecmp"),
            ("pagecmp-hybrid", "pagecmp-hybrid"),
            ("pageforge", "pageforge"),
            ("tree", "cpu"),
        ];
        assert_eq!(searches, expected);
        let verifiers: Vec<_> = engines
            .names(Work::Verify)
            .filter(|name| *name != "dsa")
            .map(|name| engines.verifier(name, None).expect("an engine").name())
            .collect();
        assert_eq!(
            verifiers,
            ["cpu", "dsa", "pagecmp", "pagecmp-hybrid", "pageforge"]
        );
    }

    #[test]
    fn a_device_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("device");
        for error in [
            engines().tree_search("pageforge", Some(&socket)).err(),
            engines().verifier("pageforge", Some(&socket)).err(),
            engines().verifier("dsa", Some(&socket)).err(),
            engines().keys("dsa", Some(&socket)).err(),
            engines().deltas("dsa", Some(&socket)).err(),
        ] {
            let error = error.expect("an error").to_string();
            assert!(error.contains(&*socket.to_string_lossy()), "{error}");
        }
    }
}
