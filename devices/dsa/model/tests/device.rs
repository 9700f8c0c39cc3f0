//! The device as its driver meets it: bringing it up, queues, batches, drains, commands, errors, time.

use std::cell::RefCell;
use vmm_dedup_dsa_abi::config::{GROUP_ENGINES, Mode, QueueConfig, QueueState};
use vmm_dedup_dsa_abi::registers as reg;
use vmm_dedup_dsa_abi::registers::{DeviceState, GeneralStatus, ResetKind, SoftwareError, Tables};
use vmm_dedup_dsa_abi::{
    Command, CommandError, CommandStatus, CommandWord, CompletionRecord, Descriptor, DeviceAddress, Opcode,
    Pasid, Status, flags, portal, wq_mask,
};
use vmm_dedup_dsa_model::{Board, Core, Faults, Flat, Memory, PAGE, Shape, Submitted, Timing, Way};

const BASE: u64 = 0x1_0000_0000;
const PAGES: usize = 16;
/// Records are in the first page, lists in the second, data from the third on.
const LIST: u64 = BASE + PAGE;
const DATA: u64 = BASE + 2 * PAGE;
/// The same for all: 1 us and a byte a nanosecond.
const TIMING: Timing = Timing {
    latency_ns: 1000,
    bytes_per_us: 1000,
    list_ns: 100,
    command_ns: 10,
};

struct Desk {
    memory: Flat,
    interrupts: RefCell<Vec<u16>>,
}

impl Board for Desk {
    fn memory(&self) -> &dyn Memory {
        &self.memory
    }

    fn interrupt(&self, vector: u16) {
        self.interrupts.borrow_mut().push(vector);
    }
}

/// A device, its board and its clock.
struct Rig {
    core: Core,
    desk: Desk,
    now: u64,
}

impl Rig {
    fn new(shape: Shape) -> Self {
        Self {
            core: Core::new(shape, TIMING, Faults::default()),
            desk: Desk {
                memory: Flat::new(BASE, PAGES),
                interrupts: RefCell::default(),
            },
            now: 0,
        }
    }

    /// With queues that are on: number 0 of group 0, number 1 of group 1.
    fn on(queues: &[QueueConfig]) -> Self {
        let mut rig = Self::new(Shape::everything());
        for (at, queue) in queues.iter().enumerate() {
            rig.group(at, 1 << at, 1 << at);
            rig.configure(at, queue);
        }
        assert_eq!(rig.command(Command::EnableDevice, 0), Ok(0));
        for at in 0..queues.len() {
            assert_eq!(
                rig.command(Command::EnableQueue, u32::try_from(at).unwrap()),
                Ok(0)
            );
        }
        rig
    }

    fn read(&mut self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.core.read(offset, &mut bytes, self.now, &self.desk);
        u64::from_le_bytes(bytes)
    }

    fn read32(&mut self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.core.read(offset, &mut bytes, self.now, &self.desk);
        u32::from_le_bytes(bytes)
    }

    fn write(&mut self, offset: u64, word: u32) {
        self.core.write(offset, &word.to_le_bytes(), self.now, &self.desk);
    }

    fn tables(&mut self) -> Tables {
        Tables([self.read(reg::TABLES), self.read(reg::TABLES + 8)])
    }

    fn group(&mut self, at: usize, queues: u32, engines: u32) {
        let table = self.tables().groups() + at as u64 * 64;
        self.write(table, queues);
        self.write(table + GROUP_ENGINES, engines);
    }

    fn queue_table(&mut self, at: usize) -> u64 {
        self.tables().queues() + at as u64 * 64
    }

    fn configure(&mut self, at: usize, queue: &QueueConfig) {
        let table = self.queue_table(at);
        for (offset, word) in (table..).step_by(4).zip(queue.0) {
            self.write(offset, word);
        }
    }

    fn configured(&mut self, at: usize) -> QueueConfig {
        let table = self.queue_table(at);
        QueueConfig(std::array::from_fn(|word| self.read32(table + word as u64 * 4)))
    }

    fn command(&mut self, command: Command, operand: u32) -> Result<u16, CommandError> {
        self.write(reg::CMD, CommandWord::new(command, operand, true).0);
        self.finish_command()
    }

    fn finish_command(&mut self) -> Result<u16, CommandError> {
        for _ in 0..1000 {
            let status = CommandStatus(self.read32(reg::CMDSTS));
            if !status.is_active() {
                self.write(reg::INTCAUSE, u32::MAX);
                return status.outcome();
            }
            self.now += 1000;
        }
        panic!("the command does not end");
    }

    fn submit(&mut self, queue: u8, way: Way, descriptor: &Descriptor) -> Submitted {
        let at = portal::offset(queue, portal::Kind::Unlimited);
        let bytes = descriptor.to_bytes();
        self.core.submit(at, way, &bytes, self.now, &self.desk)
    }

    fn record(&self, number: u64) -> CompletionRecord {
        let mut bytes = [0; 32];
        self.desk
            .memory
            .read(None, BASE + number * 32, &mut bytes)
            .unwrap();
        CompletionRecord::from_bytes(bytes)
    }

    fn status(&self, number: u64) -> Option<Status> {
        self.record(number).status().map(Result::unwrap)
    }

    fn run_until(&mut self, now: u64) {
        self.now = now;
        self.core.advance(now, &self.desk);
    }

    fn state(&mut self) -> GeneralStatus {
        GeneralStatus(self.read32(reg::GENSTS))
    }

    fn software_error(&mut self) -> Option<u8> {
        let error = SoftwareError([0, 8, 16, 24].map(|at| self.read(reg::SWERR + at)));
        error.details().map(|details| details.error)
    }

    fn list(&self, members: &[Descriptor]) -> Descriptor {
        for (at, member) in (LIST..).step_by(64).zip(members) {
            self.desk.memory.write(None, at, &member.to_bytes()).unwrap();
        }
        Descriptor::batch(DeviceAddress(LIST), u32::try_from(members.len()).unwrap()).unwrap()
    }
}

fn dedicated() -> QueueConfig {
    QueueConfig::new(16, 0, Mode::Dedicated, 5)
        .with_limits(20, 8)
        .with_operations([u64::MAX; 4])
}

fn shared() -> QueueConfig {
    QueueConfig::new(8, 4, Mode::Shared, 5)
        .with_limits(20, 8)
        .with_operations([u64::MAX; 4])
        .with_pasid(Pasid::from_low_bits(0))
}

/// With a record of this number.
fn told(descriptor: Descriptor, number: u64) -> Descriptor {
    descriptor
        .with_completion(DeviceAddress(BASE + number * 32))
        .unwrap()
}

/// Takes 1 us and as many ns as it has bytes.
fn fill(bytes: u32, number: u64) -> Descriptor {
    told(Descriptor::fill(7, DeviceAddress(DATA), bytes).unwrap(), number)
}

/// Fails at once.
fn failing(number: u64) -> Descriptor {
    told(Descriptor::fill(7, DeviceAddress(8), 8).unwrap(), number)
}

#[test]
fn capabilities_are_those_of_the_shape() {
    let mut rig = Rig::new(Shape::sapphire_rapids());
    // As Linux prints them for Sapphire Rapids, but for bits that the model does not have (IMS).
    assert_eq!(rig.read(reg::GENCAP) & 0xffff_ffff, 0x815f_0107);
    assert_eq!(rig.read(reg::ENGCAP), 4);
    assert_eq!(rig.read(reg::OPCAP), 0x1_003f_03ff);
    assert_eq!(rig.read32(reg::CMDCAP), 0);
    assert_eq!(Rig::new(Shape::everything()).read32(reg::CMDCAP), 0x7ffe);
    assert_eq!(rig.read(reg::VERSION), 0x100);
}

#[test]
fn commands_tell_of_their_end_by_register_and_interrupt() {
    let mut rig = Rig::new(Shape::everything());
    rig.write(reg::CMD, CommandWord::new(Command::DrainAll, 0, true).0);
    assert!(CommandStatus(rig.read32(reg::CMDSTS)).is_active());
    rig.run_until(10);
    assert_eq!(rig.desk.interrupts.take(), [0]);
    assert_eq!(rig.read32(reg::INTCAUSE), reg::CAUSE_COMMAND);
    rig.write(reg::INTCAUSE, reg::CAUSE_COMMAND);
    assert_eq!((rig.read32(reg::INTCAUSE), rig.read32(reg::CMDSTS)), (0, 0));
    rig.write(reg::CMD, CommandWord::new(Command::DrainAll, 0, false).0);
    rig.run_until(20);
    assert_eq!(rig.desk.interrupts.take(), []);
}

#[test]
fn wrong_configurations_of_the_device_are_refused() {
    type Change = fn(&mut Rig);
    let cases: [(Change, CommandError); 8] = [
        (|rig| rig.core.set_bus(false, true), CommandError::BusMaster),
        (
            |rig| {
                rig.core.set_bus(true, false);
                rig.configure(0, &shared());
            },
            CommandError::PasidOff,
        ),
        (
            |rig| rig.configure(3, &QueueConfig::new(128, 0, Mode::Dedicated, 1)),
            CommandError::QueueSizes,
        ),
        (|rig| rig.group(1, 1, 2), CommandError::GroupQueues),
        (|rig| rig.group(1, 1 << 8, 2), CommandError::GroupQueues),
        (|rig| rig.group(1, 2, 1), CommandError::GroupEngines),
        (|rig| rig.group(1, 2, 1 << 4), CommandError::GroupEngines),
        (|rig| rig.group(1, 2, 0), CommandError::GroupHalf),
    ];
    for (change, error) in cases {
        let mut rig = Rig::new(Shape::everything());
        rig.group(0, 1, 1);
        rig.configure(0, &dedicated());
        change(&mut rig);
        assert_eq!(rig.command(Command::EnableDevice, 0), Err(error));
        assert_eq!(rig.state().state(), DeviceState::Disabled);
    }
    let mut rig = Rig::new(Shape::everything());
    let flags = rig.tables().groups() + 40;
    rig.write(flags, 97 << 8);
    assert_eq!(
        rig.command(Command::EnableDevice, 0),
        Err(CommandError::GroupBuffers)
    );
}

#[test]
fn wrong_configurations_of_a_queue_are_refused() {
    let mut no_priority = dedicated();
    no_priority.0[2] &= !0xf0;
    let mut no_pasid = shared();
    no_pasid.0[2] &= !(1 << 28);
    let mut no_threshold = shared();
    no_threshold.0[1] = 0;
    let mut big_threshold = shared();
    big_threshold.0[1] = 9;
    let mut empty = dedicated();
    empty.0[0] = 0;
    let cases = [
        (empty, CommandError::QueueSize),
        (no_priority, CommandError::QueuePriority),
        (no_threshold, CommandError::QueueMode),
        (big_threshold, CommandError::QueueMode),
        (no_pasid, CommandError::PasidNeeded),
        (dedicated().with_limits(20, 11), CommandError::BatchSize),
    ];
    for (queue, error) in cases {
        let mut rig = Rig::new(Shape::everything());
        rig.group(0, 1, 1);
        rig.configure(0, &queue);
        assert_eq!(rig.command(Command::EnableDevice, 0), Ok(0));
        assert_eq!(rig.command(Command::EnableQueue, 0), Err(error));
        assert_eq!(rig.configured(0).state(), QueueState::Disabled);
    }
}

#[test]
fn commands_out_of_place_are_refused() {
    let mut rig = Rig::new(Shape::everything());
    assert_eq!(
        rig.command(Command::EnableQueue, 0),
        Err(CommandError::DeviceDisabled)
    );
    assert_eq!(
        rig.command(Command::DisableDevice, 0),
        Err(CommandError::NotEnabled)
    );
    assert_eq!(
        rig.command(Command::DrainQueue, 1),
        Err(CommandError::QueueNotEnabled)
    );
    let mut rig = Rig::on(&[dedicated()]);
    assert_eq!(
        rig.command(Command::EnableDevice, 0),
        Err(CommandError::DeviceEnabled)
    );
    assert_eq!(
        rig.command(Command::EnableQueue, 0),
        Err(CommandError::QueueEnabled)
    );
    assert_eq!(
        rig.command(Command::EnableQueue, 8),
        Err(CommandError::QueueIndex)
    );
    assert_eq!(rig.command(Command::EnableQueue, 1), Err(CommandError::QueueSize));
    assert_eq!(
        rig.command(Command::DisableQueue, wq_mask(1)),
        Err(CommandError::QueueNotEnabled)
    );
    assert_eq!(
        rig.command(Command::DisableQueue, wq_mask(9)),
        Err(CommandError::QueueIndex)
    );
    assert_eq!(
        rig.command(Command::RequestInterrupt, 9),
        Err(CommandError::InterruptIndex)
    );
    assert_eq!(rig.command(Command::RequestInterrupt, 8), Ok(8));
    rig.write(reg::CMD, 0x1f << 20);
    assert_eq!(rig.finish_command(), Err(CommandError::Command));
    let mut old = Rig::new(Shape::sapphire_rapids());
    assert_eq!(
        old.command(Command::RequestInterrupt, 0),
        Err(CommandError::Command)
    );
}

#[test]
fn tables_change_only_while_nothing_uses_them() {
    let mut rig = Rig::on(&[dedicated()]);
    rig.configure(0, &QueueConfig::default());
    rig.group(0, 7, 7);
    assert_eq!(rig.configured(0).entries(), 16);
    let groups = rig.tables().groups();
    assert_eq!(rig.read32(groups), 1);
    // Linux gives a queue its address space while the device is on and the queue is not.
    assert_eq!(rig.command(Command::DisableQueue, wq_mask(0)), Ok(0));
    rig.configure(
        0,
        &dedicated().with_pasid(Pasid::from_low_bits(9)).with_limits(1, 1),
    );
    let now = rig.configured(0);
    assert_eq!(
        (now.pasid().map(Pasid::number), now.transfer_shift()),
        (Some(9), 20)
    );
}

#[test]
fn a_record_comes_when_transfer_and_latency_are_over() {
    let mut rig = Rig::on(&[dedicated()]);
    let start = rig.now;
    assert_eq!(rig.submit(0, Way::Posted, &fill(500, 0)), Submitted::Taken);
    assert_eq!(rig.submit(0, Way::Posted, &fill(300, 1)), Submitted::Taken);
    rig.run_until(start + 1499);
    assert_eq!(rig.status(0), None);
    assert_eq!(rig.core.next_event(), Some(start + 1500));
    rig.run_until(start + 1500);
    assert_eq!((rig.status(0), rig.status(1)), (Some(Status::Success), None));
    rig.run_until(start + 1800);
    assert_eq!(rig.status(1), Some(Status::Success));
    let account = rig.core.account();
    assert_eq!(
        (account.descriptors, account.bytes, account.busy_ns),
        (2, 800, 800)
    );
    assert_eq!(rig.core.next_event(), None);
}

#[test]
fn a_batch_takes_as_long_as_its_members_and_one_latency() {
    let mut rig = Rig::on(&[dedicated()]);
    let start = rig.now;
    let members: Vec<Descriptor> = (1..=10).map(|number| fill(100, number)).collect();
    let batch = told(rig.list(&members), 0);
    rig.submit(0, Way::Posted, &batch);
    // 100 ns and 640 bytes for the list, ten times 100 bytes, the latency.
    rig.run_until(start + 2739);
    assert_eq!(
        (rig.status(9), rig.status(10), rig.status(0)),
        (Some(Status::Success), None, None)
    );
    rig.run_until(start + 2740);
    assert_eq!(
        (rig.status(10), rig.status(0)),
        (Some(Status::Success), Some(Status::Success))
    );
    assert_eq!(rig.record(0).completed, 10);
}

#[test]
fn members_go_on_past_one_that_failed_but_not_past_a_fence() {
    let mut rig = Rig::on(&[dedicated()]);
    let fenced = fill(8, 4).with_flags(flags::FENCE);
    let members = [fill(8, 1), failing(2), fill(8, 3), fenced, fill(8, 5)];
    let batch = told(rig.list(&members), 0);
    rig.submit(0, Way::Posted, &batch);
    rig.run_until(rig.now + 100_000);
    let statuses: Vec<_> = (0..6).map(|number| rig.status(number)).collect();
    let (success, failed, fault) = (Status::Success, Status::BatchFailed, Status::PageFault);
    assert_eq!(
        statuses,
        [
            Some(failed),
            Some(success),
            Some(fault),
            Some(success),
            None,
            None
        ]
    );
    assert_eq!((rig.record(0).completed, rig.record(0).result), (3, 1));
}

#[test]
fn a_fence_waits_for_those_before_it() {
    let mut rig = Rig::on(&[dedicated()]);
    let start = rig.now;
    let members = [fill(8, 1), fill(8, 2).with_flags(flags::FENCE)];
    let batch = told(rig.list(&members), 0);
    rig.submit(0, Way::Posted, &batch);
    rig.run_until(start + 100 + 128 + 8 + 1000);
    assert_eq!((rig.status(1), rig.status(2)), (Some(Status::Success), None));
    rig.run_until(start + 100 + 128 + 2 * 1008);
    assert_eq!(rig.status(2), Some(Status::Success));
}

#[test]
fn a_drain_ends_when_all_before_it_have() {
    let mut rig = Rig::on(&[dedicated(), dedicated()]);
    let start = rig.now;
    let batch = told(rig.list(&[fill(3000, 1), fill(3000, 2)]), 3);
    rig.submit(0, Way::Posted, &batch);
    rig.submit(0, Way::Posted, &told(Descriptor::drain(), 4));
    rig.submit(1, Way::Posted, &told(Descriptor::drain(), 5));
    rig.run_until(start + 2000);
    assert_eq!((rig.status(4), rig.status(5)), (None, Some(Status::Success)));
    rig.run_until(start + 100_000);
    assert_eq!(
        (rig.status(3), rig.status(4)),
        (Some(Status::Success), Some(Status::Success))
    );
}

#[test]
fn a_full_dedicated_queue_loses_what_comes_and_says_so() {
    let mut rig = Rig::on(&[dedicated()]);
    rig.write(reg::GENCTRL, reg::GENCTRL_SOFTWARE_ERROR);
    rig.desk.interrupts.take();
    for number in 0..16 {
        assert_eq!(rig.submit(0, Way::Posted, &fill(100, number)), Submitted::Taken);
    }
    assert_eq!(rig.configured(0).occupancy(), 15, "one of them has begun");
    assert_eq!(rig.submit(0, Way::Posted, &fill(100, 16)), Submitted::Taken);
    assert_eq!(rig.submit(0, Way::Posted, &fill(100, 17)), Submitted::Lost);
    assert_eq!(rig.desk.interrupts.take(), [0]);
    assert_eq!(rig.read32(reg::INTCAUSE), reg::CAUSE_ERROR);
    assert_eq!(rig.software_error(), Some(SoftwareError::QUEUE_FULL));
    assert_eq!(rig.submit(0, Way::Posted, &fill(100, 18)), Submitted::Lost);
    assert_eq!(
        rig.read(reg::SWERR) & SoftwareError::OVERFLOW,
        SoftwareError::OVERFLOW
    );
    rig.write(reg::SWERR, 3);
    assert_eq!(rig.software_error(), None);
    rig.run_until(rig.now + 1_000_000);
    let ended = (0..20).filter(|number| rig.status(*number).is_some()).count();
    assert_eq!(ended, 17);
}

#[test]
fn a_shared_queue_turns_away_those_it_has_no_room_for() {
    let mut rig = Rig::on(&[shared()]);
    // Nothing begins while the clock stands still.
    let limited = portal::offset(0, portal::Kind::Limited);
    let bytes = fill(8, 0).to_bytes();
    let taken: Vec<Submitted> = (0..6)
        .map(|_| {
            rig.core
                .submit(limited, Way::Deferrable, &bytes, rig.now, &rig.desk)
        })
        .collect();
    let (yes, no) = (Submitted::Taken, Submitted::Retry);
    assert_eq!(taken, [yes, yes, yes, yes, no, no]);
    let taken: Vec<Submitted> = (0..6)
        .map(|_| rig.submit(0, Way::Deferrable, &fill(8, 0)))
        .collect();
    assert_eq!(taken, [yes, yes, yes, yes, no, no]);
    assert_eq!(rig.submit(0, Way::Posted, &fill(8, 0)), Submitted::Lost);
    assert_eq!(rig.software_error(), Some(SoftwareError::PORTAL));
}

#[test]
fn queues_that_are_off_and_portals_of_none_take_nothing() {
    let mut rig = Rig::on(&[dedicated(), shared()]);
    assert_eq!(rig.command(Command::DisableQueue, wq_mask(0) | wq_mask(1)), Ok(0));
    assert_eq!(rig.submit(1, Way::Deferrable, &fill(8, 0)), Submitted::Retry);
    assert_eq!(rig.submit(0, Way::Posted, &fill(8, 0)), Submitted::Lost);
    assert_eq!(rig.software_error(), Some(SoftwareError::QUEUE_DISABLED));
    assert_eq!(rig.submit(77, Way::Posted, &fill(8, 0)), Submitted::Lost);
}

#[test]
fn drains_wait_and_aborts_and_resets_drop() {
    type Check = fn(&mut Rig);
    let cases: [(Command, u32, bool, Check); 7] = [
        (Command::DrainAll, 0, true, |_| {}),
        (Command::DrainQueue, 1, true, |_| {}),
        (Command::DisableQueue, 1, true, |rig| {
            assert_eq!(rig.configured(0).state(), QueueState::Disabled);
            assert_eq!(rig.configured(0).entries(), 16);
        }),
        (Command::DisableDevice, 0, true, |rig| {
            assert_eq!(rig.state().state(), DeviceState::Disabled);
        }),
        (Command::AbortAll, 0, false, |_| {}),
        (Command::AbortQueue, 1, false, |_| {}),
        (Command::ResetQueue, 1, false, |rig| {
            assert_eq!(rig.configured(0).entries(), 0);
        }),
    ];
    for (command, operand, waits, check) in cases {
        let mut rig = Rig::on(&[dedicated()]);
        rig.submit(0, Way::Posted, &fill(5000, 0));
        rig.submit(0, Way::Posted, &fill(5000, 1));
        let batch = told(rig.list(&[fill(5000, 2), fill(5000, 3)]), 4);
        rig.submit(0, Way::Posted, &batch);
        rig.run_until(rig.now + 100);
        assert_eq!(rig.command(command, operand), Ok(0), "{command:?}");
        check(&mut rig);
        let ended = (0..5).filter(|number| rig.status(*number).is_some()).count();
        assert_eq!(ended, if waits { 5 } else { 0 }, "{command:?}");
        rig.run_until(rig.now + 1_000_000);
        let later = (0..5).filter(|number| rig.status(*number).is_some()).count();
        assert_eq!(later, ended, "{command:?}: what was dropped stays so");
    }
}

#[test]
fn address_spaces_are_drained_and_aborted_by_themselves() {
    let mut rig = Rig::on(&[shared()]);
    let of = |number: u64, pasid: u8| {
        let mut bytes = fill(2000, number).to_bytes();
        bytes[0] = pasid;
        Descriptor::from_bytes(bytes)
    };
    for (number, pasid) in [(0, 5), (1, 6), (2, 5), (3, 6)] {
        rig.submit(0, Way::Deferrable, &of(number, pasid));
    }
    assert_eq!(rig.command(Command::AbortPasid, 5), Ok(0));
    assert_eq!(rig.command(Command::DrainPasid, 6), Ok(0));
    let ended: Vec<bool> = (0..4).map(|number| rig.status(number).is_some()).collect();
    assert_eq!(ended, [false, true, false, true]);
}

#[test]
fn a_halt_drops_everything_and_a_reset_ends_it() {
    for for_good in [false, true] {
        let mut rig = Rig::on(&[dedicated()]);
        rig.write(reg::GENCTRL, reg::GENCTRL_HALT);
        rig.core.set_faults(Faults {
            halts_after: Some(2),
            halts_for_good: for_good,
            ..Faults::default()
        });
        rig.desk.interrupts.take();
        for number in 0..3 {
            rig.submit(0, Way::Posted, &fill(8, number));
        }
        rig.run_until(rig.now + 100_000);
        assert_eq!(rig.state().state(), DeviceState::Halted);
        assert_eq!((rig.status(0), rig.status(2)), (None, None));
        assert_eq!(rig.desk.interrupts.take(), [0]);
        assert_eq!(rig.read32(reg::INTCAUSE), reg::CAUSE_HALT);
        assert_eq!(rig.command(Command::EnableQueue, 0), Err(CommandError::Hardware));
        if for_good {
            assert_eq!(rig.state().reset(), ResetKind::Function);
            assert_eq!(rig.command(Command::ResetDevice, 0), Err(CommandError::Hardware));
            rig.core.function_reset();
        } else {
            assert_eq!(rig.command(Command::ResetDevice, 0), Ok(0));
        }
        assert_eq!(rig.state().state(), DeviceState::Disabled);
        assert_eq!(rig.configured(0), {
            let mut reset = QueueConfig::default();
            reset.0[QueueConfig::STATE_WORD] = QueueConfig::state_word(QueueState::Disabled, 0);
            reset
        });
    }
}

#[test]
fn operations_that_a_queue_does_not_do_are_refused() {
    let nothing_but_nop = dedicated().with_operations([1, 0, 0, 0]);
    let mut rig = Rig::on(&[nothing_but_nop]);
    rig.submit(0, Way::Posted, &told(Descriptor::nop(), 0));
    rig.submit(0, Way::Posted, &fill(8, 1));
    rig.run_until(rig.now + 10_000);
    assert_eq!(
        (rig.status(0), rig.status(1)),
        (Some(Status::Success), Some(Status::Opcode))
    );
    // Sapphire Rapids does not fetch translations, whatever a queue is told.
    let mut old = Rig::new(Shape::sapphire_rapids());
    old.group(0, 1, 1);
    old.configure(0, &dedicated());
    assert_eq!(old.command(Command::EnableDevice, 0), Ok(0));
    assert_eq!(old.command(Command::EnableQueue, 0), Ok(0));
    let fetch = Descriptor::translation_fetch(DeviceAddress(DATA), 8).unwrap();
    old.submit(0, Way::Posted, &told(fetch, 0));
    old.run_until(old.now + 10_000);
    assert_eq!(old.status(0), Some(Status::Opcode));
    assert_eq!(fetch.opcode(), Some(Opcode::TranslationFetch));
}

#[test]
fn queues_take_turns_and_priorities_count_between_those_that_wait() {
    let high = |priority| {
        QueueConfig::new(16, 0, Mode::Dedicated, priority)
            .with_limits(20, 8)
            .with_operations([u64::MAX; 4])
    };
    let mut rig = Rig::on(&[high(1), high(15)]);
    for number in 0..4 {
        rig.submit(0, Way::Posted, &fill(100, number));
        rig.submit(1, Way::Posted, &fill(100, 10 + number));
    }
    let mut order = Vec::new();
    while let Some(next) = rig.core.next_event() {
        rig.run_until(next);
        let ended = [0, 1, 2, 3, 10, 11, 12, 13]
            .into_iter()
            .filter(|number| rig.status(*number).is_some());
        let fresh: Vec<u64> = ended.filter(|number| !order.contains(number)).collect();
        order.extend(fresh);
    }
    assert_eq!(order, [10, 0, 11, 1, 12, 2, 13, 3]);
}

/// A descriptor with a record, and these flags besides its own.
fn with_flags(descriptor: Descriptor, more: u32) -> Descriptor {
    let mut bytes = told(descriptor, 0).to_bytes();
    let word = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) | more;
    bytes[4..8].copy_from_slice(&word.to_le_bytes());
    Descriptor::from_bytes(bytes)
}

/// Errors that the oracle's descriptors do not meet, or not surely. (Those of data integrity fields belong to operations that
/// the model does not have.)
#[test]
fn rarer_errors_end_descriptors_as_well() {
    let copy = Descriptor::fill(7, DeviceAddress(DATA), 8).unwrap();
    let beyond = Descriptor::fill(7, DeviceAddress(u64::MAX - 7), 64).unwrap();
    let back = with_flags(copy, flags::DESTINATION_READBACK);
    let ordered = flags::STRICT_ORDER | flags::COMPLETION_CLASS;
    /// Each of 65,536.
    const ALWAYS: u32 = 65_536;
    let good = Faults::default();
    for (descriptor, faults, status) in [
        (with_flags(copy, ordered), good, Status::TrafficClass),
        (
            with_flags(copy, ordered | flags::ADDRESS_2_CLASS),
            good,
            Status::Success,
        ),
        (with_flags(beyond, 0), good, Status::Translation),
        (told(copy, 0).with_interrupt(100), good, Status::InterruptHandle),
        (
            back,
            Faults {
                readback_faults: ALWAYS,
                ..good
            },
            Status::ReadbackFault,
        ),
        (
            back,
            Faults {
                readback_hardware: ALWAYS,
                ..good
            },
            Status::ReadbackHardware,
        ),
        (
            told(copy, 0),
            Faults {
                hardware: ALWAYS,
                ..good
            },
            Status::Hardware,
        ),
    ] {
        let mut rig = Rig::on(&[dedicated()]);
        rig.core.set_faults(faults);
        rig.submit(0, Way::Posted, &descriptor);
        rig.run_until(rig.now + 10_000);
        assert_eq!(rig.status(0), Some(status));
    }
    let privileged = {
        let mut bytes = told(copy, 0).to_bytes();
        bytes[3] |= 0x80;
        Descriptor::from_bytes(bytes)
    };
    let mut rig = Rig::on(&[shared()]);
    assert_eq!(rig.submit(0, Way::Deferrable, &privileged), Submitted::Taken);
    rig.run_until(rig.now + 10_000);
    assert_eq!(rig.status(0), Some(Status::Privilege));
}

#[test]
fn what_cannot_be_read_back_was_written() {
    let mut rig = Rig::on(&[dedicated()]);
    rig.core.set_faults(Faults {
        readback_faults: 65_536,
        ..Faults::default()
    });
    let fill = Descriptor::fill(0x55, DeviceAddress(DATA), 8).unwrap();
    rig.submit(0, Way::Posted, &with_flags(fill, flags::DESTINATION_READBACK));
    rig.run_until(rig.now + 10_000);
    assert_eq!((rig.record(0).fault_address, rig.record(0).completed), (DATA, 8));
    let mut bytes = [0; 8];
    rig.desk.memory.read(None, DATA, &mut bytes).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 0x55);
}

#[test]
fn one_record_is_lost_if_that_is_asked_for() {
    let mut rig = Rig::on(&[dedicated()]);
    rig.core.set_faults(Faults {
        loses: Some(2),
        ..Faults::default()
    });
    (0..3).for_each(|number| _ = rig.submit(0, Way::Posted, &fill(8, number)));
    rig.run_until(rig.now + 10_000);
    let done = Some(Status::Success);
    assert_eq!([0, 1, 2].map(|number| rig.status(number)), [done, None, done]);
}
