//! The model in this process, driven by whoever waits for it.
//!
//! It uses this process's addresses, as through a device node, or what it was given, as through VFIO ([`Reach`]).
//!
//! *Time.* The model works on the caller's thread, which is [borrowed](WorkQueue::borrowed_cpu_ns) from the driver. The
//! device's clock stands still meanwhile: else the driver would be done waiting when the model is done working, and its
//! waiting would count as the model's work.
//!
//! What is borrowed is measured step by step, on the wall clock: reading a thread's CPU time can take longer than the
//! driver does for a descriptor, and what that took beside the work would count as the driver's. A step in which the
//! thread was held up counts as one of [`LONGEST_STEP`], and the rest as the driver's time.
#![allow(unsafe_code)] // reads and writes this process's memory by address

use super::queue::{QueueLimits, Trouble, WorkQueue};
use super::registers::{Registers, SetupError, Wanted, bring_up, general_status, take_software_error};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmm_dedup_dsa_abi::config::Mode;
use vmm_dedup_dsa_abi::registers::DeviceState;
use vmm_dedup_dsa_abi::{Descriptor, DeviceAddress, Pasid, portal};
use vmm_dedup_dsa_model::{
    Account, Board, Core, Faults, Memory, Missing, PAGE, Shape, Submitted, Timing, Way,
};
use vmm_dedup_protocol::mapping::Mapping;

/// A step of the model's takes some microseconds. Longer ones are of a thread that did not run.
const LONGEST_STEP: Duration = Duration::from_micros(20);

/// Which memory the model reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// This process's, by its addresses.
    Process,
    /// What [`WorkQueue::map`] gives it.
    Mapped,
}

/// A device of its own.
pub struct InProcess {
    core: Core,
    board: Plug,
    limits: QueueLimits,
    wanted: Wanted,
    began: Instant,
    /// The device's time when it was asked last, ns.
    last: u64,
    worked_ns: u64,
    /// What reading the clock takes, ns: half of it before, half of it after the moment that is read.
    watch_ns: u64,
    /// What a write to a portal takes the CPU.
    portal_write: Duration,
    /// Where the next descriptor goes.
    portal: u64,
}

impl std::fmt::Debug for InProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InProcess")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl InProcess {
    /// A device with one queue.
    ///
    /// # Errors
    /// If the model cannot be brought up so.
    pub fn new(
        shape: Shape,
        timing: Timing,
        faults: Faults,
        reach: Reach,
        wanted: Wanted,
    ) -> Result<Self, SetupError> {
        let board = match reach {
            Reach::Process => Plug::Process(Process::default()),
            Reach::Mapped => Plug::Mapped(Mapped::default()),
        };
        let mut made = Self {
            core: Core::new(shape, timing, Faults::default()),
            board,
            limits: QueueLimits {
                entries: 0,
                members: 0,
                bytes: 0,
                operations: [0; 4],
                node: None,
            },
            wanted,
            began: Instant::now(),
            last: 0,
            worked_ns: 0,
            watch_ns: cost_of_a_watch(),
            portal_write: Duration::ZERO,
            portal: portal::offset(0, portal::Kind::Unlimited),
        };
        made.limits = bring_up(&mut made, wanted)?;
        made.core.set_faults(faults);
        Ok(made)
    }

    /// What goes wrong from now on.
    pub fn set_faults(&mut self, faults: Faults) {
        self.core.set_faults(faults);
    }

    /// What it has done.
    #[must_use]
    pub fn account(&self) -> Account {
        self.core.account()
    }

    /// Lets each submission take the CPU so long, as a write to a real portal does. By default the model's portal costs the
    /// driver nothing.
    #[must_use]
    pub fn with_portal_write(mut self, takes: Duration) -> Self {
        self.portal_write = takes;
        self
    }

    /// The device's time, ns. It never goes back, although what was borrowed is known to some nanoseconds only.
    fn now(&mut self) -> u64 {
        self.now_at(Instant::now())
    }

    fn now_at(&mut self, moment: Instant) -> u64 {
        let since = u64::try_from((moment - self.began).as_nanos()).unwrap_or(u64::MAX);
        self.last = self.last.max(since.saturating_sub(self.worked_ns));
        self.last
    }

    /// Lets the model do what is due by a time, in time that is borrowed from a moment on.
    fn work(&mut self, until: u64, since: Instant) {
        let mut before = since;
        while self.core.next_event().is_some_and(|due| due <= until) {
            let due = self.core.next_event().unwrap_or(until);
            self.core.advance(due, &self.board);
            before = self.lend(before);
        }
        self.lend(before);
        self.worked_ns += self.watch_ns;
    }

    /// What the thread did since a moment was the model's work. Returns the next moment.
    fn lend(&mut self, since: Instant) -> Instant {
        let now = Instant::now();
        let step = (now - since).min(LONGEST_STEP);
        self.worked_ns += u64::try_from(step.as_nanos()).unwrap_or(0);
        now
    }
}

impl Registers for InProcess {
    fn read(&mut self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        let now = self.now();
        self.core.read(offset, &mut bytes, now, &self.board);
        u64::from_le_bytes(bytes)
    }

    fn write(&mut self, offset: u64, value: u32) {
        let now = self.now();
        self.core.write(offset, &value.to_le_bytes(), now, &self.board);
    }
}

impl WorkQueue for InProcess {
    fn name(&self) -> &str {
        "dsa-model"
    }

    fn limits(&self) -> QueueLimits {
        self.limits
    }

    fn uses_process_addresses(&self) -> bool {
        matches!(self.board, Plug::Process(_))
    }

    fn submit(&mut self, descriptor: &Descriptor) -> Result<bool, Trouble> {
        let start = Instant::now();
        let now = self.now_at(start);
        let bytes = descriptor.to_bytes();
        let way = match self.wanted.mode {
            Mode::Dedicated => Way::Posted,
            Mode::Shared => Way::Deferrable,
        };
        let submitted = self.core.submit(self.portal, way, &bytes, now, &self.board);
        self.work(now, start);
        let written = Instant::now() + self.portal_write;
        while Instant::now() < written {
            std::hint::spin_loop();
        }
        // What is lost shows by its silence, as with a device.
        Ok(submitted != Submitted::Retry)
    }

    fn relax(&mut self, _status: &AtomicU64) {
        let start = Instant::now();
        let now = self.now_at(start);
        if self.core.next_event().is_some_and(|due| due <= now) {
            self.work(now, start);
        }
        std::hint::spin_loop();
    }

    fn trouble(&mut self) -> Option<Trouble> {
        let status = general_status(self);
        match status.state() {
            DeviceState::Halted => return Some(Trouble::Halted(status.reset())),
            DeviceState::Disabled | DeviceState::Draining => {
                return Some(Trouble::Gone("the device is disabled".to_owned()));
            }
            DeviceState::Enabled => {}
        }
        take_software_error(self).map(|details| Trouble::Software {
            error: details.error,
            address: details.fault_address,
        })
    }

    fn abort(&mut self) -> bool {
        super::registers::abort(self).is_ok()
    }

    fn reset(&mut self) -> Result<(), Trouble> {
        let wanted = self.wanted;
        let brought = bring_up(self, wanted);
        brought
            .map(drop)
            .map_err(|error| Trouble::Gone(error.to_string()))
    }

    fn map(
        &mut self,
        at: DeviceAddress,
        bytes: usize,
        file: BorrowedFd<'_>,
        writable: bool,
    ) -> Result<(), Trouble> {
        let Plug::Mapped(memory) = &self.board else {
            return Ok(());
        };
        let mapped = if writable {
            Mapping::read_write(file, bytes)
        } else {
            Mapping::read_only(file, bytes)
        };
        let mapping = mapped.map_err(|error| Trouble::Gone(error.to_string()))?;
        memory.ranges().push(Range {
            at: at.0,
            mapping,
            writable,
        });
        Ok(())
    }

    fn unmap(&mut self, at: DeviceAddress, bytes: usize) -> Result<(), Trouble> {
        if let Plug::Mapped(memory) = &self.board {
            memory
                .ranges()
                .retain(|range| range.at != at.0 || range.mapping.len() != bytes);
        }
        Ok(())
    }

    fn borrowed_cpu_ns(&self) -> u64 {
        self.worked_ns
    }
}

/// What reading the clock takes, ns.
fn cost_of_a_watch() -> u64 {
    const TIMES: u32 = 256;
    let start = Instant::now();
    (0..TIMES).for_each(|_| _ = std::hint::black_box(Instant::now()));
    u64::try_from((start.elapsed() / TIMES).as_nanos()).unwrap_or(0)
}

/// What the model is plugged into.
#[derive(Debug)]
enum Plug {
    Process(Process),
    Mapped(Mapped),
}

impl Board for Plug {
    fn memory(&self) -> &dyn Memory {
        match self {
            Self::Process(memory) => memory,
            Self::Mapped(memory) => memory,
        }
    }

    /// Nobody waits for interrupts: whoever waits for the model drives it.
    fn interrupt(&self, _vector: u16) {}
}

/// Files that were given to the model.
#[derive(Debug, Default)]
struct Mapped(Mutex<Vec<Range>>);

#[derive(Debug)]
struct Range {
    at: u64,
    mapping: Mapping,
    writable: bool,
}

impl Mapped {
    fn ranges(&self) -> MutexGuard<'_, Vec<Range>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The words that an access touches, and the offset of its first byte in them.
    fn with_words<T>(
        &self,
        address: u64,
        len: usize,
        write: bool,
        access: impl FnOnce(&[AtomicU64], usize) -> T,
    ) -> Result<T, Missing> {
        let ranges = self.ranges();
        let found = ranges.iter().find_map(|range| {
            let offset = usize::try_from(address.checked_sub(range.at)?).ok()?;
            let end = offset.checked_add(len)?;
            (end <= range.mapping.len() && (range.writable || !write)).then_some((range, offset, end))
        });
        let (range, offset, end) = found.ok_or(Missing)?;
        let words = &range.mapping.words()[offset / 8..end.div_ceil(8)];
        Ok(access(words, offset % 8))
    }

    fn store(words: &[AtomicU64], first: usize, from: &[u8]) {
        let (mut byte, mut left) = (first, from);
        for word in words {
            let (now, rest) = left.split_at(left.len().min(8 - byte));
            let mut bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            bytes[byte..byte + now.len()].copy_from_slice(now);
            word.store(u64::from_ne_bytes(bytes), Ordering::Release);
            (byte, left) = (0, rest);
        }
    }
}

impl Memory for Mapped {
    fn read(&self, _space: Option<Pasid>, address: u64, into: &mut [u8]) -> Result<(), Missing> {
        self.with_words(address, into.len(), false, |words, first| {
            let (mut byte, mut left) = (first, into);
            for word in words {
                let len = left.len().min(8 - byte);
                let (now, rest) = left.split_at_mut(len);
                now.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[byte..byte + len]);
                (byte, left) = (0, rest);
            }
        })
    }

    fn write(&self, _space: Option<Pasid>, address: u64, from: &[u8]) -> Result<(), Missing> {
        self.with_words(address, from.len(), true, |words, first| {
            Self::store(words, first, from)
        })
    }

    fn write_record(&self, _space: Option<Pasid>, address: u64, record: &[u8; 32]) -> Result<(), Missing> {
        self.with_words(address, 32, true, |words, _| {
            // The word with the status comes last.
            Self::store(&words[1..], 0, &record[8..]);
            Self::store(&words[..1], 0, &record[..8]);
        })
    }

    fn is_there(&self, _space: Option<Pasid>, address: u64, write: bool) -> bool {
        self.with_words(address, 1, write, |_, _| ()).is_ok()
    }
}

/// This process's memory. The kernel copies, so that a wrong address is an error and no more.
#[derive(Debug, Default)]
struct Process {
    /// The page that was last found to be there: records lie side by side, and each is looked at before it is written.
    there: AtomicU64,
}

impl Process {
    /// Copies between parts of a buffer, in their order, and addresses that may be wrong.
    fn copy<const PARTS: usize>(parts: [(u64, *mut u8, usize); PARTS], write: bool) -> Result<(), Missing> {
        let mut vectors = [[libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; PARTS]; 2];
        let mut all = 0;
        for (at, (address, buffer, len)) in parts.into_iter().enumerate() {
            vectors[0][at] = libc::iovec {
                iov_base: buffer.cast(),
                iov_len: len,
            };
            vectors[1][at] = libc::iovec {
                iov_base: usize::try_from(address).map_err(|_| Missing)? as *mut libc::c_void,
                iov_len: len,
            };
            all += len;
        }
        let call = if write {
            libc::process_vm_writev
        } else {
            libc::process_vm_readv
        };
        let count = PARTS as libc::c_ulong;
        // SAFETY: the buffers have the bytes that are named, as the callers see to; what is wrong with the other addresses the
        // kernel finds out. What is written is what the driver gave to the model to be written: records and delta records.
        let copied = unsafe {
            call(
                libc::getpid(),
                vectors[0].as_ptr(),
                count,
                vectors[1].as_ptr(),
                count,
                0,
            )
        };
        (usize::try_from(copied) == Ok(all)).then_some(()).ok_or(Missing)
    }
}

impl Memory for Process {
    fn read(&self, _space: Option<Pasid>, address: u64, into: &mut [u8]) -> Result<(), Missing> {
        Self::copy([(address, into.as_mut_ptr(), into.len())], false)
    }

    fn write(&self, _space: Option<Pasid>, address: u64, from: &[u8]) -> Result<(), Missing> {
        Self::copy([(address, from.as_ptr().cast_mut(), from.len())], true)
    }

    fn write_record(&self, _space: Option<Pasid>, address: u64, record: &[u8; 32]) -> Result<(), Missing> {
        let (status, rest) = (record[..1].as_ptr(), record[1..].as_ptr());
        // The status comes last: the kernel copies part by part.
        let parts = [
            (address + 1, rest.cast_mut(), record.len() - 1),
            (address, status.cast_mut(), 1),
        ];
        Self::copy(parts, true)
    }

    /// A page that goes meanwhile fails when it is accessed.
    fn is_there(&self, space: Option<Pasid>, address: u64, _write: bool) -> bool {
        let page = address / PAGE;
        if self.there.load(Ordering::Relaxed) == page {
            return true;
        }
        let there = self.read(space, address, &mut [0]).is_ok();
        if there {
            self.there.store(page, Ordering::Relaxed);
        }
        there
    }
}

const _: () = assert!(PAGE == vmm_dedup_protocol::PAGE_SIZE as u64);
