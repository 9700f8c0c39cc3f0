//! What an operation sees of memory, and how it ends.

use crate::dice::Dice;
use crate::memory::{Memory, Missing, PAGE};
use vmm_dedup_dsa_abi::{CompletionRecord, DeviceAddress, Fault, Pasid, Status};

pub(crate) const PAGE_BYTES: usize = 4096;

/// What stopped an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    address: u64,
    write: bool,
}

/// The memory of one descriptor.
pub(crate) struct Lens<'a> {
    pub(crate) memory: &'a dyn Memory,
    pub(crate) space: Option<Pasid>,
    pub(crate) dice: &'a mut Dice,
    /// Whether faults are waited for.
    pub(crate) blocks: bool,
}

impl Lens<'_> {
    /// Does an access, or has its page brought first.
    fn access(
        &mut self,
        address: u64,
        write: bool,
        mut access: impl FnMut(&dyn Memory, Option<Pasid>) -> Result<(), Missing>,
    ) -> Result<(), Stop> {
        let injected = !self.blocks && self.dice.happens(self.dice.faults.page_faults);
        let stop = Stop { address, write };
        if injected {
            return Err(stop);
        }
        let (memory, space) = (self.memory, self.space);
        match access(memory, space) {
            Ok(()) => Ok(()),
            Err(Missing) if self.blocks && memory.request(space, address, write) => {
                access(memory, space).map_err(|Missing| stop)
            }
            Err(Missing) => Err(stop),
        }
    }

    pub(crate) fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Stop> {
        self.access(address, false, |memory, space| memory.read(space, address, into))
    }

    pub(crate) fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Stop> {
        self.access(address, true, |memory, space| memory.write(space, address, from))
    }

    pub(crate) fn look(&mut self, address: u64, write: bool) -> Result<(), Stop> {
        self.access(address, write, |memory, space| {
            if memory.is_there(space, address, write) {
                Ok(())
            } else {
                Err(Missing)
            }
        })
    }

    /// Reads what may cross the end of a page.
    pub(crate) fn read_across<const N: usize>(&mut self, address: u64) -> Result<[u8; N], Stop> {
        let mut bytes = [0; N];
        let first = to_page_end(address).min(N);
        self.read(address, &mut bytes[..first])?;
        if first < N {
            self.read(address + first as u64, &mut bytes[first..])?;
        }
        Ok(bytes)
    }

    /// Writes what may cross the end of a page: all or nothing.
    pub(crate) fn write_across(&mut self, address: u64, bytes: &[u8]) -> Result<(), Stop> {
        let first = to_page_end(address).min(bytes.len());
        if first < bytes.len() {
            self.look(address, true)?;
            self.look(address + first as u64, true)?;
        }
        self.write(address, &bytes[..first])?;
        if first < bytes.len() {
            self.write(address + first as u64, &bytes[first..])?;
        }
        Ok(())
    }
}

/// Bytes from an address to the end of its page.
fn to_page_end(address: u64) -> usize {
    PAGE_BYTES - in_page(address)
}

#[allow(clippy::cast_possible_truncation)] // below 4096
pub(crate) fn in_page(address: u64) -> usize {
    (address % PAGE) as usize
}

/// How many bytes of an operation go in one piece from here on, so that no operand crosses a page's end.
pub(crate) fn piece(left: u32, operands: &[u64]) -> usize {
    let most = operands.iter().map(|at| to_page_end(*at)).min();
    most.unwrap_or(PAGE_BYTES).min(left as usize)
}

/// How an operation ended that was stopped.
pub(crate) fn stopped(stop: Stop, blocks: bool, completed: u32) -> CompletionRecord {
    let status = if blocks {
        Status::PageResponse
    } else {
        Status::PageFault
    };
    CompletionRecord::default().with_fault(
        status,
        Fault {
            address: DeviceAddress(stop.address),
            write: stop.write,
            completed,
        },
    )
}

pub(crate) fn done(result: u8, completed: u32) -> CompletionRecord {
    CompletionRecord::new(Status::Success).with_result(result, completed)
}

/// The length of a piece.
#[allow(clippy::cast_possible_truncation)] // at most a page
pub(crate) fn length(piece: usize) -> u32 {
    debug_assert!(piece <= PAGE_BYTES);
    piece as u32
}
