//! `estimate` as its users meet it.

#[path = "operator/drawn.rs"]
mod plots;

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

/// Memory of two guests with texts of their own: those of the second are those of the first, 7 pages further on and with one
/// line of their own. Two of three pages of a guest are such copies of the third.
fn images_of_text(folder: &Path) -> Vec<PathBuf> {
    let text = |n: usize| {
        let words = ["page ", "of ", "memory ", "guest ", "\n"];
        let bytes = (0..).flat_map(move |i: usize| words[(i * i + n * (i + 1)) % 83 % words.len()].bytes());
        bytes.take(PAGE).collect::<Vec<u8>>()
    };
    let image = |vm: usize| {
        let pages = (0..300).flat_map(|n| {
            let mut page = text(n % 100 + 1);
            let own = format!("{vm} {n} {}", "#".repeat(40));
            page[..own.len()].copy_from_slice(own.as_bytes());
            page
        });
        let zeros = std::iter::repeat_n(0, vm * 7 * PAGE);
        let path = folder.join(format!("text{vm}"));
        std::fs::write(&path, zeros.chain(pages).collect::<Vec<u8>>()).expect("the folder is writable");
        path
    };
    (1..=2).map(image).collect()
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
fn what_packing_saves_is_told_beyond_what_sharing_does() {
    let folder = TempDir::new().expect("a folder");
    let images = images_of_text(folder.path());
    let told = |bases: &str| {
        let report = json(
            &[
                &["estimate", "--pack", "--bases", bases, "--json"],
                &texts(&images)[..],
            ]
            .concat(),
        );
        assert_eq!(report["pack"]["bases"], bases);
        report
    };

    for report in [told("own"), told("domain")] {
        assert_eq!(
            (&report["pack"]["pages"], &report["total"]["zero"]),
            (&600.into(), &21.into())
        );
        let plans = report["pack"]["plans"].as_array().expect("plans");
        assert_eq!(plans.len(), 8);
        for plan in plans {
            let (pages, saved) = (&plan["pages"], &plan["saved_bytes"]);
            // A third of the pages are bases of overlays; all others are packed.
            assert!(
                pages.as_u64() >= Some(380) && saved.as_i64() > Some(1 << 20),
                "{plan}"
            );
            assert_eq!(plan["refused"], 0);
        }
    }
}

#[test]
fn people_get_a_table_of_codecs() {
    let folder = TempDir::new().expect("a folder");
    let images = images_of_text(folder.path());

    let output = vmm_dedup(&[&["estimate", "--pack"], &texts(&images)[..]].concat());

    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success());
    for part in [
        "SAVED NET",
        "zstd, zstd-patch",
        "all, bases packed",
        "bases found",
        "compared",
    ] {
        assert!(text.contains(part), "no \"{part}\" in {text}");
    }
}

#[test]
fn the_bench_packs_with_bases_of_one_image_and_of_all() {
    let folder = TempDir::new().expect("a folder");
    let images = images_of_text(folder.path());

    let plots = folder.path().join("plots");
    let args = [
        "bench",
        "pack",
        "--plot",
        plots.to_str().expect("UTF-8"),
        "--json",
        "--images",
    ];

    let report = json(&[&args[..], &texts(&images)[..]].concat());

    plots::are_whole(&plots, &["pack-saved"]);

    assert_eq!(report["exact"]["saved"]["pages"], 21);
    for bases in ["own", "domain"] {
        let plans = report[bases]["plans"].as_array().expect("plans");
        for plan in plans {
            let time = |name: &str| plan[name].as_f64().expect("a number");
            assert!(
                time("rebuild_p50_us") > 0.0 && time("rebuild_p50_us") <= time("rebuild_p99_us"),
                "{plan}"
            );
        }
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
    let cases: [(&[&str], &str, i32); 6] = [
        (&["estimate", "/nonexistent"], "cannot read /nonexistent", 1),
        (&["estimate", "--pid", "4194304"], "process 4194304 is gone", 1),
        (&["estimate", kdump], "without compression", 1),
        (&["estimate", "--sample", "3", kdump], "sampling rate", 2),
        (&["bench", "ksm", "--kinds", "images"], "--images FILE", 2),
        (&["estimate", "--bases", "domain", kdump], "--pack", 2),
    ];
    for (args, part, code) in cases {
        let output = vmm_dedup(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(part), "{args:?}: {text}");
        assert_eq!(output.status.code(), Some(code));
    }
    assert_eq!(vmm_dedup(&["estimate"]).status.code(), Some(2));
}
