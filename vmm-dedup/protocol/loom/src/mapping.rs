//! A shared mapping, played by memory of this process.

use crate::sync::AtomicU64;
use std::fmt;
use std::sync::Arc;

/// Words that several threads see. A clone is another mapping of the same file.
#[derive(Clone)]
pub struct Mapping(Arc<[AtomicU64]>);

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mapping").field(&self.0.len()).finish()
    }
}

impl Mapping {
    /// A fresh file of so many words.
    pub fn zeroed(words: usize) -> Self {
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    /// All words.
    pub fn words(&self) -> &[AtomicU64] {
        &self.0
    }

    /// Bytes of the file.
    pub fn len(&self) -> usize {
        self.0.len() * 8
    }

    /// Whether the file has no words.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
