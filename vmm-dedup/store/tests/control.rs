//! Questions of observers, relayed to VMs that answer, lie, hang or go.

mod support;

use proptest::prelude::*;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::Duration;
use support::{
    Answer, Client, Observer, Server, connected_by_another_process, eventually, refused, stats, stats_from,
};
use vmm_dedup_protocol::control::{Explain, Explained, Explanation, NotDone, Set, Settings, Switch};
use vmm_dedup_protocol::message::{Kind, Message, aligned_buffer, encode};
use vmm_dedup_protocol::name::Name;
use vmm_dedup_protocol::refusal::{Reason, Refusal, Refused};
use vmm_dedup_protocol::socket;
use zerocopy::IntoBytes;

const OFF: Settings = Settings {
    switch: Some(Switch::Off),
    cpu_percent: None,
    reserve_pages: None,
    pass_period_ms: None,
    stop_target_us: None,
};

fn explained(serial: u64) -> Explained {
    Explained {
        serial,
        explanation: Explanation {
            pages: serial,
            ..Explanation::default()
        },
        note: format!("note of {serial}"),
    }
}

fn not_done(serial: u64) -> NotDone {
    NotDone {
        serial,
        text: format!("not {serial}"),
    }
}

#[test]
fn a_vm_that_goes_hides_no_other_from_who_lists_them() {
    let server = Server::start(|_| ());
    let first = Client::connect(&server.socket, "first");
    let _second = Client::connect(&server.socket, "second");
    let listed = stats(&server.socket);
    assert_eq!((listed.name.text(), listed.vms), ("first".to_owned(), 2));
    drop(first);
    eventually(|| stats(&server.socket).vms == 1);
    let listed = stats_from(&server.socket, listed.next);
    assert_eq!(listed.name.text(), "second");
    assert_eq!(stats_from(&server.socket, listed.next).next, 0);
    assert_eq!(stats_from(&server.socket, u32::MAX).next, 0);
}

#[test]
fn a_question_finds_its_vm_by_each_of_its_names() {
    let server = Server::start(|_| ());
    let mut first = Client::connect(&server.socket, "web");
    let mut second = Client::connect(&server.socket, "web");
    let mut other = Client::connect(&server.socket, "db");
    let mut observer = Observer::connect(&server.socket);
    let pid = std::process::id();

    observer.explain("db", 5);
    let serial = other.question();
    other.send(Kind::Explained, &explained(serial).body());
    let Answer::Explained(got) = observer.answer() else {
        panic!("not explained")
    };
    assert_eq!((got.serial, got.explanation.pages), (5, serial));

    observer.set("web", 6, OFF);
    let text = observer.refusal();
    assert!(
        text.contains("2 VMs are called web") && text.contains(&format!("web.{pid}")),
        "{text}"
    );
    // The second was renamed by the store, and the first has its process number, too.
    observer.set(&format!("web.{pid}"), 7, OFF);
    assert!(observer.refusal().contains("2 VMs"));
    observer.explain("nobody", 8);
    assert_eq!(
        observer.refusal(),
        format!("no VM is called nobody: there are web, web.{pid}, db")
    );
    drop(first);
    eventually(|| stats(&server.socket).vms == 2);
    observer.set("web", 9, OFF);
    let serial = second.question();
    second.send(Kind::Done, &serial.to_ne_bytes());
    assert_eq!(observer.answer(), Answer::Done(9));
    first = Client::connect(&server.socket, "new");
    observer.set("new", 10, OFF);
    let serial = first.question();
    first.send(Kind::NotDone, &not_done(serial).body());
    assert_eq!(observer.refusal(), format!("not {serial}"));
}

#[test]
fn a_refused_vm_is_listed_and_explained_and_cannot_be_set() {
    let server = Server::start(|_| ());
    let refusal = Refusal::new(
        Reason::Vfio,
        "device 0000:01:00.0 has all memory pinned",
        "detach it",
    );
    let vm = refused(&server.socket, "gpu", &refusal);
    let listed = stats(&server.socket);
    assert_eq!(
        (listed.vms, listed.reason, listed.vm.pages, listed.vm.state),
        (1, 3, 512, 4)
    );
    let mut observer = Observer::connect(&server.socket);
    observer.explain("gpu", 1);
    let Answer::Refused(answer) = observer.answer() else {
        panic!("no refusal")
    };
    assert_eq!((answer.serial, answer.pages, answer.refusal), (1, 512, refusal));
    observer.set("gpu", 2, OFF);
    let text = observer.refusal();
    assert!(text.contains("vfio") && text.contains("detach it"), "{text}");
    drop(vm);
    eventually(|| stats(&server.socket).vms == 0);
}

#[test]
fn a_vm_that_hangs_is_answered_for_and_asked_no_more_than_so_often() {
    let server = Server::start(|config| config.answer_seconds = 1);
    let mut vm = Client::connect(&server.socket, "hung");
    let mut observers: Vec<Observer> = (0..9).map(|_| Observer::connect(&server.socket)).collect();
    let (busy, asking) = observers.split_last_mut().unwrap();
    for (serial, observer) in (0..).zip(&mut *asking) {
        observer.set("hung", serial, OFF);
    }
    let asked: Vec<u64> = (0..8).map(|_| vm.question()).collect();
    busy.explain("hung", 0);
    assert!(busy.refusal().contains("8 questions"));
    for observer in asking {
        assert!(observer.refusal().contains("did not answer in time"));
    }
    // Late answers make room, and go nowhere.
    for serial in asked {
        vm.send(Kind::Done, &serial.to_ne_bytes());
    }
    vm.acknowledge();
    busy.explain("hung", 1);
    let serial = vm.question();
    vm.send(Kind::Explained, &explained(serial).body());
    assert!(matches!(busy.answer(), Answer::Explained(e) if e.serial == 1));
    assert!(observers.iter().all(Observer::hears_nothing));
}

#[test]
fn memory_may_take_longer_to_come_back() {
    let server = Server::start(|config| config.answer_seconds = 1);
    let mut vm = Client::connect(&server.socket, "big");
    let mut observer = Observer::connect(&server.socket);
    let settings = Settings {
        switch: Some(Switch::OffUnmerge),
        ..Settings::default()
    };
    observer.set("big", 1, settings);
    let serial = vm.question();
    std::thread::sleep(Duration::from_secs(3));
    vm.send(Kind::Done, &serial.to_ne_bytes());
    assert_eq!(observer.answer(), Answer::Done(1));
}

#[test]
fn whoever_does_not_keep_to_the_order_is_cut_off() {
    let server = Server::start(|_| ());
    let vm = Client::connect(&server.socket, "vm");
    let mut observer = Observer::connect(&server.socket);
    observer.set("vm", 1, OFF);
    observer.set("vm", 2, OFF);
    assert!(observer.error().contains("before the last one's answer"));
    let mut asking = Client::connect(&server.socket, "asking");
    asking.send(Kind::Explain, &[0; 88]);
    assert!(asking.error().contains("observers ask"));
    let mut lying = Client::connect(&server.socket, "lying");
    lying.send(Kind::Done, &7u64.to_ne_bytes());
    assert!(lying.error().contains("not asked"));
    drop(vm);
}

/// One step of two VMs and two observers.
#[derive(Clone, Copy, Debug)]
enum Step {
    Ask {
        observer: usize,
        vm: usize,
        set: bool,
    },
    /// A VM answers the question at this place of those that it got.
    Answer {
        vm: usize,
        at: usize,
        how: How,
    },
    /// The VM's process ends, and another takes its place.
    Restart {
        vm: usize,
    },
    Leave {
        observer: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Right,
    NotDone,
    /// The answer to the other kind of question: a breach.
    WrongKind,
    /// To a question of the other VM: a breach.
    Stolen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let how = prop_oneof![
        6 => Just(How::Right), 3 => Just(How::NotDone), 1 => Just(How::WrongKind), 1 => Just(How::Stolen)
    ];
    let step = prop_oneof![
        6 => (0..2usize, 0..2usize, any::<bool>()).prop_map(|(observer, vm, set)| Step::Ask { observer, vm, set }),
        6 => (0..2usize, 0..3usize, how).prop_map(|(vm, at, how)| Step::Answer { vm, at, how }),
        1 => (0..2usize).prop_map(|vm| Step::Restart { vm }),
        1 => (0..2usize).prop_map(|observer| Step::Leave { observer }),
    ];
    proptest::collection::vec(step, 1..30)
}

/// A question that a VM has: its serial number there, whether it is a `Set`, and who waits, with his number.
type Open = (u64, bool, Option<(usize, u64)>);

struct World {
    server: Server,
    vms: Vec<Client>,
    observers: Vec<Observer>,
    open: [Vec<Open>; 2],
    waiting: HashMap<usize, usize>,
    last: u64,
}

impl World {
    fn new() -> Self {
        let server = Server::start(|_| ());
        let vms = (0..2).map(|vm| connect_vm(&server, vm)).collect();
        let observers = (0..2).map(|_| Observer::connect(&server.socket)).collect();
        Self {
            server,
            vms,
            observers,
            open: Default::default(),
            waiting: HashMap::new(),
            last: 0,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Ask { observer, .. } if self.waiting.contains_key(&observer) => {}
            Step::Ask { observer, vm, set } => self.ask(observer, vm, set),
            Step::Answer { vm, at, how } => self.answer(vm, at, how),
            Step::Restart { vm } => self.restart(vm, None),
            Step::Leave { observer } => {
                self.observers[observer] = Observer::connect(&self.server.socket);
                self.waiting.remove(&observer);
                for (_, _, from) in self.open.iter_mut().flatten() {
                    from.take_if(|(of, _)| *of == observer);
                }
            }
        }
    }

    fn ask(&mut self, observer: usize, vm: usize, set: bool) {
        self.last += 1;
        let name = format!("vm{vm}");
        match set {
            true => self.observers[observer].set(&name, self.last, OFF),
            false => self.observers[observer].explain(&name, self.last),
        }
        if self.open[vm].len() == 8 {
            assert!(self.observers[observer].refusal().contains("8 questions"));
            return;
        }
        let serial = self.vms[vm].question();
        self.open[vm].push((serial, set, Some((observer, self.last))));
        self.waiting.insert(observer, vm);
    }

    fn answer(&mut self, vm: usize, at: usize, how: How) {
        let from = if how == How::Stolen { 1 - vm } else { vm };
        let Some((serial, set, asker)) = self.open[from].get(at).copied() else {
            return;
        };
        match (how, set) {
            (How::NotDone, _) => self.vms[vm].send(Kind::NotDone, &not_done(serial).body()),
            (How::Right | How::Stolen, true) | (How::WrongKind, false) => {
                self.vms[vm].send(Kind::Done, &serial.to_ne_bytes());
            }
            _ => self.vms[vm].send(Kind::Explained, &explained(serial).body()),
        }
        if matches!(how, How::WrongKind | How::Stolen) {
            let text = self.vms[vm].error();
            return self.restart(vm, Some(text));
        }
        self.open[vm].remove(at);
        let Some((observer, number)) = asker else {
            return self.vms[vm].acknowledge();
        };
        self.waiting.remove(&observer);
        let expected = match (how, set) {
            (How::NotDone, _) => Answer::NotDone(NotDone {
                serial: number,
                ..not_done(serial)
            }),
            (_, true) => Answer::Done(number),
            (_, false) => Answer::Explained(Explained {
                serial: number,
                ..explained(serial)
            }),
        };
        assert_eq!(self.observers[observer].answer(), expected);
    }

    /// `breach`: it was cut off with this text.
    fn restart(&mut self, vm: usize, breach: Option<String>) {
        assert!(breach.is_none_or(|text| text.contains("not asked")));
        // Another connection takes its place in the list while the old one ends.
        let fresh = Client::over(connected_by_another_process(&self.server.socket), "fresh");
        drop(std::mem::replace(&mut self.vms[vm], fresh));
        eventually(|| stats(&self.server.socket).vms == 2);
        for (_, _, asker) in std::mem::take(&mut self.open[vm]) {
            if let Some((observer, _)) = asker {
                self.waiting.remove(&observer);
                assert!(
                    self.observers[observer]
                        .refusal()
                        .contains("went before it answered")
                );
            }
        }
        self.vms[vm] = connect_vm(&self.server, vm);
        eventually(|| stats(&self.server.socket).vms == 2);
    }
}

fn connect_vm(server: &Server, vm: usize) -> Client {
    Client::over(connected_by_another_process(&server.socket), &format!("vm{vm}"))
}

/// A connection before its greeting, an observer, or a refused VM.
fn stranger(server: &Server, role: u8) -> OwnedFd {
    match role {
        0 => socket::connect(&server.socket).unwrap(),
        1 => Observer::connect(&server.socket).socket,
        _ => refused(&server.socket, "x", &Refusal::new(Reason::Other, "", "")),
    }
}

/// Records of all kinds that are about questions, right but for some bytes.
fn spoiled() -> impl Strategy<Value = (Kind, Vec<u8>)> {
    let name = Name::new("nobody");
    let settings = OFF;
    let set = Set {
        serial: 1,
        name,
        settings,
    }
    .body();
    let explain = Explain {
        serial: 2,
        gpa_start: 0,
        gpa_len: 4096,
        name,
    };
    let refusal = Refusal::new(Reason::Vfio, "a device", "detach it");
    let refused = Refused {
        serial: 0,
        pages: 1,
        name,
        refusal,
    }
    .body();
    let valid = vec![
        (Kind::Refused, refused),
        (Kind::Set, set),
        (Kind::Explain, explain.as_bytes().to_vec()),
        (Kind::Done, vec![0; 8]),
        (Kind::Explained, explained(3).body()),
        (Kind::NotDone, not_done(4).body()),
    ];
    let changes = proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4);
    let cut = proptest::option::weighted(0.2, any::<usize>());
    (proptest::sample::select(valid), changes, cut).prop_map(|((kind, mut body), changes, cut)| {
        for (at, byte) in changes {
            let len = body.len();
            body[at % len] = byte;
        }
        body.truncate(cut.map_or(body.len(), |at| at % (body.len() + 1)));
        (kind, body)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_is_sent_is_answered_or_ends_the_connection(records in proptest::collection::vec((spoiled(), 0u8..3), 1..8)) {
        let server = Server::start(|_| ());
        let mut buffer = aligned_buffer();
        for ((kind, body), role) in records {
            let stranger = stranger(&server, role);
            socket::send(&stranger, &encode(kind, &[&body]), &[]).unwrap();
            let received = socket::receive(&stranger, &mut buffer).unwrap().unwrap();
            let answer = received.parse(&buffer).unwrap();
            let fits = match &answer {
                Message::Welcome(_) => (role, kind) == (0, Kind::Refused),
                Message::NotDone(n) => role == 1 && (kind == Kind::Set || kind == Kind::Explain) && n.text.len() <= 512,
                Message::Error(text) => !text.is_empty(),
                _ => false,
            };
            prop_assert!(fits, "{kind:?} in role {role}: {answer:?}");
        }
        prop_assert!(stats(&server.socket).store.epoch > 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_question_is_answered_once_and_as_the_model_says(steps in steps()) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.step(step));
        for observer in &world.observers {
            prop_assert!(observer.hears_nothing());
        }
    }
}
