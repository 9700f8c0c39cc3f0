//! Users and groups of this host, and doing something with the rights of one of them.

use nix::unistd;
use rustix::process::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use std::ffi::CString;
use std::io;

/// A user with all that its processes need to be its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// As it was named.
    pub name: String,
    /// The user's number.
    pub uid: u32,
    /// The group of its files.
    pub gid: u32,
    /// Where it lives, if that is known.
    pub home: Option<String>,
    /// All of its groups.
    groups: Vec<Gid>,
}

/// The number of a user, by name or number. A number need not be that of a user who is known.
///
/// # Errors
/// What is wrong, and what to do.
pub fn user(text: &str) -> Result<u32, String> {
    Ok(known(text)?.0)
}

/// The number of a group, by name or number. A number need not be that of a group which is known.
///
/// # Errors
/// What is wrong, and what to do.
pub fn group(text: &str) -> Result<u32, String> {
    if let Some(number) = number(text)? {
        return Ok(number);
    }
    match unistd::Group::from_name(text) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => Err(format!(
            "there is no group {text} on this host: make it (groupadd --system {text}), or give a number"
        )),
        Err(e) => Err(format!("cannot look up the group {text} ({e}): give a number")),
    }
}

/// A number as of a user or group; the largest one means nobody to the kernel.
fn number(text: &str) -> Result<Option<u32>, String> {
    if text.is_empty() || text.chars().any(|c| !c.is_ascii_digit()) {
        return Ok(None);
    }
    let number = text.parse().ok().filter(|number| *number != u32::MAX);
    number.map(Some).ok_or_else(|| {
        format!(
            "{text} is no number of a user or group: give 0 to {}",
            u32::MAX - 1
        )
    })
}

/// The number of a user, and what the host knows of it.
fn known(text: &str) -> Result<(u32, Option<unistd::User>), String> {
    let failed = |e: nix::Error| format!("cannot look up the user {text} ({e}): give a number");
    if let Some(number) = number(text)? {
        let found = unistd::User::from_uid(unistd::Uid::from_raw(number)).map_err(failed)?;
        return Ok((number, found));
    }
    match unistd::User::from_name(text).map_err(failed)? {
        Some(user) => Ok((user.uid.as_raw(), Some(user))),
        None => Err(format!(
            "there is no user {text} on this host: make it (useradd --system {text}), or give a number"
        )),
    }
}

impl Identity {
    /// A user by name or number, with its own groups and these. One that is only a number has a group of the same number.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    pub fn of(user: &str, groups: &[String]) -> Result<Self, String> {
        let (uid, found) = known(user)?;
        let mut all: Vec<u32> = groups.iter().map(|name| group(name)).collect::<Result<_, _>>()?;
        let (gid, home) = match &found {
            None => (uid, None),
            Some(found) => {
                let failed = |e: &dyn std::fmt::Display| format!("cannot look up the groups of {user}: {e}");
                let name = CString::new(found.name.as_str()).map_err(|e| failed(&e))?;
                let of_user = unistd::getgrouplist(&name, found.gid).map_err(|e| failed(&e))?;
                all.extend(of_user.into_iter().map(unistd::Gid::as_raw));
                (found.gid.as_raw(), Some(found.dir.to_string_lossy().into_owned()))
            }
        };
        all.push(gid);
        all.sort_unstable();
        all.dedup();
        Ok(Self {
            name: found.map_or_else(|| user.to_owned(), |found| found.name),
            uid,
            gid,
            home,
            groups: all.into_iter().map(Gid::from_raw).collect(),
        })
    }

    /// Gives the calling thread this user's rights for good: its groups, no capability, and none by any program that it will execute.
    /// Makes system calls only, so that a process may call it between fork and exec.
    ///
    /// # Errors
    /// Of the kernel, as where the process is not root and would be somebody else. The thread may have lost some rights then.
    pub fn assume(&self) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        if rustix::process::geteuid().is_root() {
            set_thread_groups(&self.groups)?;
            set_thread_res_gid(gid, gid, gid)?;
            for bit in 0..64 {
                let Some(capability) = CapabilitySet::from_bits(1 << bit) else {
                    continue;
                };
                match remove_capability_from_bounding_set(capability) {
                    // This kernel knows no more of them.
                    Err(rustix::io::Errno::INVAL) => break,
                    removed => removed?,
                }
            }
        }
        set_thread_res_uid(uid, uid, uid)?;
        clear_ambient_capability_set()?;
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, none)?;
        Ok(set_no_new_privs(true)?)
    }

    /// Does something with this user's rights, in a thread of its own.
    ///
    /// # Errors
    /// Why it cannot be done with these rights.
    pub fn act<T: Send>(&self, act: impl FnOnce() -> T + Send) -> io::Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| self.assume().map(|()| act()));
            let joined = thread.join();
            joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_understood() {
        assert_eq!((user("root"), user("0")), (Ok(0), Ok(0)));
        assert_eq!((group("root"), group("61000")), (Ok(0), Ok(61_000)));
        for (wrong, part) in [
            (user("no-such-user"), "useradd --system no-such-user"),
            (group("no-such-group"), "groupadd --system no-such-group"),
            (user("4294967295"), "give 0 to 4294967294"),
            (user("99999999999"), "give 0 to 4294967294"),
            (user(""), "there is no user "),
            (user("a\0b"), "there is no user "),
        ] {
            let text = wrong.unwrap_err();
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_number_that_is_nobodys_has_a_group_of_its_own_and_those_that_are_named() {
        let identity = Identity::of("61234", &["root".into(), "61000".into()]).unwrap();
        assert_eq!(
            (identity.uid, identity.gid, identity.home),
            (61_234, 61_234, None)
        );
        let groups: Vec<u32> = identity.groups.iter().map(|group| group.as_raw()).collect();
        assert_eq!(groups, [0, 61_000, 61_234]);
    }

    #[test]
    fn what_is_done_as_a_user_has_its_rights_and_no_capability() {
        let own = rustix::process::geteuid();
        let name = if own.is_root() {
            "61234".to_owned()
        } else {
            own.as_raw().to_string()
        };
        let identity = Identity::of(&name, &[]).unwrap();
        let status = identity
            .act(|| std::fs::read_to_string("/proc/thread-self/status").unwrap())
            .unwrap();
        let value = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_default()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(value("Uid:"), [name.as_str(); 4].join(" "));
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(value(set), "0000000000000000", "{set}");
        }
        assert_eq!(value("NoNewPrivs:"), "1");
        if !own.is_root() {
            crate::note!("SKIPPED: only root can become somebody else");
            return;
        }
        assert_eq!(
            (value("CapBnd:").as_str(), value("Groups:").as_str()),
            ("0000000000000000", "61234")
        );
        assert!(
            rustix::process::geteuid().is_root(),
            "other threads stay what they were"
        );
    }
}
