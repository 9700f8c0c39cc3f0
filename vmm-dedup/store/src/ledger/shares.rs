//! How much of the store each user keeps.
//!
//! A slot that somebody references is on one user's account: that of the user whose VM made it, or, when none of his VMs references it any
//! more, of another one whose VM does. So no user's account has what others alone keep: who references what somebody else lets
//! go of has it on his own.
//!
//! # What a user may keep
//!
//! His share is an equal part of all slots for each user who has a VM here. Beyond it he gets new slots only while more than a quarter
//! of all are free ([`KEPT_FREE`]). So whoever comes first does not keep the others out, and a user alone may have all.
//!
//! In a store that shares securely a user's account has a slot for each of his references. Whether a page was on another
//! user's account already would show otherwise in when the store refuses the next.

use crate::ledger::chunks::Chunks;
use crate::ledger::epochs::MemberId;
use crate::ledger::references::References;
use std::collections::BTreeMap;
use vmm_dedup_protocol::Slot;

/// One part in so many of all slots is not for who has more than his share.
const KEPT_FREE: u32 = 4;

/// No user has this number: it means "none" to the kernel as well.
const NOBODY: u32 = u32::MAX;

/// What a user keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Account {
    members: usize,
    /// How many of his members reference each slot.
    holders: References,
    /// References of all his members.
    references: u64,
    /// Slots on his account.
    slots: u64,
    /// He was refused new slots, and that was said.
    told: bool,
}

/// All users' accounts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Shares {
    users: BTreeMap<u32, Account>,
    members: BTreeMap<MemberId, u32>,
    /// On whose account each slot is: the user's number, inverted, or 0.
    payers: Chunks<u32>,
}

impl Shares {
    /// A VM of a user comes.
    pub(crate) fn join(&mut self, id: MemberId, user: u32) {
        self.members.insert(id, user);
        self.users.entry(user).or_default().members += 1;
    }

    /// A VM has gone; it references nothing any more.
    pub(crate) fn leave(&mut self, id: MemberId) {
        let Some(user) = self.members.remove(&id) else {
            return;
        };
        let account = self.account(user);
        account.members -= 1;
        if account.members == 0 {
            debug_assert_eq!((account.references, account.slots), (0, 0));
            self.users.remove(&user);
        }
    }

    /// The references of a member to a slot were so many, and are so many now. `others`: somebody references the slot all the same.
    pub(crate) fn note(&mut self, id: MemberId, slot: Slot, before: u32, now: u32, others: bool) {
        let user = self.members[&id];
        let account = self.account(user);
        account.references = account.references + u64::from(now) - u64::from(before);
        match (before, now) {
            (0, 1..) => {
                let added = account.holders.add(slot, 1);
                debug_assert!(added.is_ok(), "there are fewer members");
                if self.payer(slot) == NOBODY {
                    self.set_payer(slot, user);
                }
            }
            (1.., 0) => {
                let taken = account.holders.sub(slot, 1);
                debug_assert!(taken.is_ok(), "the member held it");
                if account.holders.held(slot) == 0 && self.payer(slot) == user {
                    self.set_payer(slot, if others { self.holder(slot) } else { NOBODY });
                }
            }
            _ => {}
        }
    }

    /// New slots that a member's user may have, of all there are and those that are free.
    pub(crate) fn room(&self, id: MemberId, secure: bool, all: u32, free: u32) -> u32 {
        let users = u32::try_from(self.users.len()).unwrap_or(u32::MAX);
        let Some(account) = self.members.get(&id).and_then(|user| self.users.get(user)) else {
            return 0;
        };
        if users == 1 {
            return free;
        }
        let kept = if secure { account.references } else { account.slots };
        let of_share = u64::from(all / users).saturating_sub(kept);
        let of_share = u32::try_from(of_share).unwrap_or(u32::MAX);
        of_share.max(free.saturating_sub(all / KEPT_FREE)).min(free)
    }

    /// A member's user is refused new slots: who that is, how many users there are, and how many slots are on his account. `None`: it was
    /// said before.
    pub(crate) fn note_refused(&mut self, id: MemberId) -> Option<(u32, usize, u64)> {
        let (user, users) = (*self.members.get(&id)?, self.users.len());
        let account = self.account(user);
        (!std::mem::replace(&mut account.told, true)).then_some((user, users, account.slots))
    }

    /// A user whose members reference a slot.
    fn holder(&self, slot: Slot) -> u32 {
        let mut users = self.users.iter();
        users
            .find(|(_, account)| account.holders.held(slot) > 0)
            .map_or(NOBODY, |(user, _)| *user)
    }

    fn payer(&self, slot: Slot) -> u32 {
        !self.payers.get(slot)
    }

    fn set_payer(&mut self, slot: Slot, user: u32) {
        let before = self.payer(slot);
        if before != NOBODY {
            self.account(before).slots -= 1;
        }
        if user != NOBODY {
            self.account(user).slots += 1;
        }
        self.payers.set(slot, !user);
    }

    fn account(&mut self, user: u32) -> &mut Account {
        self.users.get_mut(&user).expect("members have users")
    }

    pub(crate) fn bytes(&self) -> usize {
        let accounts = self.users.values();
        self.payers.bytes() + accounts.map(|account| account.holders.bytes()).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const A: MemberId = MemberId(1);
    const B: MemberId = MemberId(2);

    fn slot(n: u32) -> Slot {
        Slot::try_new(n).unwrap()
    }

    fn two_users() -> Shares {
        let mut shares = Shares::default();
        shares.join(A, 10);
        shares.join(B, 20);
        shares
    }

    #[test]
    fn a_user_alone_may_have_all() {
        let mut shares = Shares::default();
        shares.join(A, 10);
        (0..90).for_each(|n| shares.note(A, slot(n), 0, 1, false));
        assert_eq!(shares.room(A, false, 100, 10), 10);
    }

    #[test]
    fn who_has_his_share_leaves_a_quarter_to_others() {
        let mut shares = two_users();
        (0..60).for_each(|n| shares.note(A, slot(n), 0, 1, false));
        assert_eq!(shares.room(A, false, 100, 40), 15);
        (60..75).for_each(|n| shares.note(A, slot(n), 0, 1, false));
        assert_eq!(shares.room(A, false, 100, 25), 0);
        assert_eq!(shares.room(B, false, 100, 25), 25);
        shares.leave(B);
        assert_eq!(shares.room(A, false, 100, 25), 25);
    }

    #[test]
    fn who_references_what_another_lets_go_of_has_it_on_his_account() {
        let mut shares = two_users();
        (0..40).for_each(|n| shares.note(A, slot(n), 0, 1, false));
        (0..40).for_each(|n| shares.note(B, slot(n), 0, 2, true));
        assert_eq!((shares.users[&10].slots, shares.users[&20].slots), (40, 0));
        (0..40).for_each(|n| shares.note(A, slot(n), 1, 0, true));
        assert_eq!((shares.users[&10].slots, shares.users[&20].slots), (0, 40));
        assert_eq!(shares.room(A, false, 100, 60), 50);
    }

    #[test]
    fn where_sharing_is_not_to_show_each_reference_counts() {
        let mut shares = two_users();
        (0..40).for_each(|n| shares.note(A, slot(n), 0, 1, false));
        (0..40).for_each(|n| shares.note(B, slot(n), 0, 1, true));
        assert_eq!(shares.room(A, true, 100, 20), 10);
        assert_eq!(shares.room(B, true, 100, 20), 10);
        assert_eq!(shares.room(B, false, 100, 20), 20);
    }

    proptest! {
        #[test]
        fn each_slot_that_somebody_references_is_on_one_account_of_who_does(
            steps in proptest::collection::vec((1u16..7, 0u32..5, 0u32..3), 0..200)
        ) {
            let user_of = |id: u16| u32::from(id % 3);
            let (mut shares, mut held) = (Shares::default(), BTreeMap::<(u16, u32), u32>::new());
            (1..7).for_each(|id| shares.join(MemberId(id), user_of(id)));
            for (id, n, now) in steps {
                let before = held.insert((id, n), now).unwrap_or(0);
                let others = held.iter().any(|((_, of), count)| *of == n && *count > 0);
                shares.note(MemberId(id), slot(n), before, now, others);
                for n in 0..5 {
                    let who = held.iter().filter(|((_, of), count)| *of == n && **count > 0);
                    let users: BTreeSet<u32> = who.map(|((id, _), _)| user_of(*id)).collect();
                    match shares.payer(slot(n)) {
                        NOBODY => prop_assert!(users.is_empty()),
                        payer => prop_assert!(users.contains(&payer)),
                    }
                }
                for user in 0..3 {
                    let theirs = held.iter().filter(|((id, _), _)| user_of(*id) == user);
                    prop_assert_eq!(shares.users[&user].references, theirs.map(|(_, n)| u64::from(*n)).sum::<u64>());
                    prop_assert_eq!(shares.users[&user].slots, (0..5).filter(|n| shares.payer(slot(*n)) == user).count() as u64);
                }
            }
        }
    }
}
