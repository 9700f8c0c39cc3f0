//! The end of a log, for messages.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes of a log that are looked at for each line wanted.
const LINE: u64 = 512;

/// The last lines of a file that are not empty, at most `count`, oldest first. A file that cannot be read has none.
pub(crate) fn tail(path: &Path, count: usize) -> Vec<String> {
    let mut content = Vec::new();
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        let bytes = LINE.saturating_mul(count.max(8) as u64);
        file.seek(SeekFrom::Start(len.saturating_sub(bytes)))?;
        file.take(bytes).read_to_end(&mut content)?;
        Ok(content)
    };
    let content = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&content);
    let mut lines: Vec<String> = text.lines().map(plain).filter(|line| !line.is_empty()).collect();
    lines.split_off(lines.len().saturating_sub(count))
}

/// A line without what acts on a terminal: a guest or a VMM may have written anything.
pub(crate) fn plain(line: &str) -> String {
    line.trim_end()
        .replace(|c: char| c.is_control() && c != '\t', "?")
}

/// The last line, or that there is none.
pub(crate) fn last_line(path: &Path) -> String {
    tail(path, 1).pop().unwrap_or_else(|| "it wrote nothing".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_read_and_made_harmless() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        assert_eq!(last_line(&path), "it wrote nothing");
        let long = "x\n".repeat(10_000);
        std::fs::write(&path, format!("{long}one\n\ntwo \x1b[31m\r\n\n")).unwrap();
        assert_eq!(tail(&path, 2), ["one", "two ?[31m"]);
        assert_eq!(last_line(&path), "two ?[31m");
    }
}
