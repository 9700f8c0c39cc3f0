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
    /// The one completion record that is never written, counted from 1 on in the order of their making.
    pub loses: Option<u64>,
    /// Completion records that come later, by [`Self::late_ns`].
    pub late: u32,
    /// The one descriptor whose record comes later, by as much, counted from 1 on.
    pub delays: Option<u64>,
    /// How much later, ns.
    pub late_ns: u64,
    /// Results that are wrong: equal for different and the other way, another CRC.
    pub lies: u32,
    /// Descriptors that end as if the device were broken.
    pub hardware: u32,
    /// Pages that were written, and cannot be read back ([`flags::DESTINATION_READBACK`](vmm_dedup_dsa_abi::flags)).
    pub readback_faults: u32,
    /// Reading back what was written that fails as if the device were broken.
    pub readback_hardware: u32,
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
    records: u64,
}

impl Dice {
    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults,
            state: faults.seed ^ 0x9e37_79b9_7f4a_7c15,
            descriptors: 0,
            records: 0,
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

    /// Whether the record that is counted next comes late.
    pub(crate) fn delays(&mut self) -> bool {
        self.faults.delays == Some(self.records + 1) || self.happens(self.faults.late)
    }

    /// Counts a record; returns whether it is lost.
    pub(crate) fn loses(&mut self) -> bool {
        self.records += 1;
        self.faults.loses == Some(self.records) || self.happens(self.faults.lost)
    }

    /// Counts a descriptor; returns whether the device halts at it.
    pub(crate) fn halts(&mut self) -> bool {
        self.descriptors += 1;
        self.faults.halts_after == Some(self.descriptors)
    }
}
