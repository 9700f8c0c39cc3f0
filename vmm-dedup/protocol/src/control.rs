//! Questions that somebody asks of a VM while it runs: change a setting, explain what becomes of its pages. They go
//! from an observer through the store to the VM's service, and the answer comes back the same way.

use crate::malformed::Malformed;
use crate::name::Name;
use crate::refusal::{MAX_TEXT, plain};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Whether a VM's memory is to be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Switch {
    /// It is.
    On = 1,
    /// Nothing more is merged; what is shared stays shared.
    Off = 2,
    /// Nothing more is merged, and everything goes back to anonymous memory.
    OffUnmerge = 3,
}

/// Changes of a running service's settings; what is `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Whether to merge.
    pub switch: Option<Switch>,
    /// CPU time that the service may use, percent of one core (1..=100).
    pub cpu_percent: Option<u32>,
    /// Pages that the copy-on-write reserve of managed mode should have (1..=2^24).
    pub reserve_pages: Option<u32>,
    /// Time from the start of one pass to that of the next, milliseconds (10..=3,600,000).
    pub pass_period_ms: Option<u32>,
    /// How long the pages of a merge window should be away at most, microseconds (10..=100,000).
    pub stop_target_us: Option<u32>,
}

/// Most pages of a copy-on-write reserve.
pub const MAX_RESERVE: u32 = 1 << 24;

/// Longest time from one pass to the next, milliseconds.
pub const MAX_PASS_PERIOD_MS: u32 = 3_600_000;

/// Longest stop target, microseconds.
pub const MAX_STOP_TARGET_US: u32 = 100_000;

/// Asks a VM to change settings. Zero stands for "as it is".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct SetBody {
    serial: u64,
    switch: u32,
    cpu_percent: u32,
    reserve_pages: u32,
    pass_period_ms: u32,
    stop_target_us: u32,
    reserved: u32,
    name: Name,
}

/// A `Set`, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set {
    /// Chosen by who asks; the answer repeats it.
    pub serial: u64,
    /// The VM.
    pub name: Name,
    /// What to change.
    pub settings: Settings,
}

impl Set {
    /// The body of the record.
    pub fn body(&self) -> Vec<u8> {
        let Settings {
            switch,
            cpu_percent,
            reserve_pages,
            pass_period_ms,
            stop_target_us,
        } = self.settings;
        let body = SetBody {
            serial: self.serial,
            switch: switch.map_or(0, |s| s as u32),
            cpu_percent: cpu_percent.unwrap_or(0),
            reserve_pages: reserve_pages.unwrap_or(0),
            pass_period_ms: pass_period_ms.unwrap_or(0),
            stop_target_us: stop_target_us.unwrap_or(0),
            reserved: 0,
            name: self.name,
        };
        body.as_bytes().to_vec()
    }

    pub(crate) fn parse(body: &[u8], got: usize) -> Result<Self, Malformed> {
        let body = SetBody::read_from_bytes(body).map_err(|_| Malformed::Length { got })?;
        let optional = |field, value: u32, max| match value {
            0 => Ok(None),
            value if value <= max => Ok(Some(value)),
            value => Err(Malformed::Value {
                field,
                value: value.into(),
            }),
        };
        let switch = optional("switch", body.switch, 3)?;
        Ok(Self {
            serial: body.serial,
            name: body.name,
            settings: Settings {
                switch: switch.map(|number| match number {
                    1 => Switch::On,
                    2 => Switch::Off,
                    _ => Switch::OffUnmerge,
                }),
                cpu_percent: optional("cpu_percent", body.cpu_percent, 100)?,
                reserve_pages: optional("reserve_pages", body.reserve_pages, MAX_RESERVE)?,
                pass_period_ms: optional("pass_period_ms", body.pass_period_ms, MAX_PASS_PERIOD_MS)?,
                stop_target_us: optional("stop_target_us", body.stop_target_us, MAX_STOP_TARGET_US)?,
            },
        })
    }
}

/// Asks a VM what became of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Explain {
    /// Chosen by who asks; the answer repeats it.
    pub serial: u64,
    /// First guest physical address.
    pub gpa_start: u64,
    /// Bytes from there on; 0: all of the VM's memory, and `gpa_start` does not matter.
    pub gpa_len: u64,
    /// The VM.
    pub name: Name,
}

/// What became of pages: each is in exactly one class. Numbers of 4 KiB pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Explanation {
    /// Pages asked about: the sum of all classes.
    pub pages: u64,
    /// They map a page of the store.
    pub shared: u64,
    /// The service replaced them by the zero page.
    pub zero: u64,
    /// Keyed, and nobody has the same page.
    pub unique: u64,
    /// They have a twin and are about to be merged: nothing is in the way.
    pub waiting: u64,
    /// They have a twin and wait since the VMA budget is used up.
    pub over_vmas: u64,
    /// They have a twin and wait since merging is suspended for all of the VM: direct I/O that it could harm.
    pub suspended: u64,
    /// They have a twin and wait since they are swapped out: comparing would read them in.
    pub swapped: u64,
    /// They have a twin and wait for more twins around them, with which they can be one mapping.
    pub deferred: u64,
    /// Written again and again.
    pub volatile: u64,
    /// Written lately, or not looked at yet.
    pub too_new: u64,
    /// Nothing is there (or it is swapped out, or the kernel's zero page): no memory to save.
    pub unpopulated: u64,
    /// Pinned for a device, or shared with another process, at the last try to take them.
    pub pinned: u64,
    /// Private inside a mapping of the store, copied by the kernel after sharing or left out of a shared run; no twin is known.
    pub broken: u64,
    /// The same, and nothing tells now that they are not pinned.
    pub may_be_pinned: u64,
    /// Sharing them did not last lately, so they are left alone for a while.
    pub restless: u64,
    /// In huge pages that are kept whole.
    pub huge: u64,
    /// Kept private to see whether what was a huge page is used.
    pub probe: u64,
    /// They map a page of a store that is gone.
    pub foreign: u64,
    /// Private, since the guest has marked them: never to be shared.
    pub withheld: u64,
    /// Private and left alone, since the guest says that they are free, or soon overwritten.
    pub idle: u64,
    /// Kept in fewer bytes until somebody touches them, or back from there in this moment.
    pub packed: u64,
    /// The service's state, as in [`crate::stats::ServiceStats`].
    pub state: u64,
    /// Whether pages of the classes `broken` and `may_be_pinned` can be merged now, where they are not pinned: 1, else 0.
    pub heals: u64,
}

impl Explanation {
    /// The classes with their names, in the order of the fields.
    pub fn classes(&self) -> [(&'static str, u64); 21] {
        [
            ("shared", self.shared),
            ("zero", self.zero),
            ("unique", self.unique),
            ("waiting", self.waiting),
            ("over_vmas", self.over_vmas),
            ("suspended", self.suspended),
            ("swapped", self.swapped),
            ("deferred", self.deferred),
            ("volatile", self.volatile),
            ("too_new", self.too_new),
            ("unpopulated", self.unpopulated),
            ("pinned", self.pinned),
            ("broken", self.broken),
            ("may_be_pinned", self.may_be_pinned),
            ("restless", self.restless),
            ("huge", self.huge),
            ("probe", self.probe),
            ("foreign", self.foreign),
            ("withheld", self.withheld),
            ("idle", self.idle),
            ("packed", self.packed),
        ]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct ExplainedHead {
    serial: u64,
    explanation: Explanation,
}

/// Answer to an [`Explain`] of a VM that has a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    /// That of the question.
    pub serial: u64,
    /// The classes.
    pub explanation: Explanation,
    /// What keeps the service from merging, if something does, and what to do; else what else is not as it was asked for.
    pub note: String,
}

impl Explained {
    /// The body of the record.
    pub fn body(&self) -> Vec<u8> {
        let head = ExplainedHead {
            serial: self.serial,
            explanation: self.explanation,
        };
        [head.as_bytes(), plain(&self.note).as_bytes()].concat()
    }

    pub(crate) fn parse(body: &[u8], got: usize) -> Result<Self, Malformed> {
        let length = || Malformed::Length { got };
        let (head, note) = ExplainedHead::read_from_prefix(body).map_err(|_| length())?;
        Ok(Self {
            serial: head.serial,
            explanation: head.explanation,
            note: text(note).ok_or_else(length)?,
        })
    }
}

/// Answer to a question that could not be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotDone {
    /// That of the question.
    pub serial: u64,
    /// Why, and what to do.
    pub text: String,
}

impl NotDone {
    /// The body of the record.
    pub fn body(&self) -> Vec<u8> {
        [self.serial.as_bytes(), plain(&self.text).as_bytes()].concat()
    }

    pub(crate) fn parse(body: &[u8], got: usize) -> Result<Self, Malformed> {
        let length = || Malformed::Length { got };
        let (serial, rest) = u64::read_from_prefix(body).map_err(|_| length())?;
        Ok(Self {
            serial,
            text: text(rest).ok_or_else(length)?,
        })
    }
}

fn text(bytes: &[u8]) -> Option<String> {
    (bytes.len() <= MAX_TEXT).then(|| plain(&String::from_utf8_lossy(bytes)))
}
