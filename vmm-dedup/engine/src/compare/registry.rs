//! Which engines a program has, by the names that settings use.

use super::{Answer, Cpu, Deltas, Error, KeyKind, Keys, TreeSearch, Verify};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use vmm_dedup_protocol::key::Salt;
use vmm_dedup_protocol::name::EngineName;

/// The CPU's name among verifiers: the default, and what takes the place of any other one.
pub(crate) const CPU: &str = "cpu";
/// The CPU's name among those that search the store's tree.
const TREE: &str = "tree";

/// What an engine can be asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// [`Keys`].
    Keys,
    /// [`Verify`].
    Verify,
    /// [`TreeSearch`].
    TreeSearch,
    /// [`Deltas`].
    Deltas,
}

impl std::fmt::Display for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Work::Keys => "makes keys",
            Work::Verify => "verifies",
            Work::TreeSearch => "searches",
            Work::Deltas => "makes deltas",
        })
    }
}

/// Makes an engine; with the socket of its device, if settings name one. It returns soon.
type Make<T> = Arc<dyn Fn(Option<&Path>) -> Answer<Box<T>> + Send + Sync>;

/// What one engine offers, and how it is made. It is made anew after it has failed.
#[derive(Clone, Default)]
pub struct Entry {
    keys: Option<Make<dyn Keys>>,
    verify: Option<Make<dyn Verify>>,
    tree_search: Option<Make<dyn TreeSearch>>,
    deltas: Option<Make<dyn Deltas>>,
    socket: bool,
}

impl Entry {
    /// Offers nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Offers keys.
    #[must_use]
    pub fn keys(
        mut self,
        make: impl Fn(Option<&Path>) -> Answer<Box<dyn Keys>> + Send + Sync + 'static,
    ) -> Self {
        self.keys = Some(Arc::new(make));
        self
    }

    /// Offers to verify.
    #[must_use]
    pub fn verify(
        mut self,
        make: impl Fn(Option<&Path>) -> Answer<Box<dyn Verify>> + Send + Sync + 'static,
    ) -> Self {
        self.verify = Some(Arc::new(make));
        self
    }

    /// Offers to search trees, which includes keys.
    #[must_use]
    pub fn tree_search(
        mut self,
        make: impl Fn(Option<&Path>) -> Answer<Box<dyn TreeSearch>> + Send + Sync + 'static,
    ) -> Self {
        self.tree_search = Some(Arc::new(make));
        self
    }

    /// Offers deltas.
    #[must_use]
    pub fn deltas(
        mut self,
        make: impl Fn(Option<&Path>) -> Answer<Box<dyn Deltas>> + Send + Sync + 'static,
    ) -> Self {
        self.deltas = Some(Arc::new(make));
        self
    }

    /// Its device can be behind a socket, which settings may name.
    #[must_use]
    pub fn behind_socket(mut self) -> Self {
        self.socket = true;
        self
    }

    fn offers(&self, work: Work) -> bool {
        match work {
            Work::Keys => self.keys.is_some() || self.tree_search.is_some(),
            Work::Verify => self.verify.is_some(),
            Work::TreeSearch => self.tree_search.is_some(),
            Work::Deltas => self.deltas.is_some(),
        }
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = [Work::Keys, Work::Verify, Work::TreeSearch, Work::Deltas];
        f.debug_list()
            .entries(all.into_iter().filter(|work| self.offers(*work)))
            .finish()
    }
}

/// A program's engines. Those that are not of this crate are registered by the program that links them.
#[derive(Clone, Debug)]
pub struct Engines {
    entries: BTreeMap<&'static str, Entry>,
}

impl Default for Engines {
    fn default() -> Self {
        Self::new()
    }
}

impl Engines {
    /// This CPU: `cpu` makes keys and deltas and verifies, `tree` searches.
    ///
    /// A service asks for no verifier of the name `cpu`: [`Verifier`](super::Verifier) has one of its own, whose type it knows, so that
    /// verifying costs what a bare loop does, and which takes over from one that failed while pages are away, where none can be made.
    /// The entry is for whoever asks engines by their names, and tells settings that there is one.
    #[must_use]
    pub fn new() -> Self {
        // Its keys tell only whether a page has changed, and are shown to nobody: they need no salt.
        let cpu = || Cpu::new(KeyKind::Lines(Salt(0)));
        let none = Self {
            entries: BTreeMap::new(),
        };
        let plain = Entry::new()
            .keys(move |_| Ok(Box::new(cpu())))
            .verify(move |_| Ok(Box::new(cpu())))
            .deltas(move |_| Ok(Box::new(cpu())));
        none.register(CPU, plain)
            .register(TREE, Entry::new().tree_search(move |_| Ok(Box::new(cpu()))))
    }

    /// Adds an engine by the name that settings and metrics are to have for it.
    ///
    /// # Panics
    /// If the name is taken, or none that metrics can show ([`EngineName::try_new`]): a mistake in the program.
    #[must_use]
    pub fn register(mut self, name: &'static str, entry: Entry) -> Self {
        assert!(
            EngineName::try_new(name).is_some(),
            "{name:?} cannot name an engine: use letters, digits and dashes, at most 32"
        );
        let before = self.entries.insert(name, entry);
        assert!(before.is_none(), "there are two engines named {name:?}");
        self
    }

    /// The names of those that do a work.
    pub fn names(&self, work: Work) -> impl Iterator<Item = &'static str> {
        let entries = self.entries.iter();
        entries.filter_map(move |(name, entry)| entry.offers(work).then_some(*name))
    }

    /// Whether an engine's device can be behind a socket.
    #[must_use]
    pub fn takes_socket(&self, name: &str) -> bool {
        self.entries.get(name).is_some_and(|entry| entry.socket)
    }

    /// Makes an engine for keys.
    ///
    /// # Errors
    /// If there is none of that name, or its device cannot be used.
    pub fn keys(&self, name: &str, socket: Option<&Path>) -> Answer<Box<dyn Keys>> {
        let entry = self.entries.get(name);
        let own = entry.and_then(|entry| entry.keys.as_ref());
        let searching = entry.and_then(|entry| entry.tree_search.as_ref());
        match (own, searching) {
            (Some(make), _) => make(socket),
            (None, Some(make)) => Ok(make(socket)?),
            (None, None) => Err(self.lacks(name, Work::Keys)),
        }
    }

    /// Makes an engine that verifies.
    ///
    /// # Errors
    /// As for [`Self::keys`].
    pub fn verifier(&self, name: &str, socket: Option<&Path>) -> Answer<Box<dyn Verify>> {
        let make = self.entries.get(name).and_then(|entry| entry.verify.as_ref());
        make.ok_or_else(|| self.lacks(name, Work::Verify))?(socket)
    }

    /// Makes an engine for deltas.
    ///
    /// # Errors
    /// As for [`Self::keys`].
    pub fn deltas(&self, name: &str, socket: Option<&Path>) -> Answer<Box<dyn Deltas>> {
        let make = self.entries.get(name).and_then(|entry| entry.deltas.as_ref());
        make.ok_or_else(|| self.lacks(name, Work::Deltas))?(socket)
    }

    /// Makes an engine that searches.
    ///
    /// # Errors
    /// As for [`Self::keys`].
    pub fn tree_search(&self, name: &str, socket: Option<&Path>) -> Answer<Box<dyn TreeSearch>> {
        let make = self
            .entries
            .get(name)
            .and_then(|entry| entry.tree_search.as_ref());
        make.ok_or_else(|| self.lacks(name, Work::TreeSearch))?(socket)
    }

    fn lacks(&self, name: &str, work: Work) -> Error {
        let offered = self.names(work).collect::<Vec<_>>().join(", ");
        Error::Device(format!(
            "this program has no {name:?} that {work}, only {offered}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Arena, PageId};

    fn names(engines: &Engines, work: Work) -> Vec<&'static str> {
        engines.names(work).collect()
    }

    #[test]
    fn the_cpu_does_everything() {
        let engines = Engines::new();
        assert_eq!(names(&engines, Work::Keys), ["cpu", "tree"]);
        assert_eq!(names(&engines, Work::Verify), ["cpu"]);
        assert_eq!(names(&engines, Work::TreeSearch), ["tree"]);
        let arena = Arena::new(1).unwrap();
        let keys = |name| engines.keys(name, None).unwrap().keys(&arena, &[PageId(0)]);
        assert_eq!(keys("cpu"), keys("tree"));
    }

    #[test]
    fn an_engine_is_found_by_its_name_and_by_what_it_offers() {
        let make = |_: Option<&Path>| Ok(Box::new(Cpu::new(KeyKind::Jhash2)) as Box<dyn Verify>);
        let engines = Engines::new().register("mine", Entry::new().verify(make).behind_socket());
        assert_eq!(names(&engines, Work::Verify), ["cpu", "mine"]);
        assert_eq!(engines.verifier("mine", None).unwrap().name(), "cpu-jhash2");
        assert!(engines.takes_socket("mine") && !engines.takes_socket("cpu"));
        for made in [
            engines.verifier("yours", None).map(|engine| engine.name()),
            engines.verifier("tree", None).map(|engine| engine.name()),
        ] {
            let error = made.unwrap_err().to_string();
            assert!(error.contains("that verifies, only cpu, mine"), "{error}");
        }
        let error = engines.keys("mine", None).err().unwrap().to_string();
        assert!(
            error.contains("\"mine\" that makes keys, only cpu, tree"),
            "{error}"
        );
    }

    #[test]
    #[should_panic(expected = "two engines named \"cpu\"")]
    fn a_name_is_given_once() {
        let _ = Engines::new().register("cpu", Entry::new());
    }

    #[test]
    #[should_panic(expected = "cannot name an engine")]
    fn a_name_can_be_a_label() {
        let _ = Engines::new().register("my engine", Entry::new());
    }
}
