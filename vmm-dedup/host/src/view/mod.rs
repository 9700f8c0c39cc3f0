//! What all stores of this host, or the one that is named, say of themselves and their VMs.

mod glob;

use crate::account::{self, Trouble};
use crate::failure::Failure;
use crate::registry::{self, Known, Record};
use crate::runtime;
use crate::silence::{self, Silence};
use crate::store;
use crate::units::{count, natural_order};
pub use glob::matches;
use std::path::{Path, PathBuf};
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::name::MAX_NAME;
use vmm_dedup_protocol::observer::{Error, Observer, Vm};

/// Names the one store that commands ask, as `--store` does.
pub const VARIABLE: &str = "VMM_DEDUP_STORE";

/// Which stores to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The one at this socket.
    One(PathBuf),
    /// All that are listed on this host.
    All,
}

impl Selection {
    /// As an option says, or the variable [`VARIABLE`]; without them all.
    #[must_use]
    pub fn of(option: Option<&Path>) -> Self {
        let variable = || std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
        let named = option
            .map(Path::to_owned)
            .or_else(|| variable().map(PathBuf::from));
        named.map_or(Self::All, Self::One)
    }

    /// The stores that are meant.
    ///
    /// # Errors
    /// A [`Failure`] if none is known.
    pub fn stores(&self) -> Result<Vec<Known>, Failure> {
        match self {
            Self::One(socket) => Ok(vec![Known {
                record: registry::record(socket),
                socket: socket.clone(),
            }]),
            Self::All => Some(registry::stores())
                .filter(|listed| !listed.is_empty())
                .ok_or_else(none_listed),
        }
    }
}

fn none_listed() -> Failure {
    if let Ok(folder) = runtime::folder()
        && let Some(failure) = runtime::unreadable(&folder, "stores")
    {
        return failure;
    }
    let folders = runtime::folders();
    let folders: Vec<String> = folders
        .iter()
        .map(|folder| folder.display().to_string())
        .collect();
    let how = runtime::folder().map_or("as root".to_owned(), |folder| {
        let line = store::command_line(&folder.join(store::SOCKET_NAME), None);
        format!("with `{line}`")
    });
    Failure::advised(
        &format!("no store is listed in {}", folders.join(" or ")),
        ": ",
        &format!("start one {how}, or name its socket with --store"),
    )
}

/// One store.
#[derive(Debug)]
pub struct StoreView {
    /// Where it listens.
    pub socket: PathBuf,
    /// What it said of itself when it started, if it is listed.
    pub record: Option<Record>,
    /// What it says now, its VMs by name.
    pub account: Result<(StoreStats, Vec<Vm>), (Silence, Failure)>,
}

impl StoreView {
    /// Its trust domain, if that is known.
    #[must_use]
    pub fn domain(&self) -> Option<&str> {
        self.record.as_ref().map(|record| record.domain.as_str())
    }

    /// Its VMs; none if it says nothing.
    #[must_use]
    pub fn vms(&self) -> &[Vm] {
        self.account.as_ref().map_or(&[], |(_, vms)| vms)
    }

    /// A connection to ask it more.
    ///
    /// # Errors
    /// A [`Failure`] that says what is wrong with it.
    pub fn observer(&self) -> Result<Observer, Failure> {
        Observer::connect(&self.socket).map_err(|error| self.failure(error))
    }

    /// An error of this store, for the user.
    #[must_use]
    pub fn failure(&self, error: Error) -> Failure {
        silence::failure(&self.socket, self.record.as_ref().map(|record| record.pid), error)
    }

    /// What to do, if it answers and is full.
    #[must_use]
    pub fn if_full(&self) -> Option<String> {
        let (stats, _) = self.account.as_ref().ok()?;
        let room = self.record.as_ref();
        let room = room.and_then(|record| store::with_more_room(record, account::limit_bytes(stats)));
        let how = room.map_or(String::new(), |[end, start]| {
            format!(" (in a fleet file: max_mib): `{end}` ends it, then `{start}` starts it again; guests go on meanwhile")
        });
        account::is_full(stats).then(|| format!("raise its --max-mib{how}"))
    }

    fn of(known: Known) -> Self {
        let mut view = Self {
            socket: known.socket,
            record: known.record,
            account: Ok((StoreStats::default(), Vec::new())),
        };
        let asked = Observer::connect(&view.socket).and_then(|mut observer| observer.stats());
        view.account = match asked {
            Ok((stats, mut vms)) => {
                vms.sort_by(|a, b| natural_order(&a.name, &b.name));
                Ok((stats, vms))
            }
            Err(error) => Err((Silence::of(&error), view.failure(error))),
        };
        view
    }
}

/// All stores that were asked.
#[derive(Debug)]
pub struct HostView {
    /// By domain, then by socket.
    pub stores: Vec<StoreView>,
}

impl HostView {
    /// Asks the selected stores, all at a time.
    ///
    /// # Errors
    /// A [`Failure`] if there is none, or the only one says nothing.
    pub fn of(selection: &Selection) -> Result<Self, Failure> {
        let mut host = Self::even_silent(selection)?;
        if let [only] = &mut host.stores[..]
            && only.account.is_err()
        {
            let nothing = Ok((StoreStats::default(), Vec::new()));
            return match std::mem::replace(&mut only.account, nothing) {
                Err((_, failure)) => Err(failure),
                Ok(_) => Err(Failure::new("the store says nothing")),
            };
        }
        Ok(host)
    }

    /// Asks the selected stores, all at a time, and bears that none says anything.
    ///
    /// # Errors
    /// A [`Failure`] if there is none.
    pub fn even_silent(selection: &Selection) -> Result<Self, Failure> {
        let known = selection.stores()?;
        let mut stores: Vec<StoreView> = std::thread::scope(|scope| {
            let asked: Vec<_> = known
                .into_iter()
                .map(|known| scope.spawn(move || StoreView::of(known)))
                .collect();
            asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
        });
        stores.sort_by(|a, b| (a.domain(), &a.socket).cmp(&(b.domain(), &b.socket)));
        Ok(Self { stores })
    }

    /// The stores that say something, with what they say of themselves.
    pub fn accounts(&self) -> impl Iterator<Item = (&StoreView, &StoreStats)> {
        self.stores
            .iter()
            .filter_map(|store| store.account.as_ref().ok().map(|(stats, _)| (store, stats)))
    }

    /// All VMs with their stores.
    pub fn vms(&self) -> impl Iterator<Item = (&StoreView, &Vm)> {
        self.stores
            .iter()
            .flat_map(|store| store.vms().iter().map(move |vm| (store, vm)))
    }

    /// Net bytes saved on the host.
    #[must_use]
    pub fn saved_net(&self) -> i64 {
        let saved = self.accounts().map(|(_, stats)| account::saved_net(stats));
        saved.fold(0, i64::saturating_add)
    }

    /// How many stores have answered: `2 stores`, or `1 of 2 stores, the others do not answer`.
    #[must_use]
    pub fn answering(&self) -> String {
        let unheard = self.stores.len() - self.accounts().count();
        let all = count(self.stores.len(), "store", "stores");
        match (unheard, self.forbidden()) {
            (0, _) => all,
            (n, forbidden) => {
                let why = match forbidden {
                    0 => "the others do not answer".to_owned(),
                    all if all == n => "this user may not use the others".to_owned(),
                    some => format!("{} do not answer, {some} this user may not use", n - some),
                };
                format!("{} of {all}, {why}", self.stores.len() - n)
            }
        }
    }

    /// How many stores this user may not use.
    #[must_use]
    pub fn forbidden(&self) -> usize {
        let silences = self
            .stores
            .iter()
            .filter_map(|store| store.account.as_ref().err());
        silences
            .filter(|(silence, _)| *silence == Silence::NoAccess)
            .count()
    }

    /// Fails unless all is well: every store answers and has room, and no VM is stuck. One that is refused goes on as without dedup. `store_words`: how a
    /// command asks the same stores.
    ///
    /// # Errors
    /// One line with what is wrong.
    pub fn well(&self, store_words: &str) -> Result<(), Failure> {
        let mut wrong: Vec<String> = self.complete().err().iter().map(ToString::to_string).collect();
        let full = self.stores.iter().filter(|store| store.if_full().is_some());
        wrong.extend(full.map(|store| {
            format!(
                "the store at {} is full, and shares nothing more",
                store.socket.display()
            )
        }));
        let ill: Vec<(&str, Trouble)> = (self.vms())
            .filter_map(|(_, vm)| Some((vm.name.as_str(), account::trouble(vm)?)))
            .filter(|(_, trouble)| !matches!(trouble, Trouble::Refused(_)))
            .collect();
        for (what, frozen) in [("frozen", true), ("without a pass for long", false)] {
            let is_so = |trouble: &Trouble| matches!(trouble, Trouble::Frozen) == frozen;
            let names = ill.iter().filter(|(_, trouble)| is_so(trouble));
            let names: Vec<&str> = names.map(|(name, _)| *name).collect();
            if !names.is_empty() {
                let vms = count(names.len(), "VM is", "VMs are");
                let names = listed(names.into_iter().map(str::to_owned));
                wrong.push(format!("{vms} {what} ({names})"));
            }
        }
        if wrong.is_empty() {
            return Ok(());
        }
        let doctor = match ill.is_empty() {
            true => String::new(),
            false => format!(": `vmm-dedup doctor{store_words}` tells what to do"),
        };
        Err(Failure::new(format!("{}{doctor}", wrong.join("; "))))
    }

    /// Fails unless all stores have answered, in one line about those that have not.
    ///
    /// # Errors
    /// That line.
    pub fn complete(&self) -> Result<(), Failure> {
        let silent = self
            .stores
            .iter()
            .filter_map(|store| store.account.as_ref().err());
        let texts: Vec<String> = silent.map(|(_, failure)| failure.to_string()).collect();
        match texts.is_empty() {
            true => Ok(()),
            false => Err(Failure::new(texts.join("; "))),
        }
    }

    /// The VM that somebody means by a name or by NAME.PID, and its store.
    ///
    /// # Errors
    /// A [`Failure`] if there is none, or more than one; it names those there are, as they can be named.
    pub fn vm(&self, wanted: &str) -> Result<(&StoreView, &Vm), Failure> {
        let mut found: Vec<_> = self.vms().filter(|(_, vm)| vm.is_called(wanted)).collect();
        if let [(_, first)] = found[..]
            && first.name == wanted
        {
            // Its store gave others that announced the same name theirs.
            let others = self
                .vms()
                .filter(|(_, vm)| vm.pid != first.pid && announced(vm) == wanted);
            found.extend(others);
        }
        match found[..] {
            [found] => Ok(found),
            [] => Err(self.no_vm(wanted)),
            _ => {
                let which = found.iter().map(|(_, vm)| address(vm));
                Err(Failure::new(format!(
                    "{} VMs are called {wanted}: say which, there are {}",
                    found.len(),
                    listed(which)
                )))
            }
        }
    }

    /// How a command names this VM: as it is shown, or, where another is shown so too, as its store is told.
    #[must_use]
    pub fn name_of(&self, vm: &Vm) -> String {
        match self.vm(&vm.name) {
            Ok(_) => vm.name.clone(),
            Err(_) => address(vm),
        }
    }

    /// The VMs that a pattern with `*` and `?` matches, or the one that a name without them means.
    ///
    /// # Errors
    /// As [`Self::vm`].
    pub fn matching(&self, pattern: &str) -> Result<Vec<(&StoreView, &Vm)>, Failure> {
        if !pattern.contains(['*', '?']) {
            return self.vm(pattern).map(|found| vec![found]);
        }
        let found: Vec<_> = self.vms().filter(|(_, vm)| matches(pattern, &vm.name)).collect();
        match found.is_empty() {
            true => Err(self.no_vm(pattern)),
            false => Ok(found),
        }
    }

    fn no_vm(&self, wanted: &str) -> Failure {
        let names = || format!("there are {}", listed(self.vms().map(|(_, vm)| vm.name.clone())));
        let there = match (self.vms().next(), self.complete()) {
            (None, _) => self.nobody(),
            (Some(_), Ok(())) => names(),
            (Some(_), Err(why)) => format!("{}; {why}", names()),
        };
        Failure::new(format!("no VM is called {wanted}: {there}"))
    }

    /// What to say where no VM is connected; stores that say nothing may have some.
    #[must_use]
    pub fn nobody(&self) -> String {
        match self.complete() {
            Ok(()) => "no VM is connected".into(),
            Err(why) if self.accounts().next().is_none() => why.to_string(),
            Err(why) => format!("no VM is connected to the stores that answer; {why}"),
        }
    }
}

/// How a store is told which VM is meant, so that it is no other: NAME.PID, unless the store has made the name unique itself, or
/// there is no room.
#[must_use]
pub fn address(vm: &Vm) -> String {
    let pid = format!(".{}", vm.pid);
    let is_unique = vm.name.ends_with(&pid) || vm.name.contains(&format!("{pid}."));
    match is_unique || vm.name.len() + pid.len() > MAX_NAME {
        true => vm.name.clone(),
        false => format!("{}{pid}", vm.name),
    }
}

/// What a VM was called before its store made the name unique, if it did.
fn announced(vm: &Vm) -> &str {
    let pid = format!(".{}", vm.pid);
    let end = match vm.name.strip_suffix(&pid) {
        Some(name) => Some(name.len()),
        None => vm.name.find(&format!("{pid}.")),
    };
    &vm.name[..end.unwrap_or(vm.name.len())]
}

/// Names listed for somebody who asked for a VM that is not there.
const LISTED: usize = 8;

/// Some names for a message.
#[must_use]
pub fn listed(mut names: impl Iterator<Item = String>) -> String {
    let mut first: Vec<String> = names.by_ref().take(LISTED).collect();
    if names.next().is_some() {
        first.push("...".into());
    }
    first.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_protocol::stats::ServiceStats;

    fn vm(name: &str, pid: u64) -> Vm {
        Vm {
            name: name.into(),
            pid,
            reason: None,
            saved_net_bytes: 0,
            stats: ServiceStats::default(),
        }
    }

    fn host(stores: &[&[Vm]]) -> HostView {
        let store = |vms: &&[Vm]| StoreView {
            socket: "/s".into(),
            record: None,
            account: Ok((StoreStats::default(), vms.to_vec())),
        };
        HostView {
            stores: stores.iter().map(store).collect(),
        }
    }

    #[test]
    fn a_vm_is_found_in_any_store_and_two_of_one_name_are_told_apart() {
        let host = host(&[&[vm("web", 1), vm("db", 2)], &[vm("web", 3)]]);
        assert_eq!(host.vm("db").unwrap().1.pid, 2);
        assert_eq!(host.name_of(&vm("db", 2)), "db");
        assert_eq!(host.name_of(&vm("web", 3)), "web.3");
        assert_eq!(host.vm("web.3").unwrap().1.pid, 3);
        let error = host.vm("web").unwrap_err().to_string();
        assert_eq!(error, "2 VMs are called web: say which, there are web.1, web.3");
        let error = host.vm("mail").unwrap_err().to_string();
        assert_eq!(error, "no VM is called mail: there are web, db, web");
    }

    #[test]
    fn two_vms_that_announced_one_name_to_one_store_must_be_named_with_their_pids() {
        let two = host(&[&[vm("dup", 1), vm("dup.2", 2), vm("db", 3)]]);
        let error = two.vm("dup").unwrap_err().to_string();
        assert_eq!(error, "2 VMs are called dup: say which, there are dup.1, dup.2");
        assert_eq!(two.matching("dup").unwrap_err().to_string(), error);
        let named = |name| two.vm(name).unwrap().1.pid;
        assert_eq!(["dup.1", "dup.2", "db"].map(named), [1, 2, 3]);
        assert_eq!(two.matching("dup*").unwrap().len(), 2);
        assert_eq!(two.name_of(&vm("dup", 1)), "dup.1");
        // Of one process the numbers are equal: the first has its name, the others theirs.
        let one = host(&[&[vm("dup", 1), vm("dup.1.2", 1)]]);
        assert_eq!(one.vm("dup").unwrap().1.name, "dup");
        assert_eq!(one.vm("dup.1.2").unwrap().1.name, "dup.1.2");
    }

    #[test]
    fn a_store_is_told_which_vm_is_meant() {
        let long = "x".repeat(MAX_NAME);
        for (name, pid, expected) in [
            ("web", 12, "web.12"),
            ("web.12", 12, "web.12"),
            ("web.12.2", 12, "web.12.2"),
            (&long, 12, &*long),
        ] {
            assert_eq!(address(&vm(name, pid)), expected);
        }
    }

    #[test]
    fn patterns_match_some_and_those_that_match_none_are_named() {
        let host = host(&[&[vm("web-1", 1), vm("web-2", 2)], &[vm("db", 3)]]);
        let pids = |pattern: &str| -> Vec<u64> {
            host.matching(pattern)
                .unwrap()
                .iter()
                .map(|(_, vm)| vm.pid)
                .collect()
        };
        assert_eq!(pids("web-*"), [1, 2]);
        assert_eq!(pids("*"), [1, 2, 3]);
        assert_eq!(pids("db"), [3]);
        assert!(
            host.matching("mail*")
                .unwrap_err()
                .to_string()
                .contains("no VM is called mail*")
        );
    }

    #[test]
    fn a_store_that_says_nothing_fails_the_whole_but_hides_no_other() {
        let mut host = host(&[&[vm("web", 1)], &[]]);
        host.stores[1].account = Err((Silence::Hangs, Failure::new("it hangs")));
        assert_eq!(host.vms().count(), 1);
        assert_eq!(host.complete().unwrap_err().to_string(), "it hangs");
        assert!(
            host.vm("db")
                .unwrap_err()
                .to_string()
                .ends_with("there are web; it hangs")
        );
        // Where nobody is, the store that says nothing is named all the same.
        host.stores[0].account = Ok((StoreStats::default(), Vec::new()));
        assert_eq!(
            host.nobody(),
            "no VM is connected to the stores that answer; it hangs"
        );
        assert!(host.vm("db").unwrap_err().to_string().ends_with("it hangs"));
        host.stores.remove(0);
        assert_eq!(
            host.vm("db").unwrap_err().to_string(),
            "no VM is called db: it hangs"
        );
    }
}
