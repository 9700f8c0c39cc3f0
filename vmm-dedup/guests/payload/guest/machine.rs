//! The machine seen from CPL3: calls into the trap handler of `boot.s`, and time.

use core::arch::asm;
use core::arch::x86_64::{_mm_lfence, _mm_pause, _rdtsc};

const MAGIC: u64 = 0x5056_4831;
const OUT8: u64 = 0;
const IN8: u64 = 1;
const OUT16: u64 = 2;
const WRITE: u64 = 3;
const SLEEP: u64 = 4;
const HALT: u64 = 5;
const OUT32: u64 = 6;
const IN32: u64 = 7;

const COM1: u16 = 0x3f8;
const LINE_STATUS: u16 = COM1 + 5;
/// Cloud Hypervisor's shutdown port, and the value that means S5.
const SHUTDOWN_PORT: u16 = 0x600;
const SHUTDOWN: u64 = 0x34;
/// The PM1a control register where QEMU has it: SLP_EN with sleep type 0 (S5).
const PM1A_CONTROL: u16 = 0x604;
const PM1A_SLEEP: u64 = 0x2000;
/// QEMU's isa-debug-exit device, where there is one.
const DEBUG_EXIT: u16 = 0xf4;

/// The local APIC timer counts at 1 GHz / 16 in KVM and in QEMU. Elsewhere naps have another length, which
/// the callers allow for: they look at the clock again.
const APIC_TICK_NS: u64 = 16;

fn trap(operation: u64, port: u16, value: u64) -> u64 {
    let result;
    // SAFETY: the one-byte `out` traps into boot.s, which does the operation, touches only the registers named
    // here and returns behind the instruction.
    unsafe {
        asm!("out dx, al", inout("rax") value => result, inout("rdx") u64::from(port) => _,
             in("r8") operation, in("r9") MAGIC, options(nostack));
    }
    result
}

/// Writes to COM1.
pub fn write_serial(bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    // SAFETY: as in `trap`; the handler reads `bytes.len()` bytes at `bytes.as_ptr()` and changes the registers
    // marked as clobbered.
    unsafe {
        asm!("out dx, al", inout("rcx") bytes.len() => _, inout("rsi") bytes.as_ptr() => _,
             inout("rax") 0u64 => _, out("rdx") _, out("rdi") _,
             in("r8") WRITE, in("r9") MAGIC, options(nostack));
    }
}

/// A byte that the host sent to COM1, if there is one.
pub fn read_serial() -> Option<u8> {
    let status = trap(IN8, LINE_STATUS, 0) as u8;
    // 0xff: no UART there.
    (status & 1 == 1 && status != 0xff).then(|| trap(IN8, COM1, 0) as u8)
}

/// Writes 32 bits to a port.
pub fn write_port(port: u16, value: u32) {
    trap(OUT32, port, u64::from(value));
}

/// Reads 32 bits from a port.
pub fn read_port(port: u16) -> u32 {
    trap(IN32, port, 0) as u32
}

/// Halts for about `ns` (at least 1 us).
pub fn sleep_ns(ns: u64) {
    trap(SLEEP, 0, (ns / APIC_TICK_NS).clamp(64, u64::from(u32::MAX)));
}

/// The vector that devices' messages raise: see boot.s. They are taken only while the guest sleeps.
pub const DEVICE_VECTOR: u32 = 33;

/// How often a device has interrupted.
pub fn device_interrupts() -> u64 {
    unsafe extern "C" {
        static device_interrupts: u64;
    }
    // SAFETY: boot.s defines it; its handler changes it while this code sleeps, hence volatile.
    unsafe { core::ptr::addr_of!(device_interrupts).read_volatile() }
}

/// Tries every way out, the VMM takes the one it knows.
pub fn power_off() -> ! {
    trap(OUT8, SHUTDOWN_PORT, SHUTDOWN);
    trap(OUT16, PM1A_CONTROL, PM1A_SLEEP);
    trap(OUT8, DEBUG_EXIT, 0);
    loop {
        trap(HALT, 0, 0);
    }
}

/// The time stamp counter.
pub fn cycles() -> u64 {
    // SAFETY: CR4.TSD is clear, so CPL3 may read it; the fences keep the measured access between two reads.
    unsafe {
        _mm_lfence();
        let now = _rdtsc();
        _mm_lfence();
        now
    }
}

/// Spends a moment.
pub fn relax() {
    // SAFETY: SSE2 is part of x86-64.
    unsafe { _mm_pause() }
}

/// The frequency of the time stamp counter from the hypervisor's CPUID leaf, if there is one, else a guess.
pub fn guess_tsc_khz() -> u64 {
    const ASSUMED_KHZ: u64 = 2_000_000;
    unsafe extern "C" {
        static hypervisor_tsc_khz: u64;
    }
    // SAFETY: boot.s defines it, and wrote it for the last time before any Rust code ran.
    match unsafe { hypervisor_tsc_khz } {
        0 => ASSUMED_KHZ,
        khz => khz,
    }
}
