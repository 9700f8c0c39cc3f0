//! Which codecs there are.

use std::fmt;

/// A codec's name, which goes with what it packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// The lines that differ from a base.
    Overlay,
    /// LZ4 of the page alone.
    Lz4,
    /// zstd of the page alone.
    Zstd,
    /// LZ4 with a base as dictionary.
    Lz4Patch,
    /// zstd with a base as dictionary.
    ZstdPatch,
}

impl Kind {
    /// All of them, by number.
    pub const ALL: [Self; 5] = [
        Self::Overlay,
        Self::Lz4,
        Self::Zstd,
        Self::Lz4Patch,
        Self::ZstdPatch,
    ];

    /// Its number, from 0.
    #[must_use]
    pub fn number(self) -> usize {
        self as usize
    }

    /// Whether it packs against a base page.
    #[must_use]
    pub fn needs_base(self) -> bool {
        matches!(self, Self::Overlay | Self::Lz4Patch | Self::ZstdPatch)
    }

    /// Its name in reports and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Overlay => "overlay",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
            Self::Lz4Patch => "lz4-patch",
            Self::ZstdPatch => "zstd-patch",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    /// Those in a list.
    #[must_use]
    pub fn of(kinds: &[Kind]) -> Self {
        Self(kinds.iter().fold(0, |set, kind| set | 1 << kind.number()))
    }

    /// Every kind.
    #[must_use]
    pub fn all() -> Self {
        Self::of(&Kind::ALL)
    }

    /// Whether a kind is in it.
    #[must_use]
    pub fn contains(self, kind: Kind) -> bool {
        self.0 & 1 << kind.number() != 0
    }

    /// Its kinds, by number.
    pub fn iter(self) -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(move |kind| self.contains(*kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_in_the_order_of_their_numbers() {
        let numbers: Vec<usize> = Kind::ALL.iter().map(|kind| kind.number()).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_set_has_what_was_put_into_it() {
        let set = Kinds::of(&[Kind::Zstd, Kind::Overlay]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [Kind::Overlay, Kind::Zstd]);
        assert_eq!(Kinds::all().iter().count(), Kind::ALL.len());
        assert_eq!(Kinds::default().iter().count(), 0);
    }
}
