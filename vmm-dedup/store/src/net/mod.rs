//! Sockets: listening, one task for each connection, /metrics. What arrives is given to [`crate::state::State`].

mod closing;
mod connection;
mod few;
mod http;
mod listener;
mod process;
mod turns;
mod watched;

pub(crate) use closing::Closers;
pub(crate) use connection::serve;
pub(crate) use http::{Asked, serve as serve_metrics};
pub(crate) use listener::Listener;
pub(crate) use turns::Turns;
pub(crate) use watched::watch;
