use super::*;
use crate::fields::put_varint;
use crate::frame::{BLOCK, Block, Stretch};
use crate::said::Kind;
use proptest::prelude::*;

fn bytes_of(message: &Message<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    message.encode(7, &mut out);
    out
}

fn parsed(bytes: &[u8]) -> Result<Message<'_>, Malformed> {
    let header = Header::parse(bytes[..HEADER].try_into().unwrap())?;
    assert_eq!((header.len, header.number), (bytes.len() - HEADER, 7));
    Message::parse(header.kind, &bytes[HEADER..])
}

fn hello() -> Hello {
    Hello {
        lowest: 1,
        highest: 3,
        sources: Sources(Sources::FLAGS | Sources::MARKS),
        boot: [9; 16],
        run: 0x0102_0304_0506_0708,
        blocks: 8192,
    }
}

#[test]
fn every_message_comes_out_as_it_went_in() {
    let mut blocks = BlocksBuilder::default();
    blocks.push(Block::try_new(3).unwrap(), &[Said::new(Kind::Free); BLOCK]);
    blocks.push(Block::try_new(700).unwrap(), &NOTHING);
    let mut stretches = StretchesBuilder::default();
    stretches.push(Stretch::try_new(5, 1).unwrap());
    stretches.push(Stretch::try_new(1 << 39, 1 << 20).unwrap());
    let pressure = Pressure {
        some: 9999,
        full: 1,
        available: 2,
        total: 3,
        refaults: u64::MAX,
    };
    let all = [
        Message::Hello(hello()),
        Message::Begin {
            snapshot: 2,
            blocks: 8192,
        },
        Message::Blocks(blocks.list()),
        Message::End {
            snapshot: 2,
            all_marks: true,
        },
        Message::Marks {
            serial: 8,
            mark: Mark::Never,
            set: true,
            stretches: stretches.list(),
        },
        Message::Pressure(pressure),
        Message::Bye,
        Message::Welcome {
            version: 1,
            credit: 1 << 40,
        },
        Message::Grant { credit: 5 },
        Message::Resync,
        Message::Done { serial: 8 },
        Message::Refuse {
            reason: Refusal::Often,
            seconds: 300,
        },
    ];
    for message in all {
        let bytes = bytes_of(&message);
        assert_eq!(parsed(&bytes), Ok(message));
        // The first byte of each list is a payload's end, and Hello's end is not fixed.
        let is_fixed = !matches!(
            message,
            Message::Blocks(_) | Message::Marks { .. } | Message::Hello(_)
        );
        let longer = Message::parse(bytes[2], &[&bytes[HEADER..], &[0]].concat()).is_ok();
        assert_eq!(longer, !is_fixed, "{message:?}");
    }
    let walked: Vec<u32> = blocks.list().walk().map(|b| b.unwrap().block.number()).collect();
    assert_eq!(walked, [3, 700]);
    let walked: Vec<u64> = stretches.list().walk().map(|s| s.unwrap().len()).collect();
    assert_eq!(walked, [1, 1 << 20]);
}

#[test]
fn a_hello_of_a_later_release_is_understood() {
    let bytes = bytes_of(&Message::Hello(hello()));
    let longer = [&bytes[HEADER..], b"something new"].concat();
    assert_eq!(Message::parse(1, &longer), Ok(Message::Hello(hello())));
    assert_eq!(Message::parse(1, &longer[..HELLO - 1]), Err(Malformed::Short));
}

#[test]
fn stretches_that_touch_or_leave_the_address_space_are_refused() {
    let walk = |bytes: &[u8]| Stretches(bytes).walk().collect::<Result<Vec<_>, _>>();
    assert!(walk(&[5, 2, 1, 2]).is_ok());
    assert!(walk(&[5, 2, 0, 2]).is_err());
    assert!(walk(&[5, 0]).is_err());
    assert!(walk(&[0x85, 0, 2]).is_err(), "longer than needed");
    let huge = [0xff; 9];
    assert!(walk(&[&[5, 1], &huge[..], &[1, 1]].concat()).is_err());
}

#[test]
fn any_guest_of_16_gib_is_told_in_a_mebibyte() {
    // The worst: every frame differs from the next at random.
    let mut state = 1_u64;
    let values: Vec<Said> = (0..=u8::MAX).filter_map(Said::from_bits).collect();
    let mut random = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        values[(state >> 33) as usize % values.len()]
    };
    let (mut blocks, mut out, mut number) = (BlocksBuilder::default(), Vec::new(), 0);
    for block in 0..8192 {
        if !blocks.has_room() {
            Message::Blocks(blocks.list()).encode(number, &mut out);
            number += 1;
            blocks.clear();
        }
        blocks.push(Block::try_new(block).unwrap(), &std::array::from_fn(|_| random()));
    }
    Message::Blocks(blocks.list()).encode(number, &mut out);
    assert!(out.len() < 1 << 20, "{} bytes", out.len());
}

proptest! {
    #[test]
    fn what_is_parsed_has_one_form(kind in 0_u8..70, payload in prop::collection::vec(any::<u8>(), 0..200)) {
        let Ok(message) = Message::parse(kind, &payload) else { return Ok(()) };
        match message {
            Message::Blocks(list) => list.walk().for_each(drop),
            Message::Marks { stretches, .. } => stretches.walk().for_each(drop),
            _ => {}
        }
        let bytes = bytes_of(&message);
        if !matches!(message, Message::Hello(_)) {
            prop_assert_eq!(&bytes[HEADER..], &payload[..]);
        }
    }

    #[test]
    fn numbers_have_one_form(value in any::<u64>()) {
        let mut bytes = Vec::new();
        put_varint(value, &mut bytes);
        let mut fields = Fields(&bytes);
        prop_assert_eq!(fields.varint(), Ok(value));
        prop_assert!(fields.end().is_ok());
    }
}
