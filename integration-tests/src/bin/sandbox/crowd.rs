//! Threads that want the allocator all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const THREADS: usize = 3;
/// What each does at once, and how long it rests then: the others are to get on.
const AT_ONCE: usize = 200;
const RESTS: Duration = Duration::from_micros(500);
/// Blocks that each has at a time, and the longest: large ones are taken from the top of the heap, which grows and shrinks.
const BLOCKS: usize = 64;
const LONGEST: usize = 32 << 10;

/// They end where this is dropped.
pub(crate) struct Crowd {
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Crowd {
    pub(crate) fn gathers() -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let threads = (0..THREADS)
            .map(|_| {
                let ends = ends.clone();
                std::thread::spawn(move || {
                    let (mut blocks, mut number) = (vec![Vec::new(); BLOCKS], 1usize);
                    while !ends.load(Ordering::Acquire) {
                        number = number
                            .wrapping_mul(0x5851_f42d_4c95_7f2d)
                            .wrapping_add(0x1405_7b7e);
                        if number.is_multiple_of(AT_ONCE) {
                            std::thread::sleep(RESTS);
                        }
                        let length = (number >> 16) % LONGEST;
                        blocks[number % BLOCKS] = std::hint::black_box(Vec::<u8>::with_capacity(length));
                    }
                })
            })
            .collect();
        Self { ends, threads }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
