//! The end of a log, for messages.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes at the end of a log that are looked at first; as long as they hold too few lines, twice as many.
const FIRST: u64 = 1 << 14;
/// Most bytes that are looked at: a guest may write without end.
const MOST: u64 = 64 << 20;

/// Begins a log, for who writes at its end wherever that is: it is emptied when it has become long. Nobody else can read it.
pub(crate) fn begin(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::APPEND | OFlags::NOFOLLOW;
    let private = Mode::RUSR | Mode::WUSR;
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, private)?.into())
}

/// Where the last one of a log is that was begun anew.
pub(crate) fn last_of(path: &Path) -> PathBuf {
    let mut last = path.to_owned().into_os_string();
    last.push(".1");
    last.into()
}

/// The last lines of a log that are not empty, at most `count`, oldest first; as far as it has too few, with those of the one before. A
/// file that cannot be read has none.
pub(crate) fn tail(path: &Path, count: usize) -> Vec<String> {
    let lines = tail_of_file(path, count);
    match count.saturating_sub(lines.len()) {
        0 => lines,
        missing => [tail_of_file(&last_of(path), missing), lines].concat(),
    }
}

fn tail_of_file(path: &Path, count: usize) -> Vec<String> {
    let mut bytes = FIRST;
    loop {
        let (text, is_whole) = end(path, bytes).unwrap_or((String::new(), true));
        let mut lines: Vec<String> = text.lines().map(plain).filter(|line| !line.is_empty()).collect();
        if lines.len() >= count || is_whole || bytes >= MOST {
            return lines.split_off(lines.len().saturating_sub(count));
        }
        bytes *= 2;
    }
}

/// What is in a file's last bytes, without the end of a line whose beginning is before them; and whether that is all of the file.
fn end(path: &Path, bytes: u64) -> std::io::Result<(String, bool)> {
    let mut file = open(path)?;
    let start = file.metadata()?.len().saturating_sub(bytes);
    file.seek(SeekFrom::Start(start))?;
    let mut content = Vec::new();
    file.take(bytes).read_to_end(&mut content)?;
    let begin = match content.iter().position(|byte| *byte == b'\n') {
        Some(at) if start > 0 => at + 1,
        _ => 0,
    };
    Ok((
        String::from_utf8_lossy(&content[begin..]).into_owned(),
        start == 0,
    ))
}

/// Opens a log. It may be in the folder of a VM's user, who may have put anything there: only a file of the folder is one.
pub(crate) fn open(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(std::io::Error::other("it is no file")),
    }
}

/// A line without what acts on a terminal: a guest or a VMM may have written anything.
pub(crate) fn plain(line: &str) -> String {
    line.trim_end()
        .replace(|c: char| c.is_control() && c != '\t', "?")
}

/// The last line that says what is wrong, or that there is none. Programs that do not understand their arguments say that first.
pub(crate) fn last_line(path: &Path) -> String {
    /// What they write behind it.
    const USAGE: usize = 8;
    let mut lines = tail(path, USAGE);
    let is_usage = |line: &String| line.starts_with("For more information, try '");
    if lines.last().is_some_and(is_usage)
        && let Some(error) = lines.iter().rposition(|line| line.starts_with("error: "))
    {
        return lines.swap_remove(error);
    }
    lines.pop().unwrap_or_else(|| "it wrote nothing".into())
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
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(
            tail(&link, 2),
            [""; 0],
            "it could lead to a file that root alone may read"
        );
        assert_eq!(tail(folder.path(), 2), [""; 0]);
        let usage = "one\nerror: unexpected argument '-x' found\n\nUsage: run\n\nFor more information, try '--help'.\n";
        std::fs::write(&path, usage).unwrap();
        assert_eq!(last_line(&path), "error: unexpected argument '-x' found");
    }

    #[test]
    fn lines_of_any_length_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let line = |at: usize| format!("{at} {}", "x".repeat(5000));
        let text: String = (0..40).map(|at| line(at) + "\n").collect();
        std::fs::write(&path, text).unwrap();
        for count in [0, 1, 30, 40, usize::MAX] {
            let expected: Vec<String> = (40 - count.min(40)..40).map(line).collect();
            assert_eq!(tail(&path, count), expected, "{count}");
        }
    }
}
