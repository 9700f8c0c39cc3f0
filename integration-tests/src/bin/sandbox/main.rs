//! Everything that a supervisor and its services do, in one process whose dedup threads are recorded and filtered: each part is
//! under exactly its own filter, and is killed by any other call. Prints what was seen, and what told the use of huge pages, as
//! JSON. `sandbox old` is a host without clone3 and /dev/userfaultfd, in `sandbox trouble` calls fail and threads die, in `sandbox crowded` other
//! threads want the allocator all the time, in `sandbox panic PART` such a thread panics. `sandbox record ...` does not filter.
#![allow(unsafe_code)] // guest memory

mod crowd;
mod deaths;
mod guest;
mod other;
mod plays;
mod stand_ins;
mod trouble;
mod vmm;

use crate::guest::{CID, Guest, VSOCK};
use std::path::Path;
use std::sync::Arc;
use vmm_dedup::seccomp::{Part, restrict_this_thread};
use vmm_dedup::{Breaks, Options, Supervisor};
use vmm_dedup_integration_tests::seccomp::Recorder;
use vmm_dedup_integration_tests::store::StoreThread;

/// What is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Play {
    All,
    Old,
    Trouble,
    Crowded,
    Panic(Part),
}

impl Play {
    fn of(arguments: &[&str]) -> Option<Self> {
        match *arguments {
            [] => Some(Self::All),
            ["old"] => Some(Self::Old),
            ["trouble"] => Some(Self::Trouble),
            ["crowded"] => Some(Self::Crowded),
            ["panic", name] => {
                let part = Part::ALL.iter().find(|part| part.name() == name);
                part.copied().map(Self::Panic)
            }
            _ => None,
        }
    }

    /// `folder`: where sockets of the VMs' are.
    pub(crate) fn recorder(self, folder: &Path) -> Recorder {
        match self {
            Self::Old => Recorder::on_an_old_host(),
            Self::All | Self::Crowded => Recorder::beside_a_vsock(&folder.join(VSOCK), CID),
            _ => Recorder::new(),
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if arguments == [other::ARGUMENT] {
        return other::live();
    }
    let (filtered, arguments) = match arguments.split_first() {
        Some((&"record", rest)) => (false, rest),
        _ => (true, &arguments[..]),
    };
    let play = Play::of(arguments).expect("sandbox [record] [old | trouble | crowded | panic PART]");
    let folder = tempfile::tempdir().expect("a folder");
    if let Err(reason) = stand_ins::for_the_kernel(folder.path()) {
        eprintln!("no stand-in for what tells of use: {reason}");
    }
    let recorder = play.recorder(folder.path());
    let crowd = (play == Play::Crowded).then(crowd::Crowd::gathers);
    let theirs = recorder.clone();
    let each = move |part: Part| {
        // The others have it from this one.
        if part == Part::Supervisor {
            theirs.record_this_thread();
        }
        if filtered {
            restrict_this_thread(part).expect("a filter");
        }
        if play == Play::Panic(part) {
            // As where the engine panics: the thread goes on to an end of its own.
            let _ = std::panic::catch_unwind(|| panic!("{part:?} has a bug"));
        }
    };
    let supervisor = Supervisor::spawn(Options {
        vouch_for_pins: true,
        each: Some(Arc::new(each)),
        may_be_filtered: true,
        ..Options::default()
    })
    .expect("it starts");
    let mut guest = Guest {
        supervisor: Arc::new(supervisor),
        store: StoreThread::start(),
        round: 0,
        disks: stand_ins::disks_on_overlay(folder.path()),
        folder: folder.path().to_owned(),
    };
    let sources = match play {
        Play::All | Play::Crowded => guest.plays_all(),
        Play::Old => {
            guest.lives(Breaks::managed(64, 0));
            Vec::new()
        }
        Play::Trouble => {
            guest.has_trouble();
            Vec::new()
        }
        Play::Panic(part) => {
            guest.reaches(part);
            Vec::new()
        }
    };
    let mut seen = Vec::new();
    if play == Play::All {
        seen.extend(guest.lacks_memory());
        seen.extend(guest.is_called(filtered));
    }
    if play == Play::Trouble {
        seen.extend(guest.dies_without_a_supervisor(filtered));
    }
    if matches!(play, Play::All | Play::Old | Play::Crowded) {
        seen.extend(guest.serves_without_a_supervisor(play, filtered));
    }
    // The supervisor ends as well.
    drop((guest, crowd));
    seen.extend(recorder.seen());
    let list: Vec<_> = seen
        .into_iter()
        .map(|seen| serde_json::json!([seen.thread, seen.call, seen.request]))
        .collect();
    println!("{}", serde_json::json!([list, sources]));
    stand_ins::unmount(folder.path());
    drop(folder);
    // Threads that rest for ever may not even end.
    std::process::exit(0);
}
