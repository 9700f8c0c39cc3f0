//! The running store.

use crate::config::Config;
use crate::error::Error;
use crate::metrics::Snapshot;
use crate::net::{Asked, Closers, Listener, Turns, serve, serve_metrics, watch};
use crate::state::{Shared, State, lock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::task::{JoinError, JoinSet};
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
        raise_file_limit();
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
        self.serve_until(std::pin::pin!(shutdown)).await
    }

    /// Behind a pointer, so that it is compiled here, once, and not in every crate that runs a store.
    fn serve_until<'a>(
        self,
        shutdown: Pin<&'a mut (dyn Future<Output = ()> + 'a)>,
    ) -> Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>> {
        Box::pin(self.serve_all(shutdown))
    }

    async fn serve_all(self, mut shutdown: Pin<&mut (dyn Future<Output = ()> + '_)>) -> Result<(), Error> {
        let Self {
            shared,
            listener,
            metrics,
        } = self;
        let mut tasks = JoinSet::new();
        // The thread ends at the end.
        let _serving = match metrics {
            Some((listener, address)) => {
                let refuse = |source| Error::Metrics { address, source };
                let domain = lock(&shared).config.domain.clone();
                let (serving, asked) = serve_metrics(listener, domain).map_err(refuse)?;
                tasks.spawn(give_snapshots(asked, shared.clone()));
                Some(serving)
            }
            None => None,
        };
        tasks.spawn(tick(shared.clone()));
        tasks.spawn(evacuate(shared.clone()));
        // The file is removed when `listener` is dropped, at the end.
        let watched = watch(listener.socket(), Interest::READABLE).map_err(Error::Memory)?;
        let (closers, turns) = (Arc::new(Closers::default()), Arc::new(Turns::default()));
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut shutdown => return Ok(()),
                Some(done) = tasks.join_next() => {
                    end_if_panicked(done);
                    continue;
                }
                accepted = watched.async_io(Interest::READABLE, |socket| socket::accept(socket)) => accepted,
            };
            match accepted {
                Ok(socket) => {
                    tasks.spawn(serve(shared.clone(), closers.clone(), turns.clone(), socket));
                    // One after the other: others have their turns between.
                    tokio::task::yield_now().await;
                }
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

/// Tells the state of the time, for ever.
async fn tick(shared: Shared) {
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        lock(&shared).tick(Instant::now());
    }
}

/// Gives the thread that serves metrics what it asks for, for as long as there is one.
async fn give_snapshots(mut asked: Asked, shared: Shared) {
    while let Some(ask) = asked.recv().await {
        let _ = ask.send(Snapshot::of(&lock(&shared)));
    }
}

/// Time between two looks for pages to be moved, and between two moves: 40,960 pages a second, 160 MiB.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
const MOVE_PERIOD: Duration = Duration::from_millis(25);

/// Empties segments, for ever.
async fn evacuate(shared: Shared) {
    loop {
        let more = lock(&shared).evacuate();
        tokio::time::sleep(if more { MOVE_PERIOD } else { LOOK_PERIOD }).await;
    }
}

/// Every connection and every segment takes some descriptors, and the usual soft limit is 1024.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if raised.current != limit.current
        && let Err(e) = setrlimit(Resource::Nofile, raised)
    {
        log::warn!("the limit on open files stays as it is: {e}");
    }
}

/// A task that panicked may have left the state half changed. A store that goes on with it would be worse than none:
/// guests survive the death of a store, and whoever supervises it starts another.
fn end_if_panicked(done: Result<(), JoinError>) {
    if let Err(e) = done
        && e.is_panic()
    {
        log::error!("the store ends, since one of its tasks panicked: {e}");
        std::process::abort();
    }
}
