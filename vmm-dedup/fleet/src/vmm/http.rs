//! Calls of Cloud Hypervisor's API as somebody writes them.

use crate::state::VmFiles;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

/// Makes a call, e.g. `GET vm.info`; returns the answer's body, with JSON set out for people.
pub(crate) async fn call(files: &VmFiles, method: &str, call: &str, body: &str) -> Result<String, String> {
    let method = Method::from_bytes(method.to_ascii_uppercase().as_bytes()).map_err(|e| e.to_string())?;
    let call = call.trim_start_matches('/');
    let path = match call.starts_with("api/") {
        true => format!("/{call}"),
        false => format!("/api/v1/{call}"),
    };
    let request = Request::builder()
        .method(method)
        .uri(&path)
        .header(HOST, "localhost")
        .header(ACCEPT, "*/*")
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.to_owned())))
        .map_err(|e| e.to_string())?;
    let unreachable = |e: std::io::Error| format!("cannot reach its API: {e}");
    let socket = files.hold_socket().map_err(unreachable)?;
    let stream = UnixStream::connect(socket.path()).await.map_err(unreachable)?;
    let broken = |e: hyper::Error| format!("{call}: {e}");
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(broken)?;
    tokio::task::spawn_local(connection);
    let answer = sender.send_request(request).await.map_err(broken)?;
    let status = answer.status();
    let body = answer.into_body().collect().await.map_err(broken)?.to_bytes();
    let text = readable(&String::from_utf8_lossy(&body));
    match status.is_success() {
        true => Ok(text),
        false => Err(format!(
            "{call}: {status}: {}",
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        )),
    }
}

/// JSON set out for people; anything else as it is.
pub(super) fn readable(text: &str) -> String {
    let value: Option<serde_json::Value> = serde_json::from_str(text).ok();
    let set_out = value.and_then(|value| serde_json::to_string_pretty(&value).ok());
    set_out.unwrap_or_else(|| text.trim_end().to_owned())
}
