//! I/O ports: a serial line, the balloon's configuration space, and the way out.

use crate::balloon::Balloon;
use crate::vm::Failure;
use std::convert::Infallible;
use std::io::{Stdout, stdout};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};

const COM1: u16 = 0x3f8;
const COM1_END: u16 = COM1 + 7;
/// Of PCI: which register, and what it holds.
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;
/// Where Cloud Hypervisor has it too, and what means S5.
const SHUTDOWN: u16 = 0x600;
const S5: u8 = 0x34;

/// Guests poll the serial line.
pub(crate) struct NoInterrupt;

impl Trigger for NoInterrupt {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Whether the guest goes on.
#[derive(PartialEq, Eq)]
pub(crate) enum Power {
    On,
    Off,
}

pub(crate) struct Ports {
    serial: Serial<NoInterrupt, NoEvents, Stdout>,
    pub(crate) balloon: Balloon,
}

impl Ports {
    pub(crate) fn new(balloon: Balloon) -> Self {
        Self {
            serial: Serial::new(NoInterrupt, stdout()),
            balloon,
        }
    }

    pub(crate) fn serial(&self) -> SerialState {
        self.serial.state()
    }

    pub(crate) fn restore_serial(&mut self, state: &SerialState) -> Result<(), Failure> {
        let serial = Serial::from_state(state, NoInterrupt, NoEvents, stdout());
        self.serial = serial.map_err(|error| format!("{error:?}"))?;
        Ok(())
    }

    /// Types into the serial line.
    pub(crate) fn type_in(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let taken = self
            .serial
            .enqueue_raw_bytes(bytes)
            .map_err(|error| format!("{error:?}"))?;
        match taken == bytes.len() {
            true => Ok(()),
            false => Err("the serial line is full".into()),
        }
    }

    pub(crate) fn read(&mut self, port: u16, data: &mut [u8]) {
        match (port, data) {
            (COM1..=COM1_END, [byte]) => *byte = self.serial.read(register(port)),
            (CONFIG_DATA, data @ [_, _, _, _]) => data.copy_from_slice(&self.balloon.read().to_le_bytes()),
            // There is nothing.
            (_, data) => data.fill(0xff),
        }
    }

    pub(crate) fn write(&mut self, port: u16, data: &[u8]) -> Result<Power, Failure> {
        match (port, data) {
            (COM1..=COM1_END, [byte]) => {
                let written = self.serial.write(register(port), *byte);
                written.map_err(|error| format!("{error:?}"))?;
            }
            (CONFIG_ADDRESS, &[a, b, c, d]) => self.balloon.choose(u32::from_le_bytes([a, b, c, d])),
            (CONFIG_DATA, &[a, b, c, d]) => self.balloon.write(u32::from_le_bytes([a, b, c, d])),
            (SHUTDOWN, [S5]) => return Ok(Power::Off),
            _ => {}
        }
        Ok(Power::On)
    }
}

/// Of the serial line.
fn register(port: u16) -> u8 {
    (port - COM1).to_le_bytes()[0]
}
