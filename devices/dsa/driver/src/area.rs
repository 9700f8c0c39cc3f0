//! Memory that driver and device share: lists of descriptors and completion records.

use crate::way::WorkQueue;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use vmm_dedup_dsa_abi::{CompletionRecord, Descriptor, DeviceAddress};
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::mapping::{Mapping, staging_memfd};

/// Shared memory, whose parts are named by offsets.
#[derive(Debug)]
pub(crate) struct Area {
    map: Mapping,
    /// Its first byte, as the device addresses it.
    at: DeviceAddress,
}

impl Area {
    /// So many bytes of zeros, a multiple of pages, which the device may write. It has been touched.
    pub(crate) fn new(bytes: usize, queue: &mut dyn WorkQueue, space: &mut Addresses) -> io::Result<Self> {
        let (file, map) = staging_memfd(bytes)?;
        map.populate(0, bytes / PAGE_SIZE)?;
        let at = if queue.uses_process_addresses() {
            DeviceAddress(map.address() as u64)
        } else {
            let at = space.take(bytes as u64).ok_or(io::ErrorKind::OutOfMemory)?;
            queue
                .map(at, bytes, file.as_fd(), true)
                .map_err(io::Error::other)?;
            at
        };
        Ok(Self { map, at })
    }

    /// The device's address of an offset.
    pub(crate) fn address(&self, offset: usize) -> DeviceAddress {
        DeviceAddress(self.at.0 + offset as u64)
    }

    /// The word of a record in which its status is.
    pub(crate) fn status(&self, record: usize) -> &AtomicU64 {
        &self.map.words()[record / 8]
    }

    /// Makes a record one that was not written.
    pub(crate) fn clear(&self, record: usize) {
        self.status(record).store(0, Ordering::Release);
    }

    /// The record, if it was written.
    pub(crate) fn record(&self, record: usize) -> Option<CompletionRecord> {
        let words = &self.map.words()[record / 8..record / 8 + 4];
        // Acquire: the device writes the status last, or all at once.
        let first = words[0].load(Ordering::Acquire);
        if first & 0xff == 0 {
            return None;
        }
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&first.to_le_bytes());
        for (to, word) in bytes[8..].chunks_exact_mut(8).zip(&words[1..]) {
            to.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        Some(CompletionRecord::from_bytes(bytes))
    }

    /// Writes a descriptor, which the device reads once it has been told.
    pub(crate) fn write_descriptor(&self, offset: usize, descriptor: &Descriptor) {
        let words = &self.map.words()[offset / 8..offset / 8 + 8];
        let bytes = descriptor.to_bytes();
        for (word, bytes) in words.iter().zip(bytes.chunks_exact(8)) {
            let value = bytes.try_into().map_or(0, u64::from_le_bytes);
            word.store(value, Ordering::Release);
        }
    }
}

/// Addresses that the driver has given away, for devices that do not use the process's.
///
/// They begin at 4 GiB, above what interrupt messages use, and end at 512 GiB, which every IOMMU can translate.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    /// Bytes by first address.
    taken: BTreeMap<u64, u64>,
}

impl Addresses {
    const FIRST: u64 = 1 << 32;
    const END: u64 = 1 << 39;

    /// Takes so many bytes, where there is room first.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<DeviceAddress> {
        let mut at = Self::FIRST;
        for (start, len) in &self.taken {
            if start - at >= bytes {
                break;
            }
            at = start + len;
        }
        let fits = at.checked_add(bytes).is_some_and(|end| end <= Self::END);
        fits.then(|| {
            self.taken.insert(at, bytes);
            DeviceAddress(at)
        })
    }

    /// Gives back what was taken from this address on.
    pub(crate) fn give_back(&mut self, at: DeviceAddress) {
        self.taken.remove(&at.0);
    }

    /// Whether an address was given away.
    pub(crate) fn has(&self, address: u64) -> bool {
        let before = self.taken.range(..=address).next_back();
        before.is_some_and(|(start, len)| address - start < *len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_given_once_and_come_back() {
        let mut addresses = Addresses::default();
        let [a, b, c] = [0x1000, 0x3000, 0x1000].map(|bytes| addresses.take(bytes).unwrap());
        assert_eq!((a.0, b.0 - a.0, c.0 - a.0), (1 << 32, 0x1000, 0x4000));
        addresses.give_back(b);
        assert!(addresses.has(a.0 + 0xfff) && !addresses.has(b.0) && addresses.has(c.0));
        assert_eq!(
            [0x4000, 0x2000].map(|bytes| addresses.take(bytes).unwrap().0 - a.0),
            [0x5000, 0x1000]
        );
        assert_eq!(addresses.take(1 << 39), None);
    }
}
