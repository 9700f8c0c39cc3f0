//! Cloud Hypervisor's API: HTTP/1.1 on a Unix socket, one request a connection. (Tests need six requests of it and
//! no async runtime; the fleet launcher uses the real client.)

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Has something done; returns the body of the answer, or what went wrong.
pub(super) fn put(socket: &Path, command: &str, body: &str) -> Result<String, String> {
    ask(socket, "PUT", command, body)
}

/// Asks for something.
pub(super) fn get(socket: &Path, what: &str) -> Result<String, String> {
    ask(socket, "GET", what, "")
}

fn ask(socket: &Path, method: &str, command: &str, body: &str) -> Result<String, String> {
    let fail = |e: std::io::Error| format!("{command}: {e}");
    let mut stream = UnixStream::connect(socket).map_err(fail)?;
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .map_err(fail)?;
    write!(
        stream,
        "{method} /api/v1/{command} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .map_err(fail)?;
    let mut reader = BufReader::new(stream);
    let mut status = String::new();
    reader.read_line(&mut status).map_err(fail)?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).map_err(fail)?;
        match line.trim().split_once(": ") {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = value.parse().map_err(|_| format!("{command}: length {value}"))?;
            }
            Some(_) => {}
            None => break,
        }
    }
    let mut answer = vec![0; length];
    reader.read_exact(&mut answer).map_err(fail)?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    match status.split(' ').nth(1) {
        Some("200" | "204") => Ok(answer),
        _ => Err(format!("{command}: {} {answer}", status.trim())),
    }
}
