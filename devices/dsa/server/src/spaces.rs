//! The client's memory as the device sees it.

use std::sync::Arc;
use vmm_dedup_dsa_abi::Pasid;
use vmm_dedup_dsa_model::{Memory, Missing};
use vmm_dedup_vfio_user::DmaMemory;

/// Translates addresses of address spaces, as the client's IOMMU would.
pub trait Translate: Send + Sync + std::fmt::Debug {
    /// Where an address is in the memory that the client has mapped; `None` if the page is not there, or must not be
    /// written. `word` reads 8 bytes of the client's memory, for tables in it. It must not wait for the client, which may be
    /// waiting for the device.
    fn translate(
        &self,
        space: Pasid,
        address: u64,
        write: bool,
        word: &dyn Fn(u64) -> Option<u64>,
    ) -> Option<u64>;
}

/// The client's memory, with its address spaces.
#[derive(Debug)]
pub(crate) struct ClientMemory {
    pub(crate) dma: DmaMemory,
    spaces: Option<Arc<dyn Translate>>,
}

impl ClientMemory {
    pub(crate) fn new(spaces: Option<Arc<dyn Translate>>) -> Self {
        Self {
            dma: DmaMemory::default(),
            spaces,
        }
    }

    fn place(&self, space: Option<Pasid>, address: u64, write: bool) -> Result<u64, Missing> {
        let Some(space) = space else {
            return Ok(address);
        };
        let spaces = self.spaces.as_ref().ok_or(Missing)?;
        let word = |at: u64| {
            let mut bytes = [0; 8];
            self.dma.view().read(at, &mut bytes)?;
            Some(u64::from_le_bytes(bytes))
        };
        spaces.translate(space, address, write, &word).ok_or(Missing)
    }
}

impl Memory for ClientMemory {
    fn read(&self, space: Option<Pasid>, address: u64, into: &mut [u8]) -> Result<(), Missing> {
        let at = self.place(space, address, false)?;
        self.dma.view().read(at, into).ok_or(Missing)
    }

    fn write(&self, space: Option<Pasid>, address: u64, from: &[u8]) -> Result<(), Missing> {
        let at = self.place(space, address, true)?;
        self.dma.view().write(at, from).ok_or(Missing)
    }

    fn write_record(&self, space: Option<Pasid>, address: u64, record: &[u8; 32]) -> Result<(), Missing> {
        let at = self.place(space, address, true)?;
        let view = self.dma.view();
        // The word with the status comes last, in release order.
        let rest = view.write(at + 8, &record[8..]);
        rest.and_then(|()| view.write(at, &record[..8])).ok_or(Missing)
    }

    fn is_there(&self, space: Option<Pasid>, address: u64, write: bool) -> bool {
        self.place(space, address, write)
            .is_ok_and(|at| self.dma.view().is_there(at, write))
    }
}
