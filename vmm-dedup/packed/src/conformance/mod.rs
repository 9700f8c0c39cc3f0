//! What codecs must do, as a suite that each one's tests run: [`codec()`].
//!
//! The oracle is the page itself. Edge pages are packed with each edge base and without, rebuilt and compared; what was packed
//! is then cut short, flipped and made up, which may rebuild some page or end in an error, and nothing else.

mod pages;

pub use pages::{near_copy, random, text};

use crate::codec::{Codec, PackError, RebuildError};
use crate::page::{LINE_BYTES, LINES, Page, ZERO_PAGE};
use vmm_dedup_protocol::PAGE_SIZE;

/// Bytes around the room that a codec is given, which it must not touch.
const GUARD: usize = 64;
/// What they hold.
const GUARD_BYTE: u8 = 0xa5;

/// Runs the suite on codecs as `make` makes them.
///
/// # Panics
/// If the codec does not conform.
pub fn codec(make: &mut dyn FnMut() -> Box<dyn Codec>) {
    let mut codec = make();
    edge_pages_come_back(codec.as_mut());
    near_copies_come_back_and_are_small(codec.as_mut());
    too_little_room_is_refused(codec.as_mut());
    missing_bases_are_refused(codec.as_mut());
    hostile_bytes_do_no_harm(codec.as_mut());
    what_failed_leaves_no_trace(codec.as_mut(), make().as_mut());
}

/// The pages that have broken codecs before, by name.
fn edges() -> Vec<(&'static str, Page)> {
    let mut one_byte = random(3);
    one_byte[2049] ^= 1;
    let mut last_byte = ZERO_PAGE;
    last_byte[PAGE_SIZE - 1] = 1;
    let every_line = std::array::from_fn(|i| random(3)[i] ^ u8::from(i % LINE_BYTES == 0));
    vec![
        ("zero", ZERO_PAGE),
        ("ones", [0xff; PAGE_SIZE]),
        ("random", random(3)),
        ("random, one byte off", one_byte),
        ("random, all lines different", every_line),
        ("one last byte", last_byte),
        ("text", text(4)),
        ("ramp", std::array::from_fn(|i| i.to_le_bytes()[0])),
        (
            "half random",
            std::array::from_fn(|i| random(5)[i] * u8::from(i < 2048)),
        ),
    ]
}

/// Packs into a guarded buffer; `None` if the codec says that the page is none for it.
fn packed(codec: &mut dyn Codec, page: &Page, base: Option<&Page>, room: usize) -> Option<Vec<u8>> {
    let mut buffer = vec![GUARD_BYTE; GUARD + room + GUARD];
    let result = codec.pack(page, base, &mut buffer[GUARD..GUARD + room]);
    let guards = [&buffer[..GUARD], &buffer[GUARD + room..]].concat();
    assert!(
        guards.iter().all(|byte| *byte == GUARD_BYTE),
        "{} wrote outside",
        codec.kind()
    );
    match result {
        Ok(length) => {
            assert!(length <= room, "{} says {length} of {room} bytes", codec.kind());
            Some(buffer[GUARD..GUARD + length].to_vec())
        }
        Err(PackError::TooLarge { .. } | PackError::TooManyLines { .. }) => None,
        Err(error) => panic!("{}: {error}", codec.kind()),
    }
}

/// Holds a codec to the page that it packed, whatever that is. Returns the packed bytes if it was packed.
///
/// # Panics
/// If another page comes back, or none.
pub fn round_trip(codec: &mut dyn Codec, page: &Page, base: Option<&Page>) -> Option<usize> {
    let bytes = packed(codec, page, base, PAGE_SIZE)?;
    let mut rebuilt = [GUARD_BYTE; PAGE_SIZE];
    let result = codec.rebuild(&bytes, base, &mut rebuilt);
    assert_eq!(result, Ok(()), "{}", codec.kind());
    assert!(rebuilt == *page, "{} made another page", codec.kind());
    Some(bytes.len())
}

fn edge_pages_come_back(codec: &mut dyn Codec) {
    for (_, page) in edges() {
        for (_, base) in edges() {
            round_trip(codec, &page, Some(&base));
        }
        if !codec.kind().needs_base() {
            round_trip(codec, &page, None);
        }
    }
}

fn near_copies_come_back_and_are_small(codec: &mut dyn Codec) {
    for lines in [0, 1, 2, 8, 16, 31, 32, 63, LINES] {
        let base = random(11);
        let page = near_copy(&base, lines, 12);
        let length = round_trip(codec, &page, Some(&base));
        // Random lines cannot be smaller than they are. Beyond them a codec with a base needs a few bytes, and LZ4, which looks
        // the less often the longer it finds nothing, some of the lines that are equal.
        let most = lines * (LINE_BYTES + 16) + 64;
        let is_small = length.is_none_or(|length| length <= most);
        assert!(
            is_small || !codec.kind().needs_base(),
            "{}: {length:?} bytes for {lines} lines",
            codec.kind()
        );
        let is_packed = length.is_some() || lines > 16;
        assert!(is_packed || !codec.kind().needs_base(), "{lines} lines");
    }
}

fn too_little_room_is_refused(codec: &mut dyn Codec) {
    let (base, page) = (text(20), near_copy(&text(20), 3, 21));
    let whole = packed(codec, &page, Some(&base), PAGE_SIZE).expect("text is packed");
    for room in [0, 1, 7, 8, whole.len() / 2, whole.len() - 1] {
        let packed = packed(codec, &page, Some(&base), room);
        assert_eq!(packed, None, "{} packed into {room} bytes", codec.kind());
    }
}

fn missing_bases_are_refused(codec: &mut dyn Codec) {
    let (kind, page) = (codec.kind(), text(30));
    let packed = codec.pack(&page, None, &mut [0; PAGE_SIZE]);
    let rebuilt = codec.rebuild(&[0; 100], None, &mut { ZERO_PAGE });
    let (no_base, no_base_again) = (PackError::NoBase { kind }, RebuildError::NoBase { kind });
    assert_eq!(packed == Err(no_base), kind.needs_base());
    assert_eq!(rebuilt == Err(no_base_again), kind.needs_base());
}

fn hostile_bytes_do_no_harm(codec: &mut dyn Codec) {
    let base = text(40);
    let page = near_copy(&base, 5, 41);
    let whole = packed(codec, &page, Some(&base), PAGE_SIZE).expect("text is packed");
    let mut rebuild = |bytes: &[u8]| {
        // A page between guards, as in a row of pages.
        let mut pages = vec![[GUARD_BYTE; PAGE_SIZE]; 3];
        let result = codec.rebuild(bytes, Some(&base), &mut pages[1]);
        let guards = [&pages[0], &pages[2]];
        assert!(
            guards
                .iter()
                .all(|page| page.iter().all(|byte| *byte == GUARD_BYTE))
        );
        (result, pages[1])
    };
    for length in 0..whole.len() {
        let (result, rebuilt) = rebuild(&whole[..length]);
        assert!(
            result.is_err() || rebuilt == page,
            "{length} of {} bytes",
            whole.len()
        );
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        rebuild(&flipped).0.ok();
    }
    for seed in 0..2000 {
        let made_up = random(seed);
        let length = usize::from(made_up[0]) * 16 + usize::from(made_up[1]) % 16;
        rebuild(&made_up[2..length.max(2)]).0.ok();
    }
    for byte in [0, 1, 0x0f, 0x10, 0x7f, 0x80, 0xf0, 0xff] {
        rebuild(&[byte; PAGE_SIZE]).0.ok();
    }
    // More bytes than a page has.
    let (result, _) = rebuild(&[&whole[..], &[0; 2 * PAGE_SIZE]].concat());
    assert!(result.is_err());
}

/// After all that, a codec packs as a new one does.
fn what_failed_leaves_no_trace(used: &mut dyn Codec, fresh: &mut dyn Codec) {
    let base = text(50);
    let page = near_copy(&base, 4, 51);
    used.rebuild(&[0xff; 300], Some(&base), &mut { ZERO_PAGE }).ok();
    used.pack(&page, Some(&base), &mut [0; 9]).ok();
    let bytes = packed(used, &page, Some(&base), PAGE_SIZE);
    assert_eq!(bytes, packed(fresh, &page, Some(&base), PAGE_SIZE));
}
