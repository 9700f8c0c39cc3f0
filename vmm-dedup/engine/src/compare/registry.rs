//! Who looks for the slot that a page equals: the settings for it, and how engines that are not of this crate come in.

use crate::compare::{Answer, Backend, CpuBackend, Error, KeyKind};
use serde::{Deserialize, Serialize};
use std::path::Path;
use vmm_dedup_protocol::key::Salt;

/// What looks for the slot that a page equals. All but the hash index walk the store's tree of slots in the order of
/// their content, so they need a store that keeps one (`vmm-dedup store --ordered`); from any other, and whenever an
/// engine fails, the hash index is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Search {
    /// The store's hash index: nothing is compared before a page is taken.
    #[default]
    Index,
    /// The tree, by this CPU.
    Tree,
    /// The tree, by a PageForge (MICRO'17): a device behind a socket, or a model in this process.
    Pageforge,
    /// The tree, compared in memory chips by a model of PageCmp.
    Pagecmp,
    /// The same, the first line of each comparison by the CPU.
    PagecmpHybrid,
}

impl Search {
    /// All of them.
    pub const ALL: [Search; 5] = [
        Search::Index,
        Search::Tree,
        Search::Pageforge,
        Search::Pagecmp,
        Search::PagecmpHybrid,
    ];

    /// Its name in configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Search::Index => "index",
            Search::Tree => "tree",
            Search::Pageforge => "pageforge",
            Search::Pagecmp => "pagecmp",
            Search::PagecmpHybrid => "pagecmp-hybrid",
        }
    }
}

impl std::fmt::Display for Search {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Search {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = || Search::ALL.map(Search::name).join(", ");
        Search::ALL
            .into_iter()
            .find(|search| search.name() == name)
            .ok_or_else(|| format!("nothing searches by {name:?}; choose one of {}", names()))
    }
}

/// Makes the engine for a search other than [`Search::Index`]; the path is the socket of a device, if one was named.
/// Called again when an engine has failed, and for each new store. It must return soon.
pub type MakeEngine = fn(Search, Option<&Path>) -> Answer<Box<dyn Backend>>;

/// The engines of this crate: the CPU alone. A program that links the devices' models passes a function of its own
/// to [`crate::DedupService::start_with`].
///
/// # Errors
/// For engines that are elsewhere.
pub fn cpu_engines(search: Search, _socket: Option<&Path>) -> Answer<Box<dyn Backend>> {
    match search {
        // Its keys tell only whether a page has changed, and are shown to nobody: they need no salt.
        Search::Index | Search::Tree => Ok(Box::new(CpuBackend::new(KeyKind::Lines(Salt(0))))),
        other => Err(Error::Device(format!("this program has no {other}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for search in Search::ALL {
            assert_eq!(search.to_string().parse(), Ok(search));
        }
        let error = "hash".parse::<Search>().unwrap_err();
        assert!(error.contains("pagecmp-hybrid"), "{error}");
    }
}
