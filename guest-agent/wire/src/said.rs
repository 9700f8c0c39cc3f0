//! What is said of a frame.

use std::fmt;

/// What a frame holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Nothing is said.
    Unknown = 0,
    /// Nothing: its content does not matter to the guest until it writes it.
    Free = 1,
    /// A piece of a file as it is on the disk.
    FileClean = 2,
    /// A piece of a file that is not on a disk, or not yet: also of tmpfs and shared memory.
    FileDirty = 3,
    /// Memory of a program.
    Anonymous = 4,
    /// The kernel's own.
    Kernel = 5,
}

/// When a frame was used last, in intervals of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Temperature {
    /// Nothing is said.
    Unknown = 0,
    /// In the last interval.
    Hot = 1,
    /// Not in the last interval, but not long before.
    Warm = 2,
    /// Not in the last three intervals.
    Cold = 3,
}

/// What is said of a frame: a byte. Of what is unknown or free nothing more is said.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Said(u8);

const HUGE: u8 = 1 << 5;
const SEVERAL: u8 = 1 << 6;

impl Said {
    /// Bits of a value.
    pub(crate) const BITS: u32 = 7;
    /// Values that there are: two kinds without more, four with everything.
    pub(crate) const VALUES: usize = 2 + 4 * 4 * 2 * 2;

    /// Nothing is said.
    pub const UNKNOWN: Self = Self(Kind::Unknown as u8);

    /// What is said of a frame of this kind.
    #[must_use]
    pub const fn new(kind: Kind) -> Self {
        Self(kind as u8)
    }

    /// With a temperature.
    #[must_use]
    pub fn with_temperature(self, temperature: Temperature) -> Self {
        self.if_used((self.0 & !0x18) | ((temperature as u8) << 3))
    }

    /// Part of a huge page, or not.
    #[must_use]
    pub fn with_huge(self, huge: bool) -> Self {
        self.if_used((self.0 & !HUGE) | (u8::from(huge) * HUGE))
    }

    /// Mapped by several page tables, or not.
    #[must_use]
    pub fn with_several(self, several: bool) -> Self {
        self.if_used((self.0 & !SEVERAL) | (u8::from(several) * SEVERAL))
    }

    fn if_used(self, bits: u8) -> Self {
        match self.kind() {
            Kind::Unknown | Kind::Free => self,
            _ => Self(bits),
        }
    }

    /// What the frame holds.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self.0 & 7 {
            1 => Kind::Free,
            2 => Kind::FileClean,
            3 => Kind::FileDirty,
            4 => Kind::Anonymous,
            5 => Kind::Kernel,
            _ => Kind::Unknown,
        }
    }

    /// When it was used last.
    #[must_use]
    pub fn temperature(self) -> Temperature {
        match (self.0 >> 3) & 3 {
            1 => Temperature::Hot,
            2 => Temperature::Warm,
            3 => Temperature::Cold,
            _ => Temperature::Unknown,
        }
    }

    /// Whether it is part of a huge page.
    #[must_use]
    pub fn is_huge(self) -> bool {
        self.0 & HUGE != 0
    }

    /// Whether several page tables map it.
    #[must_use]
    pub fn is_several(self) -> bool {
        self.0 & SEVERAL != 0
    }

    /// The byte.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// From a byte; `None` if no frame has it.
    #[must_use]
    pub fn from_bits(bits: u8) -> Option<Self> {
        match bits & 7 {
            0 | 1 if bits > 1 => None,
            6 | 7 => None,
            _ if bits >= 1 << Self::BITS => None,
            _ => Some(Self(bits)),
        }
    }
}

impl fmt::Debug for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind())?;
        if self.temperature() != Temperature::Unknown {
            write!(f, " {:?}", self.temperature())?;
        }
        f.write_str(if self.is_huge() { " huge" } else { "" })?;
        f.write_str(if self.is_several() { " several" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_values_as_there_are_said_to_be() {
        let values: Vec<Said> = (0..=u8::MAX).filter_map(Said::from_bits).collect();
        assert_eq!(values.len(), Said::VALUES);
        for value in values {
            let again = Said::new(value.kind())
                .with_temperature(value.temperature())
                .with_huge(value.is_huge())
                .with_several(value.is_several());
            assert_eq!(again, value);
        }
    }

    #[test]
    fn of_what_is_free_nothing_more_is_said() {
        let free = Said::new(Kind::Free);
        assert_eq!(
            free.with_temperature(Temperature::Hot)
                .with_huge(true)
                .with_several(true),
            free
        );
    }
}
