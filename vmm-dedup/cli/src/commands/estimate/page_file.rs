//! The file for the page: what is there and is no page stays as it is.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use vmm_dedup_host::Failure;

/// How pages of ours, and most others, begin.
const BEGINNING: &[u8] = b"<!doctype html";

/// A file that a page may be written to.
#[derive(Debug)]
pub(super) struct PageFile {
    /// As the user named it.
    named: PathBuf,
    /// Where it is: behind links.
    place: PathBuf,
    /// It is a regular file, or none yet: a fresh one takes its place.
    is_file: bool,
}

impl PageFile {
    /// Finds out that a page can be written there, and that nothing else would be lost.
    pub(super) fn at(named: &Path, inputs: &[PathBuf]) -> Result<Self, Failure> {
        let place = fs::canonicalize(named).unwrap_or_else(|_| named.to_owned());
        let there = match fs::metadata(&place) {
            Ok(there) => Some(there),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(unwritten(named, &e)),
        };
        let page = Self {
            named: named.to_owned(),
            place,
            is_file: there.as_ref().is_none_or(Metadata::is_file),
        };
        if let Some(there) = there {
            page.may_replace(&there, inputs)?;
        }
        let tried = match page.is_file {
            true => page.fresh().and_then(|(_, path)| fs::remove_file(path)),
            false => page.open().map(drop),
        };
        tried.map_err(|e| unwritten(named, &e))?;
        Ok(page)
    }

    fn may_replace(&self, there: &Metadata, inputs: &[PathBuf]) -> Result<(), Failure> {
        let is_same = |input: &PathBuf| {
            fs::metadata(input).is_ok_and(|input| (input.dev(), input.ino()) == (there.dev(), there.ino()))
        };
        let named = self.named.display();
        if inputs.iter().any(is_same) {
            return Err(Failure::usage(format!(
                "{named} is to be read and is not overwritten: name another file for the page after --html"
            )));
        }
        if there.is_file() && there.len() > 0 && !is_page(&self.place) {
            return Err(Failure::usage(format!(
                "{named} is no HTML page and is not overwritten: name a new file for the page after --html"
            )));
        }
        Ok(())
    }

    /// Writes the page. Whoever looks meanwhile sees the old one, or all of the new one.
    pub(super) fn write(&self, page: &str) -> Result<(), Failure> {
        let written = match self.is_file {
            true => self.fresh().and_then(|(mut file, path)| {
                let written = file.write_all(page.as_bytes());
                let placed = written.and_then(|()| fs::rename(&path, &self.place));
                placed.inspect_err(|_| drop(fs::remove_file(&path)))
            }),
            false => self.open().and_then(|mut file| file.write_all(page.as_bytes())),
        };
        written.map_err(|e| unwritten(&self.named, &e))
    }

    /// A new file beside it.
    fn fresh(&self) -> io::Result<(File, PathBuf)> {
        let mut name = self.place.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.new", std::process::id()));
        let path = self.place.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok((file, path))
    }

    /// A device or a pipe.
    fn open(&self) -> io::Result<File> {
        OpenOptions::new().write(true).open(&self.place)
    }
}

fn is_page(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(256).read_to_end(&mut start));
    let start = start.trim_ascii_start();
    read.is_ok()
        && start
            .get(..BEGINNING.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(BEGINNING))
}

fn unwritten(named: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("cannot write {}: {error}", named.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_are_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let write = |name: &str, text: &str| fs::write(path(name), text).expect("a file");
        write("memory", "\x7fELF");
        write("old.html", "\n<!DOCTYPE HTML><p>old");
        write("empty.html", "");
        write("input.html", "<!doctype html>");
        std::os::unix::fs::symlink(path("old.html"), path("link.html")).expect("a link");
        std::os::unix::fs::symlink(path("input.html"), path("other-name.html")).expect("a link");
        let inputs = [path("memory"), path("input.html")];
        let refused = |name: &str| PageFile::at(&path(name), &inputs).expect_err(name).to_string();

        for (name, part) in [
            ("memory", "is to be read"),
            ("input.html", "is to be read"),
            ("other-name.html", "is to be read"),
            ("none/page.html", "cannot write"),
            ("memory/page.html", "cannot write"),
        ] {
            assert!(refused(name).contains(part), "{}", refused(name));
        }
        let other = PageFile::at(&path("memory"), &[])
            .expect_err("no page")
            .to_string();
        assert!(
            other.contains("is no HTML page and is not overwritten"),
            "{other}"
        );
        for name in ["link.html", "empty.html", "new.html"] {
            let page = PageFile::at(&path(name), &inputs).expect(name);
            page.write("<!DOCTYPE html>new").expect(name);
            assert_eq!(fs::read_to_string(path(name)).expect(name), "<!DOCTYPE html>new");
        }
        assert!(
            fs::symlink_metadata(path("link.html"))
                .expect("a link")
                .is_symlink()
        );
        assert!(fs::read(path("memory")).expect("memory").starts_with(b"\x7fELF"));
        // Nothing is left beside them.
        assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 7);
    }

    #[test]
    fn a_device_is_written_to_and_stays() {
        let null = PageFile::at(Path::new("/dev/null"), &[]).expect("a device");
        null.write("<!DOCTYPE html>").expect("it takes all");
        assert!(!fs::metadata("/dev/null").expect("a device").is_file());
    }
}
