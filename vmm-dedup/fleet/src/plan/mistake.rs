//! What is wrong in a fleet file, and where.

/// What is wrong in a file that is TOML.
#[derive(Debug)]
pub(super) struct Mistake<'a> {
    pub(super) place: Place<'a>,
    pub(super) text: String,
}

/// Where a mistake is.
#[derive(Debug)]
pub(super) enum Place<'a> {
    /// In what is missing.
    Unknown,
    /// In the `[[vm]]` with this number, at this key if it is known.
    Entry(usize, Option<&'static str>),
    /// At a key of tables, one in the other.
    Key(Vec<&'a str>),
}

impl<'a> Mistake<'a> {
    /// At a key of tables, one in the other.
    pub(super) fn at(keys: &[&'a str], text: String) -> Self {
        let place = Place::Key(keys.to_vec());
        Self { place, text }
    }
}
