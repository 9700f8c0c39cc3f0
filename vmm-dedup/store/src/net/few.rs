//! Connections that anybody may make: so few at a time, each for so long, and the oldest goes for a new one. So a peer that
//! connects and says nothing, or reads nothing, keeps nobody else out, and takes no descriptor that the exchange needs.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::Sleep;

/// Most connections at a time.
pub(super) const MOST: usize = 32;

/// How long a connection may take for its question and the answer.
const LIFETIME: Duration = Duration::from_secs(10);

/// How long to wait when no connection can be accepted: there are no descriptors, for example.
const SHORTAGE: Duration = Duration::from_millis(100);

/// A listener that keeps connections few.
#[derive(Debug)]
pub(super) struct Few {
    listener: TcpListener,
    places: Arc<Semaphore>,
    /// Those that are open, and some that have ended: dropping one ends its connection. The oldest is the first.
    open: VecDeque<oneshot::Sender<Infallible>>,
}

impl Few {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self {
            listener,
            places: Arc::new(Semaphore::new(MOST)),
            open: VecDeque::new(),
        }
    }
}

impl axum::serve::Listener for Few {
    type Io = Short;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Short, SocketAddr) {
        loop {
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(e) => {
                    log::debug!("no connection for metrics can be accepted for now: {e}");
                    tokio::time::sleep(SHORTAGE).await;
                    continue;
                }
            };
            self.open.retain(|open| !open.is_closed());
            if self.open.len() >= MOST {
                self.open.pop_front();
            }
            let Ok(place) = self.places.clone().acquire_owned().await else {
                continue; // it is never closed
            };
            let (open, displaced) = oneshot::channel();
            self.open.push_back(open);
            let short = Short {
                stream,
                displaced,
                over: Box::pin(tokio::time::sleep(LIFETIME)),
                _place: place,
            };
            return (short, address);
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection whose reads and writes fail once its time is over or its place is another's.
#[derive(Debug)]
pub(super) struct Short {
    stream: TcpStream,
    displaced: oneshot::Receiver<Infallible>,
    over: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Short {
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let displaced = Pin::new(&mut self.displaced).poll(cx).is_ready();
        match displaced || self.over.as_mut().poll(cx).is_ready() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(()),
        }
    }
}

impl AsyncRead for Short {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Short {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
