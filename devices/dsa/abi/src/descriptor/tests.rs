use super::*;

const A: DeviceAddress = DeviceAddress(0x1000);
const B: DeviceAddress = DeviceAddress(0x2000);

#[test]
fn opcode_and_flags_share_a_word() {
    let compare = Descriptor::compare(A, B, 4096).unwrap().with_flags(u32::MAX);
    assert_eq!((compare.opcode_code(), compare.flags()), (5, 0x00ff_ffff));
}

#[test]
fn a_completion_record_has_to_be_aligned() {
    let compare = Descriptor::compare(A, B, 4096).unwrap();
    assert_eq!(
        compare.with_completion(DeviceAddress(0x20)).unwrap().flags(),
        0x0c
    );
    assert_eq!(
        compare.with_completion(DeviceAddress(0x10)),
        Err(Error::CompletionAddress(0x10))
    );
}

#[test]
fn what_an_operation_has_of_its_own_lies_where_the_device_looks() {
    let bytes = |descriptor: Descriptor| descriptor.to_bytes();
    assert_eq!(
        bytes(Descriptor::crc(A, 256, 0x0102_0304).unwrap())[40..44],
        [4, 3, 2, 1]
    );
    let space = DeltaSpace {
        address: DeviceAddress(0x3000),
        max_bytes: 640,
    };
    let delta = Descriptor::create_delta(A, B, 4096, space)
        .unwrap()
        .with_expected(2);
    let raw = bytes(delta);
    assert_eq!((raw[40], raw[41], raw[56]), (0, 0x30, 2));
    assert_eq!(raw[48..52], 640u32.to_le_bytes());
    assert_eq!((delta.delta_space(), delta.expected()), (space, 2));
    let dualcast = Descriptor::dualcast(A, [B, DeviceAddress(0x5000)], 64).unwrap();
    assert_eq!(bytes(dualcast)[40..48], 0x5000u64.to_le_bytes());
    let compare = Descriptor::compare(A, B, 1).unwrap().with_expected(1);
    assert_eq!((bytes(compare)[40], compare.has(flags::CHECK_RESULT)), (1, true));
}

#[test]
fn operands_out_of_range_are_refused() {
    let space = DeltaSpace {
        address: DeviceAddress(0x3004),
        max_bytes: 640,
    };
    let error = Descriptor::create_delta(A, B, 4096, space).unwrap_err();
    assert_eq!(
        error.to_string(),
        "record address is 0x3004, which is not a multiple of 8"
    );
    let small = DeltaSpace {
        address: B,
        max_bytes: 72,
    };
    let space = DeltaSpace { address: B, ..space };
    let too_long = Descriptor::create_delta(A, B, MAX_DELTA_SOURCE + 8, space);
    let refused = [
        (too_long, Error::DeltaTooLong(MAX_DELTA_SOURCE + 8)),
        (Descriptor::create_delta(A, B, 4096, small), Error::DeltaSpace(72)),
        (Descriptor::apply_delta(A, 25, B, 4096), Error::DeltaRecord(25)),
        (Descriptor::compare(A, B, 0), Error::Empty),
        (Descriptor::batch(A, 1), Error::Batch(1)),
        (Descriptor::batch(DeviceAddress(32), 2), Error::ListAddress(32)),
        (
            Descriptor::dualcast(A, [B, DeviceAddress(0x3001)], 8),
            Error::Dualcast(0x2000, 0x3001),
        ),
    ];
    for (made, error) in refused {
        assert_eq!(made, Err(error));
    }
}

#[test]
fn what_is_left_begins_where_the_fault_was() {
    let compare = Descriptor::compare(A, B, 4096)
        .unwrap()
        .rest(96, 0, false)
        .unwrap();
    assert_eq!(
        (compare.source(), compare.destination(), compare.size()),
        (0x1060, 0x2060, 4000)
    );
    let crc = Descriptor::crc(A, 4096, 7).unwrap().rest(4095, 9, false).unwrap();
    assert_eq!((crc.source(), crc.size(), crc.crc_seed()), (0x1fff, 1, 9));
    let backwards = Descriptor::memmove(A, B, 4096)
        .unwrap()
        .rest(96, 0, true)
        .unwrap();
    assert_eq!((backwards.source(), backwards.size()), (0x1000, 4000));
    let fill = Descriptor::fill(0x0706_0504_0302_0100, A, 64).unwrap();
    let fill = fill.rest(11, 0, false).unwrap();
    assert_eq!(
        (fill.source(), fill.destination(), fill.size()),
        (0x0201_0007_0605_0403, 0x100b, 53)
    );
    assert_eq!(Descriptor::compare(A, B, 64).unwrap().rest(64, 0, false), None);
    assert_eq!(Descriptor::nop().rest(0, 0, false), None);
}

#[test]
fn blocks_have_their_tags_where_the_device_looks() {
    let tags = |reference, application| Tags {
        reference,
        mask: 0xf0f0,
        application,
    };
    let integrity = Integrity {
        source_flags: 0x80,
        destination_flags: 0x10,
        flags: 1,
        source: tags(0x0102_0304, 0x0506),
        destination: tags(0x0708_090a, 0x0b0c),
    };
    let update = Descriptor::integrity_update(A, B, 2 * 528, integrity).unwrap();
    let raw = update.to_bytes();
    assert_eq!(raw[40..43], [0x80, 0x10, 1]);
    // uapi/linux/idxd.h, "DIF update": tags of the source at 48, of the destination at 56.
    assert_eq!(raw[48..56], [4, 3, 2, 1, 0xf0, 0xf0, 6, 5]);
    assert_eq!(raw[56..64], [0x0a, 9, 8, 7, 0xf0, 0xf0, 0x0c, 0x0b]);
    assert_eq!(update.integrity(), integrity);
    let wrong = Descriptor::integrity_insert(A, B, 528, integrity);
    assert_eq!(
        wrong,
        Err(Error::Blocks {
            size: 528,
            block: 520
        })
    );
}

#[test]
fn what_is_left_of_blocks_has_the_next_ones_tags() {
    let integrity = Integrity::default();
    let left = |made: Result<Descriptor, Error>, done| made.unwrap().rest(done, 0, false).unwrap();
    let insert = left(Descriptor::integrity_insert(A, B, 1536, integrity), 1024);
    assert_eq!(
        (insert.source(), insert.destination(), insert.size()),
        (0x1400, 0x2000 + 2 * 520, 512)
    );
    assert_eq!(insert.integrity().destination.reference, 2);
    let strip = left(Descriptor::integrity_strip(A, B, 3 * 520, integrity), 520);
    assert_eq!((strip.source(), strip.destination()), (0x1208, 0x2200));
    let check = left(Descriptor::integrity_check(A, 3 * 520, integrity), 520);
    assert_eq!((check.source(), check.destination()), (0x1208, 0));
    assert_eq!(check.integrity().source.reference, 1);
}
