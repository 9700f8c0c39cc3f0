//! A work queue, as the rest of the driver knows it.

use super::software::software_error;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use vmm_dedup_dsa_abi::registers::ResetKind;
use vmm_dedup_dsa_abi::{Descriptor, DeviceAddress, Opcode};
use vmm_dedup_protocol::PAGE_SIZE;

/// What a queue takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Descriptors that may be in flight: a dedicated queue loses those beyond.
    pub entries: usize,
    /// Members of a batch; 1 if it takes none.
    pub members: usize,
    /// Bytes of an operation.
    pub bytes: u64,
    /// Operations, a bit each.
    pub operations: [u64; 4],
    /// NUMA node of the device, if it is known.
    pub node: Option<u32>,
}

impl QueueLimits {
    /// Whether it does an operation.
    #[must_use]
    pub fn does(&self, opcode: Opcode) -> bool {
        let (word, bit) = opcode.capability();
        self.operations[word] >> bit & 1 != 0
    }

    /// Why this driver cannot use such a queue, and what to configure; `None` if it can.
    pub(crate) fn unfit(&self) -> Option<String> {
        let page = PAGE_SIZE as u64;
        if self.entries == 0 {
            return Some("it has no entries: give it some (wq-size, threshold)".to_owned());
        }
        if self.bytes < page {
            let most = self.bytes;
            return Some(format!(
                "an operation is of {most} bytes at most, and a page has {page}: raise it (max-transfer-size)"
            ));
        }
        let missing = [Opcode::Compare, Opcode::CrcGenerate]
            .into_iter()
            .find(|opcode| !self.does(*opcode))?;
        Some(format!("it does no {missing:?}: allow it (op_config)"))
    }
}

/// Why a queue is of no use now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// The device has halted, and [`WorkQueue::reset`] may help.
    #[error("the device has halted")]
    Halted(ResetKind),
    /// The device says what software did wrong.
    #[error("the device reports error {error:#x} at {address:#x}: {}", software_error(*error).0)]
    Software {
        /// The number: that of a completion status, or another.
        error: u8,
        /// Where a fault was.
        address: u64,
    },
    /// The device, or the way to it, is gone.
    #[error("{0}")]
    Gone(String),
}

/// A work queue, as the driver reaches it. One driver has it alone (a shared queue: its own portal of it).
///
/// Dropping it ends what is in flight: when that returns the device accesses no memory any more that it was given.
pub trait WorkQueue: Send {
    /// A name for messages, such as `wq0.1`.
    fn name(&self) -> &str;

    /// What it takes. It stays the same for the queue's life.
    fn limits(&self) -> QueueLimits;

    /// Whether the device uses this process's addresses. Else it reads what [`Self::map`] has given it, at addresses of
    /// the driver's choice.
    fn uses_process_addresses(&self) -> bool;

    /// Submits a descriptor. Whether the queue took it: if not, try again later.
    ///
    /// # Errors
    /// If the device cannot be reached.
    fn submit(&mut self, descriptor: &Descriptor) -> Result<bool, Trouble>;

    /// Waits a little, at most some microseconds, for the lowest byte of a record's first word to become non-zero.
    fn relax(&mut self, status: &AtomicU64);

    /// The interrupt that descriptors can ask for, which ends [`Self::nap`]; `None` if they cannot.
    fn vector(&self) -> Option<u16> {
        None
    }

    /// Sleeps for so long, or until the interrupt comes.
    fn nap(&mut self, most: Duration) {
        std::thread::sleep(most);
    }

    /// What is wrong with the device, if anything is; asked when an answer is late.
    fn trouble(&mut self) -> Option<Trouble>;

    /// Has the device drop what it has of this queue, which stays as it is. When that returns `true` the device has forgotten
    /// those descriptors; else only [`Self::reset`] helps.
    fn abort(&mut self) -> bool {
        false
    }

    /// Drops what is in flight and makes the queue work again. When it returns the device has forgotten all descriptors.
    ///
    /// # Errors
    /// If it stays broken.
    fn reset(&mut self) -> Result<(), Trouble>;

    /// Lets the device read pages of a file (`writable`: and write them) at an address, a multiple of the page size. The
    /// file cannot shrink.
    ///
    /// # Errors
    /// If the device cannot be given them.
    fn map(
        &mut self,
        at: DeviceAddress,
        bytes: usize,
        file: BorrowedFd<'_>,
        writable: bool,
    ) -> Result<(), Trouble>;

    /// Ends [`Self::map`] of the very same range.
    ///
    /// # Errors
    /// If the device cannot be told.
    fn unmap(&mut self, at: DeviceAddress, bytes: usize) -> Result<(), Trouble>;

    /// CPU time that a model in this process has taken on the caller's thread, ns.
    fn borrowed_cpu_ns(&self) -> u64 {
        0
    }
}
