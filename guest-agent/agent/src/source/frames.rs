//! What frames are: /proc/kpageflags and /proc/kpagecount, a word for each frame.

use super::{Lack, Roots};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use vmm_dedup_agent_wire::frame::BLOCK;

/// Bytes of a frame's word.
const WORD: usize = 8;
/// The bit of kpageflags that a frame is mapped.
const MMAP: u64 = 1 << 11;
/// The bit of kpageflags that there is no frame.
const NOPAGE: u64 = 1 << 20;

/// A file with a word for each frame.
#[derive(Debug)]
struct Words {
    file: File,
    bytes: Vec<u8>,
}

impl Words {
    fn open(path: &Path, what: &'static str) -> Result<Self, Lack> {
        let lack = |e: &io::Error| Lack::of(path, e, "CAP_SYS_ADMIN", what);
        let file = File::open(path).map_err(|e| lack(&e))?;
        // Whether it may be read is said when it is.
        let mut word = [0; WORD];
        file.read_at(&mut word, 0).map_err(|e| lack(&e))?;
        Ok(Self {
            file,
            bytes: Vec::new(),
        })
    }

    /// Reads the words of frames from `first` on; those beyond memory are `beyond`.
    fn read(&mut self, first: u64, words: &mut [u64], beyond: u64) -> io::Result<()> {
        self.bytes.resize(words.len() * WORD, 0);
        let mut filled = 0;
        while filled < self.bytes.len() {
            let at = first * WORD as u64 + filled as u64;
            match self.file.read_at(&mut self.bytes[filled..], at) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let (whole, _) = self.bytes[..filled].as_chunks::<WORD>();
        words.fill(beyond);
        for (word, bytes) in words.iter_mut().zip(whole) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Ok(())
    }
}

/// Frames, as the kernel has them.
#[derive(Debug)]
pub struct Frames {
    flags: Words,
    counts: Option<Words>,
}

impl Frames {
    /// Opens the files; also what is lacking of them.
    ///
    /// # Errors
    /// Without flags nothing is known.
    pub fn open(roots: &Roots) -> Result<(Self, Vec<Lack>), Lack> {
        let flags = Words::open(&roots.proc.join("kpageflags"), "kinds of frames")?;
        let counts = Words::open(&roots.proc.join("kpagecount"), "how often frames are mapped");
        let (counts, lacks) = match counts {
            Ok(counts) => (Some(counts), Vec::new()),
            Err(lack) => (None, vec![lack]),
        };
        Ok((Self { flags, counts }, lacks))
    }

    /// Whether it is known how often frames are mapped.
    #[must_use]
    pub fn has_counts(&self) -> bool {
        self.counts.is_some()
    }

    /// Reads flags and counts of whole blocks from `block` on.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn read(&mut self, block: u32, flags: &mut [u64], counts: &mut [u64]) -> io::Result<()> {
        let first = u64::from(block) * BLOCK as u64;
        self.flags.read(first, flags, NOPAGE)?;
        counts.fill(0);
        let Some(words) = &mut self.counts else {
            return Ok(());
        };
        // A look takes the kernel a tenth of a microsecond for each frame: where nothing is mapped there is none.
        let blocks = flags.chunks(BLOCK).zip(counts.chunks_mut(BLOCK));
        for ((flags, counts), number) in blocks.zip(0..) {
            if flags.iter().any(|flags| flags & MMAP != 0) {
                words.read(first + number * BLOCK as u64, counts, 0)?;
            }
        }
        Ok(())
    }

    /// The flags of some frames.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn flags_of(&mut self, first: u64, flags: &mut [u64]) -> io::Result<()> {
        self.flags.read(first, flags, NOPAGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_the_file_is_no_frame() {
        let folder = tempfile::tempdir().unwrap();
        let roots = Roots {
            proc: folder.path().to_owned(),
            ..Roots::default()
        };
        assert!(matches!(Frames::open(&roots), Err(Lack::Missing { .. })));
        let words: Vec<u8> = (0..700_u64).flat_map(u64::to_ne_bytes).collect();
        std::fs::write(folder.path().join("kpageflags"), &words).unwrap();
        let (mut frames, lacks) = Frames::open(&roots).unwrap();
        assert_eq!(lacks.len(), 1);
        let (mut flags, mut counts) = ([0; BLOCK], [9; BLOCK]);
        frames.read(1, &mut flags, &mut counts).unwrap();
        assert_eq!((flags[0], flags[187], flags[188]), (512, 699, NOPAGE));
        assert_eq!(counts, [0; BLOCK]);
        // Only the first block has something that is mapped.
        let words = [MMAP].into_iter().chain(1..1024).flat_map(u64::to_ne_bytes);
        std::fs::write(folder.path().join("kpageflags"), words.collect::<Vec<u8>>()).unwrap();
        std::fs::write(folder.path().join("kpagecount"), [1; 1024 * WORD]).unwrap();
        let (mut frames, lacks) = Frames::open(&roots).unwrap();
        let (mut flags, mut counts) = ([0; 2 * BLOCK], [9; 2 * BLOCK]);
        frames.read(0, &mut flags, &mut counts).unwrap();
        assert!(lacks.is_empty() && counts[..BLOCK].iter().all(|count| *count != 0));
        assert_eq!(counts[BLOCK..], [0; BLOCK]);
    }
}
