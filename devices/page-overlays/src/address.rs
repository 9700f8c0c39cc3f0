//! Addresses (sections 3.2 and 4.1): virtual, and those by which caches know lines.
//!
//! The address space of the caches is the physical one, widened: the highest bit tells whether an address is an overlay's.
//! An overlay address is that bit, 15 bits of the process and 48 bits of the virtual address (figure 5). So a virtual page
//! has one overlay page, nothing is looked up to find it, and no two virtual pages share one.

use crate::sizes::{LINE_BYTES, LINES, PAGE_BYTES, index, number};

const OVERLAY: u64 = 1 << 63;
const VIRTUAL_BITS: u32 = 48;
const PID_BITS: u32 = 15;
const VPN_BITS: u32 = VIRTUAL_BITS - PAGE_BYTES.trailing_zeros();

const _: () = assert!(PID_BITS + VIRTUAL_BITS == 63);

/// What cannot be an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// A process number of more than 15 bits.
    #[error("process {0} has no overlays: process numbers have 15 bits (figure 5)")]
    Pid(u16),
    /// A virtual address of more than 48 bits.
    #[error("virtual address {0:#x} has more than 48 bits")]
    Virtual(u64),
}

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pid(u16);

impl Pid {
    /// A process number.
    ///
    /// # Errors
    /// [`AddressError::Pid`] if it has more than 15 bits.
    pub const fn try_new(pid: u16) -> Result<Self, AddressError> {
        if pid >> PID_BITS == 0 {
            Ok(Self(pid))
        } else {
            Err(AddressError::Pid(pid))
        }
    }

    /// The number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// A virtual page of a process. That is its overlay page number (OPN) as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page(u64);

impl Page {
    /// The page of a process that holds a virtual address.
    ///
    /// # Errors
    /// [`AddressError::Virtual`] if the address has more than 48 bits.
    pub fn of(pid: Pid, address: u64) -> Result<Self, AddressError> {
        if address >> VIRTUAL_BITS != 0 {
            return Err(AddressError::Virtual(address));
        }
        Ok(Self(
            (u64::from(pid.0) << VPN_BITS) | (address / number(PAGE_BYTES)),
        ))
    }

    /// The number: 15 bits of the process, 36 of the page.
    pub const fn number(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// The page's virtual address.
    pub fn address(self) -> u64 {
        (self.0 & ((1 << VPN_BITS) - 1)) * number(PAGE_BYTES)
    }

    /// The page at the same virtual address in another process.
    pub(crate) fn in_process(self, pid: Pid) -> Self {
        Self((u64::from(pid.0) << VPN_BITS) | (self.0 & ((1 << VPN_BITS) - 1)))
    }

    /// The first and the last page that a process can have.
    pub(crate) fn all_of(pid: Pid) -> std::ops::RangeInclusive<Self> {
        Self(u64::from(pid.0) << VPN_BITS)..=Self((u64::from(pid.0) << VPN_BITS) | ((1 << VPN_BITS) - 1))
    }
}

/// The address by which caches know a line: of main memory, or of an overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LineAddress(u64);

impl LineAddress {
    /// Line `line` (below 64) of a page of main memory.
    pub(crate) fn physical(frame: u64, line: usize) -> Self {
        debug_assert!(line < LINES);
        Self(frame * number(PAGE_BYTES) + number(line * LINE_BYTES))
    }

    /// Line `line` (below 64) of a page's overlay.
    pub(crate) fn overlay(page: Page, line: usize) -> Self {
        debug_assert!(line < LINES);
        Self(OVERLAY | (page.0 * number(PAGE_BYTES) + number(line * LINE_BYTES)))
    }

    /// The address in bytes, with the overlay bit.
    pub const fn get(self) -> u64 {
        self.0
    }

    pub(crate) fn from_raw(address: u64) -> Self {
        debug_assert!(address.is_multiple_of(number(LINE_BYTES)));
        Self(address)
    }

    /// The overlay page and the line in it, if it is an overlay's.
    pub(crate) fn in_overlay(self) -> Option<(Page, usize)> {
        let line = index(self.0 / number(LINE_BYTES)) % LINES;
        (self.0 & OVERLAY != 0).then(|| (Page((self.0 & !OVERLAY) / number(PAGE_BYTES)), line))
    }

    /// The line `lines` further on, if it is in the same address space.
    pub(crate) fn offset(self, lines: i64) -> Option<Self> {
        let moved = self.0.checked_add_signed(lines * 64)?;
        (moved & OVERLAY == self.0 & OVERLAY).then_some(Self(moved))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlay_address_is_bit_process_and_virtual_address() {
        let pid = Pid::try_new(0x7fff).unwrap();
        let page = Page::of(pid, 0xffff_ffff_f123).unwrap();
        let line = LineAddress::overlay(page, 4);
        assert_eq!(line.get(), 0xffff_ffff_ffff_f100);
        assert_eq!(line.in_overlay(), Some((page, 4)));
        assert_eq!(page.address(), 0xffff_ffff_f000);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert_eq!(Pid::try_new(0x8000), Err(AddressError::Pid(0x8000)));
        let pid = Pid::try_new(1).unwrap();
        assert_eq!(Page::of(pid, 1 << 48), Err(AddressError::Virtual(1 << 48)));
    }

    #[test]
    fn physical_addresses_have_no_overlay() {
        assert_eq!(LineAddress::physical(7, 3).in_overlay(), None);
        assert_eq!(LineAddress::physical(0, 0).offset(-1), None);
    }
}
