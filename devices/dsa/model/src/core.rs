//! The device as a whole: its portals, its registers, its clock.

use crate::board::Board;
use crate::commands::progress;
use crate::control::Control;
use crate::dice::{Dice, Faults};
use crate::queue::Queue;
use crate::registers;
use crate::shape::{Shape, Timing};
use crate::works::{Account, Submitted, Way, Works};

/// The device.
#[derive(Debug)]
pub struct Core {
    works: Works,
}

impl Core {
    /// A device after power-on.
    #[must_use]
    pub fn new(shape: Shape, timing: Timing, faults: Faults) -> Self {
        Self {
            works: Works::new(shape, timing, faults),
        }
    }

    /// What it can do.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.works.shape
    }

    /// What it has done.
    #[must_use]
    pub fn account(&self) -> Account {
        self.works.account
    }

    /// What goes wrong from now on.
    pub fn set_faults(&mut self, faults: Faults) {
        self.works.dice = Dice::new(faults);
    }

    /// A descriptor is written to a portal: 64 bytes at an offset in BAR 2, at a time, ns.
    pub fn submit(
        &mut self,
        offset: u64,
        way: Way,
        bytes: &[u8; 64],
        now: u64,
        board: &dyn Board,
    ) -> Submitted {
        self.works.submit(offset, way, bytes, now, board)
    }

    /// Does all that is due by a time, ns.
    pub fn advance(&mut self, now: u64, board: &dyn Board) {
        self.works.advance(now, board);
        progress(&mut self.works, now, board);
    }

    /// When it wants to be looked at again, ns: `None` if nothing will happen by itself.
    #[must_use]
    pub fn next_event(&self) -> Option<u64> {
        let command = self.works.control.command_due();
        [self.works.next_event(), command].into_iter().flatten().min()
    }

    /// Reads from BAR 0 at a time, ns. What no register covers reads as zeros.
    pub fn read(&mut self, offset: u64, into: &mut [u8], now: u64, board: &dyn Board) {
        self.advance(now, board);
        self.read_registers(offset, into);
    }

    /// The same, of the device as it is: it does nothing of what is due.
    pub fn read_registers(&self, offset: u64, into: &mut [u8]) {
        registers::read(&self.works, offset, into);
    }

    /// Writes to BAR 0 at a time, ns: whole words of 4 bytes. Others are ignored.
    pub fn write(&mut self, offset: u64, from: &[u8], now: u64, board: &dyn Board) {
        self.advance(now, board);
        self.write_registers(offset, from, now, board);
    }

    /// The same, of the device as it is: it does nothing of what was due before, and accesses no memory.
    pub fn write_registers(&mut self, offset: u64, from: &[u8], now: u64, board: &dyn Board) {
        registers::write(&mut self.works, offset, from, now, board);
    }

    /// PCI's configuration space has changed: whether the device may master the bus, and use PASIDs.
    pub fn set_bus(&mut self, bus_master: bool, pasid: bool) {
        (self.works.control.bus_master, self.works.control.pasid) = (bus_master, pasid);
    }

    /// PCI's function level reset: as after power-on.
    pub fn function_reset(&mut self) {
        let (bus_master, pasid) = (self.works.control.bus_master, self.works.control.pasid);
        self.works.drop_all();
        self.works.queues.fill_with(Queue::default);
        self.works.control = Control::new(&self.works.shape);
        self.set_bus(bus_master, pasid);
    }
}
