#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm_dedup_fuzz_bodies::agent::check(input));
