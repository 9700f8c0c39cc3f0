//! A client that means harm: whatever it writes, maps and takes away, its device goes on or ends, and others are served.

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vfio_user::Client;
use vmm_dedup_dsa_abi::registers as reg;
use vmm_dedup_dsa_abi::{Command, CommandWord, Descriptor, DeviceAddress};
use vmm_dedup_dsa_model::Timing;
use vmm_dedup_dsa_server::{Device, Server};
use vmm_dedup_protocol::mapping::staging_memfd;

const BAR0: u32 = 0;
const BAR2: u32 = 2;
const CONFIG: u32 = 7;
const PAGE: u64 = 4096;
/// How long the server may take for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// Panics of the server's threads, which run in this process.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn server(folder: &Path) -> PathBuf {
    static COUNT: Once = Once::new();
    COUNT.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let name = thread::current().name().unwrap_or_default().to_owned();
            if name.starts_with("vu-") || name == "dsa" {
                PANICS.fetch_add(1, Ordering::AcqRel);
            }
            default(panic);
        }));
    });
    let path = folder.join("device");
    let device = Device {
        timing: Timing::NONE,
        ..Device::default()
    };
    let server = Server::bind(&path, device, 4).unwrap();
    thread::spawn(move || server.run());
    path
}

/// A client of good will is served, and no thread has panicked.
fn assert_serves(path: &Path) {
    let start = Instant::now();
    let mut client = loop {
        match Client::new(path) {
            Ok(client) => break client,
            Err(error) => assert!(start.elapsed() < PATIENCE, "nobody is served any more: {error}"),
        }
        thread::sleep(Duration::from_millis(1));
    };
    let mut version = [0; 4];
    client.region_read(BAR0, reg::VERSION, &mut version).unwrap();
    assert_eq!(u32::from_le_bytes(version), 0x100);
    assert_eq!(
        PANICS.load(Ordering::Acquire),
        0,
        "a thread of the server panicked"
    );
}

/// What a client does.
#[derive(Clone, Debug)]
enum Act {
    /// A write to a region, at any offset.
    Write(u32, u64, Vec<u8>),
    /// A read, of so many bytes.
    Read(u32, u64, usize),
    /// A command.
    Command(u32),
    /// Group 0 gets queue 0 and an engine, queue 0 these words.
    Configure([u32; 4]),
    /// A descriptor, written to a portal.
    Submit(u64, [u64; 8]),
    Map(u64, u64),
    Unmap(u64),
    Reset,
}

/// Words: small numbers, pages that are mapped now and then, and the extremes.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..8u64,
        (0..8u64).prop_map(|page| page * PAGE),
        (0..0x8000u64).prop_map(|at| at * 32),
        any::<u64>(),
        Just(u64::MAX),
        Just(PAGE << 32),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    let region = prop_oneof![Just(BAR0), Just(BAR2), Just(CONFIG)];
    let offset = prop_oneof![0..0x200u64, 0x400..0x2000u64, any::<u64>(), 0x1_ff00..0x2_0100u64];
    let descriptor =
        (0..0x30u64, 0..0x20u64, proptest::array::uniform8(word())).prop_map(|(opcode, flags, mut words)| {
            words[0] = words[0] & 0xfff | flags << 32 | opcode << 56;
            words
        });
    prop_oneof![
        2 => (region.clone(), offset.clone(), proptest::collection::vec(any::<u8>(), 0..80))
            .prop_map(|(region, offset, data)| Act::Write(region, offset, data)),
        2 => (region, offset, 0..100usize).prop_map(|(region, offset, len)| Act::Read(region, offset, len)),
        2 => (0..32u32, prop_oneof![Just(0), Just(1), any::<u32>()])
            .prop_map(|(command, operand)| Act::Command(command << 20 | operand & 0xf_ffff)),
        2 => proptest::array::uniform4(any::<u32>()).prop_map(Act::Configure),
        1 => Just(Act::Configure([16, 16, 0xa1, 10 | 10 << 5])),
        8 => (0..0x2_0000u64, descriptor).prop_map(|(at, words)| Act::Submit(at & !63, words)),
        3 => (0..6u64, 1..4u64).prop_map(|(page, pages)| Act::Map(page, pages)),
        2 => (0..8u64).prop_map(Act::Unmap),
        1 => Just(Act::Reset),
    ]
}

/// A client with the ranges that it has mapped: the crate's client waits for ever when it is refused one, so it asks for none
/// that it would be. (What is refused, tests of the memory alone show.)
struct Guest {
    client: Client,
    mapped: Vec<(u64, u64)>,
}

impl Guest {
    /// One whose device may master the bus.
    fn new(path: &Path) -> Self {
        let client = Client::new(path).unwrap();
        let mut guest = Self {
            client,
            mapped: Vec::new(),
        };
        guest.master();
        guest
    }

    fn master(&mut self) {
        self.client.region_write(CONFIG, 4, &6u16.to_le_bytes()).unwrap();
    }

    fn map(&mut self, page: u64, pages: u64, file: &OwnedFd) {
        let meets = |(first, count): &(u64, u64)| *first < page + pages && page < first + count;
        if !self.mapped.iter().any(meets) {
            let (at, size) = (page * PAGE, pages * PAGE);
            self.client.dma_map(at, at, size, file.as_raw_fd()).unwrap();
            self.mapped.push((page, pages));
        }
    }

    fn unmap(&mut self, at: u64) {
        if !self.mapped.is_empty() {
            let at = usize::try_from(at).unwrap() % self.mapped.len();
            let (page, pages) = self.mapped.swap_remove(at);
            self.client.dma_unmap(page * PAGE, pages * PAGE).unwrap();
        }
    }
}

/// Does it.
fn perform(guest: &mut Guest, act: &Act, file: &OwnedFd) {
    let write = |client: &mut Client, at: u64, word: u32| {
        let _ = client.region_write(BAR0, at, &word.to_le_bytes());
    };
    let client = &mut guest.client;
    match act {
        Act::Write(region, offset, data) => drop(client.region_write(*region, *offset, data)),
        Act::Read(region, offset, len) => drop(client.region_read(*region, *offset, &mut vec![0; *len])),
        Act::Command(word) => write(client, reg::CMD, *word),
        Act::Configure(words) => {
            write(client, 0x400, 1);
            write(client, 0x400 + 32, 1);
            for (at, word) in (0x1000..).step_by(4).zip(words) {
                write(client, at, *word);
            }
            (0..8).for_each(|at| write(client, 0x1020 + at * 4, u32::MAX));
            for command in [Command::EnableDevice, Command::EnableQueue] {
                write(client, reg::CMD, CommandWord::new(command, 0, false).0);
            }
        }
        Act::Submit(at, words) => {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let _ = client.region_write(BAR2, *at, &bytes);
        }
        Act::Map(page, pages) => guest.map(*page, *pages, file),
        Act::Unmap(at) => guest.unmap(*at),
        Act::Reset => drop(client.reset()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_client_does_the_server_goes_on(acts in proptest::collection::vec(act(), 0..60)) {
        let folder = tempfile::tempdir().unwrap();
        let path = server(folder.path());
        let (file, _map) = staging_memfd(16 * 4096).unwrap();
        let mut guest = Guest::new(&path);
        acts.iter().for_each(|act| perform(&mut guest, act, &file));
        drop(guest);
        assert_serves(&path);
    }
}

/// Memory that shrinks and is unmapped while the device reads and writes it.
#[test]
fn memory_may_go_under_a_device_that_works() {
    let folder = tempfile::tempdir().unwrap();
    let path = server(folder.path());
    let file = memfd_create("shrinking", MemfdFlags::CLOEXEC).unwrap();
    let mut guest = Guest::new(&path);
    let configure = Act::Configure([16, 16, 0xa1, 31 | 10 << 5]);
    perform(&mut guest, &configure, &file);
    let descriptor = Descriptor::compare(DeviceAddress(0), DeviceAddress(4 * PAGE), 4 * 4096).unwrap();
    let descriptor = descriptor.with_completion(DeviceAddress(7 * PAGE)).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            while !done.load(Ordering::Acquire) {
                ftruncate(&file, 8 * PAGE).unwrap();
                ftruncate(&file, 0).unwrap();
            }
        });
        for round in 0..500 {
            guest.map(0, 8, &file);
            for at in 0..4 {
                guest
                    .client
                    .region_write(BAR2, at * 64, &descriptor.to_bytes())
                    .unwrap();
            }
            guest.unmap(0);
            if round % 100 == 99 {
                guest.client.reset().unwrap();
                guest.master();
                perform(&mut guest, &configure, &file);
            }
        }
        done.store(true, Ordering::Release);
    });
    assert_serves(&path);
}
