//! Records between service and store, beside their bytes as docs/protocol.md has them.
//!
//! The model reads a record by its offsets and says what its sender must have sent: nothing if it is malformed, else the
//! record in its one form, with reserved fields zero and texts made safe. The parser must refuse the same records, and what
//! it takes must come out in that form when it is encoded again. So a length that is checked against the wrong count, a
//! field read from the wrong place or a text that is let through as it came cannot stay unseen.

use vmm_dedup_protocol::control::{Explain, Explained, Explanation, NotDone, Set, Settings, Switch};
use vmm_dedup_protocol::message::{
    Batch, Hello, Kind, Malformed, Message, RefDelta, Role, Staged, Stats, StatsRequest, VERSION, Welcome,
    Wish, encode, encode_batch, parse,
};
use vmm_dedup_protocol::name::Name;
use vmm_dedup_protocol::refusal::{Reason, Refusal, Refused};
use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::{FromZeros, IntoBytes};

const HEADER: usize = 16;
const NAME: usize = 64;
const MOST_BYTES: usize = 64 << 10;
const MOST_TEXT: usize = 512;
/// What lies behind a record in memory. A parser that reads it finds counts that no record has.
const BEHIND: u64 = 0xdead_beef_dead_beef;

/// Input: a byte, and bytes. 0: those are a record. Else they are the body of a record of that kind, right in its header.
///
/// # Panics
/// If the parser does not do what the model says.
pub fn check(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else {
        return;
    };
    let record = match kind {
        0 => rest.to_vec(),
        kind => with_header(u16::from(*kind), rest),
    };
    let expected = canonical(&record);
    with_parsed(&record, |parsed, buffer| {
        assert_eq!(parsed.is_ok(), expected.is_some(), "{parsed:?}");
        let Ok(message) = parsed else { return };
        assert!(is_within(&message, buffer), "read beyond the record: {message:?}");
        check_items(&message, &record[HEADER..]);
        if let Some(again) = encoded_again(&message) {
            assert_eq!(Some(&again), expected.as_ref(), "{message:?}");
        }
    });
    let Some(expected) = expected else { return };
    // Its one form stays as it is.
    assert_eq!(canonical(&expected).as_ref(), Some(&expected));
    with_parsed(&expected, |parsed, _| assert!(parsed.is_ok(), "{parsed:?}"));
    // No part of a record is one.
    for len in [0, HEADER - 1, HEADER, record.len() / 2, record.len() - 1] {
        with_parsed(&record[..len.min(record.len() - 1)], |parsed, _| {
            assert!(parsed.is_err(), "{parsed:?}");
        });
    }
}

/// Parses bytes where a receiver has them: aligned, with other things behind.
fn with_parsed(record: &[u8], check: impl FnOnce(Result<Message<'_>, Malformed>, &[u8])) {
    let mut memory = vec![BEHIND; record.len() / 8 + 2];
    memory.as_mut_bytes()[..record.len()].copy_from_slice(record);
    let buffer = &memory.as_bytes()[..record.len()];
    check(parse(buffer), buffer);
}

fn with_header(kind: u16, body: &[u8]) -> Vec<u8> {
    let body = &body[..body.len().min(MOST_BYTES - HEADER)];
    let mut record = encode(Kind::Goodbye, &[body]);
    record[6..8].copy_from_slice(&kind.to_le_bytes());
    record
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(bytes.get(at..at + N)?);
    Some(u64::from_le_bytes(wide))
}

/// The model: the record in its one form; `None` if it is malformed.
fn canonical(record: &[u8]) -> Option<Vec<u8>> {
    let (header, body) = record.split_at_checked(HEADER)?;
    let len = number::<4>(header, 8)?;
    let is_ours = header[..4] == *b"vmd1" && header[4..6] == VERSION.to_le_bytes();
    if !is_ours || len != record.len() as u64 || record.len() > MOST_BYTES {
        return None;
    }
    let body = canonical_body(number::<2>(header, 6)?, body)?;
    let len = u32::try_from(HEADER + body.len()).ok()?;
    Some([&header[..8], &len.to_le_bytes(), &[0; 4], &body].concat())
}

fn canonical_body(kind: u64, body: &[u8]) -> Option<Vec<u8>> {
    let len = body.len();
    let of_size = |size: usize| len == size;
    let is_list = |item: usize, most: usize| len.is_multiple_of(item) && len / item <= most;
    let fits = match kind {
        1 => of_size(16 + NAME),
        2 => of_size(40),
        3 => batch_counts(body).is_some(),
        4 => is_list(4, 2048),
        5 => is_list(8, 512),
        6 => is_list(4, 512),
        7 => of_size(size_of::<ServiceStats>()),
        8 => of_size(8),
        9 => of_size(size_of::<Stats>()),
        // Number of a segment: 2^26 slots, 2^12 in each.
        10 | 11 | 21 | 22 => of_size(4) && number::<4>(body, 0)? < 1 << 14,
        12 | 17 | 23 => of_size(8),
        13 => return Some(safe(body)),
        14 => return canonical_refused(body),
        15 => return canonical_set(body),
        16 => of_size(24 + NAME),
        18 => return with_text(body, 25 * 8),
        19 => return with_text(body, 8),
        20 => len == 0,
        _ => false,
    };
    fits.then(|| body.to_vec())
}

/// A text at the end, of at most [`MOST_TEXT`] bytes.
fn with_text(body: &[u8], start: usize) -> Option<Vec<u8>> {
    let (head, text) = body.split_at_checked(start)?;
    (text.len() <= MOST_TEXT).then(|| [head, &safe(text)].concat())
}

/// A text as it is taken in: control characters are spaces, what is no UTF-8 is a replacement character, and no more than fits.
fn safe(text: &[u8]) -> Vec<u8> {
    let mut safe = String::new();
    for character in String::from_utf8_lossy(text).chars() {
        let character = if character.is_control() { ' ' } else { character };
        if safe.len() + character.len_utf8() > MOST_TEXT {
            break;
        }
        safe.push(character);
    }
    safe.into_bytes()
}

fn canonical_refused(body: &[u8]) -> Option<Vec<u8>> {
    let (head, texts) = body.split_at_checked(24 + NAME)?;
    let reason = number::<4>(head, 16)?;
    let [detail, lift] = [number::<2>(head, 20)?, number::<2>(head, 22)?].map(usize::try_from);
    let (detail, lift) = (detail.ok()?, lift.ok()?);
    let fits = detail <= MOST_TEXT && lift <= MOST_TEXT && texts.len() == detail + lift;
    if !fits || !(1..=15).contains(&reason) {
        return None;
    }
    let (detail, lift) = (safe(&texts[..detail]), safe(&texts[detail..]));
    let lens = [&detail, &lift].map(|text| u16::try_from(text.len()).map(u16::to_le_bytes));
    let [detail_len, lift_len] = lens;
    Some(
        [
            &head[..20],
            &detail_len.ok()?,
            &lift_len.ok()?,
            &head[24..],
            &detail,
            &lift,
        ]
        .concat(),
    )
}

fn canonical_set(body: &[u8]) -> Option<Vec<u8>> {
    let in_range = |at: usize, most: u64| number::<4>(body, at).is_some_and(|value| value <= most);
    let fits = body.len() == 32 + NAME
        && in_range(8, 3)
        && in_range(12, 100)
        && in_range(16, 1 << 24)
        && in_range(20, 3_600_000)
        && in_range(24, 100_000);
    fits.then(|| [&body[..28], &[0; 4], &body[32..]].concat())
}

/// Sightings, withdrawals, ambiguous keys and references, in the order of their parts.
fn batch_counts(body: &[u8]) -> Option<[usize; 4]> {
    let count = |at: usize| usize::try_from(number::<4>(body, at)?).ok();
    let counts = [count(8)?, count(12)?, count(20)?, count(16)?];
    let fits = counts.iter().all(|count| *count <= 2048) && counts[2] <= 512;
    (fits && body.len() == 24 + 8 * counts.iter().sum::<usize>()).then_some(counts)
}

/// Whether what a message refers to lies in the record.
fn is_within(message: &Message<'_>, buffer: &[u8]) -> bool {
    let part = match message {
        Message::BatchReply(list) | Message::Published(list) => list.as_bytes(),
        Message::Publish(list) => list.as_bytes(),
        Message::Report(stats) => stats.as_bytes(),
        Message::Stats(stats) => stats.as_bytes(),
        _ => return true,
    };
    let (part, buffer) = (part.as_ptr_range(), buffer.as_ptr_range());
    part.start == part.end || (buffer.start <= part.start && part.end <= buffer.end)
}

/// Items of lists, which are looked at one by one.
fn check_items(message: &Message<'_>, body: &[u8]) {
    let words = |start: usize, count: usize| -> Vec<u64> {
        let word = |n: usize| number::<8>(body, start + 8 * n).expect("counted");
        (0..count).map(word).collect()
    };
    match message {
        Message::Batch(batch) => {
            let [sightings, withdrawals, ambiguous, refs] = batch_counts(body).expect("a batch");
            let mut start = 24;
            for (count, keys) in [
                (sightings, keys_of(batch.sightings())),
                (withdrawals, keys_of(batch.withdrawals())),
                (ambiguous, keys_of(batch.ambiguous())),
            ] {
                let raw = words(start, count);
                let expected: Vec<_> = raw.iter().map(|raw| (raw >> 48 == 0).then_some(*raw)).collect();
                assert_eq!(keys, expected);
                start += 8 * count;
            }
            let expected: Vec<_> = words(start, refs).into_iter().map(reference).collect();
            let parsed: Vec<_> = batch
                .refs()
                .map(|change| change.ok().map(|(slot, delta)| (slot.number(), delta)))
                .collect();
            assert_eq!(parsed, expected);
        }
        Message::Publish(list) => {
            for raw in *list {
                let (wish, gap, key) = (raw >> 62, raw >> 48 & 0x3fff, raw & ((1 << 48) - 1));
                let staged = Staged::try_new(*raw);
                assert_eq!(staged.is_ok(), wish < 3 && gap <= 7, "{raw:#x}");
                let Ok(staged) = staged else { continue };
                assert_eq!((staged.key.raw(), u64::from(staged.gap)), (key, gap));
                assert_eq!(staged.raw(), *raw);
            }
        }
        _ => {}
    }
}

fn keys_of(keys: impl Iterator<Item = Result<vmm_dedup_protocol::key::Key, Malformed>>) -> Vec<Option<u64>> {
    keys.map(|key| key.ok().map(|key| key.raw())).collect()
}

/// A slot's number in the lower half, a change in the upper one.
fn reference(word: u64) -> Option<(u32, i32)> {
    let half = |shift: u32| u32::try_from(word >> shift & u64::from(u32::MAX));
    let (slot, delta) = (half(0).ok()?, half(32).ok()?.cast_signed());
    (slot < 1 << 26).then_some((slot, delta))
}

/// The record that a message would be sent as; `None` for a batch with items that nobody can send.
fn encoded_again(message: &Message<'_>) -> Option<Vec<u8>> {
    Some(match message {
        Message::Hello(hello) => encode(Kind::Hello, &[hello.as_bytes()]),
        Message::Welcome(welcome) => encode(Kind::Welcome, &[welcome.as_bytes()]),
        Message::Batch(batch) => batch_again(batch)?,
        Message::BatchReply(list) => encode(Kind::BatchReply, &[list.as_bytes()]),
        Message::Publish(list) => encode(Kind::Publish, &[list.as_bytes()]),
        Message::Published(list) => encode(Kind::Published, &[list.as_bytes()]),
        Message::Report(stats) => encode(Kind::Report, &[stats.as_bytes()]),
        Message::StatsRequest(request) => encode(Kind::StatsRequest, &[request.as_bytes()]),
        Message::Stats(stats) => encode(Kind::Stats, &[stats.as_bytes()]),
        Message::Segment(number) => encode(Kind::Segment, &[number.as_bytes()]),
        Message::SegmentRetired(number) => encode(Kind::SegmentRetired, &[number.as_bytes()]),
        Message::Evacuated(number) => encode(Kind::Evacuated, &[number.as_bytes()]),
        Message::Released(number) => encode(Kind::Released, &[number.as_bytes()]),
        Message::Index(bytes) => encode(Kind::Index, &[bytes.as_bytes()]),
        Message::Error(text) => encode(Kind::Error, &[text.as_bytes()]),
        Message::Refused(refused) => encode(Kind::Refused, &[&refused.body()]),
        Message::Set(set) => encode(Kind::Set, &[&set.body()]),
        Message::Explain(explain) => encode(Kind::Explain, &[explain.as_bytes()]),
        Message::Done(serial) => encode(Kind::Done, &[serial.as_bytes()]),
        Message::Explained(explained) => encode(Kind::Explained, &[&explained.body()]),
        Message::NotDone(not_done) => encode(Kind::NotDone, &[&not_done.body()]),
        Message::Goodbye => encode(Kind::Goodbye, &[]),
        Message::TakeOver(membership) => encode(Kind::TakeOver, &[membership.as_bytes()]),
    })
}

fn batch_again(batch: &Batch<'_>) -> Option<Vec<u8>> {
    let keys = |keys: Vec<Option<u64>>| keys.into_iter().collect::<Option<Vec<_>>>();
    let refs = batch.refs().map(|change| {
        let (slot, delta) = change.ok()?;
        let slot = slot.number();
        Some(RefDelta { slot, delta })
    });
    Some(encode_batch(
        batch.epoch,
        &keys(keys_of(batch.sightings()))?,
        &keys(keys_of(batch.withdrawals()))?,
        &keys(keys_of(batch.ambiguous()))?,
        &refs.collect::<Option<Vec<_>>>()?,
    ))
}

/// A message of each kind.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let name = Name::new("web-1");
    let page = vmm_dedup_protocol::key::Key::try_new(0x8000_1234_5678).expect("48 bits");
    let staged = Staged {
        key: page,
        gap: 3,
        wish: Wish::Series,
    };
    let refs = [
        RefDelta { slot: 3, delta: -2 },
        RefDelta {
            slot: 1 << 25,
            delta: 9,
        },
    ];
    let explanation = Explanation {
        pages: 512,
        shared: 500,
        ..Explanation::default()
    };
    let records = [
        (
            "hello",
            encode(
                Kind::Hello,
                &[Hello::new(Role::Service, "web-1", 4096).as_bytes()],
            ),
        ),
        (
            "welcome",
            encode(
                Kind::Welcome,
                &[Welcome {
                    salt: 1,
                    incarnation: 2,
                    membership: 3,
                    index_bytes: 4096,
                    secure: 0,
                }
                .as_bytes()],
            ),
        ),
        ("batch", encode_batch(9, &[1, 2], &[3], &[4, 1 << 47], &refs)),
        ("batch_reply", encode(Kind::BatchReply, &[[0u32, 7].as_bytes()])),
        ("publish", encode(Kind::Publish, &[[staged.raw(), 5].as_bytes()])),
        (
            "published",
            encode(Kind::Published, &[[3u32, u32::MAX].as_bytes()]),
        ),
        (
            "report",
            encode(Kind::Report, &[ServiceStats::new_zeroed().as_bytes()]),
        ),
        (
            "stats_request",
            encode(
                Kind::StatsRequest,
                &[StatsRequest { from: 1, reserved: 0 }.as_bytes()],
            ),
        ),
        ("stats", encode(Kind::Stats, &[Stats::new_zeroed().as_bytes()])),
        ("segment", encode(Kind::Segment, &[16_383u32.as_bytes()])),
        (
            "segment_retired",
            encode(Kind::SegmentRetired, &[0u32.as_bytes()]),
        ),
        ("evacuated", encode(Kind::Evacuated, &[16_383u32.as_bytes()])),
        ("released", encode(Kind::Released, &[0u32.as_bytes()])),
        ("index", encode(Kind::Index, &[4096u64.as_bytes()])),
        (
            "error",
            encode(Kind::Error, &["no \u{1b}[2J place\u{fc}".as_bytes()]),
        ),
        ("refused", {
            let refusal = Refusal::new(Reason::Vfio, "device 0000:01:00.0", "detach it");
            encode(
                Kind::Refused,
                &[&Refused {
                    serial: 0,
                    pages: 512,
                    name,
                    refusal,
                }
                .body()],
            )
        }),
        ("set", {
            let settings = Settings {
                switch: Some(Switch::OffUnmerge),
                cpu_percent: Some(100),
                pass_period_ms: Some(1000),
                ..Settings::default()
            };
            encode(
                Kind::Set,
                &[&Set {
                    serial: 7,
                    name,
                    settings,
                }
                .body()],
            )
        }),
        (
            "explain",
            encode(
                Kind::Explain,
                &[Explain {
                    serial: 1,
                    gpa_start: 0,
                    gpa_len: 4096,
                    name,
                }
                .as_bytes()],
            ),
        ),
        ("done", encode(Kind::Done, &[7u64.as_bytes()])),
        (
            "explained",
            encode(
                Kind::Explained,
                &[&Explained {
                    serial: 1,
                    explanation,
                    note: "n".into(),
                }
                .body()],
            ),
        ),
        (
            "not_done",
            encode(
                Kind::NotDone,
                &[&NotDone {
                    serial: 1,
                    text: "no such VM".into(),
                }
                .body()],
            ),
        ),
        ("goodbye", encode(Kind::Goodbye, &[])),
        ("take_over", encode(Kind::TakeOver, &[3u64.as_bytes()])),
    ];
    // At the limits of lists and texts, and one beyond.
    let keys = |count: usize| vec![3u64; count];
    let limits = [
        (
            "batch_longest",
            encode_batch(1, &keys(2048), &keys(2048), &keys(512), &[]),
        ),
        ("batch_too_many_keys", encode_batch(1, &keys(2049), &[], &[], &[])),
        (
            "batch_too_many_ambiguous",
            encode_batch(1, &[], &[], &keys(513), &[]),
        ),
        ("publish_longest", encode(Kind::Publish, &[keys(512).as_bytes()])),
        ("publish_too_many", encode(Kind::Publish, &[keys(513).as_bytes()])),
        (
            "not_done_longest",
            encode(Kind::NotDone, &[&[0; 8], &[b'x'; MOST_TEXT]]),
        ),
        (
            "not_done_too_long",
            encode(Kind::NotDone, &[&[0; 8], &[b'x'; MOST_TEXT + 1]]),
        ),
    ];
    let of_kind =
        |(name, record): &(&'static str, Vec<u8>)| (*name, [&record[6..7], &record[HEADER..]].concat());
    let whole = ("whole_record", [&[0], records[2].1.as_slice()].concat());
    let all = records.iter().chain(&limits).map(of_kind);
    all.chain([whole]).collect()
}
