//! Where segments get their memory from.

/// The source has no memory to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory;

/// Gives memory for segments and takes it back.
pub trait Source {
    /// The memory of a segment.
    type Memory: Memory;

    /// Gives memory of so many bytes, whatever they hold.
    ///
    /// # Errors
    /// [`NoMemory`].
    fn take(&mut self, bytes: usize) -> Result<Self::Memory, NoMemory>;

    /// Takes memory back that no cell is in any more.
    fn give_back(&mut self, memory: Self::Memory);
}

/// A segment's memory. What is loaded is what was stored there last.
pub trait Memory {
    /// Writes `bytes` from offset `at` on, all within the memory.
    fn store(&mut self, at: usize, bytes: &[u8]);

    /// The `length` bytes from offset `at` on, all within the memory.
    fn load(&self, at: usize, length: usize) -> &[u8];
}

impl Memory for Box<[u8]> {
    fn store(&mut self, at: usize, bytes: &[u8]) {
        self[at..][..bytes.len()].copy_from_slice(bytes);
    }

    fn load(&self, at: usize, length: usize) -> &[u8] {
        &self[at..][..length]
    }
}

/// The process's own memory, up to a limit.
#[derive(Clone, Copy, Debug)]
pub struct Heap {
    /// Most bytes that may be out; fewer than that already are: nothing more is given.
    pub most_bytes: u64,
    taken: u64,
}

impl Heap {
    /// At most so many bytes.
    #[must_use]
    pub fn new(most_bytes: u64) -> Self {
        Self { most_bytes, taken: 0 }
    }
}

impl Source for Heap {
    type Memory = Box<[u8]>;

    fn take(&mut self, bytes: usize) -> Result<Box<[u8]>, NoMemory> {
        let taken = self.taken.saturating_add(bytes as u64);
        if taken > self.most_bytes {
            return Err(NoMemory);
        }
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes).map_err(|_| NoMemory)?;
        memory.resize(bytes, 0);
        self.taken = taken;
        Ok(memory.into())
    }

    fn give_back(&mut self, memory: Box<[u8]>) {
        self.taken = self.taken.saturating_sub(memory.len() as u64);
    }
}
