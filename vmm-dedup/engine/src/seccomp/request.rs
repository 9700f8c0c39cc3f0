//! What ioctl is asked for: the engine's one place for these numbers, for filters and for those who ask (`sys`). Source: Linux,
//! include/uapi/asm-generic/ioctl.h, linux/userfaultfd.h, linux/fs.h.

const NONE: u32 = 0;
const READ: u32 = 2;
const WRITE_READ: u32 = 3;

const UFFDIO: u8 = 0xaa;

const fn request(direction: u32, kind: u8, number: u8, size: u32) -> u32 {
    assert!(size < 1 << 14);
    direction << 30 | size << 16 | (kind as u32) << 8 | number as u32
}

/// Bytes of what a request points to.
pub(crate) const fn size(request: u32) -> usize {
    (request >> 16 & 0x3fff) as usize
}

/// As the C library's ioctl takes it: musl's is signed, and has 32 bits.
#[allow(clippy::cast_lossless, clippy::cast_possible_wrap)] // the kernel looks at these 32 bits
pub(crate) const fn as_taken(request: u32) -> libc::Ioctl {
    request as libc::Ioctl
}

pub(crate) const USERFAULTFD_IOC_NEW: u32 = request(NONE, UFFDIO, 0x00, 0);
pub(crate) const UFFDIO_REGISTER: u32 = request(WRITE_READ, UFFDIO, 0x00, 32);
pub(crate) const UFFDIO_UNREGISTER: u32 = request(READ, UFFDIO, 0x01, 16);
pub(crate) const UFFDIO_WAKE: u32 = request(READ, UFFDIO, 0x02, 16);
pub(crate) const UFFDIO_COPY: u32 = request(WRITE_READ, UFFDIO, 0x03, 40);
pub(crate) const UFFDIO_ZEROPAGE: u32 = request(WRITE_READ, UFFDIO, 0x04, 32);
pub(crate) const UFFDIO_MOVE: u32 = request(WRITE_READ, UFFDIO, 0x05, 40);
pub(crate) const UFFDIO_WRITEPROTECT: u32 = request(WRITE_READ, UFFDIO, 0x06, 24);
pub(crate) const UFFDIO_POISON: u32 = request(WRITE_READ, UFFDIO, 0x08, 32);
pub(crate) const UFFDIO_API: u32 = request(WRITE_READ, UFFDIO, 0x3f, 24);
pub(crate) const PAGEMAP_SCAN: u32 = request(WRITE_READ, b'f', 16, 96);
/// Older than the scheme of the others. A socket's blocking is set by it.
pub(crate) const FIONBIO: u32 = request(NONE, b'T', 0x21, 0);

const _: () = assert!(FIONBIO as libc::Ioctl == libc::FIONBIO as libc::Ioctl);
// As a kernel's trace shows them.
const _: () =
    assert!(UFFDIO_MOVE == 0xc028_aa05 && UFFDIO_WAKE == 0x8010_aa02 && PAGEMAP_SCAN == 0xc060_6610);
