//! What the fuzz targets check.
//!
//! Each target takes any bytes and holds a parser of hostile input against a model: a second, plain reading of the same
//! format, written from its documentation, or a law that must hold. A target that only looks for panics would let a
//! parser pass that takes a length from one field and checks another.
//!
//! - [`messages`]: records between service and store, and their bytes by docs/protocol.md;
//! - [`fleet_file`]: what a file says, printed and read again, and the plan that it comes to;
//! - [`agent`]: what a guest's agent sends, and what the service knows of each frame afterwards;
//! - [`gate`]: streams of vfio-user messages through the gate, and what must come out of it on both sides.
//!
//! The targets are called by libFuzzer (`integration-tests/fuzz`, which needs a nightly compiler), and for some seconds
//! each by a test of this crate, with a mutator that does the same in every run ([`mutate`]).
//!
//! Known hole: the mutator of the test does not look at coverage. It finds what a few changes to a seed reach.

pub mod agent;
pub mod fleet_file;
pub mod gate;
pub mod messages;
pub mod mutate;

/// Something to fuzz.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, which is that of its seeds' folder.
    pub name: &'static str,
    /// Panics if the parser does not do what the model says.
    pub check: fn(&[u8]),
    /// Inputs to begin with, with a name for each.
    pub seeds: fn() -> Vec<(&'static str, Vec<u8>)>,
}

/// All targets.
pub const TARGETS: [Target; 4] = [
    Target {
        name: "agent",
        check: agent::check,
        seeds: agent::seeds,
    },
    Target {
        name: "messages",
        check: messages::check,
        seeds: messages::seeds,
    },
    Target {
        name: "fleet_file",
        check: fleet_file::check,
        seeds: fleet_file::seeds,
    },
    Target {
        name: "gate",
        check: gate::check,
        seeds: gate::seeds,
    },
];
