//! Where things are in guest physical memory.

use vm_memory::GuestAddress;

/// The least memory that leaves room for the boot structures and a small kernel.
pub(crate) const MIN_MEMORY_MIB: u64 = 4;
/// 1 TiB, which fits into the physical addresses of every x86-64 CPU with virtualisation.
pub(crate) const MAX_MEMORY_MIB: u64 = 1 << 20;
/// What the APIC ids and tables here are made for.
pub(crate) const MAX_VCPUS: u8 = 64;
/// The GDT that the vCPU starts with.
pub(crate) const GDT: GuestAddress = GuestAddress(0x500);
/// PVH start info, its module list, and its memory map.
pub(crate) const PVH_INFO: GuestAddress = GuestAddress(0x6000);
pub(crate) const PVH_MODULES: GuestAddress = GuestAddress(0x6040);
pub(crate) const PVH_MEMORY_MAP: GuestAddress = GuestAddress(0x6080);
/// The zero page of the Linux boot protocol.
pub(crate) const ZERO_PAGE: GuestAddress = GuestAddress(0x7000);
/// The stack of the 64-bit entry grows down from here.
pub(crate) const BOOT_STACK: GuestAddress = GuestAddress(0x8ff0);
/// Page tables of the 64-bit entry: PML4, one pointer table, four directories.
pub(crate) const PAGE_TABLES: GuestAddress = GuestAddress(0x9000);
/// The command line and its size with the terminating zero.
pub(crate) const CMDLINE: GuestAddress = GuestAddress(0x2_0000);
pub(crate) const CMDLINE_SIZE: usize = 2048;
/// RAM below this is the guest's in the memory map; what is above, up to 1 MiB, is the firmware's.
pub(crate) const LOW_RAM_END: GuestAddress = GuestAddress(0x9_fc00);
/// ACPI tables; the root pointer is at the start, where Linux looks for it too.
pub(crate) const ACPI: GuestAddress = GuestAddress(0xe_0000);
/// Kernels and everything else are above.
pub(crate) const HIGH_RAM: GuestAddress = GuestAddress(0x10_0000);
/// Where the protected-mode part of a bzImage is put; it moves itself.
pub(crate) const BZIMAGE: GuestAddress = GuestAddress(0x20_0000);
/// RAM above goes behind the hole for devices.
pub(crate) const HOLE_START: u64 = 3 << 30;
pub(crate) const HOLE_END: u64 = 4 << 30;

/// Interrupt controllers.
pub(crate) const IOAPIC: u32 = 0xfec0_0000;
pub(crate) const LOCAL_APIC: u32 = 0xfee0_0000;
/// Pages that KVM needs on Intel CPUs, in the hole.
pub(crate) const IDENTITY_MAP: u64 = 0xfffb_c000;
pub(crate) const TSS: usize = 0xfffb_d000;

/// The serial port and its interrupt.
pub(crate) const COM1: u16 = 0x3f8;
pub(crate) const COM1_IRQ: u32 = 4;
/// The keyboard controller's command port, for its reset line.
pub(crate) const I8042_COMMAND: u16 = 0x64;
/// Cloud Hypervisor's shutdown port; also the ACPI reset register.
pub(crate) const SHUTDOWN_PORT: u16 = 0x600;
pub(crate) const SHUTDOWN_REBOOT: u8 = 1;
pub(crate) const SHUTDOWN_POWER_OFF: u8 = 0x34;
/// ACPI's PM1a registers (the event block is status and enable), and its interrupt.
pub(crate) const PM1A_CONTROL: u16 = 0x604;
pub(crate) const PM1A_STATUS: u16 = 0x608;
pub(crate) const PM1A_ENABLE: u16 = PM1A_STATUS + 2;
pub(crate) const SCI_IRQ: u16 = 9;
