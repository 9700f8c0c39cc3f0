//! Estimates held against counting by hand, on every kind of memory.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use vmm_dedup_estimate::near::estimate_with_near;
use vmm_dedup_estimate::{Error, Memory, Reading, Report, Sample, estimate, read_plainly};

const PAGE: usize = 4096;
const READING: Reading<'_> = Reading {
    threads: 2,
    progress: &|_, _| (),
};

/// A page whose content depends on `id` alone; 0 is the zero page.
fn page(id: u64) -> Vec<u8> {
    let mut state = id;
    let mut word = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        if id == 0 { 0 } else { state ^ (state >> 29) }
    };
    (0..PAGE / 8).flat_map(|_| word().to_ne_bytes()).collect()
}

fn image(ids: &[u64]) -> Vec<u8> {
    ids.iter().flat_map(|id| page(*id)).collect()
}

fn write(folder: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, bytes).expect("the folder is writable");
    path
}

fn raw(folder: &TempDir, name: &str, ids: &[u64]) -> Memory {
    Memory::of_file(&write(folder, name, &image(ids))).expect("a raw image")
}

fn exact(memories: &[Memory]) -> Report {
    estimate(memories, Sample::ALL, &READING).expect("memories are readable")
}

#[test]
fn every_page_is_counted_where_it_belongs() {
    let folder = TempDir::new().expect("a folder");
    let a = raw(&folder, "a", &[0, 0, 1, 1, 1, 2, 3, 9]);
    let b = raw(&folder, "b", &[0, 2, 2, 3, 4]);
    let c = raw(&folder, "c", &[5, 5, 2]);

    let report = exact(&[a, b, c]);

    let counts: Vec<_> = report
        .inputs
        .iter()
        .map(|i| (i.pages, i.zero, i.inside.pages, i.shared.pages, i.unique.pages))
        .collect();
    assert_eq!(counts, [(8, 2, 3, 2, 1), (5, 1, 0, 3, 1), (3, 0, 2, 1, 0)]);
    let pairs: Vec<Vec<u64>> = report
        .pairs
        .iter()
        .map(|row| row.iter().map(|a| a.pages).collect())
        .collect();
    assert_eq!(pairs, [[2, 2, 1], [2, 1, 1], [1, 1, 1]]);
    // 13 pages are not zero, of 6 contents: 1, 2, 3, 4, 5 and 9.
    assert_eq!(
        (
            report.total.zero,
            report.total.duplicates.pages,
            report.total.saved.pages
        ),
        (3, 7, 10)
    );
    assert_eq!(report.total.duplicates.error, 0);
}

/// Thousands of contents with one to eight copies; every sampled number must be within twice its bound, which a
/// right bound misses once in ten thousand times.
#[test]
fn samples_are_right_within_their_bounds() {
    let folder = TempDir::new().expect("a folder");
    let ids = |vm: u64| -> Vec<u64> {
        (0..6000)
            .map(|n| {
                if n % 3 == 0 {
                    n * 2 + vm + 100_000 * vm
                } else {
                    n / (1 + n % 4)
                }
            })
            .collect()
    };
    let memories = [raw(&folder, "a", &ids(1)), raw(&folder, "b", &ids(2))];
    let whole = exact(&memories);

    for one_in in [4, 16] {
        let sample = Sample::try_new(one_in).expect("a power of two");
        let report = estimate(&memories, sample, &READING).expect("memories are readable");

        let amounts = |r: &Report| {
            let inputs = r
                .inputs
                .iter()
                .flat_map(|i| [i.inside, i.shared, i.unique, i.alone]);
            inputs
                .chain([r.total.duplicates, r.pairs[0][1]])
                .collect::<Vec<_>>()
        };
        for (right, guess) in amounts(&whole).into_iter().zip(amounts(&report)) {
            let bound = 2 * guess.error.max(one_in);
            assert!(
                right.pages.abs_diff(guess.pages) <= bound,
                "1/{one_in}: {right:?}, {guess:?}"
            );
            // A bound that allows anything would pass as well.
            assert!(
                guess.error < right.pages / 2 + 20 * one_in,
                "1/{one_in}: {guess:?} is no bound"
            );
        }
        assert_eq!(report.total.zero, whole.total.zero);
    }
}

#[test]
fn holes_are_absent_and_partial_pages_left_out() {
    let folder = TempDir::new().expect("a folder");
    let path = write(&folder, "sparse", &image(&[7]));
    let file = fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("it is there");
    std::os::unix::fs::FileExt::write_all_at(&file, &page(7), 1 << 20).expect("space");
    file.set_len((2 << 20) + 100).expect("space");

    let report = exact(&[Memory::of_file(&path).expect("a raw image")]);

    let input = &report.inputs[0];
    assert_eq!((input.pages + input.absent, input.inside.pages), (512, 2));
    assert!(input.absent >= 480, "{input:?}");
}

/// An ELF core with two segments, the first of which another one shows again, not aligned in the file.
fn core(ids: &[u64]) -> Vec<u8> {
    let content = image(ids);
    let offset = 64 + 3 * 56 + 13;
    let mut bytes = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0];
    bytes.resize(16, 0);
    bytes.extend(4u16.to_le_bytes()); // ET_CORE
    bytes.extend(62u16.to_le_bytes()); // x86-64
    bytes.extend(1u32.to_le_bytes());
    for number in [0u64, 64, 0] {
        bytes.extend(number.to_le_bytes()); // entry, program headers, sections
    }
    bytes.extend(0u32.to_le_bytes());
    for number in [64u16, 56, 3, 64, 0, 0] {
        bytes.extend(number.to_le_bytes());
    }
    let half = (ids.len() / 2 * PAGE) as u64;
    let segments = [
        (offset, 0, half),
        (offset + half, 1 << 32, content.len() as u64 - half),
        (offset, 0, half),
    ];
    for (start, address, size) in segments {
        bytes.extend(1u32.to_le_bytes()); // PT_LOAD
        bytes.extend(0u32.to_le_bytes());
        for number in [start, address, address, size, size, 0] {
            bytes.extend(number.to_le_bytes());
        }
    }
    bytes.resize(64 + 3 * 56 + 13, 0xaa);
    bytes.extend(content);
    bytes
}

#[test]
fn an_elf_core_holds_what_its_segments_show_and_that_once() {
    let folder = TempDir::new().expect("a folder");
    let path = write(&folder, "core", &core(&[1, 2, 2, 0, 3, 3]));

    let report = exact(&[Memory::of_file(&path).expect("a core")]);

    let input = &report.inputs[0];
    assert_eq!(
        (
            input.kind,
            input.pages,
            input.zero,
            input.inside.pages,
            input.unique.pages
        ),
        ("ELF core", 6, 1, 4, 1)
    );
}

#[test]
fn a_snapshot_is_read_from_its_directory() {
    let folder = TempDir::new().expect("a folder");
    write(&folder, "state.json", b"{}");
    write(&folder, "config.json", b"{}");
    write(&folder, "memory-ranges", &image(&[1, 1, 2]));

    let report = exact(&[Memory::of_file(folder.path()).expect("a snapshot")]);

    assert_eq!(
        (report.inputs[0].kind, report.total.duplicates.pages),
        ("snapshot", 1)
    );
}

/// This process: an area of known content, of which half was never touched.
#[test]
fn a_live_process_is_read_without_being_populated() {
    let mut area = vec![0u8; 64 << 20];
    area[..PAGE * 2].fill(0);
    let start = area.as_ptr().align_offset(PAGE);
    for (n, part) in area[start..][..1024 * PAGE].chunks_exact_mut(PAGE).enumerate() {
        part.copy_from_slice(&page(0x5eed_0000 + n as u64 / 4));
    }
    let resident = || {
        let text = fs::read_to_string("/proc/self/smaps_rollup").expect("/proc");
        let line = text.lines().find_map(|l| l.strip_prefix("Rss:")).expect("Rss");
        line.trim()
            .trim_end_matches(" kB")
            .parse::<u64>()
            .expect("a number")
    };
    let before = resident();

    let report = exact(&[Memory::of_process(std::process::id()).expect("this process")]);

    let input = &report.inputs[0];
    assert!(
        input.inside.pages >= 1024 && input.alone.pages >= 768,
        "{input:?}"
    );
    // 15,000 pages of the area were never touched.
    assert!(input.absent > 10_000, "{input:?}");
    assert!(
        resident() < before + 8192,
        "{before} KiB before, {} after",
        resident()
    );
    assert!(area.iter().any(|byte| *byte != 0));
}

#[test]
fn pages_that_differ_in_a_few_lines_are_near() {
    let folder = TempDir::new().expect("a folder");
    // Near its neighbour: 16 lines differ. Not near: 17 lines differ.
    let mut bytes = image(&[10, 10, 20, 20]);
    for (at, lines) in [(0, 16), (2 * PAGE, 17)] {
        for line in 0..lines {
            bytes[at + line * 64 * 3] ^= 1;
        }
    }
    // A page with one line that is not zero is near the zero page.
    let mut almost_zero = vec![0; PAGE];
    almost_zero[100] = 1;
    let a = Memory::of_file(&write(&folder, "a", &bytes)).expect("raw");
    let b = Memory::of_file(&write(&folder, "b", &almost_zero)).expect("raw");

    let report = estimate_with_near(&[a, b], Sample::ALL, &READING).expect("readable");

    let near = report.near.expect("it was asked for");
    assert_eq!(
        (near.unique, near.queries, near.near, near.near_zero),
        (5, 5, 2, 1)
    );
    assert_eq!(near.pairs, [[2, 0], [0, 0]]);
    assert_eq!(near.equal_lines, 2 * 48);
}

#[test]
fn reading_plainly_reads_every_word() {
    let folder = TempDir::new().expect("a folder");
    let ids: Vec<u64> = (0..200).collect();
    let words = image(&ids);
    let words = words
        .chunks_exact(8)
        .map(|w| u64::from_ne_bytes(w.try_into().expect("8 bytes")));

    let sum = read_plainly(&[raw(&folder, "a", &ids)], &READING).expect("readable");

    assert_eq!(sum, words.fold(0, u64::wrapping_add));
}

fn error_of(path: &Path) -> String {
    Memory::of_file(path).expect_err("it is refused").to_string()
}

#[test]
fn what_is_not_understood_is_refused_with_the_remedy() {
    let folder = TempDir::new().expect("a folder");
    let mut cut = core(&[1, 2]);
    cut.truncate(cut.len() - 1);
    let mut executable = core(&[1]);
    executable[16] = 2;
    let cases: HashMap<PathBuf, &str> = [
        (
            write(&folder, "kdump", b"KDUMP   and so on"),
            "without compression",
        ),
        (write(&folder, "cut", &cut), "cut short"),
        (write(&folder, "executable", &executable), "no core dump"),
        (
            write(&folder, "short", &[0x7f, b'E', b'L', b'F', 2]),
            "not a 64-bit ELF core",
        ),
        (write(&folder, "empty", b""), "not one page"),
        (folder.path().to_owned(), "state.json"),
        (folder.path().join("missing"), "cannot read"),
        (PathBuf::from("/dev/null"), "not a file"),
    ]
    .into();
    for (path, part) in cases {
        let text = error_of(&path);
        assert!(text.contains(part), "{}: {text}", path.display());
    }
    // 2^22 is the highest process id there can be.
    assert!(matches!(Memory::of_process(1 << 22), Err(Error::Gone { .. })));
}
