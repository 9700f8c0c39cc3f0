//! Descriptors from the pieces in which they come: a VMM hands a store of 64 bytes on in several writes.

use std::collections::BTreeMap;
use vmm_dedup_dsa_abi::portal::PLACE;

const PLACE_BYTES: u64 = PLACE as u64;

/// Descriptors of which something is missing yet, by the place that they are written to.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    /// Their bytes, and a bit for each that has come.
    open: BTreeMap<u64, ([u8; PLACE], u64)>,
}

impl Pieces {
    /// Takes a write to BAR 2, and tells of each descriptor that is whole, with its offset. A write anew of what came before
    /// begins anew.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8], mut whole: impl FnMut(u64, &[u8; PLACE])) {
        let mut at = offset;
        let mut left = data;
        while !left.is_empty() {
            let (place, first) = (
                at - at % PLACE_BYTES,
                usize::try_from(at % PLACE_BYTES).unwrap_or(0),
            );
            let (piece, rest) = left.split_at(left.len().min(PLACE - first));
            let (bytes, there) = self.open.entry(place).or_insert(([0; PLACE], 0));
            let mask = if piece.len() == PLACE {
                u64::MAX
            } else {
                ((1 << piece.len()) - 1) << first
            };
            if *there & mask != 0 {
                *there = 0;
            }
            bytes[first..first + piece.len()].copy_from_slice(piece);
            *there |= mask;
            if *there == u64::MAX {
                let descriptor = *bytes;
                self.open.remove(&place);
                whole(place, &descriptor);
            }
            let Some(next) = at.checked_add(piece.len() as u64) else {
                return;
            };
            (at, left) = (next, rest);
        }
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.open.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(pieces: &mut Pieces, offset: u64, data: &[u8]) -> Vec<(u64, [u8; PLACE])> {
        let mut all = Vec::new();
        pieces.write(offset, data, |at, bytes| all.push((at, *bytes)));
        all
    }

    #[test]
    fn eight_words_make_a_descriptor_and_places_do_not_mix() {
        let mut pieces = Pieces::default();
        let bytes: [u8; PLACE] = std::array::from_fn(|at| u8::try_from(at).unwrap());
        for at in (0..56).step_by(8) {
            assert!(written(&mut pieces, 0x1040 + at as u64, &bytes[at..at + 8]).is_empty());
            assert!(written(&mut pieces, 0x80 + at as u64, &[1; 8]).is_empty());
        }
        assert_eq!(written(&mut pieces, 0x1040 + 56, &bytes[56..]), [(0x1040, bytes)]);
        assert_eq!(written(&mut pieces, 0x80 + 56, &[1; 8]), [(0x80, [1; PLACE])]);
        assert_eq!(written(&mut pieces, 0x40, &[2; 2 * PLACE]).len(), 2);
        assert!(pieces.open.is_empty());
    }

    #[test]
    fn what_is_written_twice_begins_anew() {
        let mut pieces = Pieces::default();
        assert!(written(&mut pieces, 0, &[1; 32]).is_empty());
        assert!(written(&mut pieces, 0, &[2; 8]).is_empty());
        assert!(written(&mut pieces, 32, &[2; 32]).is_empty());
        assert_eq!(written(&mut pieces, 8, &[2; 24]), [(0, [2; PLACE])]);
    }
}
