use super::record::HEADER;
use super::*;
use crate::control::{Explanation, MAX_PASS_PERIOD_MS, MAX_RESERVE, MAX_STOP_TARGET_US, Settings, Switch};
use crate::refusal::{MAX_TEXT, Reason, Refusal};
use crate::slot::Slot;
use proptest::prelude::*;

/// Copies into an aligned buffer, as a receiver has it.
fn with_parsed<T>(bytes: &[u8], check: impl FnOnce(Result<Message<'_>, Malformed>) -> T) -> T {
    let mut buffer = aligned_buffer();
    let len = bytes.len().min(MAX_MESSAGE);
    buffer.as_mut_bytes()[..len].copy_from_slice(&bytes[..len]);
    check(parse(&buffer.as_bytes()[..len]))
}

#[test]
fn a_batch_survives_the_wire() {
    let refs = [RefDelta { slot: 3, delta: -2 }];
    with_parsed(&encode_batch(9, &[1, 2], &[3], &[4], &refs), |message| {
        let Ok(Message::Batch(batch)) = message else {
            panic!("{message:?}")
        };
        assert_eq!(batch.epoch, 9);
        assert_eq!(
            batch.sightings().map(|k| k.unwrap().raw()).collect::<Vec<_>>(),
            [1, 2]
        );
        assert_eq!(batch.withdrawals().len(), 1);
        assert_eq!(batch.ambiguous().next().unwrap().unwrap().raw(), 4);
        assert_eq!(
            batch.refs().map(Result::unwrap).collect::<Vec<_>>(),
            [(Slot::try_new(3).unwrap(), -2)]
        );
    });
}

#[test]
fn a_batch_that_lies_about_its_counts_is_refused() {
    let mut bytes = encode_batch(9, &[1, 2], &[3], &[], &[]);
    bytes[HEADER + 8] = 200;
    with_parsed(&bytes, |m| {
        assert_eq!(m.unwrap_err(), Malformed::Length { got: bytes.len() })
    });
}

#[test]
fn other_versions_are_named() {
    let mut bytes = encode(Kind::Index, &[&7u64.to_le_bytes()]);
    bytes[4] = 99;
    with_parsed(&bytes, |m| assert_eq!(m.unwrap_err(), Malformed::Version(99)));
}

#[test]
fn questions_and_answers_survive_the_wire() {
    let name = Name::new("web");
    let settings = Settings {
        switch: Some(Switch::OffUnmerge),
        cpu_percent: None,
        reserve_pages: Some(MAX_RESERVE),
        pass_period_ms: Some(MAX_PASS_PERIOD_MS),
        stop_target_us: Some(MAX_STOP_TARGET_US),
    };
    let set = Set {
        serial: 7,
        name,
        settings,
    };
    with_parsed(&encode(Kind::Set, &[&set.body()]), |m| {
        assert!(matches!(m, Ok(Message::Set(got)) if got == set));
    });
    let explained = Explained {
        serial: u64::MAX,
        explanation: Explanation {
            foreign: 3,
            ..Explanation::default()
        },
        note: "n".repeat(MAX_TEXT),
    };
    with_parsed(&encode(Kind::Explained, &[&explained.body()]), |m| {
        assert!(matches!(m, Ok(Message::Explained(got)) if got == explained));
    });
    let not_done = NotDone {
        serial: 1,
        text: "no".into(),
    };
    with_parsed(&encode(Kind::NotDone, &[&not_done.body()]), |m| {
        assert!(matches!(m, Ok(Message::NotDone(got)) if got == not_done));
    });
    let refused = Refused {
        serial: 0,
        pages: 512,
        name,
        refusal: Refusal::new(Reason::Vfio, "device 0000:01:00.0", "detach it"),
    };
    with_parsed(&encode(Kind::Refused, &[&refused.body()]), |m| {
        assert!(matches!(m, Ok(Message::Refused(got)) if got == refused));
    });
}

#[test]
fn the_text_of_an_error_is_made_safe_as_all_texts_of_peers() {
    let text = format!("no\n\x1b[2Jplace{}", "x".repeat(2 * MAX_TEXT));
    with_parsed(&encode(Kind::Error, &[text.as_bytes()]), |m| {
        let Ok(Message::Error(text)) = m else {
            panic!("{m:?}")
        };
        assert!(
            text.starts_with("no  [2Jplacex") && text.len() == MAX_TEXT,
            "{text}"
        );
    });
    with_parsed(&encode(Kind::Error, &[b"no\xffplace"]), |m| {
        assert!(matches!(m, Ok(Message::Error(text)) if text == "no\u{fffd}place"));
    });
}

#[test]
fn a_goodbye_says_nothing_else() {
    with_parsed(&encode(Kind::Goodbye, &[]), |m| {
        assert!(matches!(m, Ok(Message::Goodbye)))
    });
    let more = encode(Kind::Goodbye, &[&[0]]);
    with_parsed(&more, |m| {
        assert_eq!(m.unwrap_err(), Malformed::Length { got: more.len() })
    });
}

#[test]
fn a_membership_that_is_taken_over_has_a_number() {
    with_parsed(&encode(Kind::TakeOver, &[&7u64.to_ne_bytes()]), |m| {
        assert!(matches!(m, Ok(Message::TakeOver(7))))
    });
    let less = encode(Kind::TakeOver, &[&[0; 4]]);
    with_parsed(&less, |m| {
        assert_eq!(m.unwrap_err(), Malformed::Length { got: less.len() })
    });
}

#[test]
fn settings_and_texts_out_of_range_are_refused() {
    let set = Set {
        serial: 7,
        name: Name::new("web"),
        settings: Settings {
            cpu_percent: Some(101),
            ..Settings::default()
        },
    };
    with_parsed(&encode(Kind::Set, &[&set.body()]), |m| {
        let expected = Malformed::Value {
            field: "cpu_percent",
            value: 101,
        };
        assert_eq!(m.unwrap_err(), expected);
    });
    let long = encode(Kind::NotDone, &[&[0; 8], &[b'x'; MAX_TEXT + 1]]);
    with_parsed(&long, |m| {
        assert_eq!(m.unwrap_err(), Malformed::Length { got: long.len() })
    });
}

proptest! {
    #[test]
    fn any_texts_of_a_refusal_are_taken_or_refused_by_length(
        lens in (0u16..1000, 0u16..1000), texts in proptest::collection::vec(any::<u8>(), 0..1100), reason in 0u32..20,
    ) {
        let refused = Refused {
            serial: 0, pages: 1, name: Name::new("x"), refusal: Refusal::new(Reason::Other, "", ""),
        };
        let mut body = refused.body();
        body[16..20].copy_from_slice(&reason.to_le_bytes());
        body[20..22].copy_from_slice(&lens.0.to_le_bytes());
        body[22..24].copy_from_slice(&lens.1.to_le_bytes());
        body.extend_from_slice(&texts);
        let fits = usize::from(lens.0) <= MAX_TEXT && usize::from(lens.1) <= MAX_TEXT
            && usize::from(lens.0) + usize::from(lens.1) == texts.len();
        let known = (1..16).contains(&reason);
        with_parsed(&encode(Kind::Refused, &[&body]), |m| {
            prop_assert_eq!(m.is_ok(), fits && known);
            Ok(())
        })?;
    }

    #[test]
    fn any_bytes_parse_or_fail_without_panic(body in proptest::collection::vec(any::<u8>(), 0..300), kind in 0u16..24) {
        let mut bytes = encode(Kind::Error, &[&body]);
        bytes[6..8].copy_from_slice(&kind.to_le_bytes());
        with_parsed(&bytes, |message| {
            if let Ok(Message::Batch(batch)) = message {
                batch.sightings().for_each(|_| ());
                batch.refs().for_each(|_| ());
            }
        });
    }

    #[test]
    fn any_header_parses_or_fails_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        with_parsed(&bytes, |_| ());
    }
}
