//! Who may do what, by the user that the kernel says a peer runs as.

use crate::requests::violation::Violation;
use std::collections::BTreeSet;
use vmm_dedup_protocol::peer::overflow_user;

/// Most users that are remembered to have been refused: who may make users of his own, as in a container, can have very many.
const MOST_REFUSED: usize = 1024;

/// The rights of users.
#[derive(Debug)]
pub(crate) struct Rights {
    /// The store's user.
    own: u32,
    /// Who may connect besides root and the store's user; empty: whoever the socket's permissions let in.
    join: BTreeSet<u32>,
    /// Users that were refused.
    refused: BTreeSet<u32>,
}

impl Rights {
    /// `join`: who may connect, as [`crate::Config::join_users`].
    pub(crate) fn new(join: &[u32]) -> Self {
        Self {
            own: rustix::process::geteuid().as_raw(),
            join: join.iter().copied().collect(),
            refused: BTreeSet::new(),
        }
    }

    /// Whether a user may connect. `again`, if not: the user was told before.
    pub(crate) fn may_join(&mut self, uid: u32) -> Result<(), Violation> {
        if self.join.is_empty() || self.join.contains(&uid) || self.may_operate(uid).is_ok() {
            return Ok(());
        }
        let again = self.refused.contains(&uid) || self.refused.len() >= MOST_REFUSED;
        if !again {
            self.refused.insert(uid);
        }
        Err(Violation::Stranger { uid, again })
    }

    /// Whether a user may change VMs and look at their pages; if not, why.
    pub(crate) fn may_operate(&self, uid: u32) -> Result<(), String> {
        let own = self.own;
        // Users whom the store's user namespace does not have are all the same number. They are not the store's user.
        if uid == 0 || (uid == own && uid != overflow_user()) {
            return Ok(());
        }
        if uid == overflow_user() {
            return Err(format!(
                "the store's user namespace does not have your user, so that it may not change or explain VMs: run the command as \
                 user {own} of that namespace, who runs the store"
            ));
        }
        Err(format!(
            "user {uid} may not change or explain VMs of this store: run the command as root, or as user {own}, who runs the store"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_lets_in_who_is_on_it_and_root_and_the_stores_user() {
        let mut rights = Rights::new(&[61_000]);
        let own = rustix::process::geteuid().as_raw();
        for uid in [61_000, 0, own] {
            rights.may_join(uid).unwrap();
        }
        for again in [false, true] {
            let refused = rights.may_join(61_001).unwrap_err();
            assert!(
                matches!(refused, Violation::Stranger { uid: 61_001, again: told } if told == again),
                "{refused:?}"
            );
        }
        assert!(rights.may_operate(61_000).is_err());
        Rights::new(&[]).may_join(61_001).unwrap();
    }

    #[test]
    fn only_so_many_who_were_refused_are_remembered() {
        let mut rights = Rights::new(&[61_000]);
        for uid in (100_000..).take(3 * MOST_REFUSED) {
            rights.may_join(uid).unwrap_err();
        }
        assert_eq!(rights.refused.len(), MOST_REFUSED);
    }

    #[test]
    fn users_whom_the_kernel_cannot_name_operate_nothing() {
        let rights = Rights {
            own: overflow_user(),
            ..Rights::new(&[])
        };
        assert!(rights.may_operate(overflow_user()).is_err());
    }
}
