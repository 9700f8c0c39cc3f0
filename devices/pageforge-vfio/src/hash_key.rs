//! The ECC-based hash key (section 3.3 of the paper).

use crate::error::Error;
pub use crate::sizes::LINES_PER_SECTION;

/// Lines whose ECC codes make a key: one in each KiB of a page.
pub const KEY_LINES: usize = 4;

/// A 32-bit hash key: four minikeys, that of the page's first KiB in the low byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HashKey(u32);

impl HashKey {
    /// Joins the minikeys, the 8 low bits of each line's ECC code, in page order.
    pub fn of_minikeys(minikeys: [u8; KEY_LINES]) -> Self {
        Self(u32::from_le_bytes(minikeys))
    }

    /// The key of these bits; all are keys.
    pub fn of_raw(bits: u32) -> Self {
        Self(bits)
    }

    /// The key's bits.
    pub fn raw(self) -> u32 {
        self.0
    }
}

/// Which line of each KiB makes the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EccOffsets([u8; KEY_LINES]);

impl EccOffsets {
    /// Line numbers within their KiB.
    ///
    /// # Errors
    /// [`Error::Offset`] if one is not below [`LINES_PER_SECTION`].
    pub fn try_new(lines: [u8; KEY_LINES]) -> Result<Self, Error> {
        match lines.into_iter().find(|line| *line >= LINES_PER_SECTION) {
            Some(line) => Err(Error::Offset(line)),
            None => Ok(Self(lines)),
        }
    }

    /// Numbers of the lines in a page.
    pub fn lines(self) -> [usize; KEY_LINES] {
        let mut lines = [0; KEY_LINES];
        for (section, line) in self.0.into_iter().enumerate() {
            lines[section] = section * usize::from(LINES_PER_SECTION) + usize::from(line);
        }
        lines
    }
}

/// The lines that the engine's own keys are made of, which avoid the first of each KiB, where headers tend to be alike.
impl Default for EccOffsets {
    fn default() -> Self {
        Self([3, 9, 5, 12])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minikeys_keep_page_order() {
        assert_eq!(HashKey::of_minikeys([1, 2, 3, 4]).raw(), 0x0403_0201);
    }

    #[test]
    fn each_section_gives_one_line() {
        let offsets = EccOffsets::try_new([3, 9, 5, 15]).unwrap();
        assert_eq!(offsets.lines(), [3, 25, 37, 63]);
    }

    #[test]
    fn lines_outside_a_section_are_refused() {
        assert_eq!(EccOffsets::try_new([0, 0, 16, 0]), Err(Error::Offset(16)));
    }
}
