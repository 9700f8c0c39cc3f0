//! What kind of kernel an image is, and whether its headers hold together. The loader crate trusts some offsets,
//! so what it is going to use is checked here first, with the file as the enemy.

use std::io::{self, Read, Seek, SeekFrom};

use crate::error::Error;
use crate::layout::HIGH_RAM;
use vm_memory::Address;

const ELF_MAGIC: &[u8] = b"\x7fELF\x02\x01";
const ELF_MACHINE_X86_64: u16 = 62;
const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;

const SETUP_HEADER: usize = 0x1f1;
const SETUP_HEADER_END: usize = 0x268;
const SETUP_MAGIC: &[u8] = b"HdrS";
const PROTOCOL_2_12: u16 = 0x20c;
const XLF_KERNEL_64: u16 = 1;

/// A kernel whose headers were checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An ELF image for x86-64.
    Elf {
        /// First address behind its segments.
        end: u64,
    },
    /// A bzImage with a 64-bit entry.
    BzImage {
        /// First address behind the memory it needs before it knows the memory map.
        end: u64,
        /// First address behind the range where the initrd may be.
        initrd_limit: u64,
    },
}

/// Reads the headers of `file`; `name` is for messages.
pub(crate) fn classify(file: &mut (impl Read + Seek), name: &str) -> Result<Kind, Error> {
    let failed = |source| Error::KernelRead {
        kernel: name.to_owned(),
        source,
    };
    let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
    let head = read_at(file, 0, SETUP_HEADER_END.max(ELF_HEADER)).map_err(failed)?;
    if head.starts_with(ELF_MAGIC) && head.len() >= ELF_HEADER && u16_at(&head, 18) == ELF_MACHINE_X86_64 {
        return classify_elf(file, &head, size, name);
    }
    if head.len() >= SETUP_HEADER_END && &head[0x202..0x206] == SETUP_MAGIC {
        return classify_bzimage(&head, size, name);
    }
    Err(Error::KernelFormat {
        kernel: name.to_owned(),
    })
}

fn classify_elf(file: &mut (impl Read + Seek), head: &[u8], size: u64, name: &str) -> Result<Kind, Error> {
    let damaged = |problem| Error::KernelDamaged {
        kernel: name.to_owned(),
        problem,
    };
    let table = u64_at(head, 32);
    let count = usize::from(u16_at(head, 56));
    if usize::from(u16_at(head, 54)) != PROGRAM_HEADER {
        return Err(damaged("its program headers have an unknown size"));
    }
    let headers = read_at(file, table, count * PROGRAM_HEADER).map_err(|source| Error::KernelRead {
        kernel: name.to_owned(),
        source,
    })?;
    if headers.len() < count * PROGRAM_HEADER {
        return Err(damaged("its program headers are cut off"));
    }
    let mut end = None;
    for header in headers.chunks_exact(PROGRAM_HEADER) {
        let kind = u32_at(header, 0);
        let (offset, address) = (u64_at(header, 8), u64_at(header, 24));
        let (in_file, in_memory) = (u64_at(header, 32), u64_at(header, 40));
        if kind != PT_LOAD && kind != PT_NOTE {
            continue;
        }
        if offset.checked_add(in_file).is_none_or(|end| end > size) {
            return Err(damaged("a segment is cut off"));
        }
        if kind == PT_LOAD && in_memory > 0 {
            let segment_end = address
                .checked_add(in_memory)
                .ok_or(damaged("a segment wraps around"))?;
            if in_file > in_memory || address < HIGH_RAM.raw_value() {
                return Err(damaged("a segment is larger than its memory, or below 1 MiB"));
            }
            end = end.max(Some(segment_end));
        }
    }
    Ok(Kind::Elf {
        end: end.ok_or(damaged("it has no segments"))?,
    })
}

fn classify_bzimage(head: &[u8], size: u64, name: &str) -> Result<Kind, Error> {
    let damaged = |problem| Error::KernelDamaged {
        kernel: name.to_owned(),
        problem,
    };
    let (version, flags) = (u16_at(head, 0x206), u16_at(head, 0x236));
    if version < PROTOCOL_2_12 || flags & XLF_KERNEL_64 == 0 {
        return Err(Error::KernelNot64Bit {
            kernel: name.to_owned(),
        });
    }
    let sectors = u64::from(if head[SETUP_HEADER] == 0 {
        4
    } else {
        head[SETUP_HEADER]
    });
    if (sectors + 1) * 512 >= size {
        return Err(damaged("it ends in its setup code"));
    }
    let preferred = u64_at(head, 0x258);
    let end = preferred
        .checked_add(u64::from(u32_at(head, 0x260)))
        .ok_or(damaged("its preferred address wraps around"))?;
    Ok(Kind::BzImage {
        end,
        initrd_limit: u64::from(u32_at(head, 0x22c)) + 1,
    })
}

/// Up to `length` bytes at `offset`; fewer if the file ends.
fn read_at(file: &mut (impl Read + Seek), offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(offset))?;
    file.by_ref().take(length as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn field<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[offset + index])
}

fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(field(bytes, offset))
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(field(bytes, offset))
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(field(bytes, offset))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// An ELF image with one segment: 16 bytes of the file, 0x1000 bytes of memory at 2 MiB.
    fn elf() -> Vec<u8> {
        let mut image = vec![0; ELF_HEADER + PROGRAM_HEADER + 16];
        image[..6].copy_from_slice(ELF_MAGIC);
        image[18] = 62;
        image[32] = 64;
        image[54] = 56;
        image[56] = 1;
        image[64] = 1;
        image[72] = 120;
        image[88..96].copy_from_slice(&0x20_0000u64.to_le_bytes());
        image[96] = 16;
        image[104..112].copy_from_slice(&0x1000u64.to_le_bytes());
        image
    }

    fn bzimage() -> Vec<u8> {
        let mut image = vec![0; 4096];
        image[SETUP_HEADER] = 4;
        image[0x202..0x206].copy_from_slice(SETUP_MAGIC);
        image[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
        image[0x22c..0x230].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
        image[0x236] = 1;
        image[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
        image[0x260..0x264].copy_from_slice(&0x20_0000u32.to_le_bytes());
        image
    }

    fn kind(image: &[u8]) -> Result<Kind, Error> {
        classify(&mut Cursor::new(image), "test")
    }

    #[test]
    fn elf_is_recognised_with_its_end() {
        assert_eq!(kind(&elf()).expect("valid"), Kind::Elf { end: 0x20_1000 });
    }

    #[test]
    fn bzimage_is_recognised_with_its_needs() {
        let expected = Kind::BzImage {
            end: 0x120_0000,
            initrd_limit: 0x8000_0000,
        };
        assert_eq!(kind(&bzimage()).expect("valid"), expected);
    }

    #[test]
    fn other_files_are_no_kernels() {
        for image in [&b""[..], b"#!/bin/sh\n", &[0; 4096]] {
            assert!(matches!(kind(image), Err(Error::KernelFormat { .. })));
        }
    }

    #[test]
    fn segments_must_lie_in_the_file_and_above_1_mib() {
        let broken = |offset: usize, value: u64| {
            let mut image = elf();
            image[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
            kind(&image)
        };

        for (offset, value) in [
            (72, u64::MAX),
            (72, 121),
            (88, 0x1000),
            (88, u64::MAX),
            (96, 0x2000),
            (32, 4096),
        ] {
            assert!(
                matches!(broken(offset, value), Err(Error::KernelDamaged { .. })),
                "{offset} {value:#x}"
            );
        }
    }

    #[test]
    fn old_and_32_bit_bzimages_are_refused() {
        let mut old = bzimage();
        old[0x206] = 0x0b;
        let mut narrow = bzimage();
        narrow[0x236] = 0;

        assert!(matches!(kind(&old), Err(Error::KernelNot64Bit { .. })));
        assert!(matches!(kind(&narrow), Err(Error::KernelNot64Bit { .. })));
    }

    #[test]
    fn bzimage_must_be_longer_than_its_setup_code() {
        let mut image = bzimage();
        image.truncate(2560);

        assert!(matches!(kind(&image), Err(Error::KernelDamaged { .. })));
    }

    #[test]
    fn no_prefix_of_an_image_panics() {
        for image in [elf(), bzimage()] {
            for length in 0..image.len() {
                let _ = kind(&image[..length]);
            }
        }
    }
}
