//! Tables of queues and groups, in BAR 0 where [`Tables`](crate::registers::Tables) says.

use crate::descriptor::Pasid;

/// Words of a queue's table (registers.h, `union wqcfg`). A device whose queues do not choose operations has the first 8.
pub const QUEUE_WORDS: usize = 16;

/// Bytes from one group's table to the next.
pub const GROUP_STRIDE: u64 = 64;

/// Where the engines stand in a group's table.
pub const GROUP_ENGINES: u64 = 32;
/// Where the flags do.
pub const GROUP_FLAGS: u64 = 40;

/// Whether several may submit to a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Several, by ENQCMD, which tells whether the queue took the descriptor.
    #[default]
    Shared,
    /// One, who counts what is in flight, by MOVDIR64B.
    Dedicated,
}

/// A queue's state, of which the device keeps account in its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum QueueState {
    /// It takes nothing.
    #[default]
    Disabled = 0,
    /// It takes descriptors.
    Enabled = 1,
    /// It is on its way to being disabled.
    Draining = 2,
}

/// A queue's table: sixteen words, of which the seventh is the device's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueConfig(pub [u32; QUEUE_WORDS]);

const _: () = assert!(size_of::<QueueConfig>() == 64);

impl QueueConfig {
    /// The word that the device keeps: occupancy and state.
    pub const STATE_WORD: usize = 6;
    const BLOCK_ON_FAULT: u32 = 1 << 1;
    const PASID_ENABLED: u32 = 1 << 28;
    const PRIVILEGED: u32 = 1 << 29;
    const MODE_SUPPORT: u32 = 1 << 29;

    /// A queue of so many entries, of which a shared one gives `threshold` to those with its limited portal.
    #[must_use]
    pub fn new(entries: u16, threshold: u16, mode: Mode, priority: u8) -> Self {
        let mut words = [0; QUEUE_WORDS];
        words[0] = entries.into();
        words[1] = threshold.into();
        words[2] = u32::from(mode == Mode::Dedicated) | u32::from(priority & 0xf) << 4;
        Self(words)
    }

    /// Takes transfers and batches of at most 2 to these powers.
    #[must_use]
    pub fn with_limits(mut self, transfer_shift: u8, batch_shift: u8) -> Self {
        self.0[3] = u32::from(transfer_shift & 0x1f) | u32::from(batch_shift & 0xf) << 5;
        self
    }

    /// Lets descriptors block on faults.
    #[must_use]
    pub fn with_block_on_fault(mut self) -> Self {
        self.0[2] |= Self::BLOCK_ON_FAULT;
        self
    }

    /// Uses an address space: a dedicated queue this one, a shared one those of its descriptors.
    #[must_use]
    pub fn with_pasid(mut self, pasid: Pasid) -> Self {
        self.0[2] = self.0[2] & !(0xf_ffff << 8) | pasid.number() << 8 | Self::PASID_ENABLED;
        self
    }

    /// Does these operations, a bit each.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // words are cut into halves
    pub fn with_operations(mut self, operations: [u64; 4]) -> Self {
        for (at, word) in operations.into_iter().enumerate() {
            self.0[8 + 2 * at] = word as u32;
            self.0[9 + 2 * at] = (word >> 32) as u32;
        }
        self
    }

    /// Entries.
    #[must_use]
    pub fn entries(&self) -> u16 {
        low_half(self.0[0])
    }

    /// Entries for those with the limited portal of a shared queue.
    #[must_use]
    pub fn threshold(&self) -> u16 {
        low_half(self.0[1])
    }

    /// Whether several may submit.
    #[must_use]
    pub fn mode(&self) -> Mode {
        if self.0[2] & 1 == 0 {
            Mode::Shared
        } else {
            Mode::Dedicated
        }
    }

    /// Whether descriptors may block on faults.
    #[must_use]
    pub fn block_on_fault(&self) -> bool {
        self.0[2] & Self::BLOCK_ON_FAULT != 0
    }

    /// Priority, 1 to 15, within the group.
    #[must_use]
    pub fn priority(&self) -> u8 {
        self.0[2].to_le_bytes()[0] >> 4
    }

    /// The address space, if it uses any.
    #[must_use]
    pub fn pasid(&self) -> Option<Pasid> {
        (self.0[2] & Self::PASID_ENABLED != 0).then(|| Pasid::from_low_bits(self.0[2] >> 8))
    }

    /// Whether a dedicated queue's descriptors are of the kernel.
    #[must_use]
    pub fn is_privileged(&self) -> bool {
        self.0[2] & Self::PRIVILEGED != 0
    }

    /// Transfers are of at most 2 to this power bytes.
    #[must_use]
    pub fn transfer_shift(&self) -> u8 {
        self.0[3].to_le_bytes()[0] & 0x1f
    }

    /// Batches are of at most 2 to this power descriptors.
    #[must_use]
    pub fn batch_shift(&self) -> u8 {
        (self.0[3] >> 5).to_le_bytes()[0] & 0xf
    }

    /// The operations that it does, a bit each.
    #[must_use]
    pub fn operations(&self) -> [u64; 4] {
        std::array::from_fn(|at| u64::from(self.0[8 + 2 * at]) | u64::from(self.0[9 + 2 * at]) << 32)
    }

    /// What the device keeps in the table.
    #[must_use]
    pub fn state_word(state: QueueState, occupancy: u16) -> u32 {
        u32::from(occupancy) | Self::MODE_SUPPORT | (state as u32) << 30
    }

    /// The queue's state.
    #[must_use]
    pub fn state(&self) -> QueueState {
        match self.0[Self::STATE_WORD] >> 30 {
            0 => QueueState::Disabled,
            1 => QueueState::Enabled,
            _ => QueueState::Draining,
        }
    }

    /// Entries in use.
    #[must_use]
    pub fn occupancy(&self) -> u16 {
        low_half(self.0[Self::STATE_WORD])
    }
}

/// A group: queues, and engines that do what comes out of them (registers.h, `struct grpcfg`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupConfig {
    /// The queues, a bit each.
    pub queues: [u64; 4],
    /// The engines, a bit each.
    pub engines: u64,
    /// Traffic classes and read buffers.
    pub flags: u64,
}

impl GroupConfig {
    /// A group of these queues (below 64) and engines, a bit each, with the traffic class 1 for all.
    #[must_use]
    pub fn new(queues: u64, engines: u64) -> Self {
        Self {
            queues: [queues, 0, 0, 0],
            engines,
            flags: 1 | 1 << 3,
        }
    }

    /// Read buffers that nobody else may use.
    #[must_use]
    pub fn reserved_buffers(&self) -> u8 {
        self.flags.to_le_bytes()[1]
    }

    /// Whether the group has nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queues == [0; 4] && self.engines == 0
    }
}

fn low_half(word: u32) -> u16 {
    let [low, high, ..] = word.to_le_bytes();
    u16::from_le_bytes([low, high])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_what_it_was_made_as() {
        let queue = QueueConfig::new(64, 48, Mode::Dedicated, 10)
            .with_limits(21, 10)
            .with_block_on_fault()
            .with_pasid(Pasid::from_low_bits(0xa_bcde))
            .with_operations([0x0000_007b_00bf_07ff, 0, 0, 5]);
        assert_eq!(
            (queue.entries(), queue.threshold(), queue.mode()),
            (64, 48, Mode::Dedicated)
        );
        assert_eq!(
            (queue.priority(), queue.transfer_shift(), queue.batch_shift()),
            (10, 21, 10)
        );
        assert_eq!(queue.pasid().map(Pasid::number), Some(0xa_bcde));
        assert!(queue.block_on_fault() && !queue.is_privileged());
        assert_eq!(queue.operations(), [0x0000_007b_00bf_07ff, 0, 0, 5]);
        // Linux, registers.h: mode, block on fault, priority, PASID and its enabling in the third word.
        assert_eq!(queue.0[2], 1 | 2 | 10 << 4 | 0xa_bcde << 8 | 1 << 28);
        assert_eq!(queue.0[3], 21 | 10 << 5);
    }

    #[test]
    fn the_devices_word_has_occupancy_and_state() {
        let mut queue = QueueConfig::default();
        queue.0[QueueConfig::STATE_WORD] = QueueConfig::state_word(QueueState::Enabled, 77);
        assert_eq!((queue.state(), queue.occupancy()), (QueueState::Enabled, 77));
    }

    #[test]
    fn a_group_tells_its_buffers() {
        let mut group = GroupConfig::new(3, 1);
        group.flags |= 12 << 8;
        assert_eq!((group.reserved_buffers(), group.is_empty()), (12, false));
        assert!(GroupConfig::default().is_empty());
    }
}
