//! The least ACPI with which Linux finds all CPUs and can power off: RSDP, XSDT, FADT, MADT, and a DSDT that has
//! nothing but `\_S5`. Offsets are those of the ACPI specification 6.x.

use vm_memory::{Address, Bytes, GuestAddress};

use crate::error::Error;
use crate::layout;
use crate::memory::GuestMemory;

const HEADER: usize = 36;
const FADT: usize = 276;
const RSDP: usize = 36;

/// `Name (\_S5, Package () { 5, 5, 0, 0 })`
const DSDT_CODE: &[u8] = &[
    0x08, b'_', b'S', b'5', b'_', 0x12, 0x08, 0x04, 0x0a, 5, 0x0a, 5, 0, 0,
];

/// Legacy devices, no keyboard controller, no VGA, no CMOS clock.
const BOOT_ARCHITECTURE: u16 = 0x25;
/// WBINVD, C1, no fixed buttons, no fixed clock, reset register.
const FADT_FLAGS: u32 = 0x475;

const LOCAL_APIC: u8 = 0;
const IO_APIC: u8 = 1;
const OVERRIDE: u8 = 2;
const LOCAL_NMI: u8 = 4;
const LEVEL_ACTIVE_HIGH: u16 = 0xd;

/// A table under construction.
struct Table(Vec<u8>);

impl Table {
    fn new(signature: &[u8; 4], revision: u8) -> Self {
        let mut bytes = signature.to_vec();
        bytes.resize(HEADER, 0);
        bytes[8] = revision;
        bytes[10..16].copy_from_slice(b"VMMDDP");
        bytes[16..24].copy_from_slice(b"REFVMM  ");
        bytes[24] = 1; // OEM revision
        bytes[28..32].copy_from_slice(b"VMMD");
        bytes[32] = 1; // creator revision
        Table(bytes)
    }

    fn push(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) -> &mut Self {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
        self
    }

    fn finish(&mut self) -> Result<&[u8], Error> {
        let length = u32::try_from(self.0.len()).map_err(|_| Error::VcpuCount { vcpus: u8::MAX })?;
        self.put(4, &length.to_le_bytes());
        self.0[9] = checksum(&self.0);
        Ok(&self.0)
    }
}

/// What makes the sum of all bytes zero, while the checksum's own byte is zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte))
}

/// Writes the tables; the root pointer is at [`layout::ACPI`].
pub(super) fn write(memory: &GuestMemory, vcpus: u8) -> Result<(), Error> {
    let mut next = layout::ACPI.raw_value() + 64;
    let mut place = |table: &mut Table| -> Result<u64, Error> {
        let address = next;
        let bytes = table.finish()?;
        memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(Error::WriteMemory)?;
        next = (next + bytes.len() as u64).next_multiple_of(64);
        Ok(address)
    };
    let dsdt = place(Table::new(b"DSDT", 2).push(DSDT_CODE))?;
    let fadt = place(&mut fadt(dsdt))?;
    let madt = place(&mut madt(vcpus))?;
    let xsdt = place(
        Table::new(b"XSDT", 1)
            .push(&fadt.to_le_bytes())
            .push(&madt.to_le_bytes()),
    )?;
    memory
        .write_slice(&rsdp(xsdt), layout::ACPI)
        .map_err(Error::WriteMemory)
}

fn fadt(dsdt: u64) -> Table {
    let mut table = Table::new(b"FACP", 6);
    table.0.resize(FADT, 0);
    let [a, b, c, d, ..] = dsdt.to_le_bytes();
    table
        .put(40, &[a, b, c, d])
        .put(46, &layout::SCI_IRQ.to_le_bytes())
        .put(56, &u32::from(layout::PM1A_STATUS).to_le_bytes())
        .put(64, &u32::from(layout::PM1A_CONTROL).to_le_bytes())
        .put(88, &[4, 2]) // lengths of the event and the control block
        .put(109, &BOOT_ARCHITECTURE.to_le_bytes())
        .put(112, &FADT_FLAGS.to_le_bytes())
        .put(116, &[1, 8, 0, 1]) // reset register: one byte of I/O space
        .put(120, &u64::from(layout::SHUTDOWN_PORT).to_le_bytes())
        .put(128, &[layout::SHUTDOWN_REBOOT])
        .put(140, &dsdt.to_le_bytes());
    table
}

fn madt(vcpus: u8) -> Table {
    let mut table = Table::new(b"APIC", 5);
    table.push(&layout::LOCAL_APIC.to_le_bytes());
    table.push(&1u32.to_le_bytes()); // there are 8259s too
    for id in 0..vcpus {
        table.push(&[LOCAL_APIC, 8, id, id, 1, 0, 0, 0]);
    }
    table
        .push(&[IO_APIC, 12, vcpus, 0])
        .push(&layout::IOAPIC.to_le_bytes())
        .push(&0u32.to_le_bytes());
    let [low, high] = layout::SCI_IRQ.to_le_bytes();
    table
        .push(&[OVERRIDE, 10, 0, low, low, high, 0, 0])
        .push(&LEVEL_ACTIVE_HIGH.to_le_bytes());
    table.push(&[LOCAL_NMI, 6, 0xff, 0, 0, 1]); // LINT1 of every CPU
    table
}

fn rsdp(xsdt: u64) -> [u8; RSDP] {
    let mut bytes = [0; RSDP];
    bytes[..8].copy_from_slice(b"RSD PTR ");
    bytes[9..15].copy_from_slice(b"VMMDDP");
    bytes[15] = 2;
    bytes[20] = 36;
    bytes[24..32].copy_from_slice(&xsdt.to_le_bytes());
    bytes[8] = checksum(&bytes[..20]);
    bytes[32] = checksum(&bytes);
    bytes
}
