//! The ports: a serial line, and the ways to ask for an end.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial};
use vmm_sys_util::eventfd::EventFd;

use crate::layout;

/// Registers of a 16550.
const SERIAL_PORTS: u16 = 8;
/// The keyboard controller's command that pulses the CPU's reset line.
const I8042_RESET: u8 = 0xfe;
/// PM1a control: ACPI is on.
const SCI_ENABLE: u16 = 1;
/// PM1a control, second byte: go to sleep. Every sleep is a power-off here.
const SLEEP_ENABLE: u8 = 0x20;
/// What nobody answers.
const FLOATING: u8 = 0xff;

/// Why a VM ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest powered off.
    PowerOff,
    /// The guest asked for a reset.
    Reboot,
    /// The host stopped it.
    Stopped,
}

/// The serial line's interrupt.
struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

struct Line {
    serial: Serial<Interrupt, NoEvents, Box<dyn Write + Send>>,
    /// Input that the guest has not made room for yet.
    waiting: VecDeque<u8>,
}

impl Line {
    fn feed(&mut self) {
        let room = self.serial.fifo_capacity().min(self.waiting.len());
        let bytes: Vec<u8> = self.waiting.drain(..room).collect();
        if let Err(error) = self.serial.enqueue_raw_bytes(&bytes) {
            log::warn!("serial input is lost: {error:?}");
        }
    }
}

/// Everything behind the I/O ports that is not in the kernel.
pub(crate) struct Devices {
    line: Mutex<Line>,
    /// The ACPI events that the guest has enabled: it wants to read back what it wrote, and none ever happens.
    acpi_events: AtomicU16,
}

impl Devices {
    /// `interrupt` is wired to [`layout::COM1_IRQ`].
    pub(crate) fn new(interrupt: EventFd, output: Box<dyn Write + Send>) -> Self {
        let serial = Serial::new(Interrupt(interrupt), output);
        Devices {
            line: Mutex::new(Line {
                serial,
                waiting: VecDeque::new(),
            }),
            acpi_events: AtomicU16::new(0),
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Types into the serial line.
    pub(crate) fn serial_input(&self, bytes: &[u8]) {
        let mut line = self.line();
        line.waiting.extend(bytes);
        line.feed();
    }

    /// A guest reads a port.
    pub(crate) fn read(&self, port: u16, data: &mut [u8]) {
        data.fill(FLOATING);
        match (port, data) {
            (_, [byte]) if serial_register(port).is_some() => {
                let mut line = self.line();
                *byte = line.serial.read(serial_register(port).unwrap_or_default());
                line.feed();
            }
            // Ready for commands, with nothing to say.
            (layout::I8042_COMMAND, [byte]) => *byte = 0,
            (layout::PM1A_CONTROL, [low, high]) => [*low, *high] = SCI_ENABLE.to_le_bytes(),
            (layout::PM1A_STATUS, data) => data.fill(0),
            (layout::PM1A_ENABLE, [low, high]) => {
                [*low, *high] = self.acpi_events.load(Ordering::Relaxed).to_le_bytes();
            }
            _ => {}
        }
    }

    /// A guest writes a port; the reason if that ends the VM.
    pub(crate) fn write(&self, port: u16, data: &[u8]) -> Option<ExitReason> {
        match (port, data) {
            (_, [byte]) if serial_register(port).is_some() => {
                let register = serial_register(port).unwrap_or_default();
                if let Err(error) = self.line().serial.write(register, *byte) {
                    log::warn!("serial output is lost: {error:?}");
                }
                None
            }
            (layout::I8042_COMMAND, [I8042_RESET]) => Some(ExitReason::Reboot),
            (layout::SHUTDOWN_PORT, [layout::SHUTDOWN_REBOOT]) => Some(ExitReason::Reboot),
            (layout::SHUTDOWN_PORT, [layout::SHUTDOWN_POWER_OFF]) => Some(ExitReason::PowerOff),
            (layout::PM1A_CONTROL, [_, high, ..]) if high & SLEEP_ENABLE != 0 => Some(ExitReason::PowerOff),
            (layout::PM1A_ENABLE, &[low, high]) => {
                self.acpi_events
                    .store(u16::from_le_bytes([low, high]), Ordering::Relaxed);
                None
            }
            _ => None,
        }
    }
}

fn serial_register(port: u16) -> Option<u8> {
    let register = port
        .checked_sub(layout::COM1)
        .filter(|register| *register < SERIAL_PORTS)?;
    u8::try_from(register).ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panics").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn devices(output: &Output) -> Devices {
        Devices::new(EventFd::new(0).expect("an event"), Box::new(output.clone()))
    }

    #[test]
    fn serial_output_arrives() {
        let output = Output::default();

        let end = devices(&output).write(0x3f8, b"x");

        assert_eq!(end, None);
        assert_eq!(*output.0.lock().expect("no panics"), b"x");
    }

    #[test]
    fn serial_input_longer_than_the_fifo_arrives_in_order() {
        let devices = devices(&Output::default());
        let input: Vec<u8> = (0..200).collect();

        devices.serial_input(&input);
        let received: Vec<u8> = input
            .iter()
            .map(|_| {
                let mut byte = [0];
                devices.read(0x3f8, &mut byte);
                byte[0]
            })
            .collect();

        assert_eq!(received, input);
    }

    #[test]
    fn ends_are_recognised() {
        let devices = devices(&Output::default());

        assert_eq!(devices.write(0x600, &[0x34]), Some(ExitReason::PowerOff));
        assert_eq!(devices.write(0x600, &[1]), Some(ExitReason::Reboot));
        assert_eq!(devices.write(0x604, &[0, 0x34]), Some(ExitReason::PowerOff));
        assert_eq!(devices.write(0x64, &[0xfe]), Some(ExitReason::Reboot));
        assert_eq!(devices.write(0x600, &[0x33]), None);
        assert_eq!(devices.write(0x604, &[0xff, 0x14]), None);
    }

    #[test]
    fn unknown_ports_float() {
        let mut data = [0; 4];

        devices(&Output::default()).read(0xcfc, &mut data);

        assert_eq!(data, [0xff; 4]);
    }
}
