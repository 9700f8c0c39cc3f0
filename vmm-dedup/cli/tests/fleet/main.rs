//! Fleets as their operators meet them: up, status, down, and everything that can go wrong.

mod bad_input;
mod change;
mod host;
mod life;
mod logs;
mod trouble;
mod users;
