//! When frames were used, by idle page tracking: /sys/kernel/mm/page_idle/bitmap, a bit for each frame.
//!
//! A bit that is set by us is cleared by the kernel when the frame is used. Each look at a block takes the bits, and sets them
//! all again. Two bits a frame count for how many intervals it was idle.

use super::{Lack, Roots};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use vmm_dedup_agent_wire::frame::BLOCK;
use vmm_dedup_agent_wire::said::Temperature;

/// Bytes of the bitmap for a block.
const BYTES: usize = BLOCK / 8;
/// Blocks whose history is kept, 128 bytes each, from the first one on: 16 GiB. Of others nothing is known, and they are not looked
/// at.
const MOST_HISTORY: usize = 8192;
/// Intervals without use after which a frame is cold.
const COLD: u8 = 3;

#[derive(Clone, Debug, Default)]
struct Block {
    /// When the bits were set; `None`: never.
    set: Option<Duration>,
    /// For each frame, intervals without use, two bits; 0: used in the last one. Empty: nothing is known.
    idle: Box<[u8]>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Idle {
    bitmap: File,
    interval: Duration,
    blocks: Vec<Block>,
}

impl Idle {
    /// For memory of so many blocks.
    ///
    /// # Errors
    /// [`Lack`].
    pub fn open(roots: &Roots, blocks: usize, interval: Duration) -> Result<Self, Lack> {
        let path = roots.sys.join("kernel/mm/page_idle/bitmap");
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let bitmap = file.map_err(|e| Lack::of(&path, &e, "CAP_SYS_ADMIN", "idle frames"))?;
        Ok(Self {
            bitmap,
            interval,
            blocks: vec![Block::default(); blocks.min(MOST_HISTORY)],
        })
    }

    /// Looks at a block, if it is time. Must come before the block's flags are read.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn look(&mut self, block: u32, now: Duration) -> io::Result<()> {
        let Some(state) = self.blocks.get_mut(block as usize) else {
            return Ok(());
        };
        if state
            .set
            .is_some_and(|set| now.saturating_sub(set) < self.interval)
        {
            return Ok(());
        }
        let at = u64::from(block) * BYTES as u64;
        if state.set.is_some() {
            let mut bits = [0; BYTES];
            // What is beyond memory is not read, and not idle.
            let read = self.bitmap.read_at(&mut bits, at)?;
            bits[read..].fill(0);
            if state.idle.is_empty() {
                state.idle = vec![0; BLOCK / 4].into();
            }
            for frame in 0..BLOCK {
                let is_idle = bits[frame / 8] >> (frame % 8) & 1 == 1;
                let (shift, byte) = (frame % 4 * 2, &mut state.idle[frame / 4]);
                let count = if is_idle {
                    (*byte >> shift & 3).saturating_add(1).min(COLD)
                } else {
                    0
                };
                *byte = *byte & !(3 << shift) | count << shift;
            }
        }
        self.bitmap.write_at(&[0xff; BYTES], at)?;
        state.set = Some(now);
        Ok(())
    }

    /// When a frame of a block was used.
    #[must_use]
    pub fn temperature(&self, block: u32, place: usize) -> Temperature {
        let state = self.blocks.get(block as usize);
        let Some(byte) = state.and_then(|state| state.idle.get(place / 4)) else {
            return Temperature::Unknown;
        };
        match byte >> (place % 4 * 2) & 3 {
            0 => Temperature::Hot,
            COLD => Temperature::Cold,
            _ => Temperature::Warm,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn frames_turn_cold_when_they_stay_idle_and_hot_when_they_are_used() {
        let folder = tempfile::tempdir().unwrap();
        let mm = folder.path().join("kernel/mm/page_idle");
        std::fs::create_dir_all(&mm).unwrap();
        let file = mm.join("bitmap");
        std::fs::write(&file, [0; 2 * BYTES]).unwrap();
        let roots = Roots {
            sys: folder.path().to_owned(),
            ..Roots::default()
        };
        let mut idle = Idle::open(&roots, 2, MINUTE).unwrap();
        let mut seen = Vec::new();
        for minute in 0..6 {
            idle.look(1, MINUTE * minute).unwrap();
            seen.push((idle.temperature(1, 9), idle.temperature(1, 10)));
            // The guest uses the frame at place 10, and that at 9 in the fourth minute.
            let mut bits = std::fs::read(&file).unwrap();
            assert_eq!(bits[BYTES + 1], 0xff);
            bits[BYTES + 1] &= !4;
            if minute == 4 {
                bits[BYTES + 1] &= !2;
            }
            std::fs::write(&file, bits).unwrap();
        }
        use Temperature::{Cold, Hot, Unknown, Warm};
        let expected = [
            (Unknown, Unknown),
            (Warm, Hot),
            (Warm, Hot),
            (Cold, Hot),
            (Cold, Hot),
            (Hot, Hot),
        ];
        assert_eq!(seen, expected);
        assert_eq!(idle.temperature(0, 0), Unknown);
        // One more than those whose history is kept.
        let mut big = Idle::open(&roots, MOST_HISTORY + 1, MINUTE).unwrap();
        let beyond = u32::try_from(MOST_HISTORY).unwrap();
        (0..3).for_each(|minute| big.look(beyond, MINUTE * minute).unwrap());
        assert_eq!(big.temperature(beyond, 9), Unknown);
        assert_eq!(std::fs::metadata(&file).unwrap().len(), 2 * BYTES as u64);
        // Too early.
        idle.look(1, MINUTE * 5 + MINUTE / 2).unwrap();
        assert_eq!(idle.temperature(1, 9), Hot);
    }
}
