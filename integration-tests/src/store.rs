//! A store in a thread of this process.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use tempfile::TempDir;
use tokio::sync::oneshot;

/// Stops when dropped.
#[derive(Debug)]
pub struct StoreThread {
    folder: TempDir,
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
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (stop, stopped) = oneshot::channel::<()>();
        let socket = folder.path().join("store.sock");
        let (tell, bound) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("tokio");
            tokio::task::LocalSet::new().block_on(&runtime, async {
                let config = vmm_dedup_store::Config {
                    socket,
                    metrics: None,
                    ..vmm_dedup_store::Config::default()
                };
                let store = vmm_dedup_store::Store::bind(config).expect("the store binds");
                tell.send(()).expect("the test waits");
                store
                    .run(async { drop(stopped.await) })
                    .await
                    .expect("the store runs");
            });
        });
        bound.recv().expect("the store starts");
        Self {
            folder,
            stop: Some(stop),
            thread: Some(thread),
        }
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
