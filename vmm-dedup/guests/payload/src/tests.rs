//! Both ends of each contract in one place: the guest's own modules run here against the host's.

use std::io::Write;
use std::time::Duration;

use crate::{
    Access, ConfigError, Console, Device, Idle, PayloadConfig, Report, Rewrite, WaitError, WorkingSet,
};

#[path = "../guest/content.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::cast_possible_truncation,
    clippy::large_stack_arrays
)]
mod content;
#[path = "../guest/params.rs"]
#[allow(unreachable_pub)]
mod params;

use params::{BadWord, Params};

#[test]
fn default_config_and_empty_command_line_mean_the_same() {
    let line = PayloadConfig::default().command_line();

    assert_eq!(Params::parse(&line), Ok(Params::DEFAULT));
    assert_eq!(Params::parse(""), Ok(Params::DEFAULT));
}

#[test]
fn every_setting_arrives_in_the_guest() {
    let line = PayloadConfig::default()
        .seed(7)
        .private_mib(32)
        .zero_mib(16)
        .common_mib(3)
        .common_seed(9)
        .own_every(3)
        .copies(2)
        .ws_pages(4096)
        .ws_area(WorkingSet::Common)
        .rate(20_000)
        .reads(4)
        .seconds(10)
        .max_writes(99)
        .rewrite(Rewrite::Restore)
        .rest_ms(50)
        .report_ms(100)
        .tsc_khz(2_100_000)
        .idle(Idle::Spin)
        .device(Device::PageForge)
        .command_line();

    let expected = Params {
        seed: 7,
        private_mib: 32,
        zero_mib: 16,
        common_mib: 3,
        common_seed: 9,
        own_every: 3,
        copies: 2,
        ws_pages: 4096,
        ws_area: params::WorkingSet::Common,
        rate: 20_000,
        reads: 4,
        seconds: 10,
        max_writes: 99,
        rewrite: params::Rewrite::Restore,
        rest_ms: 50,
        report_ms: 100,
        tsc_khz: 2_100_000,
        spin: true,
        device: params::Device::PageForge,
    };
    assert_eq!(Params::parse(&line), Ok(expected));
}

#[test]
fn guest_refuses_what_it_does_not_understand() {
    assert_eq!(Params::parse("seed=1 sede=2"), Err(BadWord("sede=2")));
    assert_eq!(Params::parse("seed=x"), Err(BadWord("seed=x")));
    assert_eq!(Params::parse("ws_area=none"), Err(BadWord("ws_area=none")));
    assert_eq!(Params::parse("quiet"), Err(BadWord("quiet")));
}

#[test]
fn needed_memory_counts_the_initrd_and_its_copies() {
    let config = PayloadConfig::default().private_mib(10).zero_mib(10).copies(2);
    let initrd = 20 << 20;

    assert!((80..90).contains(&config.needed_mib(initrd)));
    assert_eq!(config.check_fits(128, initrd), Ok(()));
    assert!(matches!(
        config.check_fits(64, initrd),
        Err(ConfigError::MemoryTooSmall { memory_mib: 64, .. })
    ));
}

#[test]
fn random_pages_depend_on_seed_and_index_only() {
    let page = |seed, index| {
        let mut page = [0; content::WORDS];
        content::fill_random(&mut page, seed, index);
        page
    };

    assert_eq!(page(1, 2), page(1, 2));
    assert_ne!(page(1, 2), page(2, 1));
    assert_ne!(content::checksum(&page(1, 2)), content::checksum(&page(1, 3)));
}

#[test]
fn a_write_changes_the_counter_and_the_marks_and_nothing_else() {
    let mut page = [5; content::WORDS];
    let (counter, marks) = content::places(77);

    content::apply_writes(&mut page, 1, 77, 3);

    let changed: Vec<usize> = (0..content::WORDS).filter(|word| page[*word] != 5).collect();
    let mut expected = vec![counter];
    expected.extend(marks);
    expected.sort_unstable();
    assert_eq!(changed, expected);
    assert_eq!(page[counter], 8);
}

#[test]
fn checksum_sees_a_single_bit() {
    let mut page = [0; content::WORDS];
    let before = content::checksum(&page);

    page[511] = 1 << 63;

    assert_ne!(content::checksum(&page), before);
}

#[test]
fn reports_are_read_back() {
    let output = "SeaBIOS\n@payload ready pages=9 files=4 private=3 zero=2 common=0 ws=9 tsc_khz=2100000\r\n\
        @payload tick ms=502 writes=40 reads=41 restores=3 rounds=1 errors=0 max_cycles=197418\n\
        @payload bad page=3 word=7 want=0x10 got=0xffffffffffffffff\n\
        @payload balloon pages=512 stale=0\n\
        @payload latency kind=write max=99 histogram=4:2,6:1\n\
        @payload latency kind=read max=0 histogram=-\n\
        @payload verify pages=9 errors=1 writes=40\n\
        @payload done status=bad\n";

    let reports = Report::parse_all(output).expect("all lines are whole");

    assert_eq!(reports.len(), 8);
    assert_eq!(
        reports[2],
        Report::Bad {
            page: 3,
            word: Some(7),
            want: 16,
            got: u64::MAX
        }
    );
    assert_eq!(reports[3], Report::Balloon { pages: 512, stale: 0 });
    assert_eq!(
        reports[4],
        Report::Latency {
            kind: Access::Write,
            max: 99,
            histogram: vec![(4, 2), (6, 1)]
        }
    );
    assert_eq!(reports[7], Report::Done { ok: false });
}

#[test]
fn damaged_reports_are_errors_that_name_the_line() {
    let cut = Report::parse("@payload verify pages=9 err").expect_err("a field is missing");
    assert!(cut.to_string().contains("errors is missing"), "{cut}");

    let unknown = Report::parse("@payload dance").expect_err("there is no such event");
    assert!(unknown.to_string().contains("unknown event dance"), "{unknown}");

    assert_eq!(Report::parse("Linux version 6.1"), Ok(None));
}

#[test]
fn console_wakes_a_waiting_thread() {
    let console = Console::new();
    let mut serial = console.clone();

    let writer = std::thread::spawn(move || {
        serial
            .write_all(b"noise\n@payload do")
            .and_then(|()| serial.write_all(b"ne status=ok\n"))
    });

    assert!(console.wait_done(Duration::from_secs(10)).expect("done comes"));
    writer
        .join()
        .expect("the writer does not panic")
        .expect("writing to memory works");
}

#[test]
fn console_tells_an_early_end_from_a_timeout() {
    let console = Console::new();
    let soon = Duration::from_millis(1);
    assert!(matches!(console.wait_ready(soon), Err(WaitError::Timeout { .. })));

    console
        .clone()
        .write_all(b"@payload fail reason=memory\n@payload done status=bad\n")
        .expect("in memory");

    assert!(matches!(console.wait_ready(soon), Err(WaitError::Ended { .. })));
    assert!(!console.wait_done(soon).expect("done came"));
}

#[test]
fn image_is_an_elf_with_a_pvh_note() {
    assert_eq!(&crate::ELF[..4], b"\x7fELF");
    let note = [4u8, 0, 0, 0, 8, 0, 0, 0, 18, 0, 0, 0, b'X', b'e', b'n', 0];
    assert!(crate::ELF.windows(note.len()).any(|window| window == note));
}
