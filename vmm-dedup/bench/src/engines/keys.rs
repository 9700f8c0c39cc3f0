//! How often a key takes a page for unchanged that has changed (PageForge, section 6.2 and figure 8).
//!
//! A part of the pages is written, each in one of three ways, with what another page has in the same place, and every page
//! is keyed before and after. Keys that differ prove a change; keys that agree although the page changed are false
//! positives. Images of the same guests at two times show what real writes do.

use crate::content::pick;
use serde::Serialize;
use std::sync::atomic::Ordering;
use vmm_dedup::compare::{Arena, Cpu, KeyKind, Keys as MakesKeys, PageId, Pages};
use vmm_dedup_host::Failure;
use vmm_dedup_pageforge::driver::{InProcess, PageForgeEngine};
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords, Salt};

/// Every second page is written.
const WRITTEN: usize = 2;

/// What a write changes.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Write {
    /// One word, anywhere.
    Word,
    /// 256 bytes in a row, anywhere.
    Stretch,
    /// The whole page.
    Page,
    /// What guests wrote themselves, from one image to the next.
    Guest,
}

/// One key on one content, under one kind of writes.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Keys {
    content: String,
    engine: &'static str,
    write: Write,
    /// Bytes read for a key.
    bytes_per_key: f64,
    pages: u64,
    /// Pages that were written and differ.
    changed: u64,
    /// Pages whose keys agree.
    matches: u64,
    /// Pages whose keys differ.
    mismatches: u64,
    /// Pages that were written and whose keys agree all the same.
    false_positives: u64,
    /// Those, as a part of all comparisons of keys.
    false_positive_rate: f64,
}

impl std::fmt::Display for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let write = match self.write {
            Write::Word => "word",
            Write::Stretch => "stretch",
            Write::Page => "page",
            Write::Guest => "guest",
        };
        write!(
            f,
            "{:<15} {:<17} {write:<8} {:>6.0} {:>8} {:>11} {:>10} ({:.1} %)",
            self.content,
            self.engine,
            self.bytes_per_key,
            self.matches,
            self.mismatches,
            self.false_positives,
            self.false_positive_rate * 100.0
        )
    }
}

pub(super) fn measure(content: &str, arena: &Arena) -> Result<Vec<Keys>, Failure> {
    let mut all = Vec::new();
    for (write, words) in [(Write::Word, 1), (Write::Stretch, 32), (Write::Page, PAGE_WORDS)] {
        let mut engines = engines();
        let before = keys_of(&mut engines, arena)?;
        let old = write_pages(arena, words);
        let after = keys_of(&mut engines, arena)?;
        old.iter().for_each(|(page, words)| arena.write(*page, words));
        let changed: Vec<usize> = old.iter().map(|(page, _)| *page).collect();
        all.extend(figures(content, write, &engines, &changed, before, after));
    }
    Ok(all)
}

/// The same pages of the same guests, at two times.
pub(super) fn between(content: &str, before: &Arena, after: &Arena) -> Result<Vec<Keys>, Failure> {
    let differs = |page: &usize| read(before, *page) != read(after, *page);
    let changed: Vec<usize> = (0..before.pages()).filter(differs).collect();
    let mut engines = engines();
    let (old, new) = (keys_of(&mut engines, before)?, keys_of(&mut engines, after)?);
    Ok(figures(content, Write::Guest, &engines, &changed, old, new))
}

fn figures(
    content: &str,
    write: Write,
    engines: &Engines,
    changed: &[usize],
    before: Vec<Vec<u64>>,
    after: Vec<Vec<u64>>,
) -> Vec<Keys> {
    let figures = |(((name, engine), before), after): ((&Engine, Vec<u64>), Vec<u64>)| {
        let same = |page: usize| before[page] == after[page];
        let matches = (0..before.len()).filter(|page| same(*page)).count() as u64;
        let false_positives = changed.iter().filter(|page| same(**page)).count() as u64;
        let pages = before.len() as u64;
        Keys {
            content: content.to_owned(),
            engine: name,
            write,
            bytes_per_key: engine.account().bytes as f64 / (2 * pages) as f64,
            pages,
            changed: changed.len() as u64,
            matches,
            mismatches: pages - matches,
            false_positives,
            false_positive_rate: false_positives as f64 / pages as f64,
        }
    };
    engines.iter().zip(before).zip(after).map(figures).collect()
}

fn engines() -> Engines {
    [
        ("jhash2 (KSM)", Box::new(Cpu::new(KeyKind::Jhash2))),
        (
            "ECC (PageForge)",
            Box::new(PageForgeEngine::new(InProcess::new(1))),
        ),
        ("lines (ours)", Box::new(Cpu::new(KeyKind::Lines(Salt(1))))),
    ]
}

type Engine = (&'static str, Box<dyn MakesKeys>);
type Engines = [Engine; 3];

/// The keys of all pages, by each engine.
fn keys_of(engines: &mut Engines, arena: &Arena) -> Result<Vec<Vec<u64>>, Failure> {
    let pages: Vec<PageId> = (0..arena.pages() as u64).map(PageId).collect();
    let keys = |(_, engine): &mut Engine| {
        let keys = engine.keys(arena, &pages);
        keys.into_iter()
            .collect::<Result<Vec<_>, _>>()
            .map_err(Failure::from_error)
    };
    engines.iter_mut().map(keys).collect()
}

/// Writes so many words of a part of the pages; returns those that differ from what they were, as they were.
fn write_pages(arena: &Arena, words: usize) -> Vec<(usize, PageWords)> {
    let read = |page: usize| read(arena, page);
    let change = |page: usize| {
        let (old, other) = (read(page)?, read(pick(page, arena.pages()))?);
        let first = pick(page, PAGE_WORDS - words + 1);
        let mut new = old;
        let written = first..first + words;
        new[written.clone()].copy_from_slice(&other[written]);
        arena.write(page, &new);
        (new != old).then_some((page, old))
    };
    (0..arena.pages()).step_by(WRITTEN).filter_map(change).collect()
}

fn read(arena: &Arena, page: usize) -> Option<PageWords> {
    let view = arena.view(PageId(page as u64))?;
    Some(std::array::from_fn(|word| view[word].load(Ordering::Relaxed)))
}
