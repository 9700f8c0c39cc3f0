//! The running store.

use crate::config::Config;
use crate::connection::{Shared, serve};
use crate::error::Error;
use crate::http;
use crate::listener::Listener;
use crate::state::State;
use crate::watched::watch;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::Interest;
use tokio::task::JoinSet;
use vmm_dedup_protocol::socket;

/// A store that listens. Nothing is served until [`Store::run`].
#[derive(Debug)]
pub struct Store {
    shared: Shared,
    listener: Listener,
    metrics: Option<(std::net::TcpListener, SocketAddr)>,
}

impl Store {
    /// Checks the configuration, listens on the socket and the metrics address.
    pub fn bind(config: Config) -> Result<Self, Error> {
        config.validate()?;
        let metrics = config.metrics.map(|address| {
            let bind = || {
                let listener = std::net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                let actual = listener.local_addr()?;
                Ok((listener, actual))
            };
            bind().map_err(|source| Error::Metrics { address, source })
        });
        let metrics = metrics.transpose()?;
        let listener = Listener::bind(&config)?;
        let shared = Arc::new(Mutex::new(State::new(config)?));
        Ok(Self {
            shared,
            listener,
            metrics,
        })
    }

    /// Where metrics are served: the actual port, if port 0 was asked for.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|(_, address)| *address)
    }

    /// Serves until `shutdown` completes. Must be called in a tokio runtime with I/O and time enabled.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let Self {
            shared,
            listener,
            metrics,
        } = self;
        let mut tasks = JoinSet::new();
        if let Some((listener, address)) = metrics {
            let refuse = |source| Error::Metrics { address, source };
            let listener = tokio::net::TcpListener::from_std(listener).map_err(refuse)?;
            tasks.spawn(http::serve(listener, shared.clone()));
        }
        // The file is removed when `listener` is dropped, at the end.
        let watched = watch(listener.socket(), Interest::READABLE).map_err(Error::Memory)?;
        let mut shutdown = std::pin::pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut shutdown => return Ok(()),
                Some(_) = tasks.join_next() => continue,
                accepted = watched.async_io(Interest::READABLE, |socket| socket::accept(socket)) => accepted,
            };
            match accepted {
                Ok(socket) => _ = tasks.spawn(serve(shared.clone(), socket)),
                Err(e) => {
                    log::error!(
                        "no connection can be accepted for now (raise the limit on open files?): {e}"
                    );
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}
