//! What goes wrong on purpose.

/// What a model does that a good device does not, or not often. With the default it does nothing of it.
///
/// Rates are of 65,536.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Accesses to operands that fault although the page is there.
    pub page_faults: u32,
    /// Reads of a batch's list that do.
    pub list_faults: u32,
    /// Completion records that are never written.
    pub lost: u32,
    /// Completion records that come later, by [`Self::late_ns`].
    pub late: u32,
    /// How much later, ns.
    pub late_ns: u64,
    /// Results that are wrong: equal for different and the other way, another CRC.
    pub lies: u32,
    /// Descriptors that end as if the device were broken.
    pub hardware: u32,
    /// Submissions to shared queues that are turned away although there is room.
    pub retries: u32,
    /// Descriptors after which the device halts.
    pub halts_after: Option<u64>,
    /// Whether only a function level reset ends such a halt.
    pub halts_for_good: bool,
    /// Seed of all that is left to chance.
    pub seed: u64,
}

/// Decides by chance.
#[derive(Clone, Debug)]
pub(crate) struct Dice {
    pub(crate) faults: Faults,
    state: u64,
    descriptors: u64,
}

impl Dice {
    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults,
            state: faults.seed ^ 0x9e37_79b9_7f4a_7c15,
            descriptors: 0,
        }
    }

    /// Whether something happens that happens so often.
    pub(crate) fn happens(&mut self, rate: u32) -> bool {
        if rate == 0 {
            return false;
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed >> 48) < u64::from(rate)
    }

    /// Counts a descriptor; returns whether the device halts at it.
    pub(crate) fn halts(&mut self) -> bool {
        self.descriptors += 1;
        self.faults.halts_after == Some(self.descriptors)
    }
}
