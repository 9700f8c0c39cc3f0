//! What is said of a block, coded.
//!
//! A block is a sequence of runs. Of each run there is the value, then the length, in Elias' gamma code. The first value has 7
//! bits. A later one is told by its rank among the values met so far, the latest first: the latest itself cannot come again,
//! so rank 1 is a zero bit, rank 2 is `10`, and so on; as many ones as there are ranks, and then 7 bits, are a new value. The
//! last byte is filled with zeros. Lengths come to [`BLOCK`] exactly.
//!
//! A block that would need more than [`MOST_BYTES`] is made coarser by the encoder.

use crate::bits::{Reader, Writer};
use crate::frame::BLOCK;
use crate::malformed::Malformed;
use crate::said::Said;

/// Most bytes of a coded block. 16 GiB are 8192 blocks: with a byte for each one's number less than 1 MiB.
pub const MOST_BYTES: usize = 126;
/// Bits of 512 behind its first.
const MOST_MORE: u32 = BLOCK.ilog2();

/// What is said of each frame of a block.
pub type Frames = [Said; BLOCK];

/// Values met so far, the latest first.
#[derive(Clone, Copy, Debug)]
struct Latest {
    values: [Said; Said::VALUES],
    count: usize,
}

impl Latest {
    fn new() -> Self {
        Self {
            values: [Said::UNKNOWN; Said::VALUES],
            count: 0,
        }
    }

    fn rank(&self, value: Said) -> Option<usize> {
        self.values[..self.count].iter().position(|v| *v == value)
    }

    fn bring_to_front(&mut self, rank: usize) -> Said {
        self.values[..=rank].rotate_right(1);
        self.values[0]
    }

    /// `value` is not among them, so there is room.
    fn add(&mut self, value: Said) {
        self.values[self.count] = value;
        self.count += 1;
        self.bring_to_front(self.count - 1);
    }

    /// Ranks that can follow, as a number of bits.
    #[allow(clippy::cast_possible_truncation)] // at most VALUES
    fn ranks(&self) -> u32 {
        self.count.saturating_sub(1) as u32
    }
}

/// Runs of equal values.
fn runs(frames: &Frames) -> impl Iterator<Item = (Said, usize)> {
    frames.chunk_by(PartialEq::eq).map(|run| (run[0], run.len()))
}

/// Appends a block, coded, in at most [`MOST_BYTES`].
pub fn encode(frames: &Frames, out: &mut Vec<u8>) {
    let start = out.len();
    encode_exactly(frames, out);
    let mut coarser = *frames;
    let mut grain = 1;
    while out.len() - start > MOST_BYTES {
        out.truncate(start);
        coarsen(&mut coarser, grain);
        encode_exactly(&coarser, out);
        grain *= 2;
    }
}

#[allow(clippy::cast_possible_truncation)] // a block has 512 frames
fn encode_exactly(frames: &Frames, out: &mut Vec<u8>) {
    let mut bits = Writer::new(out);
    let mut latest = Latest::new();
    for (value, length) in runs(frames) {
        match latest.rank(value) {
            Some(rank) => {
                // Neighbours differ, so the rank is 1 at least.
                bits.put_unary(rank as u32 - 1);
                latest.bring_to_front(rank);
            }
            None => {
                (0..latest.ranks()).for_each(|_| bits.put(1, 1));
                bits.put(u32::from(value.bits()), Said::BITS);
                latest.add(value);
            }
        }
        bits.put_gamma(length as u32);
    }
    bits.end();
}

/// Says less: kinds only; where `grain` frames differ, nothing.
fn coarsen(frames: &mut Frames, grain: usize) {
    for frame in frames.iter_mut() {
        *frame = Said::new(frame.kind());
    }
    for piece in frames.chunks_mut(grain) {
        if piece.iter().any(|frame| *frame != piece[0]) {
            piece.fill(Said::UNKNOWN);
        }
    }
}

/// A coded block, run by run, and at last how many bytes it has.
#[derive(Clone, Debug)]
pub struct Decoder<'a> {
    bits: Reader<'a>,
    latest: Latest,
    left: usize,
}

impl<'a> Decoder<'a> {
    /// The block that these bytes begin with; there may be others behind.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self {
            bits: Reader::new(&bytes[..bytes.len().min(MOST_BYTES)]),
            latest: Latest::new(),
            left: BLOCK,
        }
    }

    /// The next run; `None` at the end.
    ///
    /// # Errors
    /// [`Malformed`] if this is no block.
    pub fn next_run(&mut self) -> Result<Option<(Said, usize)>, Malformed> {
        if self.left == 0 {
            return Ok(None);
        }
        let value = self.value()?;
        let length = self.bits.gamma(MOST_MORE)? as usize;
        self.left = self.left.checked_sub(length).ok_or(Malformed::Block)?;
        Ok(Some((value, length)))
    }

    fn value(&mut self) -> Result<Said, Malformed> {
        let ranks = self.latest.ranks();
        if self.latest.count > 0 {
            let ones = self.bits.unary(ranks)?;
            if ones < ranks {
                return Ok(self.latest.bring_to_front(ones as usize + 1));
            }
        }
        #[allow(clippy::cast_possible_truncation)] // 7 bits
        let bits = self.bits.take(Said::BITS)? as u8;
        let value = Said::from_bits(bits).ok_or(Malformed::Block)?;
        if self.latest.rank(value).is_some() {
            return Err(Malformed::Block);
        }
        self.latest.add(value);
        Ok(value)
    }

    /// Bytes that the block has, after its last run.
    ///
    /// # Errors
    /// [`Malformed::Block`] if bits behind the last run are not zero, or there are runs left.
    pub fn end(self) -> Result<usize, Malformed> {
        match self.left {
            0 => self.bits.end(),
            _ => Err(Malformed::Block),
        }
    }
}

/// Decodes the block that the bytes begin with; returns how many bytes it has.
///
/// # Errors
/// [`Malformed`] if it is none.
pub fn decode(bytes: &[u8], frames: &mut Frames) -> Result<usize, Malformed> {
    let mut decoder = Decoder::new(bytes);
    let mut at = 0;
    while let Some((value, length)) = decoder.next_run()? {
        frames[at..at + length].fill(value);
        at += length;
    }
    decoder.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::said::{Kind, Temperature};
    use proptest::prelude::*;

    const CLEAN: Said = Said::new(Kind::FileClean);
    const FREE: Said = Said::new(Kind::Free);

    fn coded(frames: &Frames) -> Vec<u8> {
        let mut out = Vec::new();
        encode(frames, &mut out);
        out
    }

    fn decoded(bytes: &[u8]) -> Result<(Frames, usize), Malformed> {
        let mut frames = [Said::UNKNOWN; BLOCK];
        decode(bytes, &mut frames).map(|used| (frames, used))
    }

    fn any_said() -> impl Strategy<Value = Said> {
        prop::sample::select((0..=u8::MAX).filter_map(Said::from_bits).collect::<Vec<_>>())
    }

    fn of_runs(runs: &[(Said, usize)]) -> Frames {
        let mut all = runs
            .iter()
            .flat_map(|(value, length)| std::iter::repeat_n(*value, *length));
        std::array::from_fn(|_| all.next().unwrap_or(FREE))
    }

    #[test]
    fn a_block_of_one_kind_has_four_bytes() {
        assert_eq!(coded(&[CLEAN; BLOCK]).len(), 4);
    }

    #[test]
    fn a_fragmented_block_of_a_few_kinds_is_told_exactly() {
        // Runs of three on average, as in real guests.
        let kinds = [CLEAN, FREE, Said::new(Kind::Anonymous), CLEAN];
        let runs: Vec<(Said, usize)> = (0..170).map(|n| (kinds[n % 4], 1 + n * 7 % 5)).collect();
        let frames = of_runs(&runs);
        let bytes = coded(&frames);
        assert!(bytes.len() <= MOST_BYTES);
        assert_eq!(decoded(&bytes).unwrap().0, frames);
    }

    #[test]
    fn what_does_not_fit_is_coarser_and_not_wrong() {
        let kinds = [
            Kind::FileClean,
            Kind::Free,
            Kind::Anonymous,
            Kind::Kernel,
            Kind::FileDirty,
        ];
        let frames: Frames =
            std::array::from_fn(|at| Said::new(kinds[at * at % 7 % 5]).with_temperature(Temperature::Hot));
        let (told, used) = decoded(&coded(&frames)).unwrap();
        assert!(used <= MOST_BYTES);
        for (said, is) in told.iter().zip(frames) {
            assert!(*said == Said::UNKNOWN || said.kind() == is.kind());
        }
    }

    #[test]
    fn the_last_bits_must_be_zero_and_values_new() {
        let mut bytes = coded(&[CLEAN; BLOCK]);
        *bytes.last_mut().unwrap() |= 0x80;
        assert_eq!(decoded(&bytes), Err(Malformed::Block));
        // The same value twice, as if it were new.
        let mut out = Vec::new();
        let mut bits = Writer::new(&mut out);
        for _ in 0..2 {
            bits.put(u32::from(CLEAN.bits()), Said::BITS);
            bits.put_gamma(256);
        }
        bits.end();
        assert_eq!(decoded(&out), Err(Malformed::Block));
    }

    proptest! {
        #[test]
        fn few_runs_are_told_exactly(runs in prop::collection::vec((any_said(), 1_usize..200), 1..20)) {
            let frames = of_runs(&runs);
            let mut bytes = coded(&frames);
            let len = bytes.len();
            prop_assert!(len <= MOST_BYTES);
            bytes.extend([0xff; 8]);
            prop_assert_eq!(decoded(&bytes), Ok((frames, len)));
        }

        #[test]
        fn any_block_fits(values in prop::collection::vec(any_said(), BLOCK)) {
            let bytes = coded(&values.try_into().unwrap());
            prop_assert!(bytes.len() <= MOST_BYTES);
            prop_assert_eq!(decoded(&bytes).unwrap().1, bytes.len());
        }

        #[test]
        fn what_is_decoded_has_one_form(bytes in prop::collection::vec(any::<u8>(), 0..160)) {
            if let Ok((frames, used)) = decoded(&bytes) {
                prop_assert_eq!(&coded(&frames), &bytes[..used]);
            }
        }
    }
}
