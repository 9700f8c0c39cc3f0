//! A VM's name as it travels.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Longest VM name in bytes.
pub const MAX_NAME: usize = 64;

/// A VM's name: UTF-8, padded with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Name([u8; MAX_NAME]);

impl Name {
    /// A name, cut at [`MAX_NAME`] bytes.
    pub fn new(text: &str) -> Self {
        let mut bytes = [0; MAX_NAME];
        let text = cut(text, MAX_NAME);
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Self(bytes)
    }

    /// The name, with everything but letters, digits and `-_.:/` replaced, so that it is safe in logs and labels.
    pub fn text(&self) -> String {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(MAX_NAME);
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/".contains(c);
        String::from_utf8_lossy(&self.0[..end])
            .chars()
            .map(|c| if plain(c) { c } else { '_' })
            .collect()
    }
}

/// As much of a text as fits so many bytes.
pub(crate) fn cut(text: &str, max: usize) -> &str {
    let mut len = text.len().min(max);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    &text[..len]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_made_safe() {
        assert_eq!(Name::new("vm 1\"\n{}").text(), "vm_1____");
        assert_eq!(Name::new(&"ä".repeat(60)).text().len(), MAX_NAME / 2);
    }
}
