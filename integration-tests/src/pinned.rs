//! Pages that stay pinned, so that the kernel's count of pinned pages tells nothing of others.

use crate::memory::Pages;
use io_uring::IoUring;

/// Memory of this process that is no guest's, registered with a ring: pinned until this is dropped.
pub struct Pinned {
    // First, so that the page is not pinned any more when it goes.
    _ring: IoUring,
    _pages: Pages,
}

impl Pinned {
    /// Pins a page.
    ///
    /// # Panics
    /// Without io_uring.
    #[must_use]
    #[allow(unsafe_code)] // registers a buffer
    pub fn page() -> Self {
        let (pages, ring) = (Pages::map(1), IoUring::new(4).expect("io_uring"));
        pages.fill(0, 1);
        let buffer = libc::iovec {
            iov_base: pages.address(0) as *mut _,
            iov_len: vmm_dedup_protocol::PAGE_SIZE,
        };
        // SAFETY: the page stays mapped for as long as the ring is there, and is only accessed through raw pointers.
        unsafe { ring.submitter().register_buffers(&[buffer]) }.expect("buffers are registered");
        Self {
            _ring: ring,
            _pages: pages,
        }
    }
}
