//! QEMU's machine protocol: a line of JSON each way on a Unix socket.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Runs one command; returns what it returned.
pub(super) fn execute(socket: &Path, command: &str, arguments: Value) -> Result<Value, String> {
    let fail = |e: std::io::Error| format!("{command}: {e}");
    let stream = UnixStream::connect(socket).map_err(fail)?;
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .map_err(fail)?;
    let mut writer = stream.try_clone().map_err(fail)?;
    let mut lines = BufReader::new(stream).lines();
    let mut ask = |request: Value| -> Result<Value, String> {
        writeln!(writer, "{request}").map_err(fail)?;
        loop {
            let line = lines
                .next()
                .ok_or_else(|| format!("{command}: it hung up"))?
                .map_err(fail)?;
            let answer: Value = serde_json::from_str(&line).map_err(|e| format!("{command}: {e}"))?;
            if let Some(error) = answer.get("error") {
                return Err(format!("{command}: {error}"));
            }
            // Events and the greeting come in between.
            if let Some(result) = answer.get("return") {
                return Ok(result.clone());
            }
        }
    };
    ask(json!({ "execute": "qmp_capabilities" }))?;
    ask(json!({ "execute": command, "arguments": arguments }))
}
