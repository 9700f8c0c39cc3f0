//! What packing is said to save, held against images whose pages are known.

use std::fs;
use tempfile::TempDir;
use vmm_dedup_estimate::pack::{Bases, Packing, Plan, SegmentBytes, Settings, pack};
use vmm_dedup_estimate::{Error, Memory, Reading};

const PAGE: usize = 4096;
const LINE: usize = 64;
const READING: Reading<'_> = Reading {
    threads: 2,
    progress: &|_, _| (),
};

/// Numbers that depend on a seed alone.
fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// A page that no codec makes smaller.
fn random(seed: u64) -> Vec<u8> {
    let mut next = numbers(seed);
    (0..PAGE / 8).flat_map(|_| next().to_ne_bytes()).collect()
}

/// A page of words, which compressors make much smaller.
fn text(seed: u64) -> Vec<u8> {
    let words = [
        "memory ",
        "page ",
        "the ",
        "guest ",
        "struct ",
        "0x7f",
        "list_head ",
        "\n",
    ];
    let mut next = numbers(seed);
    let bytes = std::iter::repeat_with(|| {
        let number = next();
        words[number.to_le_bytes()[1] as usize % words.len()].bytes()
    });
    bytes.flatten().take(PAGE).collect()
}

/// A copy with some lines replaced, none of them one that is indexed.
fn near(page: &[u8], lines: usize, seed: u64) -> Vec<u8> {
    let (mut copy, other) = (page.to_vec(), random(seed));
    for line in (0..64).filter(|line| ![3, 25, 37, 60].contains(line)).take(lines) {
        copy[line * LINE..][..LINE].copy_from_slice(&other[line * LINE..][..LINE]);
    }
    copy
}

/// Writes images, packs them, and holds what every plan says to what must hold of all.
fn packed(images: &[Vec<Vec<u8>>], bases: Bases) -> Packing {
    let folder = TempDir::new().expect("a folder");
    let memory = |(i, pages): (usize, &Vec<Vec<u8>>)| {
        let path = folder.path().join(format!("vm{i}"));
        fs::write(&path, pages.concat()).expect("the folder is writable");
        Memory::of_file(&path).expect("an image")
    };
    let memories: Vec<Memory> = images.iter().enumerate().map(memory).collect();
    let settings = Settings {
        bases,
        segment: SegmentBytes::try_new(1 << 14).expect("a size"),
        ..Settings::default()
    };
    let packing = pack(&memories, &settings, &READING).expect("images are packed");
    packing.plans.iter().for_each(adds_up);
    packing
}

fn adds_up(plan: &Plan) {
    assert_eq!(plan.refused, 0, "{plan:?}");
    assert_eq!(
        plan.pages,
        plan.codecs.iter().map(|codec| codec.pages).sum::<u64>()
    );
    assert_eq!(
        plan.payload_bytes,
        plan.codecs.iter().map(|codec| codec.payload_bytes).sum::<u64>()
    );
    assert_eq!(plan.segment_bytes, plan.payload_bytes + plan.fragmentation_bytes);
    assert!(plan.metadata_bytes >= plan.pages * 20);
    let taken = i64::try_from(plan.segment_bytes + plan.metadata_bytes).expect("small");
    assert_eq!(
        plan.saved_bytes,
        i64::try_from(plan.pages).expect("small") * 4096 - taken
    );
}

fn plan<'a>(packing: &'a Packing, name: &str) -> &'a Plan {
    packing
        .plans
        .iter()
        .find(|plan| plan.name == name)
        .expect("a plan")
}

fn pages_of(plan: &Plan, codec: &str) -> u64 {
    let found = plan.codecs.iter().find(|packed| packed.codec == codec);
    found.map_or(0, |packed| packed.pages)
}

#[test]
fn pages_near_to_one_base_become_overlays_and_patches() {
    // In each of four memories 100 pages, at a distance of their own, each near to the one of the first.
    let image = |vm: u64| -> Vec<Vec<u8>> {
        let own = (0..10 + vm).map(|n| random(10_000 + vm * 100 + n));
        let near_ones = (0..100).map(|n| match vm {
            0 => random(n),
            _ => near(&random(n), 4, 1_000 * vm + n),
        });
        own.chain(near_ones).collect()
    };
    let images: Vec<Vec<Vec<u8>>> = (0..4).map(image).collect();

    let domain = packed(&images, Bases::Domain);
    let own = packed(&images, Bases::Own);

    // 446 pages without a twin, of which 300 are near to 100.
    assert_eq!((domain.pages, domain.all_pages), (446, 446));
    let overlays = plan(&domain, "overlay");
    assert_eq!((overlays.pages, overlays.bases), (300, 100));
    assert_eq!(overlays.payload_bytes, 300 * (8 + 4 * 64));
    let patches = plan(&domain, "zstd, zstd-patch");
    assert_eq!((pages_of(patches, "zstd-patch"), patches.bases), (300, 100));
    assert!(domain.search.neighbour > 200, "{:?}", domain.search);
    // No memory has two pages that are near to each other, and random ones are not compressed.
    assert!(own.plans.iter().all(|plan| plan.pages == 0), "{own:?}");
}

#[test]
fn a_base_for_one_page_alone_is_none() {
    let images: Vec<Vec<Vec<u8>>> = vec![
        (0..50).map(random).collect(),
        (0..50).map(|n| near(&random(n), 2, 500 + n)).collect(),
    ];
    let packing = packed(&images, Bases::Domain);
    assert!(
        packing.search.line + packing.search.neighbour >= 90,
        "{:?}",
        packing.search
    );
    let found: Vec<u64> = packing.plans.iter().map(|plan| plan.pages).collect();
    assert_eq!(found, vec![0; packing.plans.len()]);
}

#[test]
fn text_is_compressed_and_what_is_shared_or_zero_is_not_looked_at() {
    let shared = || (0..20).map(|n| text(1_000 + n));
    let image = |vm: u64| -> Vec<Vec<u8>> {
        let own = (0..64).map(|n| text(vm * 100 + n));
        let zero = std::iter::repeat_n(vec![0; PAGE], 16);
        own.chain(shared()).chain(zero).collect()
    };
    let packing = packed(&[image(1), image(2)], Bases::Own);

    assert_eq!((packing.pages, packing.all_pages), (128, 200));
    for (name, codec) in [("lz4", "lz4"), ("zstd", "zstd")] {
        let plan = plan(&packing, name);
        assert_eq!((plan.pages, pages_of(plan, codec)), (128, 128));
        assert!(plan.saved_bytes > 128 * 1500, "{plan:?}");
        assert!(plan.rebuild_p50_us > 0.0 && plan.rebuild_p50_us <= plan.rebuild_p99_us);
    }
    let (all, zstd) = (plan(&packing, "all"), plan(&packing, "zstd"));
    let index = i64::try_from(packing.index_bytes).expect("small");
    assert!(all.saved_bytes + index >= zstd.saved_bytes, "{all:?} {zstd:?}");
    assert_eq!(plan(&packing, "overlay").pages, 0);
}

#[test]
fn nearly_empty_pages_need_no_base() {
    let image = (0..40u64).map(|n| {
        let mut page = vec![0; PAGE];
        page[640..700].copy_from_slice(&random(n)[..60]);
        page
    });
    let packing = packed(&[image.collect()], Bases::Own);
    let overlays = plan(&packing, "overlay");
    assert_eq!((overlays.pages, overlays.bases), (40, 0));
    assert_eq!(overlays.payload_bytes, 40 * (8 + 64));
}

#[test]
fn bases_may_be_packed_themselves() {
    let image = |vm: u64| (0..60u64).map(|n| near(&text(n), 3, vm * 1_000 + n)).collect();
    let images: Vec<Vec<Vec<u8>>> = (0..3).map(image).collect();

    let packing = packed(&images, Bases::Domain);

    let (whole, kept_packed) = (plan(&packing, "all"), plan(&packing, "all, bases packed"));
    assert_eq!((kept_packed.pages, kept_packed.bases), (180, 60));
    assert_eq!(whole.pages + whole.bases, 180);
    assert!(kept_packed.saved_bytes > whole.saved_bytes);
}

#[test]
fn more_memory_than_there_may_be_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("vm");
    fs::write(&path, [text(1), text(2), text(3)].concat()).expect("the folder is writable");
    let memory = [Memory::of_file(&path).expect("an image")];
    let with_most = |most_pages| {
        let settings = Settings {
            most_pages,
            ..Settings::default()
        };
        pack(&memory, &settings, &READING)
    };
    assert!(matches!(
        with_most(2),
        Err(Error::TooManyToPack { pages: 3, most: 2 })
    ));
    assert_eq!(with_most(3).expect("three pages are allowed").pages, 3);
}
