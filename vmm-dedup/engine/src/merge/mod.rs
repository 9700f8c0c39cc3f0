//! Putting shared pages into a guest.

pub(crate) mod admission;
pub(crate) mod bridged_runs;
pub(crate) mod context;
pub(crate) mod follower;
pub(crate) mod following;
pub(crate) mod fork_cost;
pub(crate) mod healer;
pub(crate) mod in_place;
pub(crate) mod merger;
pub(crate) mod moving_out;
pub(crate) mod outcomes;
pub(crate) mod plan;
pub(crate) mod ready;
pub(crate) mod refusals;
pub(crate) mod run;
pub(crate) mod run_builder;
pub(crate) mod swapped;
pub(crate) mod verify_engine;
