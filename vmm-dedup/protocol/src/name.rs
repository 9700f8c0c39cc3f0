//! Names: what they may be, and VMs' and engines' as they travel.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Longest VM name in bytes.
pub const MAX_NAME: usize = 64;

/// What a VM's name may be. A command takes it for a name and not for an option, whoever pastes it.
pub const NAME_RULE: &str = "it must be 1 to 64 letters, digits and any of -_.:/, the first no dash";

/// Whether it may be a VM's name.
pub fn is_name(text: &str) -> bool {
    !text.is_empty() && Name::new(text).text() == text
}

/// What the name of a fleet, of its VMs and of a trust domain may be: a name that can be a file's as well.
pub const FILE_NAME_RULE: &str =
    "it must be 1 to 64 letters, digits and any of -_., the first a letter or digit";

/// Whether it may be the name of a fleet, of a VM of it or of a trust domain.
pub fn is_file_name(text: &str) -> bool {
    let first = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    first && is_name(text) && !text.contains([':', '/'])
}

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

    /// The name, with everything but letters, digits and `-_.:/`, and a dash at its beginning, replaced, so that it is safe in logs,
    /// in labels and as a command's argument.
    pub fn text(&self) -> String {
        let mut text = plain(&self.0);
        if text.starts_with('-') {
            text.replace_range(..1, "_");
        }
        text
    }
}

/// Longest name of an engine in bytes.
pub const MAX_ENGINE_NAME: usize = 32;

/// The name of an engine that compares pages: letters, digits and dashes, padded with zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct EngineName([u8; MAX_ENGINE_NAME]);

impl EngineName {
    /// A name; `None` if it is empty, too long, or has other characters.
    pub fn try_new(text: &str) -> Option<Self> {
        let good = |c: u8| c.is_ascii_alphanumeric() || c == b'-';
        let mut bytes = [0; MAX_ENGINE_NAME];
        bytes.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        (!text.is_empty() && text.bytes().all(good)).then_some(Self(bytes))
    }

    /// The name, made safe as [`Name::text`] is; `unknown` for who said none.
    pub fn text(&self) -> String {
        match plain(&self.0) {
            none if none.is_empty() => "unknown".to_owned(),
            name => name,
        }
    }
}

/// What comes before the first zero, with everything replaced that is not safe in logs and labels.
fn plain(padded: &[u8]) -> String {
    let end = padded.iter().position(|b| *b == 0).unwrap_or(padded.len());
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/".contains(c);
    String::from_utf8_lossy(&padded[..end])
        .chars()
        .map(|c| if plain(c) { c } else { '_' })
        .collect()
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
        assert_eq!(Name::new("--all").text(), "_-all");
    }

    #[test]
    fn what_may_be_a_name_is_shown_as_it_is() {
        let long = "x".repeat(MAX_NAME);
        for good in ["a", "_a", ".a", "/a", "web-1_2.3:4/5", &long] {
            assert!(is_name(good) && Name::new(good).text() == good, "{good}");
        }
        let longer = "x".repeat(MAX_NAME + 1);
        for bad in ["", "-", "-a", "--all", "a b", "ä", "a\0", &longer] {
            assert!(!is_name(bad) && !is_file_name(bad), "{bad}");
        }
        for good in ["a", "0", "web-1_2.3", &long] {
            assert!(is_file_name(good), "{good}");
        }
        for bad in ["a/b", "a:b", "..", ".a", "_a"] {
            assert!(is_name(bad) && !is_file_name(bad), "{bad}");
        }
    }

    #[test]
    fn engines_have_plain_names_and_peers_may_say_anything() {
        assert_eq!(EngineName::try_new("cpu-2").unwrap().text(), "cpu-2");
        for bad in ["", "a b", "a\"", "ä", &"a".repeat(33)] {
            assert_eq!(EngineName::try_new(bad), None, "{bad}");
        }
        assert!(EngineName::try_new(&"a".repeat(32)).is_some());
        assert_eq!(EngineName::default().text(), "unknown");
        let hostile = EngineName::read_from_bytes(&[b'"'; MAX_ENGINE_NAME]).unwrap();
        assert_eq!(hostile.text(), "_".repeat(MAX_ENGINE_NAME));
    }
}
