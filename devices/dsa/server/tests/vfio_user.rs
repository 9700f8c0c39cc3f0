//! The device through its socket, with the vfio-user crate's own client and this project's driver.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use vfio_user::Client;
use vmm_dedup::compare::{Arena, Engine, PageId, conformance};
use vmm_dedup_dsa::{
    DsaEngine, Options, QueueLimits, Registers, Trouble, Wanted, WorkQueue, bring_up, command,
};
use vmm_dedup_dsa_abi::registers as reg;
use vmm_dedup_dsa_abi::{Command, CommandWord, Descriptor, DeviceAddress, portal};
use vmm_dedup_dsa_model::Timing;
use vmm_dedup_dsa_server::{Device, Server};

const BAR0: u32 = 0;
const BAR2: u32 = 2;
const CONFIG: u32 = 7;
const MSIX: u32 = 2;

/// A server in this process, for as long as the test runs.
struct Running {
    folder: tempfile::TempDir,
}

impl Running {
    fn start(device: Device) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::bind(&folder.path().join("device"), device, 64).unwrap();
        thread::spawn(move || server.run());
        Self { folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("device")
    }

    /// A client whose device may master the bus.
    fn client(&self) -> Client {
        let mut client = Client::new(&self.socket()).unwrap();
        client.region_write(CONFIG, 4, &6u16.to_le_bytes()).unwrap();
        client
    }

    fn engine(&self, arena: &Arena) -> DsaEngine {
        let queue = Socket::new(self.client());
        let options = Options {
            only_if_sooner: false,
            hybrid: false,
            ..Options::default()
        };
        let mut engine = DsaEngine::new(vec![Box::new(queue)], options).unwrap();
        engine.map(PageId(0), arena.pages(), arena.file()).unwrap();
        engine
    }
}

/// A way to the device's queue over the socket.
struct Socket {
    client: Bar,
    limits: QueueLimits,
}

/// Its registers. The client's methods take `&mut`, and `WorkQueue` has to be `Send`.
struct Bar(Arc<Mutex<Client>>);

impl Registers for Bar {
    fn read(&mut self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.0
            .lock()
            .unwrap()
            .region_read(BAR0, offset, &mut bytes)
            .unwrap();
        u64::from_le_bytes(bytes)
    }

    fn write(&mut self, offset: u64, value: u32) {
        let mut client = self.0.lock().unwrap();
        client.region_write(BAR0, offset, &value.to_le_bytes()).unwrap();
    }
}

impl Socket {
    fn new(client: Client) -> Self {
        let mut client = Bar(Arc::new(Mutex::new(client)));
        let limits = bring_up(&mut client, Wanted::default()).unwrap();
        Self { client, limits }
    }
}

impl WorkQueue for Socket {
    fn name(&self) -> &str {
        "vfio-user"
    }

    fn limits(&self) -> QueueLimits {
        self.limits
    }

    fn uses_process_addresses(&self) -> bool {
        false
    }

    fn submit(&mut self, descriptor: &Descriptor) -> Result<bool, Trouble> {
        let offset = portal::offset(0, portal::Kind::Unlimited);
        let mut client = self.client.0.lock().unwrap();
        client.region_write(BAR2, offset, &descriptor.to_bytes()).unwrap();
        Ok(true)
    }

    fn relax(&mut self, _: &AtomicU64) {
        thread::yield_now();
    }

    fn trouble(&mut self) -> Option<Trouble> {
        None
    }

    fn reset(&mut self) -> Result<(), Trouble> {
        bring_up(&mut self.client, Wanted::default()).unwrap();
        Ok(())
    }

    fn map(&mut self, at: DeviceAddress, bytes: usize, file: BorrowedFd<'_>, _: bool) -> Result<(), Trouble> {
        let mut client = self.client.0.lock().unwrap();
        client.dma_map(0, at.0, bytes as u64, file.as_raw_fd()).unwrap();
        Ok(())
    }

    fn unmap(&mut self, at: DeviceAddress, bytes: usize) -> Result<(), Trouble> {
        self.client
            .0
            .lock()
            .unwrap()
            .dma_unmap(at.0, bytes as u64)
            .unwrap();
        Ok(())
    }
}

#[test]
fn the_driver_conforms_over_the_socket() {
    let running = Running::start(Device {
        timing: Timing::NONE,
        ..Device::default()
    });
    conformance::keys(&mut |arena| Box::new(running.engine(arena)));
    conformance::verify(&mut |arena| Box::new(running.engine(arena)));
}

/// Waits for an eventfd. The server has made it one that nobody waits for by reading.
fn wait_for(event: &OwnedFd) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let patience = Timespec {
        tv_sec: 20,
        tv_nsec: 0,
    };
    let rung = poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&patience)).unwrap();
    assert_eq!(rung, 1, "no interrupt");
    rustix::io::read(event, &mut [0; 8]).unwrap();
}

/// As Linux does: the interrupt's eventfd is rung, and the cause tells why.
#[test]
fn commands_and_descriptors_raise_their_interrupts() {
    let running = Running::start(Device::default());
    let mut client = running.client();
    let events: Vec<OwnedFd> = (0..2)
        .map(|_| rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap())
        .collect();
    let fds: Vec<i32> = events.iter().map(AsRawFd::as_raw_fd).collect();
    let flags = 1 << 2 | 1 << 5; // eventfds, trigger
    client.set_irqs(MSIX, flags, 0, 2, &fds).unwrap();
    let mut bar = Bar(Arc::new(Mutex::new(client)));
    let reset = CommandWord::new(Command::ResetDevice, 0, true);
    bar.write(reg::CMD, reset.0);
    wait_for(&events[0]);
    assert_eq!(bar.read(reg::INTCAUSE), u64::from(reg::CAUSE_COMMAND));
    bring_up(&mut bar, Wanted::default()).unwrap();
    let mut words = [0; 8];
    words[0] = 0x10 << 32; // a nop that raises an interrupt
    words[4] = 1 << 32; // vector 1
    let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
    for (at, word) in bytes.chunks(8).enumerate() {
        let mut client = bar.0.lock().unwrap();
        client.region_write(BAR2, 0x40 + 8 * at as u64, word).unwrap();
    }
    wait_for(&events[1]);
}

#[test]
fn a_function_level_reset_and_the_protocols_clear_the_device() {
    let running = Running::start(Device::default());
    let state = |bar: &mut Bar| bar.read(reg::GENSTS) & 3;
    let mut bar = Bar(Arc::new(Mutex::new(running.client())));
    bring_up(&mut bar, Wanted::default()).unwrap();
    assert_eq!(state(&mut bar), 1);
    let control = 0x48;
    bar.0
        .lock()
        .unwrap()
        .region_write(CONFIG, control, &0x8000u16.to_le_bytes())
        .unwrap();
    assert_eq!(state(&mut bar), 0);
    bring_up(&mut bar, Wanted::default()).unwrap();
    bar.0.lock().unwrap().reset().unwrap();
    assert_eq!(state(&mut bar), 0);
    let error = command(&mut bar, Command::EnableDevice, 0).unwrap_err();
    assert!(error.to_string().contains("master the bus"), "{error}");
}

/// A client that leaves with work in flight leaves nothing behind: its device's thread ends.
#[test]
fn a_client_that_leaves_takes_its_device_along() {
    let running = Running::start(Device {
        timing: Timing {
            latency_ns: 3_600_000_000_000,
            ..Timing::PUBLISHED
        },
        ..Device::default()
    });
    let before = device_threads();
    let mut queue = Socket::new(running.client());
    for _ in 0..8 {
        queue.submit(&Descriptor::nop()).unwrap();
    }
    assert!(device_threads() > before);
    drop(queue);
    wait_for_end(before);
}

/// Threads of devices in this process.
fn device_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let name =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.map(name).filter(|name| name.trim() == "dsa").count()
}

/// Waits until there are no more of them than before.
fn wait_for_end(before: usize) {
    let start = Instant::now();
    while device_threads() > before {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "the device's thread stays"
        );
        thread::sleep(Duration::from_millis(5));
    }
}

/// A batch that takes the device's thread some thousand times as long as a register: 512 comparisons of 16 MiB.
struct LongWork {
    queue: Socket,
    memory: File,
}

impl LongWork {
    const MEMBERS: u32 = 512;
    const BYTES: u32 = 16 << 20;
    const AT: u64 = 1 << 32;
    /// Where the batch's record is; its list begins where the memory does.
    const RECORD: u64 = 1 << 16;

    fn start(running: &Running) -> Self {
        let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let memory = File::from(memory);
        memory.set_len(Self::BYTES.into()).unwrap();
        let start = DeviceAddress(Self::AT);
        let member = Descriptor::compare(start, start, Self::BYTES).unwrap();
        let list = member.to_bytes().repeat(Self::MEMBERS as usize);
        memory.write_all_at(&list, 0).unwrap();
        let record = DeviceAddress(Self::AT + Self::RECORD);
        let batch = Descriptor::batch(start, Self::MEMBERS).unwrap();
        let batch = batch.with_completion(record).unwrap();
        let mut queue = Socket::new(running.client());
        queue
            .map(start, Self::BYTES as usize, memory.as_fd(), true)
            .unwrap();
        queue.submit(&batch).unwrap();
        Self { queue, memory }
    }

    /// Whether the batch has ended, and how.
    fn status(memory: &File) -> u8 {
        let mut status = [0];
        memory.read_exact_at(&mut status, Self::RECORD).unwrap();
        status[0]
    }
}

#[test]
fn registers_are_answered_while_the_device_works() {
    let running = Running::start(Device::default());
    let LongWork { mut queue, memory } = LongWork::start(&running);
    for _ in 0..8 {
        assert_eq!(queue.client.read(reg::GENSTS) & 3, 1);
    }
    assert_eq!(LongWork::status(&memory), 0, "the registers waited for the batch");
}

/// What nobody waits for any more is not done: else who comes and goes would keep the server at work, and its places.
#[test]
fn what_a_client_has_left_behind_is_not_done() {
    let running = Running::start(Device::default());
    let before = device_threads();
    let LongWork { queue, memory } = LongWork::start(&running);
    drop(queue);
    wait_for_end(before);
    assert_eq!(
        LongWork::status(&memory),
        0,
        "the device has done all of it first"
    );
}
