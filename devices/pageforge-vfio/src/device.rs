//! The device behind its registers: modules and a ring that work in a thread of their own, and raise interrupts.

use crate::hash_key::EccOffsets;
use crate::memory::Memory;
use crate::module::Module;
use crate::ring::Ring;
use crate::scan_table::{Candidate, EntryIndex, OTHER_PAGES, OtherPage, Pointer, Ppn};
use crate::timing::Account;
use crate::window::{INFO_BUSY, Info, RING, TABLES, Window};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use vmm_dedup::compare::Stopwatch;
use vmm_dedup_pageforge_registers::{self as reg, Function, Refusal};
use vmm_dedup_protocol::mapping::Mapping;

/// Jobs that the ring does before it looks whether something else is to be done.
const JOBS_AT_ONCE: usize = 32;

/// What a device is connected to.
pub trait Board: Send + Sync + 'static {
    /// The memory, for as long as the device works without a pause: some jobs of the ring, or a table.
    fn memory(&self) -> impl Memory;

    /// Raises the interrupt of a vector: 0 for the ring, 1 + m for module m. Must not block.
    fn interrupt(&self, vector: usize);
}

/// A device. Dropping it ends its thread.
#[derive(Debug)]
pub struct Device<B: Board> {
    shared: Arc<Shared<B>>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared<B> {
    state: Mutex<State>,
    wake: Condvar,
    window: Arc<Mapping>,
    board: Arc<B>,
}

/// A module, and the registers that belong to it.
#[derive(Debug, Default)]
struct Slot {
    /// Nothing while it works.
    module: Option<Module>,
    triggered: bool,
    operands: [u32; (reg::FUNCTION / 4) as usize],
    info: u32,
    key: u32,
}

#[derive(Debug)]
struct State {
    slots: Vec<Slot>,
    /// Nothing while it works.
    ring: Option<Ring>,
    /// The ring's head, when it last was here.
    head: u32,
    tail: u32,
    ring_offsets: u32,
    interrupts: u32,
    enabled: u32,
    refused: u32,
    /// Counts resets: who worked during one throws away what he has.
    generation: u64,
    stopping: bool,
    account: Account,
    model_ns: u64,
}

impl State {
    fn new(modules: usize, generation: u64) -> Self {
        let slot = || Slot {
            module: Some(Module::default()),
            ..Slot::default()
        };
        Self {
            slots: (0..modules).map(|_| slot()).collect(),
            ring: Some(Ring::new(modules)),
            head: 0,
            tail: 0,
            ring_offsets: 0,
            interrupts: 0,
            enabled: 0,
            refused: 0,
            generation,
            stopping: false,
            account: Account::default(),
            model_ns: 0,
        }
    }

    fn refuse(&mut self, why: Refusal) {
        self.refused = why as u32;
    }

    /// Sets a bit of INTERRUPTS; returns whether an interrupt is to be raised.
    fn raise(&mut self, bit: u32) -> bool {
        self.interrupts |= bit;
        self.enabled & bit != 0
    }
}

impl<B: Board> Device<B> {
    /// A device with some modules (1 to [`MAX_MODULES`](reg::MAX_MODULES)) and this window, which must have
    /// [`WINDOW_BYTES`](crate::window::WINDOW_BYTES).
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn new(modules: usize, window: Arc<Mapping>, board: Arc<B>) -> std::io::Result<Self> {
        let modules = modules.clamp(1, reg::MAX_MODULES);
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(modules, 0)),
            wake: Condvar::new(),
            window,
            board,
        });
        let work = Arc::clone(&shared);
        let worker = std::thread::Builder::new()
            .name("pageforge".into())
            .spawn(move || work.work())?;
        Ok(Self {
            shared,
            worker: Some(worker),
        })
    }

    /// Resets the device: registers, tables of the modules, ring and account, but not the window's content.
    pub fn reset(&self) {
        let mut state = self.shared.lock();
        *state = State::new(state.slots.len(), state.generation + 1);
        Window::new(self.shared.window.words()).set_head(0);
    }

    /// Reads from BAR 0.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let mut state = self.shared.lock();
        match registers_of(offset, data.len()) {
            Some(registers) => {
                for (register, bytes) in registers.zip(data.chunks_exact_mut(4)) {
                    bytes.copy_from_slice(&state.read(register).to_le_bytes());
                }
            }
            None => state.refuse(Refusal::Access),
        }
    }

    /// Writes to BAR 0.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let Some(registers) = registers_of(offset, data.len()) else {
            self.shared.lock().refuse(Refusal::Access);
            return;
        };
        for (register, bytes) in registers.zip(data.chunks_exact(4)) {
            let value = bytes.try_into().map_or(0, u32::from_le_bytes);
            if register == reg::RESET {
                self.reset();
            } else {
                self.shared.lock().write(register, value);
            }
        }
        self.shared.wake.notify_one();
    }
}

impl<B: Board> Drop for Device<B> {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.wake.notify_one();
        if let Some(worker) = self.worker.take() {
            // It cannot have panicked but by a bug, and then there is nothing left to end.
            let _ = worker.join();
        }
    }
}

/// The registers that an access means, if it has a width and an alignment that registers have.
fn registers_of(offset: u64, len: usize) -> Option<impl Iterator<Item = u32>> {
    let offset = u32::try_from(offset).ok()?;
    let width = u32::try_from(len).ok().filter(|len| matches!(len, 4 | 8))?;
    offset
        .is_multiple_of(width)
        .then(|| (offset..offset + width).step_by(4))
}

impl State {
    fn read(&mut self, register: u32) -> u32 {
        match register {
            0 => reg::MAGIC,
            reg::SHAPE => low(self.slots.len()) | reg::LAYOUT << 16,
            reg::TABLES => low(TABLES),
            reg::RING => low(RING),
            reg::RING_TAIL => self.tail,
            reg::INTERRUPTS => self.interrupts,
            reg::ENABLE => self.enabled,
            reg::REFUSED => self.refused,
            reg::RING_OFFSETS => self.ring_offsets,
            reg::DOORBELL | reg::RESET => 0,
            _ => match (self.counter(register), module_register(register)) {
                (Some(half), _) => half,
                (None, Some((module, register))) => self.read_module(module, register),
                (None, None) => {
                    self.refuse(Refusal::Access);
                    0
                }
            },
        }
    }

    fn read_module(&mut self, module: usize, register: u32) -> u32 {
        let Some(slot) = self.slots.get(module) else {
            self.refuse(Refusal::Access);
            return 0;
        };
        match register {
            reg::INFO => slot.info,
            reg::KEY => slot.key,
            _ => slot.operands.get((register / 4) as usize).copied().unwrap_or(0),
        }
    }

    /// Half of a counter.
    fn counter(&self, register: u32) -> Option<u32> {
        let at = (register.checked_sub(reg::ACCOUNT)? / 4) as usize;
        let account = &self.account;
        let counters: [u64; reg::COUNTERS] = [
            account.tables,
            account.comparisons,
            account.cache_lines,
            account.dram_lines,
            account.network_lines,
            account.key_lines,
            account.keys,
            account.cycles,
            account.cycles_squared,
            self.model_ns,
        ];
        let counter = counters.get(at / 2)?;
        #[allow(clippy::cast_possible_truncation)] // a half
        Some((counter >> (at % 2 * 32)) as u32)
    }

    fn write(&mut self, register: u32, value: u32) {
        match register {
            reg::DOORBELL => {
                for (module, slot) in self.slots.iter_mut().enumerate() {
                    slot.triggered |= value >> module & 1 == 1;
                }
            }
            reg::RING_TAIL => self.set_tail(value),
            reg::INTERRUPTS => self.interrupts &= !value,
            reg::ENABLE => self.enabled = value,
            reg::REFUSED => self.refused = 0,
            reg::RING_OFFSETS => match (offsets(value), &mut self.ring) {
                (Some(offsets), Some(ring)) => {
                    ring.update_ecc_offset(offsets);
                    self.ring_offsets = value;
                }
                (None, _) => self.refuse(Refusal::Offset),
                (_, None) => self.refuse(Refusal::Busy),
            },
            _ => match module_register(register) {
                Some((module, register)) if module < self.slots.len() => {
                    self.write_module(module, register, value);
                }
                _ => self.refuse(Refusal::Access),
            },
        }
    }

    fn set_tail(&mut self, tail: u32) {
        if tail.wrapping_sub(self.head) as usize <= RING {
            self.tail = tail;
        } else {
            self.refuse(Refusal::Ring);
        }
    }

    fn write_module(&mut self, module: usize, register: u32, value: u32) {
        let slot = &mut self.slots[module];
        if register != reg::FUNCTION {
            match slot.operands.get_mut((register / 4) as usize) {
                Some(operand) => *operand = value,
                None => self.refuse(Refusal::Access),
            }
            return;
        }
        let done = Function::of_code(value)
            .ok_or(Refusal::Function)
            .and_then(|function| slot.call(function));
        if let Err(why) = done {
            self.refuse(why);
        }
    }
}

/// The low 32 bits of a small number.
#[allow(clippy::cast_possible_truncation)] // sizes of this device
fn low(number: usize) -> u32 {
    number as u32
}

/// Module and its register.
fn module_register(register: u32) -> Option<(usize, u32)> {
    let at = register.checked_sub(reg::MODULES)?;
    let module = (at / reg::MODULE_STRIDE) as usize;
    (module < reg::MAX_MODULES).then_some((module, at % reg::MODULE_STRIDE))
}

fn offsets(bits: u32) -> Option<EccOffsets> {
    EccOffsets::try_new(bits.to_le_bytes()).ok()
}

impl Slot {
    fn operand(&self, register: u32) -> u32 {
        self.operands[(register / 4) as usize]
    }

    fn ppn(&self) -> Result<Ppn, Refusal> {
        let number = u64::from(self.operand(reg::PPN_HIGH)) << 32 | u64::from(self.operand(reg::PPN_LOW));
        Ppn::try_new(number).map_err(|_| Refusal::Ppn)
    }

    fn pointer(&self, register: u32) -> Result<Pointer, Refusal> {
        let bits = u8::try_from(self.operand(register)).map_err(|_| Refusal::Pointer)?;
        Ok(Pointer::new(bits))
    }

    fn last_refill(&self) -> bool {
        self.operand(reg::LAST_REFILL) & 1 == 1
    }

    /// One of the functions of table 1.
    fn call(&mut self, function: Function) -> Result<(), Refusal> {
        if function == Function::GetPfeInfo {
            self.get_pfe_info();
            return Ok(());
        }
        if self.triggered {
            return Err(Refusal::Busy);
        }
        // Operands first: what is refused changes nothing.
        let (ppn, ptr, last_refill) = (self.ppn(), self.pointer(reg::PTR), self.last_refill());
        let (less, more) = (self.pointer(reg::LESS), self.pointer(reg::MORE));
        let (index, ecc) = (
            self.operand(reg::INDEX) as usize,
            offsets(self.operand(reg::OFFSETS)),
        );
        let module = self.module.as_mut().ok_or(Refusal::Busy)?;
        match function {
            Function::InsertPpn => {
                let index = EntryIndex::try_new(index).map_err(|_| Refusal::Index)?;
                let page = OtherPage {
                    ppn: ppn?,
                    less: less?,
                    more: more?,
                };
                module.insert_ppn(index, page);
            }
            Function::InsertPfe => module.insert_pfe(Candidate {
                ppn: ppn?,
                last_refill,
                ptr: ptr?,
            }),
            Function::UpdatePfe if module.pfe_info().is_none() => return Err(Refusal::NoCandidate),
            Function::UpdatePfe => module.update_pfe(last_refill, ptr?),
            Function::UpdateEccOffset => module.update_ecc_offset(ecc.ok_or(Refusal::Offset)?),
            Function::Clear => module.load([None; OTHER_PAGES]),
            Function::GetPfeInfo => {}
        }
        Ok(())
    }

    fn get_pfe_info(&mut self) {
        let info = self
            .module
            .as_ref()
            .map(|module| module.pfe_info().map(Info::from));
        (self.info, self.key) = match info {
            Some(_) if self.triggered => (INFO_BUSY, 0),
            None => (INFO_BUSY, 0),
            Some(None) => (0, 0),
            Some(Some(info)) => (info.bits(), info.key_bits()),
        };
    }
}

impl<B: Board> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker's life.
    fn work(&self) {
        let mut state = self.lock();
        while !state.stopping {
            state = match (triggered(&state), has_jobs(&state)) {
                (Some(module), _) => self.run_module(state, module),
                (None, true) => self.run_ring(state),
                (None, false) => self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn run_module<'a>(&'a self, mut state: MutexGuard<'a, State>, number: usize) -> MutexGuard<'a, State> {
        let generation = state.generation;
        let Some(mut module) = state.slots[number].module.take() else {
            return state;
        };
        drop(state);
        let (before, watch) = (*module.account(), Stopwatch::start());
        module.run(&self.board.memory());
        let (done, spent) = (module.account().since(&before), watch.stop_cpu());
        let mut state = self.lock();
        if state.generation == generation {
            state.account.add(&done);
            state.model_ns += spent;
            let slot = &mut state.slots[number];
            slot.module = Some(module);
            slot.triggered = false;
            if state.raise(1 << number) {
                self.board.interrupt(number + 1);
            }
        }
        state
    }

    fn run_ring<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let (generation, tail) = (state.generation, state.tail);
        let Some(mut ring) = state.ring.take() else {
            return state;
        };
        drop(state);
        let (before, watch) = (ring.account(), Stopwatch::start());
        let window = Window::new(self.window.words());
        let memory = self.board.memory();
        for _ in 0..JOBS_AT_ONCE {
            if ring.head() == tail {
                break;
            }
            ring.step(window, &memory);
        }
        drop(memory);
        let (done, spent) = (ring.account().since(&before), watch.stop_cpu());
        let mut state = self.lock();
        if state.generation == generation {
            state.account.add(&done);
            state.model_ns += spent;
            state.head = ring.head();
            state.ring = Some(ring);
            // Published only now: whoever sees it may ring for as many jobs more.
            window.set_head(state.head);
            if state.head == state.tail && state.raise(reg::RING_BIT) {
                self.board.interrupt(0);
            }
        }
        state
    }
}

fn triggered(state: &State) -> Option<usize> {
    state.slots.iter().position(|slot| slot.triggered)
}

fn has_jobs(state: &State) -> bool {
    state.ring.is_some() && state.head != state.tail
}

#[cfg(test)]
mod tests;
