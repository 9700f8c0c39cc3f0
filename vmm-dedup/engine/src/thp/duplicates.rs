//! Looking at huge pages: what of them repeats, and what of that to ask the store about.
//!
//! Huge pages are not protected (a write would split them), so their keys are read again and again, with a growing
//! pause. SmartMD's repetition monitor (slide 12) tells a subpage that is likely to have a twin: its key occurs twice in
//! this VM (the counting filter), or names several pages of the trust domain (the index). That costs the store nothing,
//! so it is known of hot pages too: it is the memory given up for their speed.
//!
//! What the filter cannot know is a twin in another VM that nobody has asked about either. So of a huge page which the
//! policy would split, a quarter of the subpages is reported to the store, and those that look repeated; if twins turn
//! up, the rest follows. A huge page of unique content costs a quarter of the sightings. The quarter is chosen by content,
//! not by place: two VMs that hold the same pages at different places report the same ones.

use crate::account::Account;
use crate::lookup::keys::{KeyReader, PREFETCH};
use crate::lookup::request::Keyed;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::page_state::{Backing, Known};
use crate::memory::thp_state::{Asked, Folds, SAMPLING, fold, quarter_of};
use crate::store::session::Session;
use crate::sys::guest;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE};
use crate::thp::monitor::Monitor;
use vmm_dedup_protocol::key::Key;

/// A subpage that was read.
struct Subpage {
    page: Page,
    quarter: usize,
    key: Key,
    zero: bool,
}

/// A look at a huge page.
pub(crate) struct Look {
    chunk: usize,
    read: Vec<Subpage>,
    /// All of it was read.
    whole: bool,
    /// Subpages that must have a twin for it to be split, if that is to be asked now.
    wanted: Option<u32>,
}

/// What follows from a look at a huge page.
#[derive(Debug)]
pub(crate) enum Judgement {
    /// Nothing for now.
    Stay,
    /// It is to be split, twins or not.
    Split,
    /// Twins of these are to be looked for: pages of zeros, and others with their keys.
    Ask(Keyed),
}

/// Whether pages with this key are of the quarter that is reported.
pub(crate) fn is_sampled(key: Key) -> bool {
    key.raw().is_multiple_of(SAMPLING as u64)
}

/// Looks at a huge page that is due.
pub(crate) fn look(
    map: &mut PageMap,
    session: &Session,
    account: &mut Account,
    monitor: &Monitor,
    chunk: usize,
) -> Look {
    let policy = monitor.policy();
    if policy.counts_repetition() {
        map.count_repetition();
    }
    let whole = map.chunk(chunk).thp.looks_at_all();
    let read = read_subpages(map, session, account, chunk);
    let mut folds: Folds = [None; SAMPLING];
    for subpage in &read {
        let folded = &mut folds[subpage.quarter];
        *folded = Some(fold(folded.unwrap_or(0), subpage.key));
    }
    let unchanged = map.looked(chunk, &folds);
    read.iter()
        .for_each(|subpage| map.key_in_huge(subpage.page, subpage.key));
    let counted = |quarter: &usize| folds[*quarter].is_some() && policy.counts_repetition();
    for quarter in (0..SAMPLING).filter(counted) {
        let repeats = |s: &&Subpage| s.quarter == quarter && looks_repeated(map, session, s);
        let repeated = read.iter().filter(repeats).count();
        map.note_repeated(chunk, quarter, repeated);
    }
    let state = &map.chunk(chunk).thp;
    let known = state.samples > 0 || !policy.watches_access();
    Look {
        chunk,
        read,
        whole,
        wanted: monitor.twins_wanted(state).filter(|_| unchanged && known),
    }
}

impl Look {
    /// Whether all of the huge page seems to be zero, and may be given up.
    pub(crate) fn all_zero(&self) -> bool {
        let all = self.whole && self.read.len() == CHUNK_PAGES;
        self.wanted.is_some() && all && self.read.iter().all(|s| s.zero)
    }

    /// Draws the conclusions. `managed`: each shared page is protected for itself, so that the guest has small ones.
    pub(crate) fn judge(
        self,
        map: &mut PageMap,
        session: &Session,
        monitor: &Monitor,
        managed: bool,
        pass: u64,
    ) -> Judgement {
        let Some(wanted) = self.wanted else {
            return Judgement::Stay;
        };
        if wanted == 0 {
            return Judgement::Split; // from the next pass on it is tracked like other small pages
        }
        let state = map.chunk(self.chunk);
        let repetitive = state.thp.repetition() >= wanted;
        let asked = state.thp.asked;
        let all =
            state.twins.split || repetitive || !monitor.policy().counts_repetition() || asked == Asked::Whole;
        if (all || asked == Asked::Nothing) && !self.whole {
            // Only what was read just now may be asked about.
            map.look_again(self.chunk);
            return Judgement::Stay;
        }
        map.note_asked(self.chunk, if all { Asked::Whole } else { Asked::Sample });
        // What repeats in all of its pages may share a huge page of the store, probes and all.
        let probes = all && !managed;
        let mut ask = Keyed::default();
        for subpage in &self.read {
            let may = probes || !monitor.probes().include(map, self.chunk, subpage.page);
            let worth = all || is_sampled(subpage.key) || looks_repeated(map, session, subpage);
            match subpage.zero {
                _ if !(may && worth && may_ask(map, pass, subpage.page)) => {}
                true => ask.zeros.push(subpage.page),
                false => ask.keys.push((subpage.page, subpage.key)),
            }
        }
        Judgement::Ask(ask)
    }
}

fn read_subpages(map: &PageMap, session: &Session, account: &mut Account, at: usize) -> Vec<Subpage> {
    let quarters = map.chunk(at).thp.quarters();
    let pages = map.chunk_at(at).pages.clone();
    let mut reader = KeyReader {
        memory: map.memory(),
        salt: session.salt(),
        account,
    };
    let mut read = Vec::with_capacity(pages.len());
    for (page, subpage) in pages.zip(0..) {
        let quarter = quarter_of(subpage);
        if quarters[quarter] && !map.is_withheld(page) {
            guest::prefetch_key_lines(map.memory().address(page) + PREFETCH * PAGE_SIZE);
            let (key, zero) = reader.read(page);
            read.push(Subpage {
                page,
                quarter,
                key,
                zero,
            });
        }
    }
    read
}

fn looks_repeated(map: &PageMap, session: &Session, subpage: &Subpage) -> bool {
    let marked = || {
        let index = session.index();
        index.is_some_and(|index| index.line(subpage.key).is_some())
    };
    subpage.zero || map.repetition(subpage.key) > 1 || marked()
}

/// Whether a subpage's twin is to be looked for.
fn may_ask(map: &PageMap, pass: u64, page: Page) -> bool {
    let state = map.state(page);
    match (state.backing, state.known) {
        (Backing::Private, Known::Keyed(_)) => true,
        (Backing::Private, Known::Pinned(retry)) => retry.is_due(pass),
        _ => false,
    }
}
