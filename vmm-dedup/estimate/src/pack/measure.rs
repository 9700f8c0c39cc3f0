//! A plan, carried out: each page is packed, kept, rebuilt and compared.

use super::clock::{Histogram, cpu, each_us};
use super::plans::{Planned, Worked};
use super::tries::Tries;
use super::work::Work;
use crate::error::Error;
use crate::packing::{Packed, Plan};
use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use vmm_dedup_packed::choice::{BASE_METADATA_BYTES, Record};
use vmm_dedup_packed::segments::{Memory, NoMemory, Owner, Source};
use vmm_dedup_packed::{
    Base, Class, Codecs, Keeping, Kind, LINES, Offers, Page, RebuildError, SegmentBytes, Segments, ZERO_PAGE,
};
use vmm_dedup_protocol::PAGE_SIZE;

/// Pages that are packed one after the other, and then rebuilt, so that asking for the time costs little.
const BATCH: usize = 64;

/// Segments that keep accounts, but no bytes.
struct Unkept;

impl Source for Unkept {
    type Memory = Self;

    fn take(&mut self, _: usize) -> Result<Self, NoMemory> {
        Ok(Self)
    }

    fn give_back(&mut self, _: Self) {}
}

impl Memory for Unkept {
    fn store(&mut self, _: usize, _: &[u8]) {}

    /// Nobody asks: nothing is moved, and what is compared is rebuilt from the bytes that were packed.
    fn load(&self, _: usize, _: usize) -> &[u8] {
        &[]
    }
}

/// A base on the way: how it is packed itself, if it is.
struct PackedBase {
    kind: Kind,
    length: usize,
    bytes: [u8; Class::MOST_BYTES],
    zero: bool,
}

/// A page on the way.
struct Job {
    number: u32,
    kind: Kind,
    page: Page,
    /// What it is packed with, if anything.
    base: Option<Page>,
    packed_base: Option<PackedBase>,
    bytes: [u8; Class::MOST_BYTES],
    /// Of what was packed; `None`: the codec refused.
    length: Option<usize>,
    /// What was made of it again.
    rebuilt: Page,
}

/// What came of a piece.
#[derive(Default)]
struct Sums {
    kinds: [OfKind; Kind::ALL.len()],
    pack: Duration,
    rebuild: Duration,
    refused: u64,
}

#[derive(Default)]
struct OfKind {
    pages: u64,
    payload: u64,
    rebuilds: Histogram,
}

impl Sums {
    fn add(&mut self, other: &Self) {
        for (sum, more) in self.kinds.iter_mut().zip(&other.kinds) {
            sum.pages += more.pages;
            sum.payload += more.payload;
            sum.rebuilds.add(&more.rebuilds);
        }
        self.pack += other.pack;
        self.rebuild += other.rebuild;
        self.refused += other.refused;
    }
}

/// Carries a plan out.
pub(super) fn measure(
    work: &Work<'_>,
    plan: &Planned,
    tries: &Tries,
    segment: SegmentBytes,
) -> Result<Plan, Error> {
    let start = Instant::now();
    let worked = Worked::out(&plan.rule, work.pages, tries);
    let segments = Mutex::new(Segments::new(Unkept, segment));
    let measuring = Measuring {
        work,
        tries,
        worked: &worked,
        packed_bases: plan.rule.keeping == Keeping::Packed,
        segments: &segments,
    };
    #[allow(clippy::cast_possible_truncation)] // 64
    let make = || Ok(Codecs::try_new(LINES as u32)?);
    let all = Mutex::new(Sums::default());
    work.on_all(make, |codecs, range| {
        let sums = measuring.piece(codecs, range)?;
        if let Ok(mut all) = all.lock() {
            all.add(&sums);
        }
        Ok(())
    })?;
    let sums = all.into_inner().unwrap_or_default();
    // A thread that panicked has ended this one as well.
    let accounts = segments.into_inner().map(|segments| segments.accounts());
    let accounts = accounts.unwrap_or_default();
    let pages = accounts.cells;
    let searches = plan.rule.kinds.iter().any(Kind::needs_base);
    let index = if searches {
        work.pages.index().bytes() as u64
    } else {
        0
    };
    let metadata = accounts.metadata_bytes
        + pages * size_of::<Record>() as u64
        + worked.bases() * u64::from(BASE_METADATA_BYTES)
        + index;
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let mut rebuilds = Histogram::default();
    sums.kinds.iter().for_each(|kind| rebuilds.add(&kind.rebuilds));
    Ok(Plan {
        name: plan.name,
        bases_kept: match plan.rule.keeping {
            Keeping::Whole => "whole",
            Keeping::Packed => "packed",
        },
        codecs: by_codec(&sums),
        pages,
        bases: worked.bases(),
        payload_bytes: accounts.payload_bytes,
        segment_bytes: accounts.bytes,
        fragmentation_bytes: accounts.fragmentation_bytes(),
        metadata_bytes: metadata,
        saved_bytes: signed(pages * PAGE_SIZE as u64) - signed(accounts.bytes) - signed(metadata),
        pack_us: each_us(sums.pack, pages),
        rebuild_us: each_us(sums.rebuild, pages),
        rebuild_p50_us: rebuilds.percentile_us(50),
        rebuild_p99_us: rebuilds.percentile_us(99),
        refused: sums.refused,
        seconds: start.elapsed().as_secs_f64(),
    })
}

fn by_codec(sums: &Sums) -> Vec<Packed> {
    let kinds = Kind::ALL.iter().zip(&sums.kinds);
    let used = kinds.filter(|(_, of_kind)| of_kind.pages > 0);
    used.map(|(kind, of_kind)| Packed {
        codec: kind.name(),
        pages: of_kind.pages,
        payload_bytes: of_kind.payload,
        rebuild_p50_us: of_kind.rebuilds.percentile_us(50),
        rebuild_p99_us: of_kind.rebuilds.percentile_us(99),
    })
    .collect()
}

/// What all threads have in common.
struct Measuring<'a> {
    work: &'a Work<'a>,
    tries: &'a Tries,
    worked: &'a Worked<'a>,
    packed_bases: bool,
    segments: &'a Mutex<Segments<Unkept>>,
}

impl Measuring<'_> {
    fn piece(&self, codecs: &mut Codecs, range: Range<u32>) -> Result<Sums, Error> {
        let (mut sums, mut jobs) = (Sums::default(), Vec::with_capacity(BATCH));
        for number in range {
            jobs.extend(self.job(codecs, number, &mut sums)?);
            if jobs.len() == BATCH {
                self.batch(codecs, &mut jobs, &mut sums);
            }
        }
        self.batch(codecs, &mut jobs, &mut sums);
        Ok(sums)
    }

    /// Reads what packing a page needs; `None` if it stays whole.
    fn job(&self, codecs: &mut Codecs, number: u32, sums: &mut Sums) -> Result<Option<Job>, Error> {
        let (pages, mut offers) = (self.work.pages, Offers::default());
        self.tries.offers(pages, number, &mut offers);
        let Some((offer, base)) = self.worked.choice(pages, &offers, number) else {
            return Ok(None);
        };
        let mut job = Job {
            number,
            kind: offer.kind,
            page: ZERO_PAGE,
            base: matches!(offer.base, Base::Zero).then_some(ZERO_PAGE),
            packed_base: None,
            bytes: [0; _],
            length: None,
            rebuilt: ZERO_PAGE,
        };
        let mut is_there = pages.read(number, &mut job.page)?;
        if let Some(base) = base {
            let mut page = ZERO_PAGE;
            is_there &= pages.read(base, &mut page)?;
            job.base = Some(page);
            if self.packed_bases {
                job.packed_base = self.packed_base(codecs, base, &page);
            }
        }
        if !is_there {
            sums.refused += 1;
            return Ok(None);
        }
        Ok(Some(job))
    }

    /// How a base is packed itself: without another one.
    fn packed_base(&self, codecs: &mut Codecs, number: u32, page: &Page) -> Option<PackedBase> {
        let mut offers = Offers::default();
        self.tries.offers(self.work.pages, number, &mut offers);
        let (offer, _) = self.worked.choice(self.work.pages, &offers, number)?;
        let zero = matches!(offer.base, Base::Zero);
        let mut bytes = [0; _];
        let length = codecs
            .of(offer.kind)
            .pack(page, zero.then_some(&ZERO_PAGE), &mut bytes)
            .ok()?;
        Some(PackedBase {
            kind: offer.kind,
            length,
            bytes,
            zero,
        })
    }

    /// Packs pages, rebuilds them, compares them, and keeps what came back as it was.
    fn batch(&self, codecs: &mut Codecs, jobs: &mut Vec<Job>, sums: &mut Sums) {
        let start = cpu();
        for job in jobs.iter_mut() {
            let packed = codecs
                .of(job.kind)
                .pack(&job.page, job.base.as_ref(), &mut job.bytes);
            job.length = packed.ok();
        }
        let packed = cpu();
        sums.pack += packed.saturating_sub(start);
        for job in jobs.iter_mut().filter(|job| job.length.is_some()) {
            let start = Instant::now();
            let rebuilt = rebuild(codecs, job);
            sums.kinds[job.kind.number()].rebuilds.count(start.elapsed());
            job.length = job.length.filter(|_| rebuilt.is_ok());
        }
        sums.rebuild += cpu().saturating_sub(packed);
        for job in jobs.drain(..) {
            let put = job.length.filter(|_| job.rebuilt == job.page).and_then(|length| {
                let mut segments = self.segments.lock().ok()?;
                let put = segments.put(&job.bytes[..length], Owner(job.number));
                put.ok().map(|_| length)
            });
            match put {
                Some(length) => {
                    sums.kinds[job.kind.number()].pages += 1;
                    sums.kinds[job.kind.number()].payload += length as u64;
                }
                None => sums.refused += 1,
            }
        }
    }
}

/// Rebuilds a page as a touch would.
fn rebuild(codecs: &mut Codecs, job: &mut Job) -> Result<(), RebuildError> {
    let bytes = &job.bytes[..job.length.unwrap_or(0)];
    let mut base_page;
    let base = match &job.packed_base {
        None => job.base.as_ref(),
        Some(base) => {
            base_page = ZERO_PAGE;
            let zero = base.zero.then_some(&ZERO_PAGE);
            let codec = codecs.of(base.kind);
            codec.rebuild(&base.bytes[..base.length], zero, &mut base_page)?;
            Some(&base_page)
        }
    };
    codecs.of(job.kind).rebuild(bytes, base, &mut job.rebuilt)
}
