//! Epochs: who may still act on what it read from the index before a moment.
//!
//! A *member* here is a connection that has been given the index, and that can still tell. It enters with the current epoch (it cannot have
//! read anything older) and acknowledges later ones, never going back. A slot that left the index at epoch `e` is free when every
//! member has acknowledged `e`. A member whose socket broke leaves, since it can tell nothing any more, also if its process
//! lives. Pure state, no I/O.

/// Names a member: a connection's number, unique among the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct MemberId(pub(crate) u16);

/// A moment in the life of the index, advanced whenever entries leave it.
pub(crate) type Epoch = u64;

/// Why an acknowledgement is no possible one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EpochViolation {
    /// Nobody can have read it yet.
    #[error(
        "epoch {got} was reported, but the index is only at {current}: report what IndexReader::epoch returned"
    )]
    Future {
        /// Reported.
        got: u64,
        /// The newest there is.
        current: u64,
    },
    /// Lookups were reported out of order.
    #[error("epoch {got} was reported after {acknowledged}: send batches in the order of their lookups")]
    Backwards {
        /// Reported.
        got: u64,
        /// Reported earlier.
        acknowledged: u64,
    },
}

/// The members and what they have acknowledged.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Epochs {
    current: Epoch,
    members: Vec<(MemberId, Epoch)>,
}

impl Epochs {
    /// Starts at `current`, without members.
    pub(crate) fn new(current: Epoch) -> Self {
        Self {
            current,
            members: Vec::new(),
        }
    }

    pub(crate) fn current(&self) -> Epoch {
        self.current
    }

    /// Entries have left the index.
    pub(crate) fn advance(&mut self) -> Epoch {
        self.current += 1;
        self.current
    }

    /// A connection is given the index.
    pub(crate) fn join(&mut self, id: MemberId) {
        debug_assert!(self.acknowledged(id).is_none());
        self.members.push((id, self.current));
    }

    /// The member can tell nothing any more.
    pub(crate) fn leave(&mut self, id: MemberId) {
        self.members.retain(|(member, _)| *member != id);
    }

    /// The member reports the epoch it had read before the lookups whose outcome it has now told; zero says that
    /// it has more to tell and acknowledges nothing yet.
    pub(crate) fn acknowledge(&mut self, id: MemberId, got: Epoch) -> Result<(), EpochViolation> {
        let current = self.current;
        let Some((_, acknowledged)) = self.members.iter_mut().find(|(member, _)| *member == id) else {
            debug_assert!(false, "only members acknowledge");
            return Ok(());
        };
        if got == 0 {
            return Ok(());
        }
        if got > current {
            return Err(EpochViolation::Future { got, current });
        }
        if got < *acknowledged {
            return Err(EpochViolation::Backwards {
                got,
                acknowledged: *acknowledged,
            });
        }
        *acknowledged = got;
        Ok(())
    }

    /// Those who can tell.
    pub(crate) fn members(&self) -> impl Iterator<Item = MemberId> {
        self.members.iter().map(|(id, _)| *id)
    }

    /// What a member has acknowledged.
    pub(crate) fn acknowledged(&self, id: MemberId) -> Option<Epoch> {
        self.members
            .iter()
            .find(|(member, _)| *member == id)
            .map(|(_, epoch)| *epoch)
    }

    /// Every member has acknowledged this epoch.
    pub(crate) fn quiescent(&self) -> Epoch {
        self.members
            .iter()
            .map(|(_, epoch)| *epoch)
            .min()
            .unwrap_or(self.current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(1);
    const B: MemberId = MemberId(2);

    #[test]
    fn the_slowest_member_decides() {
        let mut epochs = Epochs::new(1);
        assert_eq!(epochs.quiescent(), 1);
        epochs.join(A);
        epochs.advance();
        epochs.join(B);
        assert_eq!(epochs.quiescent(), 1);
        epochs.acknowledge(A, 2).unwrap();
        assert_eq!(epochs.quiescent(), 2);
        epochs.advance();
        epochs.acknowledge(A, 3).unwrap();
        epochs.leave(B);
        assert_eq!(epochs.quiescent(), 3);
    }

    #[test]
    fn impossible_epochs_are_refused() {
        let mut epochs = Epochs::new(1);
        epochs.join(A);
        epochs.advance();
        assert_eq!(
            epochs.acknowledge(A, 3),
            Err(EpochViolation::Future { got: 3, current: 2 })
        );
        epochs.acknowledge(A, 2).unwrap();
        epochs.acknowledge(A, 0).unwrap();
        assert_eq!(epochs.acknowledged(A), Some(2));
        assert_eq!(
            epochs.acknowledge(A, 1),
            Err(EpochViolation::Backwards {
                got: 1,
                acknowledged: 2
            })
        );
    }
}
