//! `estimate` as its users meet it.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const PAGE: usize = 4096;
/// Pages of an image.
const PAGES: usize = 4096;

fn vmm_dedup(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args(args)
        .output()
        .expect("the command runs")
}

fn json(args: &[&str]) -> Value {
    let output = vmm_dedup(args);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// A page that depends on `id` alone; 0 is the zero page.
fn page(id: usize) -> impl Iterator<Item = u8> {
    let id = id as u64;
    (0..PAGE as u64 / 8).flat_map(move |word| {
        let mixed = (id << 16 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (if id == 0 { 0 } else { mixed ^ (mixed >> 31) }).to_ne_bytes()
    })
}

/// Memory like that of guests with one system: a third zero, a third the same in all but elsewhere in each, a third
/// their own.
fn images(folder: &Path) -> Vec<PathBuf> {
    let image = |vm: usize| {
        let ids = (0..PAGES).map(move |n| match n % 3 {
            0 => 0,
            1 => 1 + (n + vm * 501) % PAGES / 3,
            _ => vm << 20 | n,
        });
        let path = folder.join(format!("vm{vm}"));
        std::fs::write(&path, ids.flat_map(page).collect::<Vec<u8>>()).expect("the folder is writable");
        path
    };
    (1..=4).map(image).collect()
}

fn texts(paths: &[PathBuf]) -> Vec<&str> {
    paths.iter().map(|path| path.to_str().expect("UTF-8")).collect()
}

#[test]
fn people_get_a_table_with_bounds_where_it_is_sampled() {
    let folder = TempDir::new().expect("a folder");
    let images = images(folder.path());

    let output = vmm_dedup(&[&["estimate", "--near", "--sample", "4"], &texts(&images)[..]].concat());

    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success());
    for part in [
        "vm1",
        "vm4",
        "to be saved",
        "+-",
        "one content in 4",
        "48 of 64 lines",
    ] {
        assert!(text.contains(part), "no \"{part}\" in {text}");
    }
}

#[test]
fn reading_speed_is_told_beside_that_of_reading_alone() {
    let folder = TempDir::new().expect("a folder");
    let images = images(folder.path());

    let report = json(
        &[
            &["bench", "estimate", "--json", "--repetitions", "2"],
            &texts(&images)[..],
        ]
        .concat(),
    );

    assert_eq!(report["bytes"], (4 * PAGES * PAGE) as f64);
    let ratio = report["ratio"].as_f64().expect("a number");
    assert!(ratio > 0.0 && ratio.is_finite(), "{report}");
}

#[test]
fn wrong_inputs_end_with_one_line_that_helps() {
    let folder = TempDir::new().expect("a folder");
    let kdump = folder.path().join("kdump");
    std::fs::write(&kdump, b"KDUMP   ").expect("the folder is writable");
    let kdump = kdump.to_str().expect("UTF-8");
    let cases: [(&[&str], &str, i32); 5] = [
        (&["estimate", "/nonexistent"], "cannot read /nonexistent", 1),
        (&["estimate", "--pid", "4194304"], "process 4194304 is gone", 1),
        (&["estimate", kdump], "without compression", 1),
        (&["estimate", "--sample", "3", kdump], "sampling rate", 2),
        (&["bench", "ksm", "--kinds", "images"], "--images FILE", 2),
    ];
    for (args, part, code) in cases {
        let output = vmm_dedup(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(part), "{args:?}: {text}");
        assert_eq!(output.status.code(), Some(code));
    }
    assert_eq!(vmm_dedup(&["estimate"]).status.code(), Some(2));
}
