//! The memory controller's error-correcting code, of which the hash keys are made (section 6.2 of the paper).
//!
//! A (72,64) SECDED code: the (127,120) Hamming code cut to its first 64 data bits, and a parity bit over all. In a
//! Hamming code the bits are numbered from 1, powers of two are check bits, and the check bits spell the exclusive or
//! of the numbers of all data bits that are set. So 64 data bits have the numbers 3, 5, 6, 7, 9 ... 71, and 7 check
//! bits suffice; the eighth bit makes the parity of the 72 even.

use crate::memory::Line;

/// The code of one 64-bit word: bits 0-6 are the check bits, bit 7 is the parity.
///
/// The code is linear: the code of an exclusive or is the exclusive or of the codes.
pub(crate) fn word_code(word: u64) -> u8 {
    let bytes = word.to_le_bytes();
    let codes = BYTE_CODES
        .iter()
        .zip(bytes)
        .map(|(codes, byte)| codes[usize::from(byte)]);
    codes.fold(0, |sum, code| sum ^ code)
}

/// The 8 bytes of code that memory keeps for a 64-byte line: one for each word, that of the first word lowest.
pub(crate) fn line_code(line: &Line) -> u64 {
    u64::from_le_bytes(line.map(word_code))
}

/// Codes of each value of each byte of a word.
static BYTE_CODES: [[u8; 256]; 8] = byte_codes();

const fn byte_codes() -> [[u8; 256]; 8] {
    let mut codes = [[0; 256]; 8];
    let mut number = 0u8; // of a bit in the Hamming code
    let mut bit = 0;
    while bit < 64 {
        number += 1;
        if number.is_power_of_two() {
            continue;
        }
        // A set data bit is one more set bit in the codeword, and its number's bits are flipped check bits.
        let parity = (1 + number.count_ones() % 2) % 2;
        let code = number | if parity == 1 { 0x80 } else { 0 };
        let mut value = 0;
        while value < 256 {
            if value >> (bit % 8) & 1 == 1 {
                codes[bit / 8][value] ^= code;
            }
            value += 1;
        }
        bit += 1;
    }
    codes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a decoder finds.
    #[derive(Debug, PartialEq, Eq)]
    enum Decoded {
        Word(u64),
        TwoErrors,
    }

    /// The number that each data bit has in the Hamming code.
    fn numbers() -> Vec<u8> {
        (3..=71u8).filter(|n| !n.is_power_of_two()).collect()
    }

    /// A decoder from the code's definition, sharing nothing with the encoder's tables.
    fn decode(word: u64, code: u8) -> Decoded {
        let set = |bit: usize| word >> bit & 1 == 1;
        let numbers = numbers();
        let sum = (0..64)
            .filter(|bit| set(*bit))
            .fold(0, |sum, bit| sum ^ numbers[bit]);
        let syndrome = sum ^ (code & 0x7f);
        let odd = (word.count_ones() + code.count_ones()) % 2 == 1;
        match (syndrome, odd) {
            (0, _) => Decoded::Word(word), // right, or only the parity bit is wrong
            (_, false) => Decoded::TwoErrors,
            (wrong, true) => match numbers.iter().position(|n| *n == wrong) {
                Some(bit) => Decoded::Word(word ^ 1 << bit),
                None => Decoded::Word(word), // a check bit is wrong
            },
        }
    }

    fn flip(word: u64, code: u8, bit: u32) -> (u64, u8) {
        if bit < 64 {
            (word ^ 1 << bit, code)
        } else {
            (word, code ^ 1 << (bit - 64))
        }
    }

    #[test]
    fn zero_has_the_code_zero_and_the_lowest_bits_have_the_numbers_3_5_6_7() {
        assert_eq!(word_code(0), 0);
        let checks = [0, 1, 2, 3].map(|bit| word_code(1 << bit) & 0x7f);
        assert_eq!(checks, [3, 5, 6, 7]);
        assert_eq!(word_code(1 << 63) & 0x7f, 71);
    }

    #[test]
    fn a_lines_code_has_a_byte_for_each_word() {
        let line = [1, 0, 0, 0, 0, 0, 0, 1 << 63];
        let code = line_code(&line).to_le_bytes();
        assert_eq!((code[0], code[7]), (word_code(1), word_code(1 << 63)));
        assert_eq!(code[1..7], [0; 6]);
    }

    proptest! {
        #[test]
        fn one_error_is_corrected(word: u64, bit in 0u32..72) {
            let (word_read, code_read) = flip(word, word_code(word), bit);
            prop_assert_eq!(decode(word_read, code_read), Decoded::Word(word));
        }

        #[test]
        fn two_errors_are_detected(word: u64, first in 0u32..72, apart in 1u32..72) {
            let (once, code) = flip(word, word_code(word), first);
            let (twice, code) = flip(once, code, (first + apart) % 72);
            prop_assert_eq!(decode(twice, code), Decoded::TwoErrors);
        }
    }
}
