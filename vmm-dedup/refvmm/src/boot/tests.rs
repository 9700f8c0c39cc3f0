//! Boot parameters as the guest reads them, without KVM.

use std::io::Write;

use linux_loader::loader::bootparam::boot_params;
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};

use super::*;
use crate::config::ThpMode;

const MEMORY_MIB: u64 = 64;

fn memory() -> GuestMemory {
    memory::map(MEMORY_MIB, ThpMode::Default).expect("64 MiB can be mapped")
}

fn config(initrd: Option<&Path>) -> VmConfig {
    VmConfig {
        memory_mib: MEMORY_MIB,
        vcpus: 2,
        kernel: Image::Bytes(vmm_dedup_payload::ELF),
        initrd: initrd.map(Path::to_owned),
        cmdline: "seed=7".to_owned(),
        thp: ThpMode::Default,
    }
}

fn initrd_of(size: usize) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(&vec![0xab; size]).expect("room for it");
    file
}

fn read<T: vm_memory::ByteValued>(memory: &GuestMemory, address: u64) -> T {
    memory
        .read_obj(GuestAddress(address))
        .expect("the address is in memory")
}

fn bytes(memory: &GuestMemory, address: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    memory
        .read_slice(&mut bytes, GuestAddress(address))
        .expect("the range is in memory");
    bytes
}

#[test]
fn pvh_guest_finds_command_line_initrd_and_memory_map() {
    let (memory, initrd) = (memory(), initrd_of(5000));

    let entry = load(&memory, &config(Some(initrd.path()))).expect("loads");

    assert!(matches!(entry, Entry::Pvh(_)));
    let info: hvm_start_info = read(&memory, layout::PVH_INFO.raw_value());
    assert_eq!(
        (info.magic, info.version, info.nr_modules, info.memmap_entries),
        (0x336e_c578, 1, 1, 3)
    );
    assert_eq!(bytes(&memory, info.cmdline_paddr, 7), b"seed=7\0");
    let module: hvm_modlist_entry = read(&memory, info.modlist_paddr);
    assert_eq!((module.paddr, module.size), (MEMORY_MIB * MIB - 8192, 5000));
    assert_eq!(bytes(&memory, module.paddr + 4999, 2), [0xab, 0]);
    let last: hvm_memmap_table_entry = read(&memory, info.memmap_paddr + 2 * 24);
    assert_eq!(
        (last.addr, last.size, last.type_),
        (MIB, (MEMORY_MIB - 1) * MIB, 1)
    );
}

#[test]
fn linux_finds_command_line_initrd_and_memory_map() {
    let (memory, initrd) = (
        memory(),
        Range {
            start: 0x300_0000,
            size: 77,
        },
    );

    linux::write(&memory, None, "console=ttyS0", Some(initrd)).expect("fits");

    let params: boot_params = read(&memory, layout::ZERO_PAGE.raw_value());
    let header = params.hdr;
    assert_eq!({ header.boot_flag }, 0xaa55);
    assert_eq!({ header.ramdisk_image }, 0x300_0000);
    assert_eq!({ header.ramdisk_size }, 77);
    assert_eq!(u64::from(header.cmd_line_ptr), layout::CMDLINE.raw_value());
    assert_eq!({ params.acpi_rsdp_addr }, layout::ACPI.raw_value());
    assert_eq!(params.e820_entries, 3);
}

#[test]
fn page_tables_map_every_address_below_4_gib_to_itself() {
    let memory = memory();
    linux::write(&memory, None, "", None).expect("fits");

    let walk = |address: u64| {
        let mut table = layout::PAGE_TABLES.raw_value();
        for shift in [39, 30] {
            table = read::<u64>(&memory, table + (address >> shift & 511) * 8) & !0xfff;
        }
        read::<u64>(&memory, table + (address >> 21 & 511) * 8)
    };

    for address in [0, 0x100_0000, 0xffff_ffff] {
        assert_eq!(walk(address), (address / (2 * MIB) * 2 * MIB) | 0x83);
    }
}

#[test]
fn acpi_tables_are_linked_and_their_sums_are_zero() {
    let memory = memory();
    acpi::write(&memory, 3).expect("fits");
    let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    let table = |address: u64| {
        let length: u32 = read(&memory, address + 4);
        bytes(&memory, address, length as usize)
    };

    let root = bytes(&memory, layout::ACPI.raw_value(), 36);
    let xsdt = read::<u64>(&memory, layout::ACPI.raw_value() + 24);
    let (fadt, madt) = (read::<u64>(&memory, xsdt + 36), read::<u64>(&memory, xsdt + 44));
    let dsdt = read::<u64>(&memory, fadt + 140);

    assert_eq!((sum(&root[..20]), sum(&root)), (0, 0));
    for (address, signature) in [(xsdt, b"XSDT"), (fadt, b"FACP"), (madt, b"APIC"), (dsdt, b"DSDT")] {
        let table = table(address);
        assert_eq!(&table[..4], signature);
        assert_eq!(sum(&table), 0);
    }
    let processors = table(madt)[44..]
        .chunks_exact(8)
        .take_while(|entry| entry[..2] == [0, 8])
        .count();
    assert_eq!(processors, 3);
}

#[test]
fn initrd_that_does_not_fit_is_refused_with_the_room_there_is() {
    let (memory, initrd) = (memory(), initrd_of(64 << 20));

    let error = load(&memory, &config(Some(initrd.path()))).expect_err("it is as large as the memory");

    assert!(matches!(error, Error::InitrdTooLarge { size, room, .. } if size == 64 << 20 && room < size));
}

#[test]
fn missing_initrd_is_named() {
    let error = load(&memory(), &config(Some(Path::new("no-such-initrd")))).expect_err("it is not there");

    assert_eq!(error.to_string(), "cannot read the initrd no-such-initrd");
}

#[test]
fn kernel_that_does_not_fit_is_refused() {
    let mut image = vmm_dedup_payload::ELF.to_vec();
    // The segment's size in memory, in the first program header.
    image[64 + 40..64 + 48].copy_from_slice(&(100 * MIB).to_le_bytes());

    let result = load_kernel(&memory(), &mut Cursor::new(image), "large".to_owned());

    assert!(matches!(
        result,
        Err(Error::KernelTooLarge {
            needed_mib: 101,
            low_mib: 64,
            ..
        })
    ));
}
