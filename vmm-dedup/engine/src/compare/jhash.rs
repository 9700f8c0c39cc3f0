//! The hash that KSM made its checksums of (Bob Jenkins, lookup3.c, May 2006, public domain; `jhash2` in the kernel's
//! include/linux/jhash.h).

/// Hashes 32-bit words.
#[allow(clippy::cast_possible_truncation)] // the length counts modulo 2^32, as the kernel's u32 does
pub fn jhash2(words: &[u32], initial: u32) -> u32 {
    let start = 0xdead_beef_u32
        .wrapping_add((words.len() as u32) << 2)
        .wrapping_add(initial);
    let mut state = [start; 3];
    let mut rest = words;
    while let [a, b, c, more @ ..] = rest
        && !more.is_empty()
    {
        add(&mut state, &[*a, *b, *c]);
        mix(&mut state);
        rest = more;
    }
    if !rest.is_empty() {
        add(&mut state, rest);
        finish(&mut state);
    }
    state[2]
}

fn add(state: &mut [u32; 3], words: &[u32]) {
    for (sum, word) in state.iter_mut().zip(words) {
        *sum = sum.wrapping_add(*word);
    }
}

fn mix([a, b, c]: &mut [u32; 3]) {
    // (a, b, c) go round; the rotations are all that differs between the six steps.
    for (first, second, third) in [(4, 6, 8), (16, 19, 4)] {
        *a = a.wrapping_sub(*c) ^ c.rotate_left(first);
        *c = c.wrapping_add(*b);
        *b = b.wrapping_sub(*a) ^ a.rotate_left(second);
        *a = a.wrapping_add(*c);
        *c = c.wrapping_sub(*b) ^ b.rotate_left(third);
        *b = b.wrapping_add(*a);
    }
}

fn finish([a, b, c]: &mut [u32; 3]) {
    *c = (*c ^ *b).wrapping_sub(b.rotate_left(14));
    *a = (*a ^ *c).wrapping_sub(c.rotate_left(11));
    *b = (*b ^ *a).wrapping_sub(a.rotate_left(25));
    *c = (*c ^ *b).wrapping_sub(b.rotate_left(16));
    *a = (*a ^ *c).wrapping_sub(c.rotate_left(4));
    *b = (*b ^ *a).wrapping_sub(a.rotate_left(14));
    *c = (*c ^ *b).wrapping_sub(b.rotate_left(24));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// lookup3's `hashlittle`: the same on bytes, for which its author published results. On whole words only the
    /// start differs in how the length comes in.
    fn hashlittle(text: &[u8], initial: u32) -> u32 {
        let start = 0xdead_beef_u32
            .wrapping_add(u32::try_from(text.len()).unwrap())
            .wrapping_add(initial);
        let mut padded = text.to_vec();
        padded.resize(text.len().next_multiple_of(4), 0);
        let words: Vec<u32> = padded
            .chunks_exact(4)
            .map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        let padding = u32::try_from(padded.len()).unwrap();
        // jhash2 adds the padded length to its start.
        jhash2(&words, start.wrapping_sub(0xdead_beef).wrapping_sub(padding))
    }

    #[test]
    fn the_authors_examples() {
        let text = b"Four score and seven years ago";
        assert_eq!(hashlittle(text, 0), 0x1777_0551);
        assert_eq!(hashlittle(text, 1), 0xcd62_8161);
        assert_eq!(jhash2(&[], 0), 0xdead_beef);
    }
}
