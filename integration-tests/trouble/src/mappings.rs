//! A process without mappings left.
#![allow(unsafe_code)] // mmap, mprotect

const PAGE: usize = 4096;
/// More than that takes too long to use up, and too much of the kernel's memory.
const MOST: usize = 200_000;

/// All mappings that the process may still have (vm.max_map_count), until it is dropped.
#[derive(Debug)]
pub struct UsedUp {
    at: usize,
    len: usize,
}

impl UsedUp {
    /// Uses them up.
    ///
    /// # Errors
    /// There may be too many; the kernel refuses for another reason.
    pub fn begin() -> Result<Self, String> {
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").map_err(|e| e.to_string())?;
        let limit: usize = limit.trim().parse().map_err(|_| "no number".to_owned())?;
        if limit > MOST {
            return Err(format!("vm.max_map_count is {limit}"));
        }
        let len = 2 * limit * PAGE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice, which nothing is read from or written to.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().to_string());
        }
        let at = at as usize;
        // Every second page is of another kind, so each is a mapping.
        let one_more = |page: &usize| {
            // SAFETY: memory of our own that nobody uses.
            unsafe { libc::mprotect((at + 2 * page * PAGE) as *mut _, PAGE, libc::PROT_READ) == 0 }
        };
        let refused = (0..limit).find(|page| !one_more(page));
        let this = Self { at, len };
        refused
            .map(|_| this)
            .ok_or_else(|| "there are still mappings to be had".into())
    }
}

impl Drop for UsedUp {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nothing refers to.
        unsafe { libc::munmap(self.at as *mut _, self.len) };
    }
}
