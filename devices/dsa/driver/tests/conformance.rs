//! The engine against the model in this process, on good days and on bad ones.

use std::time::Duration;
use vmm_dedup::compare::{Arena, Engine, PageId, conformance};
use vmm_dedup_dsa::{DsaEngine, InProcess, Options, Reach, Wanted, WorkQueue};
use vmm_dedup_dsa_abi::config::Mode;
use vmm_dedup_dsa_model::{Faults, Shape, Timing};

const LIMIT: Duration = Duration::from_millis(250);

/// How a case's devices are.
#[derive(Clone, Copy)]
struct Case {
    reach: Reach,
    timing: Timing,
    faults: Faults,
    options: Options,
    wanted: Wanted,
    queues: usize,
}

impl Case {
    fn good(reach: Reach) -> Self {
        let options = Options {
            only_if_sooner: false,
            hybrid: false,
            time_limit: LIMIT,
            ..Options::default()
        };
        Self {
            reach,
            timing: Timing::NONE,
            faults: Faults::default(),
            options,
            wanted: Wanted::default(),
            queues: 1,
        }
    }

    fn engine(&self, arena: &Arena) -> DsaEngine {
        let queue = |number: u64| {
            let faults = Faults {
                seed: self.faults.seed + number,
                ..self.faults
            };
            let shape = Shape::sapphire_rapids();
            let queue = InProcess::new(shape, self.timing, faults, self.reach, self.wanted).unwrap();
            Box::new(queue) as Box<dyn WorkQueue>
        };
        let queues = (0..self.queues as u64).map(queue).collect();
        let mut engine = DsaEngine::new(queues, self.options).unwrap();
        engine.map(PageId(0), arena.pages(), arena.file()).unwrap();
        engine
    }

    fn conforms(&self) {
        conformance::keys(&mut |arena| Box::new(self.engine(arena)));
        conformance::tree_search(&mut |arena| Box::new(self.engine(arena)));
        conformance::verify(&mut |arena| Box::new(self.engine(arena)));
        conformance::deltas(&mut |arena| Box::new(self.engine(arena)));
    }
}

#[test]
fn it_conforms_with_this_processs_addresses() {
    Case::good(Reach::Process).conforms();
}

#[test]
fn it_conforms_with_files_that_it_was_given() {
    Case::good(Reach::Mapped).conforms();
}

#[test]
fn it_conforms_as_it_is_by_default() {
    let case = Case {
        options: Options {
            time_limit: LIMIT,
            ..Options::default()
        },
        timing: Timing::PUBLISHED,
        ..Case::good(Reach::Mapped)
    };
    case.conforms();
}

#[test]
fn it_conforms_page_by_page_with_two_queues_of_few_entries() {
    let case = Case {
        options: Options {
            batch: 1,
            levels: 1,
            ..Case::good(Reach::Mapped).options
        },
        wanted: Wanted {
            entries: Some(3),
            ..Wanted::default()
        },
        queues: 2,
        ..Case::good(Reach::Mapped)
    };
    case.conforms();
}

/// Pages that are missing now and then, lists as well, records that come late, a device that is broken for a moment.
#[test]
fn it_conforms_while_pages_are_missing_and_records_late() {
    let faults = Faults {
        page_faults: 2000,
        list_faults: 200,
        late: 200,
        late_ns: 300_000,
        hardware: 300,
        seed: 5,
        ..Faults::default()
    };
    for reach in [Reach::Process, Reach::Mapped] {
        let timing = Timing::PUBLISHED;
        Case {
            faults,
            timing,
            ..Case::good(reach)
        }
        .conforms();
    }
}

/// Each device halts once and loses one record, a batch's or a member's, early or late; pages are missing, lists fault, records
/// come late, queues of four entries are often full.
#[test]
fn it_conforms_while_devices_halt_and_records_are_lost() {
    let all = Faults {
        page_faults: 200,
        list_faults: 60,
        hardware: 300,
        late: 200,
        late_ns: 300_000,
        retries: 5000,
        seed: 11,
        ..Faults::default()
    };
    // Far above the late records' time, also where the model waits for a core, and short, as each lost record of a batch takes so long.
    let time_limit = Duration::from_millis(50);
    let full = Wanted {
        entries: Some(4),
        mode: Mode::Shared,
    };
    for (reach, wanted, halts_after, loses) in [
        (Reach::Mapped, full, Some(40), Some(200)),
        (Reach::Process, Wanted::default(), Some(300), Some(2)),
    ] {
        let faults = Faults {
            halts_after,
            loses,
            ..all
        };
        let options = Options {
            time_limit,
            batch: 64,
            ..Case::good(reach).options
        };
        Case {
            faults,
            options,
            wanted,
            timing: Timing::PUBLISHED,
            ..Case::good(reach)
        }
        .conforms();
    }
}

/// A record comes after the time limit: it was aborted by then, and is written nowhere.
#[test]
fn it_conforms_while_records_come_after_the_time_limit() {
    let case = Case {
        faults: Faults {
            delays: Some(3),
            late_ns: 60_000_000,
            seed: 12,
            ..Faults::default()
        },
        options: Options {
            time_limit: Duration::from_millis(20),
            ..Case::good(Reach::Mapped).options
        },
        timing: Timing::PUBLISHED,
        ..Case::good(Reach::Mapped)
    };
    case.conforms();
}

#[test]
fn it_conforms_on_a_shared_queue_that_is_often_full() {
    let case = Case {
        faults: Faults {
            retries: 20_000,
            seed: 6,
            ..Faults::default()
        },
        wanted: Wanted {
            entries: Some(4),
            mode: Mode::Shared,
        },
        ..Case::good(Reach::Mapped)
    };
    case.conforms();
}

/// Where there is a device: DSA_NODE names a work queue, such as /dev/dsa/wq0.0, or a device that belongs to VFIO by its folder
/// below /sys. The nested tests run this in guests.
#[test]
fn it_conforms_through_a_device_node() {
    let Some(node) = std::env::var_os("DSA_NODE") else {
        eprintln!("SKIPPED: DSA_NODE names no work queue");
        return;
    };
    let options = Options {
        time_limit: Duration::from_secs(5),
        ..Case::good(Reach::Process).options
    };
    let engine = |arena: &Arena| {
        let queues = vmm_dedup_dsa::open(Some(node.as_ref())).unwrap();
        let mut engine = DsaEngine::new(queues, options).unwrap();
        engine.map(PageId(0), arena.pages(), arena.file()).unwrap();
        Box::new(engine)
    };
    conformance::keys(&mut |arena| engine(arena));
    conformance::tree_search(&mut |arena| engine(arena));
    conformance::verify(&mut |arena| engine(arena));
    conformance::deltas(&mut |arena| engine(arena));
}
