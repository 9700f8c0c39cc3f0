//! Mappings of the store's files, as the kernel sees them.

use vmm_dedup_protocol::mapping::{Mapping, sealed_memfd, staging_memfd};

/// What /proc/self/smaps says of the mapping at an address.
fn flags_at(address: usize) -> String {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let begin = text.find(&format!("\n{address:x}-")).expect("it is mapped");
    let line = text[begin..]
        .lines()
        .find_map(|line| line.strip_prefix("VmFlags:"));
    line.expect("flags").to_owned()
}

#[test]
fn mappings_are_left_out_of_core_files_and_children() {
    let (segment, written) = sealed_memfd("segment", 1 << 20).unwrap();
    let (_file, staging) = staging_memfd(1 << 20).unwrap();
    let read = Mapping::read_only(&segment, 1 << 20).unwrap();
    for mapping in [&written, &staging, &read] {
        let flags = flags_at(mapping.address());
        let has = |flag: &str| flags.split_whitespace().any(|f| f == flag);
        assert!(has("dd") && has("dc"), "{flags}");
    }
}
