//! What the library puts in front of the C library's functions.

use object::{Object, ObjectSymbol};
use std::collections::BTreeSet;

/// System calls that bring guest memory, or take it away, or that pin it: a name that is not exported is not seen at all.
const INTERPOSED: [&str; 11] = [
    "ioctl", "madvise", "mmap", "mmap64", "mprotect", "mremap", "munmap", "pread", "pread64", "preadv",
    "preadv64",
];

#[test]
fn what_it_interposes_is_exported() {
    let path = vmm_dedup_built::library("vmm-dedup-preload");
    let library = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let library = object::File::parse(&*library).expect("an ELF file");
    let exported = library.dynamic_symbols().filter(|symbol| symbol.is_definition());
    let exported: BTreeSet<&str> = exported.filter_map(|symbol| symbol.name().ok()).collect();
    for name in INTERPOSED {
        assert!(exported.contains(name), "{name} is not among {exported:?}");
    }
}
