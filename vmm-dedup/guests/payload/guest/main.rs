//! The guest: gets to CPL3 (`boot.s`), fills its memory, works on it, proves it is intact, powers off.
//!
//! `memory` finds the RAM, `pages` knows what every data page must hold, `workload` reads and writes them,
//! `console` reports. Or it drives a device (`bars`, `pageforge`). `content` and `params` are free of hardware and are
//! tested on the host.
#![no_std]
#![no_main]

mod balloon;
mod bars;
mod console;
mod content;
mod machine;
mod memory;
mod pageforge;
mod pages;
mod params;
mod pci;
mod runtime;
mod workload;

use core::arch::global_asm;

use memory::{Memory, OutOfMemory};
use pages::Pages;
use params::{Device, Params};

global_asm!(include_str!("boot.s"));

/// The entry at CPL3; `boot.s` jumps here with a stack and interrupts off.
#[unsafe(no_mangle)]
extern "C" fn guest_main() -> ! {
    let mut memory = Memory::from_start_info();
    let mut params = match Params::parse(memory.command_line()) {
        Ok(params) => params,
        Err(bad) => fail("parameter", bad.0),
    };
    if params.tsc_khz == 0 {
        params.tsc_khz = machine::guess_tsc_khz();
    }
    if params.device == Device::PageForge {
        finish(pageforge::check(&mut memory));
    }
    let pages = match Pages::build(&mut memory, &params) {
        Ok(pages) => pages,
        Err(OutOfMemory { wanted }) => {
            say!(
                "fail reason=memory wanted_bytes={wanted} free_bytes={}",
                memory.free_bytes()
            );
            finish(false);
        }
    };
    let intact = workload::run(&params, pages);
    finish(intact)
}

/// Any trap that is not a call from CPL3.
#[unsafe(no_mangle)]
extern "C" fn guest_fault(vector: u64, code: u64, rip: u64, address: u64) -> ! {
    say!("fault vector={vector} code={code:#x} rip={rip:#x} address={address:#x}");
    finish(false)
}

fn fail(reason: &str, what: &str) -> ! {
    say!("fail reason={reason} what={what}");
    finish(false)
}

fn finish(intact: bool) -> ! {
    say!("done status={}", if intact { "ok" } else { "bad" });
    machine::power_off()
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    let line = info.location().map_or(0, core::panic::Location::line);
    let file = info.location().map_or("?", core::panic::Location::file);
    say!("fail reason=panic what={file}:{line}");
    finish(false)
}
