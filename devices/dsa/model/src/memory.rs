//! Memory as the device sees it.

use std::sync::atomic::{AtomicU64, Ordering};
use vmm_dedup_dsa_abi::Pasid;

/// Bytes of the pages by which the device accesses memory.
pub const PAGE: u64 = 4096;

/// A page is not there, or must not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing;

/// Memory that the device accesses, through an IOMMU or not. No access crosses the end of a page ([`PAGE`]).
pub trait Memory {
    /// Reads.
    ///
    /// # Errors
    /// If the page cannot be read.
    fn read(&self, space: Option<Pasid>, address: u64, into: &mut [u8]) -> Result<(), Missing>;

    /// Writes.
    ///
    /// # Errors
    /// If the page cannot be written; nothing is then.
    fn write(&self, space: Option<Pasid>, address: u64, from: &[u8]) -> Result<(), Missing>;

    /// Writes a completion record, aligned to its 32 bytes: whoever reads its first byte with acquire order and finds it
    /// written finds all of it written.
    ///
    /// # Errors
    /// As [`Self::write`].
    fn write_record(&self, space: Option<Pasid>, address: u64, record: &[u8; 32]) -> Result<(), Missing>;

    /// Whether a page can be read, or written.
    fn is_there(&self, space: Option<Pasid>, address: u64, write: bool) -> bool;

    /// Asks for a page that is not there, for descriptors that block on faults. Returns whether it is there now.
    fn request(&self, space: Option<Pasid>, address: u64, write: bool) -> bool {
        self.is_there(space, address, write)
    }
}

/// Memory of this process that begins at an address of the device's, for models in this process and for tests. Pages can
/// be missing.
#[derive(Debug)]
pub struct Flat {
    first: u64,
    words: Vec<AtomicU64>,
    /// A word for each page: [`READABLE`] and [`WRITABLE`].
    rights: Vec<AtomicU64>,
}

/// A page's right: it can be read.
pub const READABLE: u64 = 1;
/// It can be written.
pub const WRITABLE: u64 = 2;

impl Flat {
    /// So many pages of zeros from an address on, a multiple of [`PAGE`].
    #[must_use]
    pub fn new(first: u64, pages: usize) -> Self {
        let words = |count: usize, value: u64| (0..count).map(|_| AtomicU64::new(value)).collect();
        Self {
            first,
            words: words(pages * 512, 0),
            rights: words(pages, READABLE | WRITABLE),
        }
    }

    /// Says what can be done to a page of this number from the first one on.
    pub fn set_rights(&self, page: usize, rights: u64) {
        self.rights[page].store(rights, Ordering::Release);
    }

    /// Its words.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    /// The offset of an access that the page allows.
    fn place(&self, address: u64, len: usize, right: u64) -> Result<usize, Missing> {
        let offset = address.checked_sub(self.first).ok_or(Missing)?;
        let page = usize::try_from(offset / PAGE).map_err(|_| Missing)?;
        let rights = self.rights.get(page).ok_or(Missing)?.load(Ordering::Acquire);
        debug_assert!(
            offset % PAGE + len as u64 <= PAGE,
            "an access crosses a page's end"
        );
        if rights & right == 0 {
            return Err(Missing);
        }
        usize::try_from(offset).map_err(|_| Missing)
    }

    fn store(&self, offset: usize, from: &[u8]) {
        let mut at = offset;
        let mut left = from;
        while !left.is_empty() {
            let (word, byte) = (&self.words[at / 8], at % 8);
            let (now, rest) = left.split_at(left.len().min(8 - byte));
            let mut bytes = word.load(Ordering::Relaxed).to_le_bytes();
            bytes[byte..byte + now.len()].copy_from_slice(now);
            word.store(u64::from_le_bytes(bytes), Ordering::Release);
            (at, left) = (at + now.len(), rest);
        }
    }
}

impl Memory for Flat {
    fn read(&self, _space: Option<Pasid>, address: u64, into: &mut [u8]) -> Result<(), Missing> {
        let offset = self.place(address, into.len(), READABLE)?;
        let mut at = offset;
        let mut left = into;
        while !left.is_empty() {
            let byte = at % 8;
            let len = left.len().min(8 - byte);
            let (now, rest) = left.split_at_mut(len);
            let bytes = self.words[at / 8].load(Ordering::Acquire).to_le_bytes();
            now.copy_from_slice(&bytes[byte..byte + len]);
            (at, left) = (at + len, rest);
        }
        Ok(())
    }

    fn write(&self, _space: Option<Pasid>, address: u64, from: &[u8]) -> Result<(), Missing> {
        let offset = self.place(address, from.len(), WRITABLE)?;
        self.store(offset, from);
        Ok(())
    }

    fn write_record(&self, _space: Option<Pasid>, address: u64, record: &[u8; 32]) -> Result<(), Missing> {
        let offset = self.place(address, record.len(), WRITABLE)?;
        // The word with the status comes last, in release order.
        self.store(offset + 8, &record[8..]);
        self.store(offset, &record[..8]);
        Ok(())
    }

    fn is_there(&self, _space: Option<Pasid>, address: u64, write: bool) -> bool {
        let right = if write { WRITABLE } else { READABLE };
        self.place(address, 1, right).is_ok()
    }

    /// Pages that are missing come when they are asked for, those that must not be written stay as they are.
    fn request(&self, space: Option<Pasid>, address: u64, write: bool) -> bool {
        let page = address.checked_sub(self.first).map(|offset| offset / PAGE);
        let rights = page.and_then(|page| self.rights.get(usize::try_from(page).ok()?));
        if let Some(rights) = rights {
            let _ = rights.compare_exchange(0, READABLE | WRITABLE, Ordering::AcqRel, Ordering::Acquire);
        }
        self.is_there(space, address, write)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_at_any_alignment() {
        let flat = Flat::new(0x10_0000, 2);
        for (at, len) in [(0u64, 8usize), (1, 1), (3, 17), (4090, 6), (5000, 100)] {
            let data: Vec<u8> = (1u8..).take(len).collect();
            flat.write(None, 0x10_0000 + at, &data).unwrap();
            let mut back = vec![0; len];
            flat.read(None, 0x10_0000 + at, &mut back).unwrap();
            assert_eq!(back, data, "{len} bytes at {at}");
        }
    }

    #[test]
    fn pages_have_rights_and_ends() {
        let flat = Flat::new(PAGE, 2);
        flat.set_rights(1, READABLE);
        let byte = &mut [0];
        assert_eq!(flat.read(None, 0, byte), Err(Missing));
        assert_eq!(flat.read(None, 3 * PAGE, byte), Err(Missing));
        assert_eq!(flat.read(None, 2 * PAGE, byte), Ok(()));
        assert_eq!(flat.write(None, 2 * PAGE, byte), Err(Missing));
        assert!(!flat.request(None, 2 * PAGE, true));
        flat.set_rights(1, 0);
        assert!(flat.request(None, 2 * PAGE, true));
    }
}
