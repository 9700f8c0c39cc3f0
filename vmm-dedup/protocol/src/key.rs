//! Keys: what pages are looked up by.
//!
//! The first key of a page covers four 64-byte lines, one in each KiB (PageForge, MICRO'17, section 3.3: the
//! hardware takes the ECC codes of one line per KiB): 256 bytes of memory traffic a page. Only pages whose line
//! key was seen before get a whole-page hash. Both are salted per trust domain, so that a guest of one domain
//! cannot prepare collisions for another.

use crate::sizes::PAGE_SIZE;
use twox_hash::{XxHash3_64, XxHash3_128};

/// 64-bit words of a page.
pub const PAGE_WORDS: usize = PAGE_SIZE / 8;

/// A page's content, copied out of wherever it lives.
pub type PageWords = [u64; PAGE_WORDS];

/// Word offsets of the four key lines, one in each KiB. They avoid a KiB's first line, where headers and
/// counters that are alike (or always changing) tend to sit.
const LINE_WORDS: [usize; 4] = [3 * 8, 128 + 9 * 8, 256 + 5 * 8, 384 + 12 * 8];

/// 64-bit words that [`line_words`] reads.
pub const KEY_WORDS: usize = 32;

/// The secret of a trust domain, chosen by its store.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Salt(pub u64);

impl std::fmt::Debug for Salt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Salt(..)")
    }
}

const KEY_BITS: u32 = 48;
const FULL_BIT: u64 = 1 << (KEY_BITS - 1);
const HASH_MASK: u64 = FULL_BIT - 1;

/// A 48-bit name for a page's content: 47 bits of hash and a bit that says of what, four lines or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u64);

impl Key {
    /// The key of four lines, see [`line_words`].
    pub fn of_lines(words: &[u64; KEY_WORDS], salt: Salt) -> Self {
        let bytes = zerocopy::IntoBytes::as_bytes(words);
        Self(XxHash3_64::oneshot_with_seed(salt.0, bytes) & HASH_MASK)
    }

    /// Parses a key that came from a peer; `None` if it has bits that no key has.
    pub fn try_new(raw: u64) -> Option<Self> {
        (raw >> KEY_BITS == 0).then_some(Self(raw))
    }

    /// The key's 48 bits.
    pub fn raw(self) -> u64 {
        self.0
    }

    /// Whether the key covers the whole page rather than four lines.
    pub fn is_full(self) -> bool {
        self.0 & FULL_BIT != 0
    }
}

/// 128-bit hash of a whole page (XXH3, salted).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageHash(pub u128);

impl PageHash {
    /// Hashes a page.
    pub fn of(page: &PageWords, salt: Salt) -> Self {
        Self::of_bytes(bytes_of(page), salt)
    }

    /// Hashes the bytes of a page.
    pub fn of_bytes(page: &[u8], salt: Salt) -> Self {
        debug_assert_eq!(page.len(), PAGE_SIZE);
        Self(XxHash3_128::oneshot_with_seed(salt.0, page))
    }

    /// The key under which the index keeps a page of this hash.
    pub fn key(self) -> Key {
        // The low 47 bits of the hash.
        #[allow(clippy::cast_possible_truncation)]
        Key((self.0 as u64 & HASH_MASK) | FULL_BIT)
    }
}

/// Reads the four key lines of a page through `load`, which gets word offsets 0..512.
#[inline]
pub fn line_words(mut load: impl FnMut(usize) -> u64) -> [u64; KEY_WORDS] {
    let mut words = [0; KEY_WORDS];
    for (line, start) in LINE_WORDS.into_iter().enumerate() {
        for i in 0..8 {
            words[line * 8 + i] = load(start + i);
        }
    }
    words
}

/// Byte offsets of the key lines in a page, for prefetching.
pub fn line_offsets() -> [usize; 4] {
    LINE_WORDS.map(|w| w * 8)
}

/// The bytes of a page that was copied out.
pub fn bytes_of(page: &PageWords) -> &[u8] {
    zerocopy::IntoBytes::as_bytes(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SALT: Salt = Salt(42);

    #[test]
    fn each_quarter_has_one_key_line() {
        let quarters: Vec<usize> = line_offsets().iter().map(|o| o / 1024).collect();
        assert_eq!(quarters, [0, 1, 2, 3]);
        assert!(line_offsets().iter().all(|o| o % 64 == 0));
    }

    #[test]
    fn line_key_depends_on_the_lines_only() {
        let mut page = [7u64; PAGE_WORDS];
        let before = Key::of_lines(&line_words(|i| page[i]), SALT);
        page[0] = 8;
        assert_eq!(before, Key::of_lines(&line_words(|i| page[i]), SALT));
        page[LINE_WORDS[2]] = 8;
        assert_ne!(before, Key::of_lines(&line_words(|i| page[i]), SALT));
    }

    #[test]
    fn the_two_kinds_of_keys_never_meet() {
        let page = [9u64; PAGE_WORDS];
        assert!(!Key::of_lines(&line_words(|i| page[i]), SALT).is_full());
        assert!(PageHash::of(&page, SALT).key().is_full());
    }

    #[test]
    fn salts_separate_domains() {
        let page = [9u64; PAGE_WORDS];
        assert_ne!(PageHash::of(&page, Salt(1)), PageHash::of(&page, Salt(2)));
    }

    #[test]
    fn keys_of_peers_are_checked() {
        assert!(Key::try_new(u64::MAX).is_none());
        assert!(Key::try_new((1 << 48) - 1).is_some());
    }
}
