//! A writer for cpio's "newc" format, the kernel's own for an initramfs.

use std::collections::HashSet;

const MAGIC: &str = "070701";
const DIRECTORY: u32 = 0o040_755;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;
/// Device number of /dev/console.
const CONSOLE: (u32, u32) = (5, 1);

/// An archive under construction.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    directories: HashSet<String>,
}

impl Archive {
    /// Adds a directory, unless it is there.
    pub(crate) fn directory(&mut self, name: &str) {
        if self.directories.insert(name.to_owned()) {
            self.entry(name, DIRECTORY, (0, 0), &[]);
        }
    }

    /// Adds a file, and the directories it is in.
    pub(crate) fn file(&mut self, name: &str, permissions: u32, content: &[u8]) {
        self.parents(name);
        self.entry(name, REGULAR | permissions, (0, 0), content);
    }

    /// Adds a symbolic link, and the directories it is in.
    pub(crate) fn symlink(&mut self, name: &str, target: &str) {
        self.parents(name);
        self.entry(name, SYMLINK, (0, 0), target.as_bytes());
    }

    fn parents(&mut self, name: &str) {
        for (end, _) in name.match_indices('/') {
            self.directory(&name[..end]);
        }
    }

    /// Adds the device that init gets as its standard streams.
    pub(crate) fn console(&mut self, name: &str) {
        self.entry(name, CHARACTER_DEVICE, CONSOLE, &[]);
    }

    /// The whole archive.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        std::mem::take(&mut self.bytes)
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("files in an initramfs are below 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("names are short");
        // inode, mode, uid, gid, links, time, size, device of the file system, device, name size, checksum
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            device.0,
            device.1,
            name_size,
            0,
        ];
        self.bytes.extend_from_slice(MAGIC.as_bytes());
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[test]
fn entries_are_aligned_and_end_with_the_trailer() {
    let mut archive = Archive::default();
    archive.file("a/b", 0o644, b"12345");
    archive.symlink("a/c", "b");

    let bytes = archive.finish();

    assert_eq!(bytes.len() % 4, 0);
    assert_eq!(
        bytes
            .windows(6)
            .filter(|window| *window == MAGIC.as_bytes())
            .count(),
        4
    );
    assert!(bytes.windows(11).any(|window| window == b"TRAILER!!!\0"));
}
