//! KVM, which every guest needs.

use crate::failure::Failure;
use std::fs::OpenOptions;
use std::io;

/// Opens KVM as a VMM does.
///
/// # Errors
/// Of the kernel.
pub fn open() -> io::Result<()> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map(drop)
}

/// Fails with exit code 2 unless this process can use KVM.
///
/// # Errors
/// A [`Failure`] that tells what to do.
pub fn need() -> Result<(), Failure> {
    match open() {
        Ok(()) => Ok(()),
        Err(e) => Err(Failure::missing(format!(
            "/dev/kvm cannot be used ({e}): load kvm-intel or kvm-amd, or enable nested virtualisation, and give this user access to it"
        ))
        .of_host()),
    }
}
