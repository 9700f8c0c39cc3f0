//! A store in a thread of this process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use tempfile::TempDir;
use tokio::sync::oneshot;

/// Stops when dropped.
#[derive(Debug)]
pub struct StoreThread {
    folder: TempDir,
    metrics: Option<SocketAddr>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StoreThread {
    /// Starts one on a socket of its own.
    ///
    /// # Panics
    /// If it cannot: a test cannot go on then.
    #[must_use]
    pub fn start() -> Self {
        Self::start_in(tempfile::tempdir().expect("a temporary folder"), |_| ())
    }

    /// Starts one that keeps its slots in the order of their content, too.
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn ordered() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::start_in(folder, |config| config.ordered = true)
    }

    /// Starts one that shares securely, and serves metrics.
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn secure() -> Self {
        let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::start_in(folder, move |config| {
            config.metrics = Some(anywhere);
            config.secure = true;
        })
    }

    /// Stops it and starts another at the same place, which shares securely.
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn restart_secure(mut self) -> Self {
        let elsewhere = tempfile::tempdir().expect("a temporary folder");
        let folder = std::mem::replace(&mut self.folder, elsewhere);
        let metrics = self.metrics;
        drop(self);
        Self::start_in(folder, move |config| {
            config.metrics = metrics;
            config.secure = true;
        })
    }

    /// Starts one that serves metrics as well.
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn with_metrics() -> Self {
        let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::start_in(folder, move |config| config.metrics = Some(anywhere))
    }

    /// Stops it and starts another at the same place.
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn restart(mut self) -> Self {
        let elsewhere = tempfile::tempdir().expect("a temporary folder");
        let folder = std::mem::replace(&mut self.folder, elsewhere);
        let metrics = self.metrics;
        drop(self);
        Self::start_in(folder, move |config| config.metrics = metrics)
    }

    fn start_in(
        folder: TempDir,
        configure: impl FnOnce(&mut vmm_dedup_store::Config) + Send + 'static,
    ) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let socket = folder.path().join("store.sock");
        let (tell, bound) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("tokio");
            tokio::task::LocalSet::new().block_on(&runtime, async {
                let mut config = vmm_dedup_store::Config {
                    socket,
                    metrics: None,
                    ..vmm_dedup_store::Config::default()
                };
                configure(&mut config);
                let store = vmm_dedup_store::Store::bind(config).expect("the store binds");
                tell.send(store.metrics_address()).expect("the test waits");
                store
                    .run(async { drop(stopped.await) })
                    .await
                    .expect("the store runs");
            });
        });
        let metrics = bound.recv().expect("the store starts");
        Self {
            folder,
            metrics,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Where it serves metrics.
    #[must_use]
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics
    }

    /// A number of its metrics, by its name without the prefix.
    ///
    /// # Panics
    /// If it does not serve metrics, or has none of this name.
    #[must_use]
    pub fn metric(&self, name: &str) -> u64 {
        let address = self.metrics.expect("it serves metrics");
        let mut stream = TcpStream::connect(address).expect("it listens");
        let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).expect("it reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        let value = |line: &str| {
            let rest = line.strip_prefix("vmmdedup_")?.strip_prefix(name)?;
            let labelled = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
            let number = labelled.map_or(rest, |(_, number)| number);
            number.strip_prefix(' ')?.trim().parse::<f64>().ok()
        };
        let value = text.lines().find_map(value);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // counts
        value.map_or_else(|| panic!("no {name} in {text}"), |value| value as u64)
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path().join("store.sock")
    }

    /// Its folder, gone with it.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for StoreThread {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
