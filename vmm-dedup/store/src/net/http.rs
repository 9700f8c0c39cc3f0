//! /metrics and /healthz, in a thread of their own: anybody on the host may ask for them, and the exchange waits for nobody who does.
//!
//! The store's thread gives a [`Snapshot`]; the text is made of it here. Making one text after the other takes a small part of the
//! time ([`PAUSES`]): whoever asks meanwhile gets the next, so no text is older than its question. There are few connections, each
//! for one answer and for a short time ([`super::few`]).

use super::few::Few;
use crate::metrics::{self, Snapshot};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, extract};
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, mpsc, oneshot};

/// Asks the store's thread for a snapshot.
type Ask = oneshot::Sender<Snapshot>;

/// What the thread that serves metrics asks for.
pub(crate) type Asked = mpsc::Receiver<Ask>;

/// So many times as long as a text took to be made, none is made after it, if that is not longer than [`LONGEST_PAUSE`].
const PAUSES: u32 = 20;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The thread that serves metrics. It ends with this.
#[derive(Debug)]
pub(crate) struct Serving {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts to serve. The listener must be non-blocking.
pub(crate) fn serve(listener: TcpListener, domain: String) -> io::Result<(Serving, Asked)> {
    let (ask, asked) = mpsc::channel(1);
    let (stop, stopped) = oneshot::channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let serving = async move {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        tokio::select! {
            served = serve_all(Few::new(listener), ask, domain) => served,
            _ = stopped => Ok(()),
        }
    };
    let thread = std::thread::Builder::new().name("store-metrics".into());
    let thread = thread.spawn(move || {
        if let Err(e) = runtime.block_on(serving) {
            log::error!("metrics are served no longer: {e}");
        }
    })?;
    let serving = Serving {
        stop: Some(stop),
        thread: Some(thread),
    };
    Ok((serving, asked))
}

async fn serve_all(listener: Few, ask: mpsc::Sender<Ask>, domain: String) -> io::Result<()> {
    let scrapes = Scrapes {
        ask,
        domain,
        last: Mutex::new(None),
    };
    let router = Router::new()
        .route("/metrics", get(scrape))
        .route("/healthz", get(|| async { "ok\n" }))
        .layer(axum::middleware::map_response(one_answer))
        .with_state(Arc::new(scrapes));
    axum::serve(listener, router).await
}

/// The connection ends with the answer.
async fn one_answer(mut response: Response) -> Response {
    let close = HeaderValue::from_static("close");
    response.headers_mut().insert(header::CONNECTION, close);
    response
}

/// What scrapes share.
struct Scrapes {
    ask: mpsc::Sender<Ask>,
    domain: String,
    last: Mutex<Option<Text>>,
}

/// The text of one snapshot.
struct Text {
    begun: Instant,
    took: Duration,
    text: Arc<str>,
}

impl Scrapes {
    /// What there is to tell, not from before now.
    async fn text(&self) -> Option<Arc<str>> {
        let asked = Instant::now();
        let mut last = self.last.lock().await;
        if let Some(last) = &*last {
            if last.begun >= asked {
                return Some(last.text.clone());
            }
            let pause = (last.took * PAUSES).min(LONGEST_PAUSE);
            tokio::time::sleep_until((last.begun + last.took + pause).into()).await;
        }
        let begun = Instant::now();
        let (ask, answer) = oneshot::channel();
        self.ask.send(ask).await.ok()?;
        let snapshot = answer.await.ok()?;
        let text: Arc<str> = metrics::text(&self.domain, snapshot).ok()?.into();
        *last = Some(Text {
            begun,
            took: begun.elapsed(),
            text: text.clone(),
        });
        Some(text)
    }
}

async fn scrape(extract::State(scrapes): extract::State<Arc<Scrapes>>, headers: HeaderMap) -> Response {
    let Some(text) = scrapes.text().await else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or("");
    if accept.contains("application/openmetrics-text") {
        let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        return ([(header::CONTENT_TYPE, content_type)], text.to_string()).into_response();
    }
    let content_type = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], metrics::classic(&text)).into_response()
}
